package bridge_test

import (
	"fmt"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

const blockSize = 4

// actor is a mock engine that remembers what it has published, in each of its
// lives.
type actor struct {
	*mock.Engine
	r       *rig
	worker  event.Worker
	dialect mock.Dialect

	lives  []life
	prints map[uint64]place // fingerprint of a payload → what it is
	oracle *oracle
	lossy  bool // any batch may be lost for good
}

// life is one life of an engine.
type life struct {
	batches []act // by number
	first   uint64
}

// act is what one batch means.
type act struct {
	payload []byte
	events  []model.Event
	lossy   bool // the batch may be lost for good
}

type place struct {
	life int
	seq  uint64
}

// engine starts a mock engine and its worker. The zero Options are a vLLM with a
// replay socket.
func (r *rig) engine(instance string, change ...func(*mock.Options)) *actor {
	r.t.Helper()
	o := mock.Options{Dialect: mock.VLLMMap, BlockSize: blockSize, ReplayEndpoint: "tcp://127.0.0.1:0"}
	for _, f := range change {
		f(&o)
	}
	e, err := mock.NewEngine(o)
	if err == nil {
		err = e.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(e.Stop)
	a := &actor{Engine: e, r: r, dialect: o.Dialect, lives: make([]life, 1), prints: map[uint64]place{}}
	a.worker = event.Worker{
		Source:   event.Source{Model: "m", Group: "default", Instance: instance, Rank: o.Rank},
		Endpoint: e.Addr(), ReplayEndpoint: e.ReplayAddr(), Topic: o.Topic, Engine: "vllm", BlockSize: blockSize,
	}
	a.oracle = newOracle(a, model.VLLM)
	r.actors[a.worker.Source] = a
	return a
}

// publish publishes a batch.
func (a *actor) publish(events ...model.Event) uint64 { return a.deliver(mock.Sent, events...) }

// deliver publishes a batch with a delivery. No two batches of an actor have the
// same bytes.
func (a *actor) deliver(d mock.Delivery, events ...model.Event) uint64 {
	a.r.t.Helper()
	rank := a.worker.Rank
	ts := float64(1000*len(a.lives)) + float64(a.Next())/1024
	payload, err := a.dialect.Encode(mock.Batch{TS: ts, Events: events, Rank: &rank, BlockSize: blockSize})
	if err != nil {
		a.r.t.Fatal(err)
	}
	return a.raw(payload, d, events...)
}

// publishLocked is deliver beside replay sockets of the test's own, which read
// what was published.
func (a *actor) publishLocked(d mock.Delivery, events ...model.Event) uint64 {
	a.r.t.Helper()
	a.r.mu.Lock()
	defer a.r.mu.Unlock()
	return a.deliver(d, events...)
}

// raw publishes a payload that means the given events.
func (a *actor) raw(payload []byte, d mock.Delivery, events ...model.Event) uint64 {
	l := &a.lives[len(a.lives)-1]
	if len(l.batches) == 0 {
		l.first = a.Next()
	}
	for uint64(len(l.batches))+l.first < a.Next() { // numbers that were skipped
		l.batches = append(l.batches, act{lossy: true})
	}
	seq := a.PublishRaw(payload, d)
	l.batches = append(l.batches, act{payload: payload, events: events, lossy: a.lossy || d == mock.Gone})
	a.prints[hash.Bytes(payload)] = place{len(a.lives) - 1, seq}
	return seq
}

// mayLose says that batches of this life may be lost for good.
func (a *actor) mayLose(seqs ...uint64) {
	l := &a.lives[len(a.lives)-1]
	for _, seq := range seqs {
		l.batches[seq-l.first].lossy = true
	}
}

// restart is another life of the engine.
func (a *actor) restart() {
	a.r.t.Helper()
	a.Stop()
	a.reborn()
	a.start()
}

// reborn is another life of the engine behind the same connections.
func (a *actor) reborn() {
	a.NewLife()
	a.lives = append(a.lives, life{})
}

func (a *actor) start() {
	a.r.t.Helper()
	if err := a.Start(); err != nil {
		a.r.t.Fatal(err)
	}
}

// covered tells whether a source has all batches of the present life, or their
// loss on record.
func (a *actor) covered(s *feed.Source) bool {
	l := &a.lives[len(a.lives)-1]
	n := uint64(len(l.batches))
	if n == 0 {
		return true
	}
	at, ok := a.prints[s.Fingerprint]
	return ok && !s.Partial && s.Batches && at.life == len(a.lives)-1 && s.Last == l.first+n-1
}

// oracle follows the records of an actor's source, and tells what the source has
// to hold after each.
type oracle struct {
	a       *actor
	profile model.Profile
	onGap   bool // gaps empty the source
	state   *model.Source

	life        int    // whose batches are applied
	next        uint64 // batch of it
	incarnation uint64
	gaps        int // of those on record, how many are of earlier incarnations
	seen        int // gaps on record so far
}

func newOracle(a *actor, profile model.Profile) *oracle {
	return &oracle{a: a, profile: profile, state: model.New(blockSize, profile)}
}

func (o *oracle) resident() map[model.Tier]map[uint64]bool { return o.state.Resident() }

// check compares a source with the actor after a record.
func (o *oracle) check(s *feed.Source) error {
	if s.Incarnation != o.incarnation || s.Records == 1 {
		o.incarnation, o.life, o.next, o.gaps = s.Incarnation, -1, 0, o.seen
		if s.Records == 1 {
			o.gaps = 0
		}
		o.state.Restart()
	}
	o.seen = len(s.Gaps)
	switch {
	case s.Retired:
		o.state.Reset()
	case s.Partial:
		return nil // not a state that the engine ever had
	case s.Batches:
		at, ok := o.a.prints[s.Fingerprint]
		if !ok || at.seq != s.Last {
			return fmt.Errorf("%w: batch %d has a fingerprint of %+v", feed.ErrRule, s.Last, at)
		}
		if err := o.advance(at, s.Gaps[o.gaps:]); err != nil {
			return err
		}
	}
	if diff := s.Diff(o.resident()); diff != "" {
		return fmt.Errorf("%w: after batch %d of life %d: %s", feed.ErrRule, s.Last, o.life, diff)
	}
	return nil
}

// advance applies the actor's batches up to one, but for those that are lost.
func (o *oracle) advance(to place, gaps []feed.Gap) error {
	if o.life < 0 {
		o.life, o.next = to.life, o.a.lives[to.life].first
	}
	if to.life > o.life && o.a.lossy && to.seq >= o.next {
		o.life = to.life // the ring has lost what would have told the lives apart
	}
	if to.life != o.life {
		return fmt.Errorf("%w: batch %d is of life %d, in an incarnation of life %d", feed.ErrRule, to.seq, to.life, o.life)
	}
	l := &o.a.lives[o.life]
	for ; o.next <= to.seq; o.next++ {
		b := &l.batches[o.next-l.first]
		in := slices.IndexFunc(gaps, func(g feed.Gap) bool { return g.From <= o.next && o.next <= g.To })
		switch {
		case in >= 0 && !b.lossy:
			return fmt.Errorf("%w: batch %d of life %d is given up: %+v", feed.ErrRule, o.next, o.life, gaps[in])
		case in >= 0 && o.onGap:
			o.state.Reset()
		case in < 0:
			for _, e := range b.events {
				o.state.Apply(e)
			}
		}
	}
	return nil
}

// -- events -------------------------------------------------------------------

// prompt returns the store of n blocks of a prompt of its own, the first block
// of which is number at.
func prompt(id, at, n int) model.Event {
	e := model.Event{}
	for i := at; i < at+n; i++ {
		e.Hashes = append(e.Hashes, name(id, i))
		for j := range blockSize {
			e.Tokens = append(e.Tokens, int64(id*1_000_000+i*blockSize+j))
		}
	}
	if at > 0 {
		e.Parent = name(id, at-1)
	}
	return e
}

// name is the engine's hash of a block of a prompt.
func name(id, block int) model.Hash { return model.Int(uint64(id)<<32 | uint64(block) | 1<<63) }

// evict returns the removal of blocks of a prompt from a medium.
func evict(id int, medium string, blocks ...int) model.Event {
	e := model.Event{Op: model.Remove, Medium: medium}
	for _, i := range blocks {
		e.Hashes = append(e.Hashes, name(id, i))
	}
	return e
}

// offload returns a store of known blocks in a medium, without tokens.
func offload(id int, medium string, blocks ...int) model.Event {
	e := evict(id, medium, blocks...)
	e.Op, e.Tokens, e.BlockSize = model.Store, []int64{}, new(0)
	return e
}
