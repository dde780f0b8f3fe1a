package workload

import (
	"github.com/kvmesh/kvmesh/integration/model"
	"github.com/kvmesh/kvmesh/integration/trace"
)

// FromTrace returns a request of a trace as a turn of a session of its own. number
// sets its answer apart from those of others.
func FromTrace(r *trace.Request, number uint64) Turn {
	t := Turn{Session: number, Prompt: make([]Segment, 0, len(r.HashIDs)), Output: Segment{Seed: model.Mix(^number), Tokens: r.OutputLength}}
	left := r.InputLength
	for _, id := range r.HashIDs {
		n := min(left, trace.BlockTokens)
		t.Prompt = append(t.Prompt, Segment{Seed: model.Mix(id), Tokens: n})
		left -= n
	}
	return t
}
