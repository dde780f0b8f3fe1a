package telemetry

import (
	"net/http"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// HTTP measures and traces the requests that a handler answers.
type HTTP struct {
	next     http.Handler
	tracer   trace.Tracer // nil: nothing is traced
	duration metric.Float64Histogram
	pool     sync.Pool // of *response

	mu    sync.RWMutex
	kinds map[kind][]metric.RecordOption
}

// kind is what requests are told apart by. There are few: a route is a pattern of a
// ServeMux.
type kind struct {
	method, route string
	status        int
}

// maxKinds bounds how many kinds are remembered.
const maxKinds = 1024

// Handler returns next, measured and traced. The histogram is OpenTelemetry's
// http.server.request.duration, with the buckets of Dynamo's indexer: from 0.1 ms,
// each twice the one before.
func (t *Telemetry) Handler(next http.Handler) (*HTTP, error) {
	h := &HTTP{next: next, kinds: map[kind][]metric.RecordOption{}}
	if t.Tracer != nil {
		h.tracer = t.Tracer.Tracer("github.com/kvmesh/kvmesh/http")
	}
	bounds := make([]float64, 20)
	for i := range bounds {
		bounds[i] = 1e-4 * float64(uint64(1)<<i)
	}
	var err error
	h.duration, err = t.Meter.Meter("github.com/kvmesh/kvmesh/http").Float64Histogram("http.server.request.duration",
		metric.WithUnit("s"), metric.WithDescription("Duration of HTTP requests, by method, route and status."), metric.WithExplicitBucketBoundaries(bounds...))
	return h, err
}

// response is a ResponseWriter that remembers the status.
type response struct {
	http.ResponseWriter
	status int
}

func (w *response) WriteHeader(status int) {
	if w.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) { // others come before the answer
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *response) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, as far as what is below does.
func (w *response) Flush() {
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap is for http.ResponseController.
func (w *response) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// ServeHTTP implements http.Handler.
func (h *HTTP) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	out, _ := h.pool.Get().(*response)
	if out == nil {
		out = &response{}
	}
	out.ResponseWriter, out.status = w, 0
	var span trace.Span
	if h.tracer != nil && traced(r.URL.Path) {
		ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		ctx, span = h.tracer.Start(ctx, r.Method, trace.WithSpanKind(trace.SpanKindServer), trace.WithTimestamp(start))
		r = r.WithContext(ctx)
	}
	answered := false
	defer func() { // also of a handler that gives up with a panic
		k := kind{methodOf(r.Method), routeOf(r.Pattern), out.status}
		switch {
		case k.status == 0 && answered:
			k.status = http.StatusOK
		case k.status == 0:
			k.status = http.StatusInternalServerError
		}
		if answered {
			out.ResponseWriter = nil
			h.pool.Put(out)
		}
		h.duration.Record(r.Context(), time.Since(start).Seconds(), h.options(k)...)
		if span != nil {
			finish(span, r, k)
		}
	}()
	h.next.ServeHTTP(out, r)
	answered = true
}

// finish ends the span of a request. Only when it has been answered is it known
// which route it took.
func finish(span trace.Span, r *http.Request, k kind) {
	defer span.End()
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(
		attribute.String("http.request.method", k.method),
		attribute.String("url.path", r.URL.Path),
		attribute.Int("http.response.status_code", k.status),
		attribute.Int64("http.request.body.size", max(r.ContentLength, 0)),
	)
	if k.route != "" {
		span.SetName(k.method + " " + k.route)
		span.SetAttributes(attribute.String("http.route", k.route))
	}
	if k.status >= 500 {
		span.SetStatus(codes.Error, http.StatusText(k.status))
	}
}

// options returns the attributes of a kind of requests, made once.
func (h *HTTP) options(k kind) []metric.RecordOption {
	h.mu.RLock()
	o := h.kinds[k]
	h.mu.RUnlock()
	if o != nil {
		return o
	}
	attributes := []attribute.KeyValue{attribute.String("http.request.method", k.method), attribute.Int("http.response.status_code", k.status)}
	if k.route != "" {
		attributes = append(attributes, attribute.String("http.route", k.route))
	}
	o = []metric.RecordOption{metric.WithAttributeSet(attribute.NewSet(attributes...))}
	h.mu.Lock()
	if len(h.kinds) < maxKinds {
		h.kinds[k] = o
	}
	h.mu.Unlock()
	return o
}

// traced tells whether requests of a path have spans. Those of probes and of people
// that look would be most of them.
func traced(path string) bool {
	switch path {
	case "/health", "/ready", "/metrics", "/openapi.json", "/ui":
		return false
	}
	return !strings.HasPrefix(path, "/ui/")
}

// routeOf returns the path of a ServeMux pattern; "" if no handler was found.
func routeOf(pattern string) string {
	if _, path, ok := strings.Cut(pattern, " "); ok {
		pattern = path
	}
	if pattern == "/" {
		return ""
	}
	return pattern
}

// methodOf returns a method that is known, so that clients can't make up others
// for the metrics.
func methodOf(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodConnect, http.MethodOptions, http.MethodTrace:
		return method
	}
	return "_OTHER"
}
