package bridge_test

import (
	"slices"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// wantGaps fails unless exactly these gaps are on record.
func wantGaps(t *testing.T, s *feed.Source, want ...feed.Gap) {
	t.Helper()
	if !slices.Equal(s.Gaps, want) {
		t.Errorf("gaps on record: %+v, want %+v", s.Gaps, want)
	}
}

// wantResets fails unless exactly these resets are on record.
func wantResets(t *testing.T, s *feed.Source, want ...string) {
	t.Helper()
	if !slices.Equal(s.Resets, want) {
		t.Errorf("resets on record: %v, want %v", s.Resets, want)
	}
}

func TestEventsReachTheLog(t *testing.T) {
	for _, connect := range []bool{false, true} {
		r := newRig(t)
		a := r.engine("a", func(o *mock.Options) {
			if o.Connect = connect; connect {
				o.Endpoint = "tcp://127.0.0.1:" + freePort(t)
			}
		})
		if connect { // the bridge binds
			a.worker.Endpoint = "tcp://0.0.0.0:" + portOf(t, a.Addr())
		}
		e := r.bridge()
		e.serve(a)
		a.publish(prompt(1, 0, 3))
		a.publish(prompt(1, 3, 2), prompt(2, 0, 1))
		a.publish(evict(1, "", 4))
		a.publish()
		r.synced(a)
		wantResets(t, r.source(a), "new")
		wantGaps(t, r.source(a))
	}
}

func TestMissingBatchesAreReplayed(t *testing.T) {
	for name, topic := range map[string]bool{"three frames": false, "four frames": true} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			a := r.engine("a", func(o *mock.Options) { o.Replay.Topic, o.Topic = topic, "kv@a" })
			e := r.bridge()
			e.serve(a)
			a.publish(prompt(1, 0, 3))
			a.deliver(mock.Lost, prompt(1, 3, 1))
			a.deliver(mock.Lost, evict(1, "", 0))
			a.publish(prompt(1, 0, 1))
			a.publish(prompt(2, 0, 1))
			a.deliver(mock.Lost, prompt(3, 0, 2))
			a.publish(evict(3, "", 1))
			r.synced(a)
			wantGaps(t, r.source(a))
		})
	}
}

// A bridge that comes late has missed everything so far.
func TestTheBeginningIsReplayed(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	for i := range 50 {
		a.publish(prompt(1, i, 1))
	}
	r.bridge().serve(a)
	r.synced(a) // without anything live
	a.publish(evict(1, "", 10))
	r.synced(a)
	wantGaps(t, r.source(a))
}

func TestTheFirstLiveBatchShowsWhatIsMissing(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	// The replay that follows connecting finds nobody who answers.
	a.SetReplay(func(re *mock.Replay) { re.Silent = 1 })
	for i := range 5 {
		a.deliver(mock.Lost, prompt(1, i, 1))
	}
	r.bridge(func(c *bridge.Config) { c.RepairTimeout = 200 * time.Millisecond }).serve(a)
	a.publish(prompt(1, 5, 1))
	r.synced(a)
	wantGaps(t, r.source(a))
}

func TestATrimmedRingIsAGap(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.Ring = 10 })
	for i := range 30 {
		a.publish(prompt(i, 0, 1))
	}
	for seq := range uint64(20) {
		a.mayLose(seq)
	}
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(100, 0, 1)) // and with it the ring loses one more
	a.mayLose(20)
	r.synced(a)
	s := r.source(a)
	if len(s.Gaps) != 1 || s.Gaps[0].From != 0 || s.Gaps[0].To < 19 || s.Gaps[0].Reason != event.ReasonTrimmed {
		t.Errorf("gaps on record: %+v", s.Gaps)
	}
	r.await("the source is uncertain", func() bool { return r.status(a).Uncertain })
	if n := e.count("kvmesh.bridge.batches_lost", event.ReasonTrimmed); n != int64(s.Gaps[0].To)+1 {
		t.Errorf("%d batches lost by count", n)
	}
}

func TestABatchThatNoReplayBringsIsAGap(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 2))
	lost := a.deliver(mock.Gone, prompt(1, 2, 2))
	a.publish(prompt(1, 4, 1)) // its parent is lost: it waits
	a.publish(prompt(2, 0, 1))
	r.synced(a)
	wantGaps(t, r.source(a), feed.Gap{From: lost, To: lost, Reason: event.ReasonAbsent})
	wantResets(t, r.source(a), "new")
	a.publish(prompt(1, 2, 2)) // told again: what waited takes its place
	r.synced(a)
	if n := e.count("kvmesh.bridge.gaps", event.ReasonAbsent); n != 1 {
		t.Errorf("%d gaps by count", n)
	}
}

func TestSeveralHoles(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	r.bridge().serve(a)
	a.publish(prompt(1, 0, 1))
	var want []feed.Gap
	for i := range 4 {
		seq := a.deliver(mock.Gone, prompt(2, i, 1))
		a.deliver(mock.Lost, prompt(3, i, 1))
		a.publish(prompt(4, i, 1))
		want = append(want, feed.Gap{From: seq, To: seq, Reason: event.ReasonAbsent})
	}
	r.synced(a)
	wantGaps(t, r.source(a), want...)
}

func TestWithoutReplayEndpoint(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" })
	a.Seek(5)
	r.bridge().serve(a)
	a.publish(prompt(1, 0, 2))
	lost := a.deliver(mock.Lost, prompt(2, 0, 1))
	a.mayLose(lost)
	a.publish(prompt(3, 0, 1))
	r.synced(a)
	wantGaps(t, r.source(a), feed.Gap{From: 0, To: 4, Reason: event.ReasonNoReplay}, feed.Gap{From: lost, To: lost, Reason: event.ReasonNoReplay})
	a.restart()
	a.r.await("connected again", func() bool { return a.Subscribers() == 1 })
	a.publish(prompt(5, 0, 1))
	r.synced(a)
	wantResets(t, r.source(a), "new", "restart")
}

func TestGapsMayEmptyTheSource(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	a.oracle.onGap = true
	r.bridge(func(c *bridge.Config) { c.OnGap = bridge.ResetOnGap }).serve(a)
	a.publish(prompt(1, 0, 2))
	a.deliver(mock.Gone, prompt(1, 2, 2))
	a.publish(prompt(2, 0, 1))
	r.synced(a)
	wantResets(t, r.source(a), "new", "gap")
}

// An engine that is idle is asked whether it has said more than was heard.
func TestALostTailIsFound(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	r.bridge(func(c *bridge.Config) { c.ProbeInterval = 20 * time.Millisecond }).serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	for i := range 3 {
		a.deliver(mock.Lost, prompt(2, i, 1))
		r.synced(a)
	}
	wantGaps(t, r.source(a))
}

func TestWhatWasMissedWhileDisconnectedIsReplayed(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	for i := range 3 {
		a.Stop()
		a.publish(prompt(1, 2*i+1, 1)) // nobody is there
		a.start()
		if i == 1 { // not even the live stream shows it
			r.synced(a)
		}
		e.connected(a)
		a.publish(prompt(1, 2*i+2, 1))
		r.synced(a)
	}
	wantGaps(t, r.source(a))
	wantResets(t, r.source(a), "new")
}

// The replay endpoint is out of reach as long as the engine is: that is no reason
// to give up what it has.
func TestAHoleOutlastsABrokenConnection(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	a.SetReplay(func(re *mock.Replay) { re.Silent = -1 })
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.await("it is asked", func() bool { good, _ := a.Requests(); return len(good) > 0 })
	a.deliver(mock.Lost, prompt(1, 1, 1))
	a.publish(prompt(1, 2, 1))
	r.await("the hole is seen", func() bool { return r.status(a).State == event.StateCatchingUp })
	a.Stop()
	a.SetReplay(func(re *mock.Replay) { re.Silent = 0 })
	r.await("the listener has noticed", func() bool { return r.status(a).State == event.StatePending })
	// Many times as long as it takes to ask three times.
	time.Sleep(300 * time.Millisecond)
	a.start()
	r.synced(a)
	wantGaps(t, r.source(a))
}

func TestTheSameBatchAgainIsADuplicate(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	for i := range 10 {
		a.publish(prompt(1, i, 1))
	}
	r.synced(a)
	before := e.count("kvmesh.bridge.duplicates")
	for _, seq := range []uint64{3, 9, 0, 9} {
		if err := a.Resend(seq); err != nil {
			t.Fatal(err)
		}
	}
	a.publish(evict(1, "", 9))
	r.synced(a)
	if n := e.count("kvmesh.bridge.duplicates") - before; n != 4 {
		t.Errorf("%d duplicates counted, want 4", n)
	}
	wantResets(t, r.source(a), "new")
	// Also over a new connection, and while it is found out who the engine is.
	a.Stop()
	a.start()
	e.connected(a)
	for _, seq := range []uint64{9, 10, 0} {
		if err := a.Resend(seq); err != nil {
			t.Fatal(err)
		}
	}
	a.publish(prompt(2, 0, 1))
	r.synced(a)
	wantResets(t, r.source(a), "new")
}

// A batch older than what is remembered of batches, and sent twice, is nothing
// new as long as the connection is the same.
func TestAnOldDuplicate(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	for i := range 600 {
		a.publish(prompt(i, 0, 1))
	}
	r.synced(a)
	a.Stop()
	a.start()
	e.connected(a)
	r.await("the engine is known again", func() bool { good, _ := a.Requests(); return len(good) >= 2 && r.status(a).State == event.StateActive })
	if err := a.Resend(5); err != nil {
		t.Fatal(err)
	}
	a.publish(prompt(1000, 0, 1))
	r.synced(a)
	wantResets(t, r.source(a), "new")
}

func freshEngine(t *testing.T, batches int, change ...func(*mock.Options)) (*rig, *actor, *edge) {
	r := newRig(t)
	a := r.engine("a", change...)
	e := r.bridge(func(c *bridge.Config) { c.RepairTimeout = 2 * time.Second })
	e.serve(a)
	for i := range batches {
		a.publish(prompt(i, 0, 2))
	}
	r.synced(a)
	return r, a, e
}

func TestRestarts(t *testing.T) {
	const n = 6 // batches of the first life
	for _, tc := range []struct {
		name string
		then func(r *rig, a *actor, e *edge)
	}{
		{"numbers begin again", func(r *rig, a *actor, e *edge) {
			a.restart()
			e.connected(a)
			a.publish(prompt(100, 0, 2))
		}},
		{"behind the same connection", func(r *rig, a *actor, e *edge) {
			a.reborn()
			a.publish(prompt(100, 0, 2))
		}},
		{"and the first batches are lost", func(r *rig, a *actor, e *edge) {
			a.reborn()
			a.deliver(mock.Lost, prompt(100, 0, 2))
			a.deliver(mock.Lost, prompt(100, 2, 2))
			a.publish(prompt(100, 4, 2))
		}},
		{"behind the same connection, while batches are missing", func(r *rig, a *actor, e *edge) {
			a.SetReplay(func(re *mock.Replay) { re.Silent = 1 })
			a.deliver(mock.Lost, prompt(50, 0, 2))
			a.publish(prompt(51, 0, 2))
			a.publish(prompt(52, 0, 2))
			r.await("they are asked for", func() bool { return r.status(a).State == event.StateCatchingUp })
			a.reborn()
			a.publish(prompt(100, 0, 2))
			for i := range 2 * n {
				a.publish(prompt(101+i, 0, 2))
			}
		}},
		{"fewer batches than before, none live", func(r *rig, a *actor, e *edge) {
			a.Stop()
			a.reborn()
			a.publish(prompt(100, 0, 2))
			a.publish(prompt(101, 0, 2))
			a.start()
		}},
		{"as many batches as before, none live", func(r *rig, a *actor, e *edge) {
			a.Stop()
			a.reborn()
			for i := range n {
				a.publish(prompt(100+i, 0, 2))
			}
			a.start()
		}},
		{"the number is passed", func(r *rig, a *actor, e *edge) {
			a.Stop()
			a.reborn()
			for i := range 3 * n {
				a.publish(prompt(100+i, 0, 2))
			}
			a.start()
			e.connected(a)
			a.publish(prompt(100, 2, 1))
		}},
		{"goes on exactly where it was", func(r *rig, a *actor, e *edge) {
			a.Stop()
			a.reborn()
			for i := range n {
				a.publish(prompt(100+i, 0, 2))
			}
			a.start()
			e.connected(a)
			a.publish(prompt(100, 2, 1))
		}},
		{"twice", func(r *rig, a *actor, e *edge) {
			a.restart()
			e.connected(a)
			a.publish(prompt(100, 0, 2))
			r.synced(a)
			a.restart()
			e.connected(a)
			a.publish(prompt(101, 0, 2))
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r, a, e := freshEngine(t, n)
			tc.then(r, a, e)
			r.synced(a)
			wantGaps(t, r.source(a))
			want := []string{"new", "restart"}
			if tc.name == "twice" {
				want = append(want, "restart")
			}
			wantResets(t, r.source(a), want...)
			if n := e.count("kvmesh.bridge.engine.restarts"); n != int64(len(want)-1) {
				t.Errorf("%d restarts counted", n)
			}
		})
	}
}

// Whether the engine is the same can't be told if its ring has dropped the last
// batch that was applied: the state is kept, and what is missing is a gap.
func TestALostOverlapKeepsTheState(t *testing.T) {
	r, a, e := freshEngine(t, 5, func(o *mock.Options) { o.Ring = 3 })
	a.Stop()
	for i := range 10 {
		a.publish(prompt(100+i, 0, 1))
	}
	for seq := range uint64(12) {
		a.mayLose(seq)
	}
	a.start()
	e.connected(a)
	r.synced(a)
	wantResets(t, r.source(a), "new")
	wantGaps(t, r.source(a), feed.Gap{From: 5, To: 11, Reason: event.ReasonTrimmed})
	r.await("the source is uncertain", func() bool { return r.status(a).Uncertain })
}

// A removal that comes live while its store is still missing takes place after
// the store.
func TestARemovalDoesNotOvertakeItsStore(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	a.SetReplay(func(re *mock.Replay) { re.Delay = 100 * time.Millisecond })
	r.bridge().serve(a)
	a.publish(prompt(1, 0, 1))
	a.deliver(mock.Lost, prompt(2, 0, 2))
	a.publish(evict(2, "", 0, 1))
	r.synced(a)
	if n := len(r.source(a).Resident()[event.Device]); n != 1 {
		t.Errorf("%d blocks, want 1", n)
	}
}

func TestNumbersAtTheEndOfTheRange(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" })
	e := r.bridge()
	a.Seek(1<<64 - 4)
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	a.publish(prompt(1, 1, 1))
	a.publish(prompt(1, 2, 1))
	r.synced(a)
	a.Seek(1<<64 - 1) // the end marker's
	a.PublishRaw([]byte{0x93, 1, 0x90, 0xc0}, mock.Sent)
	r.await("it is dropped", func() bool { return e.count("kvmesh.bridge.dropped", "end_marker") == 1 })
}

// Topics are compared for equality: a subscription is a prefix.
func TestOtherTopicsAreDropped(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.Topic = "kv" })
	e := r.bridge()
	e.serve(a)
	foreign, err := mock.VLLMMap.Encode(mock.Batch{TS: 1.0, Events: []model.Event{prompt(9, 0, 1)}, BlockSize: blockSize})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.PublishFrames([]byte("kv-other"), make([]byte, 8), foreign); err != nil {
		t.Fatal(err)
	}
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	// The batch may have come by a replay, before either was read.
	r.await("the other message is dropped", func() bool { return e.count("kvmesh.bridge.dropped", "other_topic") == 1 })
}
