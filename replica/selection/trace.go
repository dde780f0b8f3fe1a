package selection

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// tracedIndex is what an Index may know besides: how far it is behind the log, and
// the last record of a partition that was traced.
type tracedIndex interface {
	Lag() uint64
	Applied(name event.Partition) (indexer.Applied, bool)
}

var _ tracedIndex = (*indexer.Indexer)(nil)

// newTracer returns the tracer of a Selector; nil: nothing is traced.
func newTracer(provider trace.TracerProvider) trace.Tracer {
	if _, off := provider.(noop.TracerProvider); off || provider == nil {
		return nil
	}
	return provider.Tracer("github.com/kvmesh/kvmesh/replica/selection")
}

// runTraced is run with a span, which has a link to the last record that was
// traced before the log sequence that the overlaps are true for.
func (s *Selector) runTraced(ctx context.Context, r *Request, book bool) (Result, error) {
	ctx, span := s.tracer.Start(ctx, "select worker")
	defer span.End()
	out, held, err := s.runPlain(ctx, r, book)
	if !span.IsRecording() {
		return out, err
	}
	span.SetAttributes(
		attribute.String("kvmesh.model", r.Model),
		attribute.String("kvmesh.routing_group", r.Group),
		attribute.Int("kvmesh.blocks", len(r.Locals)),
		attribute.Bool("kvmesh.booked", book && err == nil),
		attribute.Bool("kvmesh.held_back", held),
	)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return out, err
	}
	span.SetAttributes(
		attribute.String("kvmesh.instance", out.Source.Instance),
		attribute.Int64("kvmesh.rank", int64(out.Source.Rank)),
		attribute.Int64("kvmesh.matched", int64(out.Overlap.Longest())),
		attribute.Float64("kvmesh.cost", out.Cost),
		attribute.Int64("kvmesh.prefill_tokens", int64(out.PrefillTokens)),
		out.Attribute(),
	)
	if index, ok := s.index.(tracedIndex); ok {
		span.SetAttributes(attribute.Int64("kvmesh.lag", int64(index.Lag())))
		if a, ok := index.Applied(r.Partition); ok && a.In(out.Position) {
			span.AddLink(trace.Link{SpanContext: a.Span, Attributes: []attribute.KeyValue{attribute.Int64("kvmesh.log_seq", int64(a.LogSeq))}})
		}
	}
	return out, err
}
