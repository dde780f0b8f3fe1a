package indexer

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// shard is an exact index of one stream of the log. It is told of the workers whose
// sources are there, and knows nothing of other shards.
type shard struct {
	cfg     Config
	number  int
	stream  string
	at      string // for people: which shard it is; "" if it is the only one
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *slog.Logger
	metrics *metrics
	applied func(event.Source, event.Header, uint64)

	era     atomic.Pointer[era]   // what queries read
	end     atomic.Uint64         // last sequence of the stream, as last seen
	synced  atomic.Bool           // the catalog has been read
	refused atomic.Pointer[error] // why the stream that is there is not read

	// mu is the reader's, and of whoever reads or changes more than queries do.
	mu      sync.RWMutex
	sources map[event.Source]*source
	did     applied
	waiters map[*waiter]struct{}
	absent  map[event.Source]time.Time // workers without records, since when
	gone    map[event.Source]bool      // workers that were registered, and are no longer

	// The reader's own.
	dec     event.Decoder
	writers map[string]*source // sources by subject
	trace   tracing
	created time.Time // of the stream that the position is in
	target  uint64    // sequence to be reached before answers are true
}

func newShard(nc *nats.Conn, js jetstream.JetStream, cfg Config, number int, opts Options) *shard {
	x := &shard{
		cfg:     cfg,
		number:  number,
		stream:  cfg.Log.Name(number),
		nc:      nc,
		js:      js,
		log:     opts.Logger,
		applied: opts.Applied,
		trace:   newTracing(opts.Tracer),
		sources: map[event.Source]*source{},
		waiters: map[*waiter]struct{}{},
		absent:  map[event.Source]time.Time{},
		gone:    map[event.Source]bool{},
		writers: map[string]*source{},
	}
	if cfg.Log.Shards > 1 {
		x.at = fmt.Sprintf(" in shard %d", number)
		x.log = x.log.With("shard", number)
	}
	x.era.Store(newEra())
	return x
}

// -- readiness ----------------------------------------------------------------

// Ready returns nil if answers are true, and else what is missing. The error
// wraps ErrNotReady.
func (x *shard) Ready() error { return x.readyIn(x.now()) }

// readyIn is Ready for an era.
func (x *shard) readyIn(e *era) error {
	switch why := x.refused.Load(); {
	case why != nil:
		return fmt.Errorf("%w: %w", ErrNotReady, *why)
	case !x.synced.Load():
		return fmt.Errorf("%w: the catalog of workers has not been read yet", ErrNotReady)
	case !e.ready.Load():
		return fmt.Errorf("%w: at %d of %d records of the log%s", ErrNotReady, e.position.Load(), x.end.Load(), x.at)
	case !e.whole.Load():
		return fmt.Errorf("%w: the log has lost its beginning, and bridges are asked for what it had%s", ErrNotReady, x.at)
	}
	return nil
}

// Position returns the log sequence that answers are true for now.
func (x *shard) Position() uint64 { return x.now().position.Load() }

// Lag returns how many records of the log have not been read yet, as far as is
// known.
func (x *shard) Lag() uint64 {
	end, at := x.end.Load(), x.now().position.Load()
	if end <= at {
		return 0
	}
	return end - at
}

// waiter waits for a log sequence.
type waiter struct {
	seq  uint64
	done chan struct{}
}

// WaitFor waits until answers are true for a log sequence. It returns an error
// that wraps ErrBehind if ctx ends before.
func (x *shard) WaitFor(ctx context.Context, seq uint64) error {
	if x.now().position.Load() >= seq {
		return nil
	}
	w := &waiter{seq: seq, done: make(chan struct{})}
	x.mu.Lock()
	x.waiters[w] = struct{}{}
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		delete(x.waiters, w)
		x.mu.Unlock()
	}()
	if x.now().position.Load() >= seq {
		return nil
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: at %d, asked for %d%s", ErrBehind, x.now().position.Load(), seq, x.at)
	}
}

// advance moves the position, and wakes who waits for it. It is called by the
// reader with mu held.
func (x *shard) advance(seq uint64) {
	x.now().position.Store(seq)
	for w := range x.waiters {
		if w.seq <= seq {
			delete(x.waiters, w)
			close(w.done)
		}
	}
	if !x.now().ready.Load() && seq >= x.target {
		x.now().ready.Store(true)
		x.log.Info("caught up with the log", "log_seq", seq)
	}
}
