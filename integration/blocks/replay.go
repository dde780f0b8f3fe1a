package blocks

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Op is one request of a replay: a query, and what its worker stores and removes
// for it.
type Op struct {
	Prompt  Prompt
	Want    int // blocks of the prompt that the worker has, the most of all
	Worker  int
	From    int      // the blocks from here on are stored
	Removed []uint64 // in this order
}

// Blocks returns how many block operations it is.
func (o *Op) Blocks() int { return 2*len(o.Prompt.Locals) - o.From + len(o.Removed) }

// Replay works out what prompts do to a fleet, before anything is measured. With
// roundRobin requests go to one worker after the other, else to the one that has
// most of the prompt.
func Replay(f *Fleet, prompts []Prompt, roundRobin bool) []Op {
	ops := make([]Op, 0, len(prompts))
	for i := range prompts {
		o := Op{Prompt: prompts[i]}
		matched := f.Match(o.Prompt.Seqs)
		if o.Worker = i % len(f.workers); !roundRobin {
			o.Worker = f.Route(matched)
		}
		o.Want = matched[o.Worker]
		o.From, o.Removed = f.Serve(o.Worker, &o.Prompt)
		ops = append(ops, o)
	}
	return ops
}

// Apply gives what an operation changes to an index or to the model.
func (o *Op) Apply(t Target, h prefix.Holder) {
	if o.From < len(o.Prompt.Locals) {
		run := o.Prompt.Run(o.From, len(o.Prompt.Locals))
		t.Store(h, event.Device, &run)
	}
	if len(o.Removed) > 0 {
		t.Remove(h, event.Device, o.Removed)
	}
}
