package api

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// question is what a prompt turned out to ask, for its span.
type question struct {
	name   event.Partition
	blocks int

	answered bool
	at       event.Position // that the answer is true for
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
	if !q.answered {
		return err
	}
	matched := uint32(0)
	for i := range w.spans {
		matched = max(matched, w.spans[i].best[event.External])
	}
	span.SetAttributes(
		attribute.Int64("kvmesh.matched", int64(matched)),
		attribute.Int("kvmesh.instances", len(w.spans)),
		q.at.Attribute(),
	)
	if a, ok := s.index.Applied(q.name); ok && a.In(q.at) {
		span.AddLink(trace.Link{SpanContext: a.Span, Attributes: []attribute.KeyValue{attribute.Int64("kvmesh.log_seq", int64(a.LogSeq))}})
	}
	return err
}
