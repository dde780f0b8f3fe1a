package cache

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/integration/model"
)

func mustStart(t *testing.T, c *Cache, at time.Duration, tokens ...uint32) *Request {
	t.Helper()
	r, err := c.Start(epoch.Add(at), Prompt{Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func mustNew(t *testing.T, o Options) *Cache {
	t.Helper()
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// story returns events in short: what was done, where, and to how many blocks.
func story(events []model.Event) []string {
	var out []string
	for _, e := range events {
		s := [...]string{"store", "remove", "clear"}[e.Op]
		if e.Medium != "" {
			s += " " + e.Medium
		}
		if e.Op == model.Store && e.Tokens == nil {
			s += " without tokens"
		}
		for range e.Hashes {
			s += "."
		}
		out = append(out, s)
	}
	return out
}

func expect(t *testing.T, c *Cache, want ...string) []model.Event {
	t.Helper()
	events := c.Events()
	if got := story(events); !slices.Equal(got, want) {
		t.Fatalf("events %q, want %q", got, want)
	}
	return events
}

// The life of blocks over both tiers: the device copies are removed before the
// host store, the host copies outlive them, and are loaded when asked for.
func TestHostTier(t *testing.T) {
	c := mustNew(t, Options{BlockSize: 2, Device: 4, Host: 8, Transfer: time.Second, Owner: "kvcr"})
	r := mustStart(t, c, 0, 1, 2, 3, 4, 5, 6)
	c.Finish(epoch, r)
	stored := expect(t, c, "store...")

	r = mustStart(t, c, 0, 7, 8, 9, 10, 11, 12)
	expect(t, c, "remove.", "remove.", "store...")
	c.Tick(epoch.Add(2*time.Second - 1))
	expect(t, c, "store CPU without tokens.")
	c.Tick(epoch.Add(2 * time.Second))
	events := expect(t, c, "store CPU without tokens.")
	if events[0].Owner != "kvcr" {
		t.Errorf("the owner is said as %q", events[0].Owner)
	}
	if events[0].Hashes[0] != stored[0].Hashes[1] {
		t.Error("the block before the last is not the second to go to the host")
	}
	c.Finish(epoch.Add(2*time.Second), r)

	// Block 1 is still on the device, blocks 2 and 3 on the host.
	at := 3 * time.Second
	r = mustStart(t, c, at, 1, 2, 3, 4, 5, 6, 7)
	if r.HitDevice != 2 || r.HitHost != 4 {
		t.Fatalf("hits %d on the device and %d on the host, want 2 and 4", r.HitDevice, r.HitHost)
	}
	if want := epoch.Add(at + 2*time.Second); !r.Ready.Equal(want) {
		t.Errorf("ready at %v, want %v", r.Ready, want)
	}
}

// A prompt that is held whole computes its last block again, which makes a copy.
func TestCopies(t *testing.T) {
	c := mustNew(t, Options{BlockSize: 2, Device: 4})
	a := mustStart(t, c, 0, 1, 2, 3, 4)
	b := mustStart(t, c, 0, 1, 2, 3, 4)
	if b.Hit() != 2 {
		t.Errorf("%d tokens hit, want all but the last block", b.Hit())
	}
	expect(t, c, "store..", "store.")
	c.Finish(epoch, a)
	c.Finish(epoch, b)
	r := mustStart(t, c, 0, 9, 9, 9, 9) // takes the free slot and one of the copies
	expect(t, c, "remove.", "store..")
	if device, _ := c.Resident(); len(device) != 4 {
		t.Errorf("%d blocks, want both of each prompt", len(device))
	}
	c.Finish(epoch, r)
}

func TestErrors(t *testing.T) {
	c := mustNew(t, Options{BlockSize: 2, Device: 2})
	if _, err := c.Start(epoch, Prompt{Tokens: make([]uint32, 5)}); !errors.Is(err, ErrTooLong) {
		t.Errorf("error is %v, want ErrTooLong", err)
	}
	r := mustStart(t, c, 0, 1, 2, 3)
	if _, err := c.Start(epoch, Prompt{Tokens: []uint32{1}}); !errors.Is(err, ErrFull) {
		t.Errorf("error is %v, want ErrFull", err)
	}
	if err := c.Append(epoch, r, []uint32{4, 5}); !errors.Is(err, ErrTooLong) {
		t.Errorf("error is %v, want ErrTooLong", err)
	}
	if err := c.Clear(epoch); !errors.Is(err, ErrBusy) {
		t.Errorf("error is %v, want ErrBusy", err)
	}
	c.Finish(epoch, r)
	c.Finish(epoch, r)
	if err := c.Append(epoch, r, nil); err == nil {
		t.Error("a request that has ended takes tokens")
	}
	if err := c.Clear(epoch); err != nil {
		t.Error(err)
	}
	expect(t, c, "store.", "clear")
	if c.Running() != 0 {
		t.Errorf("%d requests run, want none", c.Running())
	}
	if _, err := New(Options{Device: -1}); err == nil {
		t.Error("a cache of -1 blocks is no error")
	}
}

// A request that ends while it loads lets the host go.
func TestAbortedLoad(t *testing.T) {
	c := mustNew(t, Options{BlockSize: 1, Device: 4, Host: 2, Transfer: time.Second, WriteThrough: true})
	r := mustStart(t, c, 0, 1, 2)
	c.Finish(epoch, r)
	c.Tick(epoch.Add(2 * time.Second))
	if err := c.Clear(epoch.Add(2 * time.Second)); err != nil {
		t.Fatal(err)
	}
	expect(t, c, "store..", "store CPU without tokens..", "clear")
	at := 2 * time.Second
	r = mustStart(t, c, at, 1, 2, 3)
	if next, ok := c.Next(); !ok || r.HitHost != 2 || !next.Equal(epoch.Add(at+2*time.Second)) {
		t.Fatalf("%d tokens on the host, next transfer ends at %v", r.HitHost, next)
	}
	c.Finish(epoch.Add(at), r)
	if _, ok := c.Next(); ok {
		t.Error("something still moves")
	}
	expect(t, c)
	r = mustStart(t, c, at, 7, 8) // whose copies push the others out
	c.Tick(epoch.Add(time.Minute))
	expect(t, c, "store..", "remove CPU.", "remove CPU.", "store CPU without tokens..")
	c.Finish(epoch.Add(time.Minute), r)
}

// A new process has an empty device; the host's blocks stay if they are not its
// own.
func TestRestart(t *testing.T) {
	for owner, want := range map[string]int{"": 0, "kvcr": 2} {
		c := mustNew(t, Options{BlockSize: 1, Device: 4, Host: 4, WriteThrough: true, Owner: owner})
		mustStart(t, c, 0, 1, 2)
		c.Tick(epoch)
		expect(t, c, "store..", "store CPU without tokens..")
		c.Restart(epoch)
		device, host := c.Resident()
		if len(device) != 0 || len(host) != want || c.Running() != 0 {
			t.Errorf("owner %q: %d blocks on the device, %d on the host, %d requests", owner, len(device), len(host), c.Running())
		}
		r := mustStart(t, c, 0, 1, 2, 3)
		if r.HitHost != want {
			t.Errorf("owner %q: %d tokens hit, want %d", owner, r.HitHost, want)
		}
	}
}
