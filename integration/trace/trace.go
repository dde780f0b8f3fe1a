// Package trace reads request traces in the format of the public Mooncake
// traces: one JSON object a line, in the order of time,
//
//	{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}
//
// timestamp is milliseconds since the start of the trace, lengths are tokens, and
// there is one hash id for each 512 tokens of the prompt, begun ones included.
// Requests with equal ids at equal positions have equal prefixes.
package trace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/integration/model"
)

// BlockTokens is how many tokens of a prompt a hash id stands for.
const BlockTokens = 512

// Limits of a line.
const (
	maxLine   = 16 << 20 // bytes
	maxTokens = 1 << 26
)

// ErrFormat: a line is no request. The text says which line, and why.
var ErrFormat = errors.New("trace: not a request")

// Request is one request of a trace.
type Request struct {
	At           time.Duration // since the start of the trace
	InputLength  int           // tokens of the prompt
	OutputLength int           // tokens that were generated
	HashIDs      []uint64      // one for each BlockTokens tokens of the prompt
}

// Read reads a whole trace. The error wraps ErrFormat or is that of r; what was
// read before it is returned too.
func Read(r io.Reader) ([]Request, error) {
	var out []Request
	for req, err := range All(r) {
		if err != nil {
			return out, err
		}
		out = append(out, req)
	}
	return out, nil
}

// All reads a trace a request at a time, in constant memory. It ends with the
// first error, which wraps ErrFormat or is that of r. Empty lines are skipped.
func All(r io.Reader) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 64<<10), maxLine)
		for number := 1; lines.Scan(); number++ {
			if len(lines.Bytes()) == 0 {
				continue
			}
			req, err := parse(lines.Bytes())
			if err != nil {
				yield(Request{}, fmt.Errorf("%w: line %d: %w", ErrFormat, number, err))
				return
			}
			if !yield(req, nil) {
				return
			}
		}
		if err := lines.Err(); err != nil {
			yield(Request{}, fmt.Errorf("trace: %w", err))
		}
	}
}

// parse reads one line.
func parse(line []byte) (Request, error) {
	var l struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  int      `json:"input_length"`
		OutputLength int      `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return Request{}, err
	}
	most := float64(math.MaxInt64 / int64(time.Millisecond))
	switch {
	case l.Timestamp == nil || *l.Timestamp < 0 || *l.Timestamp >= most:
		return Request{}, errors.New("timestamp is missing or out of range")
	case l.InputLength < 0 || l.InputLength > maxTokens || l.OutputLength < 0 || l.OutputLength > maxTokens:
		return Request{}, fmt.Errorf("input_length %d or output_length %d is out of range", l.InputLength, l.OutputLength)
	case (l.InputLength+BlockTokens-1)/BlockTokens != len(l.HashIDs):
		return Request{}, fmt.Errorf("%d hash_ids for an input_length of %d, want one for each %d tokens", len(l.HashIDs), l.InputLength, BlockTokens)
	}
	at := time.Duration(*l.Timestamp * float64(time.Millisecond))
	return Request{At: at, InputLength: l.InputLength, OutputLength: l.OutputLength, HashIDs: l.HashIDs}, nil
}

// AppendLocals appends local hashes of the prompt's blocks to dst: each hash id
// is BlockTokens/blockSize blocks, the last one too. Equal ids have equal blocks.
// blockSize divides BlockTokens.
func (r *Request) AppendLocals(dst []uint64, blockSize int) []uint64 {
	per := BlockTokens / blockSize
	dst = slices.Grow(dst, len(r.HashIDs)*per)
	for _, id := range r.HashIDs {
		for i := range per {
			dst = append(dst, model.Mix(model.Mix(id)+uint64(i)))
		}
	}
	return dst
}

// AppendTokens appends a prompt of InputLength tokens to dst, each less than
// vocab. Equal ids have equal tokens.
func (r *Request) AppendTokens(dst []uint32, vocab uint32) []uint32 {
	left := r.InputLength
	dst = slices.Grow(dst, left)
	for _, id := range r.HashIDs {
		base := model.Mix(id)
		for i := range min(left, BlockTokens) {
			dst = append(dst, uint32(model.Mix(base+uint64(i))%uint64(vocab)))
		}
		left -= min(left, BlockTokens)
	}
	return dst
}

// Shifted returns the request with by added to its hash ids: by more than any id
// of the trace makes it one of a disjoint copy.
func (r *Request) Shifted(by uint64) Request {
	out := *r
	out.HashIDs = make([]uint64, len(r.HashIDs))
	for i, id := range r.HashIDs {
		out.HashIDs[i] = id + by
	}
	return out
}

// IDs returns a number that is greater than every hash id of the requests.
func IDs(requests []Request) uint64 {
	n := uint64(0)
	for i := range requests {
		for _, id := range requests[i].HashIDs {
			n = max(n, id+1)
		}
	}
	return n
}
