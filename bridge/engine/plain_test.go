package engine

import (
	"encoding/json"
	"fmt"
	"math/big"
	"reflect"
	"strings"
	"testing"
)

// plain is an Event that owns its memory and compares with reflect.DeepEqual.
// Tests write down what they expect as one.
type plain struct {
	Kind      Kind
	Hashes    []any // uint64, bin or string
	Parent    any   // the same, nil if there is none
	Tokens    []uint32
	Over      int
	BlockSize int64
	Tier      string
	Medium    any // string or nil
	Lora      string
	Salt      string
	MM        [][]uint64 // as many as Hashes, or nil
	Group     any        // int64 or nil
	SpecKind  any        // string or nil
	Remote    bool
	Owner     any      // string or nil
	Remaining []uint64 // nil if absent
}

// bin is a hash that was sent as bytes.
type bin string

func plainHash(h Hash) any {
	switch {
	case h.Name == nil:
		return h.Bits
	case h.Text:
		return string(h.Name)
	}
	return bin(h.Name)
}

func plainText(b []byte) any {
	if b == nil {
		return nil
	}
	return string(b)
}

func plainOf(e Event) plain {
	p := plain{
		Kind: e.Kind, Over: e.Over, BlockSize: e.BlockSize, Tier: e.Tier.String(), Remote: e.Remote,
		Medium: plainText(e.Medium), SpecKind: plainText(e.SpecKind), Owner: plainText(e.Owner),
		Lora: string(e.Lora), Salt: string(e.Salt),
		Tokens: append([]uint32(nil), e.Tokens...),
	}
	for _, h := range e.Hashes {
		p.Hashes = append(p.Hashes, plainHash(h))
	}
	if e.HasParent {
		p.Parent = plainHash(e.Parent)
	}
	if e.HasGroup {
		p.Group = e.Group
	}
	if e.HasRemaining {
		p.Remaining = append([]uint64{}, e.Remaining...)
	}
	if !e.MM.Empty() {
		for i := range e.Hashes {
			p.MM = append(p.MM, append([]uint64(nil), e.MM.Block(i)...))
		}
	}
	return p
}

func plainEvents(b *Batch) []plain {
	var out []plain
	for _, e := range b.Events {
		out = append(out, plainOf(e))
	}
	return out
}

func compare(t *testing.T, what string, got, want []plain) {
	t.Helper()
	if reflect.DeepEqual(got, want) {
		return
	}
	if len(got) != len(want) {
		t.Errorf("%s: %d events, want %d\n got %+v\nwant %+v", what, len(got), len(want), got, want)
		return
	}
	for i := range got {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("%s: event %d\n got %+v\nwant %+v", what, i, got[i], want[i])
		}
	}
}

func drops(b *Batch) string {
	var out []string
	for r, n := range b.Dropped {
		if n > 0 {
			out = append(out, fmt.Sprintf("%s:%d", Reason(r), n))
		}
	}
	return strings.Join(out, " ")
}

// disputed are the media that producers and consumers disagree on, as the tests
// configure them.
var disputed = map[string]string{"FS": "disk", "OBJ": "external", "SHARED_STORAGE": "external"}

// tierByMedium is the table of media with disputed, written down a second time.
var tierByMedium = map[string]string{
	"": "device", "GPU": "device", "DEVICE": "device",
	"CPU": "host", "CPU_PINNED": "host", "CPU_TIER1": "host",
	"CPU_TIER2": "disk", "DISK": "disk", "NVME": "disk", "STORAGE": "disk",
	"EXTERNAL": "external", "NETWORK": "external", "REMOTE": "external", "SHARED": "external",
	"FS": "disk", "OBJ": "external", "SHARED_STORAGE": "external",
}

func tierOf(medium any) string {
	s, _ := medium.(string)
	if t, ok := tierByMedium[strings.ToUpper(s)]; ok {
		return t
	}
	return "unknown"
}

// plainJSON returns what an event in JSON says: an array in the order of vLLM
// 0.23, or a map. ok is false if it should be dropped.
func plainJSON(v any) (p plain, ok bool) {
	names := []string{"block_hashes", "medium", "group_idx"}
	fields, _ := v.(map[string]any)
	if list, isList := v.([]any); isList && len(list) > 0 {
		if list[0] == "BlockStored" {
			names = []string{"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
				"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}
		}
		fields = map[string]any{"type": list[0]}
		for i, x := range list[1:] {
			if i < len(names) {
				fields[names[i]] = x
			}
		}
	}
	kind, known := map[any]Kind{"BlockStored": Stored, "BlockRemoved": Removed, "AllBlocksCleared": Cleared}[fields["type"]]
	hashes, isList := fields["block_hashes"].([]any)
	if _, hasTokens := fields["token_ids"]; !known || kind != Cleared && !isList || kind == Stored && !hasTokens {
		return p, false
	}
	p = plain{Kind: kind, Medium: fields["medium"], Tier: tierOf(fields["medium"]), SpecKind: fields["kv_cache_spec_kind"], Owner: fields["ownership"]}
	for _, h := range hashes {
		p.Hashes = append(p.Hashes, hashJSON(h))
	}
	if fields["parent_block_hash"] != nil {
		p.Parent = hashJSON(fields["parent_block_hash"])
	}
	p.Tokens, p.Over = tokensJSON(fields["token_ids"])
	if n, isNumber := fields["block_size"].(json.Number); isNumber {
		p.BlockSize, _ = n.Int64()
	}
	if n, isNumber := fields["group_idx"].(json.Number); isNumber {
		p.Group, _ = n.Int64()
	}
	p.Lora, _ = fields["lora_name"].(string)
	p.Salt, _ = fields["cache_salt"].(string)
	if m, isMap := fields["lora_name"].(map[string]any); isMap {
		p.Salt = m["cache_salt"].(string)
	}
	where, _ := fields["locality"].(string)
	p.Remote = where != "" && where != "LOCAL"
	if counts, isList := fields["remaining_copy_counts"].([]any); isList {
		p.Remaining = []uint64{}
		for _, c := range counts {
			n, _ := c.(json.Number).Int64()
			p.Remaining = append(p.Remaining, uint64(n))
		}
	}
	return p, true
}

func tokensJSON(v any) (tokens []uint32, over int) {
	list, _ := v.([]any)
	var last any
	for _, x := range list {
		if pair, isPair := x.([]any); isPair {
			x, last, over = pair[0], pair[1], 1
		}
		tokens = append(tokens, uint32(hashJSON(x).(uint64)))
	}
	if over == 1 {
		tokens = append(tokens, uint32(hashJSON(last).(uint64)))
	}
	return tokens, over
}

// hashJSON returns a hash: text, {"$bytes": hex}, a number or {"$int": decimal}.
func hashJSON(v any) any {
	switch v := v.(type) {
	case json.Number:
		n, _ := new(big.Int).SetString(v.String(), 10)
		return new(big.Int).And(n, new(big.Int).SetUint64(1<<64-1)).Uint64()
	case map[string]any:
		if s, ok := v["$int"].(string); ok {
			return hashJSON(json.Number(s))
		}
		return bin(unhex(v["$bytes"].(string)))
	}
	return v
}
