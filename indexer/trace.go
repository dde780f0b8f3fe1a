package indexer

import (
	"context"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// tracing makes the spans of records that are applied, and knows the one at hand.
// It is the reader's own. A record whose bridge has traced it has one, from when
// it has been read until queries see what it changed; others have none.
type tracing struct {
	tracer trace.Tracer // nil: nothing is traced
	ctx    context.Context
	span   trace.Span // of the record at hand; nil: it has none
}

// Applied is a record that queries see, with its span.
type Applied struct {
	Span   trace.SpanContext
	LogSeq uint64
	Shard  int // that the record is in
	when   time.Time
}

// In tells whether an answer at a position knows of the record.
func (a *Applied) In(p event.Position) bool { return a.LogSeq <= p.Seq(a.Shard) }

func newTracing(provider trace.TracerProvider) tracing {
	t := tracing{ctx: context.Background()}
	if _, off := provider.(noop.TracerProvider); !off && provider != nil {
		t.tracer = provider.Tracer("github.com/kvmesh/kvmesh/indexer")
	}
	return t
}

// applyTraced is apply for a record that may name a span.
func (x *shard) applyTraced(seq uint64, subject string, h nats.Header, data []byte) {
	parent, ok := event.Traced(h)
	if s := x.writers[subject]; !ok || s != nil && !s.part.served {
		x.apply(seq, subject, data)
		return
	}
	t := &x.trace
	t.ctx, t.span = t.tracer.Start(trace.ContextWithRemoteSpanContext(context.Background(), parent), "apply record", trace.WithSpanKind(trace.SpanKindConsumer))
	t.span.SetAttributes(
		attribute.Int64("kvmesh.log_seq", int64(seq)),
		attribute.Int64("kvmesh.lag", int64(max(x.end.Load(), seq)-seq)),
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.name", "apply"),
		attribute.String("messaging.operation.type", "process"),
		attribute.String("messaging.destination.name", subject),
		attribute.Int("messaging.message.body.size", len(data)),
	)
	x.apply(seq, subject, data)
	t.span.End()
	t.ctx, t.span = context.Background(), nil
}

// traced notes that queries see a record of a source, which names so many blocks.
func (x *shard) traced(s *source, seq uint64, blocks int) {
	if x.trace.span == nil {
		return
	}
	x.trace.span.SetAttributes(
		attribute.String("kvmesh.model", s.name.Model),
		attribute.String("kvmesh.routing_group", s.name.Group),
		attribute.String("kvmesh.instance", s.name.Instance),
		attribute.Int64("kvmesh.rank", int64(s.name.Rank)),
		attribute.Int("kvmesh.blocks", blocks),
	)
	s.part.applied.Store(&Applied{x.trace.span.SpanContext(), seq, x.number, time.Now()})
}

// failed notes that the record at hand can't be read.
func (t *tracing) failed(err error) {
	if t.span != nil {
		t.span.SetStatus(codes.Error, err.Error())
	}
}

// Applied returns the last record of a partition that was traced when it was
// applied; ok is false if there is none.
func (x *Indexer) Applied(name event.Partition) (a Applied, ok bool) {
	for _, s := range x.shards {
		if p := s.now().partition(name); p != nil {
			if last := p.applied.Load(); last != nil && (!ok || last.when.After(a.when)) {
				a, ok = *last, true
			}
		}
	}
	return a, ok
}
