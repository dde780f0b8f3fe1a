package bridge_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// names asks for the engine's names of the blocks of a prompt.
func (r *rig) names(source event.Source, tokens []uint32) []string {
	r.t.Helper()
	seqs := hash.AppendSequence(nil, hash.AppendLocals(nil, tokens, blockSize, 0, hash.Seed))
	reply, err := r.nc.Request(event.NamesSubject(source.Key()), event.NamesRequest(seqs), 30*time.Second)
	if err != nil {
		r.t.Fatal(err)
	}
	names, err := event.ParseNames(reply.Data)
	if err != nil {
		r.t.Fatal(err)
	}
	out := []string{}
	for _, n := range names {
		if n.Name == nil {
			out = append(out, fmt.Sprint(n.Bits))
		} else {
			out = append(out, string(n.Name))
		}
	}
	return out
}

// A bridge knows the engine's names of the blocks that the engine holds.
func TestNamesOfBlocks(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	r.bridge().serve(a)
	tokens := make([]uint32, 6*blockSize)
	wide := make([]int64, len(tokens))
	for i := range tokens {
		tokens[i], wide[i] = uint32(i+1), int64(i+1)
	}
	one := func(i int) []int64 { return wide[i*blockSize : (i+1)*blockSize] }
	a.publish(
		model.Event{Hashes: []model.Hash{model.Int(11), model.Int(12)}, Tokens: wide[:2*blockSize], Medium: "GPU"},
		model.Event{Hashes: []model.Hash{model.Int(13)}, Parent: model.Int(12), Tokens: one(2), Medium: "GPU"},
		model.Event{Hashes: []model.Hash{model.Int(14)}, Parent: model.Int(13), Tokens: one(3), Medium: "CPU"},
	)
	r.synced(a)
	want := func(names ...string) {
		t.Helper()
		if got := r.names(a.worker.Source, tokens); !slices.Equal(got, names) {
			t.Errorf("names %q, want %q", got, names)
		}
	}
	want("11", "12", "13", "14")
	a.publish(model.Event{Op: model.Remove, Hashes: []model.Hash{model.Int(13)}, Medium: "GPU"})
	r.synced(a)
	want("11", "12") // up to the hole
	a.publish(model.Event{Hashes: []model.Hash{model.Int(13)}, Parent: model.Int(12), Tokens: one(2), Medium: "GPU"})
	r.synced(a)
	want("11", "12", "13", "14")
	tokens[0]++ // another prompt
	want()
}
