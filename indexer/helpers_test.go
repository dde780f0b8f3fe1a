package indexer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/hub"
	"github.com/kvmesh/kvmesh/integration/model"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		// A NATS server that is shut down while a stream is being made leaves its store behind.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

const (
	patience  = 60 * time.Second
	blockSize = 4
)

// world is a NATS server with a log, and the naive state of what is in it.
type world struct {
	t    *testing.T
	dir  string
	ctx  context.Context
	nats *hub.Hub

	mu   sync.Mutex
	away bool // indexers can't reach NATS

	nc      *nats.Conn
	js      jetstream.JetStream
	log     event.Log
	seqs    []uint64 // last sequence of each stream that was written
	records int      // that were published
	writers []*feed.Writer
	prompts []model.Prompt
	locals  [][]uint64
}

func newWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	return newSplitWorld(t, seed, 1)
}

// newSplitWorld is newWorld with a log in several streams.
func newSplitWorld(t *testing.T, seed uint64, shards int) *world {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	w := &world{t: t, dir: t.TempDir(), ctx: ctx, log: event.Log{Stream: "KV", Shards: shards}, seqs: make([]uint64, shards)}
	w.nats = hub.New(w.dir, 0)
	w.startNATS()
	t.Cleanup(w.nats.Stop)
	w.nc, w.js = w.connect(gate{w, false})
	for i := range shards {
		w.makeShard(i)
	}
	w.prompts = model.Prompts(model.PromptOptions{Seed: seed, BlockSize: blockSize, N: 10, Spaced: 2})
	for _, p := range w.prompts {
		w.locals = append(w.locals, p.Locals)
	}
	return w
}

func (w *world) makeStream() { w.makeShard(0) }

func (w *world) makeShard(i int) {
	w.t.Helper()
	w.await("the stream is made", func() bool {
		_, err := w.js.CreateStream(w.ctx, w.log.Config(i, 1))
		return err == nil
	})
}

func (w *world) startNATS() {
	w.t.Helper()
	if err := w.nats.Start(); err != nil {
		w.t.Fatal(err)
	}
}

// keepAway says whether indexers can't reach NATS. It does not cut connections
// that there are.
func (w *world) keepAway(away bool) {
	w.mu.Lock()
	w.away = away
	w.mu.Unlock()
}

// gate lets clients in; an indexer's only if it is not kept away.
type gate struct {
	w     *world
	guest bool
}

// InProcessConn implements nats.InProcessConnProvider.
func (g gate) InProcessConn() (net.Conn, error) {
	g.w.mu.Lock()
	away := g.w.away
	g.w.mu.Unlock()
	if g.guest && away {
		return nil, errors.New("NATS is away")
	}
	return g.w.nats.InProcessConn()
}

func (w *world) connect(g gate) (*nats.Conn, jetstream.JetStream) {
	w.t.Helper()
	nc, js, err := hub.Connect(g)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(nc.Close)
	return nc, js
}

// await waits until cond holds.
func (w *world) await(what string, cond func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// writer returns the Writer of a new source.
func (w *world) writer(instance string, rank uint32) *feed.Writer {
	out := feed.NewWriter(event.Source{Model: "org/m", Group: "g", Instance: instance, Rank: rank}, 100)
	w.writers = append(w.writers, out)
	return out
}

// publish puts a message into the log and returns its sequence.
func (w *world) publish(subject string, data []byte) uint64 {
	w.t.Helper()
	var seq uint64
	w.records++
	id := jetstream.WithMsgID(fmt.Sprint(w.records)) // of a server that stops, an acknowledgement may be lost
	w.await("a record is stored", func() bool {
		ctx, cancel := context.WithTimeout(w.ctx, time.Second)
		defer cancel()
		ack, err := w.js.Publish(ctx, subject, data, id)
		if err == nil {
			seq = ack.Sequence
			for i := range w.seqs {
				if w.log.Name(i) == ack.Stream {
					w.seqs[i] = seq
				}
			}
		}
		return err == nil
	})
	return seq
}

// write publishes records of a source and returns the sequence of the last one.
func (w *world) write(of *feed.Writer, records ...[]byte) (seq uint64) {
	w.t.Helper()
	for _, r := range records {
		seq = w.publish(w.log.Subject(of.Source), r)
	}
	return seq
}

// fill writes n records of random operations and returns the last sequence.
func (w *world) fill(rng *rand.Rand, of *feed.Writer, n int) (seq uint64) {
	w.t.Helper()
	for range n {
		of.Random(rng, w.locals)
		seq = w.write(of, of.Record())
	}
	return seq
}

// reader is an indexer that runs.
type reader struct {
	*indexer.Indexer
	w     *world
	nc    *nats.Conn
	stop  func()
	meter *metric.ManualReader
}

// start starts an indexer that has been told of the workers of all writers. change
// may change its configuration and options.
func (w *world) start(change func(*indexer.Config, *indexer.Options)) *reader {
	w.t.Helper()
	r := w.prepare(change)
	for _, of := range w.writers {
		r.Registered(worker(of))
	}
	r.CatalogRead()
	return r
}

// prepare is start without a word of the catalog.
func (w *world) prepare(change func(*indexer.Config, *indexer.Options)) *reader {
	w.t.Helper()
	cfg := indexer.Default()
	cfg.Log, cfg.CheckInterval, cfg.Compact = w.log, 20*time.Millisecond, false
	r := &reader{w: w, meter: metric.NewManualReader()}
	logs := &lockedBuilder{}
	opts := indexer.Options{Logger: slog.New(slog.NewTextHandler(logs, nil)), Meter: metric.NewMeterProvider(metric.WithReader(r.meter))}
	if change != nil {
		change(&cfg, &opts)
	}
	nc, js := w.connect(gate{w, true})
	x, err := indexer.New(nc, js, cfg, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	r.Indexer, r.nc = x, nc
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- x.Run(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("Run: %v", err)
		}
		nc.Close()
		if w.t.Failed() {
			w.t.Log(logs.String())
		}
	})
	w.t.Cleanup(r.stop)
	return r
}

// lockedBuilder takes a log.
type lockedBuilder struct {
	mu sync.Mutex
	b  strings.Builder
}

var _ io.Writer = (*lockedBuilder)(nil)

func (l *lockedBuilder) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuilder) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// worker returns the registration of a writer's source.
func worker(of *feed.Writer) event.Worker {
	return event.Worker{Source: of.Source, Endpoint: "tcp://127.0.0.1:9", BlockSize: blockSize}
}

// reach waits until answers are true for a sequence of a log in one stream.
func (r *reader) reach(seq uint64) {
	r.w.t.Helper()
	r.reachAt(event.Position{LogSeq: seq})
}

// reachAll waits until answers are true for all that was written.
func (r *reader) reachAll() {
	r.w.t.Helper()
	r.reachAt(event.PositionOf(slices.Clone(r.w.seqs)))
}

func (r *reader) reachAt(p event.Position) {
	r.w.t.Helper()
	r.w.await("the indexer is ready", func() bool { return r.Ready() == nil })
	if err := r.WaitFor(r.w.ctx, p); err != nil {
		r.w.t.Fatal(err)
	}
}

// info returns what the indexer knows of a source, false if it knows nothing.
func (r *reader) info(source event.Source) (indexer.SourceInfo, bool) {
	sources, _ := r.Sources()
	i := slices.IndexFunc(sources, func(s indexer.SourceInfo) bool { return s.Source == source })
	if i < 0 {
		return indexer.SourceInfo{}, false
	}
	return sources[i], true
}

// counter returns the sum of a metric over its attributes.
func (r *reader) counter(name string) (sum int64) {
	r.w.t.Helper()
	var all metricdata.ResourceMetrics
	if err := r.meter.Collect(context.Background(), &all); err != nil {
		r.w.t.Fatal(err)
	}
	found := false
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if m.Name != name {
				continue
			}
			found = true
			switch data := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range data.DataPoints {
					sum += p.Value
				}
			case metricdata.Gauge[int64]:
				for _, p := range data.DataPoints {
					sum += p.Value
				}
			}
		}
	}
	if !found && !strings.HasPrefix(name, "kvmesh.indexer") {
		r.w.t.Fatalf("there is no metric %q", name)
	}
	return sum
}

// stateOf returns the naive state of writers of one partition.
func stateOf(writers ...*feed.Writer) model.State {
	st := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	for _, of := range writers {
		st.Held[model.Rank{Instance: of.Source.Instance, Rank: of.Source.Rank}] = of.Held()
	}
	return st
}

// answer asks an indexer about a prompt.
func answer(x *indexer.Indexer, q *indexer.Query, p event.Partition, locals []uint64) (map[string]model.Row, event.Position, error) {
	a, err := x.Match(q, p, locals)
	if err != nil {
		return nil, event.Position{}, err
	}
	out := map[string]model.Row{}
	for _, h := range a.Holdings {
		tokens := func(t event.Tier) int { return int(h.Ends[t] * a.BlockSize) }
		row, ok := out[h.Instance]
		if !ok {
			row.DP = map[uint32]int{}
		}
		row.GPU, row.CPU = max(row.GPU, tokens(event.Device)), max(row.CPU, tokens(event.Host))
		row.Disk, row.Longest = max(row.Disk, tokens(event.External)), max(row.Longest, tokens(event.External))
		if tokens(event.Device) > 0 {
			row.DP[h.Rank] = tokens(event.Device)
		}
		out[h.Instance] = row
	}
	a.LogSeqs = slices.Clone(a.LogSeqs)
	return out, a.Position, nil
}

// agrees compares all answers with a naive state.
func (r *reader) agrees(want model.State) {
	r.w.t.Helper()
	r.agreesIn(partition, want)
}

// agreesIn is agrees for any partition.
func (r *reader) agreesIn(partition event.Partition, want model.State) {
	r.w.t.Helper()
	var q indexer.Query
	for i, locals := range r.w.locals {
		got, at, err := answer(r.Indexer, &q, partition, locals)
		if err != nil {
			r.w.t.Fatal(err)
		}
		if w := want.Answer(locals); !reflect.DeepEqual(got, w) {
			r.w.t.Fatalf("prompt %d at %v: %v, want %v", i, at, got, w)
		}
	}
}

// partition of the sources of world.writer.
var partition = event.Partition{Model: "org/m", Group: "g"}

// restore replaces the files of NATS, which is down, by a copy.
func (w *world) restore(from string) {
	w.t.Helper()
	if err := os.RemoveAll(filepath.Join(w.dir, "jetstream")); err != nil {
		w.t.Fatal(err)
	}
	if from == "" {
		return
	}
	if err := os.CopyFS(w.dir, os.DirFS(from)); err != nil {
		w.t.Fatal(err)
	}
}
