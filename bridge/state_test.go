package bridge_test

import (
	"fmt"
	"maps"
	"testing"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/model"
)

// with returns an event with some of it changed.
func with(e model.Event, change func(*model.Event)) model.Event {
	change(&e)
	return e
}

// chunked returns the store of n engine blocks of k index blocks each, behind
// each other.
func chunked(id, k, n int) model.Event {
	e := prompt(id, 0, k*n)
	e.BlockSize = new(k * blockSize)
	e.Hashes = nil
	for i := range n {
		e.Hashes = append(e.Hashes, name(id, 100+i))
	}
	return e
}

func in(medium string) func(*model.Event) { return func(e *model.Event) { e.Medium = medium } }

func group(index int, kind ...string) func(*model.Event) {
	return func(e *model.Event) {
		if e.Group = &index; len(kind) > 0 {
			e.Kind = &kind[0]
		}
	}
}

// long is the 32-byte form of an integer hash.
func long(h model.Hash) model.Hash {
	bits, _ := h.Bits()
	return model.Bytes(append(make([]byte, 24), number(bits)...))
}

// TestStateOnTheWayToTheLog: after each record, what the log adds up to is what
// the naive model says. In the middle the bridge is killed, and another one goes
// on from the log.
func TestStateOnTheWayToTheLog(t *testing.T) {
	type batches [][]model.Event
	r := newRig(t)
	for i, tc := range []struct {
		name    string
		profile model.Profile
		before  batches
		after   batches // a bridge was killed
		want    map[event.Tier]int
		drops   map[string]int64
	}{
		{name: "children before their parents",
			before: batches{{prompt(1, 4, 1)}, {prompt(1, 2, 2), prompt(1, 5, 1)}},
			after:  batches{{prompt(1, 6, 1)}, {prompt(1, 0, 1)}, {prompt(1, 1, 1)}},
			want:   map[event.Tier]int{event.Device: 7}},
		{name: "a parked block goes before its parent comes",
			before: batches{{prompt(1, 1, 2)}, {prompt(2, 1, 1)}, {evict(1, "", 2)}},
			after:  batches{{evict(2, "", 1)}, {prompt(1, 0, 1)}, {prompt(2, 0, 1)}},
			want:   map[event.Tier]int{event.Device: 3}},
		{name: "parked with two copies",
			before: batches{{prompt(1, 1, 1)}, {prompt(1, 1, 1)}},
			after:  batches{{evict(1, "", 1)}, {prompt(1, 0, 1)}},
			want:   map[event.Tier]int{event.Device: 2}},
		{name: "a host store follows the device removal",
			before: batches{{prompt(1, 0, 3)}, {evict(1, "", 0, 1, 2)}, {offload(1, "CPU", 0, 1)}, {evict(1, "CPU", 0)}},
			after:  batches{{offload(1, "CPU", 2, 0)}, {evict(1, "CPU", 1)}},
			want:   map[event.Tier]int{event.Host: 2}},
		{name: "a store of names is all or nothing",
			before: batches{{prompt(1, 0, 2)}, {offload(1, "CPU", 0, 9)}},
			after:  batches{{offload(1, "CPU", 9, 1)}, {offload(1, "STORAGE", 1)}},
			want:   map[event.Tier]int{event.Device: 2, event.Disk: 1},
			drops:  map[string]int64{"unknown_block": 1}},
		{name: "copies are counted",
			before: batches{{prompt(1, 0, 2)}, {prompt(1, 0, 2)}, {prompt(1, 0, 1)}, {evict(1, "", 0, 1)}},
			after:  batches{{evict(1, "", 0)}, {evict(1, "", 1)}},
			want:   map[event.Tier]int{event.Device: 1}},
		{name: "remaining counts win",
			before: batches{{prompt(1, 0, 2)}, {prompt(1, 0, 2)}, {with(evict(1, "", 0), func(e *model.Event) { e.Remaining = []int{0} })}},
			after:  batches{{with(evict(1, "", 1), func(e *model.Event) { e.Remaining = []int{2} })}, {evict(1, "", 1)}},
			want:   map[event.Tier]int{event.Device: 1}},
		{name: "groups hold copies of their own",
			before: batches{{with(prompt(1, 0, 2), group(0, "full_attention"))}, {with(prompt(1, 0, 2), group(1, "mla_attention"))}, {with(evict(1, "", 0), group(0))}},
			after:  batches{{with(evict(1, "", 0, 1), group(1))}},
			want:   map[event.Tier]int{event.Device: 1}},
		{name: "a sliding window is not indexed",
			before: batches{{with(prompt(1, 0, 2), group(0, "full_attention"))}, {with(prompt(2, 0, 2), group(1, "sliding_window"))}},
			after:  batches{{with(prompt(3, 0, 1), group(1))}, {with(evict(1, "", 0), group(1))}},
			want:   map[event.Tier]int{event.Device: 2},
			drops:  map[string]int64{"not_main_attention": 1}},
		{name: "engine blocks of four index blocks",
			before: batches{{chunked(1, 4, 3)}, {evict(1, "", 101)}, {with(prompt(1, 0, 1), in(""))}},
			after:  batches{{evict(1, "", 100)}, {chunked(2, 2, 1)}},
			want:   map[event.Tier]int{event.Device: 4 + 1 + 2}},
		{name: "engine blocks that don't divide",
			before: batches{
				{with(prompt(1, 0, 2), func(e *model.Event) { e.BlockSize = new(6) })},
				{with(prompt(1, 0, 2), func(e *model.Event) { e.Tokens = e.Tokens[1:] })},
				{with(prompt(1, 0, 2), func(e *model.Event) { e.BlockSize = new(0) })},
				{with(prompt(1, 1, 1), func(e *model.Event) { e.Parent = e.Hashes[0] })},
				{with(prompt(1, 0, 2), func(e *model.Event) { e.Hashes[1] = e.Hashes[0] })}},
			after: batches{{prompt(1, 0, 1)}},
			want:  map[event.Tier]int{event.Device: 1},
			drops: map[string]int64{"block_size": 2, "token_count": 1, "own_parent": 1, "repeated_hash": 1}},
		{name: "media in any case",
			before: batches{{with(prompt(1, 0, 1), in("gpu"))}, {with(prompt(1, 0, 1), in("Cpu"))}, {with(prompt(1, 0, 1), in("nvme"))}, {with(prompt(2, 0, 1), in("quantum"))}},
			after:  batches{{with(prompt(1, 1, 1), in("Remote"))}, {evict(1, "GPU", 0)}, {evict(1, "quantum", 0)}},
			want:   map[event.Tier]int{event.Host: 1, event.Disk: 1, event.External: 1},
			drops:  map[string]int64{"unknown_medium": 1}},
		{name: "vLLM clears the device", profile: model.VLLM,
			before: batches{{prompt(1, 0, 3)}, {offload(1, "CPU", 0, 1)}, {{Op: model.Clear}}},
			after:  batches{{offload(1, "CPU", 2)}, {prompt(1, 0, 1)}},
			want:   map[event.Tier]int{event.Device: 1, event.Host: 3}},
		{name: "SGLang clears everything", profile: model.SGLang,
			before: batches{{prompt(1, 0, 3)}, {with(prompt(1, 0, 2), in("CPU"))}, {{Op: model.Clear}}},
			after:  batches{{prompt(1, 0, 1)}, {with(prompt(1, 0, 2), in("CPU"))}, {{Op: model.Clear}}, {prompt(2, 0, 2)}},
			want:   map[event.Tier]int{event.Device: 2}},
		{name: "hashes of 32 bytes", profile: model.VLLM,
			before: batches{{prompt(1, 0, 2)}, {with(offload(1, "CPU", 0, 1), func(e *model.Event) { e.Hashes = []model.Hash{long(name(1, 0)), long(name(1, 1))} })}},
			after:  batches{{with(prompt(1, 2, 1), func(e *model.Event) { e.Parent = long(name(1, 1)) })}, {with(evict(1, "CPU", 1), func(e *model.Event) { e.Hashes[0] = long(e.Hashes[0]) })}},
			want:   map[event.Tier]int{event.Device: 3, event.Host: 1}},
		{name: "hashes of bytes and text", profile: model.SGLang,
			before: batches{{with(prompt(1, 0, 2), func(e *model.Event) { e.Hashes = []model.Hash{model.Text("a"), model.Bytes([]byte("a"))} })}},
			after: batches{{with(prompt(1, 2, 1), func(e *model.Event) { e.Parent = model.Bytes([]byte("a")) })},
				{with(evict(1, ""), func(e *model.Event) { e.Hashes = []model.Hash{model.Text("a")} })}},
			want: map[event.Tier]int{event.Device: 2}},
		{name: "adapters, salts and images",
			before: batches{{with(prompt(1, 0, 2), func(e *model.Event) { e.LoRA = "x" })}, {with(prompt(1, 0, 2), func(e *model.Event) { e.Salt, e.Hashes = "y", []model.Hash{name(2, 0), name(2, 1)} })}},
			after:  batches{{with(prompt(1, 0, 2), func(e *model.Event) { e.MM, e.Hashes = [][]uint64{{7}, {8, 9}}, []model.Hash{name(3, 0), name(3, 1)} })}},
			want:   map[event.Tier]int{event.Device: 6}},
		{name: "bigrams",
			before: batches{{with(prompt(1, 0, 2), func(e *model.Event) { e.Pairs, e.Tokens = true, append(e.Tokens, 5) })}},
			after:  batches{{with(prompt(1, 2, 1), func(e *model.Event) { e.Pairs, e.Tokens = true, append(e.Tokens, 6) })}},
			want:   map[event.Tier]int{event.Device: 3}},
		{name: "a name gets another content",
			before: batches{{prompt(1, 0, 3)}, {offload(1, "CPU", 1, 2)}, {with(prompt(1, 0, 1), func(e *model.Event) { e.Tokens[0]++ })}},
			after:  batches{{with(prompt(1, 1, 1), func(e *model.Event) { e.Tokens[0]++ })}, {evict(1, "", 0)}},
			want:   map[event.Tier]int{event.Device: 3, event.Host: 2}},
		{name: "a block behind one that stands behind it",
			before: batches{
				{prompt(1, 0, 3)},
				{with(prompt(1, 0, 1), func(e *model.Event) { e.Parent = name(1, 2) })},
				{with(prompt(2, 0, 3), func(e *model.Event) {
					e.Parent, e.Hashes = name(1, 2), []model.Hash{name(2, 0), name(1, 1), name(2, 2)}
				})}},
			after: batches{{with(prompt(1, 0, 1), func(e *model.Event) { e.Parent = name(1, 1) })}, {prompt(1, 3, 1)}},
			want:  map[event.Tier]int{event.Device: 3 + 1 + 1},
			drops: map[string]int64{"own_parent": 3}},
		{name: "evicted from the middle and stored again",
			before: batches{{prompt(1, 0, 5)}, {evict(1, "", 2)}},
			after:  batches{{prompt(1, 2, 1)}},
			want:   map[event.Tier]int{event.Device: 5}},
		{name: "removals of nothing",
			before: batches{{evict(1, "", 0, 1)}, {prompt(1, 0, 2)}, {evict(1, "CPU", 0)}},
			after:  batches{{evict(1, "", 7, 0)}},
			want:   map[event.Tier]int{event.Device: 1},
			drops:  map[string]int64{"unknown_block": 3}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := r.in(t)
			a := r.engine(fmt.Sprint(i))
			if tc.profile != "" {
				a.worker.Engine = string(tc.profile)
				a.oracle = newOracle(a, tc.profile)
			}
			e := r.bridge()
			e.serve(a)
			for _, b := range tc.before {
				a.publish(b...)
			}
			r.synced(a)
			drops := map[string]int64{}
			for reason := range tc.drops {
				drops[reason] = e.count("kvmesh.bridge.dropped", reason)
			}
			if tc.drops != nil && !maps.Equal(drops, tc.drops) {
				t.Errorf("dropped %v, want %v", drops, tc.drops)
			}
			e.kill()
			next := r.bridge()
			next.Set(a.worker)
			for _, b := range tc.after {
				a.publish(b...)
			}
			r.synced(a)
			have := map[event.Tier]int{}
			for tier, seqs := range r.source(a).Resident() {
				have[tier] = len(seqs)
			}
			if !maps.Equal(have, tc.want) {
				t.Errorf("the log has %v blocks, want %v", have, tc.want)
			}
			next.stop()
		})
	}
}

func TestParkingIsBounded(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge(func(c *bridge.Config) { c.Residency.Parked = 4 })
	e.serve(a)
	a.publish(prompt(1, 1, 3))
	a.publish(prompt(2, 1, 2)) // one too many
	a.publish(prompt(3, 1, 1))
	r.read("three batches", func() bool { return r.source(a).Last == 2 })
	if n := e.count("kvmesh.bridge.dropped", "too_many_parked"); n != 1 {
		t.Errorf("%d events dropped, want 1", n)
	}
	r.loose = true // the model knows no bounds
	a.publish(prompt(1, 0, 1), prompt(2, 0, 1), prompt(3, 0, 1))
	r.read("four batches", func() bool { return r.source(a).Last == 3 })
	if n := len(r.source(a).Resident()[event.Device]); n != 4+1+2 {
		t.Errorf("%d blocks, want 7", n)
	}
	a.publish(prompt(4, 1, 4)) // there is room again
	a.publish(prompt(4, 0, 1))
	r.read("six batches", func() bool { return r.source(a).Last == 5 })
	if n := len(r.source(a).Resident()[event.Device]); n != 7+5 {
		t.Errorf("%d blocks, want 12", n)
	}
}

func TestWhatLeftEveryTierIsKnownForAWhile(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge(func(c *bridge.Config) { c.Residency.Known = 3 })
	e.serve(a)
	a.publish(prompt(1, 0, 5))
	a.publish(evict(1, "", 0, 1, 2, 3, 4))
	r.synced(a)
	r.loose = true
	a.publish(offload(1, "CPU", 1)) // forgotten
	a.publish(offload(1, "CPU", 2, 3, 4))
	r.read("four batches", func() bool { return r.source(a).Last == 3 })
	if n := len(r.source(a).Resident()[event.Host]); n != 3 {
		t.Errorf("%d blocks, want 3", n)
	}
	if n := e.count("kvmesh.bridge.dropped", "unknown_block"); n != 1 {
		t.Errorf("%d events dropped, want 1", n)
	}
}
