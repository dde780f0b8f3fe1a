package load

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nuid"
	"github.com/zeebo/xxh3"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Load is what is active on a worker rank.
type Load struct {
	// Prefill is prompt tokens that are still to be computed.
	Prefill int64
	// Blocks is KV blocks in use, in units of 1/Unit block. Blocks that
	// several requests have in common count for each of them.
	Blocks int64
	// Requests is requests under way.
	Requests int64
}

// Unit is one block in Load.Blocks.
const Unit = 1024

// Slot is a small number for a worker rank, by which its load is found. It is
// the rank's as long as somebody holds it.
type Slot int32

// Booking is what a reservation books, or what a selection would.
type Booking struct {
	// ID names the reservation among all of the group.
	ID string
	// Worker is where it is.
	Worker event.Source
	// PrefillTokens is how many tokens of the prompt the worker has to
	// compute, and Blocks how many blocks the whole prompt has.
	PrefillTokens, Blocks uint32
	// Tokens is the length of the prompt.
	Tokens uint32
	// Session is whose request it is; empty: nobody's.
	Session string
}

func (b *Booking) validate() error {
	if b.ID == "" || len(b.ID) > MaxID {
		return fmt.Errorf("%w: an id has 1 to %d bytes, not %d", ErrMessage, MaxID, len(b.ID))
	}
	for _, name := range []string{b.Worker.Model, b.Worker.Group, b.Worker.Instance, b.Session} {
		if len(name) > event.MaxName {
			return fmt.Errorf("%w: a name has %d bytes, at most %d are possible", ErrMessage, len(name), event.MaxName)
		}
	}
	if b.Blocks > MaxBlocks || b.PrefillTokens > MaxTokens || b.Tokens > MaxTokens {
		return fmt.Errorf("%w: %d blocks, %d tokens to prefill: at most %d and %d are possible", ErrMessage, b.Blocks, b.PrefillTokens, MaxBlocks, MaxTokens)
	}
	return nil
}

// Shared is the load that the replicas of a group share, as one of them sees it.
// Any number of goroutines may use it. Without a transport it is this replica's
// alone.
type Shared struct {
	cfg       Config
	transport Transport
	log       *slog.Logger
	metrics   *metrics

	joined atomic.Bool
	wake   chan struct{} // there is something to publish

	mu       sync.Mutex
	sums     []Load // by slot
	slots    map[event.Source]Slot
	keys     map[string]Slot
	workers  []slotState // by slot
	free     []Slot
	self     *peer
	peers    map[string]*peer
	order    []*peer // all peers, self first
	sessions map[string]*session
	clock    uint64          // of sessions, never behind one that was seen
	ended    map[string]bool // reservations that ended a moment ago
	endedOld map[string]bool // and a moment before
	turned   time.Time       // when ended became endedOld
	waiters  map[string]*waiter
	out      outbox
	pending  int           // own selections that wait
	began    time.Time     // when others were asked for first; zero: not yet
	applied  chan struct{} // closed when something of another replica was applied
	tellings uint64        // how often this replica's state was told

	flushing sync.Mutex // taken before mu: batches are published in order
}

// slotState is what a slot stands for, and how many hold it.
type slotState struct {
	source event.Source
	key    string
	refs   int
}

// peer is one replica of the group: this one, another one, or one that is gone.
type peer struct {
	id  string
	seq uint64 // of the last operation that was applied; of self: that was made
	// reservations that it owns, and marks that it made on those of others.
	// What waits to be booked is in reservations too, under another key.
	reservations map[string]*reservation
	marks        map[markKey]*mark
	digest       digest // of reservations

	heard time.Time // of the last message
	dead  bool
	sync  syncState
}

// reservation is a reservation, or a selection that waits to be booked.
type reservation struct {
	Booking
	key      string // in the map
	owner    *peer
	stamp    uint64 // number of the operation that made it
	slot     Slot
	waits    bool // a selection
	done     bool // the owner knows that the prefill is complete
	outputs  uint32
	decay    uint16 // what is left of its blocks, in 1/Unit
	deadline time.Time

	ended   bool // somebody freed it; the owner has not confirmed yet
	counted Load // what it adds to its slot
}

// markKey names what a mark is on: a reservation, or every one of an id whose
// owner the marker did not know.
type markKey struct {
	owner string
	id    string
	stamp uint64
}

// mark is what a replica did to reservations of another.
type mark struct {
	done, freed bool
	outputs     uint32
	decay       uint16
	deadline    time.Time
}

// digest is the number and the sum of what a replica owns: equal for equal
// states.
type digest struct{ count, sum uint64 }

func (d *digest) add(r *reservation, sign uint64) {
	d.count += sign
	d.sum += sign * event.Mix(xxh3.HashString(r.key), r.stamp)
}

// Options are what a Shared takes from its surroundings.
type Options struct {
	Logger *slog.Logger
	Meter  MeterProvider
}

// New returns a Shared. Run runs it.
func New(transport Transport, cfg Config, opts Options) (*Shared, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.ID == "" {
		cfg.ID = nuid.Next()
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Shared{
		cfg: cfg, transport: transport, log: opts.Logger,
		wake:  make(chan struct{}, 1),
		slots: map[event.Source]Slot{}, keys: map[string]Slot{}, peers: map[string]*peer{}, sessions: map[string]*session{},
		ended: map[string]bool{}, endedOld: map[string]bool{}, waiters: map[string]*waiter{},
		applied: make(chan struct{}),
	}
	s.self = newPeer(cfg.ID)
	s.order = []*peer{s.self}
	s.peers[cfg.ID] = s.self
	s.joined.Store(transport == nil)
	m, err := newMetrics(opts.Meter, s)
	if err != nil {
		return nil, err
	}
	s.metrics = m
	return s, nil
}

func newPeer(id string) *peer {
	return &peer{id: id, reservations: map[string]*reservation{}, marks: map[markKey]*mark{}}
}

// ID returns the name of this replica.
func (s *Shared) ID() string { return s.cfg.ID }

// Ready returns nil if the load of the other replicas is known, and else an
// error that wraps ErrNotJoined.
func (s *Shared) Ready() error {
	if s.joined.Load() {
		return nil
	}
	return ErrNotJoined
}

// -- slots --------------------------------------------------------------------

// Hold returns the slot of a worker rank, which stays its slot until Release.
func (s *Shared) Hold(w event.Source) Slot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hold(w)
}

// Release gives up what Hold returned.
func (s *Shared) Release(slot Slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.release(slot)
}

func (s *Shared) hold(w event.Source) Slot {
	slot, ok := s.slots[w]
	if !ok {
		if n := len(s.free); n > 0 {
			slot, s.free = s.free[n-1], s.free[:n-1]
		} else {
			slot = Slot(len(s.sums))
			s.sums, s.workers = append(s.sums, Load{}), append(s.workers, slotState{})
		}
		s.slots[w] = slot
		s.workers[slot] = slotState{source: w, key: w.Key()}
		s.keys[s.workers[slot].key] = slot
	}
	s.workers[slot].refs++
	return slot
}

func (s *Shared) release(slot Slot) {
	w := &s.workers[slot]
	if w.refs--; w.refs == 0 {
		delete(s.slots, w.source)
		delete(s.keys, w.key)
		*w = slotState{}
		s.free = append(s.free, slot)
	}
}

// Of returns the load of a worker rank.
func (s *Shared) Of(w event.Source) Load {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot, ok := s.slots[w]; ok {
		return s.sums[slot]
	}
	return Load{}
}

// Total returns the load of all workers together, and how many reservations and
// marks are remembered, on any replica's account. All of it is zero if nothing is
// active.
func (s *Shared) Total() (sum Load, reservations, marks int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.sums {
		sum.Prefill += l.Prefill
		sum.Blocks += l.Blocks
		sum.Requests += l.Requests
	}
	for _, p := range s.order {
		for _, r := range p.reservations {
			if !r.waits {
				reservations++
			}
		}
		marks += len(p.marks)
	}
	return sum, reservations, marks
}

// View calls f with the loads of all slots, which do not change while it runs.
// f must not keep them, and must not call the Shared.
func (s *Shared) View(f func(loads []Load)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.sums)
}

// -- what reservations count ----------------------------------------------------

// put takes a reservation into its owner's, and counts it.
func (s *Shared) put(r *reservation) {
	r.slot = s.hold(r.Worker)
	r.owner.reservations[r.key] = r
	r.owner.digest.add(r, 1)
	if r.waits && r.owner == s.self {
		s.pending++
	}
	delete(s.ended, r.key)
	delete(s.endedOld, r.key)
	s.weigh(r)
	if w := s.waiters[r.key]; w != nil {
		delete(s.waiters, r.key)
		close(w.done)
	}
}

// drop forgets a reservation, and all marks on it.
func (s *Shared) drop(r *reservation) {
	s.count(r, Load{})
	s.release(r.slot)
	delete(r.owner.reservations, r.key)
	r.owner.digest.add(r, ^uint64(0))
	if r.waits && r.owner == s.self {
		s.pending--
	}
	for _, p := range s.order {
		if len(p.marks) > 0 {
			delete(p.marks, markKey{r.owner.id, r.key, r.stamp})
			delete(p.marks, markKey{id: r.key})
		}
	}
	s.remember(r.key)
}

// remember notes that a reservation ended, for two turns of EarlyExpiry at most,
// so that a second free of it is told from one that comes early.
func (s *Shared) remember(key string) {
	const most = 1 << 16
	if now := time.Now(); len(s.ended) >= most || now.Sub(s.turned) > s.cfg.EarlyExpiry {
		s.ended, s.endedOld, s.turned = map[string]bool{}, s.ended, now
	}
	s.ended[key] = true
}

func (s *Shared) over(key string) bool { return s.ended[key] || s.endedOld[key] }

// weigh counts a reservation as it is now, with all marks on it. A reservation
// of this replica that somebody freed is dropped.
func (s *Shared) weigh(r *reservation) {
	done, outputs, decay, freed := r.done, r.outputs, r.decay, false
	for _, p := range s.order {
		if len(p.marks) == 0 {
			continue
		}
		for _, key := range [2]markKey{{r.owner.id, r.key, r.stamp}, {id: r.key}} {
			if m := p.marks[key]; m != nil {
				done, freed = done || m.done, freed || m.freed
				outputs += m.outputs
				decay = min(decay, m.decay)
			}
		}
	}
	r.ended = freed
	switch {
	case freed && r.owner == s.self:
		s.drop(r)
		s.tellFree(r)
	case freed || r.waits:
		s.count(r, Load{})
	default:
		l := Load{Requests: 1, Blocks: (int64(r.Blocks) + int64(outputs)) * int64(decay)}
		if !done {
			l.Prefill = int64(r.PrefillTokens)
		}
		s.count(r, l)
	}
}

func (s *Shared) count(r *reservation, l Load) {
	sum := &s.sums[r.slot]
	sum.Prefill += l.Prefill - r.counted.Prefill
	sum.Blocks += l.Blocks - r.counted.Blocks
	sum.Requests += l.Requests - r.counted.Requests
	r.counted = l
}

// active returns the reservation under a key that is not over yet.
func (s *Shared) active(key string) *reservation {
	for _, p := range s.order {
		if r := p.reservations[key]; r != nil && !r.ended {
			return r
		}
	}
	return nil
}

// early tells whether an unknown id was freed a moment ago.
func (s *Shared) early(key string) bool {
	for _, p := range s.order {
		if m := p.marks[markKey{id: key}]; m != nil && m.freed {
			return true
		}
	}
	return false
}

// waiter waits for a reservation to be told of.
type waiter struct {
	done chan struct{}
	n    int
}

// find returns the active reservation under a key, and waits a little for one
// that is not known. It returns with mu held.
func (s *Shared) find(ctx context.Context, key string) *reservation {
	s.mu.Lock()
	r := s.active(key)
	if r != nil || s.transport == nil || s.cfg.Settle <= 0 {
		return r
	}
	w := s.waiters[key]
	if w == nil {
		w = &waiter{done: make(chan struct{})}
		s.waiters[key] = w
	}
	w.n++
	s.mu.Unlock()
	timer := time.NewTimer(s.cfg.Settle)
	defer timer.Stop()
	select {
	case <-w.done:
	case <-timer.C:
	case <-ctx.Done():
	}
	s.mu.Lock()
	if w.n--; w.n == 0 && s.waiters[key] == w {
		delete(s.waiters, key)
	}
	return s.active(key)
}
