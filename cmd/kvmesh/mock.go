package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/integration/mock"
)

// mockFleet is a fleet of mock engines.
type mockFleet struct {
	options  mock.FleetOptions
	dialect  string
	noReplay bool
	model    string
	group    string
	register bool
	// advertise is the host by which others reach the sockets; empty: the one
	// that they bind.
	advertise string
	client    client
}

func mockCommand() *cobra.Command {
	m := &mockFleet{}
	cmd := &cobra.Command{
		Use:   "mock",
		Short: "Run a fleet of mock engines that publish KV-cache events",
		Long: `Runs engines without GPUs: each rank has a PUB socket, and a replay socket with the last
batches, and publishes what an engine with a prefix cache would, the same for the same seed.
With --register the engines are registered with a running kvmesh.`,
		Example: "  kvmesh mock --engines 8 --ranks 2 --rate 200 --register --server http://127.0.0.1:8090 --model my-model",
		Args:    cobra.NoArgs,
		RunE:    m.run,
	}
	f := cmd.Flags()
	f.IntVar(&m.options.Engines, "engines", 1, "engines")
	f.IntVar(&m.options.Ranks, "ranks", 1, "data-parallel ranks of each engine")
	f.StringVar(&m.options.Host, "host", "127.0.0.1", "address that the sockets bind")
	f.StringVar(&m.advertise, "advertise", "", "host by which others reach the sockets; empty: the one they bind")
	f.IntVar(&m.options.Port, "port", 5557, "port of the first PUB socket; those of the other ranks and engines follow, then the replay sockets; 0: any free ports")
	f.StringVar(&m.dialect, "dialect", string(mock.VLLMMap), "what the engines speak: "+dialects())
	f.BoolVar(&m.noReplay, "no-replay", false, "no replay sockets")
	f.StringVar(&m.options.Engine.Topic, "topic", "", "topic of the messages")
	f.IntVar(&m.options.Engine.Ring, "ring", 10000, "batches that a replay socket has")
	f.Float64Var(&m.options.Rate, "rate", 10, "batches a second, over all engines; 0: as fast as possible")
	f.IntVar(&m.options.Batches, "batches", 0, "batches in all; 0: no end")
	w := &m.options.Workload
	f.Uint64Var(&w.Seed, "seed", 1, "seed of the workload")
	f.IntVar(&w.BlockSize, "block-size", 16, "tokens a block")
	f.IntVar(&w.PerBatch, "blocks", 16, "blocks that a batch stores")
	f.IntVar(&w.Prompt, "prompt", 64, "blocks of a prompt")
	f.IntVar(&w.Shared, "shared", 16, "blocks that prompts of all engines begin with alike")
	f.IntVar(&w.Capacity, "capacity", 4096, "blocks that an engine holds")
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
	m.options.Engine.Dialect = mock.Dialect(m.dialect)
	m.options.Replay = !m.noReplay
	fleet, err := mock.NewFleet(m.options)
	if err != nil {
		return err
	}
	if err := fleet.Start(); err != nil {
		return err
	}
	defer fleet.Stop()
	for _, e := range fleet.Members {
		if _, err := fmt.Fprintf(cmd.OutOrStdout(), "%s:%d=%s", e.Instance, e.Rank, m.reach(e.Addr())); err != nil {
			return err
		}
		if at := e.ReplayAddr(); at != "" {
			fmt.Fprintf(cmd.OutOrStdout(), ",replay=%s", m.reach(at))
		}
		fmt.Fprintln(cmd.OutOrStdout())
	}
	if m.register {
		if err := m.registerAll(cmd, fleet); err != nil {
			return err
		}
	}
	if err := fleet.Run(cmd.Context()); err != nil {
		return err
	}
	<-cmd.Context().Done() // the replay sockets go on
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

func (m *mockFleet) registerAll(cmd *cobra.Command, fleet *mock.Fleet) error {
	engine := "vllm"
	if strings.HasPrefix(m.dialect, "sglang") {
		engine = "sglang"
	}
	var errs []error
	for _, e := range fleet.Members {
		body := map[string]any{
			"instance_id": e.Instance, "dp_rank": e.Rank, "endpoint": m.reach(e.Addr()), "model_name": m.model, "routing_group": m.group,
			"block_size": m.options.Workload.BlockSize, "engine": engine,
		}
		if at := e.ReplayAddr(); at != "" {
			body["replay_endpoint"] = m.reach(at)
		}
		if m.options.Engine.Topic != "" {
			body["topic"] = m.options.Engine.Topic
		}
		if err := m.client.call(cmd.Context(), io.Discard, http.MethodPost, "/register", body); err != nil {
			errs = append(errs, fmt.Errorf("%s rank %d: %w", e.Instance, e.Rank, err))
		}
	}
	return errors.Join(errs...)
}
