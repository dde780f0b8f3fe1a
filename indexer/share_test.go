package indexer_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
)

// elsewhere is a partition beside that of most tests.
var elsewhere = event.Partition{Model: "org/m", Group: "other"}

// writerIn is writer for a source of any partition.
func (w *world) writerIn(p event.Partition, instance string, rank uint32) *feed.Writer {
	out := feed.NewWriter(event.Source{Model: p.Model, Group: p.Group, Instance: instance, Rank: rank}, 100)
	w.writers = append(w.writers, out)
	return out
}

// of returns the writers of a partition.
func (w *world) of(p event.Partition) (out []*feed.Writer) {
	for _, of := range w.writers {
		if of.Source.Partition() == p {
			out = append(out, of)
		}
	}
	return out
}

// share has an indexer serve one partition.
func share(p event.Partition) func(*indexer.Config, *indexer.Options) {
	return func(c *indexer.Config, _ *indexer.Options) { c.Share = event.Share{{Partition: p}} }
}

// An indexer with a share answers for that, and says of the rest that it is
// elsewhere; what it knows of the rest is the block size.
func TestShare(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	w.writer("a", 0)
	w.writerIn(elsewhere, "b", 0)
	var seq uint64
	for range 20 {
		for _, of := range w.writers {
			seq = w.fill(rng, of, 1)
		}
	}
	x := w.start(share(partition))
	x.reach(seq)
	x.agrees(stateOf(w.of(partition)...))
	if x.Serves(elsewhere) || !x.Serves(partition) {
		t.Error("it serves another partition than its share")
	}
	if _, err := x.Match(new(indexer.Query), elsewhere, w.locals[0]); !errors.Is(err, indexer.ErrElsewhere) {
		t.Errorf("a query for the other partition: %v", err)
	}
	if _, _, _, err := x.Dump(elsewhere); !errors.Is(err, indexer.ErrElsewhere) {
		t.Errorf("a dump of the other partition: %v", err)
	}
	if size, err := x.BlockSize(elsewhere); err != nil || size != blockSize {
		t.Errorf("block size of the other partition: %d, %v", size, err)
	}
	if _, err := x.BlockSize(event.Partition{Model: "no", Group: "g"}); !errors.Is(err, indexer.ErrUnknownPartition) {
		t.Errorf("block size of a partition without workers: %v", err)
	}
	if ps := x.Partitions(); len(ps) != 1 || ps[0] != partition {
		t.Errorf("partitions %v", ps)
	}
	if n := len(x.Workers()); n != 2 {
		t.Errorf("%d workers, want both", n)
	}
	sources, at := x.Sources()
	if len(sources) != 1 || sources[0].Source != w.writers[0].Source || at.LogSeq != seq {
		t.Errorf("sources %v at %d, want %v at %d", sources, at.LogSeq, w.writers[0].Source, seq)
	}
	held := int64(0)
	for _, blocks := range w.writers[0].Held() {
		held += int64(len(blocks))
	}
	for name, want := range map[string]int64{
		"kvmesh.indexer.blocks": held, "kvmesh.indexer.sources": 1, "kvmesh.indexer.sources_elsewhere": 1, "kvmesh.indexer.records.passed": 20, "kvmesh.indexer.records.bad": 0,
	} {
		if got := x.counter(name); got != want {
			t.Errorf("%s is %d, want %d", name, got, want)
		}
	}
	// A record that can't be read is as little its own.
	w.publish(event.DefaultLog().Subject(w.writers[1].Source), []byte("no record"))
	seq = w.fill(rng, w.writers[0], 1)
	x.reach(seq)
	x.agrees(stateOf(w.of(partition)...))
	if n := x.counter("kvmesh.indexer.records.bad"); n != 1 {
		t.Errorf("%d bad records are counted, want 1", n)
	}
}

// TestRandomShares writes random records of two partitions: indexers that serve
// one of them answer as the model does, and know as well as one that serves both
// which records are still needed.
func TestRandomShares(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) { randomShares(t, seed) })
	}
}

func randomShares(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t, seed)
	for i := range 3 {
		w.writer(fmt.Sprintf("a%d", i), 0)
		w.writerIn(elsewhere, fmt.Sprintf("b%d", i), uint32(i))
	}
	both, one, other := w.start(nil), w.start(share(partition)), w.start(share(elsewhere))
	pending := map[*feed.Writer][][]byte{} // chunks of checkpoints
	last := uint64(0)
	for step := range 200 {
		of := w.writers[rng.IntN(len(w.writers))]
		switch x := rng.IntN(20); {
		case x == 0:
			last = w.write(of, of.Retire())
			delete(pending, of)
			of.Reset(event.ReasonNew)
		case x < 3:
			pending[of] = of.Checkpoint(rng, 1+rng.IntN(4))
			fallthrough
		case x < 10 && len(pending[of]) > 0:
			last = w.write(of, pending[of][0])
			pending[of] = pending[of][1:]
		case x == 11:
			of.Reset(event.ReasonRestart)
			fallthrough
		default:
			last = w.fill(rng, of, 1)
			delete(pending, of) // an unfinished one means nothing from here on
		}
		if step%20 != 19 {
			continue
		}
		for _, r := range []*reader{both, one, other} {
			r.reach(last)
			if got, want := r.Floor(), both.Floor(); got != want {
				t.Fatalf("step %d: the floor is %d for an indexer that serves %q, want %d", step, got, r.Share().Strings(), want)
			}
		}
		one.agrees(stateOf(w.of(partition)...))
		other.agreesIn(elsewhere, stateOf(w.of(elsewhere)...))
	}
}

// A rank that only batches name goes with its engine's life, also for those who
// serve another partition: it holds the floor down no longer.
func TestShareNamedRank(t *testing.T) {
	w := newWorld(t, 1)
	home := w.writer("w", 0)
	named := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 7}, home.Incarnation-1)
	w.write(named, event.AppendRecord(nil, event.Header{Incarnation: named.Incarnation}, 1, event.AppendHome(nil, 0)))
	w.write(named, named.Record())
	both, other := w.start(nil), w.start(share(elsewhere))
	home.Reset(event.ReasonRestart)
	first := w.write(home, home.Record())
	for _, r := range []*reader{both, other} {
		r.reach(first)
		if got := r.Floor(); got != first {
			t.Errorf("the floor is %d for an indexer that serves %q, want %d", got, r.Share().Strings(), first)
		}
	}
}

// TestSharesKeepTheLogSmall has two indexers, neither of which serves everything,
// compact a log: it stays small, and whoever reads it anew finds the whole state,
// of both partitions.
func TestSharesKeepTheLogSmall(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	var mu sync.Mutex // of the writers
	for i, p := range []event.Partition{partition, elsewhere, partition, elsewhere} {
		w.writerIn(p, fmt.Sprintf("w%d", i), 0)
	}
	w.answerRequests(rng, &mu)
	w.fill(rng, w.writers[3], 5) // the last one is idle from here on
	compact := func(p event.Partition) func(*indexer.Config, *indexer.Options) {
		return func(c *indexer.Config, o *indexer.Options) {
			share(p)(c, o)
			c.Compact, c.MinLog, c.Grace = true, 10000, 50*time.Millisecond
		}
	}
	x, y := w.start(compact(partition)), w.start(compact(elsewhere))
	purged := uint64(1)
	for range 6 {
		mu.Lock()
		for range 200 {
			w.fill(rng, w.writers[rng.IntN(3)], 1)
		}
		mu.Unlock()
		before := purged
		w.await("the log is cut", func() bool {
			stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
			if err != nil {
				t.Fatal(err)
			}
			state := stream.CachedInfo().State
			purged = state.FirstSeq
			return purged > before && state.Bytes < 120000
		})
		mu.Lock()
		late, last := w.start(nil), w.last()
		for _, p := range []event.Partition{partition, elsewhere} {
			late.reach(last)
			late.agreesIn(p, stateOf(w.of(p)...))
		}
		x.reach(last)
		x.agrees(stateOf(w.of(partition)...))
		y.reach(last)
		y.agreesIn(elsewhere, stateOf(w.of(elsewhere)...))
		mu.Unlock()
		late.stop()
	}
	if n := x.counter("kvmesh.indexer.divergences") + y.counter("kvmesh.indexer.divergences"); n > 0 {
		t.Errorf("%d divergences", n)
	}
}
