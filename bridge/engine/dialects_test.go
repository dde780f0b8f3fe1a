package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// dialect is how one release of one engine writes events.
type dialect struct {
	name            string
	stored, removed int // elements of an event that is an array; 0: a map
	elements        int // of the batch; 0: a map
	signed          bool
	sglang, dynamo  bool
}

var dialects = []dialect{
	{name: "vllm 0.8", stored: 6, removed: 2, elements: 2},
	{name: "vllm 0.9", stored: 6, removed: 2, elements: 3},
	{name: "vllm 0.10", stored: 7, removed: 3, elements: 3},
	{name: "vllm 0.14", stored: 8, removed: 3, elements: 3},
	{name: "vllm 0.18", stored: 9, removed: 3, elements: 3},
	{name: "vllm 0.20", stored: 10, removed: 4, elements: 3},
	{name: "vllm 0.23", stored: 12, removed: 4, elements: 3},
	{name: "vllm array to come", stored: 17, removed: 8, elements: 4},
	{name: "vllm map", elements: 3},
	{name: "vllm map, identified", elements: 4},
	{name: "map batch"},
	{name: "sglang array", stored: 7, removed: 3, elements: 3, signed: true, sglang: true},
	{name: "sglang map", elements: 3, signed: true, sglang: true},
	{name: "sglang fork", elements: 5, signed: true, sglang: true},
	{name: "dynamo array", stored: 15, removed: 8, elements: 3, dynamo: true},
}

// pair is one pair of an ordered map.
type pair struct {
	key string
	val any
}

type ordered []pair

func (o ordered) EncodeMsgpack(e *msgpack.Encoder) error {
	if err := e.EncodeMapLen(len(o)); err != nil {
		return err
	}
	for _, p := range o {
		if err := e.EncodeMulti(p.key, p.val); err != nil {
			return err
		}
	}
	return nil
}

// encode writes integers in their shortest form, as all engines do, or in the
// width of their Go type.
func encode(tb testing.TB, v any, shortest bool) []byte {
	tb.Helper()
	var buf bytes.Buffer
	e := msgpack.NewEncoder(&buf)
	e.UseCompactInts(shortest)
	if err := e.Encode(v); err != nil {
		tb.Fatal(err)
	}
	return buf.Bytes()
}

// writer writes events in a dialect.
type writer struct {
	dialect
	rng *rand.Rand
}

func (w writer) chance(percent int) bool { return w.rng.IntN(100) < percent }

func pick[T any](rng *rand.Rand, list ...T) T { return list[rng.IntN(len(list))] }

// event invents an event that the dialect can say.
func (w writer) event() plain {
	rng := w.rng
	p := plain{Kind: pick(rng, Stored, Stored, Stored, Removed, Cleared), Tier: "device"}
	if p.Kind == Cleared {
		return p
	}
	for range rng.IntN(6) {
		p.Hashes = append(p.Hashes, w.hash())
	}
	array := w.stored > 0
	says := func(stored, removed int) bool { // whether the array goes that far
		return !array || p.Kind == Stored && w.stored > stored || p.Kind == Removed && removed > 0 && w.removed > removed
	}
	if says(6, 2) {
		p.Medium = pick[any](rng, nil, "", "GPU", "gpu", "CPU_PINNED", "Disk", "EXTERNAL", "FS", "QUANTUM")
		p.Tier = tierOf(p.Medium)
	}
	if says(9, 3) && !w.sglang {
		p.Group = pick[any](rng, nil, int64(0), int64(1), int64(70000))
	}
	if (says(12, 5) || says(12, 4) && !w.dynamo) && !w.sglang {
		p.Remote = w.chance(20)
	}
	if says(13, 7) && (!array || p.Kind == Stored || w.dynamo) && !w.sglang {
		p.Owner = pick[any](rng, nil, nil, "kvcr")
	}
	if p.Kind == Removed {
		if !array && w.chance(20) {
			p.Remaining = []uint64{}
			for range p.Hashes {
				p.Remaining = append(p.Remaining, uint64(rng.IntN(300)))
			}
		}
		if w.dynamo {
			p.SpecKind = pick[any](rng, nil, "mamba")
		}
		return p
	}
	if w.chance(60) {
		p.Parent = w.hash()
	}
	p.BlockSize = pick[int64](rng, 0, 1, 16, 64, -4)
	for range rng.IntN(40) {
		p.Tokens = append(p.Tokens, rng.Uint32()>>rng.IntN(32))
	}
	if len(p.Tokens) >= 2 && w.chance(20) {
		p.Over = 1
	}
	if says(7, 0) && !w.sglang {
		p.Lora = pick(rng, "", "", "adapter-a")
	}
	if !array || w.sglang || says(8, 0) {
		p.Salt = pick(rng, "", "", "tenant-a")
	}
	if says(8, 0) && !w.sglang && w.chance(30) {
		some := false
		for range p.Hashes {
			var block []uint64
			for range rng.IntN(3) {
				block, some = append(block, rng.Uint64()), true
			}
			p.MM = append(p.MM, block)
		}
		if !some {
			p.MM = nil
		}
	}
	if p.Salt != "" && array && !w.sglang && len(p.Hashes) == 0 {
		p.Salt = "" // there is no first block to say it with
	}
	if says(10, 0) && !w.sglang {
		p.SpecKind = pick[any](rng, nil, "full_attention", "sliding_window")
	}
	return p
}

func (w writer) hash() any {
	h := w.rng.Uint64() >> w.rng.IntN(64)
	if w.signed || w.chance(80) {
		return h
	}
	if name := fmt.Sprintf("%0*x", 1+w.rng.IntN(120), h); w.chance(50) {
		return bin(name)
	} else {
		return name
	}
}

func (w writer) hashValue(h any) any {
	switch h := h.(type) {
	case uint64:
		if w.signed {
			return int64(h)
		}
	case bin:
		return []byte(h)
	}
	return h
}

func (w writer) hashValues(hashes []any) []any {
	out := []any{}
	for _, h := range hashes {
		out = append(out, w.hashValue(h))
	}
	return out
}

func (w writer) tokens(p plain) any {
	if len(p.Tokens) == 0 && w.chance(50) {
		return nil
	}
	out := []any{}
	for i, t := range p.Tokens {
		switch {
		case p.Over == 0:
			out = append(out, t)
		case i > 0:
			out = append(out, []any{p.Tokens[i-1], t})
		}
	}
	return out
}

// extraKeys says salt and multimodal hashes, among other things.
func (w writer) extraKeys(p plain, salt, mm bool) any {
	rng := w.rng
	if !salt && !mm && w.chance(30) {
		return nil
	}
	out := []any{}
	for i := range p.Hashes {
		if p.Lora == "" && p.MM == nil && (i > 0 || !salt) && w.chance(80) {
			out = append(out, nil)
			continue
		}
		keys := []any{}
		if p.Lora != "" {
			keys = append(keys, p.Lora)
		}
		if mm && p.MM != nil {
			for _, h := range p.MM[i] {
				id := fmt.Sprintf(pick(rng, "%016x%048x", "%016X%048X"), h, rng.Uint64())
				keys = append(keys, pick[any](rng, id, []any{id, rng.IntN(100) - 50}))
			}
		}
		keys = append(keys, pick[any](rng, "tenant-b", []byte("digest"), 7, 1.5, nil, true, []any{}, []any{"x", 1}, ordered{{"k", []any{1}}}))
		if i == 0 && salt {
			keys = append(keys, saltPrefix+p.Salt)
		}
		out = append(out, keys)
	}
	return out
}

func (w writer) mmInfos(p plain) any {
	out := []any{}
	for _, block := range p.MM {
		var objects []any
		for _, h := range block {
			if w.stored > 0 {
				objects = append(objects, []any{h, []any{[]any{0, 1}}})
			} else {
				objects = append(objects, ordered{{"offsets", []any{[]any{0, 1}}}, {"mm_hash", h}})
			}
		}
		switch {
		case objects == nil:
			out = append(out, nil)
		case w.stored > 0:
			out = append(out, []any{objects})
		default:
			out = append(out, ordered{{"mm_objects", objects}, {"x", nil}})
		}
	}
	return out
}

func (w writer) locality(p plain) any {
	if p.Remote {
		return pick[any](w.rng, "REMOTE", "REMOTE", "remote")
	}
	return pick[any](w.rng, nil, "", "LOCAL")
}

func textOrNil(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// value is the event as the dialect writes it.
func (w writer) value(p plain) any {
	if w.stored > 0 {
		return w.arrayValue(p)
	}
	return w.mapValue(p)
}

func (w writer) arrayValue(p plain) any {
	rng := w.rng
	switch p.Kind {
	case Cleared:
		if w.stored > 12 {
			return []any{"AllBlocksCleared", pick[any](rng, nil, "kvcr", 1)}
		}
		return []any{"AllBlocksCleared"}
	case Removed:
		locality := w.locality(p)
		if locality == "remote" || locality == "" {
			locality = nil
			if p.Remote {
				locality = "REMOTE"
			}
		}
		out := []any{"BlockRemoved", w.hashValues(p.Hashes), p.Medium, p.Group}
		if w.dynamo {
			return append(out, p.SpecKind, nil, locality, p.Owner, true)[:w.removed]
		}
		return append(out, locality, p.Owner, 1, 2, 3)[:w.removed]
	}
	out := []any{"BlockStored", w.hashValues(p.Hashes), w.hashValue(p.Parent), w.tokens(p), p.BlockSize, pick[any](rng, nil, 1), p.Medium}
	if w.sglang {
		if p.Salt != "" {
			out = append(out, ordered{{"priority", 1}, {"cache_salt", p.Salt}})
		}
		return out
	}
	infos := w.dynamo && (p.MM != nil || p.Group != nil) && w.chance(50)
	out = append(out, textOrNil(p.Lora), w.extraKeys(p, p.Salt != "", !infos))
	if infos && p.MM == nil {
		out = append(out, nil) // an empty slot
	} else if infos {
		out = append(out, w.mmInfos(p))
	}
	window := pick[any](rng, nil, 4096)
	if w.dynamo && p.Group == nil && p.SpecKind != nil && w.chance(50) {
		out = append(out, p.SpecKind, window) // no slot for the group
	} else {
		out = append(out, p.Group, p.SpecKind, window)
	}
	out = append(out, w.locality(p), p.Owner, "session", pick[any](rng, 1, []any{2}), nil, "x-future")
	return out[:min(len(out), w.stored)]
}

func (w writer) mapValue(p plain) any {
	rng := w.rng
	out := ordered{{"type", map[Kind]string{Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}[p.Kind]}}
	add := func(key string, v any, zero bool) {
		if !zero || w.chance(40) { // encoders may leave out what is nil
			out = append(out, pair{key, v})
		}
	}
	if p.Kind != Cleared {
		out = append(out, pair{"block_hashes", w.hashValues(p.Hashes)})
		add("medium", p.Medium, p.Medium == nil)
		add("group_idx", p.Group, p.Group == nil)
		add("locality", w.locality(p), !p.Remote)
		add("ownership", p.Owner, p.Owner == nil)
		add("session_id", "s-1", true)
		add("x_future", ordered{{"a", []any{1, ordered{{"medium", "CPU"}}}}}, true)
	}
	if p.Kind == Removed {
		if p.Remaining != nil {
			out = append(out, pair{"remaining_copy_counts", p.Remaining})
		}
		add("token_ids", "of no interest here", true)
	}
	if p.Kind == Stored {
		tagged := p.Salt != "" && len(p.Hashes) > 0 && w.chance(30)
		infos := p.MM != nil && w.chance(50)
		add("parent_block_hash", w.hashValue(p.Parent), p.Parent == nil)
		out = append(out, pair{"token_ids", w.tokens(p)})
		add("block_size", p.BlockSize, p.BlockSize == 0)
		add("lora_id", 3, true)
		add("lora_name", textOrNil(p.Lora), p.Lora == "")
		add("kv_cache_spec_kind", p.SpecKind, p.SpecKind == nil)
		add("kv_cache_spec_sliding_window", 8, true)
		add("extra_keys", w.extraKeys(p, tagged, !infos), !tagged && (infos || p.MM == nil))
		if !tagged {
			add("cache_salt", textOrNil(p.Salt), p.Salt == "")
		}
		if infos {
			out = append(out, pair{"block_mm_infos", w.mmInfos(p)})
		} else {
			add("block_mm_infos", pick[any](rng, nil, "not a list", []any{7}), true)
		}
	}
	if w.chance(30) {
		rng.Shuffle(len(out), func(i, k int) { out[i], out[k] = out[k], out[i] })
	}
	return out
}

// batch is a whole payload.
func (w writer) batch(tb testing.TB, ts float64, rank any, events []plain) []byte {
	values := []any{}
	for _, p := range events {
		values = append(values, w.value(p))
	}
	publisher := []byte("0123456789abcdef")
	if w.elements == 0 {
		b := ordered{{"ts", ts}, {"events", values}, {"data_parallel_rank", rank}, {"publisher_id", publisher}, {"x", []any{1}}}
		w.rng.Shuffle(len(b), func(i, k int) { b[i], b[k] = b[k], b[i] })
		return encode(tb, b, w.chance(70))
	}
	return encode(tb, []any{ts, values, rank, publisher, []any{"CacheStateDigest", 5, "00"}}[:w.elements], w.chance(70))
}

func TestEveryDialectSaysTheSame(t *testing.T) {
	for _, dia := range dialects {
		t.Run(dia.name, func(t *testing.T) {
			w := writer{dia, rand.New(rand.NewPCG(7, 11))}
			d, b := NewDecoder(Profile{}, media(t, disputed)), new(Batch)
			for round := range 400 {
				var want []plain
				for range w.rng.IntN(8) {
					want = append(want, w.event())
				}
				rank := pick[any](w.rng, nil, 0, 3, 1<<32-1)
				payload := w.batch(t, 1700000000.25, rank, want)
				if err := d.Decode(payload, b); err != nil {
					t.Fatalf("round %d: %v\n%x", round, err, payload)
				}
				compare(t, fmt.Sprintf("round %d, payload %x", round, payload), plainEvents(b), want)
				if drops(b) != "" || b.Partial || b.TS != 1700000000.25 {
					t.Fatalf("round %d: dropped %s, partial %v, timestamp %v", round, drops(b), b.Partial, b.TS)
				}
				if hasRank := rank != nil && dia.elements != 2; b.HasRank != hasRank || hasRank && fmt.Sprint(b.Rank) != fmt.Sprint(rank) {
					t.Fatalf("round %d: rank %d, %v, want %v", round, b.Rank, b.HasRank, rank)
				}
				if identified := dia.elements == 0 || dia.elements > 3; (string(b.Publisher) == "0123456789abcdef") != identified {
					t.Fatalf("round %d: publisher %q", round, b.Publisher)
				}
				if t.Failed() {
					return
				}
			}
		})
	}
}
