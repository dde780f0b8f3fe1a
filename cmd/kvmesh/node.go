package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/cmd/kvmesh/telemetry"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica"
)

// node is what runs in one process: a bridge, an indexer with its front doors, or
// both.
type node struct {
	role     string
	log      logFlags
	nats     natsFlags
	workers  workerFlags
	http     httpFlags
	config   string
	dataDir  string
	pprof    string
	id       string
	bridge   bridge.Config
	onGap    string
	media    []string
	leases   replica.LeaseConfig
	claim    []string
	index    indexer.Config
	models   []string
	choose   selectionFlags
	tel      *telemetry.Telemetry
	withEdge bool // runs a bridge
	withRead bool // runs an indexer
}

func serveCommand() *cobra.Command {
	n := &node{role: "serve", withEdge: true, withRead: true}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run everything in one process: NATS, bridge, indexer, API",
		Example: `  kvmesh serve --worker w0=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558 --model my-model --block-size 16
  kvmesh serve --nats nats://nats-1:4222,nats://nats-2:4222`,
		Args: cobra.NoArgs,
		RunE: n.run,
	}
	n.addFlags(cmd.Flags())
	cmd.Flags().StringVar(&n.dataDir, "data-dir", "kvmesh-data", "directory of the embedded NATS server")
	return cmd
}

func bridgeCommand() *cobra.Command {
	n := &node{role: "bridge", withEdge: true}
	cmd := &cobra.Command{
		Use:   "bridge",
		Short: "Run a bridge: read engines, write the log",
		Args:  cobra.NoArgs,
		RunE:  n.run,
	}
	n.addFlags(cmd.Flags())
	return cmd
}

func indexerCommand() *cobra.Command {
	n := &node{role: "indexer", withRead: true}
	cmd := &cobra.Command{
		Use:   "indexer",
		Short: "Run an indexer: read the log, answer queries",
		Args:  cobra.NoArgs,
		RunE:  n.run,
	}
	n.addFlags(cmd.Flags())
	return cmd
}

func (n *node) addFlags(flags *pflag.FlagSet) {
	flags.StringVar(&n.config, "config", "", "file with settings, as YAML: flag names and their values")
	n.log.add(flags)
	n.nats.add(flags, n.role == "serve")
	n.workers.add(flags)
	flags.StringVar(&n.id, "id", "", "name of this process among others; empty: the host's name and a number")
	flags.StringVar(&n.pprof, "pprof", "", "address to serve profiles of the process on, below /debug/pprof/; empty: none")
	n.bridge, n.index = bridge.Default("-"), indexer.Default()
	if n.withEdge {
		b := &n.bridge
		n.leases = replica.DefaultLeases("-")
		flags.StringArrayVar(&n.claim, "claim", nil, "labels of the workers that this bridge is for, such as node=a,rack=b: it reads them first, and others only while no other bridge does")
		flags.DurationVar(&n.leases.TTL, "lease-ttl", n.leases.TTL, "silence after which a bridge counts as dead, and others take its workers over")
		flags.DurationVar(&n.leases.DrainTimeout, "drain-timeout", n.leases.DrainTimeout, "how long a bridge that stops waits for others to take its workers over")
		flags.StringVar(&n.onGap, "on-gap", string(b.OnGap), "what becomes of a worker's blocks when batches are lost for good: keep or reset")
		flags.StringArrayVar(&n.media, "medium", nil, "tier of a medium, such as FS=disk (repeatable)")
		flags.IntVar(&b.ZMTP.MaxFrame, "max-frame", b.ZMTP.MaxFrame, "largest ZMQ frame that is read, in bytes")
		flags.DurationVar(&b.ProbeInterval, "probe-interval", b.ProbeInterval, "silence after which an engine is asked for lost batches")
		flags.DurationVar(&b.RepairTimeout, "repair-timeout", b.RepairTimeout, "silence after which a replay counts as ended")
		flags.IntVar(&b.Repairs, "repairs", b.Repairs, "replay requests that are open at a time")
		flags.IntVar(&b.MaxSlots, "max-slots", b.MaxSlots, "workers with cache owners that are read at a time")
		flags.IntVar(&b.MaxHeld, "max-held", b.MaxHeld, "bytes held of a worker's batches while others before them are missing")
		flags.IntVar(&b.MaxBacklog, "max-backlog", b.MaxBacklog, "bytes held of a worker's operations while NATS does not take them")
		flags.IntVar(&b.Residency.Known, "known-blocks", b.Residency.Known, "blocks remembered of a worker after they left every tier")
		flags.IntVar(&b.Residency.Parked, "parked-blocks", b.Residency.Parked, "blocks held of a worker while their parent is unknown")
	}
	if n.withRead {
		x := &n.index
		flags.DurationVar(&x.Grace, "grace", x.Grace, "how long the blocks of a worker that is not registered are kept")
		flags.BoolVar(&x.Compact, "compact", x.Compact, "keep the log small")
		flags.StringArrayVar(&n.models, "models", nil, "what to keep in memory and answer for: model or model:group, separated by commas (repeatable); queries for others are passed on to those who have them. Nothing: everything")
		n.choose.add(flags)
		n.http.add(flags, "127.0.0.1:8090")
	} else {
		n.http.add(flags, "")
	}
}

// httpFlags are how to serve HTTP.
type httpFlags struct {
	addr, token, cert, key string
}

func (h *httpFlags) add(flags *pflag.FlagSet, addr string) {
	flags.StringVar(&h.addr, "http", addr, "address to serve HTTP on; empty: none")
	flags.StringVar(&h.token, "http-token", "", "bearer token that clients have to send; empty: none")
	flags.StringVar(&h.cert, "http-tls-cert", "", "certificate file, to serve HTTPS")
	flags.StringVar(&h.key, "http-tls-key", "", "key file of the certificate")
}

// run runs the node until the command's context ends.
func (n *node) run(cmd *cobra.Command, _ []string) error {
	if err := settle(cmd); err != nil {
		return err
	}
	log, err := n.log.logger(cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	if err := n.complete(cmd.Flags()); err != nil {
		return err
	}
	workers, err := n.workers.parse(cmd.Flags())
	if err != nil {
		return err
	}
	var listener net.Listener
	if n.http.addr != "" {
		if listener, err = net.Listen("tcp", n.http.addr); err != nil {
			return located(cmd.Flags(), "http", n.http.addr, fmt.Errorf("--http: %w", err))
		}
		defer listener.Close()
	}
	stopProfiles, err := serveProfiles(n.pprof)
	if err != nil {
		return err
	}
	defer stopProfiles()
	var embedded *server.Server
	if n.nats.url == "" {
		if embedded, err = n.nats.embed(n.dataDir, log); err != nil {
			return err
		}
		defer func() {
			embedded.Shutdown()
			embedded.WaitForShutdown()
		}()
	}
	nc, err := n.nats.connect("kvmesh "+n.role+" "+n.id, embedded, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	return n.serve(cmd.Context(), log, nc, listener, workers)
}

// complete works out the settings that depend on others.
func (n *node) complete(flags *pflag.FlagSet) error {
	if n.id == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "kvmesh"
		}
		n.id = host
		if n.nats.url != "" { // others may run on the host
			n.id = fmt.Sprintf("%s-%d", host, os.Getpid())
		}
	}
	overrides := map[string]string{}
	for _, m := range n.media {
		name, tier, ok := strings.Cut(m, "=")
		if !ok {
			return located(flags, "medium", m, fmt.Errorf("--medium is %q: want name=tier", m))
		}
		overrides[name] = tier
	}
	media, err := engine.NewMedia(overrides)
	if err != nil {
		return located(flags, "medium", "", fmt.Errorf("--medium: %w", err))
	}
	n.bridge.ID, n.bridge.Media, n.bridge.OnGap = n.id, media, bridge.GapPolicy(n.onGap)
	n.bridge.ZMTP.MaxMessage = max(n.bridge.ZMTP.MaxMessage, n.bridge.ZMTP.MaxFrame)
	n.bridge.Replicas, n.index.Replicas = n.nats.replicas, n.nats.replicas
	shards := n.nats.shards
	if n.bridge.Log.Shards, n.index.Log.Shards = shards, shards; n.index.Log.Validate() != nil {
		return located(flags, "log-shards", strconv.Itoa(shards), fmt.Errorf("--log-shards is %d: want 1 to %d", shards, event.MaxShards))
	}
	if n.withRead {
		if n.index.Share, err = event.ParseShare(n.models); err != nil {
			return located(flags, "models", "", fmt.Errorf("--models: %w", err))
		}
		if err := n.choose.validate(); err != nil {
			return err
		}
	}
	if !n.withEdge {
		return nil
	}
	if n.leases.Claim, err = parseLabels(n.claim); err != nil {
		return fmt.Errorf("--claim: %w", err)
	}
	n.leases.ID, n.leases.Replicas = n.id, n.nats.replicas
	return errors.Join(n.bridge.Validate(), n.leases.Validate())
}

// serve runs the node's parts until ctx ends, and ends them in the order that
// loses nothing.
func (n *node) serve(ctx context.Context, log *slog.Logger, nc *nats.Conn, listener net.Listener, workers []event.Worker) error {
	js, err := n.nats.auth.jetstream(nc)
	if err != nil {
		return err
	}
	if err := n.checkLog(ctx, nc, js, log); err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if log, err = n.startTelemetry(ctx, registry, log); err != nil {
		return err
	}
	defer n.tel.Shutdown(ctx)
	meter := n.tel.Meter

	p, err := n.build(nc, js, log)
	if err != nil {
		return err
	}
	edge, leases, index, choose, catalog := p.edge, p.leases, p.index, p.choose, p.catalog

	// Everything ends with ctx, but the catalog and the indexer go on until
	// the bridge has written its last words.
	late, stopLate := context.WithCancel(context.WithoutCancel(ctx))
	defer stopLate()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	failed := make(chan error, 4)
	early, rest := tasks{failed: failed}, tasks{failed: failed}
	rest.start(late, catalog.Run)
	if edge != nil {
		early.start(ctx, func(ctx context.Context) error { return runEdge(ctx, edge, leases) })
		if index == nil { // an index is full of pointers
			early.start(ctx, boundGarbage)
		}
	}
	if index != nil {
		rest.start(late, index.Run)
		choose.describe(js, catalog, n.nats.replicas, log)
		rest.start(late, choose.load.Run)
		rest.start(late, choose.roster.Run)
	}
	peers, err := replica.NewPeers(nc, replica.PeersConfig{ID: n.id, Role: n.role, Version: version(), Snapshot: snapshotOf(index), Logger: log, Meter: meter})
	if err != nil {
		return err
	}
	rest.start(late, peers.Run)
	web, err := n.web(log, nc, index, choose, catalog, peers, promhttp.HandlerFor(telemetry.Aliases(registry), promhttp.HandlerOpts{}))
	if err != nil {
		return err
	}
	if index != nil {
		early.start(ctx, n.dashboard(web, index, nc, js, log).Run)
	}
	if web.Handler, err = n.tel.Handler(web.Handler); err != nil {
		return err
	}
	if listener != nil {
		early.start(ctx, func(context.Context) error { return n.listenHTTP(web, listener) })
		log.Info("serving HTTP", "addr", listener.Addr().String(), "role", n.role, "id", n.id)
	}
	early.Go(func() { register(ctx, catalog, workers, log) })

	select {
	case <-ctx.Done():
		err = nil
	case err = <-failed:
	}
	log.Info("stopping")
	stop() // if a part has failed, the others end too
	shutdown(ctx, web)
	early.Wait()
	stopLate()
	rest.Wait()
	return err
}

// tasks are parts of a node that run at the same time.
type tasks struct {
	sync.WaitGroup
	failed chan<- error
}

// start runs a part, and says if it fails.
func (t *tasks) start(ctx context.Context, run func(context.Context) error) {
	t.Go(func() {
		if err := run(ctx); err != nil {
			t.failed <- err
		}
	})
}

// checkLog tells whether the log that is there is split otherwise. If NATS can't be
// reached now, whoever opens the log finds out.
func (n *node) checkLog(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, log *slog.Logger) error {
	if !nc.IsConnected() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	err := n.index.Log.Check(ctx, js)
	if errors.Is(err, event.ErrLog) {
		return err
	}
	if err != nil {
		log.Debug("not known yet how the log is split", "error", err)
	}
	return nil
}

// shutdown has an HTTP server finish the requests that it is at, for 5 s.
func shutdown(ctx context.Context, web *http.Server) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := web.Shutdown(ctx); err != nil {
		web.Close()
	}
}

// parts are what a node consists of, beside its HTTP server. Those that its role
// does not have are nil.
type parts struct {
	edge    *bridge.Bridge
	leases  *replica.Leases
	index   *indexer.Indexer
	choose  *chooser
	catalog *replica.Catalog
}

// build makes a node's parts. None of them runs yet.
func (n *node) build(nc *nats.Conn, js jetstream.JetStream, log *slog.Logger) (p parts, err error) {
	var catalog *replica.Catalog // made last: it tells the others
	var observers []replica.Observer
	if n.withEdge {
		if p.edge, err = bridge.New(nc, js, n.bridge, bridge.Options{Logger: log, Meter: n.tel.Meter, Tracer: n.tel.Tracer, Attachments: attachments{&catalog}}); err != nil {
			return parts{}, err
		}
		refresh := func(ctx context.Context, s event.Source) error { return catalog.Refresh(ctx, s) }
		if p.leases, err = replica.NewLeases(js, p.edge, n.leases, replica.LeaseOptions{Logger: log, Meter: n.tel.Meter, Refresh: refresh}); err != nil {
			return parts{}, err
		}
		observers = append(observers, p.leases)
	}
	if n.withRead {
		if p.index, p.choose, err = n.reader(nc, js, log, n.tel.Meter); err != nil {
			return parts{}, err
		}
		observers = append(observers, p.index, p.choose.selector)
	}
	where := replica.DefaultCatalog()
	where.Replicas = n.nats.replicas
	catalog = replica.NewCatalog(js, where, log, observers...)
	p.catalog = catalog
	return p, nil
}

// attachments are those of a catalog that is made later.
type attachments struct{ catalog **replica.Catalog }

func (a attachments) Attach(ctx context.Context, w event.Worker, bridge string) error {
	return (*a.catalog).Attach(ctx, w, bridge)
}

func (a attachments) Detach(ctx context.Context, w event.Worker, bridge string) error {
	return (*a.catalog).Detach(ctx, w, bridge)
}

// reader returns what reads the log and answers by it.
func (n *node) reader(nc *nats.Conn, js jetstream.JetStream, log *slog.Logger, meter metric.MeterProvider) (*indexer.Indexer, *chooser, error) {
	index, err := indexer.New(nc, js, n.index, indexer.Options{Logger: log, Meter: meter, Tracer: n.tel.Tracer})
	if err != nil {
		return nil, nil, err
	}
	choose, err := n.choose.new(nc, js, index, n.id, n.nats.replicas, log, n.tel)
	return index, choose, err
}

// snapshotOf returns how to ask an index what it holds; nil if there is none.
func snapshotOf(index *indexer.Indexer) func() replica.Snapshot {
	if index == nil {
		return nil
	}
	return func() replica.Snapshot {
		sources, at := index.Sources()
		s := replica.Snapshot{Ready: index.Ready() == nil, Position: at}
		for i := range sources {
			if sources[i].Answered {
				s.Sources = append(s.Sources, replica.Holding{Source: sources[i].Source, LogSeq: sources[i].LogSeq, Digests: sources[i].Digests})
			}
		}
		return s
	}
}

// web returns the HTTP server. A process without an index has metrics and health
// only.
func (n *node) web(log *slog.Logger, nc *nats.Conn, index *indexer.Indexer, choose *chooser, catalog *replica.Catalog, peers *replica.Peers, metrics http.Handler) (*http.Server, error) {
	if index == nil {
		mux := http.NewServeMux()
		mux.Handle("GET /metrics", metrics)
		mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("{\"status\":\"ok\"}\n")) })
		return &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}, nil
	}
	fleet := api.NewFleet(log)
	if _, err := fleet.Follow(nc); err != nil {
		return nil, err
	}
	cfg := api.Default()
	cfg.Token, cfg.Tracer = n.http.token, n.tel.Tracer
	front := api.New(cfg, index, catalog, fleet, metrics, log)
	if err := n.measureListeners(front); err != nil {
		return nil, err
	}
	front.ShowPeers(func() any { return peers.List() })
	if !n.index.Share.Whole() {
		front.Forward(api.NewElsewhere(nc, index, cfg))
	}
	if _, err := front.Listen(nc, version()); err != nil {
		return nil, err
	}
	door, err := choose.door(nc, cfg.Token, n.index.Share, cfg.Tracer, front, log)
	if err != nil {
		return nil, err
	}
	server := front.HTTPServer()
	server.Handler = pages(door)
	return server, nil
}

func (n *node) listenHTTP(web *http.Server, listener net.Listener) error {
	var err error
	if n.http.cert != "" || n.http.key != "" {
		err = web.ServeTLS(listener, n.http.cert, n.http.key)
	} else {
		err = web.Serve(listener)
	}
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("HTTP: %w", err)
}

// runEdge runs a bridge, and what settles which workers are its own, until ctx
// ends: then other bridges take them over, and what is left is written.
func runEdge(ctx context.Context, edge *bridge.Bridge, leases *replica.Leases) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	failed := make(chan error, 1)
	go func() {
		defer close(failed)
		failed <- edge.Run(life)
	}()
	claiming, stop := context.WithCancel(ctx)
	defer stop()
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		leases.Run(claiming)
	}()
	var err error
	select {
	case err = <-failed: // it could not begin
		stop()
		<-settled
	case <-settled:
		end()
		err = <-failed
	}
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	return errors.Join(err, leases.Close(closing))
}
