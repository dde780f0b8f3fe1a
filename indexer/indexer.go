// Package indexer reads the log and answers, exactly, who holds how much of a
// prompt.
//
// An Indexer reads the log whole, in order, each of its streams from one goroutine,
// and keeps what every source holds in memory. Any number of goroutines may ask. Every
// answer says the log sequence that it is true for. An Indexer that starts, falls
// behind or finds that the log was cut or made anew recovers from the log alone.
package indexer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
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
	// ErrPosition: what a caller asks to wait for is no position of this log. The
	// text says what would be one.
	ErrPosition = errors.New("indexer: not a position of the log")
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
	// MinLog is the size of a stream, in bytes, that is left alone.
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
	// queries see what it changed, from the goroutine that reads its stream: the
	// source, the header of its record, and the log sequence.
	Applied func(s event.Source, h event.Header, logSeq uint64)
}

// Indexer is an exact index of the log: a reader for each of its streams. Each source
// is in one of those, so what a reader answers is exact for its sources, and
// all of them together for all.
type Indexer struct {
	cfg     Config
	shards  []*shard
	metrics *metrics
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
	x := &Indexer{cfg: cfg}
	for i := range cfg.Log.Shards {
		x.shards = append(x.shards, newShard(nc, js, cfg, i, opts))
	}
	m, err := newMetrics(opts.Meter, x)
	if err != nil {
		return nil, err
	}
	x.metrics = m
	for _, s := range x.shards {
		s.metrics = m
	}
	return x, nil
}

// Run reads the log until ctx ends, and returns nil.
func (x *Indexer) Run(ctx context.Context) error {
	defer x.metrics.close()
	var tasks sync.WaitGroup
	defer tasks.Wait()
	for _, s := range x.shards {
		tasks.Go(func() { s.tidyLoop(ctx) })
		tasks.Go(func() { s.gatherLoop(ctx) })
		tasks.Go(func() { s.readLoop(ctx) })
	}
	return nil
}

// Ready returns nil if answers are true, and else what is missing. The error
// wraps ErrNotReady.
func (x *Indexer) Ready() error {
	for _, s := range x.shards {
		if err := s.Ready(); err != nil {
			return err
		}
	}
	return nil
}

// Position returns what answers are true for now.
func (x *Indexer) Position() event.Position {
	seqs := make([]uint64, len(x.shards))
	for i, s := range x.shards {
		seqs[i] = s.Position()
	}
	return event.PositionOf(seqs)
}

// Lag returns how many records of the log have not been read yet, as far as is
// known.
func (x *Indexer) Lag() (n uint64) {
	for _, s := range x.shards {
		n += s.Lag()
	}
	return n
}

// Reached tells whether answers are true for a position, or a later one. Errors wrap
// ErrPosition.
func (x *Indexer) Reached(p event.Position) (bool, error) {
	if err := p.Of(len(x.shards)); err != nil {
		return false, fmt.Errorf("%w: %w", ErrPosition, err)
	}
	if p.Zero() {
		return true, nil
	}
	for i, s := range x.shards {
		if s.Position() < p.Seq(i) {
			return false, nil
		}
	}
	return true, nil
}

// WaitFor waits until answers are true for a position. It returns an error that
// wraps ErrBehind if ctx ends before, or one that wraps ErrPosition.
func (x *Indexer) WaitFor(ctx context.Context, p event.Position) error {
	if err := p.Of(len(x.shards)); err != nil {
		return fmt.Errorf("%w: %w", ErrPosition, err)
	}
	for i, s := range x.shards {
		if err := s.WaitFor(ctx, p.Seq(i)); err != nil {
			return err
		}
	}
	return nil
}

// -- the catalog --------------------------------------------------------------

// of returns the shard that has a source.
func (x *Indexer) of(s event.Source) *shard { return x.shards[x.cfg.Log.Shard(s)] }

// Registered says that a worker is in the catalog, new or changed.
func (x *Indexer) Registered(w event.Worker) { x.of(w.Source).Registered(w) }

// Unregistered says that a worker is not in the catalog any more. Its source is
// not answered with from here on.
func (x *Indexer) Unregistered(s event.Source) { x.of(s).Unregistered(s) }

// CatalogRead says that all workers of the catalog have been told of.
func (x *Indexer) CatalogRead() {
	for _, s := range x.shards {
		s.CatalogRead()
	}
}
