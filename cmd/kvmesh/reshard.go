package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func reshardCommand() *cobra.Command {
	var flags natsFlags
	var dataDir string
	cmd := &cobra.Command{
		Use:   "reshard",
		Short: "Change how many streams the log is in",
		Long: `Copies the records of the log into as many streams as --log-shards says, and deletes those
that there were. Nobody opens the log meanwhile: stop bridges and indexers before, and start
them with the new number after. What is interrupted goes on when the same is said again.`,
		Example: "  kvmesh reshard --nats nats://nats-1:4222 --log-shards 4\n  kvmesh reshard --data-dir kvmesh-data --log-shards 2",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := settle(cmd); err != nil {
				return err
			}
			to := event.DefaultLog()
			if to.Shards = flags.shards; to.Validate() != nil {
				return fmt.Errorf("--log-shards is %d: want 1 to %d", flags.shards, event.MaxShards)
			}
			return withNATS(&flags, dataDir, cmd.ErrOrStderr(), func(js jetstream.JetStream) error {
				r := &resharding{js: js, to: to, out: cmd.OutOrStdout()}
				return r.run(cmd.Context())
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.url, "nats", nats.DefaultURL, "URL of the NATS servers")
	f.StringVar(&dataDir, "data-dir", "", "directory of the NATS server that kvmesh serve embeds, which must not run, instead")
	flags.auth.add(f)
	f.IntVar(&flags.shards, "log-shards", 1, "how many streams the log is to be in")
	return cmd
}

// withNATS calls f with a connection to NATS, or to a server on the files of one that
// was embedded.
func withNATS(flags *natsFlags, dataDir string, logs io.Writer, f func(jetstream.JetStream) error) error {
	log := slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var embedded *server.Server
	if dataDir != "" {
		var err error
		if embedded, err = flags.embed(dataDir, log); err != nil {
			return err
		}
		defer func() {
			embedded.Shutdown()
			embedded.WaitForShutdown()
		}()
	}
	nc, err := flags.connect("kvmesh reshard", embedded, log)
	if err != nil {
		return err
	}
	defer nc.Close()
	if !nc.IsConnected() {
		return fmt.Errorf("NATS at %s can't be reached", redact(flags.url))
	}
	js, err := flags.auth.jetstream(nc)
	if err != nil {
		return err
	}
	return f(js)
}

// resharding copies a log into the streams of another one:
//
//  1. the streams that there are get other subjects, and so are put aside: they take no
//     records, and whoever would open either log is refused;
//  2. the new streams are made, and all records copied there in their order, so that each
//     source has the same ones in the same order;
//  3. the new log is marked as whole;
//  4. the old streams are deleted.
//
// What was interrupted before 3 begins anew, after it with 4.
type resharding struct {
	js       jetstream.JetStream
	from, to event.Log
	out      io.Writer
}

// copied is the mark of a log that is whole.
const copied = "kvmesh.copied"

// patienceOfNATS bounds each request to NATS.
const patienceOfNATS = 30 * time.Second

func (r *resharding) run(ctx context.Context) error {
	old, err := r.old(ctx)
	if err != nil {
		return err
	}
	if len(old) == 0 {
		fmt.Fprintf(r.out, "the log is in %d streams, or not there yet: nothing to do\n", r.to.Shards)
		return nil
	}
	whole, err := r.whole(ctx)
	if err != nil {
		return err
	}
	if !whole {
		if err := r.copyAll(ctx, old); err != nil {
			return err
		}
	}
	for _, shard := range slices.Sorted(maps.Keys(old)) {
		if err := r.js.DeleteStream(ctx, r.from.Name(shard)); err != nil {
			return fmt.Errorf("delete stream %s: %w", r.from.Name(shard), err)
		}
	}
	fmt.Fprintf(r.out, "the log is in %d streams now: start bridges and indexers with --log-shards %d\n", r.to.Shards, r.to.Shards)
	return nil
}

// old returns the streams that are to be no more, by shard.
func (r *resharding) old(ctx context.Context) (map[int]jetstream.Stream, error) {
	names, err := event.LogStreams(ctx, r.js)
	if err != nil {
		return nil, err
	}
	out := map[int]jetstream.Stream{}
	for _, name := range names {
		l, ok := event.LogOf(name)
		switch {
		case !ok:
			return nil, fmt.Errorf("stream %s takes records, and is none of the log's", name)
		case l == r.to:
			continue
		case len(out) > 0 && l != r.from:
			return nil, fmt.Errorf("there are streams of logs that are split in different ways, %s and %s: which one is to be kept can't be told", r.from.Name(0), name)
		}
		r.from = l
		stream, err := r.js.Stream(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", name, err)
		}
		for shard := range l.Shards {
			if l.Name(shard) == name {
				out[shard] = stream
			}
		}
	}
	return out, nil
}

// whole tells whether all has been copied.
func (r *resharding) whole(ctx context.Context) (bool, error) {
	stream, err := r.js.Stream(ctx, r.to.Name(0))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return stream.CachedInfo().Config.Metadata[copied] != "", nil
}

// copyAll puts the old streams aside, and copies them.
func (r *resharding) copyAll(ctx context.Context, old map[int]jetstream.Stream) error {
	var config jetstream.StreamConfig
	for shard, stream := range old {
		config = stream.CachedInfo().Config
		config.Subjects = r.from.Aside(shard)
		if _, err := r.js.UpdateStream(ctx, config); err != nil {
			return fmt.Errorf("put stream %s aside: %w", config.Name, err)
		}
	}
	for shard := range r.to.Shards {
		want := r.to.Config(shard, config.Replicas)
		config.Name, config.Subjects, config.Metadata = want.Name, want.Subjects, nil
		stream, err := r.js.CreateOrUpdateStream(ctx, config)
		if err == nil {
			err = stream.Purge(ctx) // of what came there before an interruption
		}
		if err != nil {
			return fmt.Errorf("make stream %s: %w", want.Name, err)
		}
	}
	for _, shard := range slices.Sorted(maps.Keys(old)) {
		n, err := r.copyShard(ctx, old[shard])
		if err != nil {
			return fmt.Errorf("copy stream %s: %w", r.from.Name(shard), err)
		}
		fmt.Fprintf(r.out, "%s: %d records copied\n", r.from.Name(shard), n)
	}
	config.Name, config.Subjects = r.to.Name(0), r.to.Config(0, 1).Subjects
	config.Metadata = map[string]string{copied: r.from.Name(0)}
	if _, err := r.js.UpdateStream(ctx, config); err != nil {
		return fmt.Errorf("mark stream %s: %w", config.Name, err)
	}
	return nil
}

// copyBatch is how many records are under way at a time.
const copyBatch = 500

// copyShard copies the records of one stream, in order, and returns how many.
func (r *resharding) copyShard(ctx context.Context, stream jetstream.Stream) (n int, err error) {
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: patienceOfNATS,
	})
	if err != nil {
		return 0, err
	}
	for left := consumer.CachedInfo().NumPending; left > 0; { // may get less faster than it is copied: indexers purge
		got, err := consumer.Fetch(int(min(left, copyBatch)), jetstream.FetchMaxWait(5*time.Second), jetstream.FetchHeartbeat(time.Second))
		if err != nil {
			return n, err
		}
		var stored []jetstream.PubAckFuture
		came := false
		for msg := range got.Messages() {
			meta, err := msg.Metadata()
			if err != nil {
				return n, err
			}
			came, left = true, meta.NumPending
			source, err := r.from.Parse(msg.Subject())
			if err != nil {
				fmt.Fprintf(r.out, "left out: %v\n", err)
				continue
			}
			f, err := r.js.PublishMsgAsync(&nats.Msg{Subject: r.to.Subject(source), Data: msg.Data()}, jetstream.WithExpectStream(r.to.StreamOf(source)))
			if err != nil {
				return n, err
			}
			stored = append(stored, f)
		}
		if err := got.Error(); err != nil {
			return n, err
		}
		if !came {
			return n, errors.New("no record came")
		}
		for _, f := range stored {
			select {
			case <-f.Ok():
				n++
			case err := <-f.Err():
				return n, err
			case <-time.After(patienceOfNATS):
				return n, errors.New("NATS does not answer")
			case <-ctx.Done():
				return n, ctx.Err()
			}
		}
	}
	return n, nil
}
