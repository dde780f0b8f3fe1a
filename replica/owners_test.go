package replica_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

func ownedWorker(instance, owner string) event.Worker {
	w := someWorker(instance, 0)
	w.CacheOwner = owner
	return w
}

// An id is one worker's at a time, whichever replica it is registered with, and
// whoever comes second is told whose it is.
func TestAnOwnersIDIsOneWorkers(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, _ := f.watched()
	b, seen := f.watched()
	first, second := ownedWorker("first", event.AutoOwner), ownedWorker("second", event.AutoOwner) // at one endpoint
	f.mustRegister(a, first, first)
	f.mustRegister(b, first)
	first.Complete()
	f.await("the id is seen, and not that it was asked for", func() bool { return seen.has(first) })
	err := f.retry(func(ctx context.Context) error { return b.Register(ctx, second) })
	if !errors.Is(err, event.ErrConflict) || !strings.Contains(err.Error(), `"first"`) || !strings.Contains(err.Error(), first.CacheOwner) {
		t.Errorf("a second worker with the id: %v", err)
	}
	if at, ok := b.Attachment(first.CacheOwner); !ok || at.Source != first.Source || at.Bridge != "" {
		t.Errorf("on record is %+v", at)
	}
	if _, err := a.Unregister(f.ctx, "first", first.Model, "", nil); err != nil {
		t.Fatal(err)
	}
	f.mustRegister(b, second)
	// A registration that ended by itself leaves a claim, which is nobody's.
	kv, err := f.js.KeyValue(f.ctx, replica.DefaultCatalog().Bucket)
	if err != nil {
		t.Fatal(err)
	}
	if err := kv.Purge(f.ctx, "w."+second.Key()); err != nil {
		t.Fatal(err)
	}
	f.await("the worker is gone", func() bool { return seen.has() && len(a.Workers()) == 0 })
	f.mustRegister(a, first)
	if at, _ := a.Attachment(first.CacheOwner); at.Source != first.Source {
		f.await("the claim is the first one's", func() bool { at, _ := a.Attachment(first.CacheOwner); return at.Source == first.Source })
	}
}

// Of workers that claim an id at once, with a replica each, one gets it.
func TestOwnersThatAreClaimedAtOnce(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	var catalogs []*replica.Catalog
	for range 4 {
		c, seen := f.watched()
		f.await("the catalog is read", func() bool { seen.mu.Lock(); defer seen.mu.Unlock(); return seen.read > 0 })
		catalogs = append(catalogs, c)
	}
	for round := range 20 {
		errs := make([]error, len(catalogs))
		var wg sync.WaitGroup
		for i, c := range catalogs {
			w := ownedWorker(fmt.Sprintf("w%d-%d", round, i), event.AutoOwner)
			w.Endpoint = fmt.Sprintf("tcp://10.1.0.%d:5557", round)
			wg.Go(func() { errs[i] = c.Register(f.ctx, w) })
		}
		wg.Wait()
		won := 0
		for _, err := range errs {
			switch {
			case err == nil:
				won++
			case !errors.Is(err, event.ErrConflict):
				t.Error(err)
			}
		}
		if won != 1 {
			t.Fatalf("round %d: %d got it", round, won)
		}
	}
	f.await("each has one worker", func() bool { return len(catalogs[0].Workers()) == 20 })
}

// Where an owner is attached is seen by all, and stays on record if the catalog is
// lost.
func TestAttachmentsAreInTheCatalog(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, _ := f.watched()
	b, _ := f.watched()
	w := ownedWorker("w", event.AutoOwner)
	f.mustRegister(a, w)
	w.Complete()
	at := func(bridge string) {
		t.Helper()
		for _, c := range []*replica.Catalog{a, b} {
			f.await("on record is "+bridge, func() bool {
				have, ok := c.Attachment(w.CacheOwner)
				return ok && have.Bridge == bridge && have.Source == w.Source && !have.Since.IsZero()
			})
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(a.Attach(f.ctx, w, "one"))
	at("one")
	must(b.Attach(f.ctx, w, "two")) // it was taken over
	must(a.Detach(f.ctx, w, "one"))
	at("two")
	must(f.js.DeleteKeyValue(f.ctx, replica.DefaultCatalog().Bucket))
	f.await("it is put back", func() bool {
		kv, err := f.js.KeyValue(f.ctx, replica.DefaultCatalog().Bucket)
		if err != nil {
			return false
		}
		_, err = kv.Get(f.ctx, "w."+w.Key())
		return err == nil
	})
	at("two")
	must(b.Detach(f.ctx, w, "two"))
	at("")
	other := ownedWorker("other", w.CacheOwner)
	if err := a.Attach(f.ctx, other, "one"); !errors.Is(err, event.ErrConflict) {
		t.Errorf("attached by a worker that it is not of: %v", err)
	}
	must(a.Detach(f.ctx, other, "one"))
	if _, err := a.Unregister(f.ctx, "w", w.Model, "", nil); err != nil {
		t.Fatal(err)
	}
	f.await("nobody has the id", func() bool { _, ok := b.Attachment(w.CacheOwner); return !ok })
	must(a.Detach(f.ctx, w, "two"))
	if _, ok := b.Attachment(w.CacheOwner); ok {
		t.Error("who is gone is on record again")
	}
}

// A worker that is unregistered with one replica and registered with another, again
// and again, has its claim whenever it is registered.
func TestAClaimComesWithItsWorker(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, _ := f.watched()
	b, _ := f.watched()
	w := ownedWorker("w", event.AutoOwner)
	f.mustRegister(a, w)
	w.Complete()
	kv, err := f.js.KeyValue(f.ctx, replica.DefaultCatalog().Bucket)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 50 {
		var tasks sync.WaitGroup
		tasks.Go(func() {
			if _, err := a.Unregister(f.ctx, "w", w.Model, "", nil); err != nil {
				t.Error(err)
			}
		})
		tasks.Go(func() { b.Register(f.ctx, w) }) // before or after, or in between
		tasks.Wait()
		f.await("the worker is registered", func() bool {
			if err := b.Register(f.ctx, w); err != nil {
				return false
			}
			_, err := kv.Get(f.ctx, "w."+w.Key()) // a copy may not have heard of its end yet
			return err == nil && len(a.Workers()) == 1 && len(b.Workers()) == 1
		})
		other := ownedWorker("other", w.CacheOwner)
		if err := f.retry(func(ctx context.Context) error { return a.Register(ctx, other) }); !errors.Is(err, event.ErrConflict) {
			t.Fatalf("round %d: another worker with the id: %v", round, err)
		}
	}
}

// attachments are those of a catalog that is made later.
type attachments struct{ catalog **replica.Catalog }

func (a attachments) Attach(ctx context.Context, w event.Worker, bridge string) error {
	return (*a.catalog).Attach(ctx, w, bridge)
}

func (a attachments) Detach(ctx context.Context, w event.Worker, bridge string) error {
	return (*a.catalog).Detach(ctx, w, bridge)
}

// Owners go from bridge to bridge with their workers, whether that is agreed or not,
// and what they hold is known all the time.
func TestOwnersAreTakenOver(t *testing.T) {
	f := newFleet(t, 4, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	for _, e := range f.engines {
		e.worker.CacheOwner, e.worker.Topic = event.AutoOwner, ""
		e.worker.Complete()
		e.SetTopic(e.worker.Topic)
	}
	attached := func(want map[string]int) {
		t.Helper()
		f.await(fmt.Sprint("attached are ", want), func() bool {
			have := map[string]int{}
			for _, e := range f.engines {
				if at, ok := f.catalog.Attachment(e.worker.CacheOwner); ok {
					have[at.Bridge]++
				}
			}
			return maps.Equal(have, want)
		})
	}
	a := f.member("a", nil)
	f.register()
	f.publish(20)
	attached(map[string]int{"a": 4})
	b := f.member("b", nil)
	attached(map[string]int{"a": 2, "b": 2})
	f.publish(20)
	b.kill()
	attached(map[string]int{"a": 4})
	f.publish(20)
	c := f.member("c", nil)
	f.holds(map[*member]int{a: 2, c: 2})
	a.drain()
	attached(map[string]int{"c": 4})
	f.publish(20)
	f.settled()
	c.drain()
	attached(map[string]int{"": 4})
}
