package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	metricsrpc "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	tracerpc "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	metricspb "go.opentelemetry.io/proto/otlp/metrics/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// collector takes spans and metrics over OTLP, by gRPC and by HTTP.
type collector struct {
	tracerpc.UnimplementedTraceServiceServer
	metricsrpc.UnimplementedMetricsServiceServer

	grpc, http string // URLs

	mu      sync.Mutex
	spans   []exported
	metrics map[string]*metricspb.Metric // by name, as they came last
}

// exported is a span, with the service that it is of and how it came.
type exported struct {
	*tracepb.Span
	service, by string
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{metrics: map[string]*metricspb.Metric{}}
	listen := func(serve func(net.Listener) error, stop func()) string {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = serve(listener) // it ends when it is stopped
		}()
		t.Cleanup(func() { stop(); <-done })
		return "http://" + listener.Addr().String()
	}
	rpc := grpc.NewServer()
	tracerpc.RegisterTraceServiceServer(rpc, c)
	metricsrpc.RegisterMetricsServiceServer(rpc, metricsService{c: c})
	c.grpc = listen(rpc.Serve, rpc.Stop)
	web := &http.Server{Handler: c}
	c.http = listen(web.Serve, func() { web.Close() })
	return c
}

// Export takes spans over gRPC.
func (c *collector) Export(_ context.Context, r *tracerpc.ExportTraceServiceRequest) (*tracerpc.ExportTraceServiceResponse, error) {
	c.takeSpans(r, "grpc")
	return &tracerpc.ExportTraceServiceResponse{}, nil
}

// metricsService takes metrics over gRPC.
type metricsService struct {
	metricsrpc.UnimplementedMetricsServiceServer
	c *collector
}

func (s metricsService) Export(_ context.Context, r *metricsrpc.ExportMetricsServiceRequest) (*metricsrpc.ExportMetricsServiceResponse, error) {
	s.c.takeMetrics(r)
	return &metricsrpc.ExportMetricsServiceResponse{}, nil
}

// ServeHTTP takes spans and metrics over HTTP.
func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.Header.Get("Content-Type") != "application/x-protobuf" {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	var reply proto.Message
	switch r.URL.Path {
	case "/v1/traces":
		var spans tracerpc.ExportTraceServiceRequest
		err = proto.Unmarshal(body, &spans)
		c.takeSpans(&spans, "http")
		reply = &tracerpc.ExportTraceServiceResponse{}
	case "/v1/metrics":
		var metrics metricsrpc.ExportMetricsServiceRequest
		err = proto.Unmarshal(body, &metrics)
		c.takeMetrics(&metrics)
		reply = &metricsrpc.ExportMetricsServiceResponse{}
	default:
		w.WriteHeader(http.StatusNotFound)
		return
	}
	data, marshalErr := proto.Marshal(reply)
	if err != nil || marshalErr != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
	w.Write(data)
}

func (c *collector) takeSpans(r *tracerpc.ExportTraceServiceRequest, by string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range r.ResourceSpans {
		service := text(resource.Resource.GetAttributes(), "service.name")
		for _, scope := range resource.ScopeSpans {
			for _, span := range scope.Spans {
				c.spans = append(c.spans, exported{span, service, by})
			}
		}
	}
}

func (c *collector) takeMetrics(r *metricsrpc.ExportMetricsServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range r.ResourceMetrics {
		for _, scope := range resource.ScopeMetrics {
			for _, m := range scope.Metrics {
				c.metrics[m.Name] = m
			}
		}
	}
}

// named returns the spans of a name that have come.
func (c *collector) named(name string) []exported {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []exported
	for _, s := range c.spans {
		if s.Name == name {
			out = append(out, s)
		}
	}
	return out
}

// text returns the value of a text, and integer that of an integer.
func text(attributes []*commonpb.KeyValue, key string) string {
	for _, a := range attributes {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

func integer(attributes []*commonpb.KeyValue, key string) int64 {
	for _, a := range attributes {
		if a.Key == key {
			return a.Value.GetIntValue()
		}
	}
	return -1
}
