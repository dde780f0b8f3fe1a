package bridge_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// messages returns all messages of the log.
func (r *rig) messages() []*jetstream.RawStreamMsg {
	r.t.Helper()
	st, err := r.js.Stream(r.ctx, "KV")
	if err != nil {
		r.t.Fatal(err)
	}
	var out []*jetstream.RawStreamMsg
	info := st.CachedInfo().State
	for seq := info.FirstSeq; seq <= info.LastSeq; seq++ {
		msg, err := st.GetMsg(r.ctx, seq)
		if err != nil {
			r.t.Fatal(err)
		}
		out = append(out, msg)
	}
	return out
}

// limitLog makes the log refuse what is beyond so many messages; -1: nothing.
func (r *rig) limitLog(messages int64) {
	r.t.Helper()
	cfg := event.DefaultLog().Config(0, 1)
	cfg.MaxMsgs = messages
	if _, err := r.js.CreateOrUpdateStream(r.ctx, cfg); err != nil {
		r.t.Fatal(err)
	}
}

// awaitFull waits until the log has refused what the bridge of an engine writes.
func (r *rig) awaitFull(a *actor) {
	r.t.Helper()
	r.await("the log is full", func() bool { return strings.Contains(r.status(a).LastError, "maximum messages") })
}

// replaceFull kills an engine's bridge when the log is full, which it is not for the
// next one.
func (r *rig) replaceFull(e *edge, a *actor) *edge {
	r.t.Helper()
	r.awaitFull(a)
	e.kill()
	r.limitLog(-1)
	next := r.bridge()
	next.serve(a)
	return next
}

// logged returns how many messages the log has.
func (r *rig) logged() int64 {
	r.t.Helper()
	st, err := r.js.Stream(r.ctx, "KV")
	if err != nil {
		return 0
	}
	return int64(st.CachedInfo().State.Msgs)
}

// While a record waits for the log, what comes is joined into the next one.
func TestWhatWaitsIsJoined(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	before := r.logged()
	r.limitLog(before)
	for i := range 100 {
		a.publish(prompt(2, i, 1))
	}
	r.awaitFull(a)
	r.await("all is read", func() bool { st := r.status(a); return st.EngineSeq != nil && *st.EngineSeq == 100 })
	r.limitLog(-1)
	r.synced(a)
	if n := r.logged() - before; n > 2+1 { // the one that was refused, the rest, and a checkpoint
		t.Errorf("%d records for 100 batches that waited", n)
	}
	r.await("the error is gone", func() bool { return r.status(a).LastError == "" })
	if n := e.count("kvmesh.bridge.records"); n != r.logged() {
		t.Errorf("%d records by count, the log has %d", n, r.logged())
	}
}

func TestMessageIDs(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.Rank = 3 })
	e := r.bridge()
	e.serve(a)
	for i := range 20 {
		a.publish(prompt(1, i, 1))
	}
	r.synced(a)
	seen := map[string]bool{}
	for _, msg := range r.messages() {
		id := msg.Header.Get(jetstream.MsgIDHeader)
		if seen[id] {
			t.Errorf("the id %s is there twice", id)
		}
		seen[id] = true
		var dec event.Decoder
		if err := dec.Reset(msg.Data); err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("kv.m.default.a.3|%d|%d|", dec.Header.Incarnation, dec.Header.Last); !strings.HasPrefix(id, want) {
			t.Errorf("id %s, want %s…", id, want)
		}
	}
}

// A second writer of a subject is found out, and does not write over what the
// other one wrote: the bridge reads the log back, and goes on from there.
func TestASecondWriter(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 2))
	r.synced(a)
	s := r.source(a)
	// A record of somebody else's that changes nothing.
	h := event.Header{Incarnation: s.Incarnation, Batches: true, First: s.Last + 1, Last: s.Last, TS: s.TS, Fingerprint: s.Fingerprint}
	if _, err := r.js.PublishMsg(r.ctx, &nats.Msg{Subject: event.DefaultLog().Subject(a.worker.Source), Data: event.AppendRecord(nil, h, 0)}); err != nil {
		t.Fatal(err)
	}
	for i := range 10 {
		a.publish(prompt(2, i, 1))
	}
	r.synced(a)
	wantGaps(t, r.source(a))
	wantResets(t, r.source(a), "new")
	r.await("the bridge has noticed", func() bool { return e.count("kvmesh.bridge.replay.requests") > 1 })
}

// wordy returns the store of n blocks with names of 250 bytes.
func wordy(id, n int) model.Event {
	e := prompt(id, 0, n)
	for i := range e.Hashes {
		e.Hashes[i] = model.Text(fmt.Sprintf("%0250d", id*100_000+i))
	}
	return e
}

// A batch that is larger than a message is several records, and all but the last
// are partial.
func TestLargeBatchesAreSplit(t *testing.T) {
	for name, small := range map[string]bool{"by the bridge's limit": false, "by the server's": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var maxPayload int32
			if small {
				maxPayload = 128 << 10
			}
			r := newRigOn(t, newHub(t, maxPayload))
			a := r.engine("a")
			e := r.bridge(func(c *bridge.Config) { c.MaxMessage = 256 << 10; c.CheckpointBytes = 1 << 30 })
			e.serve(a)
			var large []model.Event
			for i := range 10 {
				large = append(large, wordy(i+200, 200))
			}
			large = append(large, prompt(3, 0, 100))
			a.publish(prompt(100, 0, 1))
			a.publish(large...)
			a.publish(evict(3, "", 5), prompt(100, 1, 1))
			r.synced(a)
			wantGaps(t, r.source(a))
			limit, partial := 256<<10, 0
			if small {
				limit = 128 << 10
			}
			var dec event.Decoder
			for _, msg := range r.messages() {
				if len(msg.Data) > limit {
					t.Errorf("a record of %d bytes", len(msg.Data))
				}
				if err := dec.Reset(msg.Data); err != nil {
					t.Fatal(err)
				}
				if dec.Header.Partial {
					partial++
				}
			}
			if want := 10 * 200 * 260 / limit; partial < want {
				t.Errorf("%d partial records, want %d at least", partial, want)
			}
		})
	}
}

// One operation that is larger than a message can't be written at all unless it is
// divided.
func TestOneLargeEvent(t *testing.T) {
	r := newRigOn(t, newHub(t, 48<<10))
	a := r.engine("a")
	a.worker.Engine = "sglang"
	a.oracle = newOracle(a, model.SGLang)
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 4000)) // 64 KB of hashes
	a.publish(chunked(2, 4096, 1))
	named := wordy(3, 300)
	a.publish(named, with(named, in("CPU")), named)
	a.publish(with(prompt(4, 1, 2000), in("CPU"))) // parked
	a.publish(evict(1, "", 3))
	r.synced(a)
	e.kill()
	r.bridge().serve(a)
	a.publish(evict(1, "", 4), with(prompt(4, 0, 1), in("CPU")))
	r.synced(a)
}

// A server that takes less than one operation is of no use: that is said, and
// nothing else happens.
func TestAServerForSmallMessages(t *testing.T) {
	r := newRigOn(t, newHub(t, 32<<10))
	a := r.engine("a")
	r.bridge().Set(a.worker)
	r.await("the source has failed", func() bool {
		st := r.status(a)
		return st.State == event.StateFailed && strings.Contains(st.LastError, "max_payload")
	})
}

// A bridge that dies between the parts of a batch leaves half of it in the log.
// The next one takes that back, and writes the batch as a whole.
func TestDeathBetweenTheParts(t *testing.T) {
	for _, parts := range []int64{1, 2, 3} {
		t.Run(fmt.Sprint(parts), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a := r.engine("a")
			change := func(c *bridge.Config) { c.MaxMessage = 256 << 10 }
			e := r.bridge(change)
			e.serve(a)
			a.publish(prompt(1, 0, 3), prompt(2, 0, 3))
			r.synced(a)
			r.limitLog(r.logged() + parts)
			large := []model.Event{evict(1, "", 2), prompt(1, 0, 1), offload(2, "CPU", 0, 1, 2)}
			for i := range 20 {
				large = append(large, wordy(100+i, 200))
			}
			a.publish(large...)
			r.awaitFull(a)
			e.kill()
			if err := r.log.Read(r.ctx, r.js); err != nil {
				t.Fatal(err)
			}
			if !r.source(a).Partial {
				t.Fatal("the log does not end inside a batch")
			}
			r.limitLog(-1)
			r.bridge(change).serve(a)
			a.publish(evict(1, "", 0)) // of two copies
			r.synced(a)
			wantGaps(t, r.source(a))
			wantResets(t, r.source(a), "new")
			if r.source(a).Checkpoints == 0 {
				t.Error("no checkpoint after what was taken back")
			}
		})
	}
}

// A bridge writes checkpoints as the log grows, and when it stops, and a next one
// starts from there even if all before has been purged.
func TestCheckpoints(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	change := func(c *bridge.Config) { c.CheckpointBytes = 8 << 10 }
	e := r.bridge(change)
	e.serve(a)
	for round := range 3 {
		for i := range 200 {
			a.publish(prompt(i%20, round*10+i/20, 1))
			if i%3 == 0 {
				a.publish(evict(i%20, "", round*10+i/20))
			}
		}
		r.synced(a)
	}
	if r.source(a).Checkpoints == 0 {
		t.Error("no checkpoints")
	}
	e.stop()
	if err := r.log.Read(r.ctx, r.js); err != nil {
		t.Fatal(err)
	}
	// What is before the last checkpoint is needed by nobody.
	st, err := r.js.Stream(r.ctx, "KV")
	if err != nil {
		t.Fatal(err)
	}
	first := lastCheckpoint(t, r)
	if err := st.Purge(r.ctx, jetstream.WithPurgeSequence(first)); err != nil {
		t.Fatal(err)
	}
	before := r.source(a).Records
	e = r.bridge(change)
	e.serve(a)
	a.publish(evict(3, "", 0))
	r.synced(a)
	wantGaps(t, r.source(a))
	wantResets(t, r.source(a), "new")
	if n := r.source(a).Records - before; n > 2 {
		t.Errorf("%d records for one batch", n)
	}
}

// lastCheckpoint returns where the last checkpoint of the log begins.
func lastCheckpoint(t *testing.T, r *rig) uint64 {
	t.Helper()
	first := uint64(0)
	var dec event.Decoder
	for _, msg := range r.messages() {
		if err := dec.Reset(msg.Data); err != nil {
			t.Fatal(err)
		}
		if dec.Next() && dec.Op.Kind == event.OpCheckpoint && dec.Op.Chunk == 0 {
			first = msg.Sequence
		}
	}
	return first
}

// A checkpoint is written for whoever asks, and once for each time.
func TestACheckpointIsAskedFor(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 5))
	r.synced(a)
	for n := 1; n < 4; n++ {
		a.publish(prompt(2, n, 1))
		r.synced(a)
		before := r.source(a).LogSeq
		for range 5 {
			if err := r.nc.Publish(event.CheckpointSubject(a.worker.Key()), event.CheckpointRequest(before)); err != nil {
				t.Fatal(err)
			}
		}
		r.read("a checkpoint", func() bool { return r.source(a).Checkpoints == n })
		if lastCheckpoint(t, r) < before {
			t.Error("the checkpoint is older than asked for")
		}
	}
	for _, subject := range []string{"kvmesh.checkpoint.nobody", event.CheckpointSubject("m.default.a.9"), event.CheckpointSubject("x.y.z.0")} {
		if err := r.nc.Publish(subject, []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	a.publish(prompt(3, 0, 1))
	r.synced(a)
	if n := r.source(a).Checkpoints; n != 3 {
		t.Errorf("%d checkpoints, want 3", n)
	}
}

// A bridge whose log was lost writes its state anew.
func TestALostLog(t *testing.T) {
	for name, lose := range map[string]func(*rig, *actor) error{
		"the stream is gone": func(r *rig, a *actor) error { return r.js.DeleteStream(r.ctx, r.streamOf(a)) },
		"the stream is empty": func(r *rig, a *actor) error {
			st, err := r.js.Stream(r.ctx, r.streamOf(a))
			if err == nil {
				err = st.Purge(r.ctx)
			}
			return err
		},
		"the subject is empty": func(r *rig, a *actor) error {
			st, err := r.js.Stream(r.ctx, r.streamOf(a))
			if err == nil {
				err = st.Purge(r.ctx, jetstream.WithPurgeSubject(r.log.Log.Subject(a.worker.Source)))
			}
			return err
		},
	} {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprint(name, ", ", shards, " shards"), func(t *testing.T) {
				t.Parallel()
				loseLog(t, shards, lose)
			})
		}
	}
}

func loseLog(t *testing.T, shards int, lose func(*rig, *actor) error) {
	r := newRig(t)
	r.log.Log.Shards = shards
	a, b := r.engine("a"), r.engine("b")
	e := r.bridge()
	e.serve(a, b)
	a.publish(prompt(1, 0, 5))
	a.publish(offload(1, "CPU", 2), prompt(1, 0, 1), prompt(7, 1, 1))
	b.publish(prompt(1, 0, 1))
	r.synced(a, b)
	if err := lose(r, a); err != nil {
		t.Fatal(err)
	}
	a.publish(evict(1, "", 4))
	b.publish(evict(1, "", 0))
	r.forget()
	r.synced(a, b)
	wantGaps(t, r.source(a))
	if n := r.source(a).Checkpoints; n == 0 {
		t.Error("no checkpoint")
	}
	// All of it is there, also what only bridges read.
	e.kill()
	r.bridge().serve(a, b)
	a.publish(prompt(7, 0, 1), evict(1, "", 0))
	r.synced(a, b)
}

// streamOf returns the stream that has an actor's source.
func (r *rig) streamOf(a *actor) string { return r.log.Log.StreamOf(a.worker.Source) }

// forget forgets what was read of the log.
func (r *rig) forget() {
	log := r.log.Log
	r.log = feed.NewReader()
	r.log.After, r.log.Log = r.compare, log
}

// What the log can't take is held, within bounds, and then the bridge stops
// reading: nothing is lost that the engine's ring still has.
func TestNATSAway(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.HWM = 50 })
	e := r.bridge(func(c *bridge.Config) {
		c.MaxMessage, c.MaxBacklog = 256<<10, 256<<10
		c.PublishTimeout = 500 * time.Millisecond
	})
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	r.hub.Stop()
	// 50 KB each on the wire, and 16 KB each of hashes.
	padded := func(id int) model.Event {
		return with(prompt(id, 0, 1000), func(e *model.Event) { e.Wire.Also = []model.Field{{Name: "x", Value: make([]byte, 50<<10)}} })
	}
	for i := range 400 {
		a.publish(padded(i % 7))
		a.publish(evict(i%7, "", i%1000))
	}
	r.await("the engine drops", func() bool { return a.Dropped() > 0 && stable(a.Backlog) })
	r.hub.start()
	r.loose = true
	r.await("NATS is back", func() bool { return r.nc.IsConnected() })
	r.await("all that came is read", func() bool { return a.Backlog() == 0 })
	a.publish(prompt(100, 0, 1)) // which shows what is missing
	r.read("everything", func() bool { return a.covered(r.source(a)) })
	r.loose = false
	a.publish(prompt(100, 1, 1))
	r.synced(a)
	wantGaps(t, r.source(a))
	wantResets(t, r.source(a), "new")
}

// The server restarts again and again under load, and what was acknowledged is
// there afterwards, once and in order.
func TestNATSRestarts(t *testing.T) {
	r := newRig(t)
	a, b := r.engine("a"), r.engine("b")
	e := r.bridge(func(c *bridge.Config) { c.PublishTimeout = 500 * time.Millisecond; c.CheckpointBytes = 16 << 10 })
	e.serve(a, b)
	for round := range 5 {
		for i := range 60 {
			a.publish(prompt(round, i, 1))
			b.publish(prompt(round, i, 2), evict(round, "", i))
			if i == 20 {
				r.hub.Stop()
			}
			if i == 40 {
				r.hub.start()
			}
		}
		r.await("NATS is back", func() bool { return r.nc.IsConnected() })
		r.synced(a, b)
	}
	wantGaps(t, r.source(a))
	wantGaps(t, r.source(b))
	wantResets(t, r.source(a), "new")
}

// A worker that goes is retired, and one that comes back under its name begins
// anew.
func TestWorkersComeAndGo(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 2))
	r.synced(a)
	e.Remove(a.worker.Source)
	r.read("it is retired", func() bool { return r.source(a).Retired })
	ctx, cancel := context.WithTimeout(r.ctx, patience)
	defer cancel()
	if err := e.AwaitGone(ctx, a.worker.Source); err != nil {
		t.Fatal(err)
	}
	r.await("the engine has no subscriber", func() bool { return a.Subscribers() == 0 })
	e.serve(a)
	r.synced(a) // from the ring
	wantResets(t, r.source(a), "new", "new")
	// A worker that changes is read anew, and goes on where it was.
	a.worker.Labels = map[string]string{"zone": "1"}
	e.Set(a.worker)
	a.publish(prompt(1, 2, 2))
	r.synced(a)
	wantResets(t, r.source(a), "new", "new")
}
