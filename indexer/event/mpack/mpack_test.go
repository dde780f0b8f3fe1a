package mpack

import (
	"bytes"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// Values that cross every length and width boundary of the format.
func samples() []any {
	long := strings.Repeat("x", 70000)
	wide := make([]any, 70000)
	for i := range wide {
		wide[i] = int64(i % 300)
	}
	return []any{
		nil, true, false,
		int64(0), int64(127), int64(128), int64(255), int64(256), int64(65535), int64(65536), int64(math.MaxUint32), int64(math.MaxUint32 + 1), int64(math.MaxInt64),
		int64(-1), int64(-32), int64(-33), int64(-128), int64(-129), int64(-32768), int64(-32769), int64(math.MinInt32), int64(math.MinInt32 - 1), int64(math.MinInt64),
		1.5, math.Inf(-1), float32(2.25),
		"", "a", long[:31], long[:32], long[:255], long[:256], long[:65535], long[:65536],
		[]byte{}, []byte(long[:255]), []byte(long[:256]), []byte(long[:65536]),
		[]any{}, wide[:15], wide[:16], wide[:65535], wide[:65536],
		map[string]any{}, map[string]any{"a": int64(1), "b": []any{nil, "x"}},
	}
}

func TestReaderReadsWhatAnEncoderWrites(t *testing.T) {
	for _, v := range samples() {
		b, err := msgpack.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		r := NewReader(b)
		if got := readAny(&r); r.Err() != nil || r.Len() != 0 || !same(got, v) {
			t.Errorf("%.40v: got %.40v, error %v, %d bytes left", v, got, r.Err(), r.Len())
		}
		r = NewReader(b)
		if r.Skip(); r.Err() != nil || r.Len() != 0 {
			t.Errorf("Skip of %.40v: error %v, %d bytes left", v, r.Err(), r.Len())
		}
		for n := range min(len(b), 600) { // every cut is an error, never more
			r := NewReader(b[:n])
			if r.Skip(); !errors.Is(r.Err(), ErrTruncated) {
				t.Fatalf("%.40v cut at %d: error %v", v, n, r.Err())
			}
		}
	}
}

func TestAppendWritesWhatADecoderReads(t *testing.T) {
	for _, v := range samples() {
		var got any
		b := appendAny(nil, v)
		if err := msgpack.Unmarshal(b, &got); err != nil {
			t.Fatalf("%.40v: %v", v, err)
		}
		r := NewReader(b)
		if back := readAny(&r); !same(back, v) || r.Len() != 0 {
			t.Errorf("%.40v came back as %.40v", v, back)
		}
		if _, narrow := v.(float32); narrow {
			continue // written as a float64
		}
		if want, err := msgpack.Marshal(v); err == nil && len(b) > len(want) {
			t.Errorf("%.40v takes %d bytes, %d would do", v, len(b), len(want))
		}
	}
}

func TestLengthsThatLie(t *testing.T) {
	for _, b := range [][]byte{
		{0xdd, 0x7f, 0xff, 0xff, 0xff}, {0xdd, 0xff, 0xff, 0xff, 0xff}, {0xdc, 0xff, 0xff, 1},
		{0xdf, 0x7f, 0xff, 0xff, 0xff, 0xa1, 'a'}, {0xdf, 0xff, 0xff, 0xff, 0xff}, {0x82, 1, 2, 3},
		{0xdb, 0x7f, 0xff, 0xff, 0xff, 'a'}, {0xc6, 0xff, 0xff, 0xff, 0xff, 0}, {0xc9, 0xff, 0xff, 0xff, 0xff, 0, 'A'}, {0xc7, 3, 0},
		{0x93}, {0xcf, 1}, {0xcb}, {0xd9}, {},
	} {
		r := NewReader(b)
		if r.Skip(); !errors.Is(r.Err(), ErrTruncated) {
			t.Errorf("%x: error %v, want ErrTruncated", b, r.Err())
		}
	}
}

func TestReservedByte(t *testing.T) {
	for _, b := range [][]byte{{0xc1}, {0x91, 0xc1}, {0x82, 1, 2, 0xc1, 3}, {0x92, 0x91, 0xc1, 0xc0}} {
		r := NewReader(b)
		if r.Skip(); !errors.Is(r.Err(), ErrReserved) {
			t.Errorf("%x: error %v, want ErrReserved", b, r.Err())
		}
	}
}

func TestDepth(t *testing.T) {
	for n, want := range map[int]error{MaxDepth - 1: nil, MaxDepth: ErrDepth, 5000: ErrDepth} {
		r := NewReader(append(bytes.Repeat([]byte{0x91}, n), 0xc0))
		if r.Skip(); !errors.Is(r.Err(), want) {
			t.Errorf("%d levels: error %v, want %v", n, r.Err(), want)
		}
	}
}

func TestIntegers(t *testing.T) {
	u := uint64(15760518052499183552)
	for _, b := range [][]byte{AppendUint(nil, u), AppendInt(nil, int64(u))} {
		r := NewReader(b)
		if got, _ := r.Bits(); got != u || r.Err() != nil {
			t.Errorf("%x: pattern %d, error %v", b, got, r.Err())
		}
	}
	for _, bad := range []struct {
		b    []byte
		read func(*Reader)
	}{
		{AppendInt(nil, -4), func(r *Reader) { r.Uint() }},
		{AppendInt(nil, -4), func(r *Reader) { r.Uint32() }},
		{AppendUint(nil, math.MaxUint64), func(r *Reader) { r.Int() }},
		{AppendUint(nil, math.MaxUint32+1), func(r *Reader) { r.Uint32() }},
		{AppendUint(nil, math.MaxInt64+1), func(r *Reader) { r.Int() }},
		{AppendStr(nil, "7"), func(r *Reader) { r.Bits() }},
		{AppendBool(nil, true), func(r *Reader) { r.Uint32() }},
		{AppendNil(nil), func(r *Reader) { r.Str() }},
		{AppendStr(nil, "x"), func(r *Reader) { r.Bin() }},
		{AppendBin(nil, []byte("x")), func(r *Reader) { r.Str() }},
		{AppendUint(nil, 1), func(r *Reader) { r.Array() }},
		{AppendArray(nil, 0), func(r *Reader) { r.Map() }},
	} {
		r := NewReader(bad.b)
		if bad.read(&r); !errors.Is(r.Err(), ErrType) {
			t.Errorf("%x: error %v, want ErrType", bad.b, r.Err())
		}
		if r.Skip(); !errors.Is(r.Err(), ErrType) || r.Next() != KindEnd {
			t.Errorf("%x: the error did not stick", bad.b)
		}
	}
}

func TestAppendUint32s(t *testing.T) {
	var want []uint32
	var b []byte
	for shift := range 33 { // all widths, in an order without a pattern
		for _, v := range []uint32{math.MaxUint32, 0x80808080, 1} {
			want = append(want, v>>(shift*7%33))
			b = AppendUint(b, uint64(want[len(want)-1]))
		}
	}
	for _, wide := range [][]byte{{0xcc, 5}, {0xcd, 0, 5}, {0xce, 0, 0, 0, 5}, {0xcf, 0, 0, 0, 0, 0, 0, 0, 5}, {0xd0, 5}, {0xd3, 0, 0, 0, 0, 0, 0, 0, 5}, {5}} {
		b = append(b, wide...)
		want = append(want, 5)
	}
	for n := range len(want) + 1 { // the last ones are read without the bytes behind them
		r := NewReader(b)
		got := r.AppendUint32s([]uint32{7}, n)
		if r.Err() != nil || !slices.Equal(got, append([]uint32{7}, want[:n]...)) {
			t.Fatalf("%d values: %v, error %v", n, got, r.Err())
		}
		end := r.Offset()
		for cut := range end {
			r := NewReader(b[:cut])
			got := r.AppendUint32s(nil, n)
			if !errors.Is(r.Err(), ErrTruncated) || !slices.Equal(got, want[:len(got)]) {
				t.Fatalf("%d values cut at %d: %v, error %v", n, cut, got, r.Err())
			}
		}
	}
	for _, bad := range [][]byte{AppendInt(nil, -1), AppendUint(nil, math.MaxUint32+1), AppendFloat64(nil, 1), AppendNil(nil), AppendStr(nil, "1"), AppendArray(nil, 0)} {
		for _, tail := range [][]byte{nil, make([]byte, 20)} {
			r := NewReader(slices.Concat([]byte{1, 2}, bad, tail))
			if got := r.AppendUint32s(nil, 3); !errors.Is(r.Err(), ErrType) || !slices.Equal(got, []uint32{1, 2}) {
				t.Errorf("1, 2, %x: %v, error %v", bad, got, r.Err())
			}
		}
	}
	for _, n := range []int{-1, 3, math.MaxInt} {
		r := NewReader([]byte{1, 2})
		if got := r.AppendUint32s(nil, n); !errors.Is(r.Err(), ErrTruncated) || cap(got) > 0 {
			t.Errorf("%d values in 2 bytes: room for %d, error %v", n, cap(got), r.Err())
		}
	}
}

func FuzzSkip(f *testing.F) {
	for _, v := range samples() {
		if b, err := msgpack.Marshal(v); err == nil && len(b) < 1000 {
			f.Add(b)
		}
	}
	f.Add([]byte{0xc1})
	f.Add([]byte{0xdd, 0x7f, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(b)
		r.Skip()
		if r.Offset() > len(b) {
			t.Fatalf("read %d of %d bytes", r.Offset(), len(b))
		}
		if r.Err() == nil { // what is well formed reads the same by value
			whole := r.Offset()
			r = NewReader(b)
			if readAny(&r); r.Err() != nil || r.Offset() != whole {
				t.Fatalf("skipped %d bytes, read %d: %v", whole, r.Offset(), r.Err())
			}
		}
	})
}

func readAny(r *Reader) any {
	switch r.Next() {
	case KindNil:
		r.Nil()
		return nil
	case KindBool:
		return r.Bool()
	case KindInt:
		v, _ := r.Bits()
		return int64(v)
	case KindFloat:
		return r.Number()
	case KindStr:
		return string(r.Str())
	case KindBin:
		return bytes.Clone(r.Bin())
	case KindArray:
		var out []any
		for range r.Array() {
			out = append(out, readAny(r))
		}
		return out
	case KindMap:
		out := map[any]any{}
		for range r.Map() {
			k := readAny(r)
			v := readAny(r)
			switch k := k.(type) {
			case nil, bool, int64, float64, string:
				out[k] = v
			}
		}
		return out
	}
	r.Skip()
	return "ext"
}

func appendAny(b []byte, v any) []byte {
	switch v := v.(type) {
	case bool:
		return AppendBool(b, v)
	case int64:
		return AppendInt(b, v)
	case float64:
		return AppendFloat64(b, v)
	case float32:
		return AppendFloat64(b, float64(v))
	case string:
		return AppendStr(b, v)
	case []byte:
		return AppendBin(b, v)
	case []any:
		b = AppendArray(b, len(v))
		for _, x := range v {
			b = appendAny(b, x)
		}
		return b
	case map[string]any: // the package writes no maps: an array of pairs stands in
		b = append(b, 0x80|byte(len(v)))
		for k, x := range v {
			b = appendAny(AppendStr(b, k), x)
		}
		return b
	}
	return AppendNil(b)
}

func same(a, b any) bool {
	switch b := b.(type) {
	case float32:
		return a == float64(b)
	case []byte:
		x, ok := a.([]byte)
		return ok && bytes.Equal(x, b)
	case []any:
		x, _ := a.([]any)
		if len(x) != len(b) {
			return false
		}
		for i := range b {
			if !same(x[i], b[i]) {
				return false
			}
		}
		return true
	case map[string]any:
		x, ok := a.(map[any]any)
		if !ok || len(x) != len(b) {
			return false
		}
		for k, v := range b {
			if !same(x[k], v) {
				return false
			}
		}
		return true
	}
	return a == b
}
