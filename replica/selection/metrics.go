package selection

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvmesh/kvmesh/replica/load"
)

// metrics count what a Selector does.
type metrics struct {
	ctx        context.Context
	selections metric.Int64Counter
	ok         metric.MeasurementOption
	failed     metric.MeasurementOption
	full       metric.MeasurementOption
	overloaded metric.MeasurementOption
}

func newMetrics(provider load.MeterProvider, s *Selector) (*metrics, error) {
	if provider == nil {
		provider = noop.NewMeterProvider()
	}
	meter := provider.Meter("github.com/kvmesh/kvmesh/replica/selection")
	result := func(name string) metric.MeasurementOption {
		return metric.WithAttributeSet(attribute.NewSet(attribute.String("result", name)))
	}
	m := &metrics{ctx: context.Background(), ok: result("selected"), failed: result("failed"), full: result("queue_full"), overloaded: result("overloaded")}
	var errs []error
	var err error
	m.selections, err = meter.Int64Counter("kvmesh.selection.selections", metric.WithUnit("{selection}"), metric.WithDescription("Selections, by their result."))
	errs = append(errs, err)
	if err == nil { // there from the beginning, so that its first increase is one
		for _, with := range []metric.MeasurementOption{m.ok, m.failed, m.full, m.overloaded} {
			m.selections.Add(m.ctx, 0, with)
		}
	}
	workers, err := meter.Int64ObservableGauge("kvmesh.selection.workers", metric.WithUnit("{rank}"), metric.WithDescription("Worker ranks that can be chosen."))
	errs = append(errs, err)
	queued, err := meter.Int64ObservableGauge("kvmesh.selection.queued", metric.WithUnit("{request}"), metric.WithDescription("Requests that are held back because all workers are busy."))
	errs = append(errs, err)
	_, err = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		o.ObserveInt64(workers, int64(s.Schedulable()))
		n := 0
		for _, name := range s.Partitions() {
			one, _ := s.Queued(name)
			n += one
		}
		o.ObserveInt64(queued, int64(n))
		return nil
	}, workers, queued)
	return m, errors.Join(append(errs, err)...)
}

func (m *metrics) selected(err error) {
	with := m.ok
	switch {
	case errors.Is(err, ErrQueueFull):
		with = m.full
	case errors.Is(err, ErrOverloaded):
		with = m.overloaded
	case err != nil:
		with = m.failed
	}
	m.selections.Add(m.ctx, 1, with)
}
