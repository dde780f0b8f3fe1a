package fleet

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// TestOwnersOutliveEngines has workers with cache owners run sessions under faults,
// and then all of their engines start again, and again: at no moment is less known to
// be on a host than is there, and in the end both indexers know every worker
// exactly.
func TestOwnersOutliveEngines(t *testing.T) {
	const workers = 12
	v := newService(t, 2, func(c *bridge.Config) {
		c.MaxSlots = workers
		c.RepairTimeout, c.RepairInterval, c.RepairCooldown, c.Repairs = 10*time.Second, 20*time.Millisecond, time.Second, 64
		c.ProbeInterval = 500 * time.Millisecond
		c.ZMTP.BackoffMin, c.ZMTP.BackoffMax = 5*time.Millisecond, 100*time.Millisecond
	})
	f, err := engines.New(engines.Options{
		Engines: workers / 2, Ranks: 2, Seed: 9,
		Cache: cache.Options{Device: 1100, Host: 600, Transfer: 20 * time.Microsecond, Owner: "kvcr"},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Start(); err != nil {
		t.Fatal(err)
	}
	defer f.Stop()
	for _, w := range f.Workers {
		r := worker(w)
		w.SetTopic(r.Topic)
	}
	v.register(f.Workers[0])
	v.register(f.Workers[1:]...)
	g, err := workload.New(workload.Default())
	if err != nil {
		t.Fatal(err)
	}
	for round := range 3 {
		torment(t, f, g, uint64(150*(round+1)))
		final(t, f)
		v.eventually("all workers are known exactly, by both indexers", func() bool { return v.exact(f) })
		v.restartAll(f)
	}
	if sum := f.Totals(); sum.CachedHost == 0 || sum.Restarts != 3*workers {
		t.Errorf("nothing was cached, or nothing happened: %+v", sum)
	}
}

// torment runs requests under the faults that lose nothing for good.
func torment(t *testing.T, f *engines.Fleet, g *workload.Generator, requests uint64) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	var tasks sync.WaitGroup
	tasks.Go(func() { f.Drive(ctx, g, engines.Load{Rate: 500, Sessions: 24}) })
	const every = 10 * time.Millisecond
	tasks.Go(func() {
		f.Torment(ctx, []engines.Plan{
			{Fault: engines.Fault{Kind: engines.Drop, Count: 3}, Every: every},
			{Fault: engines.Fault{Kind: engines.Duplicate, Count: 3}, Every: every},
			{Fault: engines.Fault{Kind: engines.Stall, Duration: 50 * time.Millisecond}, Every: 3 * every},
			{Fault: engines.Fault{Kind: engines.Clear}, Every: 4 * every},
		}, 5)
	})
	awaitRequests(t, f, requests)
	stop()
	tasks.Wait()
}

// restartAll has all engines start again, while it is looked at what is known of
// their hosts.
func (v *service) restartAll(f *engines.Fleet) {
	v.t.Helper()
	before, blocks := map[event.Source]event.Digest{}, uint64(0)
	for _, w := range f.Workers {
		d := w.Digests()[event.Host]
		before[worker(w).Source] = d
		blocks += d.Count
	}
	if blocks == 0 {
		v.t.Error("nothing is on the hosts")
	}
	same := func() {
		for _, x := range v.indexes {
			for source, info := range known(x) {
				if info.Digests[event.Host] != before[source] || !info.Answered {
					v.t.Errorf("%s is answered with %v of %v", source.Key(), info.Digests[event.Host], before[source])
				}
			}
		}
	}
	var tasks sync.WaitGroup
	for _, w := range f.Workers {
		tasks.Go(func() {
			if err := w.Restart(); err != nil {
				v.t.Error(err)
			}
			// The new process says something, which shows that it is another one.
			tokens := workload.Segment{Seed: uint64(w.Engine.Next()) + 77, Tokens: 40}.Append(nil)
			_, err := w.Generate(context.Background(), engines.Job{Prompt: cache.Prompt{Tokens: tokens}})
			if err != nil && !errors.Is(err, engines.ErrRestarted) {
				v.t.Error(err)
			}
		})
	}
	tasks.Wait()
	v.eventually("what is left of all is known exactly", func() bool {
		same()
		return v.t.Failed() || v.exact(f)
	})
}
