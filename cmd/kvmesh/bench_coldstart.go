package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

// coldstartBench measures how long an indexer that knows nothing takes until its
// answers are true.
type coldstartBench struct {
	sources, blocks, tail, rounds int
	dir, json                     string
	profile                       profiler
}

func benchColdstartCommand() *cobra.Command {
	b := &coldstartBench{}
	cmd := &cobra.Command{
		Use:   "coldstart",
		Short: "How long an indexer that starts takes from the log to its first answer",
		Long: `Writes a log as bridges leave it, a checkpoint of every source and some records behind it, and
starts indexers on it, one after the other, in a process that has nothing else to do. The NATS
server is in the same process. Measured is the time from the start until the indexer is ready,
with the catalog; then its digests are compared with those of the states that were written.
Also measured: what it costs to write the checkpoints, and to purge what they make void.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settle(cmd); err != nil {
				return err
			}
			f, err := b.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), b.json)
		},
	}
	f := cmd.Flags()
	f.IntVar(&b.sources, "sources", 1024, "worker ranks")
	f.IntVar(&b.blocks, "blocks", 1000, "blocks that each holds")
	f.IntVar(&b.tail, "tail", 10, "records of each behind its checkpoint")
	f.IntVar(&b.rounds, "rounds", 5, "indexers that are started, one after the other")
	f.StringVar(&b.dir, "data-dir", "", "directory for the log; empty: a temporary one")
	f.StringVar(&b.json, "json", "", "file to write the figures to, as JSON")
	b.profile.add(f)
	return cmd
}

func (b *coldstartBench) run(ctx context.Context, progress io.Writer) (figures, error) {
	if b.sources < 1 || b.blocks < 16 || b.tail < 0 || b.rounds < 1 {
		return nil, fmt.Errorf("%d sources, %d blocks, %d records behind, %d rounds: want at least 1, 16, 0 and 1", b.sources, b.blocks, b.tail, b.rounds)
	}
	dir := b.dir
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "kvmesh-bench-"); err != nil {
			return nil, err
		}
		defer os.RemoveAll(dir)
	}
	quiet := slog.New(slog.DiscardHandler)
	server, err := (&natsFlags{}).embed(dir, quiet)
	if err != nil {
		return nil, err
	}
	defer func() { server.Shutdown(); server.WaitForShutdown() }()
	nc, err := (&natsFlags{}).connect("kvmesh bench", server, quiet)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	f := figures{"sources": float64(b.sources)}
	fmt.Fprintf(progress, "writing the log of %d sources\n", b.sources)
	feeds, err := b.write(ctx, js, f)
	if err != nil {
		return nil, err
	}
	for _, c := range feeds {
		for _, d := range c.state.Digests() {
			f["blocks"] += float64(d.Count)
		}
	}
	fmt.Fprintf(progress, "starting %d indexers\n", b.rounds)
	if err := b.profile.start(); err != nil {
		return nil, err
	}
	var took []float64
	for range b.rounds {
		seconds, err := b.start(ctx, nc, js, feeds)
		if err != nil {
			return nil, err
		}
		took = append(took, seconds)
	}
	if err := b.profile.stop(); err != nil {
		return nil, err
	}
	f["coldstart_s"] = percentile(took, 50)
	f["coldstart_worst_s"] = percentile(took, 100)
	f["resident_mb"] = residentMB()
	return f, nil
}

// coldFeed is a source of the log that is written.
type coldFeed struct {
	worker event.Worker
	state  *residency.State
	ops    residency.Ops
	load   *mock.Workload
	seq    uint64 // of the engine
}

// batch has the source's engine say the next thing.
func (c *coldFeed) batch(d *engine.Decoder, b *engine.Batch) error {
	payload, err := mock.VLLMMap.Encode(mock.Batch{TS: float64(c.seq), Events: c.load.Next(), BlockSize: 16})
	if err != nil {
		return err
	}
	c.seq++
	if err := d.Decode(payload, b); err != nil {
		return err
	}
	for i := range b.Events {
		if reason, n := c.state.Apply(&b.Events[i], &c.ops); n > 0 {
			return fmt.Errorf("the workload's event was dropped: %s", reason)
		}
	}
	return nil
}

// record takes what was said since the last one as a record.
func (c *coldFeed) record() []byte {
	digests := c.state.Digests()
	h := event.Header{Incarnation: 1, Batches: c.seq > 0, First: max(c.seq, 1) - 1, Last: max(c.seq, 1) - 1}
	record := event.AppendRecord(nil, h, c.ops.Len()+1, c.ops.Buf, event.AppendDigest(nil, &digests))
	c.ops.Reset()
	return record
}

// checkpoint returns the source's checkpoint.
func (c *coldFeed) checkpoint() (records [][]byte) {
	h := event.Header{Incarnation: 1, Batches: true, First: c.seq, Last: c.seq - 1}
	for _, chunk := range c.state.Checkpoint(256<<10, &residency.Ops{}) {
		records = append(records, event.AppendRecord(nil, h, chunk.Count, chunk.Ops))
	}
	return records
}

// write writes the log: what made the state, the checkpoints that make that void,
// and what comes behind them.
func (b *coldstartBench) write(ctx context.Context, js jetstream.JetStream, f figures) ([]*coldFeed, error) {
	stream, err := js.CreateStream(ctx, event.DefaultLog().Config(0, 1))
	if err != nil {
		return nil, err
	}
	put := func(c *coldFeed, record []byte) error {
		_, err := js.PublishMsgAsync(&nats.Msg{Subject: event.DefaultLog().Subject(c.worker.Source), Data: record})
		return err
	}
	settled := func() error {
		select {
		case <-js.PublishAsyncComplete():
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	profile, _ := engine.ProfileOf("vllm")
	decoder := engine.NewDecoder(profile, bridge.Default("bench").Media)
	var batch engine.Batch
	var feeds []*coldFeed
	for i := range b.sources {
		c := &coldFeed{
			state: residency.New(residency.Config{BlockSize: 16, Clears: event.AllTiers, Limits: residency.DefaultLimits()}),
			load:  mock.NewWorkload(mock.WorkloadOptions{Seed: uint64(i), Capacity: b.blocks}),
		}
		c.worker = event.Worker{Source: event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i)}, Endpoint: fmt.Sprint("tcp://127.0.0.1:", 1024+i), BlockSize: 16}
		c.ops.Add(func(b []byte) []byte { return event.AppendReset(b, event.ReasonNew) })
		feeds = append(feeds, c)
	}
	// Sources take turns, as in a fleet.
	for range (b.blocks+15)/16 + b.blocks/64 {
		for _, c := range feeds {
			if err := errors.Join(c.batch(decoder, &batch), put(c, c.record())); err != nil {
				return nil, err
			}
		}
		if err := settled(); err != nil {
			return nil, err
		}
	}
	info, err := stream.Info(ctx)
	if err != nil {
		return nil, err
	}
	void := info.State.LastSeq
	f["history_mb"], f["history_records"] = float64(info.State.Bytes)/1e6, float64(void)

	began, size := time.Now(), 0
	for _, c := range feeds {
		for _, record := range c.checkpoint() {
			size += len(record)
			if err := put(c, record); err != nil {
				return nil, err
			}
		}
	}
	if err := settled(); err != nil {
		return nil, err
	}
	f["checkpoints_s"], f["checkpoints_mb"] = time.Since(began).Seconds(), float64(size)/1e6
	began = time.Now()
	if err := stream.Purge(ctx, jetstream.WithPurgeSequence(void+1)); err != nil {
		return nil, err
	}
	f["purge_s"] = time.Since(began).Seconds()
	for range b.tail {
		for _, c := range feeds {
			if err := errors.Join(c.batch(decoder, &batch), put(c, c.record())); err != nil {
				return nil, err
			}
		}
	}
	return feeds, errors.Join(settled(), b.register(ctx, js, feeds))
}

// register puts the workers into the catalog.
func (b *coldstartBench) register(ctx context.Context, js jetstream.JetStream, feeds []*coldFeed) error {
	life, stop := context.WithCancel(ctx)
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil)
	done := make(chan struct{})
	go func() {
		defer close(done)
		catalog.Run(life)
	}()
	defer func() { stop(); <-done }()
	for _, c := range feeds {
		for {
			err := catalog.Register(ctx, c.worker)
			if err == nil {
				break
			}
			if len(catalog.Workers()) > 0 || ctx.Err() != nil { // else it is not up yet
				return err
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	return nil
}

// start starts an indexer, and returns how many seconds it took until it was
// ready.
func (b *coldstartBench) start(ctx context.Context, nc *nats.Conn, js jetstream.JetStream, feeds []*coldFeed) (float64, error) {
	cfg := indexer.Default()
	cfg.Compact = false
	ctx, stop := context.WithTimeout(ctx, 5*time.Minute)
	began := time.Now()
	index, err := indexer.New(nc, js, cfg, indexer.Options{})
	if err != nil {
		stop()
		return 0, err
	}
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil, index)
	done := make(chan struct{}, 2)
	go func() { index.Run(ctx); done <- struct{}{} }()
	go func() { catalog.Run(ctx); done <- struct{}{} }()
	defer func() { stop(); <-done; <-done }()
	for index.Ready() != nil {
		if ctx.Err() != nil {
			return 0, fmt.Errorf("not ready: %w", index.Ready())
		}
		time.Sleep(time.Millisecond)
	}
	seconds := time.Since(began).Seconds()
	held := map[event.Source]event.Digests{}
	sources, _ := index.Sources()
	for _, s := range sources {
		if s.Answered {
			held[s.Source] = s.Digests
		}
	}
	for _, c := range feeds {
		if have, want := held[c.worker.Source], c.state.Digests(); have != want {
			return 0, fmt.Errorf("%s: the index has %v, want %v", c.worker.Instance, have, want)
		}
	}
	return seconds, nil
}
