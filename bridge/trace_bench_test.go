package bridge

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"go.opentelemetry.io/otel/metric/noop"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// benchLane returns a listener with its lane, which nothing publishes, and the
// payloads of n batches: stores of 8 blocks of 16 tokens, and their removals.
func benchLane(b *testing.B, tracer trace.TracerProvider, n int) (*listener, [][]byte) {
	b.Helper()
	meters, err := newMetrics(noop.NewMeterProvider(), func() int64 { return 0 })
	if err != nil {
		b.Fatal(err)
	}
	bridge := &Bridge{cfg: Default("bench"), log: slog.New(slog.DiscardHandler), metrics: meters, trace: newTracing(tracer)}
	w := event.Worker{Source: event.Source{Model: "m", Group: "default", Instance: "w"}, BlockSize: 16}
	ctx, cancel := context.WithCancelCause(context.Background())
	b.Cleanup(func() { cancel(nil) })
	l := newListener(ctx, cancel, bridge, w)
	l.home = newLane(l, w.Source, past{state: residency.New(residency.Config{BlockSize: 16, Clears: event.AllTiers, Limits: bridge.cfg.Residency})})
	l.lanes = []*lane{l.home}
	var payloads [][]byte
	for i := range n {
		e := model.Event{Op: model.Remove}
		for j := range 8 {
			e.Hashes = append(e.Hashes, model.Int(uint64(i/2*8+j)))
		}
		if i%2 == 0 {
			e.Op = model.Store
			for j := range 8 * 16 {
				e.Tokens = append(e.Tokens, int64(i*128+j))
			}
		}
		payload, err := mock.VLLMMap.Encode(mock.Batch{TS: 1, Events: []model.Event{e}, BlockSize: 16})
		if err != nil {
			b.Fatal(err)
		}
		payloads = append(payloads, payload)
	}
	return l, payloads
}

// BenchmarkBatch takes a batch from its arrival into a record: decoding, applying,
// and, every eighth time, taking eight into a record. It is what tracing costs of
// a batch, off and on. A span that is exported costs its encoding besides.
func BenchmarkBatch(b *testing.B) {
	provider := func(s sdktrace.Sampler) trace.TracerProvider {
		batcher := sdktrace.NewBatchSpanProcessor(tracetest.NewNoopExporter())
		b.Cleanup(func() { batcher.Shutdown(context.Background()) })
		return sdktrace.NewTracerProvider(sdktrace.WithSampler(s), sdktrace.WithSpanProcessor(batcher))
	}
	for _, c := range []struct {
		name   string
		tracer trace.TracerProvider
	}{
		{"off", nil},
		{"sampled=0", provider(sdktrace.NeverSample())},
		{"sampled=0.01", provider(sdktrace.TraceIDRatioBased(0.01))},
		{"sampled=1", provider(sdktrace.AlwaysSample())},
	} {
		b.Run(c.name, func(b *testing.B) {
			l, payloads := benchLane(b, c.tracer, 1024)
			var record []byte
			seq := uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				l.heard = time.Now()
				if !l.accept(seq, 1, payloads[seq%1024], l.heard) {
					b.Fatal("a batch was not accepted")
				}
				if seq++; seq%8 == 0 {
					var h event.Header
					record, h = l.home.take(record[:0], 1<<20)
					if span := l.b.trace.record(l.ctx, l.home, &h, len(record)); span != nil {
						l.home.log.span = span
						l.home.log.header(l.ctx)
						l.home.log.traced(nil)
					}
					l.home.flying = 0
				}
			}
		})
	}
}
