package mock

import (
	"encoding/hex"
	"errors"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
	"github.com/kvmesh/kvmesh/integration/model"
)

const bigHash = 0xdab7b1e2b5a06e00 // negative as a signed integer

func ints(v ...uint64) []model.Hash {
	var out []model.Hash
	for _, x := range v {
		out = append(out, model.Int(x))
	}
	return out
}

// The batches whose payloads are in golden. Unless they say otherwise they have
// block size 4, rank 3 and a timestamp in seconds.
func batches() map[string]Batch {
	long := make([]byte, 32)
	for i := range long {
		long[i] = byte(i + 1)
	}
	four := []int64{1, 2, 3, 4}
	out := map[string]Batch{
		"plain": {Events: []model.Event{
			{Hashes: ints(1, bigHash), Tokens: []int64{1, 2, 3, 4, 127, 128, 151935, 65536}},
			{Hashes: ints(300, 70000), Parent: model.Int(bigHash), Tokens: []int64{0, 255, 256, 65535, 4294967295, 5, 6, 7}},
			{Op: model.Remove, Hashes: ints(1, bigHash)},
			{Op: model.Clear},
		}},
		"no rank": {},
		"media": {Events: []model.Event{
			{Hashes: ints(9), Parent: model.Int(5), Tokens: []int64{}, BlockSize: new(0), Medium: "CPU"},
			{Hashes: ints(9), BlockSize: new(300), Medium: "DISK"},
			{Op: model.Remove, Hashes: ints(9), Medium: "CPU"},
		}},
		"lora": {Events: []model.Event{{Hashes: ints(9), Tokens: four, LoRA: "adapter-a"}}},
		"salt": {Events: []model.Event{{Hashes: ints(9), Tokens: four, Salt: "tenant-a"}}},
		"groups": {Events: []model.Event{
			{Hashes: ints(9), Tokens: four, Group: new(1), Kind: new("sliding_window"),
				Wire: model.Wire{Also: []model.Field{{Name: "kv_cache_spec_sliding_window", Value: 64}}}},
			{Op: model.Remove, Hashes: ints(9), Group: new(1)},
		}},
		"multimodal": {Events: []model.Event{{Hashes: ints(9, 10), Tokens: []int64{1, 2, 3, 4, 5, 6, 7, 8},
			MM: [][]uint64{nil, {0xfedcba9876543210, 0x0123456789abcdef}}}}},
		"hash forms": {Events: []model.Event{
			{Hashes: []model.Hash{model.Bytes(long), model.Text("hash1"), model.Bytes(make([]byte, 16))}, Parent: model.Text("p"),
				Tokens: []int64{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
			{Hashes: ints(0), Parent: model.Bytes(long), Tokens: []int64{2, 2, 2, 2}},
		}},
		"pairs": {Events: []model.Event{{Hashes: ints(7, 8), Tokens: []int64{1, 2, 3, 4, 5, 6, 7, 300, 9}, Pairs: true}}},
		"map only": {Events: []model.Event{
			{Hashes: ints(7), Tokens: four, Locality: "LOCAL"},
			{Op: model.Remove, Hashes: ints(7), Locality: "REMOTE", Remaining: []int{2}},
		}},
		"wire": {Events: []model.Event{
			{Hashes: ints(7), Tokens: four, Wire: model.Wire{
				Also: []model.Field{{Name: "medium"}, {Name: "session_id", Value: "s-1"}, {Name: "x_future", Value: map[string]any{"a": []any{1}}}},
				Omit: []string{"lora_id", "lora_name"}, Shuffle: true}},
			{Op: model.Remove, Hashes: ints(7), Wire: model.Wire{Omit: []string{"medium"}}},
		}},
		"raw":   {},
		"extra": {TS: 1758000000123, Extra: []any{[]byte{0, 1, 2, 3}, []any{"x", 5}}},
	}
	raw := out["raw"]
	for _, v := range []any{[]any{"NoSuchEvent", []any{1, -200}, nil}, map[string]any{"type": "BlockStored", "block_hashes": 7}, "oops", nil, true, []byte{1, 2}, 1.5} {
		raw.Events = append(raw.Events, model.Event{Op: model.Raw, Wire: model.Wire{Value: v}})
	}
	out["raw"] = raw
	for name, b := range out {
		b.BlockSize = 4
		if b.TS == nil {
			b.TS = 1700000000.25
		}
		if name != "no rank" {
			b.Rank = new(uint32(3))
		}
		out[name] = b
	}
	return out
}

func TestPayloadsAreThoseOfPythonEngines(t *testing.T) {
	all := batches()
	for _, g := range golden {
		b, ok := all[g.batch]
		if !ok {
			t.Fatalf("no batch %q", g.batch)
		}
		got, err := g.dialect.Encode(b)
		if err != nil {
			t.Errorf("%s in %s: %v", g.batch, g.dialect, err)
		} else if hex.EncodeToString(got) != g.payload {
			t.Errorf("%s in %s:\n got %x\nwant %s", g.batch, g.dialect, got, g.payload)
		}
	}
}

func TestDialectsRefuse(t *testing.T) {
	all := batches()
	for _, c := range []struct {
		dialect Dialect
		batch   string
		want    error
	}{
		{"vllm-array-0.24", "plain", ErrDialect},
		{"", "plain", ErrDialect},
		{VLLMArray09, "media", ErrCannotSay},
		{VLLMArray10, "lora", ErrCannotSay},
		{SGLangArray, "lora", ErrCannotSay},
		{VLLMArray23, "salt", ErrCannotSay},
		{VLLMArray18, "groups", ErrCannotSay},
		{VLLMArray20, "groups", ErrCannotSay},
		{VLLMArray14, "multimodal", ErrCannotSay},
		{VLLMArray23, "map only", ErrCannotSay},
		{SGLangArray, "wire", ErrCannotSay},
	} {
		if _, err := c.dialect.Encode(all[c.batch]); !errors.Is(err, c.want) {
			t.Errorf("%s in %s: error %v, want %v", c.batch, c.dialect, err, c.want)
		}
	}
	if Dialect("x").Features() != 0 {
		t.Error("an unknown dialect has features")
	}
	if _, err := VLLMMap.Encode(Batch{TS: func() {}}); err == nil {
		t.Error("a function was encoded")
	}
}

// TestDialectsCarryTheirFeatures encodes traffic of all features a dialect has,
// and checks that no feature it lacks could be said.
func TestDialectsCarryTheirFeatures(t *testing.T) {
	prompts := model.Prompts(model.PromptOptions{BlockSize: 4, N: 8, Spaced: 4})
	for _, d := range Dialects() {
		for _, p := range []model.Profile{model.VLLM, model.SGLang} {
			tr := model.NewTraffic(model.TrafficOptions{Seed: 1, BlockSize: 4, Profile: p, Features: d.Features()}, prompts)
			for range 400 {
				b, err := d.Encode(Batch{TS: 1.5, Events: tr.Batch(), BlockSize: 4})
				if err != nil {
					t.Fatalf("%s: %v", d, err)
				}
				r := mpack.NewReader(b)
				if r.Skip(); r.Err() != nil || r.Len() != 0 {
					t.Fatalf("%s: %x: %v", d, b, r.Err())
				}
			}
		}
	}
	all := batches()
	for f, batch := range map[model.Feature]string{model.Media: "media", model.LoRA: "lora", model.Kinds: "groups", model.Locality: "map only"} {
		for _, d := range Dialects() {
			_, err := d.Encode(all[batch])
			if says := d.Features()&f != 0; says != (err == nil) && d != SGLangMap { // which has a place for anything
				t.Errorf("%s: feature %#x %v, but %q: %v", d, f, says, batch, err)
			}
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	tokens := make([]int64, 256)
	for i := range tokens {
		tokens[i] = int64(i * 590)
	}
	batch := Batch{TS: 1700000000.25, Rank: new(uint32(0)), BlockSize: 16, Events: []model.Event{{Tokens: tokens}}}
	for i := range uint64(16) {
		batch.Events[0].Hashes = append(batch.Events[0].Hashes, model.Int(bigHash+i))
	}
	for _, d := range []Dialect{VLLMMap, VLLMArray23, SGLangArray} {
		b.Run(string(d), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p, err := d.Encode(batch)
				if err != nil {
					b.Fatal(err)
				}
				b.SetBytes(int64(len(p)))
			}
		})
	}
}
