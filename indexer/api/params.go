package api

import (
	"bytes"
	"errors"
	"fmt"
)

// params is a cursor over the parameters of a URL: an object of texts. It decodes
// them where they are.
type params struct {
	buf  []byte // all of them
	rest []byte // what has not been read
	name []byte
	val  []byte // of the parameter that the cursor is at
	err  error
}

var errElsewhere = errors.New("can't be in the URL")

func (q *params) object() (n int, ok bool) { return 0, true }
func (q *params) array() (n int, ok bool)  { return 0, false }
func (q *params) null() bool               { return false }
func (q *params) skip()                    {}
func (q *params) end() error               { return q.err }

func (q *params) next(int, int, byte) bool {
	for len(q.rest) > 0 && q.err == nil {
		pair, rest, _ := bytes.Cut(q.rest, []byte{'&'})
		q.rest = rest
		if len(pair) == 0 {
			continue
		}
		name, val, _ := bytes.Cut(pair, []byte{'='})
		q.name, q.val = q.unescape(name), q.unescape(val)
		return q.err == nil
	}
	return false
}

func (q *params) key() []byte { return q.name }

func (q *params) text() (v []byte, ok bool) { return q.val, true }

func (q *params) uint() (v uint64, ok bool) { return parseUint(q.val) }

func (q *params) tokens(dst []uint32) ([]uint32, error) { return dst, errElsewhere }
func (q *params) hashes(dst []uint64) ([]uint64, error) { return dst, errElsewhere }

// seqs reads integers that are separated by commas.
func (q *params) seqs(dst []uint64) ([]uint64, error) {
	for rest, more := q.val, len(q.val) > 0; more; {
		var one []byte
		one, rest, more = bytes.Cut(rest, []byte{','})
		seq, ok := parseUint(one)
		if !ok {
			return dst, fmt.Errorf("%.40q: %w", one, errUint)
		}
		dst = append(dst, seq)
	}
	return dst, nil
}

// unescape undoes the escapes of a form in place.
func (q *params) unescape(b []byte) []byte {
	out := b[:0]
	for i := 0; i < len(b); i++ {
		c := b[i]
		switch c {
		case '+':
			c = ' '
		case '%':
			if i+2 >= len(b) || !isHex(b[i+1]) || !isHex(b[i+2]) {
				q.err = fmt.Errorf("%w: the URL has a bad escape in %.40q", errRequest, b)
				return nil
			}
			c = unhex(b[i+1])<<4 | unhex(b[i+2])
			i += 2
		}
		out = append(out, c)
	}
	return out
}

func unhex(c byte) byte {
	if isDigit(c) {
		return c - '0'
	}
	return c | 0x20 - 'a' + 10
}
