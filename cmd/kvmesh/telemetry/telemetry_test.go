package telemetry

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSettings(t *testing.T) {
	const endpoint = "OTEL_EXPORTER_OTLP_ENDPOINT=http://c:4318"
	for _, c := range []struct {
		env             string
		traces, metrics string
		wrong           string // in the error; empty: there is none
	}{
		{"", "", "", ""},
		{"OTEL_EXPORTER_OTLP_ENDPOINT=", "", "", ""},
		{endpoint, "http/protobuf", "", ""},
		{endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "grpc", "", ""},
		{endpoint + " OTEL_EXPORTER_OTLP_PROTOCOL=grpc OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf", "http/protobuf", "", ""},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=https://c OTEL_METRICS_EXPORTER=prometheus", "http/protobuf", "", ""},
		{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=https://c", "", "", ""},
		{"OTEL_METRICS_EXPORTER=otlp", "", "http/protobuf", ""},
		{endpoint + " OTEL_METRICS_EXPORTER=prometheus,otlp OTEL_EXPORTER_OTLP_METRICS_PROTOCOL=grpc", "http/protobuf", "grpc", ""},
		{endpoint + " OTEL_TRACES_EXPORTER=none OTEL_METRICS_EXPORTER=none", "", "", ""},
		{endpoint + " OTEL_SDK_DISABLED=True OTEL_METRICS_EXPORTER=otlp", "", "", ""},
		{endpoint + " OTEL_SDK_DISABLED=false OTEL_TRACES_SAMPLER=parentbased_traceidratio OTEL_TRACES_SAMPLER_ARG=0.01", "http/protobuf", "", ""},
		{"OTEL_TRACES_SAMPLER=whatever", "", "", ""}, // nothing is traced
		{endpoint + " OTEL_TRACES_SAMPLER=whatever", "", "", "OTEL_TRACES_SAMPLER"},
		{endpoint + " OTEL_TRACES_SAMPLER=traceidratio OTEL_TRACES_SAMPLER_ARG=2", "", "", "OTEL_TRACES_SAMPLER_ARG"},
		{endpoint + " OTEL_TRACES_SAMPLER=traceidratio OTEL_TRACES_SAMPLER_ARG=nan", "", "", "OTEL_TRACES_SAMPLER_ARG"},
		{endpoint + " OTEL_SDK_DISABLED=maybe", "", "", "OTEL_SDK_DISABLED"},
		{endpoint + " OTEL_TRACES_EXPORTER=zipkin", "", "", "OTEL_TRACES_EXPORTER"},
		{endpoint + " OTEL_METRICS_EXPORTER=otlp,smoke", "", "", "OTEL_METRICS_EXPORTER"},
		{endpoint + " OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/json", "", "", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=c:4317", "", "", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"},
	} {
		env := map[string]string{}
		for _, field := range strings.Fields(c.env) {
			name, value, _ := strings.Cut(field, "=")
			env[name] = value
		}
		s, err := readSettings(func(name string) string { return env[name] })
		switch {
		case c.wrong != "":
			if err == nil || !strings.Contains(err.Error(), c.wrong+" is ") {
				t.Errorf("%s: %v, want an error about %s", c.env, err, c.wrong)
			}
		case err != nil || s != settings{c.traces, c.metrics}:
			t.Errorf("%s: %+v, %v, want traces by %q and metrics by %q", c.env, s, err, c.traces, c.metrics)
		}
	}
}

// front returns a handler that is measured and traced, and where that is to be seen.
func front(t *testing.T, next http.Handler) (http.Handler, *tracetest.SpanRecorder, *prometheus.Registry) {
	t.Helper()
	registry := prometheus.NewRegistry()
	tel, err := Start(t.Context(), Options{Registry: registry})
	if err != nil {
		t.Fatal(err)
	}
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	t.Cleanup(func() { provider.Shutdown(context.Background()); tel.Shutdown(context.Background()) })
	tel.Tracer = provider
	h, err := tel.Handler(next)
	if err != nil {
		t.Fatal(err)
	}
	return h, spans, registry
}

// TestRequests has requests that go well, fail, go nowhere, or end in a panic: each
// is counted under its method, route and status, and traced unless it is a probe.
func TestRequests(t *testing.T) {
	mux := http.NewServeMux()
	var inside trace.SpanContext
	mux.HandleFunc("POST /query/{id}", func(w http.ResponseWriter, r *http.Request) { inside = trace.SpanContextFromContext(r.Context()) })
	mux.HandleFunc("GET /broken", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) })
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("ok")) })
	mux.HandleFunc("GET /panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	mux.HandleFunc("GET /stream", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
	})
	h, spans, registry := front(t, mux)
	for _, request := range []string{"POST /query/1", "POST /query/2", "GET /broken", "GET /health", "GET /panic", "GET /nowhere", "MAKEUP /nowhere", "GET /stream"} {
		method, path, _ := strings.Cut(request, " ")
		r := httptest.NewRequest(method, path, nil)
		if path == "/query/2" {
			r.Header.Set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		}
		func() {
			defer func() {
				if p := recover(); (p != nil) != (path == "/panic") {
					t.Errorf("%s: %v", request, p)
				}
			}()
			h.ServeHTTP(httptest.NewRecorder(), r)
		}()
	}
	want := map[string]uint64{
		"POST /query/{id} 200": 2, "GET /broken 503": 1, "GET /health 200": 1, "GET /panic 500": 1, "GET  404": 1, "_OTHER  404": 1, "GET /stream 200": 1,
	}
	for _, m := range gather(t, registry, "http_server_request_duration_seconds").GetMetric() {
		key := label(m, "http_request_method") + " " + label(m, "http_route") + " " + label(m, "http_response_status_code")
		if m.GetHistogram().GetSampleCount() != want[key] {
			t.Errorf("%s: %d requests, want %d", key, m.GetHistogram().GetSampleCount(), want[key])
		}
		delete(want, key)
	}
	if len(want) > 0 {
		t.Errorf("not counted: %v", want)
	}
	names := map[string]int{}
	for _, s := range spans.Ended() {
		names[s.Name()]++
		if broken := s.Name() == "GET /broken" || s.Name() == "GET /panic"; broken != (s.Status().Code == codes.Error) || s.SpanKind() != trace.SpanKindServer {
			t.Errorf("%s: %v, %v", s.Name(), s.Status(), s.SpanKind())
		}
	}
	if names["POST /query/{id}"] != 2 || names["GET"] != 1 || names["GET /panic"] != 1 || names["GET /health"] != 0 || len(spans.Ended()) != 7 {
		t.Errorf("spans: %v", names)
	}
	if last := spans.Ended()[1]; last.Parent().SpanID().String() != "00f067aa0ba902b7" || !inside.Equal(last.SpanContext()) {
		t.Errorf("the request with a traceparent is below %v, and its handler ran below %v", last.Parent(), inside)
	}
}

// TestMeasuringAllocatesNothing is for requests that are not traced.
func TestMeasuringAllocatesNothing(t *testing.T) {
	h, _, _ := front(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }))
	h.(*HTTP).tracer = nil
	w, r := &sink{}, httptest.NewRequest("GET", "/", nil)
	if n := testing.AllocsPerRun(1000, func() { h.ServeHTTP(w, r) }); n > 0.5 { // a pool may be emptied
		t.Errorf("%v allocations a request", n)
	}
}

type sink struct{}

func (*sink) Header() http.Header         { return nil }
func (*sink) WriteHeader(int)             {}
func (*sink) Write(b []byte) (int, error) { return len(b), nil }

func BenchmarkHTTP(b *testing.B) {
	next := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	meter := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader()))
	batcher := sdktrace.NewBatchSpanProcessor(tracetest.NewNoopExporter())
	b.Cleanup(func() { batcher.Shutdown(context.Background()) })
	for _, c := range []struct {
		name   string
		tracer trace.TracerProvider
	}{
		{"off", nil},
		{"sampled=0", sdktrace.NewTracerProvider(sdktrace.WithSampler(sdktrace.NeverSample()))},
		{"sampled=1", sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(batcher))},
	} {
		b.Run(c.name, func(b *testing.B) {
			h, err := (&Telemetry{Tracer: c.tracer, Meter: meter}).Handler(next)
			if err != nil {
				b.Fatal(err)
			}
			w, r := &sink{}, httptest.NewRequest("POST", "/query", nil)
			b.ReportAllocs()
			for b.Loop() {
				h.ServeHTTP(w, r)
			}
		})
	}
}

func TestIDsInLogs(t *testing.T) {
	var out bytes.Buffer
	log := Logger(slog.New(slog.NewTextHandler(&out, nil))).With("a", 1)
	provider := sdktrace.NewTracerProvider()
	ctx, span := provider.Tracer("test").Start(t.Context(), "span")
	log.InfoContext(ctx, "inside")
	log.Info("outside")
	inside, outside, _ := strings.Cut(out.String(), "\n")
	sc := span.SpanContext()
	if !strings.Contains(inside, "a=1 trace_id="+sc.TraceID().String()+" span_id="+sc.SpanID().String()) || strings.Contains(outside, "trace_id") {
		t.Error(out.String())
	}
}

func TestFailedExportsAreCounted(t *testing.T) {
	var out bytes.Buffer
	f := newFailures(slog.New(slog.NewTextHandler(&out, nil)), "spans")
	f.note(nil, 5)
	f.note(errors.New("no route"), 3)
	f.note(errors.New("no route"), 4) // too soon to be logged
	f.last = f.last.Add(-complainInterval)
	f.note(errors.New("no route"), 2)
	if lines := strings.Split(strings.TrimSpace(out.String()), "\n"); len(lines) != 2 || !strings.Contains(lines[0], "lost=3") || !strings.Contains(lines[1], "lost=6") {
		t.Error(out.String())
	}
}

func gather(t *testing.T, from prometheus.Gatherer, name string) *dto.MetricFamily {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return f
		}
	}
	t.Fatalf("there is no metric %s", name)
	return nil
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}
