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

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
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
)

// Config is how an Indexer works.
type Config struct {
	// Stream is the JetStream stream of the log, and Replicas how many NATS
	// servers keep it, should the Indexer have to make it.
	Stream   string
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
}

// Default returns the configuration that fits most fleets.
func Default() Config {
	return Config{
		Stream:        "KV",
		Replicas:      1,
		Grace:         time.Minute,
		CheckInterval: 2 * time.Second,
		Compact:       true,
		MinLog:        64 << 20,
	}
}

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	switch {
	case c.Stream == "":
		return errors.New("indexer: Stream is empty")
	case c.Replicas < 1:
		return fmt.Errorf("indexer: Replicas is %d, want at least 1", c.Replicas)
	case c.Grace <= 0:
		return fmt.Errorf("indexer: Grace is %v, want more than 0", c.Grace)
	case c.CheckInterval <= 0:
		return fmt.Errorf("indexer: CheckInterval is %v, want more than 0", c.CheckInterval)
	}
	return nil
}

// Options are what an Indexer takes from its surroundings. The zero Options log
// nothing and measure nothing.
type Options struct {
	Logger *slog.Logger
	Meter  metric.MeterProvider
	// Applied, if not nil, is called after each record, when queries see what
	// it changed, from the goroutine of Run: the source, the header of its
	// record, and the log sequence.
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

	position atomic.Uint64 // log sequence that all answers are true for
	end      atomic.Uint64 // last sequence of the stream, as last seen
	ready    atomic.Bool   // the position has reached target
	synced   atomic.Bool   // the catalog has been read

	mu         sync.RWMutex
	partitions map[event.Partition]*partition
	sources    map[event.Source]*source
	waiters    map[*waiter]struct{}
	absent     map[event.Source]time.Time // workers without records, since when

	// The reader's own.
	dec     event.Decoder
	created time.Time // of the stream that the position is in
	target  uint64    // sequence to be reached before answers are true
	holder  prefix.Holder
}

// partition is one index. Its fields but the index are guarded by Indexer.mu.
type partition struct {
	name      event.Partition
	blockSize uint32 // 0: no worker has said
	index     *prefix.Index
	instances map[string]*instance
	holders   map[prefix.Holder]*source
}

// instance is an engine of a partition, as the catalog knows it.
type instance struct {
	workers map[uint32]event.Worker // by rank
	gone    map[uint32]bool         // ranks that were registered, and are no longer
}

// source is what the log says of one source. Guarded by Indexer.mu; only the
// reader writes it.
type source struct {
	name   event.Source
	part   *partition
	holder prefix.Holder
	keep   uint64 // log sequence of the oldest record that the state needs

	incarnation uint64
	engineSeq   uint64
	batches     bool // engineSeq is one
	logSeq      uint64
	gaps, lost  uint64
	digests     event.Digests
	diverged    bool
	asked       time.Time // when a checkpoint was asked for last

	orphan  time.Time // since when no worker is registered for it
	ignored bool      // it was dropped for that
	retired bool      // its last record says that the worker is gone

	staged [][]byte // chunks of a checkpoint that is not complete yet
	first  uint64   // log sequence of the first of them
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
		cfg:        cfg,
		nc:         nc,
		js:         js,
		log:        opts.Logger,
		applied:    opts.Applied,
		partitions: map[event.Partition]*partition{},
		sources:    map[event.Source]*source{},
		waiters:    map[*waiter]struct{}{},
		absent:     map[event.Source]time.Time{},
	}
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
	x.readLoop(ctx)
	return nil
}

// -- the catalog --------------------------------------------------------------

// Registered says that a worker is in the catalog, new or changed.
func (x *Indexer) Registered(w event.Worker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.partition(w.Partition())
	p.blockSize = w.BlockSize
	in := p.instances[w.Instance]
	if in == nil {
		in = &instance{workers: map[uint32]event.Worker{}, gone: map[uint32]bool{}}
		p.instances[w.Instance] = in
	}
	in.workers[w.Rank] = w
	delete(in.gone, w.Rank)
}

// Unregistered says that a worker is not in the catalog any more. Its source is
// not answered with from here on.
func (x *Indexer) Unregistered(s event.Source) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.partitions[s.Partition()]
	if p == nil || p.instances[s.Instance] == nil {
		return
	}
	in := p.instances[s.Instance]
	delete(in.workers, s.Rank)
	in.gone[s.Rank] = true
	if len(in.workers) == 0 {
		delete(p.instances, s.Instance)
	}
	x.dropIfEmpty(p)
}

// CatalogRead says that all workers of the catalog have been told of.
func (x *Indexer) CatalogRead() { x.synced.Store(true) }

// partition returns a partition, new or not.
func (x *Indexer) partition(name event.Partition) *partition {
	p := x.partitions[name]
	if p == nil {
		p = &partition{name: name, index: prefix.New(), instances: map[string]*instance{}, holders: map[prefix.Holder]*source{}}
		x.partitions[name] = p
	}
	return p
}

// dropIfEmpty drops a partition that has neither workers nor sources.
func (x *Indexer) dropIfEmpty(p *partition) {
	if len(p.instances) == 0 && len(p.holders) == 0 {
		delete(x.partitions, p.name)
	}
}

// answered tells whether a source is one to answer with: its instance has a
// worker, and its own rank was not unregistered.
func (s *source) answered() bool {
	in := s.part.instances[s.name.Instance]
	return in != nil && !in.gone[s.name.Rank] && !s.diverged && !s.ignored
}

// -- readiness ----------------------------------------------------------------

// Ready returns nil if answers are true, and else what is missing. The error
// wraps ErrNotReady.
func (x *Indexer) Ready() error {
	switch {
	case !x.synced.Load():
		return fmt.Errorf("%w: the catalog of workers has not been read yet", ErrNotReady)
	case !x.ready.Load():
		return fmt.Errorf("%w: at %d of %d records of the log", ErrNotReady, x.position.Load(), x.end.Load())
	}
	return nil
}

// Position returns the log sequence that answers are true for now.
func (x *Indexer) Position() uint64 { return x.position.Load() }

// Lag returns how many records of the log have not been read yet, as far as is
// known.
func (x *Indexer) Lag() uint64 {
	end, at := x.end.Load(), x.position.Load()
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
	if x.position.Load() >= seq {
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
	if x.position.Load() >= seq {
		return nil
	}
	select {
	case <-w.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: at %d, asked for %d", ErrBehind, x.position.Load(), seq)
	}
}

// advance moves the position, and wakes who waits for it. It is called by the
// reader with mu held.
func (x *Indexer) advance(seq uint64) {
	x.position.Store(seq)
	for w := range x.waiters {
		if w.seq <= seq {
			delete(x.waiters, w)
			close(w.done)
		}
	}
	if !x.ready.Load() && seq >= x.target {
		x.ready.Store(true)
		x.log.Info("caught up with the log", "log_seq", seq)
	}
}
