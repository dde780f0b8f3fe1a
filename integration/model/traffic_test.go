package model

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
)

func traffic(seed uint64, p Profile, f Feature, pairs bool) *Traffic {
	prompts := Prompts(PromptOptions{Seed: 5, BlockSize: 4, N: 16, Spaced: 4, Pairs: pairs})
	return NewTraffic(TrafficOptions{Seed: seed, BlockSize: 4, Profile: p, Features: f}, prompts)
}

func events(t *Traffic, batches int) []Event {
	var out []Event
	for range batches {
		out = append(out, t.Batch()...)
	}
	return out
}

func TestTrafficIsDeterministic(t *testing.T) {
	a, b := events(traffic(1, VLLM, Everything, false), 300), events(traffic(1, VLLM, Everything, false), 300)
	if !reflect.DeepEqual(a, b) {
		t.Error("one seed made two lists")
	}
	if reflect.DeepEqual(a, events(traffic(2, VLLM, Everything, false), 300)) {
		t.Error("two seeds made one list")
	}
}

func TestPromptsShareBeginnings(t *testing.T) {
	for _, pairs := range []bool{false, true} {
		o := PromptOptions{Seed: 5, BlockSize: 4, N: 16, Spaced: 4, Pairs: pairs}
		prompts := Prompts(o)
		if len(prompts) != 20 || !reflect.DeepEqual(prompts, Prompts(o)) {
			t.Fatalf("%d prompts, or not the same twice", len(prompts))
		}
		locals, spaces, total := map[uint64]bool{}, map[string]bool{}, 0
		for _, p := range prompts {
			total += len(p.seqs)
			spaces[p.LoRA+"/"+p.Salt] = true
			for _, s := range p.seqs {
				locals[s] = true
			}
		}
		if len(locals) > total*9/10 || len(spaces) != 5 {
			t.Errorf("%d of %d prefixes differ, %d namespaces", len(locals), total, len(spaces))
		}
	}
}

// used says which features an event shows.
func used(e Event, truth *Source) Feature {
	var f Feature
	set := func(on bool, bit Feature) {
		if on {
			f |= bit
		}
	}
	stores := e.Op == Store
	set(e.Medium != "", Media)
	set(e.LoRA != "", LoRA)
	set(e.Salt != "", Salt)
	set(e.Group != nil, Groups)
	set(e.Kind != nil, Kinds)
	set(e.Locality != "", Locality)
	set(e.Remaining != nil, Remaining)
	set(stores && len(e.Tokens) == 0, Tokenless)
	set(stores && e.BlockSize != nil && *e.BlockSize > 4, Chunks)
	set(e.Op == Clear, Clears)
	set(e.Op == Raw, Bad)
	set(stores && !e.Parent.IsZero() && !truth.Knows(e.Parent), Orphans)
	set(e.Op == Remove && len(e.Hashes) == 1 && e.Group == nil && len(truth.copiesOf(e.Hashes[0])) == 0, Unknown)
	for _, h := range e.Hashes {
		set(h.kind == bytesHash, Aliases)
	}
	if stores && len(e.Hashes) == 1 && len(e.Tokens) == 4 {
		before := *truth
		b, known := before.blocks[e.Hashes[0]]
		c := truth.contents(e)
		set(known && len(c) > 0 && slices.Equal(b.locals, c[0]) && len(truth.copiesOf(e.Hashes[0])) > 0, Copies)
		set(known && len(c) > 0 && !slices.Equal(b.locals, c[0]), Changes)
	}
	return f
}

func (s *Source) copiesOf(h Hash) []place {
	var out []place
	for p := range s.copies {
		if p.hash == h.under(s.profile) {
			out = append(out, p)
		}
	}
	return out
}

// TestTrafficFeatures switches on one feature at a time, with those it needs:
// it is seen, and what is off is not.
func TestTrafficFeatures(t *testing.T) {
	needs := map[Feature]Feature{Tokenless: Media, Chunks: Media, Aliases: Media | Tokenless, Kinds: Groups, Locality: Noise}
	always := Copies // a device store of what is there
	for bit := range 32 {
		f := Feature(1) << bit
		if f > Remaining && f < Tokenless || f > Bad {
			continue
		}
		on := f | needs[f]
		t.Run(fmt.Sprintf("%#x", f), func(t *testing.T) {
			tr, shadow := traffic(3, VLLM, on, false), New(4, VLLM)
			var seen Feature
			for range 1200 {
				for _, e := range tr.Batch() {
					seen |= used(e, shadow)
					shadow.Apply(e)
				}
			}
			if seen&f == 0 && f != Noise { // noise has no face of its own
				t.Errorf("not seen")
			}
			if extra := seen &^ on &^ always; extra != 0 {
				t.Errorf("seen %#x, switched off", extra)
			}
		})
	}
}

// TestNoiseMeansNothing applies traffic and checks that what must change
// nothing does not, and that much of the rest does.
func TestNoiseMeansNothing(t *testing.T) {
	for _, pairs := range []bool{false, true} {
		for _, p := range []Profile{VLLM, SGLang, ""} {
			tr, shadow := traffic(4, p, Everything, pairs), New(4, p)
			noise, changes, all := 0, 0, 0
			most := map[Tier]int{}
			for _, e := range events(tr, 600) {
				before := shadow.Resident()
				shadow.Apply(e)
				after := shadow.Resident()
				same := reflect.DeepEqual(before, after)
				if e.Op == Raw || e.Medium == "QUANTUM" || e.Locality != "" || e.Group != nil && *e.Group == 2 || e.Op == Store && len(e.Hashes) == 0 {
					noise++
					if !same {
						t.Fatalf("%+v changed the state", e)
					}
				}
				all++
				if !same {
					changes++
				}
				for tier, held := range after {
					most[tier] = max(most[tier], len(held))
				}
			}
			if !reflect.DeepEqual(shadow.Resident(), tr.Truth().Resident()) {
				t.Error("Truth differs from the events")
			}
			if noise < all/100 || changes < all/3 || most[Device] < 30 || most[Host] < 10 || len(most) < 3 {
				t.Errorf("profile %q: %d of %d events are noise, %d change anything; most blocks %v", p, noise, all, changes, most)
			}
		}
	}
}

func TestTrafficRestart(t *testing.T) {
	tr := traffic(6, VLLM, Everything, false)
	old := map[Hash]bool{}
	for _, e := range events(tr, 200) {
		for _, h := range e.Hashes {
			old[h] = true
		}
	}
	tr.Restart()
	if len(tr.Truth().Resident()) != 0 {
		t.Error("a new life holds blocks")
	}
	for _, e := range events(tr, 200) {
		for _, h := range e.Hashes {
			if old[h] {
				t.Fatalf("hash %v of the life before", h)
			}
		}
	}
}

func TestTrafficWithoutPrompts(t *testing.T) {
	tr := NewTraffic(TrafficOptions{BlockSize: 4}, []Prompt{NewPrompt(make([]uint32, 8), 4, "adapter", "", false)})
	for _, e := range events(tr, 10) {
		if e.LoRA != "" {
			t.Errorf("%+v", e)
		}
	}
	if len(tr.Truth().Resident()) == 0 {
		t.Error("it holds nothing")
	}
}

func TestTrafficKnowsWhatItHolds(t *testing.T) {
	for i, p := range []Profile{VLLM, SGLang, VLLM, SGLang} {
		tr := traffic(7, p, Everything, false)
		tr.o.CacheOwner = i > 1
		tr.truth.CacheOwner = i > 1
		for n := range 3000 {
			if tr.Batch(); n%500 == 499 {
				tr.Restart()
			}
			held := map[place]int{}
			for tier, l := range tr.held {
				for _, x := range l {
					held[place{Tier(tier), x.owner, groupOf(Event{Group: x.group}), x.hash}]++
				}
			}
			if !reflect.DeepEqual(held, tr.Truth().copies) {
				t.Fatalf("it believes to hold %v, the events say %v", held, tr.Truth().copies)
			}
		}
	}
}
