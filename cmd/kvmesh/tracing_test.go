package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

const (
	routerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	routerSpan  = "00f067aa0ba902b7"
)

// traced makes a request below the router's span, and returns its reply's body.
func traced(t *testing.T, url string, body any) (int, []byte) {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Traceparent", "00-"+routerTrace+"-"+routerSpan+"-01")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var reply bytes.Buffer
	if _, err := reply.ReadFrom(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, reply.Bytes()
}

// TestOneTrace follows one batch of an engine through a bridge and an indexer,
// processes of their own that export over OTLP, one by gRPC and one by HTTP: its
// spans are one trace, and queries and selections that know it, which a router's
// spans are above, have links to it. Nothing is exported until the processes end, so what
// comes was flushed.
func TestOneTrace(t *testing.T) {
	c := newCollector(t)
	url := startNATS(t)
	e, err := mock.NewEngine(mock.Options{BlockSize: 4, ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	late := "OTEL_BSP_SCHEDULE_DELAY=3600000"
	bridge := spawnKvmesh(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.grpc, "OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "OTEL_METRICS_EXPORTER=otlp", "OTEL_METRIC_EXPORT_INTERVAL=100", late},
		"bridge", "--nats", url, "--worker", "w="+e.Addr()+",replay="+e.ReplayAddr(), "--model", "m", "--block-size", "4")
	index := spawnKvmesh(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + c.http, "OTEL_METRICS_EXPORTER=otlp,prometheus", "OTEL_METRIC_EXPORT_INTERVAL=100",
		"OTEL_SERVICE_NAME=the-index", late}, "indexer", "--nats", url, "--http", "127.0.0.1:0", "--log-level", "debug")
	index.ready(t)
	if err := e.WaitSubscribers(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	store := model.Event{}
	var tokens []int64
	for i := range 3 {
		store.Hashes = append(store.Hashes, model.Int(uint64(100+i)))
		for j := range 4 {
			tokens = append(tokens, int64(10*i+j))
		}
	}
	store.Tokens = tokens
	if _, err := e.Publish(store); err != nil {
		t.Fatal(err)
	}
	query := map[string]any{"model_name": "m", "token_ids": tokens}
	eventually(t, "the batch is visible", func() bool {
		_, reply, err := ask(http.MethodPost, index.url+"/query", query)
		return err == nil && strings.Contains(string(reply), `"longest_matched":12`)
	})
	if status, reply := traced(t, index.url+"/query", query); status != http.StatusOK {
		t.Fatal(status, string(reply))
	}
	eventually(t, "a worker can be selected", func() bool {
		status, _, err := ask(http.MethodPost, index.url+"/select", query)
		return err == nil && status == http.StatusOK
	})
	if status, reply := traced(t, index.url+"/select", query); status != http.StatusOK {
		t.Fatal(status, string(reply))
	}
	overNATS(t, url, "kvmesh.query.m.default", query)
	overNATS(t, url, "kvmesh.selection.select", query)
	query["min_log_seq"] = 1 << 40
	if status, reply := traced(t, index.url+"/query", query); status != http.StatusServiceUnavailable {
		t.Fatal(status, string(reply))
	}
	eventually(t, "metrics have come over OTLP", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.metrics["kvmesh.indexer.log.seq"] != nil && c.metrics["http.server.request.duration"] != nil && c.metrics["kvmesh.bridge.records"] != nil
	})
	if len(c.named("receive batch")) > 0 {
		t.Error("a span has come before its process ended")
	}
	checkAliases(t, index.url)
	bridge.stop(t)
	index.stop(t)
	c.checkMetrics(t)
	c.checkBatch(t)
	c.checkAsked(t)
	if logs := index.logs.String(); !strings.Contains(logs, "trace_id="+routerTrace) {
		t.Errorf("no line of the log has the router's trace:\n%s", endOf(logs, 2000))
	}
}

// overNATS asks below the router's span.
func overNATS(t *testing.T, url, subject string, body any) {
	t.Helper()
	nc, err := nats.Connect(url)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	msg := nats.NewMsg(subject)
	msg.Header.Set("traceparent", "00-"+routerTrace+"-"+routerSpan+"-01")
	if msg.Data, err = json.Marshal(body); err != nil {
		t.Fatal(err)
	}
	reply, err := nc.RequestMsg(msg, patience)
	if err != nil || reply.Header.Get("Nats-Service-Error-Code") != "" {
		t.Fatal(subject, err, reply)
	}
}

// checkBatch checks the trace of the batch: receive → decode, and receive →
// publish → apply.
func (c *collector) checkBatch(t *testing.T) {
	t.Helper()
	one := func(name, service, by string) exported {
		t.Helper()
		spans := c.named(name)
		if len(spans) != 1 {
			t.Fatalf("%d spans %q, want 1", len(spans), name)
		}
		if spans[0].service != service || spans[0].by != by {
			t.Errorf("%q is of %s, over %s", name, spans[0].service, spans[0].by)
		}
		return spans[0]
	}
	receive, decode := one("receive batch", "kvmesh-bridge", "grpc"), one("decode batch", "kvmesh-bridge", "grpc")
	publish, apply := one("publish record", "kvmesh-bridge", "grpc"), one("apply record", "the-index", "http")
	if len(receive.ParentSpanId) > 0 {
		t.Errorf("the batch is below %x", receive.ParentSpanId)
	}
	for _, s := range []struct{ child, parent exported }{{decode, receive}, {publish, receive}, {apply, publish}} {
		if !bytes.Equal(s.child.TraceId, receive.TraceId) || !bytes.Equal(s.child.ParentSpanId, s.parent.SpanId) {
			t.Errorf("%s is of trace %x, below %x; want %x, below %s, which is %x", s.child.Name, s.child.TraceId, s.child.ParentSpanId, receive.TraceId, s.parent.Name, s.parent.SpanId)
		}
	}
	if apply.EndTimeUnixNano < publish.StartTimeUnixNano || publish.StartTimeUnixNano < receive.StartTimeUnixNano {
		t.Error("the spans are not in their order")
	}
	if n := integer(apply.Attributes, "kvmesh.blocks"); n != 3 || text(apply.Attributes, "kvmesh.instance") != "w" {
		t.Errorf("applied: %v", apply.Attributes)
	}
}

// checkAsked checks what was asked below the router's span: over HTTP and NATS
// there is one span of the request and below it one of the query or selection,
// with a link to the batch.
func (c *collector) checkAsked(t *testing.T) {
	t.Helper()
	applied := c.named("apply record")[0]
	for _, want := range []struct{ server, inner string }{
		{"POST /query", "query index"}, {"kvmesh.query", "query index"}, {"POST /select", "select worker"}, {"kvmesh.selection.select", "select worker"},
	} {
		found := 0
		for _, s := range c.named(want.server) {
			if hex.EncodeToString(s.TraceId) != routerTrace {
				continue // asked without a router's span
			}
			if hex.EncodeToString(s.ParentSpanId) != routerSpan {
				t.Errorf("%s is below %x", want.server, s.ParentSpanId)
			}
			for _, in := range c.named(want.inner) {
				if !bytes.Equal(in.ParentSpanId, s.SpanId) || in.Status.GetCode() != 0 {
					continue
				}
				found++
				if len(in.Links) != 1 || !bytes.Equal(in.Links[0].SpanId, applied.SpanId) || !bytes.Equal(in.Links[0].TraceId, applied.TraceId) {
					t.Errorf("%s below %s has links %v, want one to the batch, %x", want.inner, want.server, in.Links, applied.SpanId)
				}
				if text(in.Attributes, "kvmesh.model") != "m" || integer(in.Attributes, "kvmesh.blocks") != 3 || integer(in.Attributes, "kvmesh.matched") != 3 || integer(in.Attributes, "kvmesh.lag") != 0 {
					t.Errorf("%s below %s: %v", want.inner, want.server, in.Attributes)
				}
			}
		}
		if found != 1 {
			t.Errorf("%d spans %s below %s of the router's trace, want 1", found, want.inner, want.server)
		}
	}
}

// checkMetrics checks the names and units of what has come, by OpenTelemetry's
// conventions: dotted names of which none is the namespace of another, and units that say
// what is counted.
func (c *collector) checkMetrics(t *testing.T) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	name := regexp.MustCompile(`^(kvmesh|http)(\.[a-z]+(_[a-z]+)*)+$`)
	for n, m := range c.metrics {
		if !name.MatchString(n) || m.Description == "" || strings.HasSuffix(n, ".total") || strings.HasSuffix(n, ".seconds") {
			t.Errorf("metric %q, %q", n, m.Description)
		}
		for other := range c.metrics {
			if strings.HasPrefix(other, n+".") {
				t.Errorf("metric %s is the namespace of %s", n, other)
			}
		}
		switch {
		case strings.HasPrefix(m.Unit, "{") && strings.HasSuffix(m.Unit, "}"), m.Unit == "s", m.Unit == "By":
		case m.Unit == "" && (n == "kvmesh.indexer.ready" || n == "kvmesh.load.joined"): // true or false
		default:
			t.Errorf("metric %s has the unit %q", n, m.Unit)
		}
	}
	if len(c.metrics) < 30 {
		t.Errorf("only %d metrics have come", len(c.metrics))
	}
}

// checkAliases checks the metrics that dashboards of Dynamo's indexer know, against
// what has happened.
func checkAliases(t *testing.T, url string) {
	t.Helper()
	var values map[string]float64
	eventually(t, "the index knows that a bridge reads", func() bool {
		values = scrape(t, url)
		return values[`dynamo_kvindexer_listeners{status="active"}`] == 1
	})
	for name, want := range map[string]float64{
		`dynamo_kvindexer_models`:                                                                                                    1,
		`dynamo_kvindexer_workers`:                                                                                                   1,
		`dynamo_kvindexer_listeners{status="failed"}`:                                                                                0,
		`dynamo_kvrouter_kv_cache_events_applied{event_type="stored",status="ok"}`:                                                   1,
		`dynamo_kvrouter_kv_cache_events_applied{event_type="removed",status="ok"}`:                                                  0,
		`dynamo_kvindexer_errors_total{endpoint="/query",status_class="5xx"}`:                                                        1,
		`kvmesh_indexer_operations_total{operation="stored",tier="device"}`:                                                          1,
		`http_server_request_duration_seconds_count{http_request_method="POST",http_response_status_code="503",http_route="/query"}`: 1,
	} {
		if got, ok := values[name]; !ok || got != want {
			t.Errorf("%s is %v (there: %v), want %v", name, got, ok, want)
		}
	}
	requests := values[`dynamo_kvindexer_requests_total{endpoint="/query",method="POST"}`]
	count := values[`dynamo_kvindexer_request_duration_seconds_count{endpoint="/query"}`]
	all := values[`dynamo_kvindexer_request_duration_seconds_bucket{endpoint="/query",le="+Inf"}`]
	if requests < 3 || count != requests || all != requests {
		t.Errorf("%v requests, %v and %v in the histogram", requests, count, all)
	}
}

// scrape returns the metrics of a process.
func scrape(t *testing.T, url string) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for line := range strings.Lines(string(mustAsk(t, http.MethodGet, url+"/metrics", nil))) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if name += "}"; !ok {
			name, value, ok = strings.Cut(strings.TrimSpace(line), " ")
		}
		if v, err := strconv.ParseFloat(value, 64); ok && err == nil && line[0] != '#' {
			out[name] = v
		}
	}
	return out
}

// TestACollectorThatNeverAnswers has kvmesh end all the same, and say what it lost.
func TestACollectorThatNeverAnswers(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() }) // connections are taken by the system, and nobody answers
	p := spawnKvmesh(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=http://" + listener.Addr().String(), "OTEL_BSP_SCHEDULE_DELAY=3600000"},
		"serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0")
	p.ready(t)
	mustAsk(t, http.MethodGet, p.url+"/workers", nil)
	p.stop(t)
	if logs := p.logs.String(); !strings.Contains(logs, "not all telemetry could be exported") {
		t.Errorf("it does not say that it lost something:\n%s", endOf(logs, 2000))
	}
}

// TestTelemetrySettingsThatAreWrong has kvmesh refuse them by name.
func TestTelemetrySettingsThatAreWrong(t *testing.T) {
	p := spawnKvmesh(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=collector:4317", "OTEL_EXPORTER_OTLP_PROTOCOL=smoke"}, "serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0")
	if err := p.wait(t); err == nil {
		t.Error("it ended well")
	}
	for _, want := range []string{`OTEL_EXPORTER_OTLP_ENDPOINT is "collector:4317"`, `OTEL_EXPORTER_OTLP_PROTOCOL is "smoke"`} {
		if !strings.Contains(p.logs.String(), want) {
			t.Errorf("it does not say %q:\n%s", want, p.logs)
		}
	}
}
