package engine

import (
	"errors"
	"reflect"
	"testing"
)

// stored is a good map event with some pairs replaced or added.
func stored(change ...pair) ordered {
	out := ordered{{"type", "BlockStored"}, {"block_hashes", []any{1}}, {"parent_block_hash", nil}, {"token_ids", []any{1, 2}}, {"block_size", 2}}
	return out.with(change...)
}

func removed(change ...pair) ordered {
	return ordered{{"type", "BlockRemoved"}, {"block_hashes", []any{1, 2}}, {"medium", "GPU"}}.with(change...)
}

func (o ordered) with(change ...pair) ordered {
	for _, c := range change {
		found := false
		for i := range o {
			if o[i].key == c.key {
				o[i], found = c, true
			}
		}
		if !found {
			o = append(o, c)
		}
	}
	return o
}

func storedArray(change map[int]any) []any {
	out := []any{"BlockStored", []any{1}, nil, []any{1, 2}, 2, nil, "GPU", nil, nil, nil, nil, nil}
	for i, v := range change {
		for len(out) <= i {
			out = append(out, nil)
		}
		out[i] = v
	}
	return out
}

// decodeOne decodes a batch of the event between two others, which have to
// come out whatever it is, and returns what became of it.
func decodeOne(t *testing.T, p Profile, event any) (got *plain, reason string) {
	t.Helper()
	d, b := NewDecoder(p, media(t, nil)), new(Batch)
	payload := encode(t, []any{1.5, []any{stored(), event, removed()}, 3}, true)
	if err := d.Decode(payload, b); err != nil {
		t.Fatalf("%v: %v", event, err)
	}
	events := plainEvents(b)
	n := len(events)
	if n < 2 || n > 3 || events[0].Kind != Stored || events[n-1].Kind != Removed || b.Partial || b.Rank != 3 {
		t.Fatalf("%v: %+v, partial %v, rank %d", event, events, b.Partial, b.Rank)
	}
	if n == 3 {
		got = &events[1]
	}
	if (drops(b) == "") != (n == 3) {
		t.Fatalf("%v: %d events, dropped %q", event, n, drops(b))
	}
	return got, drops(b)
}

func TestBadEvents(t *testing.T) {
	long := make([]byte, MaxName+1)
	for _, tt := range []struct {
		event  any
		reason string
	}{
		{nil, "no_event"}, {7, "no_event"}, {"oops", "no_event"}, {[]byte("x"), "no_event"}, {true, "no_event"},
		{[]any{}, "no_event"}, {ordered{}, "no_event"}, {[]any{7, []any{1}}, "no_event"}, {[]any{[]any{"BlockStored"}}, "no_event"},
		{ordered{{"no", "tag"}}, "no_event"}, {ordered{{"type", nil}}, "no_event"}, {ordered{{"type", 7}}, "no_event"},
		{append(stored(), pair{"type", "BlockRemoved"}), "no_event"}, {append(stored(), pair{"type", 1}), "no_event"},
		{[]any{"Ignored"}, "unknown_tag"}, {[]any{"BlockTransferred", []any{1}, "REMOTE"}, "unknown_tag"}, {[]any{"blockstored"}, "unknown_tag"},
		{ordered{{"type", "TierBlocksCleared"}, {"medium", 7}}, "unknown_tag"}, {ordered{{"medium", 7}, {"type", ""}}, "unknown_tag"},

		{[]any{"BlockStored"}, "missing_field"}, {[]any{"BlockStored", []any{1}}, "missing_field"}, {[]any{"BlockStored", []any{1}, nil}, "missing_field"},
		{[]any{"BlockRemoved"}, "missing_field"}, {[]any{"BlockRemoved", nil, "GPU"}, "missing_field"}, {ordered{{"type", "BlockRemoved"}}, "missing_field"},
		{ordered{{"type", "BlockStored"}}, "missing_field"}, {stored(pair{"block_hashes", nil}), "missing_field"},
		{append(stored(), pair{"block_hashes", nil}), "missing_field"},

		{[]any{"BlockStored", 1}, "bad_hash"}, {stored(pair{"block_hashes", "x"}), "bad_hash"}, {stored(pair{"block_hashes", ordered{}}), "bad_hash"},
		{stored(pair{"block_hashes", []any{1, nil}}), "bad_hash"}, {stored(pair{"block_hashes", []any{1.5}}), "bad_hash"},
		{stored(pair{"block_hashes", []any{true}}), "bad_hash"}, {stored(pair{"block_hashes", []any{[]any{1}}}), "bad_hash"},
		{stored(pair{"block_hashes", []any{""}}), "bad_hash"}, {stored(pair{"block_hashes", []any{[]byte{}}}), "bad_hash"},
		{stored(pair{"block_hashes", []any{long}}), "bad_hash"}, {removed(pair{"block_hashes", []any{string(long)}}), "bad_hash"},
		{stored(pair{"parent_block_hash", 1.5}), "bad_hash"}, {stored(pair{"parent_block_hash", []any{}}), "bad_hash"},
		{stored(pair{"parent_block_hash", long}), "bad_hash"}, {stored(pair{"parent_block_hash", false}), "bad_hash"},

		{stored(pair{"token_ids", []any{"x"}}), "bad_tokens"}, {stored(pair{"token_ids", []any{1, -4}}), "bad_tokens"},
		{stored(pair{"token_ids", []any{1, 1 << 32}}), "bad_tokens"}, {stored(pair{"token_ids", []any{1, 2.0}}), "bad_tokens"},
		{stored(pair{"token_ids", 7}), "bad_tokens"}, {stored(pair{"token_ids", []byte{1}}), "bad_tokens"}, {stored(pair{"token_ids", []any{1, nil}}), "bad_tokens"},
		{stored(pair{"token_ids", []any{[]any{1, 2}, []any{3, 4}}}), "bad_tokens"}, {stored(pair{"token_ids", []any{[]any{1, 2}, 3}}), "bad_tokens"},
		{stored(pair{"token_ids", []any{1, []any{1, 2}}}), "bad_tokens"}, {stored(pair{"token_ids", []any{[]any{1, 2, 3}}}), "bad_tokens"},
		{stored(pair{"token_ids", []any{[]any{1, -2}}}), "bad_tokens"}, {stored(pair{"token_ids", []any{[]any{}}}), "bad_tokens"},

		{stored(pair{"medium", 1}), "bad_field"}, {stored(pair{"medium", []byte("GPU")}), "bad_field"}, {removed(pair{"medium", 1}), "bad_field"},
		{stored(pair{"lora_name", 1}), "bad_field"}, {stored(pair{"lora_name", []any{}}), "bad_field"}, {stored(pair{"lora_name", ordered{{"cache_salt", 1}}}), "bad_field"},
		{stored(pair{"cache_salt", 1}), "bad_field"}, {stored(pair{"group_idx", "0"}), "bad_field"}, {stored(pair{"group_idx", 1.0}), "bad_field"},
		{stored(pair{"group_idx", uint64(1 << 63)}), "bad_field"}, {removed(pair{"group_idx", []any{}}), "bad_field"},
		{stored(pair{"kv_cache_spec_kind", 1}), "bad_field"}, {stored(pair{"locality", 1}), "bad_field"}, {removed(pair{"ownership", 1}), "bad_field"},
		{stored(pair{"block_size", "16"}), "bad_field"}, {stored(pair{"block_size", 16.0}), "bad_field"}, {ordered{{"type", "AllBlocksCleared"}, {"medium", 1}}, "bad_field"},
		{storedArray(map[int]any{6: 1}), "bad_field"}, {storedArray(map[int]any{7: 1}), "bad_field"}, {storedArray(map[int]any{9: true}), "bad_field"},
		{storedArray(map[int]any{9: 1, 10: 2}), "bad_field"}, {[]any{"BlockRemoved", []any{1}, "GPU", 1.5}, "bad_field"},

		{removed(pair{"remaining_copy_counts", []any{1}}), "bad_counts"}, {removed(pair{"remaining_copy_counts", []any{1, 2, 3}}), "bad_counts"},
		{removed(pair{"remaining_copy_counts", []any{1, -1}}), "bad_counts"}, {removed(pair{"remaining_copy_counts", []any{1, nil}}), "bad_counts"},
		{removed(pair{"remaining_copy_counts", 1}), "bad_counts"}, {removed(pair{"remaining_copy_counts", []any{}}), "bad_counts"},
	} {
		if got, reason := decodeOne(t, Profile{}, tt.event); got != nil || reason != tt.reason+":1" {
			t.Errorf("%v: %+v, dropped %q, want %s", tt.event, got, reason, tt.reason)
		}
	}
}

func TestFieldsThatDoNotMatter(t *testing.T) {
	want := plain{Kind: Stored, Hashes: []any{uint64(1)}, Tokens: []uint32{1, 2}, BlockSize: 2, Tier: "device"}
	gone := plain{Kind: Removed, Hashes: []any{uint64(1), uint64(2)}, Medium: "GPU", Tier: "device"}
	for _, tt := range []struct {
		event any
		want  plain
	}{
		{stored(pair{"lora_id", "x"}), want}, {stored(pair{"session_id", 1.5}), want}, {stored(pair{"kv_cache_spec_sliding_window", []any{}}), want},
		{stored(pair{"remaining_copy_counts", "x"}), want}, {stored(pair{"extra_keys", 7}), want}, {stored(pair{"extra_keys", ordered{{"a", 1}}}), want},
		{stored(pair{"block_mm_infos", []any{[]any{}}}), want}, {stored(pair{"", []any{ordered{}}}), want},
		{append(ordered{{"parent_block_hash", 7}, {"cache_salt", "x"}, {"token_ids", []any{9}}, {"block_hashes", []any{8, 9}}}, stored(pair{"cache_salt", nil})...), want},
		{append(stored(pair{"lora_name", "x"}), pair{"type", "BlockStored"}, pair{"lora_name", nil}), want},
		{append(stored(pair{"lora_name", "x"}, pair{"block_hashes", []any{"x", "y"}}), pair{"lora_name", ordered{}}, pair{"block_hashes", []any{1}}), want},
		{append(stored(pair{"token_ids", []any{[]any{1, 2}}}, pair{"parent_block_hash", "x"}), pair{"token_ids", []any{1, 2}}, pair{"parent_block_hash", 7}),
			plain{Kind: Stored, Hashes: []any{uint64(1)}, Parent: uint64(7), Tokens: []uint32{1, 2}, BlockSize: 2, Tier: "device"}},
		{append(removed(pair{"remaining_copy_counts", []any{1, 1}}), pair{"remaining_copy_counts", []any{2, 0}}),
			plain{Kind: Removed, Hashes: []any{uint64(1), uint64(2)}, Medium: "GPU", Tier: "device", Remaining: []uint64{2, 0}}},
		{removed(pair{"token_ids", 7}, pair{"parent_block_hash", 1.5}, pair{"lora_name", 3}), gone},
		{append(ordered{{"remaining_copy_counts", []any{1, 1}}}, removed(pair{"remaining_copy_counts", nil})...), gone},
		{[]any{"AllBlocksCleared", []any{}, 7}, plain{Kind: Cleared, Tier: "device"}},
		{ordered{{"block_hashes", 7}, {"type", "AllBlocksCleared"}}, plain{Kind: Cleared, Tier: "device"}},
		{ordered{{"type", "AllBlocksCleared"}, {"medium", "CPU"}, {"ownership", "kvcr"}}, plain{Kind: Cleared, Tier: "host", Medium: "CPU", Owner: "kvcr"}},
	} {
		if got, reason := decodeOne(t, Profile{}, tt.event); got == nil || !reflect.DeepEqual(*got, tt.want) {
			t.Errorf("%v: %+v, dropped %q, want %+v", tt.event, got, reason, tt.want)
		}
	}
	// Keys need not be strings.
	payload := encode(t, []any{1, []any{map[any]any{nil: 1, "type": "AllBlocksCleared", 3: "x"}}}, true)
	b := new(Batch)
	if err := NewDecoder(Profile{}, media(t, nil)).Decode(payload, b); err != nil || len(b.Events) != 1 {
		t.Errorf("%d events, %v", len(b.Events), err)
	}
}

// Arrays behind index 8 are told apart by the types of their elements.
func TestArrayTails(t *testing.T) {
	type tail struct {
		group, kind, owner any
		remote             bool
	}
	for _, tt := range []struct {
		array []any
		want  tail
	}{
		{[]any{3}, tail{group: int64(3)}},
		{[]any{nil, "mamba", 4096}, tail{kind: "mamba"}},
		{[]any{0, "mamba", nil, "LOCAL", "kvcr"}, tail{group: int64(0), kind: "mamba", owner: "kvcr"}},
		{[]any{0, "mamba", nil, "REMOTE"}, tail{group: int64(0), kind: "mamba", remote: true}},
		{[]any{0, nil, nil, 48}, tail{group: int64(0)}},
		{[]any{0, nil, nil, 48, 7, "x"}, tail{group: int64(0)}},
		{[]any{"mamba"}, tail{kind: "mamba"}},
		{[]any{"mamba", 4096, "REMOTE"}, tail{kind: "mamba", remote: true}},
		{[]any{[]any{nil}, 3, "mamba"}, tail{group: int64(3), kind: "mamba"}},
		{[]any{nil, 3, "mamba", true}, tail{group: int64(3), kind: "mamba"}},
	} {
		event := append([]any{"BlockStored", []any{1}, nil, []any{1}, 1, nil, nil, nil, nil}, tt.array...)
		got, reason := decodeOne(t, Profile{}, event)
		if got == nil || (tail{got.Group, got.SpecKind, got.Owner, got.Remote}) != tt.want {
			t.Errorf("stored %v: %+v, dropped %q, want %+v", tt.array, got, reason, tt.want)
		}
	}
	for _, tt := range []struct {
		array []any
		want  tail
	}{
		{[]any{3}, tail{group: int64(3)}},
		{[]any{0, "LOCAL", "kvcr"}, tail{group: int64(0), owner: "kvcr"}},
		{[]any{nil, "REMOTE"}, tail{remote: true}},
		{[]any{3, "mamba", nil, "REMOTE", "kvcr", true}, tail{group: int64(3), kind: "mamba", owner: "kvcr", remote: true}},
		{[]any{"mamba"}, tail{kind: "mamba"}},
		{[]any{nil, 7, 8, 9, 10}, tail{}},
		{[]any{1, []any{1}, ordered{}}, tail{group: int64(1)}},
	} {
		got, reason := decodeOne(t, Profile{}, append([]any{"BlockRemoved", []any{1}, "GPU"}, tt.array...))
		if got == nil || (tail{got.Group, got.SpecKind, got.Owner, got.Remote}) != tt.want {
			t.Errorf("removed %v: %+v, dropped %q, want %+v", tt.array, got, reason, tt.want)
		}
	}
}

func TestExtraKeys(t *testing.T) {
	const a, b = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef", "FEDCBA9876543210fedcba9876543210fedcba9876543210fedcba9876543210"
	const ha, hb = 0x0123456789abcdef, 0xfedcba9876543210
	type keys struct {
		mm         [][]uint64
		salt, lora string
	}
	object := func(hashes ...any) any {
		var out []any
		for _, h := range hashes {
			out = append(out, ordered{{"mm_hash", h}, {"offsets", []any{}}})
		}
		return ordered{{"mm_objects", out}}
	}
	for _, tt := range []struct {
		fields []pair
		want   keys
	}{
		{[]pair{{"extra_keys", []any{nil, []any{a}, []any{[]any{b, 3}, []any{a, -1}}}}}, keys{mm: [][]uint64{nil, {ha}, {hb, ha}}}},
		{[]pair{{"extra_keys", []any{[]any{a}, nil, nil}}}, keys{mm: [][]uint64{{ha}, nil, nil}}},
		{[]pair{{"extra_keys", []any{[]any{a}}}}, keys{mm: [][]uint64{{ha}, nil, nil}}},
		{[]pair{{"extra_keys", []any{[]any{a[1:]}, []any{a + "0"}, []any{a[1:] + "g"}, []any{[]byte(a)}}}}, keys{}},
		{[]pair{{"extra_keys", []any{[]any{a[1:] + "g"}, []any{[]any{a}, []any{a, 1, 2}, []any{1, a}}, a}}}, keys{}},
		{[]pair{{"extra_keys", []any{nil, nil, nil, []any{a}}}}, keys{mm: [][]uint64{nil, nil, nil}}},
		{[]pair{{"extra_keys", []any{}}}, keys{}},
		// A name or a salt that looks like an identifier is none.
		{[]pair{{"lora_name", a}, {"extra_keys", []any{[]any{a, b}}}}, keys{lora: a, mm: [][]uint64{{hb}, nil, nil}}},
		{[]pair{{"extra_keys", []any{[]any{a}}}, {"cache_salt", a}}, keys{salt: a}},
		// Salts.
		{[]pair{{"extra_keys", []any{[]any{"t0", saltPrefix + "t1", saltPrefix + "t2"}}}}, keys{salt: "t1"}},
		{[]pair{{"extra_keys", []any{[]any{saltPrefix, saltPrefix + a}}}}, keys{salt: a}},
		{[]pair{{"extra_keys", []any{[]any{saltPrefix + "t1"}}}, {"cache_salt", "top"}}, keys{salt: "top"}},
		{[]pair{{"extra_keys", []any{[]any{saltPrefix + "t1"}}}, {"cache_salt", ""}}, keys{salt: "t1"}},
		{[]pair{{"extra_keys", []any{nil, []any{saltPrefix + "t1"}}}}, keys{}},
		{[]pair{{"extra_keys", []any{[]any{[]any{saltPrefix + "t1", 0}, []byte(saltPrefix + "t1")}}}}, keys{}},
		{[]pair{{"extra_keys", []any{saltPrefix + "t1"}}}, keys{}},
		// Multimodal infos come before extra keys, if they have the known form.
		{[]pair{{"block_mm_infos", []any{nil, object(5, uint64(hb))}}, {"extra_keys", []any{[]any{a}}}}, keys{mm: [][]uint64{nil, {5, hb}, nil}}},
		{[]pair{{"block_mm_infos", []any{[]any{[]any{[]any{5, []any{}}}}}}}, keys{mm: [][]uint64{{5}, nil, nil}}},
		{[]pair{{"block_mm_infos", []any{object(5), object("x")}}, {"extra_keys", []any{nil, []any{a}}}}, keys{mm: [][]uint64{nil, {ha}, nil}}},
		{[]pair{{"block_mm_infos", []any{object(5), ordered{{"objects", 1}}}}}, keys{}},
		{[]pair{{"block_mm_infos", []any{object(5), []any{}}}}, keys{}},
		{[]pair{{"block_mm_infos", []any{ordered{{"mm_objects", nil}}}}}, keys{}},
		{[]pair{{"block_mm_infos", []any{nil}}, {"extra_keys", []any{[]any{a}}}}, keys{}},
		{[]pair{{"block_mm_infos", nil}, {"extra_keys", []any{[]any{a}}}}, keys{mm: [][]uint64{{ha}, nil, nil}}},
	} {
		event := stored(append(tt.fields, pair{"block_hashes", []any{1, 2, 3}})...)
		got, reason := decodeOne(t, Profile{}, event)
		if got == nil || !reflect.DeepEqual(keys{got.MM, got.Salt, got.Lora}, tt.want) {
			t.Errorf("%v: %+v, dropped %q, want %+v", tt.fields, got, reason, tt.want)
		}
	}
	var none MM
	if none.Block(0) != nil || none.Block(-1) != nil || !none.Empty() {
		t.Error("the zero MM has hashes")
	}
}

func TestShortBytes(t *testing.T) {
	long := []byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32}
	const short = uint64(0x191a1b1c1d1e1f20)
	event := stored(pair{"block_hashes", []any{long, long[:31], string(long), short}}, pair{"parent_block_hash", long})
	vllm, _ := ProfileOf("vLLM")
	got, _ := decodeOne(t, vllm, event)
	if want := []any{short, bin(long[:31]), string(long), short}; got == nil || !reflect.DeepEqual(got.Hashes, want) || got.Parent != short {
		t.Errorf("vllm: %+v, want hashes %v", got, want)
	}
	got, _ = decodeOne(t, Profile{}, event)
	if want := []any{bin(long), bin(long[:31]), string(long), short}; got == nil || !reflect.DeepEqual(got.Hashes, want) || got.Parent != bin(long) {
		t.Errorf("others: %+v, want hashes %v", got, want)
	}
}

func TestBatchHeads(t *testing.T) {
	publisher := []byte{1, 2, 3}
	for _, tt := range []struct {
		batch     any
		err       error
		ts        float64
		rank      any
		publisher string
		drops     string
	}{
		{batch: []any{1, nil}, ts: 1},
		{batch: []any{nil, []any{}, 0}, rank: uint32(0)},
		{batch: []any{"now", []any{}, 1}, rank: uint32(1)},
		{batch: []any{float32(2.5), []any{}, uint64(1<<32 - 1)}, ts: 2.5, rank: uint32(1<<32 - 1)},
		{batch: []any{1758000000123, []any{}, nil, publisher}, ts: 1758000000123, publisher: "\x01\x02\x03"},
		{batch: []any{1, nil, 2, "p", ordered{}, 5}, ts: 1, rank: uint32(2), publisher: "p"},
		{batch: []any{1, nil, 2, nil}, ts: 1, rank: uint32(2)},
		{batch: []any{1, nil, 2, 7}, ts: 1, rank: uint32(2)},
		{batch: []any{1, nil, -1}, ts: 1, drops: "bad_rank:1"},
		{batch: []any{1, nil, 1 << 32}, ts: 1, drops: "bad_rank:1"},
		{batch: []any{1, nil, "0"}, ts: 1, drops: "bad_rank:1"},
		{batch: []any{1, nil, 0.0}, ts: 1, drops: "bad_rank:1"},
		{batch: ordered{{"events", nil}}},
		{batch: ordered{{"data_parallel_rank", 3}, {"publisher_id", publisher}, {"events", []any{}}, {"ts", 1}}, ts: 1, rank: uint32(3), publisher: "\x01\x02\x03"},
		{batch: ordered{{"data_parallel_rank", 3}, {"events", []any{7, stored()}}, {"events", []any{}}, {"data_parallel_rank", nil}}, drops: "no_event:1"},

		{batch: ordered{{"ts", 1}, {"publisher_id", "p"}, {"events", nil}, {"ts", nil}, {"publisher_id", nil}}},
		{batch: []any{1, []any{[]any{}, "AllBlocksCleared"}}, ts: 1, drops: "no_event:2"},

		{batch: nil, err: ErrBatch}, {batch: 5, err: ErrBatch}, {batch: "x", err: ErrBatch}, {batch: []any{}, err: ErrBatch}, {batch: []any{1}, err: ErrBatch},
		{batch: []any{1, 7}, err: ErrBatch}, {batch: []any{1, ordered{}}, err: ErrBatch}, {batch: []any{1, "BlockStored"}, err: ErrBatch},
		{batch: ordered{}, err: ErrBatch}, {batch: ordered{{"ts", 1}}, err: ErrBatch}, {batch: ordered{{"events", 1}}, err: ErrBatch},
		{batch: []any{stored()}, err: ErrBatch},
	} {
		d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
		err := d.Decode(encode(t, tt.batch, true), b)
		var rank any
		if b.HasRank {
			rank = b.Rank
		}
		if !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) || len(b.Events) > 0 || b.Partial {
			t.Errorf("%v: %d events, partial %v, error %v, want %v", tt.batch, len(b.Events), b.Partial, err, tt.err)
		}
		if err == nil && (b.TS != tt.ts || rank != tt.rank || string(b.Publisher) != tt.publisher || drops(b) != tt.drops) {
			t.Errorf("%v: timestamp %v, rank %v, publisher %q, dropped %q", tt.batch, b.TS, rank, b.Publisher, drops(b))
		}
	}
}

func TestTrailingBytes(t *testing.T) {
	payload := encode(t, []any{1, []any{stored()}, 0}, true)
	d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
	for _, tail := range []string{"\x00", "\xc1", "\xdd\xff\xff\xff\xff", string(payload)} {
		err := d.Decode(append(payload[:len(payload):len(payload)], tail...), b)
		if err != nil || len(b.Events) != 1 || b.Partial || drops(b) != "trailing_bytes:1" {
			t.Errorf("tail %x: %d events, dropped %q, %v", tail, len(b.Events), drops(b), err)
		}
	}
}

func TestPayloadsThatAreNoMessagePack(t *testing.T) {
	d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
	for _, tt := range hostile {
		if err := d.Decode(unhex(tt.payload), b); !errors.Is(err, tt.err) || (err == nil) != (tt.err == nil) || len(b.Events) > 0 || b.Partial {
			t.Errorf("%.60s: error %v, want %v, %d events, partial %v", tt.payload, err, tt.err, len(b.Events), b.Partial)
		}
	}
}
