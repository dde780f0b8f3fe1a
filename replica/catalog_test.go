package replica_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

// witness is an observer that remembers.
type witness struct {
	mu      sync.Mutex
	workers map[event.Source]event.Worker
	gone    map[event.Source]int // how often
	read    int
}

func (w *witness) Registered(x event.Worker) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.workers[x.Source] = x
}

func (w *witness) Unregistered(s event.Source) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.workers, s)
	w.gone[s]++
}

func (w *witness) CatalogRead() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read++
}

// has tells whether the observer knows just these workers.
func (w *witness) has(workers ...event.Worker) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.workers) != len(workers) {
		return false
	}
	for i := range workers {
		have, ok := w.workers[workers[i].Source]
		if !ok || !have.Equal(&workers[i]) || have.IntegerID != workers[i].IntegerID {
			return false
		}
	}
	return true
}

// watched returns a catalog that runs, and its observer.
func (f *fleet) watched() (*replica.Catalog, *witness) {
	f.t.Helper()
	nc, js := f.connect()
	f.t.Cleanup(nc.Close)
	w := &witness{workers: map[event.Source]event.Worker{}, gone: map[event.Source]int{}}
	c := replica.NewCatalog(js, replica.DefaultCatalog(), f.log, w)
	f.t.Cleanup(run(c.Run))
	return c, w
}

// retry makes short attempts until one succeeds or fails for good.
func (f *fleet) retry(attempt func(ctx context.Context) error) error {
	f.t.Helper()
	var err error
	f.await("NATS answers", func() bool {
		ctx, cancel := context.WithTimeout(f.ctx, 2*time.Second)
		defer cancel()
		err = attempt(ctx)
		return err == nil || errors.Is(err, event.ErrConflict) || errors.Is(err, event.ErrWorker) || errors.Is(err, event.ErrNotRegistered)
	})
	return err
}

func (f *fleet) mustRegister(c *replica.Catalog, workers ...event.Worker) {
	f.t.Helper()
	for _, w := range workers {
		if err := f.retry(func(ctx context.Context) error { return c.Register(ctx, w) }); err != nil {
			f.t.Fatal(err)
		}
	}
}

func someWorker(instance string, rank uint32) event.Worker {
	return event.Worker{Source: event.Source{Model: "org/M v1", Group: "a.b", Instance: instance, Rank: rank}, Endpoint: "tcp://10.0.0.1:5557",
		ReplayEndpoint: "tcp://10.0.0.1:5558", Topic: "kv@1", Engine: "vllm", BlockSize: 16, Labels: map[string]string{"zone": "eu 1"}}
}

// A worker that is registered with one replica is seen by all, as it is, also by
// those that come later; and so is its end.
func TestCatalogIsShared(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, seenA := f.watched()
	_, seenB := f.watched()
	one, two := someWorker("w.0", 0), someWorker("w.0", 1)
	number := someWorker("17", 0)
	number.IntegerID = true
	bare := event.Worker{Source: event.Source{Model: "other", Group: "default", Instance: "=*>. ü"}, Endpoint: "ipc:///tmp/x y", BlockSize: 1}
	f.mustRegister(a, one, two, number, bare)
	if !seenA.has(one, two, number, bare) {
		t.Error("Register returned before the observer was told")
	}
	f.await("the other replica sees it", func() bool { return seenB.has(one, two, number, bare) })
	f.mustRegister(a, one) // again, as it is
	_, late := f.watched()
	f.await("who comes later sees it", func() bool { return late.has(one, two, number, bare) && late.read == 1 })

	rank := uint32(1)
	var gone []event.Source
	if err := f.retry(func(ctx context.Context) (err error) {
		gone, err = a.Unregister(ctx, "w.0", "org/M v1", "", &rank)
		return err
	}); err != nil || !slices.Equal(gone, []event.Source{two.Source}) {
		t.Errorf("unregistered %v, %v", gone, err)
	}
	if !seenA.has(one, number, bare) {
		t.Error("Unregister returned before the observer was told")
	}
	f.await("the others see it", func() bool { return seenB.has(one, number, bare) && late.has(one, number, bare) })
	if err := f.retry(func(ctx context.Context) error {
		_, err := a.Unregister(ctx, "w.0", "org/M v1", "another group", nil)
		return err
	}); !errors.Is(err, event.ErrNotRegistered) {
		t.Errorf("of another group: %v", err)
	}
	if err := f.retry(func(ctx context.Context) error {
		_, err := a.Unregister(ctx, "nobody", "org/M v1", "", nil)
		return err
	}); !errors.Is(err, event.ErrNotRegistered) {
		t.Errorf("nobody: %v", err)
	}
	_, later := f.watched()
	f.await("who comes now is told of the end, too", func() bool {
		later.mu.Lock()
		told := later.gone[two.Source] > 0
		later.mu.Unlock()
		return told && later.has(one, number, bare)
	})
}

func TestCatalogConflicts(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, seen := f.watched()
	w := someWorker("w", 0)
	f.mustRegister(a, w)
	for name, change := range map[string]func(*event.Worker){
		"another endpoint":   func(x *event.Worker) { x.Endpoint = "tcp://10.0.0.2:5557" },
		"another engine":     func(x *event.Worker) { x.Engine = "sglang" },
		"another block size": func(x *event.Worker) { x.Instance, x.BlockSize = "x", 32 },
		"another group":      func(x *event.Worker) { x.Group = "other" },
		"another model":      func(x *event.Worker) { x.Model = "other" },
	} {
		x := w
		change(&x)
		err := f.retry(func(ctx context.Context) error { return a.Register(ctx, x) })
		if !errors.Is(err, event.ErrConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
	bad := w
	bad.Endpoint = "udp://h:1"
	if err := a.Register(f.ctx, bad); !errors.Is(err, event.ErrWorker) {
		t.Errorf("a bad endpoint: %v", err)
	}
	if !seen.has(w) {
		t.Error("what was refused is registered")
	}
	// When nobody is left, the block size is free again.
	if err := f.retry(func(ctx context.Context) error { _, err := a.Unregister(ctx, "w", w.Model, w.Group, nil); return err }); err != nil {
		t.Fatal(err)
	}
	w.BlockSize = 64
	f.mustRegister(a, w)
	f.await("it is there", func() bool { return seen.has(w) })
}

// Replicas that register at the same moment agree: what is the same is fine, of
// what contradicts one wins.
func TestCatalogRaces(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	var catalogs []*replica.Catalog
	var seen []*witness
	for range 4 {
		c, w := f.watched()
		catalogs, seen = append(catalogs, c), append(seen, w)
	}
	f.await("all have read the catalog", func() bool {
		return !slices.ContainsFunc(seen, func(w *witness) bool { w.mu.Lock(); defer w.mu.Unlock(); return w.read == 0 })
	})
	together := func(of func(i int) event.Worker) (won []event.Worker) {
		t.Helper()
		errs := make([]error, len(catalogs))
		var wg sync.WaitGroup
		for i, c := range catalogs {
			wg.Go(func() { errs[i] = c.Register(f.ctx, of(i)) })
		}
		wg.Wait()
		for i, err := range errs {
			switch {
			case err == nil:
				won = append(won, of(i))
			case !errors.Is(err, event.ErrConflict):
				t.Error(err)
			}
		}
		return won
	}
	var all []event.Worker
	for round := range 10 {
		same := someWorker(fmt.Sprint("same", round), 0)
		if won := together(func(int) event.Worker { return same }); len(won) != len(catalogs) {
			t.Errorf("round %d: %d of %d could register the same worker", round, len(won), len(catalogs))
		}
		other := someWorker(fmt.Sprint("other", round), 0)
		won := together(func(i int) event.Worker {
			w := other
			w.Endpoint = fmt.Sprintf("tcp://10.0.0.%d:5557", i)
			return w
		})
		if len(won) != 1 {
			t.Fatalf("round %d: %d could register one worker with endpoints of their own", round, len(won))
		}
		sizes := together(func(i int) event.Worker {
			w := someWorker(fmt.Sprintf("size%d-%d", round, i), 0)
			w.Model, w.BlockSize = fmt.Sprint("m", round), uint32(16+i%2)
			return w
		})
		for _, w := range sizes {
			if w.BlockSize != sizes[0].BlockSize {
				t.Errorf("round %d: block sizes %d and %d in one partition", round, w.BlockSize, sizes[0].BlockSize)
			}
		}
		if len(sizes) == 0 {
			t.Errorf("round %d: nobody set the block size", round)
		}
		all = append(append(append(all, same), won...), sizes...)
	}
	for i, w := range seen {
		f.await(fmt.Sprintf("replica %d sees all", i), func() bool { return w.has(all...) })
	}
}

// While NATS is away the catalog keeps what it knows, says that it can't change
// anything, and goes on when NATS is back.
func TestCatalogWithoutNATS(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, seen := f.watched()
	one, two := someWorker("w", 0), someWorker("w", 1)
	f.mustRegister(a, one)
	f.nats.Stop()
	ctx, cancel := context.WithTimeout(f.ctx, 200*time.Millisecond)
	defer cancel()
	if err := a.Register(ctx, two); err == nil || errors.Is(err, event.ErrConflict) || errors.Is(err, event.ErrWorker) {
		t.Errorf("without NATS: %v", err)
	}
	if !seen.has(one) || len(a.Workers()) != 1 {
		t.Error("a worker is gone because NATS is")
	}
	f.startNATS()
	f.mustRegister(a, two)
	f.await("both are there", func() bool { return seen.has(one, two) })
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if seen.gone[one.Source] > 0 {
		t.Error("a worker was said to be gone")
	}
}

// A catalog that has not reached NATS yet says so.
func TestCatalogBeforeNATS(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	nc, js := f.connect()
	t.Cleanup(nc.Close)
	seen := &witness{workers: map[event.Source]event.Worker{}, gone: map[event.Source]int{}}
	a := replica.NewCatalog(js, replica.DefaultCatalog(), f.log, seen)
	f.nats.Stop()
	t.Cleanup(run(a.Run))
	err := a.Register(f.ctx, someWorker("w", 0))
	if err == nil || !strings.Contains(err.Error(), "not been reached yet") {
		t.Errorf("before NATS: %v", err)
	}
	if seen.mu.Lock(); seen.read != 0 {
		t.Error("the catalog counts as read")
	}
	seen.mu.Unlock()
	f.startNATS()
	f.mustRegister(a, someWorker("w", 0))
	f.await("it is there", func() bool { return seen.has(someWorker("w", 0)) })
}

// What is in the bucket and is no worker is left alone.
func TestCatalogEntriesOfOthers(t *testing.T) {
	f := newFleet(t, 0, mock.Options{})
	a, seen := f.watched()
	w := someWorker("w", 0)
	f.mustRegister(a, w)
	for key, value := range map[string]string{
		"w.nonsense":                    `{}`,
		"w.m.g.i.x":                     `{}`,
		"w." + someWorker("x", 0).Key(): `not JSON`,
		"w." + someWorker("y", 0).Key(): `{"instance_id":"z"}`,
		"something.else":                `1`,
	} {
		if err := f.retry(func(ctx context.Context) error {
			kv, err := f.js.KeyValue(ctx, replica.DefaultCatalog().Bucket)
			if err == nil {
				_, err = kv.PutString(ctx, key, value)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	two := someWorker("w", 1)
	f.mustRegister(a, two)
	f.await("only workers are seen", func() bool { return seen.has(w, two) })
	_, late := f.watched()
	f.await("by all", func() bool { return late.has(w, two) })
}
