package selection

import (
	"errors"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// tracedHoldings is an Index that knows the last record that was traced, or one
// that came after the answer.
type tracedHoldings struct {
	holdings
	applied indexer.Applied
}

func (h tracedHoldings) Lag() uint64 { return 3 }

func (h tracedHoldings) Applied(event.Partition) (indexer.Applied, bool) { return h.applied, true }

// TestSelectionsAreTraced selects below a span: there is one that says what was
// chosen and why, and has a link to the record that the overlaps are from, unless
// that came after them.
func TestSelectionsAreTraced(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	t.Cleanup(func() { provider.Shutdown(t.Context()) })
	_, record := provider.Tracer("test").Start(t.Context(), "apply record")
	for _, c := range []struct {
		name   string
		logSeq uint64
		links  int
	}{{"before", 7, 1}, {"after", 8, 0}} {
		index := tracedHoldings{holdings{source(1): {4, 6, 6, 6}}, indexer.Applied{Span: record.SpanContext(), LogSeq: c.logSeq}}
		s := fleet(t, 3, index, Default(), Options{Tracer: provider})
		ctx, root := provider.Tracer("test").Start(t.Context(), "the router's")
		spans.Reset()
		out, err := s.SelectAndReserve(ctx, &Request{Partition: part, Locals: prompt(8)})
		if err != nil {
			t.Fatal(err)
		}
		ended := spans.Ended()
		if len(ended) != 1 || ended[0].Name() != "select worker" || ended[0].Parent().SpanID() != root.SpanContext().SpanID() {
			t.Fatalf("%s: spans %v", c.name, ended)
		}
		have := attribute.NewSet(ended[0].Attributes()...)
		for _, want := range []attribute.KeyValue{
			attribute.String("kvmesh.model", "m"), attribute.String("kvmesh.routing_group", "default"), attribute.String("kvmesh.instance", "w1"),
			attribute.Int64("kvmesh.rank", 0), attribute.Int("kvmesh.blocks", 8), attribute.Int("kvmesh.matched", 6), attribute.Int("kvmesh.lag", 3),
			attribute.Int("kvmesh.log_seq", 7), attribute.Bool("kvmesh.booked", true), attribute.Bool("kvmesh.held_back", false), attribute.Float64("kvmesh.cost", out.Cost),
		} {
			if v, _ := have.Value(want.Key); v != want.Value {
				t.Errorf("%s: %s is %v, want %v", c.name, want.Key, v.String(), want.Value.String())
			}
		}
		if links := ended[0].Links(); len(links) != c.links || c.links > 0 && !links[0].SpanContext.Equal(record.SpanContext()) {
			t.Errorf("%s: links %v", c.name, links)
		}
	}
	s := fleet(t, 1, holdings{}, Default(), Options{Tracer: provider})
	spans.Reset()
	if _, err := s.Select(t.Context(), &Request{Partition: part, Pinned: "nobody"}); !errors.Is(err, ErrNoWorkers) {
		t.Fatal(err)
	}
	if ended := spans.Ended(); len(ended) != 1 || ended[0].Status().Code != codes.Error {
		t.Errorf("a selection that fails: %v", ended)
	}
}

// BenchmarkSelectTraced is what tracing costs of a selection among 64 workers, off,
// on and not sampled, and sampled.
func BenchmarkSelectTraced(b *testing.B) {
	provider := func(s sdktrace.Sampler) trace.TracerProvider {
		batcher := sdktrace.NewBatchSpanProcessor(tracetest.NewNoopExporter())
		b.Cleanup(func() { batcher.Shutdown(b.Context()) })
		return sdktrace.NewTracerProvider(sdktrace.WithSampler(s), sdktrace.WithSpanProcessor(batcher))
	}
	for _, c := range []struct {
		name   string
		tracer trace.TracerProvider
	}{{"off", nil}, {"sampled=0", provider(sdktrace.NeverSample())}, {"sampled=1", provider(sdktrace.AlwaysSample())}} {
		b.Run(c.name, func(b *testing.B) {
			s := fleet(b, 64, holdings{}, Default(), Options{Tracer: c.tracer})
			r := &Request{Partition: part, Locals: prompt(64)}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Select(b.Context(), r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
