package telemetry

import (
	"context"
	"log/slog"
	"sync"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Logger returns a logger whose records have the trace_id and span_id of the
// context that they are logged with, if that has a span.
func Logger(log *slog.Logger) *slog.Logger { return slog.New(idHandler{log.Handler()}) }

// idHandler adds the ids of spans.
type idHandler struct{ slog.Handler }

// Handle implements slog.Handler.
func (h idHandler) Handle(ctx context.Context, r slog.Record) error {
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		r.AddAttrs(slog.String("trace_id", sc.TraceID().String()), slog.String("span_id", sc.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h idHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return idHandler{h.Handler.WithAttrs(attrs)}
}

// WithGroup implements slog.Handler.
func (h idHandler) WithGroup(name string) slog.Handler { return idHandler{h.Handler.WithGroup(name)} }

// -- exports that fail ----------------------------------------------------------

// complainInterval is how often at most it is logged that exports fail.
const complainInterval = 10 * time.Second

// failures logs exports that fail. What could not be exported is lost: how much is
// in the log.
type failures struct {
	log  *slog.Logger
	what string

	mu   sync.Mutex
	lost int       // since it was logged last
	last time.Time // when that was
}

func newFailures(log *slog.Logger, what string) *failures {
	return &failures{log: log, what: what}
}

func (f *failures) note(err error, n int) {
	if err == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost += n
	if now := time.Now(); now.Sub(f.last) >= complainInterval {
		f.log.Warn("export over OTLP failed", "what", f.what, "lost", f.lost, "error", err)
		f.lost, f.last = 0, now
	}
}

// spanLog and metricLog log what their exporter says is wrong, so that it need not
// go through a handler of the whole process.
type spanLog struct {
	sdktrace.SpanExporter
	failures *failures
}

func (e spanLog) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	e.failures.note(e.SpanExporter.ExportSpans(ctx, spans), len(spans))
	return nil
}

type metricLog struct {
	sdkmetric.Exporter
	failures *failures
}

func (e metricLog) Export(ctx context.Context, m *metricdata.ResourceMetrics) error {
	e.failures.note(e.Exporter.Export(ctx, m), 1)
	return nil
}
