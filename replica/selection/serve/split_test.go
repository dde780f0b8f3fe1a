package serve

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/replica/selection"
)

// plain is a body as encoding/json reads it.
type plain struct {
	Tokens *[]uint32      `json:"token_ids"`
	Hashes *[]json.Number `json:"block_hashes"`
	Other  any            `json:"other"`
}

// FuzzSplit compares what is taken out of a body, and what is left of it, with
// what encoding/json reads.
func FuzzSplit(f *testing.F) {
	for _, s := range []string{
		`{"token_ids":[1,2,3],"other":{"token_ids":[4]}}`, `{"other":"a\"b,]}","block_hashes":[-1,18446744073709551615,0]}`,
		`{"token_ids":null}`, `{ "token_ids" : [ ] , "other" : [1,[2,{"x":null}]] }`, `{"token_ids":[4294967296]}`, `{"token_ids":[01]}`,
		`{"token_ids":[1,],"other":1}`, `{"token_ids":[1`, `{"token_ids"`, `{"other":tru}`, `{} x`, `{"token_ids":[1]]}`, `{"other":{"a":[}]}`, `{"other":1 2}`,
		`{"block_hashes":["12","-3"]}`, `{"token_ids":[1.5]}`, `{"token_ids":[1e3]}`, `{"token_ids":[-0]}`, "{\"token_ids\":\n[1,\t2]}", `{"token_ids":{}}`, `[]`, ``,
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, body string) {
		if strings.Count(body, "token_ids") > 1 || strings.Count(body, "block_hashes") > 1 || strings.Contains(body, `\u`) || strings.Contains(body, `["`) || strings.Contains(body, `,"`) && strings.Contains(body, "block_hashes") {
			t.Skip() // the first or the last of a name, other spellings of it, and strings for numbers: read otherwise
		}
		if lower := strings.ToLower(body); lower != body || strings.ContainsFunc(body, func(r rune) bool { return r > 127 }) {
			t.Skip() // encoding/json does not tell names apart by case
		}
		var want plain
		bad := json.Unmarshal([]byte(body), &want)
		var a arrays
		var rest struct {
			Other any `json:"other"`
		}
		err := a.decode([]byte(body), &rest)
		if err != nil && !errors.Is(err, selection.ErrRequest) {
			t.Fatalf("%q: error %v", body, err)
		}
		if bad != nil && err == nil && !fits(body) {
			t.Fatalf("%q is read, but is no JSON: %v", body, bad)
		}
		if bad != nil || err != nil {
			if bad == nil && want.Hashes == nil && strings.HasPrefix(strings.TrimLeft(body, " \t\r\n"), "{") {
				t.Fatalf("%q: %v, but encoding/json reads it", body, err)
			}
			return
		}
		var tokens []uint32
		if want.Tokens != nil {
			tokens = *want.Tokens
		}
		if !slices.Equal(a.tokens, tokens) || a.has.tokens != (want.Tokens != nil) {
			t.Fatalf("%q: tokens %v (%v), want %v", body, a.tokens, a.has.tokens, tokens)
		}
		x, _ := json.Marshal(rest.Other)
		y, _ := json.Marshal(want.Other)
		if string(x) != string(y) {
			t.Fatalf("%q: the rest is %s, want %s", body, x, y)
		}
	})
}

// fits tells whether a body is JSON, whatever its members are.
func fits(body string) bool { return json.Valid([]byte(body)) }

func TestHashesInAnyForm(t *testing.T) {
	var a arrays
	if err := a.split([]byte(`{"block_hashes":[-1, "18446744073709551615", "-9223372036854775808", 9223372036854775808, 0]}`)); err != nil {
		t.Fatal(err)
	}
	if want := []uint64{1<<64 - 1, 1<<64 - 1, 1 << 63, 1 << 63, 0}; !slices.Equal(a.hashes, want) {
		t.Errorf("hashes %v, want %v", a.hashes, want)
	}
	for _, bad := range []string{`[18446744073709551616]`, `[-9223372036854775809]`, `["1]`, `["x"]`, `[1.0]`, `"1"`, `[[1]]`, `[true]`, `[--1]`, `[99999999999999999999999]`} {
		if err := a.split([]byte(`{"block_hashes":` + bad + `}`)); !errors.Is(err, selection.ErrRequest) {
			t.Errorf("%s: %v, want ErrRequest", bad, err)
		}
	}
}
