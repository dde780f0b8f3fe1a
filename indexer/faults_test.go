package indexer_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
)

// requests subscribes to the requests for checkpoints of a source.
func (w *world) requests(of *feed.Writer) <-chan *nats.Msg {
	w.t.Helper()
	out := make(chan *nats.Msg, 100)
	sub, err := w.nc.ChanSubscribe(event.CheckpointSubject(of.Source.Key()), out)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := w.nc.Flush(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { sub.Unsubscribe() })
	return out
}

// request returns the next request for a checkpoint.
func (w *world) request(requests <-chan *nats.Msg) *nats.Msg {
	w.t.Helper()
	select {
	case msg := <-requests:
		return msg
	case <-time.After(patience):
		w.t.Fatal("no checkpoint is asked for")
		return nil
	}
}

// A source whose digest is another one than its record says is counted, not
// answered with, and asked for a checkpoint, which heals it.
func TestDivergenceHeals(t *testing.T) {
	for name, diverge := range map[string]func(w *world, of *feed.Writer) uint64{
		"digest": func(w *world, of *feed.Writer) uint64 {
			d := event.Digests{{Count: 3, Sum: 4}}
			return w.write(of, of.RecordWith(d))
		},
		"record cut short": func(w *world, of *feed.Writer) uint64 {
			of.Store(event.Device, w.locals[0], 0, 2)
			of.Record() // takes the operations; what is written is another record
			// The last element of the operations is not what it says it is.
			h := event.Header{Incarnation: of.Incarnation}
			r := event.AppendRecord(nil, h, 2, event.AppendCleared(nil, 1, ""), []byte{0x94, 0x01, 0x00, 0xa0, 0xc0})
			return w.write(of, r)
		},
		"a record that did not come": func(w *world, of *feed.Writer) uint64 {
			of.Store(event.Host, w.locals[0], 0, 2)
			of.Record()
			return w.write(of, of.Record())
		},
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 0))
			w := newWorld(t, 1)
			sick, well := w.writer("sick", 0), w.writer("well", 0)
			sick.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
			well.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
			w.write(sick, sick.Record())
			seq := w.write(well, well.Record())
			requests := w.requests(sick)
			x := w.start(nil)
			x.reach(seq)
			x.agrees(stateOf(sick, well))

			seq = diverge(w, sick)
			x.reach(seq)
			if info, _ := x.info(sick.Source); !info.Diverged || info.Answered {
				t.Errorf("%+v", info)
			}
			x.agrees(stateOf(well))
			if n := x.counter("kvmesh.indexer.divergences"); n != 1 {
				t.Errorf("%d divergences", n)
			}
			if n := x.counter("kvmesh.indexer.sources_diverged"); n != 1 {
				t.Errorf("%d sources diverged", n)
			}
			if before := event.ParseCheckpointRequest(w.request(requests).Data); before <= seq {
				t.Errorf("a checkpoint from %d on is asked for; the trouble is at %d", before, seq)
			}
			// More records do not heal it, and are no new trouble.
			seq = w.fill(rng, sick, 3)
			x.reach(seq)
			if info, _ := x.info(sick.Source); info.Diverged {
				x.agrees(stateOf(well))
			} // a reset, which Random may write, heals as well

			seq = w.write(sick, sick.Checkpoint(rng, 3)...)
			x.reach(seq)
			if info, _ := x.info(sick.Source); info.Diverged || !info.Answered {
				t.Errorf("after a checkpoint: %+v", info)
			}
			x.agrees(stateOf(sick, well))
			if n := x.counter("kvmesh.indexer.sources_diverged"); n != 0 {
				t.Errorf("%d sources diverged after a checkpoint", n)
			}
			seq = w.fill(rng, sick, 20)
			x.reach(seq)
			x.agrees(stateOf(sick, well))
		})
	}
}

// A request that nobody hears is made again.
func TestCheckpointIsAskedForAgain(t *testing.T) {
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	requests := w.requests(of)
	x := w.start(nil)
	x.reach(w.write(of, of.RecordWith(event.Digests{{Count: 1}})))
	for range 2 {
		w.request(requests)
	}
}

// A worker that is registered and that the log says nothing of is asked about.
func TestMissingSourceIsAskedFor(t *testing.T) {
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	requests := w.requests(of)
	x := w.start(nil)
	w.request(requests)
	x.reach(w.fill(rand.New(rand.NewPCG(1, 0)), of, 10))
	x.agrees(stateOf(of))
}

// What is no record is skipped and counted, and changes nothing.
func TestBadMessages(t *testing.T) {
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	of.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	good := of.Record()
	w.write(of, good)
	x := w.start(nil)
	later := event.AppendRecord(nil, event.Header{Incarnation: of.Incarnation}, 0)
	later[1] = 2 // version
	bad := []struct {
		name, subject string
		data          []byte
	}{
		{"nothing", event.DefaultLog().Subject(of.Source), nil},
		{"text", event.DefaultLog().Subject(of.Source), []byte("hello")},
		{"half a record", event.DefaultLog().Subject(of.Source), good[:len(good)/2]},
		{"a length that the bytes can't hold", event.DefaultLog().Subject(of.Source), []byte{0xdd, 0x7f, 0xff, 0xff, 0xff}},
		{"another version", event.DefaultLog().Subject(of.Source), later},
		{"subject of three tokens", "kv.a.b.c", good},
		{"subject of six tokens", "kv.a.b.c.0.0", good},
		{"subject with a bad escape", "kv.a=.b.c.0", good},
		{"subject with another spelling", "kv.=61.b.c.0", good},
		{"rank that is no number", "kv.a.b.c.x", good},
	}
	var seq uint64
	for _, b := range bad {
		seq = w.publish(b.subject, b.data)
	}
	x.reach(seq)
	if n := x.counter("kvmesh.indexer.records.bad"); n != int64(len(bad)) {
		t.Errorf("%d bad records counted, want %d", n, len(bad))
	}
	if sources, at := x.Sources(); len(sources) != 1 || at.LogSeq != seq {
		t.Errorf("%d sources at %d", len(sources), at)
	}
	x.agrees(stateOf(of))
	x.reach(w.fill(rand.New(rand.NewPCG(1, 0)), of, 30))
	x.agrees(stateOf(of))
}

// cut has an indexer that has read everything lose sight of NATS, changes the
// log meanwhile, and gives it back.
func (w *world) cut(change func()) {
	w.t.Helper()
	w.keepAway(true)
	w.nats.Stop()
	w.startNATS()
	change()
	w.keepAway(false)
}

// The log is not what it was when the indexer comes back. Whatever happened to
// it, answers are in the end those of what it has now, and until then there are
// none.
func TestLogChanges(t *testing.T) {
	type change struct {
		name string
		do   func(t *testing.T, w *world, of *feed.Writer, rng *rand.Rand) (now []*feed.Writer, seq uint64)
	}
	for _, c := range []change{
		{"purged behind the position", func(t *testing.T, w *world, of *feed.Writer, rng *rand.Rand) ([]*feed.Writer, uint64) {
			var seq uint64
			w.cut(func() {
				w.fill(rng, of, 20)
				stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.Purge(w.ctx); err != nil {
					t.Fatal(err)
				}
				seq = w.write(of, of.Checkpoint(rng, 4)...)
				seq = max(seq, w.fill(rng, of, 5))
			})
			return []*feed.Writer{of}, seq
		}},
		{"made anew", func(t *testing.T, w *world, _ *feed.Writer, rng *rand.Rand) ([]*feed.Writer, uint64) {
			w.keepAway(true)
			w.nats.Stop()
			w.restore("")
			w.startNATS()
			w.makeStream()
			other := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 0}, 900)
			seq := w.fill(rng, other, 3)
			w.keepAway(false)
			return []*feed.Writer{other}, seq
		}},
		{"made anew, and longer", func(t *testing.T, w *world, _ *feed.Writer, rng *rand.Rand) ([]*feed.Writer, uint64) {
			w.keepAway(true)
			w.nats.Stop()
			w.restore("")
			w.startNATS()
			w.makeStream()
			other := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 0}, 900)
			seq := w.fill(rng, other, 200)
			w.keepAway(false)
			return []*feed.Writer{other}, seq
		}},
		{"gone, and made by the indexer", func(t *testing.T, w *world, _ *feed.Writer, rng *rand.Rand) ([]*feed.Writer, uint64) {
			w.keepAway(true)
			w.nats.Stop()
			w.restore("")
			w.startNATS()
			w.keepAway(false)
			w.await("the stream is there", func() bool { _, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0)); return err == nil })
			other := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: "w", Rank: 0}, 900)
			return []*feed.Writer{other}, w.fill(rng, other, 5)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 0))
			w := newWorld(t, 1)
			of := w.writer("w", 0)
			x := w.start(nil)
			x.reach(w.fill(rng, of, 60))
			x.agrees(stateOf(of))
			now, seq := c.do(t, w, of, rng)
			w.await("the indexer is where the log is", func() bool { return x.Ready() == nil && x.Position().LogSeq == seq })
			x.agrees(stateOf(now...))
			x.reach(w.fill(rng, now[0], 20))
			x.agrees(stateOf(now...))
			late := w.start(nil)
			late.reach(x.Position().LogSeq)
			late.agrees(stateOf(now...))
		})
	}
}

// The log is shorter than it was: a server came back with older files.
func TestLogIsShorter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	of.Store(event.Device, w.locals[0], 0, len(w.locals[0]))
	w.write(of, of.Record())
	x := w.start(nil)
	x.reach(1)
	w.keepAway(true)
	w.nats.Stop()
	before := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(before, os.DirFS(w.dir)); err != nil {
		t.Fatal(err)
	}
	then := stateOf(of)
	w.startNATS()
	w.keepAway(false)
	x.reach(w.fill(rng, of, 40))
	x.agrees(stateOf(of))

	w.keepAway(true)
	w.nats.Stop()
	w.restore(before)
	w.startNATS()
	w.keepAway(false)
	w.await("the indexer is at 1 again", func() bool { return x.Ready() == nil && x.Position().LogSeq == 1 })
	x.agrees(then)
}

// Consumers that somebody deletes are made again, from the position on.
func TestConsumerIsLost(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	var mu sync.Mutex
	applied := map[uint64]int{}
	x := w.start(func(_ *indexer.Config, o *indexer.Options) {
		o.Applied = func(_ event.Source, _ event.Header, seq uint64) {
			mu.Lock()
			applied[seq]++
			mu.Unlock()
		}
	})
	for range 3 {
		x.reach(w.fill(rng, of, 10))
		stream, err := w.js.Stream(w.ctx, event.DefaultLog().Name(0))
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for name := range stream.ConsumerNames(w.ctx).Name() {
			if err := stream.DeleteConsumer(w.ctx, name); err == nil {
				n++
			}
		}
		if n == 0 {
			t.Error("there was no consumer")
		}
	}
	last := w.fill(rng, of, 10)
	x.reach(last)
	x.agrees(stateOf(of))
	mu.Lock()
	defer mu.Unlock()
	for seq := uint64(1); seq <= last; seq++ {
		if applied[seq] != 1 {
			t.Errorf("record %d was applied %d times", seq, applied[seq])
		}
	}
}

// An indexer that starts late says that it is not ready until it has read what
// was there, and the catalog; it gives no answers before.
func TestReadiness(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	end := w.fill(rng, of, 50)
	held := make(chan struct{})
	reached := make(chan struct{})
	x := w.prepare(func(_ *indexer.Config, o *indexer.Options) {
		o.Applied = func(_ event.Source, _ event.Header, seq uint64) {
			if seq == 20 {
				close(reached)
				<-held
			}
		}
	})
	x.Registered(worker(of))
	<-reached
	notReady := func(why string) {
		t.Helper()
		if err := x.Ready(); !errors.Is(err, indexer.ErrNotReady) {
			t.Errorf("%s: Ready says %v", why, err)
		}
		if _, err := x.Match(new(indexer.Query), partition, w.locals[0]); !errors.Is(err, indexer.ErrNotReady) {
			t.Errorf("%s: Match says %v", why, err)
		}
		if _, _, _, err := x.Dump(partition); !errors.Is(err, indexer.ErrNotReady) {
			t.Errorf("%s: Dump says %v", why, err)
		}
		if x.counter("kvmesh.indexer.ready") != 0 {
			t.Errorf("%s: the metric says that it is", why)
		}
	}
	notReady("without the catalog, in the middle of the log")
	x.CatalogRead()
	notReady("in the middle of the log")
	if x.Position().LogSeq != 20 || x.Lag() == 0 {
		t.Errorf("at %d, lag %d", x.Position().LogSeq, x.Lag())
	}
	close(held)
	x.reach(end)
	x.agrees(stateOf(of))
	w.await("no lag", func() bool { return x.Lag() == 0 })
	if x.counter("kvmesh.indexer.ready") != 1 {
		t.Error("the metric says that it is not ready")
	}

	y := w.prepare(nil)
	y.Registered(worker(of))
	w.await("the log is read", func() bool { return y.Position().LogSeq == end })
	if err := y.Ready(); !errors.Is(err, indexer.ErrNotReady) {
		t.Errorf("without the catalog: %v", err)
	}
	y.CatalogRead()
	y.reach(end)
	y.agrees(stateOf(of))
}

func TestWaitFor(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newWorld(t, 1)
	of := w.writer("w", 0)
	x := w.start(nil)
	end := w.fill(rng, of, 5)
	x.reach(end)
	ctx, cancel := context.WithCancel(w.ctx)
	cancel()
	if err := x.WaitFor(ctx, event.Position{LogSeq: end}); err != nil {
		t.Errorf("for what is reached: %v", err)
	}
	if err := x.WaitFor(ctx, event.Position{LogSeq: end + 1}); !errors.Is(err, indexer.ErrBehind) {
		t.Errorf("for what is not reached: %v", err)
	}
	var waiting sync.WaitGroup
	for i := range uint64(20) {
		waiting.Go(func() {
			if err := x.WaitFor(w.ctx, event.Position{LogSeq: end + i}); err != nil {
				t.Error(err)
			}
			if at := x.Position().LogSeq; at < end+i {
				t.Errorf("waited for %d, woken at %d", end+i, at)
			}
		})
	}
	w.fill(rng, of, 19)
	waiting.Wait()
}
