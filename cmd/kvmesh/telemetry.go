package main

import (
	"context"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kvmesh/kvmesh/cmd/kvmesh/telemetry"
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
