package feed

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// ErrRecord: a message of the log is no record.
var ErrRecord = errors.New("feed: not a record")

// record is a message of the log.
type record struct {
	incarnation uint64
	batches     bool // first and last are there
	first, last uint64
	ts          float64
	ops         []op
	fingerprint uint64
	partial     bool
}

// op is an operation: its kind and what follows.
type op struct {
	kind uint64
	args []any
}

// Kinds of operations, as docs/record.md numbers them.
const (
	stored     = 1
	removed    = 2
	cleared    = 3
	reset      = 4
	gap        = 5
	digest     = 6
	checkpoint = 7
	retired    = 8
	copies     = 9
	parked     = 10
	publisher  = 12
	gaps       = 14
)

// decode takes a message apart. What it says is not looked at.
func decode(data []byte) (r record, err error) {
	// The library below allocates what a length says. The walker knows better.
	walk := mpack.NewReader(data)
	walk.Skip()
	if err := walk.Err(); err != nil {
		return record{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	if rest := len(data) - walk.Offset(); rest != 0 {
		return record{}, fmt.Errorf("%w: %d bytes behind it", ErrRecord, rest)
	}
	value, err := msgpack.NewDecoder(bytes.NewReader(data)).DecodeInterface()
	if err != nil {
		return record{}, fmt.Errorf("%w: %w", ErrRecord, err)
	}
	defer func() { // a value of another type than the page says
		if p := recover(); p != nil {
			r, err = record{}, fmt.Errorf("%w: %v", ErrRecord, p)
		}
	}()
	list := value.([]any)
	if version := number(list[0]); version != 1 {
		return record{}, fmt.Errorf("%w: version %d", ErrRecord, version)
	}
	r = record{incarnation: number(list[1]), ts: list[4].(float64), fingerprint: number(list[6]), partial: list[7].(bool)}
	if list[3] != nil {
		r.batches, r.first, r.last = true, number(list[2]), number(list[3])
	} else if list[2] != nil {
		return record{}, fmt.Errorf("%w: a first batch without a last one", ErrRecord)
	}
	for _, v := range list[5].([]any) {
		o := v.([]any)
		r.ops = append(r.ops, op{number(o[0]), o[1:]})
	}
	return r, nil
}

// number returns an unsigned integer. It panics if v is none.
func number(v any) uint64 {
	switch n := reflect.ValueOf(v); {
	case n.CanUint():
		return n.Uint()
	case n.CanInt() && n.Int() >= 0:
		return uint64(n.Int())
	}
	panic(fmt.Sprintf("%v (%T) where an unsigned integer should be", v, v))
}

// hashes returns the integers of a binary of packed ones.
func hashes(v any) []uint64 {
	b := v.([]byte)
	if len(b)%8 != 0 {
		panic(fmt.Sprintf("%d bytes where packed hashes should be", len(b)))
	}
	var out []uint64
	for ; len(b) > 0; b = b[8:] {
		out = append(out, binary.LittleEndian.Uint64(b))
	}
	return out
}
