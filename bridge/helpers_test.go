package bridge_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/hub"
)

func TestMain(m *testing.M) {
	// A server that is shut down while it makes a stream leaves these behind.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// patience is how long a test waits for what has to happen. Nothing waits for so
// long where all is well.
const patience = 2 * time.Minute

// natsHub is a NATS server that ends its test where it can't do as it is told.
type natsHub struct {
	*hub.Hub
	t testing.TB
}

// newHub returns a server, not started. maxPayload bounds a message; 0 is the
// server's own bound.
func newHub(t testing.TB, maxPayload int32) *natsHub {
	h := &natsHub{hub.New(t.TempDir(), maxPayload), t}
	t.Cleanup(h.Stop)
	return h
}

func (h *natsHub) start() {
	h.t.Helper()
	if err := h.Start(); err != nil {
		h.t.Fatal(err)
	}
}

func (h *natsHub) connect() (*nats.Conn, jetstream.JetStream) {
	h.t.Helper()
	nc, js, err := hub.Connect(h, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		h.t.Fatal(err)
	}
	return nc, js
}

// rig is a NATS server, and a naive reader of the log that checks each record
// against what the actors have published.
type rig struct {
	t   testing.TB
	ctx context.Context
	hub *natsHub
	nc  *nats.Conn
	js  jetstream.JetStream
	log *feed.Reader

	actors      map[event.Source]*actor
	tracer      trace.TracerProvider // of bridges
	attachments bridge.Attachments   // of bridges
	loose       bool                 // records are not compared with the actors

	mu       sync.Mutex
	statuses map[string]event.ListenerStatus // what bridges said last of each source
}

func newRig(t testing.TB) *rig { return newRigOn(t, newHub(t, 0)) }

func newRigOn(t testing.TB, h *natsHub) *rig {
	h.start()
	ctx, cancel := context.WithCancel(t.Context())
	r := &rig{t: t, ctx: ctx, hub: h, log: feed.NewReader(), actors: map[event.Source]*actor{}, statuses: map[string]event.ListenerStatus{}}
	r.log.After = r.compare
	r.nc, r.js = h.connect()
	t.Cleanup(func() { cancel(); r.nc.Close() })
	if _, err := r.nc.Subscribe(event.StatusSubjects, r.heard); err != nil {
		t.Fatal(err)
	}
	return r
}

// in makes a subtest use the rig, for as long as it runs.
func (r *rig) in(t testing.TB) *rig {
	t.Helper()
	outer := r.t
	r.t = t
	t.Cleanup(func() { r.t = outer })
	return r
}

func (r *rig) heard(msg *nats.Msg) {
	var st event.Status
	if err := json.Unmarshal(msg.Data, &st); err != nil {
		r.t.Errorf("status: %v", err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range st.Listeners {
		r.statuses[l.Source] = l
	}
}

// status returns what a bridge said last of an actor's source.
func (r *rig) status(a *actor) event.ListenerStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.statuses[a.worker.Key()]
}

// compare compares a source after a record with what its actor has published.
func (r *rig) compare(s *feed.Source) error {
	if a := r.actors[s.Name]; a != nil && !r.loose {
		return a.oracle.check(s)
	}
	return nil
}

// await waits until cond holds.
func (r *rig) await(what string, cond func() bool) {
	r.t.Helper()
	if !r.eventually(cond) {
		r.t.Fatalf("waited in vain: %s", what)
	}
}

func (r *rig) eventually(cond func() bool) bool {
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) || r.t.Context().Err() != nil {
			return false
		}
	}
	return true
}

// read waits until the log says so, and checks each record on the way.
func (r *rig) read(what string, done func() bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, patience)
	defer cancel()
	if err := r.log.Until(ctx, r.js, func(*feed.Reader) bool { return done() }); err != nil {
		r.t.Fatalf("%s: %v", what, err)
	}
}

// source returns what the log says of an actor; an empty Source if nothing.
func (r *rig) source(a *actor) *feed.Source {
	if s := r.log.Source(a.worker.Source); s != nil {
		return s
	}
	return &feed.Source{}
}

// synced waits until the log has all that the actors have published, with what was
// lost for good on record, and is exact.
func (r *rig) synced(actors ...*actor) {
	r.t.Helper()
	for _, a := range actors {
		r.read(fmt.Sprintf("%s has %d batches", a.worker.Instance, a.Next()), func() bool { return a.covered(r.source(a)) })
		if diff := r.source(a).Diff(a.oracle.resident()); diff != "" {
			r.t.Fatalf("%s in the end: %s", a.worker.Instance, diff)
		}
	}
}

// edge is a bridge with a NATS connection of its own.
type edge struct {
	*bridge.Bridge
	r      *rig
	nc     *nats.Conn
	js     jetstream.JetStream
	meter  *sdk.ManualReader
	cancel context.CancelFunc
	done   chan error
}

// quick is a configuration with short waits, and long timeouts, so that a loaded
// machine does not look like a faulty peer.
func quick(id string) bridge.Config {
	cfg := bridge.Default(id)
	cfg.RepairInterval = 10 * time.Millisecond
	cfg.RepairTimeout = 10 * time.Second
	cfg.ProbeInterval = time.Hour
	cfg.PublishTimeout = 5 * time.Second
	cfg.StopTimeout = patience
	cfg.ZMTP.BackoffMin, cfg.ZMTP.BackoffMax = 5*time.Millisecond, 20*time.Millisecond
	return cfg
}

// bridge runs a Bridge until the test ends.
func (r *rig) bridge(change ...func(*bridge.Config)) *edge {
	r.t.Helper()
	cfg := quick("edge")
	cfg.Log = r.log.Log
	for _, f := range change {
		f(&cfg)
	}
	e := &edge{r: r, meter: sdk.NewManualReader(), done: make(chan error, 1)}
	e.nc, e.js = r.hub.connect()
	provider := sdk.NewMeterProvider(sdk.WithReader(e.meter))
	log := slog.New(slog.NewTextHandler(r.t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	if _, ok := r.t.(*testing.B); ok {
		log = slog.New(slog.DiscardHandler)
	}
	var err error
	if e.Bridge, err = bridge.New(e.nc, e.js, cfg, bridge.Options{Logger: log, Meter: provider, Tracer: r.tracer, Attachments: r.attachments}); err != nil {
		r.t.Fatal(err)
	}
	var ctx context.Context
	ctx, e.cancel = context.WithCancel(context.Background())
	go func() { e.done <- e.Run(ctx) }()
	r.t.Cleanup(e.stop)
	return e
}

// stop ends the bridge in good order.
func (e *edge) stop() {
	if e.cancel == nil {
		return
	}
	e.cancel()
	e.cancel = nil
	select {
	case err := <-e.done:
		if err != nil && !e.nc.IsClosed() {
			e.r.t.Errorf("bridge: %v", err)
		}
	case <-time.After(2 * patience):
		e.r.t.Error("the bridge does not stop")
	}
	e.nc.Close()
}

// kill ends the bridge like a crash: whatever it has not written yet, it never
// writes.
func (e *edge) kill() {
	e.nc.Close()
	e.stop()
}

// serve has the bridge read actors, and waits until it has connected.
func (e *edge) serve(actors ...*actor) {
	e.r.t.Helper()
	for _, a := range actors {
		e.Set(a.worker)
	}
	for _, a := range actors {
		e.connected(a)
	}
}

// connected waits until an actor has a subscriber.
func (e *edge) connected(a *actor) {
	e.r.t.Helper()
	ctx, cancel := context.WithTimeout(e.r.ctx, patience)
	defer cancel()
	if err := a.WaitSubscribers(ctx, 1); err != nil {
		e.r.t.Fatal(err)
	}
}

// count returns the value of a counter; of that with the given reason, if one is
// given, else of all together.
func (e *edge) count(name string, reason ...string) int64 {
	e.r.t.Helper()
	var data metricdata.ResourceMetrics
	if err := e.meter.Collect(context.Background(), &data); err != nil {
		e.r.t.Fatal(err)
	}
	sum := int64(0)
	for _, scope := range data.ScopeMetrics {
		for _, m := range scope.Metrics {
			values, ok := m.Data.(metricdata.Sum[int64])
			if m.Name != name || !ok {
				continue
			}
			for _, p := range values.DataPoints {
				if v, _ := p.Attributes.Value("reason"); len(reason) == 0 || v.AsString() == reason[0] {
					sum += p.Value
				}
			}
		}
	}
	return sum
}

// freePort returns a port that nothing listens on, below those that the kernel
// gives to outgoing connections.
func freePort(t testing.TB) string {
	t.Helper()
	for range 200 {
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 20_000+rand.IntN(12_000)))
		if err == nil {
			defer ln.Close()
			return portOf(t, "tcp://"+ln.Addr().String())
		}
	}
	t.Fatal("no free port")
	return ""
}

func portOf(t testing.TB, endpoint string) string {
	t.Helper()
	_, port, err := net.SplitHostPort(strings.TrimPrefix(endpoint, "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	return port
}
