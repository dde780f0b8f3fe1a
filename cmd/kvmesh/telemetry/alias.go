package telemetry

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Aliases returns what from gathers, with the metrics of Dynamo's indexer that
// dashboards know, made of kvmesh's own: dynamo_kvindexer_* and
// dynamo_kvrouter_kv_cache_events_applied. One that there is nothing to make of is
// left out.
func Aliases(from prometheus.Gatherer) prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := from.Gather()
		for _, f := range families {
			families = append(families, aliasesOf(f)...)
		}
		// A family without metrics would be the end of the page.
		families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return len(f.GetMetric()) == 0 })
		slices.SortFunc(families, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
		return families, err
	})
}

// aliasesOf returns the families that are made of one.
func aliasesOf(f *dto.MetricFamily) []*dto.MetricFamily {
	switch f.GetName() {
	case "http_server_request_duration_seconds":
		return requestAliases(f)
	case "kvmesh_indexer_partitions":
		return []*dto.MetricFamily{regroup(f, "dynamo_kvindexer_models", "Models and routing groups.", dto.MetricType_GAUGE, func(*dto.Metric) []*dto.LabelPair { return nil })}
	case "kvmesh_indexer_workers":
		return []*dto.MetricFamily{regroup(f, "dynamo_kvindexer_workers", "Workers that are registered.", dto.MetricType_GAUGE, func(*dto.Metric) []*dto.LabelPair { return nil })}
	case "kvmesh_fleet_listeners":
		return []*dto.MetricFamily{regroup(f, "dynamo_kvindexer_listeners", "Listeners, by status.", dto.MetricType_GAUGE, func(m *dto.Metric) []*dto.LabelPair {
			return labels("status", valueOf(m, "state"))
		})}
	case "kvmesh_indexer_operations_total":
		return []*dto.MetricFamily{regroup(f, "dynamo_kvrouter_kv_cache_events_applied", "Operations in the device tier that were applied, by type.", dto.MetricType_COUNTER, func(m *dto.Metric) []*dto.LabelPair {
			if valueOf(m, "tier") != "device" {
				return none
			}
			return labels("event_type", valueOf(m, "operation"), "status", "ok")
		})}
	}
	return nil
}

// requestAliases returns the families of HTTP requests. Those to paths that there
// are not have no endpoint, and are not in them.
func requestAliases(f *dto.MetricFamily) []*dto.MetricFamily {
	routed := func(label func(route string, m *dto.Metric) []*dto.LabelPair) func(*dto.Metric) []*dto.LabelPair {
		return func(m *dto.Metric) []*dto.LabelPair {
			if route := valueOf(m, "http_route"); route != "" {
				return label(route, m)
			}
			return none
		}
	}
	return []*dto.MetricFamily{
		regroup(f, "dynamo_kvindexer_request_duration_seconds", "Duration of HTTP requests.", dto.MetricType_HISTOGRAM, routed(func(route string, _ *dto.Metric) []*dto.LabelPair {
			return labels("endpoint", route)
		})),
		regroup(f, "dynamo_kvindexer_requests_total", "HTTP requests.", dto.MetricType_COUNTER, routed(func(route string, m *dto.Metric) []*dto.LabelPair {
			return labels("endpoint", route, "method", valueOf(m, "http_request_method"))
		})),
		regroup(f, "dynamo_kvindexer_errors_total", "HTTP requests that failed.", dto.MetricType_COUNTER, routed(func(route string, m *dto.Metric) []*dto.LabelPair {
			status := valueOf(m, "http_response_status_code")
			if status < "4" {
				return none
			}
			return labels("endpoint", route, "status_class", status[:1]+"xx")
		})),
	}
}

// none is the labels of what an alias does not have.
var none = []*dto.LabelPair{nil}

// regroup adds up the metrics of a family by other labels, into a family of another
// name and type. Of a histogram, a counter is the number of its samples.
func regroup(f *dto.MetricFamily, name, help string, as dto.MetricType, label func(*dto.Metric) []*dto.LabelPair) *dto.MetricFamily {
	out := &dto.MetricFamily{Name: &name, Help: &help, Type: &as}
	groups := map[string]*dto.Metric{}
	for _, m := range f.GetMetric() {
		l := label(m)
		if len(l) == 1 && l[0] == nil {
			continue
		}
		key := ""
		for _, pair := range l {
			key += pair.GetValue() + "\x00"
		}
		g := groups[key]
		if g == nil {
			g = &dto.Metric{Label: l}
			groups[key] = g
			out.Metric = append(out.Metric, g)
		}
		switch as {
		case dto.MetricType_HISTOGRAM:
			addHistogram(g, m.GetHistogram())
		case dto.MetricType_GAUGE:
			value := g.GetGauge().GetValue() + m.GetGauge().GetValue()
			g.Gauge = &dto.Gauge{Value: &value}
		default:
			value := g.GetCounter().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			g.Counter = &dto.Counter{Value: &value}
		}
	}
	return out
}

// addHistogram adds a histogram to one with the same buckets, or to none.
func addHistogram(to *dto.Metric, h *dto.Histogram) {
	if to.Histogram == nil {
		to.Histogram = &dto.Histogram{}
		for _, b := range h.GetBucket() {
			to.Histogram.Bucket = append(to.Histogram.Bucket, &dto.Bucket{UpperBound: b.UpperBound, CumulativeCount: new(uint64)})
		}
	}
	count, sum := to.Histogram.GetSampleCount()+h.GetSampleCount(), to.Histogram.GetSampleSum()+h.GetSampleSum()
	to.Histogram.SampleCount, to.Histogram.SampleSum = &count, &sum
	for i, b := range h.GetBucket() {
		*to.Histogram.Bucket[i].CumulativeCount += b.GetCumulativeCount()
	}
}

// labels returns pairs of names and values.
func labels(pairs ...string) []*dto.LabelPair {
	var out []*dto.LabelPair
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, &dto.LabelPair{Name: &pairs[i], Value: &pairs[i+1]})
	}
	return out
}

// valueOf returns the value of a label, or "".
func valueOf(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}
