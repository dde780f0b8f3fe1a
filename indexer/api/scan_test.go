package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// asked is what a body asks, as encoding/json reads it. It is the oracle of the
// scanner's tests.
type asked struct {
	wrong          bool // a member is of the wrong type
	names          map[string]string
	tokens         []uint32
	hashes         []uint64
	given          bool
	minLogSeq, top uint64
	minLogSeqs     []uint64
	batch          bool
	prompts        []asked
}

// depthOf returns how deep JSON is nested.
func depthOf(body []byte) int {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	depth, most := 0, 0
	for {
		t, err := dec.Token()
		if err != nil {
			return most
		}
		switch t {
		case json.Delim('{'), json.Delim('['):
			depth++
			most = max(most, depth)
		case json.Delim('}'), json.Delim(']'):
			depth--
		}
	}
}

// oracle reads a value that is known to be JSON.
func oracle(raw []byte, content string, outer bool) (a asked) {
	a.names = map[string]string{}
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		a.wrong = true
		return a
	}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			panic(err) // it was valid
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			panic(err)
		}
		a.member(t.(string), v, content, outer)
	}
	if a.names["model_name"] == "" {
		a.names["model_name"] = a.names["model"]
	}
	delete(a.names, "model")
	if a.batch && a.given {
		a.wrong = true
	}
	return a
}

func (a *asked) member(name string, v json.RawMessage, content string, outer bool) {
	null := string(v) == "null"
	switch {
	case name == "cache_salt" && content == blockHashes:
		a.wrong = a.wrong || !null
	case slices.Contains([]string{"model_name", "model", "routing_group", "lora_name", "cache_salt"}, name):
		delete(a.names, name)
		var text *string
		if json.Unmarshal(v, &text) != nil {
			a.wrong = true
		} else if text != nil {
			a.names[name] = *text
		}
	case name == "min_log_seq" || name == "top":
		var n uint64
		a.wrong = json.Unmarshal(v, &n) != nil || a.wrong
		if name == "top" {
			a.top = n
		} else {
			a.minLogSeq = n
		}
	case name == "min_log_seqs":
		a.minLogSeqs = nil
		var items []*uint64
		a.wrong = json.Unmarshal(v, &items) != nil || a.wrong
		for _, item := range items {
			if item == nil { // encoding/json takes null for any type
				a.wrong = true
				continue
			}
			a.minLogSeqs = append(a.minLogSeqs, *item)
		}
	case name == content:
		a.content(v, content)
	case name == "queries" && outer:
		a.batch, a.prompts = !null, nil
		var items []json.RawMessage
		if json.Unmarshal(v, &items) != nil || len(items) > maxPrompts {
			a.wrong = true
			return
		}
		for _, item := range items {
			a.prompts = append(a.prompts, oracle(item, content, false))
		}
	}
}

func (a *asked) content(v json.RawMessage, content string) {
	a.given, a.tokens, a.hashes = string(v) != "null", nil, nil
	var items []json.RawMessage
	if json.Unmarshal(v, &items) != nil {
		a.wrong = true
		return
	}
	for _, item := range items {
		text := string(item)
		if content == tokenIDs {
			n, err := strconv.ParseUint(text, 10, 32)
			a.wrong = a.wrong || err != nil
			a.tokens = append(a.tokens, uint32(n))
			continue
		}
		if text[0] == '"' {
			if err := json.Unmarshal(item, &text); err != nil {
				panic(err)
			}
		}
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			var signed int64
			signed, err = strconv.ParseInt(text, 10, 64)
			n = uint64(signed)
		}
		a.wrong = a.wrong || err != nil || strings.HasPrefix(text, "+")
		a.hashes = append(a.hashes, n)
	}
}

// differs tells how a prompt differs from what the oracle says.
func (a *asked) differs(p *prompt) error {
	if a.wrong != (p.err != nil) {
		return fmt.Errorf("error %v, oracle: wrong %v", p.err, a.wrong)
	}
	if a.wrong {
		return nil
	}
	for name, v := range map[string][]byte{"model_name": p.model, "routing_group": p.group, "lora_name": p.lora, "cache_salt": p.salt} {
		if want, ok := a.names[name]; want != string(v) || ok != (v != nil) && name != "model_name" {
			return fmt.Errorf("%s is %q, oracle: %q (%v)", name, v, want, ok)
		}
	}
	if a.given != p.given || !slices.Equal(a.tokens, p.tokens) || !slices.Equal(a.hashes, p.hashes) {
		return fmt.Errorf("content %v %v %v, oracle: %v %v %v", p.given, p.tokens, p.hashes, a.given, a.tokens, a.hashes)
	}
	if !(event.Position{LogSeq: a.minLogSeq, LogSeqs: a.minLogSeqs}).Equal(p.min) || a.top != p.top {
		return fmt.Errorf("min_log_seq %v, top %d, oracle: %d, %d, %d", p.min, p.top, a.minLogSeq, a.minLogSeqs, a.top)
	}
	return nil
}

// compareJSON reads a body both ways.
func compareJSON(t *testing.T, w *work, body []byte, content string) {
	t.Helper()
	w.reset()
	w.content, w.body = content, append(w.body[:0], body...)
	err := w.readCall(mediaJSON, "")
	if !json.Valid(body) {
		if err == nil {
			t.Fatalf("%q is no JSON, and was read", body)
		}
		return
	}
	if err != nil {
		if depthOf(body) > maxDepth {
			return
		}
		t.Fatalf("%q: %v", body, err)
	}
	want := oracle(body, content, true)
	if err := want.differs(&w.outer); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	if want.wrong {
		return
	}
	if want.batch != w.batch || len(want.prompts) != len(w.prompts) {
		t.Fatalf("%q: batch %v of %d, oracle: %v of %d", body, w.batch, len(w.prompts), want.batch, len(want.prompts))
	}
	for i := range want.prompts {
		if err := want.prompts[i].differs(&w.prompts[i]); err != nil {
			t.Fatalf("%q: prompt %d: %v", body, i, err)
		}
	}
}

// bodies are what is hard to read, or easy to read wrong.
func bodies() []string {
	out := []string{
		``, ` `, `{}`, `null`, `[]`, `"x"`, `1`, `{"a"}`, `{"a":}`, `{"a":1,}`, `{,}`, `{"a" 1}`, `{} x`, `{}{}`, "\xef\xbb\xbf{}", `{"token_ids":[1]}]`,
		`{"model_name":"m","token_ids":[1,2,3],"routing_group":"g","lora_name":"l","cache_salt":"s","min_log_seq":7,"top":3}`,
		` { "model_name" : "m" , "token_ids" : [ 1 , 2 ,3 ] } `, "{\"token_ids\":[\n\t1,\r\n 2\t]\n}",
		`{"token_ids":[]}`, `{"token_ids":[ ]}`, `{"token_ids":[,]}`, `{"token_ids":[1,]}`, `{"token_ids":[1 2]}`, `{"token_ids":[1,,2]}`, `{"token_ids":[`, `{"token_ids":[1`, `{"token_ids":[1,`,
		`{"token_ids":null}`, `{"token_ids":1}`, `{"token_ids":"1"}`, `{"token_ids":{}}`, `{"token_ids":[null]}`, `{"token_ids":["1"]}`, `{"token_ids":[[1]]}`, `{"token_ids":[1,{"a":[2]},3]}`,
		`{"token_ids":[0,4294967295]}`, `{"token_ids":[4294967296]}`, `{"token_ids":[99999999999999999999999999]}`, `{"token_ids":[-1]}`, `{"token_ids":[-0]}`, `{"token_ids":[1.0]}`, `{"token_ids":[1e3]}`,
		`{"token_ids":[1E+3,1.5e-7]}`, `{"token_ids":[00]}`, `{"token_ids":[01]}`, `{"token_ids":[1.]}`, `{"token_ids":[.5]}`, `{"token_ids":[1e]}`, `{"token_ids":[+1]}`, `{"token_ids":[-]}`, `{"token_ids":[0x1]}`,
		`{"token_ids":[1],"token_ids":[2,3]}`, `{"token_ids":[1],"token_ids":null}`, `{"token_ids":["x"],"token_ids":[2]}`, `{"model_name":"a","model_name":"b"}`, `{"model_name":"a","model_name":null}`,
		`{"model":"a"}`, `{"model":"a","model_name":""}`, `{"model":"a","model_name":"b"}`, `{"model_name":1}`, `{"model_name":["a"]}`, `{"Model_Name":"a","TOKEN_IDS":[1]}`,
		`{"model\u005fname":"m","t\u006fken_ids":[1]}`, `{"model_name":"\"\\\/\b\f\n\r\t\u00e9\ud83d\ude00"}`, `{"model_name":"\ud83d"}`, `{"model_name":"\ude00x"}`, "{\"model_name\":\"\xff\xc3\"}", "{\"model_\xff\":\"x\"}",
		"{\"model_name\":\"a\nb\"}", `{"model_name":"\x"}`, `{"model_name":"\u12g4"}`, `{"model_name":"\u12`, `{"model_name":"abc`, `{"model_name":"\`, `{"model_name":"é"}`, `{"x":"\uD83D\uDE00\q"}`,
		`{"min_log_seq":-1}`, `{"min_log_seqs":[1,2,3]}`, `{"min_log_seqs":[]}`, `{"min_log_seqs":[1,-2]}`, `{"min_log_seqs":["1"]}`, `{"min_log_seqs":[null]}`, `{"min_log_seqs":null}`, `{"min_log_seqs":5}`, `{"min_log_seqs":"1,2"}`, `{"min_log_seqs":[[1],{"a":2}],"top":1}`, `{"min_log_seqs":[1,2}`, `{"min_log_seq":1.0}`, `{"min_log_seq":18446744073709551615}`, `{"min_log_seq":18446744073709551616}`, `{"min_log_seq":"1"}`, `{"min_log_seq":null,"top":null}`, `{"top":-0}`, `{"top":01}`,
		`{"a":true,"b":false,"c":null,"d":[1,[2,{"e":{}}],"x"],"f":{"g":{"h":[]}},"model_name":"m"}`, `{"a":tru}`, `{"a":truex}`, `{"a":nul`, `{"a":[}`, `{"a":{]}`, `{"a":[1}`, `{"a":{"b":1]}`, `{"a":{"b"]}}`,
		`{"block_hashes":[1,-1,18446744073709551615,-9223372036854775808,"5","-7","18446744073709551615","007"]}`, `{"block_hashes":[18446744073709551616]}`, `{"block_hashes":[-9223372036854775809]}`,
		`{"block_hashes":["+5"]}`, `{"block_hashes":[""]}`, `{"block_hashes":["-"]}`, `{"block_hashes":["1 "]}`, `{"block_hashes":["\u0031"]}`, `{"block_hashes":[1.5]}`, `{"block_hashes":[true]}`, `{"block_hashes":[]}`, `{"block_hashes":[-0]}`,
		`{"block_hashes":[1],"cache_salt":"x"}`, `{"block_hashes":[1],"cache_salt":null}`, `{"block_hashes":[1],"cache_salt":{"a":[]}}`, `{"block_hashes":["1","2",]}`,
		`{"queries":[]}`, `{"queries":null}`, `{"queries":{}}`, `{"queries":[{}]}`, `{"queries":[1,{"token_ids":[1]},null,"x",[],{"token_ids":["x"]},{"token_ids":[4,5],"model_name":7}]}`,
		`{"queries":[{"token_ids":[1,2],"top":1},{"token_ids":[3],"queries":[{}],"lora_name":""}],"model_name":"m","min_log_seq":3}`, `{"queries":[{"token_ids":[1]}],"token_ids":[1]}`,
		`{"queries":[{"token_ids":[1]}],"queries":[{"token_ids":[2]},{"block_hashes":["3"]}]}`, `{"queries":[{"token_ids":[1]}],"queries":null}`, `{"queries":[{"token_ids":[1]},]}`, `{"queries":[{"token_ids":[1}]}`,
		`{"a":` + strings.Repeat("[", 40) + strings.Repeat("]", 40) + `}`, `{"a":` + strings.Repeat(`{"b":[`, 40) + strings.Repeat("]}", 40) + `}`, `{"a":` + strings.Repeat("[", 100_000),
		`{"queries":[` + strings.Repeat("{},", maxPrompts-1) + `{}]}`, `{"queries":[` + strings.Repeat("{},", maxPrompts) + `{}]}`,
	}
	// Long arrays, with each thing that ends the fast path at each place of a block.
	long := string(benchBody(60, ","))
	out = append(out, long, string(benchBody(60, ", ")), string(benchBody(60, ",\n    ")), string(benchBody(60, " ,")), strings.ReplaceAll(long, "token_ids", "block_hashes"))
	for _, piece := range []string{" ", "-", ".", "e5", "]", "[", ",", "00", "9999999", "99999999999", `"`, "x", "\x80", "\x00", "\n"} {
		for at := 36; at < 36+70; at++ {
			out = append(out, long[:at]+piece+long[at:])
		}
	}
	return out
}

func TestScannerReadsWhatEncodingJSONReads(t *testing.T) {
	w := newWork()
	for _, body := range bodies() {
		compareJSON(t, w, []byte(body), tokenIDs)
		compareJSON(t, w, []byte(body), blockHashes)
	}
}

// TestScannerOnMutations changes bodies at random, so that what is nearly right
// is tried too.
func TestScannerOnMutations(t *testing.T) {
	rng := rand.New(rand.NewPCG(20, 26))
	var seeds [][]byte
	for _, body := range bodies() {
		if len(body) < 1000 {
			seeds = append(seeds, []byte(body))
		}
	}
	pieces := []string{`"`, `\`, `,`, `:`, `[`, `]`, `{`, `}`, ` `, "\n", `0`, `-`, `.`, `e`, `12345678`, `null`, `"top":1,`, `"token_ids":[5],`, `"model_name":"z",`, `"queries":[{}],`, `\u00e9`, "\xff", "\x00"}
	w := newWork()
	n := 40_000
	if testing.Short() {
		n = 5_000
	}
	for range n {
		b := slices.Clone(seeds[rng.IntN(len(seeds))])
		for range 1 + rng.IntN(3) {
			at := rng.IntN(len(b) + 1)
			switch rng.IntN(4) {
			case 0:
				b = slices.Insert(b, at, []byte(pieces[rng.IntN(len(pieces))])...)
			case 1:
				b = slices.Delete(b, at, min(len(b), at+1+rng.IntN(3)))
			case 2:
				if at < len(b) {
					b[at] = byte(rng.Uint32())
				}
			case 3:
				other := seeds[rng.IntN(len(seeds))]
				b = append(b[:at:at], other[rng.IntN(len(other)+1):]...)
			}
		}
		compareJSON(t, w, b, tokenIDs)
		compareJSON(t, w, b, blockHashes)
	}
}

func FuzzScanner(f *testing.F) {
	for _, body := range bodies() {
		if len(body) < 2000 {
			f.Add([]byte(body))
		}
	}
	w := newWork()
	f.Fuzz(func(t *testing.T, body []byte) {
		compareJSON(t, w, body, tokenIDs)
		compareJSON(t, w, body, blockHashes)
	})
}

// TestScannerOnTokens reads tokens of every length in every spelling of an array.
func TestScannerOnTokens(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	w := newWork()
	for _, space := range []string{"", " ", "  ", "\n", "\r\n\t", "                    "} {
		for range 200 {
			want := make([]uint32, rng.IntN(300))
			var b bytes.Buffer
			b.WriteString(`{"token_ids":[`)
			for i := range want {
				want[i] = rng.Uint32() >> rng.IntN(32)
				if i > 0 {
					b.WriteString("," + space)
				}
				fmt.Fprint(&b, want[i])
				if rng.IntN(50) == 0 {
					b.WriteString(space)
				}
			}
			b.WriteString(`],"model_name":"m"}`)
			w.reset()
			w.content, w.body = tokenIDs, b.Bytes()
			if err := w.readCall(mediaJSON, ""); err != nil || w.outer.err != nil || !slices.Equal(w.outer.tokens, want) || string(w.outer.model) != "m" {
				t.Fatalf("%q: %v, %v, %v", b.Bytes(), w.outer.tokens, err, w.outer.err)
			}
		}
	}
}
