package measure

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
)

// ErrProfile: the data is no profile in the format of package runtime/pprof.
var ErrProfile = errors.New("measure: not a profile")

// Profile is the samples of a CPU profile.
type Profile struct {
	samples []sample
	frames  map[uint64][]uint64 // functions of each location, the innermost first
	names   map[uint64]uint64   // name of each function, in strings
	strings []string
}

type sample struct {
	locations []uint64 // the innermost first
	value     int64    // the last of them: nanoseconds
}

// Rule gives samples to a category: those of which a function's name contains
// one of the Functions.
type Rule struct {
	Category  string
	Functions []string
}

// Split returns what share of the time each category has. A sample belongs to
// that of its innermost function which any rule names; of several rules that
// name it, the first counts. What no rule names has the empty category.
func (p *Profile) Split(rules []Rule) map[string]float64 {
	known := map[uint64]string{} // category of each function, - if it has none
	category := func(function uint64) string {
		c, ok := known[function]
		if ok {
			return c
		}
		c = "-"
		name := p.name(function)
	search:
		for _, r := range rules {
			for _, part := range r.Functions {
				if strings.Contains(name, part) {
					c = r.Category
					break search
				}
			}
		}
		known[function] = c
		return c
	}
	out := map[string]float64{}
	total := 0.0
	for _, s := range p.samples {
		found := ""
	stack:
		for _, l := range s.locations {
			for _, f := range p.frames[l] {
				if c := category(f); c != "-" {
					found = c
					break stack
				}
			}
		}
		out[found] += float64(s.value)
		total += float64(s.value)
	}
	for c := range out {
		out[c] /= total
	}
	return out
}

func (p *Profile) name(function uint64) string {
	if i := p.names[function]; i < uint64(len(p.strings)) {
		return p.strings[i]
	}
	return ""
}

// Parse reads a profile, compressed or not. Errors wrap ErrProfile.
func Parse(data []byte) (*Profile, error) {
	if bytes.HasPrefix(data, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(bytes.NewReader(data))
		if err == nil {
			data, err = io.ReadAll(z)
		}
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrProfile, err)
		}
	}
	p := &Profile{frames: map[uint64][]uint64{}, names: map[uint64]uint64{}}
	err := fields(data, func(number, _ uint64, body []byte) error {
		switch number {
		case 2:
			return p.sample(body)
		case 4:
			return p.location(body)
		case 5:
			return p.function(body)
		case 6:
			p.strings = append(p.strings, string(body))
		}
		return nil
	})
	return p, err
}

func (p *Profile) sample(body []byte) error {
	var s sample
	err := fields(body, func(number, v uint64, packed []byte) error {
		values := []uint64{v}
		if packed != nil {
			values = values[:0]
			for len(packed) > 0 {
				v, n := binary.Uvarint(packed)
				if n <= 0 {
					return fmt.Errorf("%w: bad number", ErrProfile)
				}
				values, packed = append(values, v), packed[n:]
			}
		}
		switch number {
		case 1:
			s.locations = append(s.locations, values...)
		case 2:
			for _, v := range values {
				s.value = int64(v)
			}
		}
		return nil
	})
	p.samples = append(p.samples, s)
	return err
}

func (p *Profile) location(body []byte) error {
	id := uint64(0)
	var functions []uint64
	err := fields(body, func(number, v uint64, line []byte) error {
		switch number {
		case 1:
			id = v
		case 4:
			return fields(line, func(number, v uint64, _ []byte) error {
				if number == 1 {
					functions = append(functions, v)
				}
				return nil
			})
		}
		return nil
	})
	p.frames[id] = functions
	return err
}

func (p *Profile) function(body []byte) error {
	id, name := uint64(0), uint64(0)
	err := fields(body, func(number, v uint64, _ []byte) error {
		switch number {
		case 1:
			id = v
		case 2:
			name = v
		}
		return nil
	})
	p.names[id] = name
	return err
}

// fields calls f for each field of a protocol buffer: with the number of a
// varint, or with the bytes of what has a length.
func fields(data []byte, f func(number, value uint64, body []byte) error) error {
	for len(data) > 0 {
		key, n := binary.Uvarint(data)
		if n <= 0 {
			return fmt.Errorf("%w: bad key", ErrProfile)
		}
		data = data[n:]
		var err error
		switch key & 7 {
		case 0, 2:
			v, n := binary.Uvarint(data)
			if n <= 0 {
				return fmt.Errorf("%w: bad number", ErrProfile)
			}
			data = data[n:]
			if key&7 == 0 {
				err = f(key>>3, v, nil)
				break
			}
			if v > uint64(len(data)) {
				return fmt.Errorf("%w: it breaks off", ErrProfile)
			}
			err = f(key>>3, 0, data[:v:v])
			data = data[v:]
		case 1, 5:
			size := 8
			if key&7 == 5 {
				size = 4
			}
			if size > len(data) {
				return fmt.Errorf("%w: it breaks off", ErrProfile)
			}
			data = data[size:]
		default:
			return fmt.Errorf("%w: wire type %d", ErrProfile, key&7)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
