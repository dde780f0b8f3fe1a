package load

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Transport carries messages between replicas, as core NATS does: to all who
// listen, soon, in the order of each sender, or not at all.
type Transport interface {
	// Publish sends a message to all subscribers of a subject, or fails at
	// once. It does not keep data.
	Publish(subject string, data []byte) error
	// Subscribe has f called with each message on a subject, one at a time,
	// until unsubscribe is called. f does not keep data.
	Subscribe(subject string, f func(data []byte)) (unsubscribe func(), err error)
}

// OverNATS returns the Transport of a NATS connection. The connection should not
// buffer what it can't send (nats.ReconnectBufSize(-1)).
func OverNATS(nc *nats.Conn) Transport { return natsTransport{nc} }

type natsTransport struct{ nc *nats.Conn }

func (t natsTransport) Publish(subject string, data []byte) error {
	return t.nc.Publish(subject, data)
}

// MaxMessage returns the largest message that the server takes; 0 before it has
// said.
func (t natsTransport) MaxMessage() int { return int(t.nc.MaxPayload()) }

func (t natsTransport) Subscribe(subject string, f func([]byte)) (func(), error) {
	sub, err := t.nc.Subscribe(subject, func(m *nats.Msg) { f(m.Data) })
	if err != nil {
		return nil, err
	}
	return func() { _ = sub.Unsubscribe() }, nil // it fails on a closed connection only
}

// Subjects of a group: all replicas listen to the first, one replica to the
// other.
func subjectAll(group string) string { return "kvmesh.load." + event.Escape(group) + ".all" }

func subjectTo(group, id string) string {
	return "kvmesh.load." + event.Escape(group) + ".to." + event.Escape(id)
}

// MeterProvider is where metrics go; nil: nowhere.
type MeterProvider = metric.MeterProvider

// metrics count what a Shared does. Gauges are functions of its state.
type metrics struct {
	ctx       context.Context
	heals     metric.Int64Counter
	bad       metric.Int64Counter
	unsent    metric.Int64Counter
	expired   metric.Int64Counter
	notKept   metric.Int64Counter
	forgotten metric.Int64Counter
	gauges    metric.Registration
}

func newMetrics(provider MeterProvider, s *Shared) (*metrics, error) {
	if provider == nil {
		provider = noop.NewMeterProvider()
	}
	meter := provider.Meter("github.com/kvmesh/kvmesh/replica/load")
	m := &metrics{ctx: context.Background()}
	var errs []error
	counter := func(at *metric.Int64Counter, name, unit, help string) {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		if err == nil {
			c.Add(context.Background(), 0) // there from the beginning, so that its first increase is one
		}
		*at, errs = c, append(errs, err)
	}
	gauge := func(name, unit, help string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	counter(&m.heals, "kvmesh.load.heals", "{heal}", "States of other replicas that were asked for, because messages were missing.")
	counter(&m.bad, "kvmesh.load.messages.bad", "{message}", "Messages of other replicas that could not be read.")
	counter(&m.unsent, "kvmesh.load.messages.unsent", "{message}", "Messages that NATS did not take; other replicas ask for them.")
	counter(&m.expired, "kvmesh.load.reservations_expired", "{reservation}", "Reservations that nobody freed.")
	counter(&m.notKept, "kvmesh.load.not_kept", "{entry}", "Selections and sessions that there was no room for.")
	counter(&m.forgotten, "kvmesh.load.frees.forgotten", "{free}", "Frees of unknown reservations that there was no room for.")
	reservations := gauge("kvmesh.load.reservations", "{reservation}", "Active reservations, on all replicas.")
	sessions := gauge("kvmesh.load.sessions", "{session}", "Sessions that are remembered.")
	peers := gauge("kvmesh.load.replicas", "{replica}", "Replicas that are there, with this one.")
	joined := gauge("kvmesh.load.joined", "", "1 if the load of the other replicas is known, else 0.")
	reg, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		total, _, _ := s.Total()
		o.ObserveInt64(reservations, total.Requests)
		o.ObserveInt64(sessions, int64(s.Sessions()))
		o.ObserveInt64(peers, int64(len(s.Peers())))
		up := int64(0)
		if s.Ready() == nil {
			up = 1
		}
		o.ObserveInt64(joined, up)
		return nil
	}, reservations, sessions, peers, joined)
	m.gauges = reg
	return m, errors.Join(append(errs, err)...)
}

func (m *metrics) close() {
	if m.gauges != nil {
		_ = m.gauges.Unregister() // never fails
	}
}
