package replica_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

// edges are pretended bridges that share what they know of each other: a source
// must not have two writers that both think that they are alone.
type edges struct {
	mu      sync.Mutex
	writers map[event.Source]map[string]bool
	retired map[event.Source]int
	doubled int
}

// pretended is one of them. What it is told takes effect at once.
type pretended struct {
	all *edges
	id  string
}

func (p pretended) Known(event.Source)                               {}
func (p pretended) Unknown(event.Source)                             {}
func (p pretended) Standby(event.Worker)                             {}
func (p pretended) AwaitStandby(context.Context, event.Source) error { return nil }
func (p pretended) AwaitGone(context.Context, event.Source) error    { return nil }
func (p pretended) Connected(event.Source) bool                      { return true }
func (p pretended) Heard(event.Source) (at time.Time, ok bool)       { return at, false }
func (p pretended) Release(s event.Source)                           { p.set(s, false) }
func (p pretended) Set(w event.Worker)                               { p.set(w.Source, true) }
func (p pretended) Remove(s event.Source) {
	p.set(s, false)
	p.all.mu.Lock()
	defer p.all.mu.Unlock()
	p.all.retired[s]++
}

func (p pretended) set(s event.Source, writes bool) {
	p.all.mu.Lock()
	defer p.all.mu.Unlock()
	if p.all.writers[s] == nil {
		p.all.writers[s] = map[string]bool{}
	}
	if writes {
		p.all.writers[s][p.id] = true
	} else {
		delete(p.all.writers[s], p.id)
	}
	if len(p.all.writers[s]) > 1 {
		p.all.doubled++
	}
}

// start starts the leases of a pretended bridge.
func (all *edges) start(f *fleet, id string) (leases *replica.Leases, stop func()) {
	f.t.Helper()
	nc, js := f.connect()
	f.t.Cleanup(nc.Close)
	leases, err := replica.NewLeases(js, pretended{all, id}, replica.DefaultLeases(id), replica.LeaseOptions{Logger: f.log.With("of", id)})
	if err != nil {
		f.t.Fatal(err)
	}
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil, leases)
	stopCatalog, stopLeases := run(catalog.Run), run(leases.Run)
	stop = sync.OnceFunc(func() {
		stopLeases()
		if err := leases.Close(f.ctx); err != nil {
			f.t.Error(err)
		}
		stopCatalog()
	})
	f.t.Cleanup(stop)
	return leases, stop
}

// A thousand workers are claimed, spread, handed over and retired; as long as
// bridges live, none is ever written by two.
func TestLeasesOfAThousandWorkers(t *testing.T) {
	t.Parallel()
	const n = 1024
	f := newFleet(t, 0, mock.Options{})
	all := &edges{writers: map[event.Source]map[string]bool{}, retired: map[event.Source]int{}}
	var sources []event.Source
	for i := range n {
		w := event.Worker{Source: event.Source{Model: "m", Group: "g", Instance: fmt.Sprint("w", i)}, Endpoint: fmt.Sprint("tcp://127.0.0.1:", 1024+i), BlockSize: 16}
		sources = append(sources, w.Source)
		f.await("registration", func() bool { return f.catalog.Register(f.ctx, w) == nil })
	}
	spread := func(what string, want map[*replica.Leases]int) {
		t.Helper()
		began := time.Now()
		f.await(what, func() bool {
			for l, n := range want {
				if len(l.Holding()) != n {
					return false
				}
			}
			return true
		})
		t.Logf("%s: %v", what, time.Since(began).Round(time.Millisecond))
	}
	a, stopA := all.start(f, "a")
	spread("one has all", map[*replica.Leases]int{a: n})
	b, _ := all.start(f, "b")
	c, _ := all.start(f, "c")
	spread("three share them", map[*replica.Leases]int{a: n/3 + 1, b: n / 3, c: n / 3})
	stopA()
	spread("one has gone", map[*replica.Leases]int{b: n / 2, c: n / 2})
	all.mu.Lock()
	if all.doubled > 0 {
		t.Errorf("%d times two wrote one source", all.doubled)
	}
	all.mu.Unlock()
	for _, s := range sources {
		if _, err := f.catalog.Unregister(f.ctx, s.Instance, "m", "", nil); err != nil {
			t.Fatal(err)
		}
	}
	spread("all are gone", map[*replica.Leases]int{b: 0, c: 0})
	f.await("all are retired", func() bool {
		all.mu.Lock()
		defer all.mu.Unlock()
		return len(all.retired) == n
	})
	f.await("no claim is left", func() bool {
		kv, err := f.js.KeyValue(f.ctx, replica.DefaultLeases("x").Bucket)
		if err != nil {
			t.Fatal(err)
		}
		lister, err := kv.ListKeysFiltered(f.ctx, "c.>")
		if err != nil {
			t.Fatal(err)
		}
		left := 0
		for range lister.Keys() {
			left++
		}
		return left == 0
	})
}
