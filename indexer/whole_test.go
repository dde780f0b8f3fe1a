package indexer_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// An indexer that starts on a log which has lost its beginning is not ready until
// every worker's state is there again.
func TestLogHasLostItsBeginning(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	a, b := w.writer("a", 0), w.writer("b", 0)
	w.fill(rng, a, 10)
	w.fill(rng, b, 10)
	stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(w.ctx); err != nil {
		t.Fatal(err)
	}
	askedA, askedB := w.requests(a), w.requests(b)
	x := w.start(nil)
	w.request(askedA)
	w.request(askedB)
	notReady := func(when string) {
		t.Helper()
		if err := x.Ready(); !errors.Is(err, indexer.ErrNotReady) {
			t.Errorf("%s: Ready says %v", when, err)
		}
	}
	notReady("nothing is there")
	seq := w.write(a, a.Checkpoint(rng, 2)...)
	w.await("the checkpoint is read", func() bool { return x.Position().LogSeq >= seq })
	notReady("one of two is there")
	seq = w.write(b, b.Checkpoint(rng, 1)...)
	x.reach(seq)
	x.agrees(stateOf(a, b))
}

// A worker that no bridge reads is not waited for without end.
func TestLogHasLostAWorker(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	a, lost := w.writer("a", 0), w.writer("lost", 0)
	w.fill(rng, lost, 3)
	stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(w.ctx); err != nil {
		t.Fatal(err)
	}
	x := w.start(nil)
	x.reach(w.write(a, a.Checkpoint(rng, 1)...))
	x.agrees(stateOf(a))
}
