// Package indexer reads the log and answers, exactly, who holds how much of a
// prompt.
//
// An Indexer reads the stream whole, in order, from one goroutine, and keeps
// what every source holds in memory. Any number of goroutines may ask. Every
// answer says the log sequence that it is true for. An Indexer that starts, falls
// behind or finds that the log was cut or made anew recovers from the log alone.
package indexer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Errors of an Indexer.
var (
	// ErrUnknownPartition: no worker is registered for the model and routing
	// group.
	ErrUnknownPartition = errors.New("indexer: unknown partition")
	// ErrNotReady: the Indexer has not read the log up to where its answers
	// would be true. The text says how far it is.
	ErrNotReady = errors.New("indexer: not ready")
	// ErrBehind: the log sequence that a caller asked to wait for was not
	// reached in time.
	ErrBehind = errors.New("indexer: behind the log sequence asked for")
	// ErrElsewhere: the partition is not in this Indexer's share.
	ErrElsewhere = errors.New("indexer: the partition is served elsewhere")
)

// Config is how an Indexer works.
type Config struct {
	// Log is where the records are, and Replicas how many NATS servers keep it,
	// should the Indexer have to make it.
	Log      event.Log
	Replicas int
	// Grace is for how long a source whose worker is not registered is kept.
	// It is not answered with meanwhile.
	Grace time.Duration
	// CheckInterval is how often the Indexer compares its position with the
	// stream, and tidies up.
	CheckInterval time.Duration
	// Compact has the Indexer keep the log small: it asks for checkpoints of
	// the sources that still need the oldest records, and purges what nobody
	// needs. Any number of Indexers may do so.
	Compact bool
	// MinLog is the size of a log, in bytes, that is left alone.
	MinLog uint64
	// Share is the partitions that the Indexer keeps and answers for. Of others
	// it notes no more than which of their records are still needed.
	Share event.Share
}

// Default returns the configuration that fits most fleets.
func Default() Config {
	return Config{
		Log:           event.DefaultLog(),
		Replicas:      1,
		Grace:         time.Minute,
		CheckInterval: 2 * time.Second,
		Compact:       true,
		MinLog:        64 << 20,
	}
}

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	if err := c.Log.Validate(); err != nil {
		return fmt.Errorf("indexer: Log: %w", err)
	}
	switch {
	case c.Log.Shards > 1:
		return errors.New("indexer: a log of several shards is not read yet")
	case c.Replicas < 1:
		return fmt.Errorf("indexer: Replicas is %d, want at least 1", c.Replicas)
	case c.Grace <= 0:
		return fmt.Errorf("indexer: Grace is %v, want more than 0", c.Grace)
	case c.CheckInterval <= 0:
		return fmt.Errorf("indexer: CheckInterval is %v, want more than 0", c.CheckInterval)
	}
	return nil
}

// Options are what an Indexer takes from its surroundings. The zero Options log,
// measure and trace nothing.
type Options struct {
	Logger *slog.Logger
	Meter  metric.MeterProvider
	// Tracer makes spans of records that their bridge has traced; nil: nothing
	// is traced.
	Tracer trace.TracerProvider
	// Applied, if not nil, is called after each record of the share, when
	// queries see what it changed, from the goroutine of Run: the source, the
	// header of its record, and the log sequence.
	Applied func(s event.Source, h event.Header, logSeq uint64)
}

// Indexer is an exact index of the log.
type Indexer struct {
	cfg     Config
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *slog.Logger
	metrics *metrics
	applied func(event.Source, event.Header, uint64)

	era    atomic.Pointer[era] // what queries read
	end    atomic.Uint64       // last sequence of the stream, as last seen
	synced atomic.Bool         // the catalog has been read

	// mu is the reader's, and of whoever reads or changes more than queries do.
	mu      sync.RWMutex
	sources map[event.Source]*source
	did     applied
	waiters map[*waiter]struct{}
	absent  map[event.Source]time.Time // workers without records, since when
	gone    map[event.Source]bool      // workers that were registered, and are no longer

	// The reader's own.
	dec     event.Decoder
	others  map[string]*source // sources that are not in the share, by subject
	trace   tracing
	created time.Time // of the stream that the position is in
	target  uint64    // sequence to be reached before answers are true
}

// New returns an Indexer over a NATS connection. Run runs it.
func New(nc *nats.Conn, js jetstream.JetStream, cfg Config, opts Options) (*Indexer, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Meter == nil {
		opts.Meter = noop.NewMeterProvider()
	}
	x := &Indexer{
		cfg:     cfg,
		nc:      nc,
		js:      js,
		log:     opts.Logger,
		applied: opts.Applied,
		trace:   newTracing(opts.Tracer),
		sources: map[event.Source]*source{},
		waiters: map[*waiter]struct{}{},
		absent:  map[event.Source]time.Time{},
		gone:    map[event.Source]bool{},
		others:  map[string]*source{},
	}
	x.era.Store(newEra())
	m, err := newMetrics(opts.Meter, x)
	if err != nil {
		return nil, err
	}
	x.metrics = m
	return x, nil
}

// Run reads the log until ctx ends, and returns nil.
func (x *Indexer) Run(ctx context.Context) error {
	defer x.metrics.close()
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { x.tidyLoop(ctx) })
	tasks.Go(func() { x.gatherLoop(ctx) })
	x.readLoop(ctx)
	return nil
}

// -- readiness ----------------------------------------------------------------

// Ready returns nil if answers are true, and else what is missing. The error
// wraps ErrNotReady.
func (x *Indexer) Ready() error { return x.readyIn(x.now()) }

// readyIn is Ready for an era.
func (x *Indexer) readyIn(e *era) error {
	switch {
	case !x.synced.Load():
		return fmt.Errorf("%w: the catalog of workers has not been read yet", ErrNotReady)
	case !e.ready.Load():
		return fmt.Errorf("%w: at %d of %d records of the log", ErrNotReady, e.position.Load(), x.end.Load())
	case !e.whole.Load():
		return fmt.Errorf("%w: the log has lost its beginning, and bridges are asked for what it had", ErrNotReady)
	}
	return nil
}

// Position returns the log sequence that answers are true for now.
func (x *Indexer) Position() uint64 { return x.now().position.Load() }

// Lag returns how many records of the log have not been read yet, as far as is
// known.
func (x *Indexer) Lag() uint64 {
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
func (x *Indexer) WaitFor(ctx context.Context, seq uint64) error {
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
		return fmt.Errorf("%w: at %d, asked for %d", ErrBehind, x.now().position.Load(), seq)
	}
}

// advance moves the position, and wakes who waits for it. It is called by the
// reader with mu held.
func (x *Indexer) advance(seq uint64) {
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
