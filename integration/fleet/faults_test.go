package fleet

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// lossyWorkers is how many workers lose batches for good.
const lossyWorkers = 48

// TestEveryFault has 64 workers run sessions, small caches that evict all the time
// and a host tier, while every fault there is befalls one after the other. In the
// end every worker that no gap is reported of is known exactly, those that lost
// batches for good are once they have restarted, and two indexers agree.
func TestEveryFault(t *testing.T) {
	v := newService(t, 2, func(c *bridge.Config) {
		c.RepairTimeout, c.RepairInterval, c.RepairCooldown, c.Repairs = 10*time.Second, 20*time.Millisecond, time.Second, 64
		c.ProbeInterval = 500 * time.Millisecond
		c.ZMTP.BackoffMin, c.ZMTP.BackoffMax = 5*time.Millisecond, 100*time.Millisecond
	})
	f, err := engines.New(engines.Options{
		Engines: 32, Ranks: 2, Topic: "kv@%w", Seed: 7,
		Cache: cache.Options{Device: 1100, Host: 600, Transfer: 20 * time.Microsecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Start(); err != nil {
		t.Fatal(err)
	}
	defer f.Stop()
	v.register(f.Workers[0])
	v.register(f.Workers[1:]...)
	work(t, f, 800)
	if err := f.Err(); err != nil {
		t.Fatal(err) // a port was taken while an engine restarted, most likely
	}
	final(t, f)

	lossy := map[*engines.Worker]bool{}
	v.eventually("workers without a gap are known exactly", func() bool {
		clear(lossy)
		have := known(v.indexes[0])
		for _, w := range f.Workers {
			info := have[worker(w).Source]
			switch {
			case info.EngineSeq == nil || *info.EngineSeq+1 != w.Engine.Next():
				return v.unlike(w, info, "it is not known as far as it is")
			case info.Gaps > 0:
				lossy[w] = true
			case info.Digests != w.Digests():
				return v.unlike(w, info, "it holds something else")
			}
		}
		return f.Settled()
	})
	if len(lossy) == 0 {
		t.Error("no worker lost a batch: the faults do not do their work")
	}
	for i, w := range f.Workers[lossyWorkers:] {
		if lossy[w] {
			t.Errorf("worker %d lost batches, which nothing took away", lossyWorkers+i)
		}
	}
	for w := range lossy {
		if err := w.Restart(); err != nil {
			t.Fatal(err)
		}
	}
	final(t, f)
	v.eventually("all workers are known exactly, by both indexers", func() bool { return v.exact(f) })
	sum := f.Totals()
	t.Logf("%d requests, %d batches, %d restarts, %d workers lost batches", sum.Requests, sum.Batches, sum.Restarts, len(lossy))
	if sum.CachedDevice == 0 || sum.CachedHost == 0 {
		t.Errorf("nothing was cached: %+v", sum)
	}
}

// work runs so many requests under every fault.
func work(t *testing.T, f *engines.Fleet, requests uint64) {
	o := workload.Default()
	o.Seed = 3
	g, err := workload.New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var tasks sync.WaitGroup
	tasks.Go(func() {
		// Sessions end at 16,384 tokens, 1,024 blocks: they fit a device, one at a time.
		if failed := f.Drive(ctx, g, engines.Load{Rate: 500, Sessions: 64}); failed > 0 {
			t.Errorf("%d requests failed", failed)
		}
	})
	const every = 10 * time.Millisecond
	tasks.Go(func() {
		// Batches are lost for good, or may be, of the first workers only: of the
		// others all has to come through.
		f.Torment(ctx, []engines.Plan{
			{Fault: engines.Fault{Kind: engines.Drop, Count: 3}, Every: every},
			{Fault: engines.Fault{Kind: engines.Duplicate, Count: 3}, Every: every},
			{Fault: engines.Fault{Kind: engines.Stall, Duration: 50 * time.Millisecond}, Every: 3 * every},
			{Fault: engines.Fault{Kind: engines.Clear}, Every: 4 * every},
			{Fault: engines.Fault{Kind: engines.Restart}, Every: 13 * every, Among: lossyWorkers},
			{Fault: engines.Fault{Kind: engines.Silent, Count: 2}, Every: 100 * every, Among: lossyWorkers},
			{Fault: engines.Fault{Kind: engines.Lose, Count: 2}, Every: 17 * every, Among: lossyWorkers},
			{Fault: engines.Fault{Kind: engines.Overflow, Count: 2}, Every: 23 * every, Among: lossyWorkers},
		}, 5)
	})
	awaitRequests(t, f, requests)
	stop()
	tasks.Wait()
}

// awaitRequests waits until a fleet has had so many requests.
func awaitRequests(t *testing.T, f *engines.Fleet, requests uint64) {
	t.Helper()
	for deadline := time.Now().Add(patience); f.Totals().Requests < requests; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("%d requests within %v", f.Totals().Requests, patience)
			break
		}
	}
}

// final has every worker publish batches until the faults that wait for one are
// used up, so that what was lost before shows.
func final(t *testing.T, f *engines.Fleet) {
	t.Helper()
	for n, w := range f.Workers {
		for i := range 12 {
			tokens := workload.Segment{Seed: uint64(n*1000+i) ^ w.Engine.Next()<<32, Tokens: 40}.Append(nil)
			_, err := w.Generate(context.Background(), engines.Job{Prompt: cache.Prompt{Tokens: tokens}})
			if err != nil && !errors.Is(err, engines.ErrRestarted) {
				t.Error(err)
			}
		}
	}
}

// exact tells whether every indexer holds what the caches hold, at one log
// sequence.
func (v *service) exact(f *engines.Fleet) bool {
	if !f.Settled() || !v.indexes[0].Position().Equal(v.indexes[1].Position()) {
		return false
	}
	for _, x := range v.indexes {
		have := known(x)
		for _, w := range f.Workers {
			info := have[worker(w).Source]
			if info.Digests != w.Digests() || info.Gaps > 0 || info.Diverged || !info.Answered || info.Digests == (event.Digests{}) {
				return v.unlike(w, info, "it is not known exactly")
			}
		}
	}
	return v.indexes[0].Position().Equal(v.indexes[1].Position())
}

// unlike notes why a worker is not known as it should be, and returns false.
func (v *service) unlike(w *engines.Worker, info indexer.SourceInfo, why string) bool {
	seq := int64(-1)
	if info.EngineSeq != nil {
		seq = int64(*info.EngineSeq)
	}
	v.why = fmt.Sprintf("%s rank %d: %s: has published up to %d and holds %v, known up to %d with %d gaps, %v", w.Instance, w.Rank, why,
		int64(w.Engine.Next())-1, w.Digests(), seq, info.Gaps, info.Digests)
	return false
}
