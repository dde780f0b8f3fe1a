package integration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/hub"
	"github.com/kvmesh/kvmesh/replica"
)

// patience is how long a test waits for what has to happen. Nothing waits for
// so long where all is well.
const patience = 60 * time.Second

// eventually waits until cond holds, and says whether it came to that.
func eventually(cond func() bool) bool {
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			return false
		}
	}
	return true
}

// retry makes attempts until one succeeds. Each is short: a request that a NATS
// server which starts again has swallowed is never answered.
func retry(attempt func(ctx context.Context) error) (err error) {
	eventually(func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		err = attempt(ctx)
		return err == nil
	})
	return err
}

// client is a connection to NATS of one part of a mesh.
type client struct {
	nc *nats.Conn
	js jetstream.JetStream
}

func connect(h *hub.Hub) (client, error) {
	nc, js, err := hub.Connect(h)
	return client{nc, js}, err
}

// part is something that runs in a mesh until it is stopped.
type part struct {
	client
	stop func()
}

// run runs a part until its stop is called.
func (c client) run(tasks ...func(context.Context) error) *part {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, task := range tasks {
		wg.Go(func() { task(ctx) })
	}
	return &part{client: c, stop: func() {
		cancel()
		wg.Wait()
		c.nc.Close()
	}}
}

// mesh is a deployment in this process: a NATS server, a catalog, and, as long
// as they are up, a bridge and an indexer with its HTTP API, each with a
// connection and a copy of the catalog of its own.
type mesh struct {
	t       testing.TB
	log     *slog.Logger
	nats    *hub.Hub
	records event.Log
	dir     string
	admin   *part
	catalog *replica.Catalog
	workers map[event.Source]event.Worker // registered

	edge    *part
	reader  *part
	index   *indexer.Indexer
	web     *httptest.Server
	heard   *heard
	bridges int
}

// heard is what an indexer has read last of each source.
type heard struct {
	mu      sync.Mutex
	headers map[event.Source]event.Header
	seqs    map[event.Source]uint64
}

func (h *heard) applied(s event.Source, header event.Header, seq uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.headers[s], h.seqs[s] = header, seq
}

func (h *heard) of(s event.Source) (event.Header, uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.headers[s], h.seqs[s]
}

// newMesh starts a NATS server and a catalog. The log will be in so many streams.
func newMesh(t testing.TB, log *slog.Logger, shards int) (*mesh, error) {
	dir, err := os.MkdirTemp("", "kvmesh-test-")
	if err != nil {
		return nil, err
	}
	m := &mesh{t: t, log: log, dir: dir, nats: hub.New(filepath.Join(dir, "nats"), 0), workers: map[event.Source]event.Worker{}, records: event.DefaultLog()}
	m.records.Shards = shards
	if err := m.nats.Start(); err != nil {
		return nil, err
	}
	c, err := connect(m.nats)
	if err != nil {
		return nil, err
	}
	m.catalog = replica.NewCatalog(c.js, replica.DefaultCatalog(), m.log.With("part", "admin"))
	m.admin = c.run(m.catalog.Run)
	return m, nil
}

// close ends all of it.
func (m *mesh) close() {
	m.stopBridge()
	m.stopIndexer()
	if m.admin != nil {
		m.admin.stop()
	}
	m.nats.Stop()
	os.RemoveAll(m.dir)
}

// bridgeConfig is a bridge in a hurry.
func bridgeConfig(id string) bridge.Config {
	cfg := bridge.Default(id)
	cfg.ZMTP.BackoffMin, cfg.ZMTP.BackoffMax = 2*time.Millisecond, 50*time.Millisecond
	cfg.RepairInterval, cfg.RepairCooldown = 10*time.Millisecond, 50*time.Millisecond
	cfg.ProbeInterval = 50 * time.Millisecond
	return cfg
}

func (m *mesh) startBridge(change func(*bridge.Config)) error {
	m.bridges++
	id := fmt.Sprintf("bridge-%d", m.bridges)
	cfg := bridgeConfig(id)
	cfg.Log = m.records
	if change != nil {
		change(&cfg)
	}
	c, err := connect(m.nats)
	if err != nil {
		return err
	}
	log := m.log.With("part", id)
	b, err := bridge.New(c.nc, c.js, cfg, bridge.Options{Logger: log})
	if err != nil {
		return err
	}
	catalog := replica.NewCatalog(c.js, replica.DefaultCatalog(), log, observer{b})
	m.edge = c.run(b.Run, catalog.Run)
	return nil
}

// stopBridge stops the bridge as a signal would.
func (m *mesh) stopBridge() {
	if m.edge != nil {
		m.edge.stop()
		m.edge = nil
	}
}

// crashBridge takes NATS away from the bridge before it stops: it writes no last
// words.
func (m *mesh) crashBridge() {
	m.edge.nc.Close()
	m.stopBridge()
}

func (m *mesh) startIndexer(change func(*indexer.Config)) error {
	cfg := indexer.Default()
	cfg.Log = m.records
	cfg.CheckInterval = 50 * time.Millisecond
	if change != nil {
		change(&cfg)
	}
	c, err := connect(m.nats)
	if err != nil {
		return err
	}
	log := m.log.With("part", "indexer")
	heard := &heard{headers: map[event.Source]event.Header{}, seqs: map[event.Source]uint64{}}
	x, err := indexer.New(c.nc, c.js, cfg, indexer.Options{Logger: log, Applied: heard.applied})
	if err != nil {
		return err
	}
	catalog := replica.NewCatalog(c.js, replica.DefaultCatalog(), log, x)
	m.index, m.heard = x, heard
	m.reader = c.run(x.Run, catalog.Run)
	m.web = httptest.NewServer(api.New(api.Default(), x, catalog, api.NewFleet(log), nil, log))
	return nil
}

func (m *mesh) stopIndexer() {
	if m.reader != nil {
		m.web.Close()
		m.reader.stop()
		m.reader, m.index = nil, nil
	}
}

func (m *mesh) register(w event.Worker) error {
	err := retry(func(ctx context.Context) error { return m.catalog.Register(ctx, w) }) // the catalog may not have been reached yet
	if err == nil {
		m.workers[w.Source] = w
	}
	return err
}

func (m *mesh) unregister(s event.Source) error {
	delete(m.workers, s)
	return retry(func(ctx context.Context) error {
		_, err := m.catalog.Unregister(ctx, s.Instance, s.Model, s.Group, &s.Rank)
		if errors.Is(err, event.ErrNotRegistered) { // by an attempt whose end was not seen
			err = nil
		}
		return err
	})
}

// stream returns a stream of the log.
func (m *mesh) stream(ctx context.Context, shard int) (jetstream.Stream, error) {
	return m.admin.js.Stream(ctx, m.records.Name(shard))
}

// listing lists the records of the log.
func (m *mesh) listing() string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out := ""
	for shard := range m.records.Shards {
		stream, err := m.stream(ctx, shard)
		if err != nil {
			out += err.Error() + "\n"
			continue
		}
		out += listLog(ctx, stream)
	}
	return out
}

// observer tells a bridge of the catalog.
type observer struct{ b *bridge.Bridge }

func (o observer) Registered(w event.Worker)   { o.b.Set(w) }
func (o observer) Unregistered(s event.Source) { o.b.Remove(s) }
func (o observer) CatalogRead()                {}
