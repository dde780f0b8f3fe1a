package replica_test

import (
	"errors"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
)

func (f *fleet) there(s event.Source) bool {
	for _, w := range f.catalog.Workers() {
		if w.Source == s {
			return true
		}
	}
	return false
}

// A registration for a time is over after it, unless the engine is heard or
// somebody registers the worker again.
func TestRegistrationForATime(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	for _, e := range f.engines {
		e.worker.TTL = event.MinTTL
	}
	heard, renewed, silent := f.engines[0], f.engines[1], f.engines[2]
	f.register()
	a := f.member("a", nil)
	f.await("a bridge has what is heard", func() bool { return len(a.leases.Holding()) > 0 })
	f.await("the silent one is gone", func() bool {
		heard.publish(t)
		if err := f.catalog.Register(f.ctx, renewed.worker); err != nil {
			t.Fatal(err)
		}
		return !f.there(silent.worker.Source)
	})
	for _, e := range []*engine{heard, renewed} {
		if !f.there(e.worker.Source) {
			t.Errorf("%s is gone, though it was heard or renewed", e.worker.Instance)
		}
	}
	f.await("the silent one is retired", func() bool {
		heard.publish(t)
		return f.retirements()[silent.worker.Source] == 1
	})
	// Then they fall silent too.
	f.await("all are gone", func() bool { return len(f.catalog.Workers()) == 0 })
	f.await("all are retired", func() bool {
		n := f.retirements()
		return n[heard.worker.Source] == 1 && n[renewed.worker.Source] == 1
	})
}

// A registration may become one without an end, and one for a time again.
func TestRegistrationChangesItsTime(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 1, mock.Options{})
	w := f.engines[0].worker
	w.TTL = event.MinTTL
	f.await("registration", func() bool { return f.catalog.Register(f.ctx, w) == nil })
	w.TTL = 0
	if err := f.catalog.Register(f.ctx, w); err != nil {
		t.Fatal(err)
	}
	kv, err := f.js.KeyValue(f.ctx, "KVMESH_WORKERS")
	if err != nil {
		t.Fatal(err)
	}
	entry, err := kv.Get(f.ctx, "w."+w.Key())
	if err != nil {
		t.Fatal(err)
	}
	stream, err := f.js.Stream(f.ctx, "KV_KVMESH_WORKERS")
	if err != nil {
		t.Fatal(err)
	}
	msg, err := stream.GetMsg(f.ctx, entry.Revision())
	if err != nil {
		t.Fatal(err)
	}
	if ttl := msg.Header.Get("Nats-TTL"); ttl != "" {
		t.Errorf("it still ends after %s", ttl)
	}
	w.TTL = event.MinTTL
	if err := f.catalog.Register(f.ctx, w); err != nil {
		t.Fatal(err)
	}
	f.await("it is over", func() bool { return !f.there(w.Source) })
	for _, bad := range []time.Duration{time.Second, -time.Second, 2500 * time.Millisecond, event.MaxTTL + time.Second} {
		w.TTL = bad
		if err := f.catalog.Register(f.ctx, w); !errors.Is(err, event.ErrWorker) {
			t.Errorf("a time of %v: %v", bad, err)
		}
	}
}
