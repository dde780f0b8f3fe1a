package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
	"github.com/kvmesh/kvmesh/replica"
)

// pipelineBench measures the way from an engine's PUB socket to an answer.
type pipelineBench struct {
	sources  int
	rate     float64
	duration time.Duration
	batches  int
	dir      string
	json     string
	profile  profiler
}

func benchPipelineCommand() *cobra.Command {
	b := &pipelineBench{}
	cmd := &cobra.Command{
		Use:   "pipeline",
		Short: "Measure the way from an engine's PUB socket to an answer, all in one process",
		Long: `Starts engines with PUB sockets, an embedded NATS server with JetStream on disk, a bridge
and an indexer, all in this process. First the engines publish batches of about 1 KB at a
fixed rate, and the time from each batch's publishing to its being visible to queries is
measured. Then they publish as fast as the bridge reads. In the end the index is compared
with a naive model of what was sent.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := b.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), b.json)
		},
	}
	cmd.Flags().IntVar(&b.sources, "sources", 64, "engines")
	cmd.Flags().Float64Var(&b.rate, "rate", 10000, "batches a second, over all engines, while latency is measured")
	cmd.Flags().DurationVar(&b.duration, "duration", 10*time.Second, "how long latency is measured")
	cmd.Flags().IntVar(&b.batches, "batches", 300000, "batches published as fast as possible")
	cmd.Flags().StringVar(&b.dir, "data-dir", "", "directory for the log; empty: a temporary one")
	b.profile.add(cmd.Flags())
	cmd.Flags().StringVar(&b.json, "json", "", "file to write the figures to, as JSON")
	return cmd
}

// pipeline is a whole deployment in this process.
type pipeline struct {
	fleet *mock.Fleet
	index *indexer.Indexer
	place map[event.Source]*visibility
}

// visibility is what is visible of one engine.
type visibility struct {
	mu        sync.Mutex
	sent      []int64 // when each batch was published, in ns
	seen      int     // batches that are visible
	latencies []int64 // of each batch, in ns
}

func (b *pipelineBench) run(ctx context.Context, progress io.Writer) (figures, error) {
	dir := b.dir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "kvmesh-bench-"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
	}
	p := &pipeline{place: map[event.Source]*visibility{}}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var tasks sync.WaitGroup
	end, err := p.start(ctx, &tasks, dir, b)
	if err != nil {
		return nil, err
	}
	f, err := p.measure(ctx, b, progress)
	stop()
	tasks.Wait()
	end()
	return f, err
}

// start starts everything, and returns what ends the servers and engines.
func (p *pipeline) start(ctx context.Context, tasks *sync.WaitGroup, dir string, b *pipelineBench) (end func(), err error) {
	quiet := slog.New(slog.DiscardHandler)
	server, err := (&natsFlags{}).embed(dir, quiet)
	if err != nil {
		return nil, err
	}
	var ends []func()
	end = func() {
		for _, f := range slices.Backward(ends) {
			f()
		}
	}
	defer func() {
		if err != nil {
			end()
		}
	}()
	ends = append(ends, func() { server.Shutdown(); server.WaitForShutdown() })
	nc, err := (&natsFlags{}).connect("kvmesh bench", server, quiet)
	if err != nil {
		return nil, err
	}
	ends = append(ends, nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	if p.index, err = indexer.New(nc, js, indexer.Default(), indexer.Options{Applied: p.applied}); err != nil {
		return nil, err
	}
	edge, err := bridge.New(nc, js, bridge.Default("bench"), bridge.Options{})
	if err != nil {
		return nil, err
	}
	p.fleet, err = mock.NewFleet(mock.FleetOptions{
		Engines: b.sources, Replay: true, Rate: b.rate, Batches: int(b.rate * b.duration.Seconds()), Before: p.publishing,
		Engine: mock.Options{Dialect: mock.VLLMMap},
	})
	if err != nil {
		return nil, err
	}
	if err := p.fleet.Start(); err != nil {
		return nil, err
	}
	ends = append(ends, p.fleet.Stop)
	for _, m := range p.fleet.Members {
		p.place[source(m)] = &visibility{}
	}
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), quiet, edgeObserver{edge}, p.index)
	for _, run := range []func(context.Context) error{catalog.Run, edge.Run, p.index.Run} {
		tasks.Go(func() { run(ctx) })
	}
	for _, m := range p.fleet.Members {
		w := event.Worker{Source: source(m), Endpoint: m.Addr(), ReplayEndpoint: m.ReplayAddr(), Engine: "vllm", BlockSize: 16}
		register(ctx, catalog, []event.Worker{w}, quiet)
		if err := m.WaitSubscribers(ctx, 1); err != nil {
			return nil, err
		}
	}
	return end, nil
}

func source(m *mock.Member) event.Source {
	return event.Source{Model: "bench", Group: "default", Instance: m.Instance, Rank: m.Rank}
}

// publishing notes when a batch is published.
func (p *pipeline) publishing(m *mock.Member, seq uint64) {
	v := p.place[source(m)]
	now := time.Now().UnixNano()
	v.mu.Lock()
	v.sent = append(v.sent, now)
	v.mu.Unlock()
}

// applied notes which batches have become visible.
func (p *pipeline) applied(s event.Source, h event.Header, _ uint64) {
	v := p.place[s]
	if v == nil || !h.Batches {
		return
	}
	now := time.Now().UnixNano()
	v.mu.Lock()
	for ; uint64(v.seen) <= h.Last && v.seen < len(v.sent); v.seen++ {
		v.latencies = append(v.latencies, now-v.sent[v.seen])
	}
	v.mu.Unlock()
}

// settled waits until every batch is visible.
func (p *pipeline) settled(ctx context.Context) error {
	deadline := time.Now().Add(time.Minute)
	for {
		missing := 0
		for _, v := range p.place {
			v.mu.Lock()
			missing += len(v.sent) - v.seen
			v.mu.Unlock()
		}
		if missing == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d batches have not become visible", missing)
		}
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// latencies takes the latencies measured so far.
func (p *pipeline) latencies() []int64 {
	var all []int64
	for _, v := range p.place {
		v.mu.Lock()
		all = append(all, v.latencies...)
		v.latencies = nil
		v.mu.Unlock()
	}
	return all
}

func (p *pipeline) measure(ctx context.Context, b *pipelineBench, progress io.Writer) (figures, error) {
	f := figures{}
	paced := int(b.rate * b.duration.Seconds())
	fmt.Fprintf(progress, "publishing %d batches at %.0f a second over %d engines\n", paced, b.rate, b.sources)
	if err := p.fleet.Prepare(paced); err != nil {
		return nil, err
	}
	if err := b.profile.start(); err != nil {
		return nil, err
	}
	before, began := cpuTime(), time.Now()
	if err := p.fleet.Run(ctx); err != nil {
		return nil, err
	}
	if err := p.settled(ctx); err != nil {
		return nil, err
	}
	if err := b.profile.stop(); err != nil {
		return nil, err
	}
	took := time.Since(began)
	f["paced_batches_s"] = float64(paced) / took.Seconds()
	f["paced_cpu_us_per_batch"] = float64((cpuTime() - before).Microseconds()) / float64(paced)
	lat := p.latencies()
	f["p50_us"] = float64(percentile(lat, 50)) / 1e3
	f["p99_us"] = float64(percentile(lat, 99)) / 1e3
	f["max_us"] = float64(percentile(lat, 100)) / 1e3

	fmt.Fprintf(progress, "publishing %d batches as fast as the bridge reads\n", b.batches)
	p.fleet.Pace(0, paced+b.batches)
	if err := p.fleet.Prepare(b.batches); err != nil {
		return nil, err
	}
	var most atomic.Uint64
	watch, stop := context.WithCancel(ctx)
	go watchMemory(watch, &most)
	before, began = cpuTime(), time.Now()
	err := p.fleet.Run(ctx)
	if err == nil {
		err = p.settled(ctx)
	}
	stop()
	if err != nil {
		return nil, err
	}
	took = time.Since(began)
	f["sustained_batches_s"] = float64(b.batches) / took.Seconds()
	f["cpu_us_per_batch"] = float64((cpuTime() - before).Microseconds()) / float64(b.batches)
	f["rss_mb"] = float64(most.Load())
	fmt.Fprintln(progress, "comparing the index with the model")
	p.verify(f)
	return f, nil
}

func watchMemory(ctx context.Context, most *atomic.Uint64) {
	for ctx.Err() == nil {
		most.Store(max(most.Load(), uint64(residentMB())))
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// verify compares the index with a naive model of what was sent.
func (p *pipeline) verify(f figures) {
	known := map[event.Source]indexer.SourceInfo{}
	sources, _ := p.index.Sources()
	for _, s := range sources {
		known[s.Source] = s
	}
	lost, mismatches, blocks := uint64(0), 0, uint64(0)
	for _, m := range p.fleet.Members {
		info := known[source(m)]
		lost += info.Lost + m.Dropped()
		truth := model.New(16, model.VLLM)
		work := m.Workload.Again()
		for range m.Next() {
			for _, e := range work.Next() {
				truth.Apply(e)
			}
		}
		sums := truth.Digest(func(seq uint64, t model.Tier) uint64 {
			return event.Mix(seq, event.Salt(event.Tier(t)))
		})
		for t, have := range info.Digests {
			want := sums[model.Tier(t)]
			blocks += have.Count
			if have != (event.Digest{Count: want.Count, Sum: want.Sum}) {
				mismatches++
			}
		}
	}
	f["lost"], f["mismatches"], f["resident_blocks"] = float64(lost), float64(mismatches), float64(blocks)
}

// edgeObserver tells a bridge that is alone of the catalog.
type edgeObserver struct{ b *bridge.Bridge }

func (o edgeObserver) Registered(w event.Worker)   { o.b.Set(w) }
func (o edgeObserver) Unregistered(s event.Source) { o.b.Remove(s) }
func (o edgeObserver) CatalogRead()                {}
