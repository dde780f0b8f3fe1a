package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// mockFleet is a fleet of mock engines.
type mockFleet struct {
	options  engines.Options
	dialect  string
	load     engines.Load
	workload workload.Options
	faults   []string
	http     string
	model    string
	group    string
	register bool
	owner    bool
	// advertise is the host by which others reach the sockets; empty: the one
	// that they bind.
	advertise string
	client    client
}

func mockCommand() *cobra.Command {
	m := &mockFleet{workload: workload.Default()}
	cmd := &cobra.Command{
		Use:   "mock",
		Short: "Run a fleet of mock engines that publish KV-cache events",
		Long: `Runs engines without GPUs: each rank has a block cache with prefix caching, a device tier and
if wanted a host tier, publishes what happens in it on a PUB socket, and has a replay socket
with the last batches. They run agents' sessions by themselves (--rate), and requests that come
over HTTP (--http): POST /generate and /v1/completions. With --register they are registered
with a running kvmesh. Faults come by --fault, or by POST /faults.`,
		Example: `  kvmesh mock --engines 8 --ranks 2 --rate 200 --register --server http://127.0.0.1:8090 --model my-model
  kvmesh mock --engines 4 --host-blocks 16384 --transfer 50us --http 127.0.0.1:9000 --rate 0
  kvmesh mock --engines 64 --rate 500 --fault drop:3=200ms --fault restart=10s --fault stall:500ms=5s`,
		Args: cobra.NoArgs,
		RunE: m.run,
	}
	f := cmd.Flags()
	o := &m.options
	f.IntVar(&o.Engines, "engines", 1, "engines")
	f.IntVar(&o.Ranks, "ranks", 1, "data-parallel ranks of each engine")
	f.StringVar(&o.Name, "name", "mock", "instance ids, before their numbers")
	f.StringVar(&o.Host, "host", "127.0.0.1", "address that the sockets bind")
	f.StringVar(&m.advertise, "advertise", "", "host by which others reach the sockets; empty: the one they bind")
	f.IntVar(&o.Port, "port", 5557, "port of the first PUB socket; those of the other ranks and engines follow, then the replay sockets; 0: any free ports")
	f.StringVar(&m.dialect, "dialect", string(mock.VLLMMap), "what the engines speak: "+dialects())
	f.BoolVar(&o.NoReplay, "no-replay", false, "no replay sockets")
	f.StringVar(&o.Topic, "topic", "", "topic of the messages; %w in it stands for the worker, instance:rank")
	f.IntVar(&o.Ring, "ring", 10_000, "batches that a replay socket has")
	f.IntVar(&o.HWM, "hwm", 100_000, "messages that wait for a subscriber before more are dropped")
	f.IntVar(&o.Islands, "islands", 0, "engines that share a transfer island, a value of the topology domain transfer; 0: no islands")

	f.IntVar(&o.Cache.BlockSize, "block-size", 16, "tokens a block")
	f.IntVar(&o.Cache.Device, "device-blocks", 4096, "blocks that a device has")
	f.IntVar(&o.Cache.Host, "host-blocks", 0, "blocks that the host tier of a rank has; 0: no host tier")
	f.BoolVar(&m.owner, "owner", false, "the host tier is that of a cache owner: tagged so, it outlives its engine, which publishes under a topic derived from the owner's id; needs --host-blocks")
	f.DurationVar(&o.Cache.Transfer, "transfer", 50*time.Microsecond, "how long a block takes between device and host")
	f.BoolVar(&o.Cache.WriteThrough, "write-through", false, "copy blocks to the host when they are stored, rather than when they are evicted")
	f.DurationVar(&o.Latency.Base, "latency", 0, "how long a request takes at least")
	f.DurationVar(&o.Latency.PerToken, "latency-token", 0, "and for each token of the prompt that is not cached")
	f.DurationVar(&o.Latency.PerStep, "latency-step", 0, "and for each token of the answer")

	f.StringVar(&m.http, "http", "", "address to serve requests on; empty: none")
	f.Float64Var(&m.load.Rate, "rate", 10, "requests a second that the engines run by themselves; 0: none")
	f.IntVar(&m.load.Sessions, "sessions", 64, "sessions that are open at a time")
	f.Uint64Var(&m.workload.Seed, "seed", 1, "seed of the sessions and of the engines' names for blocks")
	f.IntVar(&m.workload.Context, "context", m.workload.Context, "tokens at which a session ends at the latest")
	f.StringArrayVar(&m.faults, "fault", nil, "fault that befalls one worker after the other, as kind[:count]=interval (repeatable); kinds: "+strings.Join(engines.Faults(), ", "))

	f.StringVar(&m.model, "model", "default", "model to register the engines for")
	f.StringVar(&m.group, "routing-group", "default", "routing group to register them in")
	f.BoolVar(&m.register, "register", false, "register the engines")
	m.client.add(f)
	return cmd
}

func dialects() string {
	var names []string
	for _, d := range mock.Dialects() {
		names = append(names, string(d))
	}
	return strings.Join(names, ", ")
}

func (m *mockFleet) run(cmd *cobra.Command, _ []string) error {
	if err := settle(cmd); err != nil {
		return err
	}
	var plans []engines.Plan
	for _, text := range m.faults {
		p, err := engines.ParsePlan(text)
		if err != nil {
			return fmt.Errorf("--fault: %w", err)
		}
		plans = append(plans, p)
	}
	if m.options.Islands > 0 && strings.Contains(m.options.Topic, "%w") && m.options.Ranks > 1 {
		return errors.New("--islands registers engines, which have one topic for all ranks: --topic must not have %w in it")
	}
	if m.owner {
		m.options.Cache.Owner = "kvcr"
		if m.options.Islands > 0 {
			return errors.New("--islands registers engines, and a cache owner is that of a rank: give --islands or --owner")
		}
	}
	m.options.Dialect, m.options.Seed = mock.Dialect(m.dialect), m.workload.Seed
	if size := m.options.Cache.Device * m.options.Cache.BlockSize; m.workload.Context > size {
		return fmt.Errorf("--context is %d tokens, more than the %d of a device", m.workload.Context, size)
	}
	sessions, err := workload.New(m.workload)
	if err != nil {
		return err
	}
	fleet, err := engines.New(m.options)
	if err != nil {
		return err
	}
	if err := fleet.Start(); err != nil {
		return err
	}
	defer fleet.Stop()
	var listener net.Listener
	if m.http != "" {
		if listener, err = net.Listen("tcp", m.http); err != nil {
			return fmt.Errorf("--http: %w", err)
		}
	}
	workers := m.describe(fleet)
	if err := printWorkers(cmd.OutOrStdout(), workers); err != nil {
		return err
	}
	if m.register {
		if err := registerWorkers(cmd.Context(), &m.client, workers, m.model, m.group); err != nil {
			return err
		}
	}
	return m.serve(cmd.Context(), fleet, sessions, plans, listener)
}

// serve runs what the engines do until ctx ends.
func (m *mockFleet) serve(ctx context.Context, fleet *engines.Fleet, sessions *workload.Generator, plans []engines.Plan, listener net.Listener) error {
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	tasks.Go(func() { fleet.Drive(ctx, sessions, m.load) })
	tasks.Go(func() { fleet.Torment(ctx, plans, m.workload.Seed) })
	if listener == nil {
		<-ctx.Done()
		return fleet.Err()
	}
	web := &http.Server{Handler: fleet.Handler(), ReadHeaderTimeout: 5 * time.Second}
	tasks.Go(func() {
		<-ctx.Done()
		web.Close()
	})
	if err := web.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return fleet.Err()
}

// describe returns the workers as others reach them, and gives those with cache owners
// the topics that go with that.
func (m *mockFleet) describe(fleet *engines.Fleet) []engines.Described {
	out := fleet.Describe()
	for i := range out {
		d := &out[i]
		d.Endpoint, d.Replay = m.reach(d.Endpoint), m.reach(d.Replay)
		if !m.owner {
			continue
		}
		w := event.Worker{
			Source:   event.Source{Model: m.model, Group: m.group, Instance: d.Instance, Rank: d.Rank},
			Endpoint: d.Endpoint, Topic: d.Topic, BlockSize: uint32(d.BlockSize), CacheOwner: event.AutoOwner,
		}
		w.Complete()
		d.CacheOwner, d.Topic = w.CacheOwner, w.Topic
		fleet.Workers[i].SetTopic(w.Topic)
	}
	return out
}

func printWorkers(out io.Writer, workers []engines.Described) error {
	for _, w := range workers {
		line := fmt.Sprintf("%s:%d=%s", w.Instance, w.Rank, w.Endpoint)
		if w.Replay != "" {
			line += ",replay=" + w.Replay
		}
		if w.CacheOwner != "" {
			line += ",owner=auto"
		}
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

// reach returns an endpoint as others reach it.
func (m *mockFleet) reach(endpoint string) string {
	host, ok := strings.CutPrefix(endpoint, "tcp://")
	_, port, err := net.SplitHostPort(host)
	if m.advertise == "" || !ok || err != nil {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(m.advertise, port)
}

// transferDomain is the topology domain whose values are transfer islands: a
// request may require or prefer the taint dynamo.topology/transfer=island-0.
const transferDomain = "transfer"

// registration is a request that registers mock engines.
type registration struct {
	what string // for errors
	path string
	body map[string]any
}

// registrations returns the requests that register workers: one for each rank, or
// for each engine if they are on transfer islands, of which selection is to know.
func registrations(workers []engines.Described, model, group string) []registration {
	var out []registration
	byEngine := map[string]int{} // in out
	for _, w := range workers {
		body := map[string]any{"model_name": model, "routing_group": group, "block_size": w.BlockSize, "engine": w.Engine}
		if w.Topic != "" {
			body["topic"] = w.Topic
		}
		if w.CacheOwner != "" {
			body["cache_owner"] = w.CacheOwner
		}
		rank := strconv.FormatUint(uint64(w.Rank), 10)
		if w.Domain == "" {
			body["instance_id"], body["dp_rank"], body["endpoint"] = w.Instance, w.Rank, w.Endpoint
			if w.Replay != "" {
				body["replay_endpoint"] = w.Replay
			}
			out = append(out, registration{w.Instance + " rank " + rank, "/register", body})
			continue
		}
		at, known := byEngine[w.Instance]
		if !known {
			at = len(out)
			byEngine[w.Instance] = at
			body["worker_id"], body["endpoint"] = w.Instance, "http://"+w.Instance
			body["data_parallel_size"] = 0
			body["kv_events_endpoints"], body["replay_endpoints"] = map[string]string{}, map[string]string{}
			body["topology_domains"] = map[string]string{transferDomain: w.Domain}
			out = append(out, registration{w.Instance, "/workers", body})
		}
		body = out[at].body
		body["data_parallel_size"] = body["data_parallel_size"].(int) + 1
		body["kv_events_endpoints"].(map[string]string)[rank] = w.Endpoint
		if w.Replay != "" {
			body["replay_endpoints"].(map[string]string)[rank] = w.Replay
		}
	}
	return out
}

// registerWorkers registers mock engines with a running kvmesh, several at a time.
func registerWorkers(ctx context.Context, c *client, workers []engines.Described, model, group string) error {
	var mu sync.Mutex
	var errs []error
	one := func(r registration) {
		if err := c.call(ctx, io.Discard, http.MethodPost, r.path, r.body); err != nil {
			mu.Lock()
			defer mu.Unlock()
			errs = append(errs, fmt.Errorf("%s: %w", r.what, err))
		}
	}
	all := registrations(workers, model, group)
	if len(all) == 0 {
		return nil
	}
	one(all[0]) // which fixes the block size
	const atOnce = 16
	next := make(chan registration)
	var tasks sync.WaitGroup
	for range atOnce {
		tasks.Go(func() {
			for r := range next {
				one(r)
			}
		})
	}
	for _, r := range all[1:] {
		next <- r
	}
	close(next)
	tasks.Wait()
	return errors.Join(errs...)
}
