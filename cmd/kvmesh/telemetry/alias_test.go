package telemetry

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Requests of which none has failed are an alias without anything in it, and the
// page is whole all the same.
func TestAliasesOfRequestsThatSucceed(t *testing.T) {
	registry := prometheus.NewRegistry()
	requests := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "http_server_request_duration_seconds"},
		[]string{"http_route", "http_request_method", "http_response_status_code"})
	registry.MustRegister(requests)
	requests.WithLabelValues("/metrics", "GET", "200").Observe(0.001)
	reply := httptest.NewRecorder()
	promhttp.HandlerFor(Aliases(registry), promhttp.HandlerOpts{}).ServeHTTP(reply, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	page := reply.Body.String()
	for _, want := range []string{"\nhttp_server_request_duration_seconds_count{", "\ndynamo_kvindexer_requests_total{"} {
		if !strings.Contains("\n"+page, want) {
			t.Errorf("no %q in %q", want, page)
		}
	}
	if strings.Contains(page, "dynamo_kvindexer_errors_total") {
		t.Errorf("errors in %q", page)
	}
}
