package indexer_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
)

// A source without a worker is not answered with, from the first moment; after
// the grace time its blocks are given back. When its worker is back, its state is
// asked for.
func TestGrace(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of, other := w.writer("w", 0), w.writer("other", 0)
	of.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	w.write(of, of.Record())
	seq := w.fill(rng, other, 10)
	requests := w.requests(of)
	x := w.start(func(c *indexer.Config, _ *indexer.Options) { c.Grace = 50 * time.Millisecond })
	x.reach(seq)
	x.agrees(stateOf(of, other))

	x.Unregistered(of.Source)
	x.agrees(stateOf(other))
	w.await("the blocks are given back", func() bool {
		info, ok := x.info(of.Source)
		return ok && info.Digests == event.Digests{}
	})
	x.agrees(stateOf(other))
	x.reach(w.fill(rng, of, 5)) // it may write on; nobody looks
	x.agrees(stateOf(other))

	x.Registered(worker(of))
	w.request(requests)
	x.agrees(stateOf(other))
	x.reach(w.write(of, of.Checkpoint(rng, 2)...))
	x.agrees(stateOf(of, other))
	x.reach(w.fill(rng, of, 20))
	x.agrees(stateOf(of, other))
}

// Within the grace time nothing is lost.
func TestBackWithinGrace(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	x := w.start(nil)
	x.reach(w.fill(rng, of, 30))
	x.Unregistered(of.Source)
	if _, err := x.Match(new(indexer.Query), partition, w.locals[0]); err != indexer.ErrUnknownPartition {
		t.Errorf("a partition without workers: %v", err)
	}
	x.reach(w.fill(rng, of, 10))
	x.Registered(worker(of))
	x.agrees(stateOf(of))
}

// A rank that was unregistered is not answered with although another rank of its
// instance is, also if the indexer hears of that before the log tells it of the
// rank.
func TestUnregisteredRank(t *testing.T) {
	w := newWorld(t, 1)
	first, second := w.writer("w", 0), w.writer("w", 1)
	first.Store(event.Device, w.locals[0], 0, 1)
	second.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	w.write(first, first.Record())
	seq := w.write(second, second.Record())
	x := w.start(nil)
	x.reach(seq)
	x.agrees(stateOf(first, second))
	x.Unregistered(second.Source)
	x.agrees(stateOf(first))

	y := w.prepare(nil)
	y.Unregistered(second.Source)
	y.Registered(worker(first))
	y.CatalogRead()
	y.reach(seq)
	y.agrees(stateOf(first))
	y.Registered(worker(second))
	y.agrees(stateOf(first, second))
}

// A rank that only an engine's batches name has no worker of its own: it goes
// with that engine's worker, and its state with that engine's life.
func TestNamedRank(t *testing.T) {
	w := newWorld(t, 1)
	home, kin := w.writer("w", 0), w.writer("w", 1)
	named := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 7}, home.Incarnation-1)
	home.Store(event.Device, w.locals[0], 0, 1)
	named.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	kin.Store(event.Device, w.locals[1], 0, 1)
	write := func(of *feed.Writer) uint64 {
		record := event.AppendRecord(nil, event.Header{Incarnation: of.Incarnation}, 1, event.AppendHome(nil, 0))
		if of == named {
			w.write(of, record)
		}
		return w.write(of, of.Record())
	}
	write(named)
	write(kin)
	seq := write(home)
	x := w.start(nil)
	x.reach(seq)
	x.agrees(stateOf(home, kin, named))

	x.Unregistered(home.Source)
	x.agrees(stateOf(kin))
	x.Registered(worker(home))
	x.agrees(stateOf(home, kin, named))

	home.Reset(event.ReasonRestart)
	seq = write(home)
	x.reach(seq)
	x.agrees(stateOf(home, kin))
	if _, ok := x.info(named.Source); ok {
		t.Error("the state of the engine's life before is still there")
	}
}

// TestALifeMayBeginWithWhatIsLeft: a checkpoint of a new incarnation takes effect at
// once, at its last chunk, and is as a restart to all else.
func TestALifeMayBeginWithWhatIsLeft(t *testing.T) {
	w := newWorld(t, 1)
	rng := rand.New(rand.NewPCG(3, 0))
	home := w.writer("w", 0)
	named := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 7}, home.Incarnation-1)
	w.write(named, event.AppendRecord(nil, event.Header{Incarnation: named.Incarnation}, 1, event.AppendHome(nil, 0)))
	named.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	w.write(named, named.Record())
	home.Store(event.Device, w.locals[0], 0, 3)
	home.Store(event.Host, w.locals[0], 1, 2)
	home.Gap(3, event.ReasonAbsent)
	x := w.start(nil)
	x.reach(w.write(home, home.Record()))
	x.agrees(stateOf(home, named))
	before := stateOf(home, named)
	chunks := home.Restart(rng, 3, event.Host.Mask())
	for _, chunk := range chunks[:2] {
		x.reach(w.write(home, chunk))
		x.agrees(before)
	}
	x.reach(w.write(home, chunks[2]))
	x.agrees(stateOf(home))
	if info, ok := x.info(home.Source); !ok || info.Gaps != 0 || info.Incarnation != home.Incarnation {
		t.Errorf("got %+v", info)
	}
	// Nothing goes, but the life is a new one.
	seq := uint64(0)
	for _, chunk := range home.Restart(rng, 2, event.AllTiers) {
		seq = w.write(home, chunk)
	}
	x.reach(seq)
	x.agrees(stateOf(home))
	if _, ok := x.info(named.Source); ok {
		t.Error("the state of the engine's life before is still there")
	}
	y := w.start(nil)
	y.reach(seq)
	y.agrees(stateOf(home))
}

// TestLogIsKeptSmall has two indexers compact a log whose sources, as a bridge
// would, write checkpoints when they are asked: it stays small, and has the whole
// state at any time. A source whose worker is gone does not keep it from that.
func TestLogIsKeptSmall(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	var mu sync.Mutex // of the writers
	dead := w.writer("dead", 0)
	w.fill(rng, dead, 3)
	w.writers = nil
	for _, name := range []string{"a", "b", "c", "idle"} {
		w.writer(name, 0)
	}
	idle := w.writers[3]
	w.answerRequests(rng, &mu)
	fill := func(n int) uint64 {
		mu.Lock()
		defer mu.Unlock()
		var seq uint64
		for range n {
			seq = w.fill(rng, w.writers[rng.IntN(3)], 1)
		}
		return seq
	}
	w.fill(rng, idle, 5)
	compact := func(c *indexer.Config, _ *indexer.Options) {
		c.Compact, c.MinLog, c.Grace = true, 20000, 50*time.Millisecond
	}
	x, y := w.start(compact), w.start(compact)
	stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
	if err != nil {
		t.Fatal(err)
	}
	size := func() (first, bytes uint64) {
		info, err := stream.Info(w.ctx)
		if err != nil {
			t.Fatal(err)
		}
		return info.State.FirstSeq, info.State.Bytes
	}
	purged := uint64(0)
	for range 12 {
		fill(100)
		before := purged
		w.await("the log is cut", func() bool {
			first, bytes := size()
			purged = first
			if first == before && bytes < 120000 {
				fill(10) // it may be small enough as it is: then more has to come
			}
			return first > before && bytes < 120000
		})
		mu.Lock()
		want := stateOf(w.writers...)
		late := w.start(nil)
		late.reach(w.last())
		late.agrees(want)
		if n := late.counter("kvmesh.indexer.divergences"); n > 0 { // it begins in the midst of most sources
			t.Errorf("%d divergences of one that starts late", n)
		}
		x.reach(w.last())
		x.agrees(want)
		y.reach(w.last())
		y.agrees(want)
		mu.Unlock()
		late.stop()
	}
	if n := x.counter("kvmesh.indexer.purges") + y.counter("kvmesh.indexer.purges"); n == 0 {
		t.Error("no purge is counted")
	}
	for _, r := range []*reader{x, y} {
		if n := r.counter("kvmesh.indexer.divergences"); n > 0 {
			t.Errorf("%d divergences", n)
		}
	}
}

// answerRequests has the writers write checkpoints when they are asked, as a
// bridge would. mu guards them.
func (w *world) answerRequests(rng *rand.Rand, mu *sync.Mutex) {
	w.t.Helper()
	over := false
	w.t.Cleanup(func() { // no request is being answered when NATS goes
		mu.Lock()
		defer mu.Unlock()
		over = true
	})
	written := map[*feed.Writer]uint64{} // first record of the last checkpoint
	for _, of := range w.writers {
		sub, err := w.nc.Subscribe(event.CheckpointSubject(of.Source.Key()), func(msg *nats.Msg) {
			mu.Lock()
			defer mu.Unlock()
			if over || written[of] >= event.ParseCheckpointRequest(msg.Data) {
				return
			}
			for i, chunk := range of.Checkpoint(rng, 1+rng.IntN(3)) {
				ack, err := w.js.Publish(w.ctx, event.DefaultLog().Subject(of.Source), chunk)
				if err != nil {
					w.t.Error(err)
					return
				}
				if i == 0 {
					written[of] = ack.Sequence
				}
			}
		})
		if err != nil {
			w.t.Fatal(err)
		}
		w.t.Cleanup(func() { sub.Unsubscribe() })
	}
}

// last returns the last sequence of the log.
func (w *world) last() uint64 {
	w.t.Helper()
	stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
	if err != nil {
		w.t.Fatal(err)
	}
	return stream.CachedInfo().State.LastSeq
}

// A log that somebody has purged by hand, while an indexer knows it all: it asks
// for the state of those that the log has no longer.
func TestPurgedByHand(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	requests := w.requests(of)
	x := w.start(nil)
	x.reach(w.fill(rng, of, 10))
	seq := w.write(of, of.Checkpoint(rng, 1)...) // a bridge would not write another one if it were asked for less
	x.reach(seq)
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	stream, err := w.js.Stream(ctx, event.DefaultLog().Name(0))
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(ctx); err != nil {
		t.Fatal(err)
	}
	for {
		if from := event.ParseCheckpointRequest(w.request(requests).Data); from > seq {
			break
		}
	}
	x.agrees(stateOf(of))
	seq = w.write(of, of.Checkpoint(rng, 2)...)
	x.reach(seq)
	x.agrees(stateOf(of))
	late := w.start(nil)
	late.reach(seq)
	late.agrees(stateOf(of))
}
