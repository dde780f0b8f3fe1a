package indexer_test

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
)

// writeTraced publishes the next record of a source with a traceparent.
func (w *world) writeTraced(of *feed.Writer, record []byte, traceparent string) uint64 {
	w.t.Helper()
	ack, err := w.js.PublishMsg(w.ctx, &nats.Msg{Subject: event.DefaultLog().Subject(of.Source), Data: record, Header: nats.Header{"traceparent": {traceparent}}})
	if err != nil {
		w.t.Fatal(err)
	}
	return ack.Sequence
}

// TestTracedRecords has records that name a sampled span, or none, one that is not
// sampled, nonsense, or that can't be read. Each sampled one has a span below that which
// it names, and who waits for its log sequence finds it as the last of the
// partition.
func TestTracedRecords(t *testing.T) {
	w := newWorld(t, 1)
	of := w.writer("a", 3)
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	t.Cleanup(func() { provider.Shutdown(t.Context()) })
	r := w.start(func(_ *indexer.Config, o *indexer.Options) { o.Tracer = provider })
	record := func(i int) []byte {
		of.Store(event.Device, w.locals[i], 0, 1)
		return of.Record()
	}
	const trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	r.reach(w.write(of, record(0)))
	if a, ok := r.Applied(partition); ok {
		t.Errorf("before anything is traced: %+v", a)
	}
	sampled := w.writeTraced(of, record(1), "00-"+trace+"-"+parent+"-01")
	r.reach(sampled)
	a, ok := r.Applied(partition)
	if !ok || a.LogSeq != sampled || a.Span.TraceID().String() != trace {
		t.Fatalf("%+v, %v, want log sequence %d of trace %s", a, ok, sampled, trace)
	}
	if other, ok := r.Applied(event.Partition{Model: "org/m", Group: "other"}); ok {
		t.Errorf("another partition has %+v", other)
	}
	for i, header := range []string{"00-" + trace + "-" + parent + "-00", "nonsense", "", "00-" + strings.Repeat("0", 32) + "-" + parent + "-01"} {
		r.reach(w.writeTraced(of, record(2+i), header))
	}
	w.writeTraced(of, []byte("no record"), "00-"+trace+"-"+parent+"-01")
	r.reach(w.write(of, record(7)))
	if last, ok := r.Applied(partition); !ok || last.LogSeq != a.LogSeq || !last.Span.Equal(a.Span) {
		t.Errorf("the last one that was traced is %+v, want %+v", last, a)
	}
	got := tracetest.SpanStubsFromReadOnlySpans(spans.Ended())
	if len(got) != 2 || got[0].SpanContext.SpanID() != a.Span.SpanID() || got[1].Status.Code != codes.Error {
		t.Fatalf("spans: %+v, want one of a record and one of what is none", got)
	}
	for _, s := range got {
		if s.Name != "apply record" || !s.Parent.IsRemote() || s.Parent.SpanID().String() != parent || s.Parent.TraceID().String() != trace {
			t.Errorf("%s, below %v", s.Name, s.Parent)
		}
	}
	want := attribute.NewSet(
		attribute.Int64("kvmesh.log_seq", int64(sampled)), attribute.Int64("kvmesh.lag", 0), attribute.Int64("kvmesh.blocks", 1),
		attribute.String("kvmesh.model", "org/m"), attribute.String("kvmesh.routing_group", "g"), attribute.String("kvmesh.instance", "a"), attribute.Int64("kvmesh.rank", 3),
	)
	have := attribute.NewSet(got[0].Attributes...)
	for _, kv := range want.ToSlice() {
		if v, ok := have.Value(kv.Key); !ok || v != kv.Value {
			t.Errorf("%s is %v, want %v", kv.Key, v.String(), kv.Value.String())
		}
	}
}
