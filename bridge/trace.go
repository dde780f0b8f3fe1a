package bridge

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

// tracing makes the spans of a Bridge. A batch that is sampled has one from its
// arrival until it is applied, with one of its decoding below it, and begins a
// trace. A record has one from the first attempt to publish it to its
// acknowledgement: it is the child of its first sampled batch, has links to the
// others, and is named in the record's headers. A record without a sampled batch
// has none.
//
// A nil tracing is off. Nothing is built for it, nor for batches that are not
// sampled.
type tracing struct{ tracer trace.Tracer }

func newTracing(provider trace.TracerProvider) *tracing {
	if _, off := provider.(noop.TracerProvider); off || provider == nil {
		return nil
	}
	return &tracing{provider.Tracer("github.com/kvmesh/kvmesh/bridge")}
}

// timing is when what happened to a batch. It is zero if nothing is traced.
type timing struct{ received, decode, decoded time.Time }

// time begins to take the times of a batch that came at a time, or just now.
func (t *tracing) time(received time.Time) (at timing) {
	if t != nil {
		at.decode = time.Now()
		if at.received = received; received.IsZero() {
			at.received = at.decode
		}
	}
	return at
}

// done notes that the batch has been decoded.
func (at *timing) done() {
	if !at.decode.IsZero() {
		at.decoded = time.Now()
	}
}

// batchSpan is the span of a batch that is being applied; nil: it has none.
type batchSpan struct {
	ctx  context.Context
	span trace.Span
}

// batch begins the span of the batch that was decoded, or was not because of err.
func (t *tracing) batch(l *listener, seq uint64, size int, replayed bool, at *timing, err error) *batchSpan {
	if t == nil {
		return nil
	}
	ctx, span := t.tracer.Start(context.Background(), "receive batch", trace.WithTimestamp(at.received), trace.WithSpanKind(trace.SpanKindConsumer))
	if !span.IsRecording() {
		return nil
	}
	source := l.worker.Source
	if err == nil {
		if lane := l.laneFor(l.batch); lane != nil {
			source = lane.source
		}
		span.SetAttributes(attribute.Int("kvmesh.batch.events", len(l.batch.Events)))
	} else {
		span.SetStatus(codes.Error, err.Error())
	}
	span.SetAttributes(sourceAttributes(source)...)
	span.SetAttributes(
		attribute.Int64("kvmesh.batch.seq", int64(seq)),
		attribute.Int64("kvmesh.incarnation", int64(l.incarnation)),
		attribute.Bool("kvmesh.batch.replayed", replayed),
		attribute.String("messaging.system", "zeromq"),
		attribute.String("messaging.operation.name", "receive"),
		attribute.String("messaging.operation.type", "receive"),
		attribute.Int("messaging.message.body.size", size),
	)
	_, decode := t.tracer.Start(ctx, "decode batch", trace.WithTimestamp(at.decode))
	decode.End(trace.WithTimestamp(at.decoded))
	return &batchSpan{ctx, span}
}

// sourceAttributes names a source in a span.
func sourceAttributes(s event.Source) []attribute.KeyValue {
	return []attribute.KeyValue{
		attribute.String("kvmesh.model", s.Model),
		attribute.String("kvmesh.routing_group", s.Group),
		attribute.String("kvmesh.instance", s.Instance),
		attribute.Int64("kvmesh.rank", int64(s.Rank)),
	}
}

// context returns the context of the batch, for what is logged of it.
func (s *batchSpan) context(otherwise context.Context) context.Context {
	if s == nil {
		return otherwise
	}
	return s.ctx
}

// end ends the span, and returns what records refer to; nil: nothing.
func (s *batchSpan) end() *trace.SpanContext {
	if s == nil {
		return nil
	}
	s.span.End()
	if sc := s.span.SpanContext(); sc.IsSampled() {
		return &sc
	}
	return nil
}

// follow notes the batches that the next record has something of.
func (n *lane) follow(marks []mark) {
	if n.l.b.trace == nil {
		return
	}
	for i := range marks {
		if marks[i].span != nil {
			n.batches = append(n.batches, marks[i].span)
		}
	}
}

// record begins the span of the record that is to be published, if it has
// something of a sampled batch.
func (t *tracing) record(ctx context.Context, n *lane, h *event.Header, size int) trace.Span {
	if t == nil || len(n.batches) == 0 {
		return nil
	}
	links := make([]trace.Link, 0, len(n.batches)-1)
	for _, sc := range n.batches[1:] {
		links = append(links, trace.Link{SpanContext: *sc})
	}
	_, span := t.tracer.Start(trace.ContextWithSpanContext(ctx, *n.batches[0]), "publish record",
		trace.WithSpanKind(trace.SpanKindProducer), trace.WithLinks(links...))
	clear(n.batches)
	n.batches = n.batches[:0]
	span.SetAttributes(sourceAttributes(n.source)...)
	span.SetAttributes(
		attribute.Int64("kvmesh.incarnation", int64(h.Incarnation)),
		attribute.Int64("kvmesh.batch.first", int64(h.First)),
		attribute.Int64("kvmesh.batch.last", int64(h.Last)),
		attribute.Bool("kvmesh.record.partial", h.Partial),
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.name", "publish"),
		attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.destination.name", n.subject),
		attribute.Int("messaging.message.body.size", size),
	)
	return span
}

// header returns the headers that name the span of the record in flight; nil: it
// has none.
func (p *publication) header(ctx context.Context) nats.Header {
	if p.span == nil {
		return nil
	}
	h := nats.Header{}
	event.SetTrace(trace.ContextWithSpan(ctx, p.span), h)
	return h
}

// context returns ctx with the span of the record in flight, for what is logged.
func (p *publication) context(ctx context.Context) context.Context {
	if p.span == nil {
		return ctx
	}
	return trace.ContextWithSpan(ctx, p.span)
}

// retried notes in the span that an attempt has failed.
func (p *publication) retried(err error) {
	if p.span != nil {
		p.span.AddEvent("retry", trace.WithAttributes(attribute.String("error.message", err.Error())))
	}
}

// traced ends the span of the record in flight: it was stored, or was not because
// of err.
func (p *publication) traced(err error) {
	if p.span == nil {
		return
	}
	if err != nil {
		p.span.SetStatus(codes.Error, err.Error())
	} else {
		p.span.SetAttributes(attribute.Int64("kvmesh.log_seq", int64(p.lastSeq)))
	}
	p.span.End()
	p.span = nil
}
