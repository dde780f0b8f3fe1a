package api

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// newTracer returns the tracer of a Server; nil: nothing is traced.
func newTracer(provider trace.TracerProvider) trace.Tracer {
	if _, off := provider.(noop.TracerProvider); off || provider == nil {
		return nil
	}
	return provider.Tracer("github.com/kvmesh/kvmesh/indexer/api")
}

// question is what a prompt turned out to ask, for its span.
type question struct {
	name   event.Partition
	blocks int
	logSeq uint64 // that the answer is true for; 0: there is no answer
}

// answerPrompt is match with a span, which has a link to the last record that was
// traced before the answer's log sequence: what the answer knows is from there.
func (s *Server) answerPrompt(ctx context.Context, deadline time.Time, w *work, p *prompt) error {
	if s.tracer == nil {
		return s.match(ctx, deadline, w, p)
	}
	ctx, span := s.tracer.Start(ctx, "query index")
	defer span.End()
	w.asked = question{}
	err := s.match(ctx, deadline, w, p)
	if !span.IsRecording() {
		return err
	}
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
	}
	q := &w.asked
	span.SetAttributes(
		attribute.String("kvmesh.model", q.name.Model),
		attribute.String("kvmesh.routing_group", q.name.Group),
		attribute.Int("kvmesh.blocks", q.blocks),
		attribute.Int64("kvmesh.lag", int64(s.index.Lag())),
	)
	if q.logSeq == 0 {
		return err
	}
	matched := uint32(0)
	for i := range w.spans {
		matched = max(matched, w.spans[i].best[event.External])
	}
	span.SetAttributes(
		attribute.Int64("kvmesh.matched", int64(matched)),
		attribute.Int("kvmesh.instances", len(w.spans)),
		attribute.Int64("kvmesh.log_seq", int64(q.logSeq)),
	)
	if a, ok := s.index.Applied(q.name); ok && a.LogSeq <= q.logSeq {
		span.AddLink(trace.Link{SpanContext: a.Span, Attributes: []attribute.KeyValue{attribute.Int64("kvmesh.log_seq", int64(a.LogSeq))}})
	}
	return err
}

// traceNATS begins the span of a request over NATS, below that which its headers
// name. The function that it returns ends it with the request's outcome.
func (s *Server) traceNATS(ctx context.Context, r micro.Request, endpoint string) (context.Context, func(error)) {
	if s.tracer == nil {
		return ctx, func(error) {}
	}
	ctx, span := s.tracer.Start(event.WithTrace(ctx, nats.Header(r.Headers())), endpoint, trace.WithSpanKind(trace.SpanKindServer))
	if span.IsRecording() {
		span.SetAttributes(
			attribute.String("messaging.system", "nats"),
			attribute.String("messaging.operation.name", "answer"),
			attribute.String("messaging.operation.type", "process"),
			attribute.String("messaging.destination.name", r.Subject()),
			attribute.Int("messaging.message.body.size", len(r.Data())),
		)
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
