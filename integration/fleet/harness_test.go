package fleet

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/hub"
	"github.com/kvmesh/kvmesh/replica"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// A NATS server that is shut down while a stream is being made leaves its store behind.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// patience is how long a test waits for something that does come about.
const patience = 3 * time.Minute

// service is a whole deployment in this process: NATS, a bridge, a catalog, and
// indexers.
type service struct {
	t       *testing.T
	ctx     context.Context
	nats    *hub.Hub
	bridge  *bridge.Bridge
	catalog *replica.Catalog
	indexes []*indexer.Indexer
	stop    func() // stops all of it, and waits
	why     string // what a condition waits for
}

func newService(t *testing.T, indexers int, change func(*bridge.Config)) *service {
	t.Helper()
	s := hub.New(t.TempDir(), 0)
	if err := s.Start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	var conns []*nats.Conn
	v := &service{t: t, ctx: ctx, nats: s}
	v.stop = sync.OnceFunc(func() {
		cancel()
		tasks.Wait()
		for _, nc := range conns {
			nc.Close()
		}
		s.Stop()
	})
	t.Cleanup(v.stop)
	connect := func() (*nats.Conn, jetstream.JetStream) {
		nc, js, err := hub.Connect(s)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, nc)
		return nc, js
	}
	run := func(f func(context.Context) error) {
		tasks.Go(func() {
			if err := f(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	quiet := slog.New(slog.DiscardHandler)
	nc, js := connect()
	cfg := bridge.Default("bridge")
	change(&cfg)
	var err error
	if v.bridge, err = bridge.New(nc, js, cfg, bridge.Options{Logger: quiet}); err != nil {
		t.Fatal(err)
	}
	observers := []replica.Observer{edge{v.bridge}}
	for range indexers {
		nc, js := connect()
		x, err := indexer.New(nc, js, indexer.Default(), indexer.Options{Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		v.indexes = append(v.indexes, x)
		observers = append(observers, x)
		run(x.Run)
	}
	_, js = connect()
	v.catalog = replica.NewCatalog(js, replica.DefaultCatalog(), quiet, observers...)
	run(v.catalog.Run)
	run(v.bridge.Run)
	v.eventually("the service is ready", func() bool {
		return !slices.ContainsFunc(v.indexes, func(x *indexer.Indexer) bool { return x.Ready() != nil })
	})
	return v
}

// edge tells a bridge of the catalog.
type edge struct{ b *bridge.Bridge }

func (o edge) Registered(w event.Worker)   { o.b.Set(w) }
func (o edge) Unregistered(s event.Source) { o.b.Remove(s) }
func (o edge) CatalogRead()                {}

// eventually waits for a condition.
func (v *service) eventually(what string, ok func() bool) {
	v.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			v.t.Fatalf("not within %v: %s; %s", patience, what, v.why)
		}
	}
}

// worker returns the registration of an engine's rank.
func worker(w *engines.Worker) event.Worker {
	out := event.Worker{
		Source:   event.Source{Model: "m", Group: "default", Instance: w.Instance, Rank: w.Rank},
		Endpoint: w.Engine.Addr(), ReplayEndpoint: w.Engine.ReplayAddr(), Topic: w.Topic, Engine: "vllm", BlockSize: 16,
	}
	if w.Owned() {
		out.CacheOwner = event.AutoOwner
		out.Complete()
	}
	return out
}

// register registers workers, all at once. The first one of a service is to come
// alone: it sets the block size.
func (v *service) register(workers ...*engines.Worker) {
	v.t.Helper()
	ctx, cancel := context.WithTimeout(v.ctx, patience)
	defer cancel()
	var tasks sync.WaitGroup
	for _, w := range workers {
		tasks.Go(func() {
			if err := v.catalog.Register(ctx, worker(w)); err != nil {
				v.t.Errorf("%s rank %d: %v", w.Instance, w.Rank, err)
			}
		})
	}
	tasks.Wait()
}

// known returns what an indexer knows, by source.
func known(x *indexer.Indexer) map[event.Source]indexer.SourceInfo {
	out := map[event.Source]indexer.SourceInfo{}
	sources, _ := x.Sources()
	for _, s := range sources {
		out[s.Source] = s
	}
	return out
}
