package indexer

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// BenchmarkRecord applies records of 8 blocks, which are stored and removed in
// turn: what tracing costs of a record, off, on for records that are not sampled,
// and for those that are.
func BenchmarkRecord(b *testing.B) {
	batcher := sdktrace.NewBatchSpanProcessor(tracetest.NewNoopExporter())
	b.Cleanup(func() { batcher.Shutdown(context.Background()) })
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(batcher))
	plain := nats.Header{"Nats-Msg-Id": {"an id"}}
	for _, c := range []struct {
		name    string
		tracer  trace.TracerProvider
		headers nats.Header
	}{
		{"off", nil, plain},
		{"unsampled", provider, plain},
		{"sampled", provider, nats.Header{"Nats-Msg-Id": {"an id"}, "traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			x, err := New(nil, nil, Default(), Options{Tracer: c.tracer})
			if err != nil {
				b.Fatal(err)
			}
			source := event.Source{Model: "m", Group: "default", Instance: "w"}
			locals := []uint64{1, 2, 3, 4, 5, 6, 7, 8}
			header := event.Header{Incarnation: 1, Batches: true}
			records := [][]byte{
				event.AppendRecord(nil, header, 1, event.AppendStored(nil, event.Device, "", event.Run{Root: true, Locals: locals}, nil)),
				event.AppendRecord(nil, header, 1, event.AppendCleared(nil, event.AllTiers, "")),
			}
			subject, seq := event.DefaultLog().Subject(source), uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				seq++
				if x.shards[0].trace.tracer == nil {
					x.shards[0].apply(seq, subject, records[seq%2])
				} else {
					x.shards[0].applyTraced(seq, subject, c.headers, records[seq%2])
				}
			}
		})
	}
}
