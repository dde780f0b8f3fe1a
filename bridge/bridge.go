// Package bridge is the edge of the mesh: it dials each engine once, puts the
// stream of its KV-cache events in order, has what is missing sent again, turns
// it into engine-neutral records, and writes those to the log, one subject per
// worker rank.
//
// A Bridge is told by Set which workers there are. Each gets a listener, which
// reads the engine, and a lane, which publishes. A Bridge keeps nothing on disk:
// it reads its own records back when it starts.
package bridge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// Bridge reads engines and writes the log.
type Bridge struct {
	cfg     Config
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *slog.Logger
	metrics *metrics
	trace   *tracing
	repairs chan struct{} // one token a replay request
	turns   turns         // of checkpoints
	memory  *residency.Memory
	batches sync.Pool // of *engine.Batch: what a batch is read into until it is applied

	owners      ownerSlots
	attachments Attachments // nil: they are on record nowhere

	mu     sync.Mutex
	slots  map[event.Source]*slot
	known  map[event.Source]bool      // sources that a worker is registered for, with whichever bridge
	strays map[event.Source]*listener // sources without a worker, by who writes them
	done   context.Context            // of Run; nil before
	tasks  sync.WaitGroup

	statusMu   sync.Mutex
	statusTold map[string]event.ListenerStatus // what was published last
	statusFull time.Time                       // when all of it was
}

// slot is the place of one worker rank: whatever becomes of the worker, at most
// one listener at a time reads it.
type slot struct {
	b      *Bridge
	source event.Source
	change chan struct{}
	gone   chan struct{} // closed when the slot is forgotten

	mu       sync.Mutex
	role     role
	worker   event.Worker   // of the roles that read
	listener *listener      // nil: none is up
	err      error          // why not
	strays   []event.Source // what the listener before wrote beside its own rank
}

// role is what a slot is there for.
type role uint8

const (
	idle     role = iota // nothing: it is to be forgotten
	standing             // reading, without writing: another bridge writes still
	writing              // reading and writing
	retiring             // writing that the worker is gone
)

// New returns a Bridge over a NATS connection. Run runs it.
func New(nc *nats.Conn, js jetstream.JetStream, cfg Config, opts Options) (*Bridge, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	opts = opts.withDefaults()
	b := &Bridge{
		cfg:     cfg,
		nc:      nc,
		js:      js,
		log:     opts.Logger,
		trace:   newTracing(opts.Tracer),
		repairs: make(chan struct{}, cfg.Repairs),
		memory:  residency.NewMemory(),
		batches: sync.Pool{New: func() any { return new(engine.Batch) }},

		owners:      ownerSlots{max: cfg.MaxSlots, held: map[string]event.Source{}},
		attachments: opts.Attachments,

		slots:  map[event.Source]*slot{},
		known:  map[event.Source]bool{},
		strays: map[event.Source]*listener{},
	}
	var err error
	if b.metrics, err = newMetrics(opts.Meter, b.blockMemory); err != nil {
		return nil, err
	}
	return b, nil
}

// Run reads engines until ctx ends. Then it writes what it has not written yet,
// for no longer than the stop timeout, and returns nil. It returns an error only
// if it can't begin.
func (b *Bridge) Run(ctx context.Context) error {
	defer b.metrics.close()
	requests, err := b.nc.Subscribe(event.CheckpointSubject(">"), b.checkpointAsked)
	if err != nil {
		return fmt.Errorf("bridge: subscribe to checkpoint requests: %w", err)
	}
	defer requests.Unsubscribe()
	statuses, err := b.nc.Subscribe(event.StatusRequestSubject, func(*nats.Msg) { b.publishStatus(true) })
	if err != nil {
		return fmt.Errorf("bridge: subscribe to status requests: %w", err)
	}
	defer statuses.Unsubscribe()
	names, err := b.nc.Subscribe(event.NamesSubject(">"), b.namesAsked)
	if err != nil {
		return fmt.Errorf("bridge: subscribe to requests for names: %w", err)
	}
	defer names.Unsubscribe()
	b.mu.Lock()
	b.done = ctx
	for _, s := range b.slots {
		b.start(s)
	}
	b.mu.Unlock()
	ticker := time.NewTicker(statusInterval)
	defer ticker.Stop()
	for {
		select {
		case now := <-ticker.C:
			b.publishStatus(false)
			for _, l := range b.listeners() {
				l.probeIfIdle(now)
			}
		case <-ctx.Done():
			b.tasks.Wait()
			b.publishStatus(false)
			return nil
		}
	}
}

// Set says that a worker is there, new or changed, and is this Bridge's to read
// and to write.
func (b *Bridge) Set(w event.Worker) {
	b.Known(w.Source)
	b.assign(w.Source, writing, w)
}

// Standby has a worker read whose source another bridge still writes: what the
// engine sends is held, within MaxHeld, until Set makes the source this Bridge's.
func (b *Bridge) Standby(w event.Worker) {
	b.Known(w.Source)
	b.assign(w.Source, standing, w)
}

// Remove says that a worker is gone. Its source is retired, once, whoever wrote
// it last; AwaitGone waits for that.
func (b *Bridge) Remove(source event.Source) {
	b.Unknown(source)
	b.assign(source, retiring, event.Worker{})
}

// Release stops reading and writing a source, which is not retired. What has
// been read is written before, and AwaitGone waits for that.
func (b *Bridge) Release(source event.Source) {
	b.mu.Lock()
	s := b.slots[source]
	b.mu.Unlock()
	if s != nil {
		s.set(idle, event.Worker{})
	}
}

// Known says that a worker is registered for a source, whichever bridge reads it:
// what batches that name its rank say elsewhere is not for it.
func (b *Bridge) Known(source event.Source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.known[source] = true
	if l := b.strays[source]; l != nil {
		l.cancel(errRankRegistered) // it starts again without this rank
	}
}

// Unknown is the opposite of Known.
func (b *Bridge) Unknown(source event.Source) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, source)
}

// assign gives a source a role, and a slot if it has none.
func (b *Bridge) assign(source event.Source, r role, w event.Worker) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.slots[source]
	if s == nil {
		s = &slot{b: b, source: source, change: make(chan struct{}, 1), gone: make(chan struct{})}
		b.slots[source] = s
		if b.done != nil {
			b.start(s)
		}
	}
	s.set(r, w)
}

func (b *Bridge) start(s *slot) {
	b.tasks.Add(1)
	go func() {
		defer b.tasks.Done()
		s.run(b.done)
	}()
}

// listeners returns those that are up.
func (b *Bridge) listeners() []*listener {
	b.mu.Lock()
	defer b.mu.Unlock()
	out := make([]*listener, 0, len(b.slots))
	for _, s := range b.slots {
		s.mu.Lock()
		if s.listener != nil {
			out = append(out, s.listener)
		}
		s.mu.Unlock()
	}
	return out
}

// blockMemory returns how many bytes the blocks of all sources take.
func (b *Bridge) blockMemory() (n int64) {
	for _, l := range b.listeners() {
		l.mu.Lock()
		for _, lane := range l.lanes {
			n += int64(lane.state.Bytes())
		}
		l.mu.Unlock()
	}
	return n
}

// checkpointAsked handles a request for a checkpoint of a source: somebody found
// a digest that differs, or a part of the log that only this source still
// needs.
func (b *Bridge) checkpointAsked(msg *nats.Msg) {
	key := strings.TrimPrefix(msg.Subject, event.CheckpointSubject(""))
	source, err := event.ParseKey(key)
	if err != nil {
		b.log.Warn("checkpoint request for nobody", "subject", msg.Subject)
		return
	}
	before := event.ParseCheckpointRequest(msg.Data)
	for _, l := range b.listeners() {
		if l.worker.Partition() == source.Partition() && l.worker.Instance == source.Instance {
			l.askCheckpoint(source, before)
		}
	}
}

// -- slots --------------------------------------------------------------------

func (s *slot) set(r role, w event.Worker) {
	s.mu.Lock()
	s.role, s.worker = r, w
	s.mu.Unlock()
	s.signal()
}

// activateAgain is when a listener in standby that could not read the log back
// tries again.
const activateAgain = 250 * time.Millisecond

// signal has the slot look at its role again.
func (s *slot) signal() {
	select {
	case s.change <- struct{}{}:
	default:
	}
}

func (s *slot) wanted() (role, event.Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.role, s.worker
}

func (s *slot) show(l *listener, err error) {
	s.mu.Lock()
	s.listener, s.err = l, err
	s.mu.Unlock()
}

// run does what the slot is there for, one role after the other.
func (s *slot) run(ctx context.Context) {
	backoff := time.Second
	for ctx.Err() == nil {
		r, w := s.wanted()
		began := time.Now()
		var err error
		switch r {
		case idle:
			if s.forgotten() {
				return
			}
		case retiring:
			err = s.retire(ctx)
		default:
			err = s.listen(ctx, r, w)
		}
		s.show(nil, err)
		if err == nil || ctx.Err() != nil {
			continue
		}
		if time.Since(began) > time.Minute {
			backoff = time.Second
		}
		s.b.log.Warn("source stopped", "instance", s.source.Instance, "rank", s.source.Rank, "error", err, "again_in", backoff)
		if errors.Is(err, ErrFenced) {
			s.yield(ctx, backoff)
		} else {
			s.pause(ctx, backoff)
		}
		backoff = min(2*backoff, 30*time.Second)
	}
	s.show(nil, nil)
	if r, _ := s.wanted(); r == retiring { // the last chance
		if err := s.retire(context.WithoutCancel(ctx)); err != nil {
			s.b.log.Warn("source not retired", "instance", s.source.Instance, "rank", s.source.Rank, "error", err)
		}
	}
	close(s.gone)
}

// pause waits, and tells whether nothing happened meanwhile.
func (s *slot) pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.change:
	case <-ctx.Done():
	}
	return false
}

// yield waits until whoever else writes the source has written nothing for so
// long.
func (s *slot) yield(ctx context.Context, quiet time.Duration) {
	before := uint64(0)
	for {
		asking, cancel := context.WithTimeout(ctx, s.b.cfg.PublishTimeout)
		last, err := s.b.lastMessage(asking, s.source)
		cancel()
		if err == nil && last.Sequence == before {
			return
		}
		if err == nil {
			before = last.Sequence
		}
		if !s.pause(ctx, quiet) {
			return
		}
	}
}

// forgotten takes a slot that is there for nothing away, unless it has got a role
// again.
func (s *slot) forgotten() bool {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.role != idle {
		return false
	}
	delete(s.b.slots, s.source)
	close(s.gone)
	return true
}

// listen runs a listener until it is no longer wanted, or fails.
func (s *slot) listen(ctx context.Context, r role, w event.Worker) error {
	if err := s.b.attach(ctx, &w); err != nil {
		return err
	}
	defer s.b.detach(&w)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if r == writing {
		if err := s.b.record(ctx, &w); err != nil {
			return err
		}
	}
	l := newListener(ctx, cancel, s.b, w)
	defer l.close()
	if err := l.open(r == standing); err != nil {
		cancel(err)
		l.tasks.Wait()
		return err
	}
	s.show(l, nil)
	for ctx.Err() == nil {
		select {
		case <-s.change:
			now, worker := s.wanted()
			switch {
			case now == r && worker.Equal(&w):
			case r == standing && now == writing && worker.Equal(&w):
				err := s.b.record(ctx, &w)
				if err == nil {
					err = l.activate()
				}
				if err == nil {
					r = writing
				} else if ctx.Err() == nil {
					l.failed(err)
					time.AfterFunc(activateAgain, s.signal)
				}
			default:
				l.retired.Store(now == retiring)
				cancel(errUnwanted)
			}
		case <-ctx.Done():
		}
	}
	l.tasks.Wait()
	s.mu.Lock()
	s.strays = l.straySources()
	s.mu.Unlock()
	if err := context.Cause(ctx); !errors.Is(err, errUnwanted) && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Why a listener is ended.
var (
	// errUnwanted: its worker is gone or changed.
	errUnwanted = errors.New("bridge: listener no longer wanted")
	// errRankRegistered: a rank that its engine's batches named got a worker
	// of its own.
	errRankRegistered = errors.New("bridge: a rank that batches named was registered")
)

// -- what listeners and lanes share -------------------------------------------

// mint returns a number for a new incarnation: greater than the one before, and
// than any that another bridge minted earlier, unless clocks are wrong.
func (b *Bridge) mint(before uint64) uint64 {
	return max(before+1, uint64(time.Now().UnixMilli()))
}

// headerRoom is for a record's headers: message id, expectations, trace.
const headerRoom = 2048

// minPayload is the least max_payload of a NATS server: one operation has to fit,
// with room for a header and a digest.
const minPayload = residency.MaxOp + headerRoom + 1024

// maxMessage returns how large a record may be.
func (b *Bridge) maxMessage() int { return min(b.cfg.MaxMessage, int(b.nc.MaxPayload())-headerRoom) }

// checkPayload tells whether the NATS server takes messages of the size that is
// needed. There has to be a connection, now or earlier.
func (b *Bridge) checkPayload() error {
	if n := b.nc.MaxPayload(); n < minPayload {
		return fmt.Errorf("bridge: the NATS server's max_payload is %d bytes, want %d at least", n, minPayload)
	}
	return nil
}

// enterRepair waits, and then for the right to make a replay request. It tells
// whether that was given before ctx ended.
func (b *Bridge) enterRepair(ctx context.Context, wait time.Duration) bool {
	if wait > 0 {
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return false
		}
	}
	select {
	case b.repairs <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (b *Bridge) leaveRepair() { <-b.repairs }

// ensureStream makes the stream that a source is in if it is not there.
func (b *Bridge) ensureStream(ctx context.Context, source event.Source) error {
	_, err := b.cfg.Log.Open(ctx, b.js, b.cfg.Log.Shard(source), b.cfg.Replicas)
	return err
}

// claim makes a listener the only one here to write a source that no worker is
// registered for. It tells whether that was possible.
func (b *Bridge) claim(source event.Source, l *listener) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.slots[source] != nil || b.known[source] {
		return false
	}
	if owner := b.strays[source]; owner != nil && owner != l {
		return false
	}
	b.strays[source] = l
	return true
}

// release gives up what a listener has claimed.
func (b *Bridge) release(l *listener) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for source, owner := range b.strays {
		if owner == l {
			delete(b.strays, source)
		}
	}
}
