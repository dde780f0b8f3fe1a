package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvmesh/kvmesh/cmd/kvmesh/telemetry"
	"github.com/kvmesh/kvmesh/indexer/api"
)

// startTelemetry sets up what the process tells of itself, and returns the logger
// that goes with it. Who calls it shuts n.tel down.
func (n *node) startTelemetry(ctx context.Context, registry *prometheus.Registry, log *slog.Logger) (*slog.Logger, error) {
	service := "kvmesh"
	if n.role != "serve" {
		service += "-" + n.role
	}
	var err error
	n.tel, err = telemetry.Start(ctx, telemetry.Options{Service: service, Version: version(), Instance: n.id, Registry: registry, Logger: log})
	if err == nil && n.tel.Tracer != nil {
		log = telemetry.Logger(log)
	}
	return log, err
}

// measureListeners has the process measure in which states the listeners of all
// registered workers are.
func (n *node) measureListeners(front *api.Server) error {
	_, err := n.tel.Meter.Meter("github.com/kvmesh/kvmesh/cmd/kvmesh").Int64ObservableGauge("kvmesh.fleet.listeners",
		metric.WithUnit("{listener}"), metric.WithDescription("Listeners of the registered workers, one a rank, by state."),
		metric.WithInt64Callback(func(_ context.Context, o metric.Int64Observer) error {
			for state, count := range front.Listeners() {
				o.Observe(int64(count), metric.WithAttributes(attribute.String("state", state)))
			}
			return nil
		}))
	return err
}
