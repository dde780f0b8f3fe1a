package mock

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Dialect names a way in which engines write events: which fields an event has,
// whether it is an array or a map, and so for the batch around it.
type Dialect string

// The dialects. vLLM wrote arrays that grew a field at a time up to 0.23, and
// writes maps since; SGLang wrote arrays until autumn 2026. In MapBatch the batch
// is a map too.
const (
	VLLMArray08 Dialect = "vllm-array-0.8"
	VLLMArray09 Dialect = "vllm-array-0.9"
	VLLMArray10 Dialect = "vllm-array-0.10"
	VLLMArray14 Dialect = "vllm-array-0.14"
	VLLMArray18 Dialect = "vllm-array-0.18"
	VLLMArray20 Dialect = "vllm-array-0.20"
	VLLMArray23 Dialect = "vllm-array-0.23"
	VLLMMap     Dialect = "vllm-map"
	SGLangArray Dialect = "sglang-array"
	SGLangMap   Dialect = "sglang-map"
	MapBatch    Dialect = "map-batch"
)

// Dialects returns every dialect.
func Dialects() []Dialect {
	return []Dialect{VLLMArray08, VLLMArray09, VLLMArray10, VLLMArray14, VLLMArray18, VLLMArray20, VLLMArray23,
		VLLMMap, SGLangArray, SGLangMap, MapBatch}
}

// Errors of dialects.
var (
	// ErrDialect: there is no dialect of this name.
	ErrDialect = errors.New("mock: unknown dialect")
	// ErrCannotSay: the dialect has no place for a field that the event has.
	ErrCannotSay = errors.New("mock: the dialect cannot say it")
)

// layout is how a dialect writes.
type layout struct {
	stored, removed int // elements of an event, the tag included; 0: events are maps
	noRank          bool
	sglang          bool // signed hashes, no LoRA names unless there is one
	mapBatch        bool
	features        model.Feature
}

func (d Dialect) layout() (layout, error) {
	switch d {
	case VLLMArray08:
		return layout{stored: 6, removed: 2, noRank: true}, nil
	case VLLMArray09:
		return layout{stored: 6, removed: 2}, nil
	case VLLMArray10:
		return layout{stored: 7, removed: 3, features: model.Media}, nil
	case VLLMArray14:
		return layout{stored: 8, removed: 3, features: model.Media | model.LoRA}, nil
	case VLLMArray18:
		return layout{stored: 9, removed: 3, features: model.Media | model.LoRA}, nil
	case VLLMArray20:
		return layout{stored: 10, removed: 4, features: model.Media | model.LoRA | model.Groups}, nil
	case VLLMArray23:
		return layout{stored: 12, removed: 4, features: model.Media | model.LoRA | model.Groups | model.Kinds}, nil
	case VLLMMap:
		return layout{features: model.Everything}, nil
	case SGLangArray:
		return layout{stored: 7, removed: 3, sglang: true, features: model.Media | model.Salt}, nil
	case SGLangMap:
		return layout{sglang: true, features: model.Media | model.Salt}, nil
	case MapBatch:
		return layout{mapBatch: true, features: model.Everything}, nil
	}
	return layout{}, fmt.Errorf("%w: %q, want one of %q", ErrDialect, string(d), Dialects())
}

// Features returns which features of traffic the dialect can carry. Features
// that need no field are in every dialect.
func (d Dialect) Features() model.Feature {
	const fields = model.Media | model.LoRA | model.Salt | model.Groups | model.Kinds | model.Locality | model.Remaining | model.Owners
	l, err := d.layout()
	if err != nil {
		return 0
	}
	return l.features | model.Everything&^fields
}

// Batch is what an engine publishes at once.
type Batch struct {
	TS        any // of the batch: a float64 of seconds, or whatever a test wants there
	Events    []model.Event
	Rank      *uint32 // nil: nil on the wire
	BlockSize int     // tokens a hash, of stores that do not say
	Extra     []any   // elements behind the rank; a map batch has none
}

// Encode returns the payload of a batch. It fails with ErrCannotSay for an event
// that the dialect has no words for.
func (d Dialect) Encode(b Batch) ([]byte, error) {
	l, err := d.layout()
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	enc := msgpack.GetEncoder()
	defer msgpack.PutEncoder(enc)
	enc.Reset(&buf)
	enc.UseCompactInts(true)
	enc.SetSortMapKeys(true)
	w := writer{Encoder: enc, layout: l, buf: &buf, blockSize: b.BlockSize}
	w.batch(b)
	if w.err != nil {
		return nil, fmt.Errorf("dialect %s: %w", d, w.err)
	}
	return buf.Bytes(), nil
}

// writer writes batches. Its error is sticky.
type writer struct {
	*msgpack.Encoder
	layout
	buf       *bytes.Buffer // what the encoder writes to, at once
	blockSize int
	err       error
}

// try keeps the first error.
func (w *writer) try(err error) {
	if w.err == nil {
		w.err = err
	}
}

func (w *writer) batch(b Batch) {
	var rank any
	if b.Rank != nil {
		rank = *b.Rank
	}
	if w.mapBatch {
		w.try(w.EncodeMapLen(3))
		w.value("ts")
		w.value(b.TS)
		w.value("events")
		w.events(b.Events)
		w.value("data_parallel_rank")
		w.value(rank)
		return
	}
	if w.noRank {
		w.try(w.EncodeArrayLen(2))
		w.value(b.TS)
		w.events(b.Events)
		return
	}
	w.try(w.EncodeArrayLen(3 + len(b.Extra)))
	w.value(b.TS)
	w.events(b.Events)
	w.value(rank)
	for _, v := range b.Extra {
		w.value(v)
	}
}

func (w *writer) events(events []model.Event) {
	w.try(w.EncodeArrayLen(len(events)))
	for _, e := range events {
		switch {
		case e.Op == model.Raw:
			w.value(e.Wire.Value)
		case w.layout.stored > 0:
			w.array(e)
		default:
			w.mapping(e)
		}
	}
}

func tag(o model.Op) string {
	return [...]string{"BlockStored", "BlockRemoved", "AllBlocksCleared"}[o]
}

// array writes an event as an array that has a place for each field.
func (w *writer) array(e model.Event) {
	if e.Op == model.Clear {
		if e.Owner != "" {
			w.try(fmt.Errorf("%w: ownership", ErrCannotSay))
		}
		w.value([]any{tag(e.Op)})
		return
	}
	places := []string{"", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
		"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"}[:w.stored]
	if e.Op == model.Remove {
		places = []string{"", "block_hashes", "medium", "group_idx"}[:w.removed]
	}
	values := make([]any, len(places), len(places)+1)
	values[0] = tag(e.Op)
	for _, f := range w.fields(e) {
		at := slices.Index(places, f.Name)
		switch {
		case at > 0:
			values[at] = f.Value
		case f.Name == "cache_salt" && w.sglang && e.Op == model.Store:
			values = append(values, map[string]any{f.Name: f.Value})
		case !f.unsaid:
			w.try(fmt.Errorf("%w: %s", ErrCannotSay, f.Name))
		}
	}
	w.try(w.EncodeArrayLen(len(values)))
	for _, v := range values {
		w.value(v)
	}
}

// mapping writes an event as a map.
func (w *writer) mapping(e model.Event) {
	fields := []field{{Field: model.Field{Name: "type", Value: tag(e.Op)}}}
	if e.Op != model.Clear {
		fields = append(fields, w.fields(e)...)
	} else if e.Owner != "" {
		fields = append(fields, field{Field: model.Field{Name: "ownership", Value: e.Owner}})
	}
	fields = slices.DeleteFunc(fields, func(f field) bool {
		return slices.Contains(e.Wire.Omit, f.Name) || w.sglang && f.Name == "lora_name" && f.unsaid
	})
	if e.Wire.Shuffle { // by the last letters of the names
		slices.SortFunc(fields, func(a, b field) int { return compareBackward(a.Name, b.Name) })
	}
	w.try(w.EncodeMapLen(len(fields)))
	for _, f := range fields {
		w.value(f.Name)
		w.value(f.Value)
	}
}

// field is a field of an event; unsaid if the event does not speak of it and
// engines write it all the same.
type field struct {
	model.Field
	unsaid bool
}

// fields returns the fields of an event in the order in which engines write them.
func (w *writer) fields(e model.Event) []field {
	out := make([]field, 0, 16)
	say := func(name string, v any) { out = append(out, field{Field: model.Field{Name: name, Value: v}}) }
	maybe := func(name string, v any, said bool) {
		out = append(out, field{Field: model.Field{Name: name, Value: v}, unsaid: !said})
	}
	medium := func() {
		if e.Medium == "" {
			maybe("medium", "GPU", false)
		} else {
			say("medium", e.Medium)
		}
	}
	say("block_hashes", e.Hashes)
	if e.Op == model.Remove {
		medium()
	} else {
		say("parent_block_hash", e.Parent)
		say("token_ids", tokens{e.Tokens, e.Pairs})
		if e.BlockSize != nil {
			say("block_size", *e.BlockSize)
		} else {
			say("block_size", w.blockSize)
		}
		maybe("lora_id", nil, false)
		medium()
		maybe("lora_name", nilIfEmpty(e.LoRA), e.LoRA != "")
		if e.MM != nil {
			say("extra_keys", extraKeys(e))
		}
	}
	if e.Group != nil {
		say("group_idx", *e.Group)
	}
	if e.Kind != nil {
		say("kv_cache_spec_kind", *e.Kind)
	}
	if e.Locality != "" {
		say("locality", e.Locality)
	}
	if e.Owner != "" {
		say("ownership", e.Owner)
	}
	if e.Salt != "" {
		say("cache_salt", e.Salt)
	}
	if e.Remaining != nil {
		say("remaining_copy_counts", e.Remaining)
	}
	for _, f := range e.Wire.Also {
		at := slices.IndexFunc(out, func(o field) bool { return o.Name == f.Name })
		if at < 0 {
			say(f.Name, f.Value)
		} else {
			out[at] = field{Field: f}
		}
	}
	return out
}

// extraKeys says the multimodal hashes of each engine block as an engine would:
// identifiers of 64 digits, of which the first 16 are the hash.
func extraKeys(e model.Event) []any {
	out := make([]any, len(e.Hashes))
	for i := range out {
		if i >= len(e.MM) || len(e.MM[i]) == 0 {
			continue
		}
		var keys []any
		for _, h := range e.MM[i] {
			keys = append(keys, []any{fmt.Sprintf("%016x%048x", h, 0), 0})
		}
		out[i] = keys
	}
	return out
}

// tokens is a token list on the wire.
type tokens struct {
	ids   []int64
	pairs bool
}

// value writes anything. What events are made of goes without reflection.
func (w *writer) value(v any) {
	if w.err != nil {
		return
	}
	switch v := v.(type) {
	case model.Hash:
		w.hash(v)
	case []model.Hash:
		w.try(w.EncodeArrayLen(len(v)))
		for _, h := range v {
			w.hash(h)
		}
	case tokens:
		w.tokens(v)
	case string:
		w.try(w.EncodeString(v))
	case int:
		w.try(w.EncodeInt(int64(v)))
	default:
		w.try(w.Encode(v))
	}
}

func (w *writer) hash(h model.Hash) {
	bits, ok := h.Bits()
	switch {
	case ok && w.sglang:
		w.try(w.EncodeInt(int64(bits)))
	case ok:
		w.try(w.EncodeUint(bits))
	default:
		w.try(w.Encode(h.Value()))
	}
}

// tokens writes a token list. Token ids are most of a payload, so they go into
// the buffer without a call to the encoder for each.
func (w *writer) tokens(t tokens) {
	if t.ids == nil {
		w.try(w.EncodeNil())
		return
	}
	most := 5 // bytes of a token id
	if t.pairs {
		most = 11
	}
	w.buf.Grow(most * (len(t.ids) + 1))
	b := w.buf.AvailableBuffer()
	if t.pairs {
		b = mpack.AppendArray(b, max(0, len(t.ids)-1))
		for i := 1; i < len(t.ids); i++ {
			b = mpack.AppendInt(mpack.AppendInt(mpack.AppendArray(b, 2), t.ids[i-1]), t.ids[i])
		}
	} else {
		b = mpack.AppendArray(b, len(t.ids))
		for _, id := range t.ids {
			b = mpack.AppendInt(b, id)
		}
	}
	w.buf.Write(b)
}

func nilIfEmpty(s string) any {
	if s == "" {
		return nil
	}
	return s
}

// compareBackward compares strings from their ends.
func compareBackward(a, b string) int {
	x, y := []byte(a), []byte(b)
	slices.Reverse(x)
	slices.Reverse(y)
	return bytes.Compare(x, y)
}
