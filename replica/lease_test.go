package replica_test

import (
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

// Bridges that come and go share the workers evenly, and hand them over without
// losing anything, though no engine can be asked for what was missed.
func TestBridgesComeAndGo(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 12, mock.Options{})
	a := f.member("a", nil)
	f.register()
	f.holds(map[*member]int{a: 12})
	for _, e := range f.engines {
		if err := e.WaitSubscribers(f.ctx, 1); err != nil {
			t.Fatal(err)
		}
	}
	stop := f.keepPublishing()
	b := f.member("b", nil)
	f.holds(map[*member]int{a: 6, b: 6})
	c := f.member("c", nil)
	f.holds(map[*member]int{a: 4, b: 4, c: 4})
	if n := a.count("kvmesh.bridge.handovers"); n < 8 {
		t.Errorf("a has handed over %d workers, want at least 6 to b and 2 to c", n)
	}
	if held, alive := c.count("kvmesh.bridge.workers"), c.count("kvmesh.bridge.sessions"); held != 4 || alive != 3 {
		t.Errorf("c counts %d workers of its own and %d bridges", held, alive)
	}
	a.drain()
	f.holds(map[*member]int{b: 6, c: 6})
	c.drain()
	f.holds(map[*member]int{b: 12})
	stop()
	f.settled()
}

// The workers of a bridge that dies are taken over, and what it had not written
// is asked of the engines.
func TestBridgeDies(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 6, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	b := f.member("b", nil)
	f.register()
	f.holds(map[*member]int{a: 3, b: 3})
	stop := f.keepPublishing()
	a.kill()
	f.holds(map[*member]int{b: 6})
	if n := b.count("kvmesh.bridge.takeovers"); n < 3 {
		t.Errorf("b has taken over %d workers, want at least 3", n)
	}
	a = f.member("a2", nil)
	f.holds(map[*member]int{a: 3, b: 3})
	b.kill()
	f.holds(map[*member]int{a: 6})
	stop()
	f.settled()
}

func TestBridgesGoByLabels(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 6, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	for i, e := range f.engines {
		e.worker.Labels = map[string]string{"node": string(rune('a' + i%2))}
	}
	claim := func(node string) func(*replica.LeaseConfig) {
		return func(c *replica.LeaseConfig) { c.Claim = map[string]string{"node": node} }
	}
	b := f.member("b", claim("b"))
	f.register()
	f.holds(map[*member]int{b: 6}) // nobody else is there
	stop := f.keepPublishing()
	a := f.member("a", claim("a"))
	f.holds(map[*member]int{a: 3, b: 3})
	for _, s := range a.leases.Holding() {
		for _, e := range f.engines {
			if e.worker.Source == s && e.worker.Labels["node"] != "a" {
				t.Errorf("a has %s of node %s", s.Instance, e.worker.Labels["node"])
			}
		}
	}
	b.kill()
	f.holds(map[*member]int{a: 6})
	stop()
	f.settled()
}

// A worker that is unregistered is retired once: by the bridge that has it, or by
// another one if that is dead.
func TestUnregisteredIsRetiredOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	b := f.member("b", nil)
	f.register()
	f.holds(map[*member]int{a: 2, b: 2})
	f.publish(20)
	f.settled()
	a.kill()
	for _, e := range f.engines {
		if _, err := f.catalog.Unregister(f.ctx, e.worker.Instance, "m", "", nil); err != nil {
			t.Fatal(err)
		}
	}
	retired := func() bool {
		n := f.retirements()
		for _, e := range f.engines {
			if n[e.worker.Source] == 0 {
				return false
			}
		}
		return true
	}
	f.await("all are retired", retired)
	f.await("nothing is held", func() bool { return len(b.leases.Holding()) == 0 })
	// Registered once more, they begin anew.
	f.register()
	f.holds(map[*member]int{b: 4})
	for s, n := range f.retirements() {
		if n != 1 {
			t.Errorf("%s was retired %d times", s.Instance, n)
		}
	}
}

// A worker that is unregistered and registered again at once begins anew, also
// where the two are seen as one.
func TestRegisteredAgainAtOnce(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 4, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	b := f.member("b", nil)
	f.register()
	f.holds(map[*member]int{a: 2, b: 2})
	f.publish(20)
	f.settled()
	const times = 3
	for n := 1; n <= times; n++ {
		for _, e := range f.engines {
			if _, err := f.catalog.Unregister(f.ctx, e.worker.Instance, "m", "", nil); err != nil {
				t.Fatal(err)
			}
		}
		f.register()
		f.await("all were retired", func() bool {
			retired := f.retirements()
			for _, e := range f.engines {
				if retired[e.worker.Source] != n {
					return false
				}
			}
			return true
		})
		f.holds(map[*member]int{a: 2, b: 2})
		f.publish(5)
		f.settled()
	}
}

// An outage of NATS that outlasts all sessions moves nothing.
func TestOutageMovesNothing(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 6, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	b := f.member("b", nil)
	f.register()
	f.holds(map[*member]int{a: 3, b: 3})
	f.await("no source is being handed over", f.atRest) // that would go on after the outage
	before := holders(a, b)
	stop := f.keepPublishing()
	f.nats.Stop()
	engine := f.engines[0]
	at := engine.Next()
	f.await("more than a session", func() bool { return engine.Next() > at+2000 }) // at least 4 s
	f.startNATS()
	f.await("NATS is back", func() bool { _, err := f.js.AccountInfo(f.ctx); return err == nil })
	stop()
	f.settled()
	f.holds(map[*member]int{a: 3, b: 3})
	for s, id := range holders(a, b) {
		if before[s] != id {
			t.Errorf("%s has gone from %s to %s", s.Instance, before[s], id)
		}
	}
}

func holders(a, b *member) map[event.Source]string {
	out := map[event.Source]string{}
	for _, s := range a.leases.Holding() {
		out[s] = "a"
	}
	for _, s := range b.leases.Holding() {
		out[s] = "b"
	}
	return out
}

// Buckets that are deleted come back with what the replicas know.
func TestBucketsAreLost(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 6, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	b := f.member("b", nil)
	f.register()
	f.holds(map[*member]int{a: 3, b: 3})
	before := holders(a, b)
	stop := f.keepPublishing()
	for _, name := range []string{replica.DefaultLeases("x").Bucket, replica.DefaultCatalog().Bucket} {
		if err := f.js.DeleteKeyValue(f.ctx, name); err != nil {
			t.Fatal(err)
		}
	}
	f.await("the catalog is back", func() bool {
		kv, err := f.js.KeyValue(f.ctx, replica.DefaultCatalog().Bucket)
		if err != nil {
			return false
		}
		keys, err := kv.Keys(f.ctx)
		return err == nil && len(keys) == 6+1 // and the partition's block size
	})
	f.await("the claims are back", func() bool {
		kv, err := f.js.KeyValue(f.ctx, replica.DefaultLeases("x").Bucket)
		if err != nil {
			return false
		}
		keys, err := kv.Keys(f.ctx)
		return err == nil && len(keys) == 6+2 // and the sessions
	})
	stop()
	f.settled()
	for s, id := range holders(a, b) {
		if before[s] != id {
			t.Errorf("%s has gone from %s to %s", s.Instance, before[s], id)
		}
	}
}

// Of two bridges with one name the one that started later has the workers.
func TestTwoBridgesOfOneName(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a := f.member("a", nil)
	f.register()
	f.holds(map[*member]int{a: 3})
	stop := f.keepPublishing()
	b := f.member("a", nil)
	f.holds(map[*member]int{a: 0, b: 3})
	b.kill()
	f.holds(map[*member]int{a: 3})
	stop()
	f.settled()
}
