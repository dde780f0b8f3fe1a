package prefix_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/blocks"
)

// world does the same random things to an Index and to the naive model.
type world struct {
	rng     *rand.Rand
	index   *prefix.Index
	naive   *blocks.Naive
	mask    uint64
	prompts [][]uint64 // local hashes
	seqs    [][]uint64 // sequence hashes of prompts
	workers []worker
	logSeq  uint64
}

// worker is a holder in the Index, which changes when it is emptied, and in the
// model, where it does not.
type worker struct {
	holder prefix.Holder
	source *event.Source
	shown  bool
}

func newWorld(seed, mask uint64, workers, prompts, length int) *world {
	w := &world{rng: rand.New(rand.NewPCG(seed, 0)), index: prefix.NewMasked(mask), naive: blocks.NewNaive(), mask: mask}
	w.naive.Mask = mask
	for range prompts {
		w.prompts = append(w.prompts, w.prompt(length))
	}
	for _, p := range w.prompts {
		seqs := hash.AppendSequence(nil, p[:1])
		seqs[0] &= mask
		for _, l := range p[1:] {
			seqs = append(seqs, hash.Next(seqs[len(seqs)-1], l)&mask)
		}
		w.seqs = append(w.seqs, seqs)
	}
	w.update(func(x prefix.Writer) {
		for i := range workers {
			s := &event.Source{Model: "m", Group: "g", Instance: fmt.Sprint("w", i)}
			h := x.Add(s)
			x.Show(h, true)
			w.workers = append(w.workers, worker{h, s, true})
		}
	})
	return w
}

// prompt returns a new prompt, which mostly begins as another does.
func (w *world) prompt(length int) []uint64 {
	var p []uint64
	if len(w.prompts) > 0 && w.rng.IntN(5) > 0 {
		from := w.prompts[w.rng.IntN(len(w.prompts))]
		p = slices.Clone(from[:w.rng.IntN(len(from)+1)])
	}
	for n := max(1, len(p)) + w.rng.IntN(length); len(p) < n; {
		p = append(p, w.rng.Uint64())
	}
	return p
}

func (w *world) update(f func(x prefix.Writer)) {
	w.logSeq++
	w.index.Update(w.logSeq, f)
}

// stretch returns a random part of a random prompt.
func (w *world) stretch() (prompt, from, end int) {
	prompt = w.rng.IntN(len(w.prompts))
	n := len(w.prompts[prompt])
	switch w.rng.IntN(3) {
	case 0:
		return prompt, 0, 1 + w.rng.IntN(n)
	case 1:
		from = w.rng.IntN(n)
		return prompt, from, min(n, from+1+w.rng.IntN(4))
	}
	from = w.rng.IntN(n)
	return prompt, from, from + 1 + w.rng.IntN(n-from)
}

func (w *world) tier() event.Tier {
	if w.rng.IntN(2) == 0 {
		return event.Device
	}
	return event.Tier(w.rng.IntN(event.Tiers))
}

// change is one random change, for the Index and for the model.
type change struct {
	index func(prefix.Writer) [2]uint64
	naive func() [2]uint64
}

func pair(a, b uint64) [2]uint64 { return [2]uint64{a, b} }

func (w *world) change() change {
	i := w.rng.IntN(len(w.workers))
	at := &w.workers[i]
	id, t := prefix.Holder(i), w.tier()
	p, from, end := w.stretch()
	switch n := w.rng.IntN(100); {
	case n < 55:
		run := &event.Run{Root: from == 0, Base: uint32(from), Locals: w.prompts[p][from:end]}
		if from > 0 {
			run.Parent = w.seqs[p][from-1]
		}
		return change{
			func(x prefix.Writer) [2]uint64 { return pair(x.Store(at.holder, t, run)) },
			func() [2]uint64 { return pair(w.naive.Store(id, t, run)) },
		}
	case n < 95:
		seqs := slices.Clone(w.seqs[p][from:end])
		switch w.rng.IntN(3) {
		case 0:
			slices.Reverse(seqs)
		case 1:
			w.rng.Shuffle(len(seqs), func(i, j int) { seqs[i], seqs[j] = seqs[j], seqs[i] })
			seqs = seqs[:1+w.rng.IntN(len(seqs))]
		}
		return change{
			func(x prefix.Writer) [2]uint64 { return pair(x.Remove(at.holder, t, seqs)) },
			func() [2]uint64 { return pair(w.naive.Remove(id, t, seqs)) },
		}
	case n < 97:
		tiers := event.TierMask(w.rng.IntN(int(event.AllTiers) + 1))
		return change{
			func(x prefix.Writer) [2]uint64 { x.Clear(at.holder, tiers); return pair(0, 0) },
			func() [2]uint64 { w.naive.Clear(id, tiers); return pair(0, 0) },
		}
	case n < 99:
		return change{
			func(x prefix.Writer) [2]uint64 {
				x.Drop(at.holder)
				at.holder = x.Add(at.source)
				x.Show(at.holder, at.shown)
				return pair(0, 0)
			},
			func() [2]uint64 { w.naive.Clear(id, event.AllTiers); return pair(0, 0) },
		}
	}
	at.shown = !at.shown
	return change{
		func(x prefix.Writer) [2]uint64 { x.Show(at.holder, at.shown); return pair(0, 0) },
		func() [2]uint64 { return pair(0, 0) },
	}
}

// question is a prompt as a query brings it: begun in common with others, and
// going on in its own way.
func (w *world) question() []uint64 {
	p := w.prompts[w.rng.IntN(len(w.prompts))]
	if w.rng.IntN(3) == 0 {
		p = slices.Clone(p)
		p[w.rng.IntN(len(p))] = w.rng.Uint64()
	}
	return p[:1+w.rng.IntN(len(p))]
}

type answer map[string][event.Tiers]uint32

// want is what the model answers.
func (w *world) want(locals []uint64) answer {
	out := answer{}
	for i, ends := range w.naive.Match(locals) {
		if at := w.workers[i]; at.shown {
			out[at.source.Instance] = ends
		}
	}
	return out
}

// have is what the Index answers, and for when.
func have(x *prefix.Index, q *prefix.Query, locals []uint64) (answer, uint64) {
	matches, logSeq := x.Match(q, locals)
	out := answer{}
	for _, m := range matches {
		out[q.Source(m.Holder).Instance] = m.Ends
	}
	if len(out) != len(matches) {
		return nil, logSeq // somebody is in it twice
	}
	return out, logSeq
}

// walk returns all that a worker has.
func (w *world) walk(i int) (have, want map[prefix.Block]event.TierMask) {
	collect := func(m map[prefix.Block]event.TierMask) func(prefix.Block, event.TierMask) {
		return func(b prefix.Block, t event.TierMask) {
			if w.mask != ^uint64(0) { // whose block it is that has the hash, nobody can say
				b = prefix.Block{Seq: b.Seq}
			}
			m[b] = t
		}
	}
	have, want = map[prefix.Block]event.TierMask{}, map[prefix.Block]event.TierMask{}
	w.index.Read(func(r prefix.Reader) { r.Walk(w.workers[i].holder, collect(have)) })
	w.naive.Walk(prefix.Holder(i), collect(want))
	return have, want
}

func equal(a, b answer) bool { return a != nil && maps.Equal(a, b) }
