package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/trace"
	"github.com/kvmesh/kvmesh/integration/workload"
	"github.com/kvmesh/kvmesh/replica"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// fleetBench measures a whole fleet, each part in a process of its own.
type fleetBench struct {
	workers  int
	sessions int
	warmup   int
	requests int
	atOnce   int
	device   int
	host     int
	trace    string
	workload workload.Options
	late     time.Duration
	compare  int
	profiled time.Duration
	dump     bool
	profiles string
	rate     float64
	route    string
	dir      string
	json     string
}

func benchFleetCommand() *cobra.Command {
	b := &fleetBench{workload: workload.Default()}
	cmd := &cobra.Command{
		Use:   "fleet",
		Short: "Measure a fleet: a thousand engines, thousands of sessions, each part in its own process",
		Long: `Starts mock engines with block caches and replay sockets, a NATS server, a bridge and an
indexer, each in a process of its own. This process is the router: it follows the log with an
index of its own, and sends each request of agents' sessions, or of a trace, to the worker
that has the most of its prompt and the least to do. Requests are counted when they
have been answered, and time and processor time run until the last event is visible. In the end
what every index holds is compared with what the caches of the engines hold.`,
		Example: `  kvmesh bench fleet --json fleet.json
  kvmesh bench fleet --workers 64 --sessions 512 --requests 5000 --warmup 1000
  kvmesh bench fleet --workers 16 --device-blocks 16384 --trace conversation_trace.jsonl
  kvmesh bench fleet --compare 3`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := b.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), b.json)
		},
	}
	f := cmd.Flags()
	f.IntVar(&b.workers, "workers", 1024, "mock engines")
	f.IntVar(&b.sessions, "sessions", 8192, "sessions that are open at a time")
	f.IntVar(&b.warmup, "warmup", 10_000, "requests before anything is measured")
	f.IntVar(&b.requests, "requests", 40_000, "requests that are measured")
	f.IntVar(&b.atOnce, "at-once", 64, "requests in flight")
	f.IntVar(&b.device, "device-blocks", 4096, "blocks of 16 tokens that an engine's device has")
	f.IntVar(&b.host, "host-blocks", 0, "and its host tier")
	f.StringVar(&b.trace, "trace", "", "file with a trace to send instead of sessions, as in integration/trace")
	f.Uint64Var(&b.workload.Seed, "seed", 1, "seed of the sessions")
	f.IntVar(&b.workload.Context, "context", b.workload.Context, "tokens at which a session ends at the latest")
	f.DurationVar(&b.late, "late-join", 10*time.Second, "when another indexer joins, after the beginning of what is measured; 0: never")
	f.IntVar(&b.compare, "compare", 0, "replicas to compare: so many indexers that read the log with as many that dial every engine themselves; 0: none")
	f.DurationVar(&b.profiled, "profile", 10*time.Second, "how long processor time is split by what it is spent on; 0: not")
	f.StringVar(&b.profiles, "profiles", "", "directory to keep the profiles in, and those of memory at the end")
	f.Float64Var(&b.rate, "rate", 0, "requests a second; 0: as fast as they are answered")
	f.StringVar(&b.route, "route", "overlap", "what picks the worker: overlap (most blocks held, fewest sessions) or select (the selection, with reservations)")
	f.BoolVar(&b.dump, "dump", true, "compare /dump of the indexers too")
	f.StringVar(&b.dir, "data-dir", "", "directory for the log; empty: a temporary one")
	f.StringVar(&b.json, "json", "", "file to write the figures to, as JSON")
	return cmd
}

// fleetRun is a run of the benchmark.
type fleetRun struct {
	b        *fleetBench
	progress io.Writer
	mu       sync.Mutex // of f, while something goes on beside the requests
	f        figures

	mock, nats, bridge *process
	indexers, dialers  []*process
	late               *process

	url       string // of NATS
	described []engines.Described
	partition event.Partition
	index     *indexer.Indexer // the router's own
	selector  *selection.Selector
	seen      *seen
	driver    *driver
	replay    replayWatch
}

func (b *fleetBench) run(ctx context.Context, progress io.Writer) (figures, error) {
	if b.route != "overlap" && b.route != "select" {
		return nil, fmt.Errorf("--route is %q, want overlap or select", b.route)
	}
	if b.workers < 1 || b.sessions < b.atOnce || b.atOnce < 1 || b.requests < 1 {
		return nil, fmt.Errorf("--workers is %d, --sessions %d, --at-once %d, --requests %d: want at least 1, and no less sessions than requests at once", b.workers, b.sessions, b.atOnce, b.requests)
	}
	dir := b.dir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "kvmesh-bench-"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
	}
	r := &fleetRun{b: b, progress: progress, f: figures{}, partition: event.Partition{Model: "bench", Group: "default"}, seen: newSeen()}
	ctx, stop := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	defer func() {
		stop()
		tasks.Wait()
		for _, p := range slices.Backward(r.processes()) {
			p.stop()
		}
	}()
	if err := r.start(ctx, dir); err != nil {
		return nil, err
	}
	nc, err := r.follow(ctx, &tasks)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	if err := r.connect(ctx); err != nil {
		return nil, err
	}
	if err := r.load(ctx); err != nil {
		return nil, err
	}
	return r.f, r.measure(ctx)
}

// processes returns those that run, the first one first.
func (r *fleetRun) processes() []*process {
	all := append([]*process{r.nats, r.mock, r.bridge}, r.indexers...)
	all = append(append(all, r.dialers...), r.late)
	return slices.DeleteFunc(all, func(p *process) bool { return p == nil })
}

// start starts the processes.
func (r *fleetRun) start(ctx context.Context, dir string) error {
	addrs, err := freePorts(6)
	if err != nil {
		return err
	}
	r.url = "nats://" + addrs[0]
	if r.nats, err = spawn("NATS", "bench", "nats", "--listen", addrs[0], "--data-dir", dir, "--pprof", addrs[1]); err != nil {
		return err
	}
	r.nats.pprof = addrs[1]
	if r.mock, err = spawn("mock engines", "mock", "--engines", strconv.Itoa(r.b.workers), "--port", "0", "--http", addrs[2], "--rate", "0",
		"--device-blocks", strconv.Itoa(r.b.device), "--host-blocks", strconv.Itoa(r.b.host), "--context", "16",
		"--seed", strconv.FormatUint(r.b.workload.Seed, 10)); err != nil {
		return err
	}
	r.mock.http = addrs[2]
	if err := r.mock.alive(ctx, "/health"); err != nil {
		return err
	}
	if err := getJSON(ctx, http.DefaultClient, "http://"+r.mock.http+"/workers", &r.described); err != nil {
		return err
	}
	if r.bridge, err = spawn("bridge", "bridge", "--nats", r.url, "--http", addrs[3], "--pprof", addrs[4], "--log-level", "error"); err != nil {
		return err
	}
	r.bridge.http, r.bridge.pprof = addrs[3], addrs[4]
	if err := r.bridge.alive(ctx, "/health"); err != nil {
		return err
	}
	for range max(1, r.b.compare) {
		p, err := r.indexer(ctx)
		if p != nil {
			r.indexers = append(r.indexers, p)
		}
		if err != nil {
			return err
		}
	}
	for range r.b.compare {
		addrs, err := freePorts(1)
		if err != nil {
			return err
		}
		p, err := spawn("dialling replica", "bench", "dial", "--workers", "http://"+r.mock.http, "--http", addrs[0])
		if err != nil {
			return err
		}
		p.http = addrs[0]
		r.dialers = append(r.dialers, p)
		if err := p.alive(ctx, "/digests"); err != nil {
			return err
		}
	}
	return nil
}

// indexer starts an indexer, and waits until it is ready.
func (r *fleetRun) indexer(ctx context.Context) (*process, error) {
	addrs, err := freePorts(2)
	if err != nil {
		return nil, err
	}
	p, err := spawn("indexer", "indexer", "--nats", r.url, "--http", addrs[0], "--pprof", addrs[1], "--log-level", "error")
	if err != nil {
		return nil, err
	}
	p.http, p.pprof = addrs[0], addrs[1]
	return p, p.alive(ctx, "/ready")
}

// follow makes this process a router: it follows the log and the catalog.
func (r *fleetRun) follow(ctx context.Context, tasks *sync.WaitGroup) (*nats.Conn, error) {
	quiet := slog.New(slog.DiscardHandler)
	nc, err := (&natsFlags{url: r.url}).connect("kvmesh bench", nil, quiet)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err == nil {
		cfg := indexer.Default()
		cfg.Compact = false // that is the indexers' work
		r.index, err = indexer.New(nc, js, cfg, indexer.Options{Applied: r.seen.applied})
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	observers := []replica.Observer{r.index}
	if r.b.route == "select" {
		if r.selector, err = newSelection(ctx, tasks, nc, r.index); err != nil {
			nc.Close()
			return nil, err
		}
		observers = append(observers, r.selector)
	}
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), quiet, observers...)
	tasks.Go(func() { catalog.Run(ctx) })
	tasks.Go(func() { r.index.Run(ctx) })
	return nc, nil
}

// connect registers the engines, and waits until all are being read.
func (r *fleetRun) connect(ctx context.Context) error {
	fmt.Fprintf(r.progress, "registering %d engines\n", len(r.described))
	began := time.Now()
	if err := registerWorkers(ctx, &client{server: "http://" + r.indexers[0].http}, r.described, r.partition.Model, r.partition.Group); err != nil {
		return err
	}
	ports, err := portsOf(r.described, func(w *engines.Described) string { return w.Endpoint })
	if err != nil {
		return err
	}
	replays, err := portsOf(r.described, func(w *engines.Described) string { return w.Replay })
	if err != nil {
		return err
	}
	r.replay = replayWatch{ports: replays}
	err = until(ctx, "the bridge has dialled every engine", func() (bool, error) {
		n, err := dialled(ports)
		return n >= len(ports)*(1+len(r.dialers)), err
	})
	if err != nil {
		return err
	}
	if err := until(ctx, "the router knows every engine", func() (bool, error) { return len(r.index.Workers()) == len(r.described), nil }); err != nil {
		return err
	}
	r.f["connect_s"] = time.Since(began).Seconds()
	now, err := r.bridge.look()
	r.f["rss_idle_mb"] = float64(now.RSS) / 1e6
	return err
}

// load makes the requests that the driver sends.
func (r *fleetRun) load(ctx context.Context) error {
	sources := make([]event.Source, len(r.described))
	for i, w := range r.described {
		sources[i] = event.Source{Model: r.partition.Model, Group: r.partition.Group, Instance: w.Instance, Rank: w.Rank}
	}
	pick := picker(newOverlapPicker(r.index, r.partition, sources))
	if r.selector != nil {
		pick = &selectionPicker{ctx: ctx, selector: r.selector, partition: r.partition, held: map[uint64]string{}}
	}
	d := &driver{
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: r.b.atOnce, MaxIdleConns: r.b.atOnce}},
		mock:   "http://" + r.mock.http, pick: pick, model: r.partition, blockSize: r.described[0].BlockSize, seen: r.seen,
	}
	r.driver = d
	if r.b.trace == "" {
		g, err := workload.New(r.b.workload)
		if err != nil {
			return err
		}
		d.turns = newOpenSessions(g, r.b.sessions, pick.Done)
		return nil
	}
	file, err := os.Open(filepath.Clean(r.b.trace))
	if err != nil {
		return err
	}
	defer file.Close()
	requests, err := trace.Read(file)
	if err != nil {
		return err
	}
	most := r.b.device * d.blockSize
	fits := slices.DeleteFunc(requests, func(q trace.Request) bool { return q.InputLength+q.OutputLength > most })
	r.f["trace_too_long"] = float64(len(requests) - len(fits))
	d.turns = &tracedRequests{requests: fits, ended: pick.Done}
	r.b.warmup = min(r.b.warmup, len(fits)/10)
	r.b.requests = min(r.b.requests, len(fits)-r.b.warmup)
	return nil
}

// measure sends the requests and says what that took.
func (r *fleetRun) measure(ctx context.Context) error {
	fmt.Fprintf(r.progress, "warming up: %d requests\n", r.b.warmup)
	if sums := r.driver.run(ctx, r.b.warmup, r.b.atOnce, 0); sums.failed > 0 {
		return fmt.Errorf("%d requests failed, such as: %w", sums.failed, sums.lastErr)
	}
	if err := r.settled(ctx); err != nil {
		return err
	}
	r.seen.take()
	for _, p := range r.processes() {
		if err := p.mark(); err != nil {
			return err
		}
	}
	var before engines.Totals
	if err := getJSON(ctx, http.DefaultClient, r.driver.mock+"/totals", &before); err != nil {
		return err
	}
	fmt.Fprintf(r.progress, "measuring: %d requests\n", r.b.requests)
	beside := r.beside(ctx)
	own, began := cpuTime(), time.Now()
	sums := r.driver.run(ctx, r.b.requests, r.b.atOnce, r.b.rate)
	sent := time.Since(began)
	if err := errors.Join(ctx.Err(), r.settled(ctx)); err != nil {
		return err
	}
	visible, spent := time.Since(began), cpuTime()-own
	r.mu.Lock()
	r.f["seconds"], r.f["seconds_until_visible"] = sent.Seconds(), visible.Seconds()
	r.f["router_cpu_ms_per_request"] = spent.Seconds() * 1e3 / float64(max(1, sums.requests))
	err := r.account(ctx, sums, before)
	r.mu.Unlock()
	if err != nil {
		return err
	}
	if err := beside(); err != nil {
		return err
	}
	return r.verify(ctx)
}
