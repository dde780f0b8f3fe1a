// Package telemetry is what a process tells of itself: metrics, to Prometheus and
// over OTLP, spans over OTLP, and the ids of spans in logs. What goes over OTLP is
// chosen by OpenTelemetry's own environment variables, and nothing does unless
// they name an endpoint.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetricgrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	otelprom "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Options are whose telemetry it is.
type Options struct {
	// Service, Version and Instance are the process's service.name,
	// service.version and service.instance.id, as far as
	// OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME don't say otherwise.
	Service, Version, Instance string
	// Registry is where Prometheus reads metrics; nil: nowhere.
	Registry prometheus.Registerer
	// Logger is told when exports fail.
	Logger *slog.Logger
}

// Telemetry is what a process measures and traces with.
type Telemetry struct {
	// Tracer is nil if nothing is traced.
	Tracer trace.TracerProvider
	Meter  metric.MeterProvider

	spans   *sdktrace.TracerProvider // nil: none
	metrics *sdkmetric.MeterProvider
	log     *slog.Logger
}

// Start sets telemetry up as the environment says. Errors name the variable that is
// wrong.
func Start(ctx context.Context, o Options) (*Telemetry, error) {
	s, err := readSettings(os.Getenv)
	if err != nil {
		return nil, err
	}
	about, err := resource.New(ctx,
		resource.WithAttributes(
			attribute.String("service.name", o.Service),
			attribute.String("service.version", o.Version),
			attribute.String("service.instance.id", o.Instance),
		),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) && !errors.Is(err, resource.ErrSchemaURLConflict) {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Telemetry{log: o.Logger}
	readers := []sdkmetric.Option{sdkmetric.WithResource(about)}
	if o.Registry != nil {
		exporter, err := otelprom.New(otelprom.WithRegisterer(o.Registry), otelprom.WithoutScopeInfo())
		if err != nil {
			return nil, err
		}
		readers = append(readers, sdkmetric.WithReader(exporter))
	}
	if s.metrics != "" {
		exporter, err := metricExporter(ctx, s.metrics)
		if err != nil {
			return nil, fmt.Errorf("OTLP metrics: %w", err)
		}
		readers = append(readers, sdkmetric.WithReader(sdkmetric.NewPeriodicReader(metricLog{exporter, newFailures(o.Logger, "metrics")})))
	}
	t.metrics = sdkmetric.NewMeterProvider(readers...)
	t.Meter = t.metrics
	if s.traces != "" {
		exporter, err := spanExporter(ctx, s.traces)
		if err != nil {
			t.Shutdown(ctx)
			return nil, fmt.Errorf("OTLP traces: %w", err)
		}
		t.spans = sdktrace.NewTracerProvider(sdktrace.WithResource(about), sdktrace.WithBatcher(spanLog{exporter, newFailures(o.Logger, "spans")}))
		t.Tracer = t.spans
	}
	return t, nil
}

// shutdownTimeout is how long a process that ends tries to export what it has not
// exported yet.
const shutdownTimeout = 5 * time.Second

// Shutdown exports what has not been exported, for no longer than 5 s, and ends. It
// logs if that was too short.
func (t *Telemetry) Shutdown(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	var err error
	if t.spans != nil {
		err = t.spans.Shutdown(ctx)
	}
	if err = errors.Join(err, t.metrics.Shutdown(ctx)); err != nil {
		t.log.Warn("not all telemetry could be exported before the end", "error", err)
	}
}

// Protocols of OTLP.
const (
	protocolGRPC = "grpc"
	protocolHTTP = "http/protobuf"
)

// spanExporter and metricExporter read endpoint, headers, certificates, timeout and
// compression from the environment themselves.
func spanExporter(ctx context.Context, protocol string) (sdktrace.SpanExporter, error) {
	if protocol == protocolGRPC {
		return otlptracegrpc.New(ctx)
	}
	return otlptracehttp.New(ctx)
}

func metricExporter(ctx context.Context, protocol string) (sdkmetric.Exporter, error) {
	if protocol == protocolGRPC {
		return otlpmetricgrpc.New(ctx)
	}
	return otlpmetrichttp.New(ctx)
}

// settings are which protocol spans and metrics are exported with; "": they are
// not.
type settings struct{ traces, metrics string }

// readSettings reads OpenTelemetry's variables, as far as the SDK does not, and
// checks those that it would ignore if they were wrong.
func readSettings(getenv func(string) string) (settings, error) {
	var s settings
	env := func(name string) string { return strings.TrimSpace(getenv(name)) }
	first := func(names ...string) (name, value string) {
		for _, name := range names {
			if value := env(name); value != "" {
				return name, value
			}
		}
		return "", ""
	}
	var errs []error
	wrong := func(name, value, want string) {
		errs = append(errs, fmt.Errorf("%s is %q: want %s", name, value, want))
	}
	// chosen returns the protocol of a signal, "" if it has no exporter.
	chosen := func(signal, exporters string, known []string, needsEndpoint bool) string {
		on := false
		for _, e := range strings.Split(exporters, ",") {
			e = strings.TrimSpace(e)
			if !slices.Contains(known, e) {
				wrong("OTEL_"+signal+"_EXPORTER", exporters, strings.Join(known, " or "))
			}
			on = on || e == "otlp"
		}
		name, endpoint := first("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
		if !on || needsEndpoint && endpoint == "" {
			return ""
		}
		if endpoint != "" && !isURL(endpoint) {
			wrong(name, endpoint, "a URL such as http://collector:4318")
		}
		name, protocol := first("OTEL_EXPORTER_OTLP_"+signal+"_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
		switch protocol {
		case "":
			protocol = protocolHTTP
		case protocolGRPC, protocolHTTP:
		default:
			wrong(name, protocol, protocolGRPC+" or "+protocolHTTP)
		}
		return protocol
	}
	if disabled := env("OTEL_SDK_DISABLED"); strings.EqualFold(disabled, "true") {
		return s, nil
	} else if disabled != "" && !strings.EqualFold(disabled, "false") {
		wrong("OTEL_SDK_DISABLED", disabled, "true or false")
	}
	_, exporters := first("OTEL_TRACES_EXPORTER")
	if exporters == "" {
		exporters = "otlp"
	}
	s.traces = chosen("TRACES", exporters, []string{"otlp", "none"}, true)
	if _, exporters = first("OTEL_METRICS_EXPORTER"); exporters != "" {
		s.metrics = chosen("METRICS", exporters, []string{"otlp", "prometheus", "none"}, false)
	}
	if s.traces != "" {
		errs = append(errs, checkSampler(env("OTEL_TRACES_SAMPLER"), env("OTEL_TRACES_SAMPLER_ARG")))
	}
	return s, errors.Join(errs...)
}
