package feed

import (
	"maps"
	"math/rand/v2"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Writer writes the records of one source as a bridge would, from what the source
// holds in the plainest form. Operations are collected until Record takes them.
// It is not safe for concurrent use.
type Writer struct {
	Source      event.Source
	Incarnation uint64

	last uint64 // batches in this incarnation
	held map[event.Tier]map[uint64]written
	ops  [][]byte
}

// written is a block as a record places it.
type written struct {
	local, parent uint64
	base          uint32
}

// NewWriter returns the Writer of a source that holds nothing. Its first record
// says so.
func NewWriter(source event.Source, incarnation uint64) *Writer {
	w := &Writer{Source: source, Incarnation: incarnation}
	w.Reset(event.ReasonNew)
	return w
}

// Held returns the sequence hashes that each tier holds.
func (w *Writer) Held() map[model.Tier]map[uint64]bool {
	out := map[model.Tier]map[uint64]bool{}
	for t, blocks := range w.held {
		for seq := range blocks {
			if out[model.Tier(t)] == nil {
				out[model.Tier(t)] = map[uint64]bool{}
			}
			out[model.Tier(t)][seq] = true
		}
	}
	return out
}

// Store puts the blocks from, to and all between of a prompt, given by its local
// hashes, into a tier.
func (w *Writer) Store(t event.Tier, locals []uint64, from, to int) {
	if w.held[t] == nil {
		w.held[t] = map[uint64]written{}
	}
	seqs := hash.AppendSequence(nil, locals)
	run := event.Run{Root: from == 0, Base: uint32(from), Locals: locals[from:to]}
	if from > 0 {
		run.Parent = seqs[from-1]
	}
	parent := run.Parent
	var names []event.EngineHash
	for i := from; i < to; i++ {
		w.held[t][seqs[i]] = written{local: locals[i], parent: parent, base: uint32(i)}
		parent = seqs[i]
		names = append(names, event.EngineHash{Bits: seqs[i] * 31})
	}
	w.ops = append(w.ops, event.AppendStored(nil, t, "", run, names))
}

// Remove takes blocks out of a tier, by their sequence hashes.
func (w *Writer) Remove(t event.Tier, seqs ...uint64) {
	for _, seq := range seqs {
		delete(w.held[t], seq)
	}
	w.ops = append(w.ops, event.AppendRemoved(nil, t, "", seqs, event.Group{}, nil))
}

// Clear empties tiers.
func (w *Writer) Clear(tiers event.TierMask) {
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			delete(w.held, t)
		}
	}
	w.ops = append(w.ops, event.AppendCleared(nil, tiers, ""))
}

// Reset empties the source. For all reasons but a gap a new incarnation begins.
func (w *Writer) Reset(reason string) {
	w.held = map[event.Tier]map[uint64]written{}
	w.ops = [][]byte{event.AppendReset(nil, reason)}
	if reason != event.ReasonGap {
		w.Incarnation++
		w.last = 0
	}
}

// Restart begins a new incarnation with what is held in some tiers. It returns the
// records that say so; what was collected is void.
func (w *Writer) Restart(rng *rand.Rand, chunks int, kept event.TierMask) [][]byte {
	w.Incarnation++
	w.last, w.ops = 0, nil
	w.held = maps.Clone(w.held)
	maps.DeleteFunc(w.held, func(t event.Tier, _ map[uint64]written) bool { return !kept.Has(t) })
	return w.Checkpoint(rng, chunks)
}

// Gap says that the next n batches are lost for good.
func (w *Writer) Gap(n uint64, reason string) {
	w.ops = append(w.ops, event.AppendGap(nil, w.last, w.last+n-1, reason))
	w.last += n
}

// digest returns what is held, by tier.
func (w *Writer) digest() event.Digests {
	var out event.Digests
	for t, blocks := range w.held {
		for seq := range blocks {
			out[t].Count++
			out[t].Sum += mix(seq, event.Tier(t))
		}
	}
	return out
}

// header returns the header of a record that ends with the last batch.
func (w *Writer) header(first uint64) event.Header {
	h := event.Header{Incarnation: w.Incarnation, TS: float64(w.last)}
	if w.last > 0 {
		h.Batches, h.First, h.Last = true, first, w.last-1
	}
	return h
}

// Record returns the next record: what was collected, as one batch, with the
// digest.
func (w *Writer) Record() []byte { return w.RecordWith(w.digest()) }

// RecordWith is Record with another digest.
func (w *Writer) RecordWith(d event.Digests) []byte {
	w.last++
	ops := append(w.ops, event.AppendDigest(nil, &d))
	w.ops = nil
	return event.AppendRecord(nil, w.header(w.last-1), len(ops), ops...)
}

// Retire returns the last record: the worker is gone.
func (w *Writer) Retire() []byte {
	w.held, w.ops = map[event.Tier]map[uint64]written{}, nil
	return event.AppendRecord(nil, event.Header{Incarnation: w.Incarnation}, 1, event.AppendRetired(nil))
}

// Checkpoint returns the records of a checkpoint of what was recorded, in so many
// chunks. The blocks are in no order.
func (w *Writer) Checkpoint(rng *rand.Rand, chunks int) [][]byte {
	type piece struct {
		tier event.Tier
		run  []byte
	}
	var pieces []piece
	for t := range event.Tier(event.Tiers) {
		for _, seq := range slices.Sorted(maps.Keys(w.held[t])) {
			b := w.held[t][seq]
			run := event.Run{Root: b.base == 0, Parent: b.parent, Base: b.base, Locals: []uint64{b.local}}
			pieces = append(pieces, piece{t, event.AppendRun(nil, run, nil)})
		}
	}
	rng.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
	var out [][]byte
	for i := range chunks {
		ops := [][]byte{event.AppendCheckpoint(nil, i, chunks, event.Device, "", 0)}
		for _, p := range pieces[i*len(pieces)/chunks : (i+1)*len(pieces)/chunks] {
			ops = append(ops, append(event.AppendCheckpoint(nil, i, chunks, p.tier, "", 1), p.run...))
		}
		if i == chunks-1 {
			d := w.digest()
			ops = append(ops, event.AppendDigest(nil, &d))
		}
		out = append(out, event.AppendRecord(nil, w.header(w.last), len(ops), ops...))
	}
	return out
}

// Random collects one random operation over prompts, given by the local hashes of
// their blocks.
func (w *Writer) Random(rng *rand.Rand, prompts [][]uint64) {
	t := event.Tier([]int{0, 0, 0, 1, 1, 2, 3}[rng.IntN(7)])
	switch x := rng.IntN(40); {
	case x < 22:
		locals := prompts[rng.IntN(len(prompts))]
		from := 0
		if rng.IntN(2) == 0 {
			from = rng.IntN(len(locals))
		}
		w.Store(t, locals, from, from+1+rng.IntN(len(locals)-from))
	case x < 37:
		held := slices.Sorted(maps.Keys(w.held[t]))
		rng.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		w.Remove(t, held[:min(len(held), 1+rng.IntN(6))]...)
	case x < 38:
		w.Clear(event.TierMask(1 + rng.IntN(1<<event.Tiers-1)))
	case x < 39:
		w.Gap(1+uint64(rng.IntN(5)), event.ReasonAbsent)
	default:
		w.Reset([]string{event.ReasonRestart, event.ReasonGap}[rng.IntN(2)])
	}
}
