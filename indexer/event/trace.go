package event

import (
	"context"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// traceHeaders carries trace context in the headers of a NATS message, in W3C's
// form: traceparent, and tracestate if there is any.
type traceHeaders nats.Header

func (h traceHeaders) Get(key string) string { return nats.Header(h).Get(key) }
func (h traceHeaders) Set(key, value string) { nats.Header(h).Set(key, value) }
func (h traceHeaders) Keys() []string {
	keys := make([]string, 0, len(h))
	for key := range h {
		keys = append(keys, key)
	}
	return keys
}

// Attribute returns the Position as an attribute of a span.
func (p Position) Attribute() attribute.KeyValue {
	if len(p.LogSeqs) == 0 {
		return attribute.Int64("kvmesh.log_seq", int64(p.LogSeq))
	}
	seqs := make([]int64, len(p.LogSeqs))
	for i, seq := range p.LogSeqs {
		seqs[i] = int64(seq)
	}
	return attribute.Int64Slice("kvmesh.log_seqs", seqs)
}

// SetTrace puts the span of ctx into the headers of a message.
func SetTrace(ctx context.Context, h nats.Header) {
	propagation.TraceContext{}.Inject(ctx, traceHeaders(h))
}

// WithTrace returns ctx with the span that the headers of a message name as its
// parent; ctx itself if they name none, or none that can be read.
func WithTrace(ctx context.Context, h nats.Header) context.Context {
	if len(h) == 0 {
		return ctx
	}
	return propagation.TraceContext{}.Extract(ctx, traceHeaders(h))
}

// Traced tells whether the headers of a message name a span that is sampled, and
// returns its context.
func Traced(h nats.Header) (trace.SpanContext, bool) {
	values := h["traceparent"]
	if len(values) == 0 {
		return trace.SpanContext{}, false
	}
	sc := trace.SpanContextFromContext(WithTrace(context.Background(), h))
	return sc, sc.IsValid() && sc.IsSampled()
}
