package event

import (
	"fmt"
	"strconv"
	"strings"
)

// Source names one feed of the log: one data-parallel rank of one engine
// instance in one partition. It has one subject, and its records one order.
type Source struct {
	Model    string
	Group    string // routing group
	Instance string
	Rank     uint32
}

// Partition names one index: the sources that serve one model in one routing
// group, and share one block size.
type Partition struct {
	Model string
	Group string
}

// Partition returns the partition that the source belongs to.
func (s Source) Partition() Partition { return Partition{Model: s.Model, Group: s.Group} }

// String returns the partition's name in JSON: model:group.
func (p Partition) String() string { return p.Model + ":" + p.Group }

// Key returns <model>.<group>.<instance>.<rank>, each token escaped: what the
// subject of the source's records ends with. It is also the source's key in the
// catalog of workers.
func (s Source) Key() string {
	return Escape(s.Model) + "." + Escape(s.Group) + "." + Escape(s.Instance) + "." + strconv.FormatUint(uint64(s.Rank), 10)
}

// ParseKey is the inverse of Source.Key. It accepts no other spelling of a source
// than the one that Key returns. Errors wrap ErrSubject.
func ParseKey(key string) (Source, error) {
	tokens := strings.Split(key, ".")
	if len(tokens) != 4 {
		return Source{}, fmt.Errorf("%w: %q has %d tokens, want 4", ErrSubject, key, len(tokens))
	}
	var names [3]string
	for i := range names {
		name, err := Unescape(tokens[i])
		if err != nil {
			return Source{}, err
		}
		names[i] = name
	}
	rank, err := strconv.ParseUint(tokens[3], 10, 32)
	if err != nil {
		return Source{}, fmt.Errorf("%w: rank %q", ErrSubject, tokens[3])
	}
	s := Source{Model: names[0], Group: names[1], Instance: names[2], Rank: uint32(rank)}
	if s.Key() != key {
		return Source{}, fmt.Errorf("%w: %q is not how %q is written", ErrSubject, key, s.Key())
	}
	return s, nil
}

const upperHex = "0123456789ABCDEF"

// Escape writes any text as one NATS token that is also a valid part of a
// key-value key: letters, digits, '-' and '_' stand for themselves, any other
// byte b is '=' and two upper-case hex digits, and the empty text is '='.
func Escape(s string) string {
	if s == "" {
		return "="
	}
	n := 0
	for i := range len(s) {
		if !plain(s[i]) {
			n++
		}
	}
	if n == 0 {
		return s
	}
	b := make([]byte, 0, len(s)+2*n)
	for i := range len(s) {
		if c := s[i]; plain(c) {
			b = append(b, c)
		} else {
			b = append(b, '=', upperHex[c>>4], upperHex[c&15])
		}
	}
	return string(b)
}

// Unescape is the inverse of Escape. Errors wrap ErrSubject.
func Unescape(token string) (string, error) {
	if token == "=" {
		return "", nil
	}
	b := make([]byte, 0, len(token))
	for i := 0; i < len(token); i++ {
		c := token[i]
		if c == '=' {
			if i+2 >= len(token) {
				return "", fmt.Errorf("%w: token %q ends inside an escape", ErrSubject, token)
			}
			hi, lo := strings.IndexByte(upperHex, token[i+1]), strings.IndexByte(upperHex, token[i+2])
			if hi < 0 || lo < 0 {
				return "", fmt.Errorf("%w: token %q has a bad escape", ErrSubject, token)
			}
			c = byte(hi<<4 | lo)
			i += 2
		}
		b = append(b, c)
	}
	return string(b), nil
}

func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}
