package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// packed is a cursor over a body in MessagePack. Where an array of integers is
// wanted, a binary of little-endian ones will do.
type packed struct{ mpack.Reader }

func (r *packed) object() (n int, ok bool) {
	if r.Next() != mpack.KindMap {
		return 0, false
	}
	return r.Map(), true
}

func (r *packed) array() (n int, ok bool) {
	if r.Next() != mpack.KindArray {
		return 0, false
	}
	return r.Array(), true
}

func (r *packed) next(i, n int, _ byte) bool { return i < n && r.Err() == nil }

// key returns the name of a member; one that is no string names nothing.
func (r *packed) key() []byte {
	if r.Next() != mpack.KindStr {
		r.Skip()
		return nil
	}
	return r.Str()
}

func (r *packed) null() bool { return r.Nil() }
func (r *packed) skip()      { r.Skip() }

func (r *packed) text() (v []byte, ok bool) {
	if r.Next() != mpack.KindStr {
		return nil, false
	}
	return r.Str(), true
}

func (r *packed) uint() (v uint64, ok bool) {
	if r.Next() != mpack.KindInt {
		return 0, false
	}
	before := *r
	v, negative := r.Bits()
	if negative {
		*r = before
	}
	return v, !negative
}

func (r *packed) tokens(dst []uint32) ([]uint32, error) {
	before := *r
	switch r.Next() {
	case mpack.KindBin:
		b := r.Bin()
		if len(b)%4 != 0 {
			*r = before
			return dst, fmt.Errorf("a binary of %d bytes, want 4 a token", len(b))
		}
		dst = slices.Grow(dst, len(b)/4)
		for ; len(b) > 0; b = b[4:] {
			dst = append(dst, binary.LittleEndian.Uint32(b))
		}
	case mpack.KindArray:
		from := len(dst)
		dst = r.AppendUint32s(dst, r.Array())
		if errors.Is(r.Err(), mpack.ErrType) {
			*r = before
			return dst, fmt.Errorf("element %d is no integer from 0 to %d", len(dst)-from, uint32(math.MaxUint32))
		}
	default:
		return dst, errArray
	}
	return dst, nil
}

func (r *packed) hashes(dst []uint64) ([]uint64, error) {
	before := *r
	switch r.Next() {
	case mpack.KindBin:
		b := r.Bin()
		if len(b)%8 != 0 {
			*r = before
			return dst, fmt.Errorf("a binary of %d bytes, want 8 a hash", len(b))
		}
		dst = appendHashes(dst, b)
	case mpack.KindArray:
		for i, n := 0, r.Array(); r.next(i, n, 0); i++ {
			ok := false
			v := uint64(0)
			switch r.Next() {
			case mpack.KindInt:
				v, _ = r.Bits()
				ok = true
			case mpack.KindStr:
				v, ok = parseBits(r.Str())
			}
			if !ok && r.Err() == nil {
				*r = before
				return dst, fmt.Errorf("element %d is no integer of 64 bits", i)
			}
			dst = append(dst, v)
		}
	default:
		return dst, errArray
	}
	return dst, nil
}

func (r *packed) seqs(dst []uint64) ([]uint64, error) { return appendUints(dst, r) }

// appendHashes appends little-endian u64 hashes.
func appendHashes(dst []uint64, b []byte) []uint64 {
	dst = slices.Grow(dst, len(b)/8)
	for ; len(b) >= 8; b = b[8:] {
		dst = append(dst, binary.LittleEndian.Uint64(b))
	}
	return dst
}

func (r *packed) end() error {
	if err := r.Err(); err != nil {
		return fmt.Errorf("%w: the MessagePack can't be read at byte %d: %w", errRequest, r.Offset(), err)
	}
	if r.Len() > 0 {
		return fmt.Errorf("%w: %d bytes behind the MessagePack", errRequest, r.Len())
	}
	return nil
}
