package mock

import (
	"github.com/kvmesh/kvmesh/integration/model"
)

// WorkloadOptions say what an engine of a fleet does. Zero fields have defaults.
type WorkloadOptions struct {
	Seed      uint64 // of the engine; engines with one seed and others alike are equal
	BlockSize int    // tokens a block; 16
	PerBatch  int    // blocks a batch stores; 16, which makes payloads of about 1 KB
	Prompt    int    // blocks of a prompt; 64
	Shared    int    // of them that other prompts and engines begin with as well; 16
	Capacity  int    // blocks the engine holds before it evicts; 4096
}

func (o *WorkloadOptions) defaults() {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	set(&o.BlockSize, 16)
	set(&o.PerBatch, 16)
	set(&o.Prompt, 64)
	set(&o.Shared, 16)
	set(&o.Capacity, 4096)
	o.Shared = min(o.Shared, o.Prompt-1)
	o.PerBatch = min(o.PerBatch, o.Prompt)
}

// roots is how many beginnings the prompts of a fleet share.
const roots = 4

// Workload is what one engine caches over time: prompt after prompt, each
// stored a batch of blocks at a time behind a beginning that others share; when
// it is full, the oldest prompts go from their ends. It is not safe for
// concurrent use.
type Workload struct {
	o      WorkloadOptions
	root   [roots]bool // whether the engine holds it
	growth int         // blocks of the newest prompt so far, its beginning included
	newest uint64      // number of the newest prompt
	oldest uint64      // number of the oldest that is not evicted
	left   int         // blocks of the oldest behind its beginning
	held   int         // blocks in all
}

// NewWorkload returns a workload that has done nothing yet.
func NewWorkload(o WorkloadOptions) *Workload {
	o.defaults()
	return &Workload{o: o, left: o.Prompt - o.Shared}
}

// Again returns a workload that does the same from the beginning.
func (w *Workload) Again() *Workload { return NewWorkload(w.o) }

// Next returns the events of the next batch: a store, and a removal before it
// when the engine is full.
func (w *Workload) Next() []model.Event {
	var events []model.Event
	if w.growth == w.o.Prompt {
		w.newest++
		w.growth = 0
	}
	if w.growth == 0 && w.root[w.newest%roots] {
		w.growth = w.o.Shared
	}
	from, to := w.growth, min(w.growth+w.o.PerBatch, w.o.Prompt)
	for w.held+to-from > w.o.Capacity && w.oldest < w.newest {
		events = append(events, w.evict())
	}
	w.growth = to
	w.held += to - from
	w.root[w.newest%roots] = w.root[w.newest%roots] || to >= w.o.Shared
	e := model.Event{Hashes: make([]model.Hash, 0, to-from), Tokens: make([]int64, 0, (to-from)*w.o.BlockSize)}
	if from > 0 {
		e.Parent = w.hash(w.newest, from-1)
	}
	for i := from; i < to; i++ {
		e.Hashes = append(e.Hashes, w.hash(w.newest, i))
		first := w.content(w.newest, i)
		for j := range w.o.BlockSize {
			e.Tokens = append(e.Tokens, int64(token(first, j)))
		}
	}
	return append(events, e)
}

// evict removes up to a batch of blocks from the end of the oldest prompt.
func (w *Workload) evict() model.Event {
	e := model.Event{Op: model.Remove}
	for len(e.Hashes) < w.o.PerBatch && w.left > 0 {
		w.left--
		e.Hashes = append(e.Hashes, w.hash(w.oldest, w.o.Shared+w.left))
	}
	w.held -= len(e.Hashes)
	if w.left == 0 {
		w.oldest++
		w.left = w.o.Prompt - w.o.Shared
	}
	return e
}

// Prompts returns the last n prompts that the workload has begun, whole, the
// newest first.
func (w *Workload) Prompts(n int) []model.Prompt {
	var out []model.Prompt
	for number := w.newest; len(out) < n; number-- {
		var tokens []uint32
		for i := range w.o.Prompt {
			first := w.content(number, i)
			for j := range w.o.BlockSize {
				tokens = append(tokens, token(first, j))
			}
		}
		out = append(out, model.NewPrompt(tokens, w.o.BlockSize, "", "", false))
		if number == 0 {
			break
		}
	}
	return out
}

// content is what the tokens of a block are made from. Beginnings are the same in
// every engine.
func (w *Workload) content(prompt uint64, block int) uint64 {
	if block < w.o.Shared {
		return model.Mix(prompt%roots<<32 | uint64(block))
	}
	return model.Mix(model.Mix(w.o.Seed<<32^prompt) + uint64(block))
}

func token(content uint64, at int) uint32 {
	return uint32(model.Mix(content+uint64(at)) % model.Vocab)
}

// hash is the engine's name for a block of a prompt.
func (w *Workload) hash(prompt uint64, block int) model.Hash {
	if block < w.o.Shared {
		prompt %= roots
	}
	return model.Int(model.Mix(model.Mix(w.o.Seed^prompt<<20) + uint64(block)))
}
