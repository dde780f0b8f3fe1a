package bridge_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// An engine restarts while its replay socket is silent, and then says nothing that
// arrives. When the socket speaks again, a probe finds the new life.
func TestAProbeFindsARestart(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	r.bridge(func(c *bridge.Config) {
		c.RepairTimeout, c.RepairAttempts, c.RepairCooldown, c.ProbeInterval = 50*time.Millisecond, 2, 50*time.Millisecond, 50*time.Millisecond
	}).serve(a)
	for i := range 6 {
		a.publish(prompt(1, i, 1))
	}
	r.synced(a)
	a.SetReplay(func(re *mock.Replay) { re.Silent = -1 })
	a.restart()
	a.deliver(mock.Lost, prompt(2, 0, 2))
	a.deliver(mock.Lost, prompt(3, 0, 1))
	r.await("the bridge finds the replay socket silent", func() bool {
		return strings.Contains(r.status(a).LastError, "replay endpoint")
	})
	a.SetReplay(func(re *mock.Replay) { re.Silent = 0 })
	r.synced(a)
	wantResets(t, r.source(a), "new", "restart")
}

// Batches wait for one before them when the engine restarts. Those of the new life
// that come under their numbers show it, though the replay socket is silent.
func TestARestartShowsInWhatWaits(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge(func(c *bridge.Config) { c.RepairTimeout = time.Minute })
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	before, _ := a.Requests()
	a.SetReplay(func(re *mock.Replay) { re.Silent = -1 })
	a.deliver(mock.Gone, prompt(1, 1, 1))
	a.publish(prompt(1, 2, 1))
	a.publish(prompt(1, 3, 1))
	r.await("the bridge asks for what is missing", func() bool {
		good, _ := a.Requests()
		return len(good) > len(before)
	})
	a.restart()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := a.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		a.publish(prompt(2, i, 1))
	}
	r.synced(a)
	wantResets(t, r.source(a), "new", "restart")
	wantGaps(t, r.source(a))
}

// Batches wait when the engine restarts, and the ring of the new life no longer
// has the number that would tell. What waits is not mixed with what comes.
func TestWhatWaitsIsNotMixedWithAnotherLife(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.Ring = 2 })
	e := r.bridge(func(c *bridge.Config) { c.RepairTimeout = time.Minute })
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	before, _ := a.Requests()
	a.SetReplay(func(re *mock.Replay) { re.Silent = 1 })
	a.deliver(mock.Gone, prompt(1, 1, 1))
	for i := range 10 {
		a.publish(prompt(1, i+2, 1))
	}
	r.await("the bridge asks for what is missing", func() bool {
		good, _ := a.Requests()
		return len(good) > len(before)
	})
	a.Stop()
	a.reborn()
	for i := range 4 { // of which the ring keeps two
		a.deliver(mock.Lost, prompt(2, i, 1))
	}
	r.loose = true // that this is another life can't be told
	a.start()
	r.read("the new life's batches, and no others", func() bool { return a.covered(r.source(a)) })
	wantGaps(t, r.source(a), feed.Gap{From: 1, To: 1, Reason: "trimmed"})
}
