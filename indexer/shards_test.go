package indexer_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
)

// spread returns writers of as many instances as it takes to have some in each
// shard.
func (w *world) spread() []*feed.Writer {
	in := map[int]bool{}
	for i := 0; len(in) < w.log.Shards; i++ {
		of := w.writer(fmt.Sprint("w", i), 0)
		in[w.log.Shard(of.Source)] = true
	}
	return w.writers
}

// fillAll writes records of all sources.
func (w *world) fillAll(rng *rand.Rand, n int) {
	w.t.Helper()
	for range n {
		for _, of := range w.writers {
			w.fill(rng, of, 1)
		}
	}
}

// A stream that is purged, or lost, or another one, is read anew, and heals. What is
// in the others is not read again.
func TestOneShardIsLost(t *testing.T) {
	for name, lose := range map[string]func(w *world, stream string) error{
		"purged": func(w *world, stream string) error {
			s, err := w.js.Stream(w.ctx, stream)
			if err == nil {
				err = s.Purge(w.ctx)
			}
			return err
		},
		"deleted": func(w *world, stream string) error { return w.js.DeleteStream(w.ctx, stream) },
		"made anew": func(w *world, stream string) error {
			err := w.js.DeleteStream(w.ctx, stream)
			if err == nil {
				_, err = w.js.CreateStream(w.ctx, w.log.Config(1, 1))
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 0))
			w := newSplitWorld(t, 1, 3)
			w.spread()
			var mu sync.Mutex
			applied := map[event.Source]map[uint64]int{}
			x := w.start(func(_ *indexer.Config, o *indexer.Options) {
				o.Applied = func(s event.Source, _ event.Header, seq uint64) {
					mu.Lock()
					defer mu.Unlock()
					if applied[s] == nil {
						applied[s] = map[uint64]int{}
					}
					applied[s][seq]++
				}
			})
			w.fillAll(rng, 20)
			x.reachAll()
			x.agrees(stateOf(w.writers...))
			lost := func(of *feed.Writer) bool { return w.log.Shard(of.Source) == 1 }
			first := w.writers[slices.IndexFunc(w.writers, lost)]
			requests := w.requests(first)
			if err := lose(w, w.log.Name(1)); err != nil {
				t.Fatal(err)
			}
			w.request(requests)
			w.await("the stream is there", func() bool {
				_, err := w.js.Stream(w.ctx, w.log.Name(1))
				return err == nil
			})
			for _, of := range w.writers {
				if lost(of) {
					w.write(of, of.Checkpoint(rng, 3)...)
				}
			}
			w.fillAll(rng, 5)
			w.await("the indexer is where the log is", func() bool {
				return x.Ready() == nil && x.Position().Equal(event.PositionOf(w.seqs))
			})
			x.agrees(stateOf(w.writers...))
			mu.Lock()
			defer mu.Unlock()
			for _, of := range w.writers {
				for seq, n := range applied[of.Source] {
					if n > 1 && !lost(of) {
						t.Errorf("%s, which lost nothing: record %d was applied %d times", of.Source.Instance, seq, n)
					}
				}
			}
			late := w.start(nil)
			late.reachAll()
			late.agrees(stateOf(w.writers...))
		})
	}
}

// An indexer answers nothing while one of its streams has not been read, and says
// which.
func TestOneShardIsNotReady(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	w := newSplitWorld(t, 1, 3)
	w.spread()
	w.fillAll(rng, 10)
	held, reached := make(chan struct{}), make(chan struct{})
	once := sync.OnceFunc(func() { close(reached) })
	x := w.start(func(_ *indexer.Config, o *indexer.Options) {
		o.Applied = func(s event.Source, _ event.Header, _ uint64) {
			if w.log.Shard(s) == 2 {
				once()
				<-held
			}
		}
	})
	<-reached
	w.await("the others are read", func() bool { return x.Position().Seq(0) == w.seqs[0] && x.Position().Seq(1) == w.seqs[1] })
	if err := x.Ready(); !errors.Is(err, indexer.ErrNotReady) || !strings.Contains(err.Error(), "in shard 2") {
		t.Errorf("ready: %v", err)
	}
	if _, err := x.Match(new(indexer.Query), partition, w.locals[0]); !errors.Is(err, indexer.ErrNotReady) {
		t.Errorf("Match says %v", err)
	}
	if want := w.seqs[2] - x.Position().Seq(2); x.Lag() != want {
		t.Errorf("lag %d, want %d", x.Lag(), want)
	}
	close(held)
	x.reachAll()
	x.agrees(stateOf(w.writers...))
	var all metricdata.ResourceMetrics
	if err := x.meter.Collect(w.ctx, &all); err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, m := range all.ScopeMetrics[0].Metrics {
		if m.Name != "kvmesh.indexer.log.seq" {
			continue
		}
		for _, p := range m.Data.(metricdata.Gauge[int64]).DataPoints {
			shard, _ := p.Attributes.Value("shard")
			if found++; uint64(p.Value) != w.seqs[shard.AsInt64()] {
				t.Errorf("shard %d is at %d, want %d", shard.AsInt64(), p.Value, w.seqs[shard.AsInt64()])
			}
		}
	}
	if found != 3 {
		t.Errorf("%d positions, want 3", found)
	}
}

// What is asked to wait for has to be a position of the log.
func TestPositionsOfOtherLogs(t *testing.T) {
	for _, c := range []struct {
		shards int
		bad    []event.Position
	}{
		{1, []event.Position{{LogSeqs: []uint64{1}}, {LogSeqs: []uint64{1, 1, 1}}}},
		{3, []event.Position{{LogSeq: 1}, {LogSeqs: []uint64{1, 1}}, {LogSeqs: []uint64{1, 1, 1, 1}}}},
	} {
		w := newSplitWorld(t, 1, c.shards)
		x := w.start(nil)
		ctx, cancel := context.WithCancel(w.ctx)
		cancel()
		for _, p := range c.bad {
			if err := x.WaitFor(ctx, p); !errors.Is(err, indexer.ErrPosition) || !strings.Contains(err.Error(), "min_log_seq") {
				t.Errorf("%d shards, %v: %v", c.shards, p, err)
			}
		}
		if err := x.WaitFor(ctx, event.Position{}); err != nil {
			t.Errorf("%d shards, any: %v", c.shards, err)
		}
		seqs := make([]uint64, c.shards)
		seqs[c.shards-1] = 1
		if err := x.WaitFor(ctx, event.PositionOf(seqs)); !errors.Is(err, indexer.ErrBehind) {
			t.Errorf("%d shards, %v: %v", c.shards, seqs, err)
		}
	}
}

// An indexer of a log that is split otherwise than the one that is there never
// answers from a part of it, and makes nothing.
func TestALogThatIsSplitOtherwise(t *testing.T) {
	for _, c := range []struct{ there, own int }{{1, 2}, {2, 1}, {4, 2}, {2, 4}} {
		rng := rand.New(rand.NewPCG(1, 0))
		w := newSplitWorld(t, 1, c.there)
		w.spread()
		w.fillAll(rng, 3)
		other := event.Log{Stream: w.log.Stream, Shards: c.own}
		x := w.start(func(cfg *indexer.Config, _ *indexer.Options) { cfg.Log = other })
		w.await("the indexer says what is wrong", func() bool {
			err := x.Ready()
			return errors.Is(err, indexer.ErrNotReady) && strings.Contains(err.Error(), fmt.Sprintf("--log-shards is %d here", c.own))
		})
		if _, err := x.Match(new(indexer.Query), partition, w.locals[0]); !errors.Is(err, indexer.ErrNotReady) {
			t.Errorf("Match says %v", err)
		}
		for i := range c.own {
			if _, err := w.js.Stream(w.ctx, other.Name(i)); !errors.Is(err, jetstream.ErrStreamNotFound) {
				t.Errorf("stream %s: %v", other.Name(i), err)
			}
		}
		for i := range c.there {
			if err := w.js.DeleteStream(w.ctx, w.log.Name(i)); err != nil {
				t.Fatal(err)
			}
		}
		w.await("it reads its own log when the other one is gone", func() bool { return x.Ready() == nil })
	}
}
