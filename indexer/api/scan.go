package api

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"unicode/utf8"
)

// maxDepth is how deep members that nobody asked for may be nested.
const maxDepth = 64

// scanner is a cursor over a body in JSON. It takes what RFC 8259 takes, and
// nothing else. Strings that it returns are views into the body unless they have
// escapes.
type scanner struct {
	b   []byte
	at  int
	err error
}

// fail notes that something else was wanted at the cursor.
func (s *scanner) fail(want string) {
	if s.err != nil {
		return
	}
	if s.at >= len(s.b) {
		s.err = fmt.Errorf("%w: the JSON ends at byte %d, want %s", errRequest, s.at, want)
	} else {
		s.err = fmt.Errorf("%w: no JSON at byte %d: %q, want %s", errRequest, s.at, s.b[s.at], want)
	}
}

// peek moves to the next byte that is no white space and returns it without
// reading it: 0 at the end and after an error.
func (s *scanner) peek() byte {
	if s.err != nil {
		return 0
	}
	for ; s.at < len(s.b); s.at++ {
		if c := s.b[s.at]; c > ' ' || !isSpace(c) {
			return c
		}
	}
	return 0
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }
func isDigit(c byte) bool { return c-'0' <= 9 }
func isHex(c byte) bool   { return isDigit(c) || c|0x20 >= 'a' && c|0x20 <= 'f' }

// open reads a bracket if it is what comes next.
func (s *scanner) open(bracket byte) bool {
	if s.peek() != bracket {
		return false
	}
	s.at++
	return true
}

func (s *scanner) object() (n int, ok bool) { return 0, s.open('{') }
func (s *scanner) array() (n int, ok bool)  { return 0, s.open('[') }

// next needs no n: a bracket ends an object or array.
func (s *scanner) next(i, _ int, bracket byte) bool {
	switch c := s.peek(); {
	case c == bracket:
		s.at++
		return false
	case i == 0:
		return s.err == nil
	case c == ',':
		s.at++
		return true
	}
	s.fail("a comma or " + string(rune(bracket)))
	return false
}

// key reads the name of a member and its colon.
func (s *scanner) key() []byte {
	if s.peek() != '"' {
		s.fail("the name of a member")
		return nil
	}
	name := s.str()
	if s.peek() != ':' {
		s.fail("a colon")
		return nil
	}
	s.at++
	return name
}

// str reads the string that the cursor is at.
func (s *scanner) str() []byte {
	from := s.at
	if !s.skipString() {
		return nil
	}
	text := s.b[from+1 : s.at-1]
	if plain(text) {
		return text
	}
	var v string
	if err := json.Unmarshal(s.b[from:s.at], &v); err != nil {
		s.err = fmt.Errorf("%w: the string at byte %d: %w", errRequest, from, err)
	}
	return []byte(v)
}

// plain tells whether a string stands for itself. Bytes that are no UTF-8 stand
// for U+FFFD.
func plain(text []byte) bool {
	for i, c := range text {
		if c == '\\' {
			return false
		}
		if c >= utf8.RuneSelf {
			return utf8.Valid(text[i:]) && !slices.Contains(text[i:], '\\')
		}
	}
	return true
}

func (s *scanner) skipString() bool {
	for s.at++; s.at < len(s.b); s.at++ {
		switch c := s.b[s.at]; {
		case c == '"':
			s.at++
			return true
		case c < ' ':
			s.fail("an escape instead of a control character")
			return false
		case c == '\\':
			if !s.skipEscape() {
				return false
			}
		}
	}
	s.fail("the end of a string")
	return false
}

// skipEscape moves to the last byte of an escape.
func (s *scanner) skipEscape() bool {
	s.at++
	switch c := s.now(); c {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	case 'u':
		for range 4 {
			if s.at++; !isHex(s.now()) {
				s.fail("four hexadecimal digits")
				return false
			}
		}
		return true
	}
	s.fail("an escape")
	return false
}

// now returns the byte that the cursor is at, 0 at the end.
func (s *scanner) now() byte {
	if s.at < len(s.b) {
		return s.b[s.at]
	}
	return 0
}

// accept reads a byte if it is what the cursor is at.
func (s *scanner) accept(c byte) bool {
	if s.now() != c {
		return false
	}
	s.at++
	return true
}

// number reads the number that the cursor is at, and returns its text.
func (s *scanner) number() []byte {
	from := s.at
	s.accept('-')
	ok := s.accept('0') || s.digits()
	if ok && s.accept('.') {
		ok = s.digits()
	}
	if ok && (s.accept('e') || s.accept('E')) {
		_ = s.accept('+') || s.accept('-')
		ok = s.digits()
	}
	if !ok {
		return nil
	}
	return s.b[from:s.at]
}

// digits reads at least one digit.
func (s *scanner) digits() bool {
	from := s.at
	for isDigit(s.now()) {
		s.at++
	}
	if s.at == from {
		s.fail("a digit")
	}
	return s.at > from
}

func (s *scanner) null() bool { return s.word("null") }

func (s *scanner) text() (v []byte, ok bool) {
	if s.peek() != '"' {
		return nil, false
	}
	return s.str(), true
}

func (s *scanner) uint() (v uint64, ok bool) {
	if c := s.peek(); c != '-' && !isDigit(c) {
		return 0, false
	}
	from := s.at
	if v, ok = parseUint(s.number()); !ok {
		s.at = from
	}
	return v, ok
}

// word reads a literal if it is what comes next.
func (s *scanner) word(text string) bool {
	s.peek()
	if s.err != nil || len(s.b)-s.at < len(text) || string(s.b[s.at:s.at+len(text)]) != text {
		return false
	}
	s.at += len(text)
	return true
}

func (s *scanner) skip() { s.value() }

// value reads any value and returns its text.
func (s *scanner) value() []byte {
	c := s.peek()
	from := s.at
	objects, depth := uint64(0), 0 // a bit for each open bracket, 1 if it is a brace
	for {
		if c == '{' || c == '[' {
			if depth++; depth > maxDepth {
				s.err = fmt.Errorf("%w: the JSON is nested deeper than %d levels at byte %d", errRequest, maxDepth, s.at)
			}
			s.at++
			objects = objects << 1
			if c == '{' {
				objects |= 1
			}
			if s.enter(objects&1 == 1, 0) {
				c = s.peek()
				continue
			}
			depth, objects = depth-1, objects>>1
		} else {
			s.scalar(c)
		}
		for depth > 0 && !s.enter(objects&1 == 1, 1) {
			depth, objects = depth-1, objects>>1
		}
		if depth <= 0 || s.err != nil {
			return s.b[from:min(s.at, len(s.b))]
		}
		c = s.peek()
	}
}

// enter moves to the next value of the open object or array, if there is one.
func (s *scanner) enter(object bool, i int) bool {
	if !object {
		return s.next(i, 0, ']')
	}
	if !s.next(i, 0, '}') {
		return false
	}
	s.key()
	return s.err == nil
}

// scalar moves behind a value that has no brackets and starts with c.
func (s *scanner) scalar(c byte) {
	switch {
	case s.err != nil:
	case c == '"':
		s.skipString()
	case c == '-' || isDigit(c):
		s.number()
	case c == 't' && s.word("true"), c == 'f' && s.word("false"), c == 'n' && s.word("null"):
	default:
		s.fail("a value")
	}
}

func (s *scanner) end() error {
	if s.peek(); s.err == nil && s.at < len(s.b) {
		s.fail("nothing more")
	}
	return s.err
}

// -- arrays of integers -------------------------------------------------------

func (s *scanner) tokens(dst []uint32) ([]uint32, error) {
	start := s.at
	if !s.open('[') {
		return dst, errArray
	}
	if s.open(']') {
		return dst, nil
	}
	for s.err == nil {
		dst = s.fastTokens(dst)
		text := s.element()
		v, ok := parseUint(text)
		if s.err == nil && (!ok || v > math.MaxUint32) {
			s.at = start
			return dst, fmt.Errorf("%.40s is no integer from 0 to %d", text, uint32(math.MaxUint32))
		}
		dst = append(dst, uint32(v))
		if !s.next(1, 0, ']') {
			break
		}
	}
	return dst, nil
}

// element reads any value and returns its text.
func (s *scanner) element() []byte {
	if c := s.peek(); isDigit(c) {
		return s.number()
	}
	return s.value()
}

// Constants of eight bytes at once.
const (
	each   = 0x0101010101010101
	zeros  = each * '0'
	tops   = each * 0x80
	lows   = each * 0x7f
	ten    = each * (0x80 - 10) // added to a byte from 10 on it sets the top bit
	gather = 0x0102040810204080 // collects the lowest bits of 8 bytes in the top byte
)

// fastTokens reads elements of at most eight digits that are followed by a comma,
// with white space before them. It stops before the first other one, and
// before the last bytes of the body.
//
// Bytes are looked at 64 at a time: a bit mask says which are no digits, so that
// where an element ends does not depend on how the one before was read, and
// the digits of each are turned into a number by three multiplications.
func (s *scanner) fastTokens(dst []uint32) []uint32 {
	const before = 8 // bytes that are read together with the one behind them
	if s.at < before {
		return dst
	}
	from := s.at
	for at := from; at+64+before <= len(s.b); at += 64 {
		block := (*[before + 64]byte)(s.b[at-before:])
		ends := notDigits((*[64]byte)(block[before:]))
		dst = slices.Grow(dst, 64)
		out, k := (*[64]uint32)(dst[len(dst):len(dst)+64]), 0
		for from -= at; ends != 0; ends &= ends - 1 {
			end := bits.TrailingZeros64(ends) & 63
			n := end - from // digits
			if c := block[before+end]; c != ',' {
				if n > 0 || !isSpace(c) {
					s.at = at + from
					return dst[:len(dst)+k]
				}
				from = end + 1
				continue
			}
			y := binary.LittleEndian.Uint64(block[end:end+8]) ^ zeros
			junk := (64 - 8*uint(n)) & 63 // bits before the first digit
			y >>= junk
			if uint(n-1) >= 8 || y&0xff == 0 && n > 1 {
				s.at = at + from
				return dst[:len(dst)+k]
			}
			y <<= junk
			y = y * (10<<8 + 1) >> 8 & 0x00ff00ff00ff00ff
			y = y * (100<<16 + 1) >> 16 & 0x0000ffff0000ffff
			out[k&63] = uint32(y * (10000<<32 + 1) >> 32)
			k++
			from = end + 1
		}
		from += at
		dst = dst[:len(dst)+k]
	}
	s.at = from
	return dst
}

// notDigits returns a bit for each byte, the first one's lowest, that is set if it
// is no digit.
func notDigits(b *[64]byte) uint64 {
	return notDigits8(b[0:]) | notDigits8(b[8:])<<8 | notDigits8(b[16:])<<16 | notDigits8(b[24:])<<24 |
		notDigits8(b[32:])<<32 | notDigits8(b[40:])<<40 | notDigits8(b[48:])<<48 | notDigits8(b[56:])<<56
}

func notDigits8(b []byte) uint64 {
	y := binary.LittleEndian.Uint64(b) ^ zeros
	return ((y&lows + ten) | y) & tops >> 7 * gather >> 56
}

func (s *scanner) seqs(dst []uint64) ([]uint64, error) { return appendUints(dst, s) }

func (s *scanner) hashes(dst []uint64) ([]uint64, error) {
	start := s.at
	if !s.open('[') {
		return dst, errArray
	}
	for i := 0; s.next(i, 0, ']'); i++ {
		text, quoted := s.text()
		if !quoted {
			text = s.element()
		}
		v, ok := parseBits(text)
		if s.err == nil && !ok {
			s.at = start
			return dst, fmt.Errorf("%.40s is no integer of 64 bits", text)
		}
		dst = append(dst, v)
	}
	return dst, nil
}

// parseUint reads a decimal number of 64 bits.
func parseUint(text []byte) (v uint64, ok bool) {
	const safe = 19 // digits that always fit
	for i, c := range text {
		digit := uint64(c - '0')
		if digit > 9 || i >= safe && (v > math.MaxUint64/10 || v*10 > math.MaxUint64-digit) {
			return 0, false
		}
		v = v*10 + digit
	}
	return v, len(text) > 0
}

// parseBits reads a decimal number from -2^63 to 2^64-1 as a pattern of 64 bits.
func parseBits(text []byte) (v uint64, ok bool) {
	if len(text) > 0 && text[0] == '-' {
		v, ok = parseUint(text[1:])
		return -v, ok && v <= 1<<63
	}
	return parseUint(text)
}
