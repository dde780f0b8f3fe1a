package api_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// What stands where an index is asked knows what spans of selections say.
var _ interface {
	Lag() uint64
	Applied(event.Partition) (indexer.Applied, bool)
} = (*api.Elsewhere)(nil)

// TestQueriesAreTraced asks over HTTP, below a span in the request's context, and
// over NATS, below one in the request's headers: each prompt has a span that
// says what was asked and found, with a link to the record that the answer is from.
func TestQueriesAreTraced(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	t.Cleanup(func() { provider.Shutdown(t.Context()) })
	w := newWorld(t, options{tracer: provider, config: func(c *api.Config) { c.Tracer = provider }})
	w.register(at("a", 0))
	w.register(at("b", 0))
	tokens := prompt(1, 8)
	w.store(at("a", 0), event.Device, locals(tokens), 0, 3)
	run := event.Run{Root: true, Locals: locals(tokens)[:5]}
	record := event.AppendRecord(nil, event.Header{Incarnation: 1, Batches: true, First: 1, Last: 1}, 1, event.AppendStored(nil, event.Device, "", run, nil))
	ack, err := w.js.PublishMsg(t.Context(), &nats.Msg{Subject: event.DefaultLog().Subject(at("b", 0)), Data: record,
		Header: nats.Header{"traceparent": {"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, root := provider.Tracer("test").Start(t.Context(), "the router's")
	one := map[string]any{"model_name": partition.Model, "token_ids": tokens, "min_log_seq": ack.Sequence}
	body, err := json.Marshal(one)
	if err != nil {
		t.Fatal(err)
	}
	batch, err := json.Marshal(map[string]any{"model_name": partition.Model, "queries": []any{
		map[string]any{"token_ids": tokens[:2*blockSize]}, map[string]any{"token_ids": tokens, "model_name": "unknown"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range [][]byte{body, batch} {
		reply := httptest.NewRecorder()
		w.handler.ServeHTTP(reply, httptest.NewRequestWithContext(ctx, "POST", "/query", bytes.NewReader(body)))
		if reply.Code != http.StatusOK {
			t.Fatal(reply.Code, reply.Body)
		}
	}
	msg := nats.NewMsg("kvmesh.query.m=2F7b.default")
	msg.Data = body
	event.SetTrace(ctx, msg.Header)
	if _, err := w.nc.RequestMsg(msg, patience); err != nil {
		t.Fatal(err)
	}
	w.until("the spans have ended", func() bool {
		n := 0
		for _, s := range spans.Ended() {
			if s.Name() == "query index" || s.Name() == "kvmesh.query" || s.Name() == "apply record" {
				n++
			}
		}
		return n == 6
	})

	var applied, server sdktrace.ReadOnlySpan
	var queries []sdktrace.ReadOnlySpan
	for _, s := range spans.Ended() {
		switch s.Name() {
		case "apply record":
			applied = s
		case "query index":
			queries = append(queries, s)
		case "kvmesh.query":
			server = s
		}
	}
	if applied == nil || server == nil || len(queries) != 4 {
		t.Fatalf("spans: %v", spans.Ended())
	}
	if p := server.Parent(); !p.IsRemote() || p.SpanID() != root.SpanContext().SpanID() || server.SpanKind() != trace.SpanKindServer {
		t.Errorf("the span of the NATS request is below %v", p)
	}
	for i, want := range []struct {
		parent  trace.SpanContext
		blocks  int
		matched int
		holders int
		fails   bool
	}{
		{root.SpanContext(), 8, 5, 2, false},
		{root.SpanContext(), 2, 2, 2, false},
		{root.SpanContext(), 0, 0, 0, true},
		{server.SpanContext(), 8, 5, 2, false},
	} {
		q := queries[i]
		have := attribute.NewSet(q.Attributes()...)
		value := func(key attribute.Key) any {
			v, _ := have.Value(key)
			return v.AsInterface()
		}
		if q.Parent().SpanID() != want.parent.SpanID() || (q.Status().Code == codes.Error) != want.fails {
			t.Errorf("query %d is below %v, status %v", i, q.Parent(), q.Status())
		}
		if want.fails {
			if value("kvmesh.model") != "unknown" || len(q.Links()) > 0 {
				t.Errorf("query %d: %v, %v", i, have.ToSlice(), q.Links())
			}
			continue
		}
		if value("kvmesh.model") != partition.Model || value("kvmesh.blocks") != int64(want.blocks) || value("kvmesh.matched") != int64(want.matched) ||
			value("kvmesh.instances") != int64(want.holders) || value("kvmesh.lag") != int64(0) || value("kvmesh.log_seq") != int64(ack.Sequence) {
			t.Errorf("query %d: %v, want %+v", i, have.ToSlice(), want)
		}
		if l := q.Links(); len(l) != 1 || l[0].SpanContext.SpanID() != applied.SpanContext().SpanID() {
			t.Errorf("query %d has links to %v, want one to %v", i, l, applied.SpanContext())
		}
	}
}
