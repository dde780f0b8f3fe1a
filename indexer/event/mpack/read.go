// Package mpack walks and writes MessagePack without reflection, boxing or
// trust.
//
// A Reader is a cursor over bytes that may come from anyone. It allocates
// nothing: strings and binaries are views into the input, and a length that the
// remaining bytes can't hold is an error before anything is made of it. Its
// error is sticky, so a caller reads on and checks once. The Append functions
// are the other direction.
package mpack

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
)

// Errors of a Reader. They carry no position, so that reading bad input costs
// no allocation.
var (
	// ErrTruncated: the input ends inside a value, or announces more elements
	// than its remaining bytes can hold.
	ErrTruncated = errors.New("mpack: truncated")
	// ErrType: the next value is of another type than the caller asked for, or
	// an integer is out of the range asked for.
	ErrType = errors.New("mpack: unexpected type")
	// ErrDepth: values are nested deeper than MaxDepth.
	ErrDepth = errors.New("mpack: nested too deeply")
	// ErrReserved: the input holds the one byte, 0xc1, that starts no value.
	ErrReserved = errors.New("mpack: reserved byte")
)

// MaxDepth is how deep Skip follows nested arrays and maps.
const MaxDepth = 64

// Kind is the type of a value on the wire.
type Kind uint8

// Kinds of values. KindEnd is what follows the last value, and what a Reader
// with an error is at.
const (
	KindEnd Kind = iota
	KindNil
	KindBool
	KindInt
	KindFloat
	KindStr
	KindBin
	KindArray
	KindMap
	KindExt
	KindReserved
)

// Reader is a cursor over MessagePack values. The zero Reader is at the end of
// no input. A Reader is a value: copying one saves a position to come back to.
type Reader struct {
	b   []byte
	at  int
	err error
}

// NewReader returns a Reader at the first byte of b. It keeps b; strings and
// binaries that it returns are views into b.
func NewReader(b []byte) Reader { return Reader{b: b} }

// Err returns the first error, nil if there was none.
func (r *Reader) Err() error { return r.err }

// Offset returns how many bytes have been read.
func (r *Reader) Offset() int { return r.at }

// Len returns how many bytes are left.
func (r *Reader) Len() int { return len(r.b) - r.at }

// View returns the next n bytes, whatever they hold, and moves behind them.
func (r *Reader) View(n int) []byte { return r.take(n) }

// Fail makes err the Reader's error, unless it has one already. Every later
// read returns a zero value.
func (r *Reader) Fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

// Next returns the kind of the next value without reading it.
func (r *Reader) Next() Kind {
	if r.err != nil || r.at >= len(r.b) {
		return KindEnd
	}
	switch c := r.b[r.at]; {
	case c <= 0x7f || c >= 0xe0 || (c >= 0xcc && c <= 0xd3):
		return KindInt
	case c <= 0x8f || c == 0xde || c == 0xdf:
		return KindMap
	case c <= 0x9f || c == 0xdc || c == 0xdd:
		return KindArray
	case c <= 0xbf || (c >= 0xd9 && c <= 0xdb):
		return KindStr
	case c == 0xc0:
		return KindNil
	case c == 0xc2 || c == 0xc3:
		return KindBool
	case c >= 0xc4 && c <= 0xc6:
		return KindBin
	case c == 0xca || c == 0xcb:
		return KindFloat
	case c == 0xc1:
		return KindReserved
	default:
		return KindExt
	}
}

// take returns the next n bytes and moves behind them.
func (r *Reader) take(n int) []byte {
	if r.err != nil || n > len(r.b)-r.at || n < 0 {
		r.Fail(ErrTruncated)
		return nil
	}
	b := r.b[r.at : r.at+n : r.at+n]
	r.at += n
	return b
}

// head reads the type byte of the next value; 0xc1 where there is none.
func (r *Reader) head() byte {
	if r.err != nil {
		return 0xc1
	}
	if r.at >= len(r.b) {
		r.err = ErrTruncated
		return 0xc1
	}
	c := r.b[r.at]
	r.at++
	return c
}

// be reads an unsigned big-endian integer of n bytes.
func (r *Reader) be(n int) uint64 {
	b := r.take(n)
	switch len(b) {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.BigEndian.Uint16(b))
	case 4:
		return uint64(binary.BigEndian.Uint32(b))
	case 8:
		return binary.BigEndian.Uint64(b)
	}
	return 0
}

// Nil reads a nil if the next value is one, and tells whether it was.
func (r *Reader) Nil() bool {
	if r.err == nil && r.at < len(r.b) && r.b[r.at] == 0xc0 {
		r.at++
		return true
	}
	return false
}

// Bool reads a boolean.
func (r *Reader) Bool() bool {
	switch r.head() {
	case 0xc2:
		return false
	case 0xc3:
		return true
	}
	r.Fail(ErrType)
	return false
}

// Bits reads an integer as a 64-bit pattern, and whether the pattern is that of
// a negative number. Signed and unsigned encodings of one pattern are equal.
func (r *Reader) Bits() (bits uint64, negative bool) {
	// The form of nearly every hash is read without a call.
	if r.err == nil && len(r.b)-r.at >= 9 && r.b[r.at] == 0xcf {
		bits = binary.BigEndian.Uint64(r.b[r.at+1:])
		r.at += 9
		return bits, false
	}
	c := r.head()
	switch {
	case c <= 0x7f:
		return uint64(c), false
	case c >= 0xe0:
		return uint64(int64(int8(c))), true
	}
	switch c {
	case 0xcc:
		return r.be(1), false
	case 0xcd:
		return r.be(2), false
	case 0xce:
		return r.be(4), false
	case 0xcf:
		return r.be(8), false
	case 0xd0:
		bits = uint64(int64(int8(r.be(1))))
	case 0xd1:
		bits = uint64(int64(int16(r.be(2))))
	case 0xd2:
		bits = uint64(int64(int32(r.be(4))))
	case 0xd3:
		bits = r.be(8)
	default:
		r.Fail(ErrType)
		return 0, false
	}
	return bits, int64(bits) < 0
}

// Uint reads a non-negative integer.
func (r *Reader) Uint() uint64 {
	v, negative := r.Bits()
	if negative {
		r.Fail(ErrType)
		return 0
	}
	return v
}

// Uint32 reads an integer from 0 to 2^32-1.
func (r *Reader) Uint32() uint32 {
	v := r.Uint()
	if v > math.MaxUint32 {
		r.Fail(ErrType)
		return 0
	}
	return uint32(v)
}

// AppendUint32s reads n integers from 0 to 2^32-1 and appends them to dst. It
// grows dst by at most n, and by nothing if the bytes left can't hold n values.
// After an error dst holds what was read before it.
func (r *Reader) AppendUint32s(dst []uint32, n int) []uint32 {
	if r.fits(uint64(n), 1) != n {
		return dst
	}
	dst = slices.Grow(dst, n)
	from := len(dst)
	out := dst[from : from+n]
	b, at := r.b, r.at
	for i := range out {
		// Token ids come through here by the thousand, 16 and 32 bits wide in
		// no order that a branch predictor could learn: both widths take one
		// path. Measured on ids below 128,000: 3.5 µs a thousand against 6.5.
		if len(b)-at >= 5 {
			p := b[at : at+5 : at+5]
			c := p[0]
			if wide := uint(c - 0xcd); wide <= 1 {
				out[i] = binary.BigEndian.Uint32(p[1:]) >> (16 - 16*wide)
				at += 3 + 2*int(wide)
				continue
			}
			if c <= 0x7f {
				out[i] = uint32(c)
				at++
				continue
			}
		}
		r.at = at
		v := r.Uint32()
		if r.err != nil {
			return dst[:from+i]
		}
		out[i] = v
		at = r.at
	}
	r.at = at
	return dst[:from+n]
}

// Int reads an integer that fits int64.
func (r *Reader) Int() int64 {
	v, negative := r.Bits()
	if !negative && v > math.MaxInt64 {
		r.Fail(ErrType)
		return 0
	}
	return int64(v)
}

// Number reads an integer or a float as a float64.
func (r *Reader) Number() float64 {
	if r.Next() == KindFloat {
		if r.head() == 0xca {
			return float64(math.Float32frombits(uint32(r.be(4))))
		}
		return math.Float64frombits(r.be(8))
	}
	v, negative := r.Bits()
	if negative {
		return float64(int64(v))
	}
	return float64(v)
}

// Str reads a string; the result is a view into the input.
func (r *Reader) Str() []byte {
	c := r.head()
	switch {
	case c >= 0xa0 && c <= 0xbf:
		return r.take(int(c & 0x1f))
	case c >= 0xd9 && c <= 0xdb:
		return r.view(r.be(1 << (c - 0xd9)))
	}
	r.Fail(ErrType)
	return nil
}

// Bin reads a binary; the result is a view into the input.
func (r *Reader) Bin() []byte {
	c := r.head()
	if c < 0xc4 || c > 0xc6 {
		r.Fail(ErrType)
		return nil
	}
	return r.view(r.be(1 << (c - 0xc4)))
}

func (r *Reader) view(n uint64) []byte {
	if n > uint64(r.Len()) {
		r.Fail(ErrTruncated)
		return nil
	}
	return r.take(int(n))
}

// Array reads the head of an array and returns its number of elements, which is
// never more than the bytes left.
func (r *Reader) Array() int {
	c := r.head()
	switch {
	case c >= 0x90 && c <= 0x9f:
		return r.fits(uint64(c&0x0f), 1)
	case c == 0xdc || c == 0xdd:
		return r.fits(r.be(2<<(c-0xdc)), 1)
	}
	r.Fail(ErrType)
	return 0
}

// Map reads the head of a map and returns its number of pairs, which is never
// more than half of the bytes left.
func (r *Reader) Map() int {
	c := r.head()
	switch {
	case c >= 0x80 && c <= 0x8f:
		return r.fits(uint64(c&0x0f), 2)
	case c == 0xde || c == 0xdf:
		return r.fits(r.be(2<<(c-0xde)), 2)
	}
	r.Fail(ErrType)
	return 0
}

// fits checks that n elements of at least size bytes can follow.
func (r *Reader) fits(n, size uint64) int {
	if r.err != nil {
		return 0
	}
	if n > uint64(r.Len())/size {
		r.err = ErrTruncated
		return 0
	}
	return int(n)
}

// Skip moves behind the next value, whatever it is. It does not recurse.
func (r *Reader) Skip() {
	if n := r.skipHead(); n > 0 {
		r.skipInside(n)
	}
}

// skipInside moves behind the n values of an array or a map.
func (r *Reader) skipInside(n int) {
	var left [MaxDepth]int // values still to skip on each open level
	left[1] = n
	for depth := 1; depth > 0 && r.err == nil; {
		for left[depth] > 0 && r.at < len(r.b) && isByte(r.b[r.at]) {
			r.at++
			left[depth]--
		}
		if left[depth] == 0 {
			depth--
			continue
		}
		left[depth]--
		n := r.skipHead()
		if n == 0 {
			continue
		}
		if depth++; depth == MaxDepth {
			r.Fail(ErrDepth)
			return
		}
		left[depth] = n
	}
}

// isByte reports whether a value that starts with c has no other byte.
func isByte(c byte) bool {
	return c <= 0x7f || c >= 0xe0 || c == 0xc0 || c == 0xc2 || c == 0xc3
}

// skipHead moves behind a scalar, or into a container and returns how many
// values that holds.
func (r *Reader) skipHead() int {
	switch r.Next() {
	case KindArray:
		return r.Array()
	case KindMap:
		return 2 * r.Map()
	case KindStr:
		r.Str()
	case KindBin:
		r.Bin()
	case KindInt:
		r.Bits()
	case KindFloat:
		r.Number()
	case KindNil, KindBool:
		r.at++
	case KindExt:
		r.skipExt()
	case KindReserved:
		r.Fail(ErrReserved)
	default:
		r.Fail(ErrTruncated)
	}
	return 0
}

func (r *Reader) skipExt() {
	c := r.head()
	if c >= 0xd4 && c <= 0xd8 { // fixext: a type byte, then 1 to 16 bytes
		r.take(1 + 1<<(c-0xd4))
		return
	}
	n := r.be(1 << (c - 0xc7))
	r.take(1)
	r.view(n)
}
