package serve

import (
	"bytes"
	"fmt"
	"strconv"
	"sync"

	"github.com/kvmesh/kvmesh/replica/selection"
)

// arrays are the long members of a body, which are read by hand: a prompt of
// 2,048 tokens is 12 KB of JSON, and encoding/json takes longer for it than a
// selection does. What is left is a small object, for encoding/json.
type arrays struct {
	tokens    []uint32
	hashes    []uint64
	sequences []uint64
	has       struct{ tokens, hashes, sequences bool }
	rest      []byte
	body      []byte
}

// arraysPool keeps the memory of bodies.
type arraysPool struct{ pool sync.Pool }

func (p *arraysPool) get() *arrays {
	if a, ok := p.pool.Get().(*arrays); ok {
		return a
	}
	return &arrays{}
}

func (p *arraysPool) put(a *arrays) {
	const most = 1 << 20 // of a body that is kept
	if cap(a.body) <= most {
		p.pool.Put(a)
	}
}

// split takes the long members out of a JSON object.
func (a *arrays) split(b []byte) error {
	a.tokens, a.hashes, a.sequences, a.rest = a.tokens[:0], a.hashes[:0], a.sequences[:0], a.rest[:0]
	a.has.tokens, a.has.hashes, a.has.sequences = false, false, false
	s := cursor{b: b}
	if s.peek() != '{' {
		return fmt.Errorf("%w: the body is no JSON object", selection.ErrRequest)
	}
	s.at++
	from := 0 // of what is left
	for s.peek() == '"' {
		key := s.str()
		if s.peek() != ':' {
			break
		}
		s.at++
		var err error
		start := s.at
		switch string(key) {
		case `"token_ids"`:
			a.tokens = a.tokens[:0]
			a.has.tokens, err = numbers(&s, func(v uint64, negative bool) bool {
				a.tokens = append(a.tokens, uint32(v))
				return !negative && v < 1<<32
			})
		case `"block_hashes"`:
			a.hashes = a.hashes[:0]
			a.has.hashes, err = numbers(&s, func(v uint64, _ bool) bool { a.hashes = append(a.hashes, v); return true })
		case `"sequence_hashes"`:
			a.sequences = a.sequences[:0]
			a.has.sequences, err = numbers(&s, func(v uint64, _ bool) bool { a.sequences = append(a.sequences, v); return true })
		default:
			s.skip()
			start = -1
		}
		if err != nil {
			return fmt.Errorf("%w: %s: %w", selection.ErrRequest, bytes.Trim(key, `"`), err)
		}
		if start >= 0 {
			a.rest = append(append(a.rest, b[from:start]...), "null"...)
			from = s.at
		}
		if s.peek() != ',' {
			break
		}
		s.at++
	}
	a.rest = append(a.rest, b[min(from, len(b)):]...) // encoding/json finds what is wrong with it
	return nil
}

// cursor reads JSON as far as is needed to find its members. It goes wrong where
// the JSON is wrong, and never past its end.
type cursor struct {
	b  []byte
	at int
}

func (s *cursor) peek() byte {
	for ; s.at < len(s.b); s.at++ {
		if c := s.b[s.at]; c != ' ' && c != '\n' && c != '\t' && c != '\r' {
			return c
		}
	}
	return 0
}

// str reads a string, with its quotes.
func (s *cursor) str() []byte {
	start := s.at
	for s.at++; s.at < len(s.b); s.at++ {
		switch s.b[s.at] {
		case '\\':
			s.at++
		case '"':
			s.at++
			return s.b[start:s.at]
		}
	}
	s.at = len(s.b)
	return s.b[start:]
}

// skip reads a value.
func (s *cursor) skip() {
	for depth := 0; s.peek() != 0; {
		switch c := s.b[s.at]; c {
		case '"':
			s.str()
		case '[', '{':
			depth++
			s.at++
			continue
		case ']', '}':
			if depth--; depth < 0 {
				return
			}
			s.at++
		case ',', ':':
			if depth == 0 {
				return
			}
			s.at++
			continue
		default:
			for s.at++; s.at < len(s.b) && !bytes.ContainsRune([]byte(",:]}[{\" \n\t\r"), rune(s.b[s.at])); s.at++ {
			}
		}
		if depth == 0 {
			return
		}
	}
}

// numbers reads an array of integers of 64 bits, signed or unsigned, or decimal
// strings of such, and calls add with each as unsigned, which tells whether it
// fits. null is no array.
func numbers(s *cursor, add func(v uint64, negative bool) bool) (there bool, err error) {
	switch s.peek() {
	case 'n':
		s.skip()
		return false, nil
	case '[':
		s.at++
	default:
		return false, fmt.Errorf("want an array of integers")
	}
	if s.peek() == ']' {
		s.at++
		return true, nil
	}
	for {
		c := s.peek()
		quoted := c == '"'
		if quoted {
			s.at++
		}
		start := s.at
		negative := s.at < len(s.b) && s.b[s.at] == '-'
		if negative {
			s.at++
		}
		digits := s.at
		v := uint64(0)
		for s.at < len(s.b) && s.b[s.at]-'0' <= 9 {
			v = v*10 + uint64(s.b[s.at]-'0')
			s.at++
		}
		n := s.at - digits
		if n == 0 || n > 1 && s.b[digits] == '0' {
			return false, fmt.Errorf("no integer at byte %d", start)
		}
		if n > 18 { // it may not have fitted
			text := string(s.b[digits:s.at])
			var e error
			if negative {
				var signed int64
				signed, e = strconv.ParseInt("-"+text, 10, 64)
				v = -uint64(signed)
			} else {
				v, e = strconv.ParseUint(text, 10, 64)
			}
			if e != nil {
				return false, fmt.Errorf("%.40s has more than 64 bits", text)
			}
		}
		if negative {
			v = -v
		}
		if quoted {
			if s.at >= len(s.b) || s.b[s.at] != '"' {
				return false, fmt.Errorf("no integer at byte %d", start)
			}
			s.at++
		}
		if !add(v, negative) {
			return false, fmt.Errorf("the integer at byte %d is not in the range", start)
		}
		switch s.peek() {
		case ',':
			s.at++
		case ']':
			s.at++
			return true, nil
		default:
			return false, fmt.Errorf("no comma or ] at byte %d", s.at)
		}
	}
}
