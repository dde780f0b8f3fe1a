package bridge_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// ownedEngine is an engine whose worker has a cache owner.
func (r *rig) ownedEngine(instance string) *actor {
	a := r.engine(instance)
	a.worker.CacheOwner = "an owner's id"
	a.oracle.state.CacheOwner = true
	return a
}

func owned(owner string) func(*model.Event) { return func(e *model.Event) { e.Owner = owner } }

// kept returns events of blocks in the memory of the cache owner: those of one
// prompt on the host as well as on the device, those of another by themselves.
func kept(id int) []model.Event {
	return []model.Event{
		prompt(id, 0, 4), with(offload(id, "CPU", 0, 1, 3), owned("kvcr")), with(offload(id, "CPU", 3), owned("kvcr")),
		with(prompt(id+1, 0, 2), owned("kvcr")), with(offload(id, "STORAGE", 2), owned("framework")),
	}
}

// What is the cache owner's is there all the time while the engine starts again,
// and nothing else is; events of the new process are about it too.
func TestAnOwnersBlocksOutliveTheEngine(t *testing.T) {
	for _, away := range []bool{false, true} { // the bridge, meanwhile
		t.Run(fmt.Sprint(away), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a := r.ownedEngine("a")
			e := r.bridge()
			e.serve(a)
			a.publish(kept(1)...)
			r.synced(a)
			for life := range 3 {
				if away {
					e.kill()
				}
				a.restart()
				a.publish(prompt(50+life, 0, 1))
				if away {
					e = r.bridge()
					e.serve(a)
				}
				r.synced(a)
				if n := len(r.source(a).Resident()[event.Host]); n != 3 {
					t.Fatalf("%d blocks on the host in life %d, want 3", n, life)
				}
			}
			a.publish(prompt(1, 0, 5), with(evict(1, "CPU", 3, 0), owned("kvcr")))
			r.synced(a)
			a.publish(with(evict(1, "CPU", 3), owned("kvcr")), with(prompt(2, 2, 1), owned("kvcr")))
			r.synced(a)
			wantResets(t, r.source(a), "new")
			wantGaps(t, r.source(a))
			if n := r.source(a).Restarts; n != 3 {
				t.Errorf("%d restarts on record, want 3", n)
			}
			// The last of them goes, and the next life begins with nothing.
			a.publish(with(model.Event{Op: model.Clear}, owned("kvcr")), prompt(90, 0, 1))
			r.synced(a)
			a.restart()
			a.publish(prompt(91, 0, 1))
			r.synced(a)
			wantResets(t, r.source(a), "new", "restart")
		})
	}
}

// Whatever the events say, there is no owner but the engine where the worker has
// none, and others than those two are nobody.
func TestOwners(t *testing.T) {
	r := newRig(t)
	a, b := r.engine("a"), r.ownedEngine("b")
	e := r.bridge()
	e.serve(a, b)
	for _, x := range []*actor{a, b} {
		x.publish(append(kept(1), with(prompt(7, 0, 2), owned("somebody")))...)
		x.publish(with(model.Event{Op: model.Clear}, owned("somebody")), with(evict(1, "CPU", 3), owned("framework")))
		r.synced(x)
		x.publish(with(model.Event{Op: model.Clear}, owned("kvcr")))
		r.synced(x)
		r.await("two events of nobody's", func() bool { return r.status(x).Dropped["unknown_ownership"] == 2 })
		x.restart()
		x.publish(prompt(9, 0, 1))
		r.synced(x)
	}
	wantResets(t, r.source(a), "new", "restart")
}

// large is what takes several chunks of a checkpoint.
func large(id int) []model.Event {
	var out []model.Event
	for i := range 10 {
		out = append(out, with(wordy(id+i, 200), owned("kvcr")))
	}
	return out
}

// A bridge that dies while it writes what is left, after any chunk of it, leaves
// nothing behind that means anything, and the next one writes it as a whole. So does
// one whose engine starts again meanwhile.
func TestDeathWhileAnOwnersBlocksAreWritten(t *testing.T) {
	for chunks := range int64(4) {
		for _, again := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d %v", chunks, again), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				a := r.ownedEngine("a")
				change := func(c *bridge.Config) { c.MaxMessage = 256 << 10 }
				e := r.bridge(change)
				e.serve(a)
				for _, event := range large(100) {
					a.publish(event, prompt(1, 0, 3))
				}
				r.synced(a)
				r.limitLog(r.logged() + chunks)
				a.restart()
				a.publish(prompt(2, 0, 2))
				r.awaitFull(a)
				if again {
					a.restart()
					a.publish(prompt(3, 0, 2), with(evict(1, "", 1), owned("kvcr")))
					r.await("the engine is connected again", func() bool { return e.count("kvmesh.bridge.engine.restarts") == 2 })
				} else {
					e.kill()
				}
				r.limitLog(-1)
				if !again {
					r.bridge(change).serve(a)
				}
				r.synced(a)
				a.publish(with(model.Event{Op: model.Remove, Hashes: wordy(103, 200).Hashes[7:9]}, owned("kvcr")))
				r.synced(a)
				wantResets(t, r.source(a), "new")
				if n := r.source(a).Restarts; n != 1 && !again {
					t.Errorf("%d restarts on record, want 1", n)
				}
			})
		}
	}
}

// The ranks that batches name have owners' blocks too, which are written before the
// records that make void what they had.
func TestAnOwnersBlocksOfNamedRanks(t *testing.T) {
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprint(dies), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.loose = true
			a := r.ownedEngine("a")
			truth := map[uint32]*model.Source{}
			for rank := range uint32(3) {
				truth[rank] = model.New(blockSize, model.VLLM)
				truth[rank].CacheOwner = true
			}
			agree := func(what string) {
				t.Helper()
				r.read(what, func() bool {
					home := r.source(a)
					for rank, m := range truth {
						s := r.log.Source(event.Source{Model: "m", Group: "default", Instance: "a", Rank: rank})
						if s == nil || s.Diff(m.Resident()) != "" || s.Incarnation < home.Incarnation {
							return false
						}
					}
					return home.Batches && home.Last == a.Next()-1
				})
			}
			e := r.bridge()
			e.serve(a)
			for i := range 6 {
				ranked(a, uint32(i%3), truth, kept(10*i)...)
			}
			agree("three ranks")
			for life := range 3 {
				if dies { // the home lane is told of the new life by the next bridge
					r.limitLog(r.logged() + int64(life))
				}
				a.restart()
				for _, m := range truth {
					m.Restart()
				}
				ranked(a, uint32(life), truth, append(kept(100+10*life), with(evict(0, "CPU", life), owned("kvcr")))...)
				if dies {
					e = r.replaceFull(e, a)
				}
				agree(fmt.Sprintf("life %d", life))
			}
			r.ordered(a)
		})
	}
}

// ordered checks that no record of the home lane is of a later life than what the
// ranks that its batches name had then.
func (r *rig) ordered(a *actor) {
	r.t.Helper()
	lives := map[event.Source]uint64{}
	var dec event.Decoder
	for _, m := range r.messages() {
		source, err := event.DefaultLog().Parse(m.Subject)
		if err == nil {
			err = dec.Reset(m.Data)
		}
		if err != nil {
			r.t.Fatal(err)
		}
		lives[source] = dec.Header.Incarnation
		for other, life := range lives {
			if source == a.worker.Source && life < lives[source] {
				r.t.Errorf("the home lane is at incarnation %d in record %d, rank %d at %d", lives[source], m.Sequence, other.Rank, life)
			}
		}
	}
}

// A bridge that takes a source over keeps what is the cache owner's, also if the
// engine has started again in between, and what was purged is not needed.
func TestAnOwnersBlocksAreTakenOver(t *testing.T) {
	r := newRig(t)
	a := r.ownedEngine("a")
	first, next := r.bridge(), r.bridge(func(c *bridge.Config) { c.ID = "next" })
	first.serve(a)
	a.publish(kept(1)...)
	r.synced(a)
	for life := range 4 {
		next.Standby(a.worker)
		r.await("the next bridge is connected", func() bool { return next.Connected(a.worker.Source) })
		if life%2 == 0 {
			a.restart()
			a.publish(prompt(50+life, 0, 1))
		}
		first.Release(a.worker.Source)
		if err := first.AwaitGone(r.ctx, a.worker.Source); err != nil {
			t.Fatal(err)
		}
		if life%2 == 1 {
			a.restart()
			a.publish(prompt(50+life, 0, 1))
		}
		next.Set(a.worker)
		r.synced(a)
		first, next = next, first
		if last := r.source(a); last.Restarts == life+1 {
			continue
		}
		t.Fatalf("%d restarts on record in life %d", r.source(a).Restarts, life)
	}
	st, err := r.js.Stream(r.ctx, "KV")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Purge(r.ctx, jetstream.WithPurgeSequence(lastCheckpoint(t, r))); err != nil {
		t.Fatal(err)
	}
	first.kill()
	r.bridge().serve(a)
	a.publish(with(evict(1, "CPU", 1), owned("kvcr")))
	r.synced(a)
}

// A log that is lost while what is left of a life waits to be written gets all of
// it.
func TestAnOwnersBlocksAndALostLog(t *testing.T) {
	r := newRig(t)
	a := r.ownedEngine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(kept(1)...)
	r.synced(a)
	r.limitLog(r.logged())
	a.restart()
	a.publish(prompt(50, 0, 1))
	r.awaitFull(a)
	if err := r.js.DeleteStream(r.ctx, "KV"); err != nil {
		t.Fatal(err)
	}
	r.loose = true // it begins in the midst of a life
	r.forget()
	r.read("all of it", func() bool { return a.covered(r.source(a)) })
	a.oracle.state.Restart()
	a.oracle.state.Apply(prompt(50, 0, 1))
	if diff := r.source(a).Diff(a.oracle.resident()); diff != "" {
		t.Fatal(diff)
	}
	e.kill()
	r.bridge().serve(a)
	next := with(evict(1, "CPU", 3, 0), owned("kvcr"))
	a.publish(next)
	a.oracle.state.Apply(next)
	r.read("what came since", func() bool { return a.covered(r.source(a)) })
	if diff := r.source(a).Diff(a.oracle.resident()); diff != "" {
		t.Fatal(diff)
	}
}

// A gap may be about anybody's blocks. What is left over a restart may be wrong for
// what was lost before; where gaps empty a source, all of it goes.
func TestAnOwnersBlocksAndGaps(t *testing.T) {
	for _, policy := range []bridge.GapPolicy{bridge.KeepOnGap, bridge.ResetOnGap} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a := r.ownedEngine("a")
			a.oracle.onGap = policy == bridge.ResetOnGap
			e := r.bridge(func(c *bridge.Config) { c.OnGap = policy })
			e.serve(a)
			a.publish(kept(1)...)
			a.deliver(mock.Gone, prompt(5, 0, 1))
			a.publish(kept(11)...)
			r.synced(a)
			a.restart()
			a.publish(prompt(6, 0, 1))
			r.synced(a)
			r.await("it is uncertain", func() bool { return r.status(a).Uncertain })
			e.kill()
			r.bridge(func(c *bridge.Config) { c.OnGap = policy }).serve(a)
			r.await("it is uncertain still", func() bool { st := r.status(a); return st.Uncertain && st.State == event.StateActive })
			if n := r.source(a).LostBefore; n != 1 {
				t.Errorf("%d batches are lost on record, want 1", n)
			}
		})
	}
}

// What was lost may have been about the blocks of any rank that batches name, and is not
// forgotten while any of them has what outlives the engine.
func TestGapsAndBlocksOfNamedRanks(t *testing.T) {
	for _, dies := range []bool{false, true} {
		t.Run(fmt.Sprint(dies), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.loose = true
			a := r.ownedEngine("a")
			e := r.bridge()
			e.serve(a)
			truth := map[uint32]*model.Source{}
			ranked(a, 1, truth, kept(1)...)
			a.deliver(mock.Gone, prompt(5, 0, 1))
			ranked(a, 0, truth, prompt(6, 0, 1))
			r.await("it is uncertain", func() bool { return r.status(a).Uncertain })
			r.read("the gap", func() bool { s := r.source(a); return s.Batches && s.Last == a.Next()-1 })
			if dies { // it may have written what is left of the other rank
				r.limitLog(r.logged() + 1)
			}
			life := r.source(a).Incarnation
			a.restart()
			ranked(a, 1, truth, prompt(7, 0, 1))
			if dies {
				r.replaceFull(e, a)
			}
			r.read("the next life", func() bool { s := r.source(a); return s.Incarnation > life && s.Batches && s.Last == a.Next()-1 })
			if n := r.source(a).LostBefore; n != 1 {
				t.Errorf("%d batches are lost on record, want 1", n)
			}
			r.await("it is uncertain still", func() bool { return r.status(a).Uncertain })
		})
	}
}

// -- slots --------------------------------------------------------------------

// recorder is where attachments are on record.
type recorder struct {
	mu       sync.Mutex
	attached map[string]string // by id: instance at bridge
	fails    bool
	times    int // of attaching
}

func (r *recorder) Attach(_ context.Context, w event.Worker, bridge string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.times++
	if r.fails {
		return errors.New("the record can't be written")
	}
	r.attached[w.CacheOwner] = w.Instance + " at " + bridge
	return nil
}

func (r *recorder) Detach(_ context.Context, w event.Worker, bridge string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.attached[w.CacheOwner] == w.Instance+" at "+bridge {
		delete(r.attached, w.CacheOwner)
	}
	return nil
}

// has tells whether just these are attached.
func (r *recorder) has(want ...string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Equal(slices.Sorted(maps.Values(r.attached)), want)
}

// slotted starts engines with owners, and a bridge with so many slots.
func (r *rig) slotted(slots int, names ...string) (*edge, *recorder, []*actor) {
	r.t.Helper()
	rec := &recorder{attached: map[string]string{}}
	r.attachments = rec
	var actors []*actor
	for _, name := range names {
		a := r.ownedEngine(name)
		a.worker.CacheOwner = "owner of " + name
		actors = append(actors, a)
	}
	return r.bridge(func(c *bridge.Config) { c.MaxSlots = slots }), rec, actors
}

// A bridge reads as many workers with owners as it has slots. One more is refused in
// so many words, and read when a slot is free. An engine that starts again, and a worker
// that is changed, keep theirs.
func TestSlots(t *testing.T) {
	r := newRig(t)
	e, rec, all := r.slotted(2, "a", "b", "c")
	a, b, c := all[0], all[1], all[2]
	plain := r.engine("plain")
	e.serve(a, b, plain)
	r.await("both are on record", func() bool { return rec.has("a at edge", "b at edge") })
	e.Set(c.worker)
	r.await("the third is refused", func() bool {
		st := r.status(c)
		return st.State == event.StateFailed && strings.Contains(st.LastError, "--max-slots")
	})
	if e.count("kvmesh.bridge.slots.refused") == 0 {
		t.Error("nobody counts that")
	}
	if c.Subscribers() > 0 || !rec.has("a at edge", "b at edge") {
		t.Error("it is read all the same")
	}
	a.restart() // of the engine, which takes no other slot
	a.publish(prompt(1, 0, 1))
	e.Set(relabelled(b.worker)) // the worker, changed
	r.synced(a)
	e.connected(b)
	r.await("both are on record still", func() bool { return rec.has("a at edge", "b at edge") })
	if st := r.status(c); st.State != event.StateFailed {
		t.Errorf("the third is %s", st.State)
	}
	e.Release(a.worker.Source)
	e.connected(c) // at once
	c.publish(prompt(3, 0, 1))
	r.synced(c)
	r.await("the slot is the third one's", func() bool { return rec.has("b at edge", "c at edge") })
	e.Set(a.worker)
	r.await("the first one is refused", func() bool { return r.status(a).State == event.StateFailed })
	e.Remove(b.worker.Source)
	e.connected(a)
	r.await("until the second one is gone", func() bool { return rec.has("a at edge", "c at edge") })
	e.stop()
	if !rec.has() {
		t.Error("what is not read is attached")
	}
}

// relabelled is a worker that has changed.
func relabelled(w event.Worker) event.Worker {
	w.Labels = map[string]string{"rack": "2"}
	return w
}

// A start that fails leaves no slot in use, and nothing on record.
func TestASlotIsGivenBackWhenAStartFails(t *testing.T) {
	r := newRig(t)
	e, rec, all := r.slotted(1, "a", "b")
	a, b := all[0], all[1]
	rec.fails = true
	e.Set(a.worker)
	r.await("the first can't be put on record", func() bool { return strings.Contains(r.status(a).LastError, "record can't be written") })
	rec.mu.Lock()
	rec.fails = false
	rec.mu.Unlock()
	e.connected(a)
	r.await("it is tried again", func() bool { return rec.has("a at edge") })
	e.Release(a.worker.Source)
	if err := e.AwaitGone(r.ctx, a.worker.Source); err != nil {
		t.Fatal(err)
	}
	// The log refuses what does not fit it: the listener can't open.
	broken := b.worker
	broken.Endpoint = "tcp://127.0.0.1:0"
	e.Set(broken)
	r.await("the second fails", func() bool { return r.status(b).State == event.StateFailed && rec.has() })
	e.Set(a.worker)
	e.connected(a)
	r.await("the first finds the slot", func() bool { return rec.has("a at edge") })
	r.await("and the second none", func() bool { return strings.Contains(r.status(b).LastError, "--max-slots") })
}

// A bridge without slots reads the others.
func TestNoSlots(t *testing.T) {
	r := newRig(t)
	e, rec, all := r.slotted(0, "a")
	plain := r.engine("plain")
	e.Set(all[0].worker)
	e.serve(plain)
	plain.publish(prompt(1, 0, 1))
	r.synced(plain)
	r.await("the other is refused", func() bool { return strings.Contains(r.status(all[0]).LastError, "has 0") })
	if !rec.has() || rec.times > 0 {
		t.Error("it is on record")
	}
}

// What is published under another topic is not the worker's, live or in a replay,
// also if the worker's is the beginning of it.
func TestTopicsAreCompared(t *testing.T) {
	for _, topic := range []string{"kvcr-1", "kvcr-10", "kvcr-2"} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a := r.engine("a", func(o *mock.Options) { o.Topic, o.Replay.Topic = topic, true })
			a.worker.Topic = "kvcr-1"
			e := r.bridge()
			if topic == a.worker.Topic {
				a.publish(prompt(1, 0, 2)) // before anybody listens
				e.serve(a)
				a.publish(prompt(2, 0, 1))
				r.synced(a)
				wantGaps(t, r.source(a))
				return
			}
			// The live one is right, and the replay socket another engine's.
			other := r.engine("other", func(o *mock.Options) { o.Topic, o.Replay.Topic = topic, true })
			other.publish(prompt(9, 0, 4))
			live := r.engine("live", func(o *mock.Options) { o.Topic = "kvcr-1" })
			live.worker.Topic, live.worker.ReplayEndpoint = "kvcr-1", other.worker.ReplayEndpoint
			live.publish(prompt(3, 0, 1))
			live.mayLose(0)
			e.serve(live)
			live.publish(prompt(4, 0, 1))
			r.synced(live)
			r.await("the replay is dropped", func() bool { return r.status(live).Dropped["other_topic"] > 0 })
			e.Set(a.worker)
			if strings.HasPrefix(topic, "kvcr-1") {
				e.connected(a)
				a.publish(prompt(5, 0, 1))
				r.await("the live batch is dropped", func() bool { return r.status(a).Dropped["other_topic"] > 0 })
			}
			if s := r.log.Source(a.worker.Source); s != nil && len(s.Resident()) > 0 {
				t.Errorf("holds %v", s.Resident())
			}
		})
	}
}
