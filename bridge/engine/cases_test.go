package engine

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

// wireCase is a case of testdata/cases.json: frames as engines send them, and
// what they mean.
type wireCase struct {
	ID     string
	Engine string
	Input  []struct {
		Op      string
		Batch   any
		Decoded any
		Frames  []string `json:"frames_hex"`
	}
	Expected map[string]any
}

func loadCases(tb testing.TB) []wireCase {
	tb.Helper()
	raw, err := os.ReadFile("testdata/cases.json")
	if err != nil {
		tb.Fatal(err)
	}
	var file struct {
		Count int
		Cases []wireCase
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&file); err != nil || len(file.Cases) != file.Count {
		tb.Fatalf("%d cases of %d: %v", len(file.Cases), file.Count, err)
	}
	return file.Cases
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// payloads returns the payloads of all frames in the cases.
func payloads(tb testing.TB) [][]byte {
	var out [][]byte
	for _, c := range loadCases(tb) {
		for _, in := range c.Input {
			if len(in.Frames) > 0 {
				out = append(out, unhex(in.Frames[len(in.Frames)-1]))
			}
		}
	}
	return out
}

func TestCases(t *testing.T) {
	ran := 0
	for _, c := range loadCases(t) {
		if c.ID[0] != 'D' && c.ID[0] != 'T' {
			continue
		}
		t.Run(c.ID, func(t *testing.T) {
			d, all := NewDecoder(Profile{}, media(t, disputed)), []*Batch{}
			for i, in := range c.Input {
				if in.Op != "live" {
					continue
				}
				ran++
				b := new(Batch)
				err := d.Decode(unhex(in.Frames[len(in.Frames)-1]), b)
				if in.Batch == nil {
					in.Batch = in.Decoded
				}
				if in.Batch == nil { // corrupt
					if c.Expected["decode"] == "error" && (err == nil || len(b.Events) > 0) {
						t.Errorf("input %d: %d events, error %v, want an error", i, len(b.Events), err)
					}
					continue
				}
				if err != nil {
					t.Fatalf("input %d: %v", i, err)
				}
				checkBatch(t, fmt.Sprintf("input %d", i), b, in.Batch)
				all = append(all, b)
			}
			checkExpected(t, c.Expected, all)
		})
	}
	if ran < 90 {
		t.Errorf("only %d payloads were decoded", ran)
	}
}

// checkBatch compares with the batch as the case writes it down.
func checkBatch(t *testing.T, what string, b *Batch, batch any) {
	t.Helper()
	var parts [3]any
	if m, ok := batch.(map[string]any); ok {
		parts = [3]any{m["ts"], m["events"], m["data_parallel_rank"]}
	} else {
		copy(parts[:], batch.([]any))
	}
	var want []plain
	bad := 0
	for _, e := range parts[1].([]any) {
		if p, ok := plainJSON(e); ok {
			want = append(want, p)
		} else {
			bad++
		}
	}
	compare(t, what, plainEvents(b), want)
	dropped := 0
	for _, n := range b.Dropped {
		dropped += n
	}
	if dropped != bad {
		t.Errorf("%s: dropped %s, want %d events", what, drops(b), bad)
	}
	if ts, err := parts[0].(json.Number).Float64(); err != nil || ts != b.TS {
		t.Errorf("%s: timestamp %v, want %v", what, b.TS, parts[0])
	}
	rank, has := parts[2].(json.Number)
	if has != b.HasRank || has && rank.String() != fmt.Sprint(b.Rank) {
		t.Errorf("%s: rank %d, %v, want %v", what, b.Rank, b.HasRank, parts[2])
	}
}

// checkExpected compares with what the case says about decoding in words.
func checkExpected(t *testing.T, expected map[string]any, batches []*Batch) {
	t.Helper()
	var events []plain
	dropped, ranks, publishers := 0, []any{}, []any{}
	for _, b := range batches {
		events = append(events, plainEvents(b)...)
		for _, n := range b.Dropped {
			dropped += n
		}
		ranks = append(ranks, json.Number(fmt.Sprint(b.Rank)))
		publishers = append(publishers, hex.EncodeToString(b.Publisher))
	}
	for key, want := range expected {
		switch key {
		case "events":
			if len(want.([]any)) != len(events) {
				t.Fatalf("%d events, want %v", len(events), want)
			}
			for i, w := range want.([]any) {
				checkFields(t, i, events[i], w.(map[string]any))
			}
		case "errors":
			if fmt.Sprint(dropped) != want.(json.Number).String() {
				t.Errorf("%d drops, want %v", dropped, want)
			}
		case "applied_hashes":
			var got []any
			for _, e := range events {
				got = append(got, e.Hashes...)
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("hashes %v, want %v", got, want)
			}
		case "hash_bits_hex":
			for _, e := range events {
				if fmt.Sprintf("%016x", e.Hashes[0]) != want {
					t.Errorf("hash %x, want %v", e.Hashes[0], want)
				}
			}
		case "epoch":
			if !reflect.DeepEqual(publishers, want) {
				t.Errorf("publishers %v, want %v", publishers, want)
			}
		case "rank_used":
			// Where the batch has none, the caller falls back to the rank that
			// was registered.
			for i, w := range list(want) {
				if i < len(batches) && batches[i].HasRank && ranks[i] != w {
					t.Errorf("batch %d: rank %v, want %v", i, ranks[i], w)
				}
			}
		case "tiers":
			for i, w := range want.([]any) {
				name := strings.TrimSuffix(w.(string), "?")
				if got := events[i].Tier; got != name {
					t.Errorf("medium %v is tier %s, want %s", events[i].Medium, got, name)
				}
			}
		}
	}
}

func list(v any) []any {
	if _, isNumber := v.(json.Number); isNumber {
		return []any{v}
	}
	l, _ := v.([]any)
	return l
}

func checkFields(t *testing.T, i int, e plain, fields map[string]any) {
	t.Helper()
	want, ok := map[string]any{}, true
	got := map[string]any{
		"kind": e.Kind.String(), "hashes": e.Hashes, "parent": e.Parent, "medium": e.Medium, "cache_salt": e.Salt,
		"lora_name": e.Lora, "group_idx": e.Group, "kv_cache_spec_kind": e.SpecKind, "block_size": e.BlockSize,
		"tokens": e.Tokens, "locality": nil,
	}
	for key, v := range fields {
		switch key {
		case "lora_id", "extra_keys", "kv_cache_spec_sliding_window", "token_form":
			continue // read past, or checked as part of another
		case "hashes":
			hashes := []any{}
			for _, h := range v.([]any) {
				hashes = append(hashes, hashJSON(h))
			}
			v = hashes
		case "parent":
			if v != nil {
				v = hashJSON(v)
			}
		case "tokens", "pairs":
			key = "tokens"
			v, _ = tokensJSON(v)
		case "block_size", "group_idx":
			if n, isNumber := v.(json.Number); isNumber {
				v, _ = n.Int64()
			}
		case "lora_name", "cache_salt":
			if v == nil {
				v = ""
			}
		case "hash_bits_hex":
			bits, err := strconv.ParseUint(v.([]any)[0].(string), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			key, v = "hashes", []any{bits}
		}
		if want[key] = v; !reflect.DeepEqual(got[key], v) {
			ok = false
		}
	}
	if !ok {
		t.Errorf("event %d is %v, want %v", i, got, want)
	}
}
