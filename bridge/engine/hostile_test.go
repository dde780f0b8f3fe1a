package engine

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// hostile are payloads in which not one event can be read.
var hostile = []struct {
	payload string
	err     error
}{
	{"", mpack.ErrTruncated},
	{"c1", mpack.ErrReserved},
	{"93", mpack.ErrTruncated},
	{"dd7fffffff", mpack.ErrTruncated},
	{"df7fffffffa474797065", mpack.ErrTruncated},
	{"c6ffffffff00", mpack.ErrTruncated},
	{"2a", ErrBatch},
	{"c70300112233", ErrBatch},
	{strings.Repeat("91", 5000) + "c0", ErrBatch},
	{strings.Repeat("92c0", 5000) + "c0", mpack.ErrDepth},
	{strings.Repeat("81a178", 5000) + "c0", mpack.ErrDepth},
	{"92c091" + strings.Repeat("91", 5000) + "c0", mpack.ErrDepth},
	{"93cb3ff0000000000000ddffffffff", mpack.ErrTruncated},
	{"93cb3ff000000000000091db7fffffff4142", mpack.ErrTruncated},
	{"93cb3ff000000000000091c9ffffffff0041", mpack.ErrTruncated},
	{"93cb3ff000000000000091c1c0", mpack.ErrReserved},
	{"93cb3ff000000000000090c1", mpack.ErrReserved},
	{"93cb3ff00000000000009193ab426c6f636b53746f726564ddffffffff", mpack.ErrTruncated},
	{"93cb3ff00000000000009194ab426c6f636b53746f7265649101c0dd7fffffff", mpack.ErrTruncated},
	{"93cb3ff000000000000091c7030011223300", nil},                                                           // an extension among the events
	{"93cb3ff80000000000009197ab426c6f636b53746f7265649101c09401020304cfffffffffffffffffc0a347505500", nil}, // block size 2^64-1
}

// sample returns a payload of n events of a dialect, and where in it each of
// them ends.
func sample(tb testing.TB, seed uint64, dialect dialect, n int) (payload []byte, ends []int) {
	tb.Helper()
	w := writer{dialect, rand.New(rand.NewPCG(seed, 5))}
	payload = []byte{0x93, 0xcb, 0x41, 0xd9, 0x54, 0xfc, 0x40, 0x20, 0, 0, 0x90 | byte(n)}
	for range n {
		payload = append(payload, encode(tb, w.value(w.event()), true)...)
		ends = append(ends, len(payload))
	}
	return append(payload, 3), ends
}

// damage decodes damaged copies of one payload and compares with the whole one.
type damage struct {
	d     *Decoder
	whole []Event
	ends  []int
	b     Batch
}

func newDamage(t *testing.T, payload []byte, ends []int) *damage {
	t.Helper()
	d, whole := NewDecoder(Profile{}, media(t, disputed)), new(Batch)
	if err := d.Decode(bytes.Clone(payload), whole); err != nil || whole.Partial || len(whole.Events) != len(ends) || drops(whole) != "" {
		t.Fatalf("%x: %d events, dropped %s, %v", payload, len(whole.Events), drops(whole), err)
	}
	return &damage{d: d, whole: whole.Events, ends: ends}
}

// check decodes a payload that is damaged from offset at on, and fails unless
// the events in front of it come out as they were.
func (x *damage) check(t *testing.T, payload []byte, at int) {
	t.Helper()
	intact := 0
	for intact < len(x.ends) && x.ends[intact] <= at {
		intact++
	}
	b := &x.b
	err := x.d.Decode(payload, b)
	switch {
	case err != nil && (len(b.Events) > 0 || b.Partial), b.Partial != (b.Dropped[Broken] == 1), len(b.Events) < intact:
		t.Fatalf("damage at %d of %x: %d events, want %d, partial %v, dropped %s, error %v", at, payload, len(b.Events), intact, b.Partial, drops(b), err)
	}
	for i := range intact {
		if !sameEvent(&b.Events[i], &x.whole[i]) {
			t.Fatalf("damage at %d of %x: event %d\n got %+v\nwant %+v", at, payload, i, plainOf(b.Events[i]), plainOf(x.whole[i]))
		}
	}
}

// sameEvent is what compare does, in a hundredth of the time.
func sameEvent(a, b *Event) bool {
	sameHash := func(a, b Hash) bool { return a.Bits == b.Bits && a.Text == b.Text && bytes.Equal(a.Name, b.Name) }
	return a.Kind == b.Kind && slices.EqualFunc(a.Hashes, b.Hashes, sameHash) && a.HasParent == b.HasParent && sameHash(a.Parent, b.Parent) &&
		slices.Equal(a.Tokens, b.Tokens) && a.Over == b.Over && a.BlockSize == b.BlockSize && a.Tier == b.Tier && bytes.Equal(a.Medium, b.Medium) &&
		bytes.Equal(a.Lora, b.Lora) && bytes.Equal(a.Salt, b.Salt) && slices.Equal(a.MM.hashes, b.MM.hashes) && slices.Equal(a.MM.ends, b.MM.ends) &&
		a.Group == b.Group && a.HasGroup == b.HasGroup && bytes.Equal(a.SpecKind, b.SpecKind) && a.Remote == b.Remote &&
		bytes.Equal(a.Owner, b.Owner) && a.HasRemaining == b.HasRemaining && slices.Equal(a.Remaining, b.Remaining)
}

func TestCutPayloads(t *testing.T) {
	for i, dia := range dialects {
		payload, ends := sample(t, uint64(i), dia, 6)
		x := newDamage(t, payload, ends)
		for n := range payload {
			x.check(t, payload[:n], n)
			if d := drops(&x.b); d != "" && d != "broken:1" {
				t.Fatalf("%s: dropped %s in the first %d bytes of %x", dia.name, d, n, payload)
			}
			if events := len(x.b.Events); events > 0 && (!x.b.Partial || ends[events-1] > n) {
				t.Fatalf("%s: %d events in the first %d bytes of %x, partial %v", dia.name, events, n, payload, x.b.Partial)
			}
		}
	}
}

func TestMutatedPayloads(t *testing.T) {
	for i, dia := range dialects {
		if !slices.Contains([]string{"vllm 0.23", "vllm map", "sglang array"}, dia.name) {
			continue // the race detector takes half a minute for more
		}
		payload, ends := sample(t, uint64(i), dia, 3)
		x := newDamage(t, payload, ends)
		damaged := bytes.Clone(payload)
		for at := range payload {
			for change := 1; change < 256; change++ {
				damaged[at] = payload[at] ^ byte(change)
				x.check(t, damaged, at)
			}
			damaged[at] = payload[at]
		}
	}
}

// A decoder and a batch that have seen much worse decode like new ones.
func TestNothingIsLeftOver(t *testing.T) {
	used, dirty := NewDecoder(Profile{}, media(t, disputed)), new(Batch)
	for round, payload := range append(payloads(t), payloads(t)...) {
		if round%3 == 0 {
			for _, h := range hostile {
				_ = used.Decode(unhex(h.payload), dirty)
			}
		}
		clean := new(Batch)
		err, wantErr := used.Decode(payload, dirty), NewDecoder(Profile{}, media(t, disputed)).Decode(payload, clean)
		compare(t, fmt.Sprintf("payload %d", round), plainEvents(dirty), plainEvents(clean))
		if err != wantErr || dirty.Dropped != clean.Dropped || dirty.Partial != clean.Partial || dirty.Rank != clean.Rank ||
			dirty.HasRank != clean.HasRank || dirty.TS != clean.TS || !bytes.Equal(dirty.Publisher, clean.Publisher) {
			t.Errorf("payload %d: %v %s, want %v %s", round, err, drops(dirty), wantErr, drops(clean))
		}
	}
	if used.b != nil || used.r.Len() > 0 || used.ev.Hashes != nil {
		t.Error("the decoder holds on to a payload")
	}
}

// A batch points into the last payload only.
func TestBatchLetsGo(t *testing.T) {
	named := stored(pair{"block_hashes", []any{"x", "y"}}, pair{"medium", "GPU"})
	d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
	for _, events := range [][]any{{named, named, append(named, pair{"medium", 1})}, {}} {
		if err := d.Decode(encode(t, []any{1, events}, true), b); err != nil {
			t.Fatal(err)
		}
		for _, e := range b.Events[len(b.Events):cap(b.Events)] {
			if e.Hashes != nil || e.Medium != nil {
				t.Errorf("behind %d events: %+v", len(b.Events), e)
			}
		}
		for _, h := range b.hashes[len(b.hashes):cap(b.hashes)] {
			if h.Name != nil {
				t.Errorf("behind %d hashes: %+v", len(b.hashes), h)
			}
		}
	}
}

// What a bad event wrote makes no room scarce for the good ones.
func TestBadEventsTakeNoRoom(t *testing.T) {
	full := stored(pair{"extra_keys", []any{[]any{strings.Repeat("a", 64)}}})
	d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
	for _, batch := range []any{
		[]any{1, []any{append(full, pair{"medium", 1}), append(removed(pair{"remaining_copy_counts", []any{1, 2}}), pair{"medium", 1})}},
		ordered{{"events", []any{full, removed(pair{"remaining_copy_counts", []any{1, 2}})}}, {"events", nil}},
	} {
		if err := d.Decode(encode(t, batch, true), b); err != nil || len(b.Events) > 0 || b.mark() != (mark{}) {
			t.Errorf("%v: %d events, %+v, %v", batch, len(b.Events), b.mark(), err)
		}
	}
}

func TestLimits(t *testing.T) {
	d, b := NewDecoder(Profile{}, media(t, nil)), new(Batch)
	hashes := func(n int) []byte {
		return append([]byte{0xdd, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}, make([]byte, n)...)
	}
	removed := func(n int) []byte {
		return append(mpack.AppendStr([]byte{0x92}, "BlockRemoved"), hashes(n)...)
	}
	payload := append([]byte{0x92, 0xc0, 0x93}, removed(MaxHashes)...)
	payload = append(append(payload, removed(1)...), removed(0)...)
	if err := d.Decode(payload, b); err != nil || len(b.Events) != 2 || len(b.Events[0].Hashes) != MaxHashes || drops(b) != "too_many:1" {
		t.Errorf("hashes: %d events, dropped %s, %v", len(b.Events), drops(b), err)
	}
	payload = append([]byte{0x92, 0xc0, 0x91, 0x83}, mpack.AppendStr(mpack.AppendStr(nil, "type"), "BlockRemoved")...)
	payload = append(mpack.AppendStr(payload, "block_hashes"), hashes(0)...)
	payload = append(mpack.AppendStr(payload, "remaining_copy_counts"), hashes(MaxHashes+1)...)
	if err := d.Decode(payload, b); err != nil || cap(b.remaining) > 0 || drops(b) != "bad_counts:1" {
		t.Errorf("counts: room for %d, dropped %s, %v", cap(b.remaining), drops(b), err)
	}
	payload = append([]byte{0x92, 0xc0, 0xdd, 0, 4, 0, 2}, bytes.Repeat(mpack.AppendStr([]byte{0x91}, "AllBlocksCleared"), MaxEvents+2)...)
	if err := d.Decode(payload, b); err != nil || len(b.Events) != MaxEvents || drops(b) != "too_many:2" {
		t.Errorf("events: %d, dropped %s, %v", len(b.Events), drops(b), err)
	}
	if err := d.Decode([]byte{0x92, 0xc0, 0x90}, b); err != nil || cap(b.Events) > 0 || cap(b.hashes) > 0 {
		t.Errorf("the batch keeps room for %d events and %d hashes: %v", cap(b.Events), cap(b.hashes), err)
	}
}

func TestDecodeAllocatesNothing(t *testing.T) {
	list := payloads(t)
	for i, dia := range dialects {
		payload, _ := sample(t, uint64(100+i), dia, 6)
		list = append(list, payload, payload[:len(payload)*2/3])
	}
	list = append(list, stored64x16("array")[0], stored64x16("map")[0], stored64x16("bytes")[0])
	for _, h := range hostile {
		list = append(list, unhex(h.payload))
	}
	vllm, _ := ProfileOf("vllm")
	d, b := NewDecoder(vllm, media(t, disputed)), new(Batch)
	for i, payload := range list {
		_ = d.Decode(payload, b)
		if n := testing.AllocsPerRun(5, func() { _ = d.Decode(payload, b) }); n > 0 {
			t.Errorf("payload %d, %.80x: %v allocations", i, payload, n)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, payload := range payloads(f) {
		f.Add(payload)
	}
	for _, h := range hostile {
		f.Add(unhex(h.payload))
	}
	for i, dia := range dialects {
		w := writer{dia, rand.New(rand.NewPCG(uint64(i), 3))}
		f.Add(w.batch(f, 1, 2, []plain{w.event(), w.event(), w.event()}))
	}
	m := media(f, nil)
	vllm, _ := ProfileOf("vllm")
	d, b := NewDecoder(vllm, m), new(Batch)
	f.Fuzz(func(t *testing.T, payload []byte) {
		again := new(Batch)
		err := d.Decode(payload, b)
		if err2 := NewDecoder(vllm, m).Decode(payload, again); err2 != err || b.Dropped != again.Dropped {
			t.Fatalf("%v %s, then %v %s", err, drops(b), err2, drops(again))
		}
		compare(t, "decoded again", plainEvents(b), plainEvents(again))
		if err != nil && len(b.Events) > 0 || b.Partial != (b.Dropped[Broken] == 1) {
			t.Fatalf("%d events, error %v, partial %v, dropped %s", len(b.Events), err, b.Partial, drops(b))
		}
		for _, e := range b.Events {
			checkEvent(t, e, len(payload))
		}
	})
}

// checkEvent checks what holds for any event that is not dropped.
func checkEvent(t *testing.T, e Event, size int) {
	t.Helper()
	switch {
	case e.Kind > Cleared, e.Kind == Cleared && (e.Hashes != nil || e.Tokens != nil), e.Kind == Removed && (e.HasParent || e.Tokens != nil):
		t.Fatalf("%s with the fields of another kind: %+v", e.Kind, e)
	case len(e.Hashes) > size, len(e.Tokens) > size, e.HasRemaining && len(e.Remaining) != len(e.Hashes):
		t.Fatalf("%d hashes, %d tokens, %d counts out of %d bytes", len(e.Hashes), len(e.Tokens), len(e.Remaining), size)
	case e.Over < 0 || e.Over > 1 || e.Over == 1 && len(e.Tokens) < 2:
		t.Fatalf("over %d with %d tokens", e.Over, len(e.Tokens))
	case e.Tier != TierUnknown && e.Tier.String() == "unknown":
		t.Fatalf("tier %d", e.Tier)
	}
	for _, h := range append([]Hash{e.Parent}, e.Hashes...) {
		if h.Name != nil && (h.Bits != 0 || len(h.Name) == 0 || len(h.Name) > MaxName || !h.Text && len(h.Name) == 32) || h.Name == nil && h.Text {
			t.Fatalf("hash %+v", h)
		}
	}
}
