package replica

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
)

// leaseMetrics count what Leases does.
type leaseMetrics struct {
	takeovers, handovers, yields metric.Int64Counter
	gauges                       metric.Registration
}

func newLeaseMetrics(provider metric.MeterProvider, l *Leases) (*leaseMetrics, error) {
	if provider == nil {
		provider = noop.NewMeterProvider()
	}
	meter := provider.Meter("github.com/kvmesh/kvmesh/replica")
	m := &leaseMetrics{}
	var errs []error
	counter := func(at *metric.Int64Counter, name, help string) {
		c, err := meter.Int64Counter(name, metric.WithUnit("{worker}"), metric.WithDescription(help))
		*at, errs = c, append(errs, err)
	}
	counter(&m.takeovers, "kvmesh.bridge.takeovers", "Workers taken over from bridges that were dead.")
	counter(&m.handovers, "kvmesh.bridge.handovers", "Workers handed over to other bridges.")
	counter(&m.yields, "kvmesh.bridge.yields", "Workers given up because another bridge had taken them.")
	held, err := meter.Int64ObservableGauge("kvmesh.bridge.workers", metric.WithUnit("{worker}"), metric.WithDescription("Workers of this bridge, by what it does with them."))
	errs = append(errs, err)
	bridges, err := meter.Int64ObservableGauge("kvmesh.bridge.sessions", metric.WithUnit("{bridge}"), metric.WithDescription("Bridges that are alive, as this one sees it."))
	errs = append(errs, err)
	m.gauges, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		l.mu.Lock()
		count := map[doing]int64{writing: 0, standing: 0}
		for _, p := range l.parts {
			count[p.doing]++
		}
		alive := int64(len(l.sessions))
		l.mu.Unlock()
		o.ObserveInt64(held, count[writing], metric.WithAttributes(attribute.String("role", "writing")))
		o.ObserveInt64(held, count[standing], metric.WithAttributes(attribute.String("role", "standby")))
		o.ObserveInt64(bridges, alive)
		return nil
	}, held, bridges)
	return m, errors.Join(append(errs, err)...)
}
