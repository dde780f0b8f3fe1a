package serve

import (
	"context"

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
	return provider.Tracer("github.com/kvmesh/kvmesh/replica/selection/serve")
}

// traceNATS begins the span of a request over NATS, below that which its headers
// name. The function that it returns ends it with the request's outcome.
func (x *Server) traceNATS(ctx context.Context, r micro.Request, op operation) (context.Context, func(error)) {
	if x.tracer == nil {
		return ctx, func(error) {}
	}
	ctx, span := x.tracer.Start(event.WithTrace(ctx, nats.Header(r.Headers())), subjectPrefix+op.name, trace.WithSpanKind(trace.SpanKindServer))
	if span.IsRecording() {
		span.SetAttributes(
			attribute.String("messaging.system", "nats"),
			attribute.String("messaging.operation.name", "answer"),
			attribute.String("messaging.operation.type", "process"),
			attribute.String("messaging.destination.name", subjectPrefix+op.name),
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
