package bridge

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
)

// Options are what a Bridge takes from its surroundings. The zero Options log,
// measure and trace nothing.
type Options struct {
	Logger *slog.Logger
	Meter  metric.MeterProvider
	// Tracer makes spans of batches and records; nil: nothing is traced.
	Tracer trace.TracerProvider
	// Attachments is told which cache owners are attached; nil: nobody is.
	Attachments Attachments
}

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Meter == nil {
		o.Meter = noop.NewMeterProvider()
	}
	return o
}

// metrics count what all listeners of a Bridge do.
type metrics struct {
	batches     metric.Int64Counter
	duplicates  metric.Int64Counter
	dropped     metric.Int64Counter
	gaps        metric.Int64Counter
	lost        metric.Int64Counter
	restarts    metric.Int64Counter
	replays     metric.Int64Counter
	records     metric.Int64Counter
	bytes       metric.Int64Counter
	checkpoints metric.Int64Counter
	refused     metric.Int64Counter
	latency     metric.Float64Histogram
	gauges      metric.Registration
}

// newMetrics makes the metrics of a Bridge. memory returns how many bytes the blocks
// of all sources take.
func newMetrics(provider metric.MeterProvider, memory func() int64) (*metrics, error) {
	meter := provider.Meter("github.com/kvmesh/kvmesh/bridge")
	m := &metrics{}
	var errs []error
	counter := func(at *metric.Int64Counter, name, unit, help string) {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		if err == nil {
			c.Add(context.Background(), 0) // there from the beginning, so that its first increase is one
		}
		*at, errs = c, append(errs, err)
	}
	counter(&m.batches, "kvmesh.bridge.batches", "{batch}", "Engine batches applied.")
	counter(&m.duplicates, "kvmesh.bridge.duplicates", "{batch}", "Engine batches that had been applied before.")
	counter(&m.dropped, "kvmesh.bridge.dropped", "{item}", "Messages, events and parts of events that were dropped, by reason.")
	counter(&m.gaps, "kvmesh.bridge.gaps", "{gap}", "Ranges of engine batches lost for good, by reason.")
	counter(&m.lost, "kvmesh.bridge.batches_lost", "{batch}", "Engine batches lost for good, by reason.")
	counter(&m.restarts, "kvmesh.bridge.engine.restarts", "{restart}", "Engine restarts seen.")
	counter(&m.replays, "kvmesh.bridge.replay.requests", "{request}", "Replay requests made to engines.")
	counter(&m.records, "kvmesh.bridge.records", "{record}", "Records written to the log.")
	counter(&m.bytes, "kvmesh.bridge.records_size", "By", "Size of the records written to the log.")
	counter(&m.refused, "kvmesh.bridge.slots.refused", "{attempt}", "Attempts to read a worker whose cache owner found no slot free.")
	counter(&m.checkpoints, "kvmesh.bridge.checkpoints", "{checkpoint}", "Checkpoints written to the log.")
	var err error
	m.latency, err = meter.Float64Histogram("kvmesh.bridge.publish.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from the first attempt to publish a record to its acknowledgement."),
		metric.WithExplicitBucketBoundaries(.0001, .0002, .0005, .001, .002, .005, .01, .02, .05, .1, .5, 1, 5))
	errs = append(errs, err)
	blocks, err := meter.Int64ObservableGauge("kvmesh.bridge.blocks.memory", metric.WithUnit("By"), metric.WithDescription("Memory of the blocks that sources hold and of those that are remembered, spare room included."))
	errs = append(errs, err)
	m.gauges, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(blocks, memory())
		return nil
	}, blocks)
	return m, errors.Join(append(errs, err)...)
}

// close ends what is read of the Bridge's state.
func (m *metrics) close() {
	if m.gauges != nil {
		m.gauges.Unregister()
	}
}

func (m *metrics) drop(ctx context.Context, reason string, n uint64) {
	m.dropped.Add(ctx, int64(n), metric.WithAttributes(attribute.String("reason", reason)))
}

func (m *metrics) gap(ctx context.Context, reason string, batches uint64) {
	attrs := metric.WithAttributes(attribute.String("reason", reason))
	m.gaps.Add(ctx, 1, attrs)
	m.lost.Add(ctx, int64(min(batches, 1<<62)), attrs)
}

func (m *metrics) published(ctx context.Context, bytes int, took time.Duration) {
	m.records.Add(ctx, 1)
	m.bytes.Add(ctx, int64(bytes))
	m.latency.Record(ctx, took.Seconds())
}
