package bridge_test

import (
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// traced has the rig's bridges make spans, and returns where they are to be found.
func (r *rig) traced(sampler sdktrace.Sampler) *tracetest.SpanRecorder {
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans), sdktrace.WithSampler(sampler))
	r.t.Cleanup(func() { provider.Shutdown(r.t.Context()) })
	r.tracer = provider
	return spans
}

// named returns the spans of a name that have ended.
func named(spans *tracetest.SpanRecorder, name string) tracetest.SpanStubs {
	return slices.DeleteFunc(tracetest.SpanStubsFromReadOnlySpans(spans.Ended()), func(s tracetest.SpanStub) bool { return s.Name != name })
}

func attributeOf(s *tracetest.SpanStub, key attribute.Key) attribute.Value {
	for _, a := range s.Attributes {
		if a.Key == key {
			return a.Value
		}
	}
	return attribute.Value{}
}

// message returns the message at a log sequence.
func (r *rig) message(seq uint64) *jetstream.RawStreamMsg {
	r.t.Helper()
	stream, err := r.js.Stream(r.ctx, "KV")
	if err != nil {
		r.t.Fatal(err)
	}
	msg, err := stream.GetMsg(r.ctx, seq)
	if err != nil {
		r.t.Fatal(err)
	}
	return msg
}

// TestBatchesAreTraced has batches come one by one, joined while NATS is down, by
// replay, and broken: each has one span, and is parent or link of exactly one
// record's, which the record names.
func TestBatchesAreTraced(t *testing.T) {
	r := newRig(t)
	spans := r.traced(sdktrace.AlwaysSample())
	a := r.engine("w")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 2))
	r.synced(a)
	r.hub.Stop()
	for i := range 20 {
		a.publish(prompt(2+i, 0, 3))
	}
	a.deliver(mock.Lost, prompt(50, 0, 1)) // the replay has it
	a.publish(prompt(51, 0, 1))
	a.raw([]byte{0xc1}, mock.Sent)
	a.mayLose(23)
	a.publish(prompt(52, 0, 1))
	r.await("all batches wait", func() bool { return e.count("kvmesh.bridge.batches") == 25 })
	r.await("an attempt has failed", func() bool {
		return slices.ContainsFunc(spans.Started(), func(s sdktrace.ReadWriteSpan) bool { return len(s.Events()) > 0 })
	})
	r.hub.start()
	r.await("NATS is there", r.nc.IsConnected)
	r.synced(a)
	e.stop() // the last spans have ended

	batches := named(spans, "receive batch")
	if len(batches) != 25 {
		t.Fatalf("%d batches have spans, want 25", len(batches))
	}
	want := map[trace.SpanID]int64{}
	replayed := map[int64]bool{}
	for i := range batches {
		b := &batches[i]
		seq := attributeOf(b, "kvmesh.batch.seq").AsInt64()
		want[b.SpanContext.SpanID()] = seq
		replayed[seq] = attributeOf(b, "kvmesh.batch.replayed").AsBool()
		if b.Parent.IsValid() || b.SpanKind != trace.SpanKindConsumer || attributeOf(b, "kvmesh.instance").AsString() != "w" || attributeOf(b, "kvmesh.model").AsString() != "m" {
			t.Errorf("batch %d: %+v", seq, b)
		}
		if broken := b.Status.Code == codes.Error; broken != (seq == 23) {
			t.Errorf("batch %d: status %v", seq, b.Status)
		}
	}
	if !replayed[21] || replayed[1] {
		t.Errorf("replayed batches: %v, want 21 among them, and not 1", replayed)
	}
	decodes := named(spans, "decode batch")
	if len(decodes) != len(batches) {
		t.Errorf("%d batches were decoded, want %d", len(decodes), len(batches))
	}
	for _, d := range decodes {
		if _, ok := want[d.Parent.SpanID()]; !ok {
			t.Errorf("a decoding is of no batch: %v", d.Parent)
		}
	}
	joined := 0
	records := named(spans, "publish record")
	for i := range records {
		p := &records[i]
		of := []trace.SpanContext{p.Parent}
		for _, l := range p.Links {
			of = append(of, l.SpanContext)
		}
		joined = max(joined, len(of))
		last := attributeOf(p, "kvmesh.batch.last").AsInt64()
		for _, sc := range of {
			seq, ok := want[sc.SpanID()]
			if !ok || seq > last || seq < attributeOf(p, "kvmesh.batch.first").AsInt64() {
				t.Errorf("record up to batch %d: batch %d has no span, another record, or is not in it", last, seq)
			}
			delete(want, sc.SpanID())
		}
		msg := r.message(uint64(attributeOf(p, "kvmesh.log_seq").AsInt64()))
		sc, ok := event.Traced(msg.Header)
		if !ok || sc.SpanID() != p.SpanContext.SpanID() || sc.TraceID() != p.SpanContext.TraceID() || sc.TraceID() != p.Parent.TraceID() {
			t.Errorf("record %d is of trace %v, span %v, and names %v", msg.Sequence, p.SpanContext.TraceID(), p.SpanContext.SpanID(), sc)
		}
	}
	if len(want) > 0 {
		t.Errorf("batches that no record refers to: %v", want)
	}
	if joined < 10 {
		t.Errorf("at most %d batches were joined, want 10 and more", joined)
	}
}

// TestWhatIsNotSampledIsNotTraced has a provider that samples nothing: there are
// no spans, and records have no trace.
func TestWhatIsNotSampledIsNotTraced(t *testing.T) {
	r := newRig(t)
	spans := r.traced(sdktrace.NeverSample())
	a := r.engine("w")
	e := r.bridge()
	e.serve(a)
	a.publish(prompt(1, 0, 2))
	a.publish(prompt(2, 0, 2))
	r.synced(a)
	e.stop()
	if got := spans.Started(); len(got) > 0 {
		t.Errorf("%d spans, want none", len(got))
	}
	for seq := uint64(1); seq <= r.log.Seq(0); seq++ {
		if msg := r.message(seq); msg.Header.Get("traceparent") != "" {
			t.Errorf("record %d has %v", seq, msg.Header)
		}
	}
}
