package replica_test

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/hub"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
	"github.com/kvmesh/kvmesh/replica"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// A NATS server that is shut down while a stream is being made leaves its store behind.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// patience is how long a test waits for what has to happen.
const patience = 30 * time.Second

// fleet is a NATS server, engines that publish, and members: bridges with
// leases.
type fleet struct {
	t       *testing.T
	ctx     context.Context
	log     *slog.Logger
	nats    *hub.Hub
	engines []*engine
	catalog *replica.Catalog // of an onlooker
	js      jetstream.JetStream
}

// engine is an engine with what it holds in truth.
type engine struct {
	*mock.Engine
	worker event.Worker

	mu    sync.Mutex
	truth *model.Source
	load  *mock.Workload
}

func newFleet(t *testing.T, engines int, o mock.Options) *fleet {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	f := &fleet{t: t, ctx: ctx, nats: hub.New(t.TempDir(), 0), log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))}
	f.startNATS()
	t.Cleanup(f.nats.Stop)
	nc, js := f.connect()
	t.Cleanup(nc.Close)
	f.js = js
	f.catalog = replica.NewCatalog(js, replica.DefaultCatalog(), f.log.With("of", "onlooker"))
	t.Cleanup(run(f.catalog.Run))
	for i := range engines {
		f.addEngine(i, o)
	}
	return f
}

func (f *fleet) addEngine(i int, o mock.Options) {
	f.t.Helper()
	e, err := mock.NewEngine(o)
	if err != nil {
		f.t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(e.Stop)
	x := &engine{Engine: e, truth: model.New(16, ""), load: mock.NewWorkload(mock.WorkloadOptions{Seed: uint64(i), Capacity: 256})}
	x.worker = event.Worker{
		Source:   event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i)},
		Endpoint: e.Addr(), ReplayEndpoint: e.ReplayAddr(), BlockSize: 16,
	}
	f.engines = append(f.engines, x)
}

// run runs a task until stop is called.
func run(task func(context.Context) error) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { task(ctx) })
	return func() { cancel(); wg.Wait() }
}

func (f *fleet) startNATS() {
	f.t.Helper()
	if err := f.nats.Start(); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fleet) connect() (*nats.Conn, jetstream.JetStream) {
	f.t.Helper()
	nc, js, err := hub.Connect(f.nats)
	if err != nil {
		f.t.Fatal(err)
	}
	return nc, js
}

// member is a bridge with leases.
type member struct {
	f      *fleet
	nc     *nats.Conn
	leases *replica.Leases
	meter  *metric.ManualReader
	// drain ends it as a signal would, kill as a crash would.
	drain, kill func()
}

func (f *fleet) member(id string, change func(*replica.LeaseConfig)) *member {
	f.t.Helper()
	nc, js := f.connect()
	log := f.log.With("of", id)
	cfg := bridge.Default(id)
	cfg.ZMTP.BackoffMin, cfg.ZMTP.BackoffMax = 2*time.Millisecond, 50*time.Millisecond
	cfg.RepairInterval, cfg.ProbeInterval = 10*time.Millisecond, 50*time.Millisecond
	cfg.StopTimeout = 5 * time.Second
	var catalog *replica.Catalog
	edge, err := bridge.New(nc, js, cfg, bridge.Options{Logger: log, Attachments: attachments{&catalog}})
	if err != nil {
		f.t.Fatal(err)
	}
	lc := replica.DefaultLeases(id)
	lc.TTL, lc.StandbyTimeout = 2*time.Second, patience
	if change != nil {
		change(&lc)
	}
	m := &member{f: f, nc: nc, meter: metric.NewManualReader()}
	m.leases, err = replica.NewLeases(js, edge, lc, replica.LeaseOptions{Logger: log, Meter: metric.NewMeterProvider(metric.WithReader(m.meter)), Refresh: func(ctx context.Context, s event.Source) error { return catalog.Refresh(ctx, s) }})
	if err != nil {
		f.t.Fatal(err)
	}
	catalog = replica.NewCatalog(js, replica.DefaultCatalog(), log, m.leases)
	stopCatalog, stopEdge, stopLeases := run(catalog.Run), run(edge.Run), run(m.leases.Run)
	once := sync.Once{}
	m.drain = func() {
		once.Do(func() {
			stopLeases()
			stopEdge()
			if err := m.leases.Close(f.ctx); err != nil {
				f.t.Error(err)
			}
			stopCatalog()
			nc.Close()
		})
	}
	m.kill = func() {
		once.Do(func() {
			nc.Close()
			stopLeases()
			stopEdge()
			stopCatalog()
		})
	}
	f.t.Cleanup(m.kill)
	return m
}

func (f *fleet) await(what string, cond func() bool) {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(f.ctx, patience)
	defer cancel()
	for !cond() {
		select {
		case <-time.After(2 * time.Millisecond):
		case <-ctx.Done():
			f.t.Fatalf("%s: that did not come to be", what)
		}
	}
}

// register registers all engines.
func (f *fleet) register() {
	f.t.Helper()
	for _, e := range f.engines {
		f.await("registration", func() bool { return f.catalog.Register(f.ctx, e.worker) == nil })
	}
}

// publish has every engine publish batches.
func (f *fleet) publish(n int) {
	for range n {
		for _, e := range f.engines {
			e.publish(f.t)
		}
	}
}

func (e *engine) publish(t *testing.T) {
	e.mu.Lock()
	defer e.mu.Unlock()
	events := e.load.Next()
	for _, v := range events {
		e.truth.Apply(v)
	}
	if _, err := e.Publish(events...); err != nil {
		t.Error(err)
	}
}

// keepPublishing publishes until stop is called.
func (f *fleet) keepPublishing() (stop func()) {
	return run(func(ctx context.Context) error {
		ticker := time.NewTicker(2 * time.Millisecond)
		defer ticker.Stop()
		for ctx.Err() == nil {
			f.publish(1)
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
		return nil
	})
}

// holds waits until every engine's worker is held by one of the members, so many
// by each.
func (f *fleet) holds(want map[*member]int) {
	f.t.Helper()
	f.await("the spread", func() bool {
		all := map[event.Source]bool{}
		for m, n := range want {
			held := m.leases.Holding()
			for _, s := range held {
				all[s] = true
			}
			if len(held) != n {
				return false
			}
		}
		return len(all) == len(f.engines)
	})
}

// atRest tells whether every worker has a claim, and no claim a successor.
func (f *fleet) atRest() bool {
	f.t.Helper()
	kv, err := f.js.KeyValue(f.ctx, replica.DefaultLeases("").Bucket)
	if err != nil {
		f.t.Fatal(err)
	}
	for _, e := range f.engines {
		at, err := kv.Get(f.ctx, "c."+e.worker.Key())
		if err != nil || strings.Contains(string(at.Value()), "successor") {
			return false
		}
	}
	return true
}

// settled waits until the log has all that the engines have published, and that
// alone, and checks that nothing was lost, and no engine taken for restarted.
func (f *fleet) settled() {
	f.t.Helper()
	r := feed.NewReader()
	why := ""
	err := r.Until(f.ctx, f.js, func(r *feed.Reader) bool {
		for _, e := range f.engines {
			if why = e.differs(r.Source(e.worker.Source)); why != "" {
				return false
			}
		}
		return true
	})
	if err != nil {
		f.t.Fatalf("%v: %s", err, why)
	}
	retired := f.retirements()
	for _, e := range f.engines {
		s := r.Source(e.worker.Source)
		if len(s.Gaps) > 0 || s.LostBefore > 0 {
			f.t.Errorf("%s: gaps %v, %d lost before", s.Name.Instance, s.Gaps, s.LostBefore)
		}
		if len(s.Resets) > 1+retired[s.Name] { // one a registration
			f.t.Errorf("%s: resets %v", s.Name.Instance, s.Resets)
		}
	}
}

func (e *engine) differs(s *feed.Source) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if s == nil || !s.Batches || s.Last+1 != e.Next() {
		return fmt.Sprintf("%s is not there yet: %d batches", e.worker.Instance, e.Next())
	}
	if diff := s.Diff(e.truth.Resident()); diff != "" {
		return fmt.Sprintf("%s: %s; gaps %v, resets %v", e.worker.Instance, diff, s.Gaps, s.Resets)
	}
	return ""
}

// retirements counts, by source, the records that say that a worker is gone.
func (f *fleet) retirements() map[event.Source]int {
	f.t.Helper()
	stream, err := f.js.Stream(f.ctx, "KV")
	if err != nil {
		f.t.Fatal(err)
	}
	info, err := stream.Info(f.ctx)
	if err != nil {
		f.t.Fatal(err)
	}
	out := map[event.Source]int{}
	var dec event.Decoder
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		msg, err := stream.GetMsg(f.ctx, seq)
		if err != nil {
			f.t.Fatal(err)
		}
		source, err := event.DefaultLog().Parse(msg.Subject)
		if err != nil {
			f.t.Fatal(err)
		}
		if err := dec.Reset(msg.Data); err != nil {
			f.t.Fatal(err)
		}
		for dec.Next() {
			if dec.Op.Kind == event.OpRetired {
				out[source]++
			}
		}
	}
	return out
}

// count returns the sum of a metric of a member.
func (m *member) count(name string) (sum int64) {
	m.f.t.Helper()
	var all metricdata.ResourceMetrics
	if err := m.meter.Collect(m.f.ctx, &all); err != nil {
		m.f.t.Fatal(err)
	}
	for _, scope := range all.ScopeMetrics {
		for _, v := range scope.Metrics {
			switch data := v.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					if v.Name == name {
						sum += p.Value
					}
				}
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					if v.Name == name {
						sum += p.Value
					}
				}
			}
		}
	}
	return sum
}
