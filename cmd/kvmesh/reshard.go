package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
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
them with the new number after. If it is interrupted, start it again, with any number.`,
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
		if _, err := os.Stat(filepath.Join(dataDir, "nats")); err != nil {
			return fmt.Errorf("--data-dir: no kvmesh serve has kept its log there: %w", err)
		}
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
// What was interrupted after 3 is ended, and what was before 3 is undone, before
// anything else: so it does not matter which number it was to be.
type resharding struct {
	js       jetstream.JetStream
	from, to event.Log
	out      io.Writer
}

// copied is the mark of a log that is whole: the name of the first stream of the log
// that it was copied from.
const copied = "kvmesh.copied"

// patienceOfNATS is how long a record that is copied may be under way.
const patienceOfNATS = 30 * time.Second

// streams are those of one log.
type streams struct {
	aside   bool // any of them is put aside
	byShard map[int]jetstream.Stream
}

func (s streams) shards() []int { return slices.Sorted(maps.Keys(s.byShard)) }

func (r *resharding) run(ctx context.Context) error {
	release, err := r.alone()
	if err != nil {
		return err
	}
	defer release()
	logs, err := r.logs(ctx)
	if err != nil {
		return err
	}
	if err := r.decide(ctx, logs); err != nil {
		return err
	}
	old := logs[r.from]
	switch {
	case r.from == r.to && !old.aside, len(logs) == 0:
		fmt.Fprintf(r.out, "the log is in %d streams, or not there yet: nothing to do\n", r.to.Shards)
		return nil
	case r.from == r.to:
		err = r.subjects(ctx, old, func(shard int) []string { return r.to.Config(shard, 1).Subjects })
	default:
		if err = r.copyAll(ctx, old); err == nil {
			err = r.remove(ctx, old)
		}
	}
	if err != nil {
		return err
	}
	fmt.Fprintf(r.out, "the log is in %d streams now: start bridges and indexers with --log-shards %d\n", r.to.Shards, r.to.Shards)
	return nil
}

// atWork is where whoever reshards answers others who would.
const atWork = "kvmesh.reshard"

// alone makes sure that nobody else is at it until release is called: each would take
// the other's copies for those of an interruption. Of two that begin at once neither
// goes on.
func (r *resharding) alone() (release func(), err error) {
	nc, id := r.js.Conn(), nats.NewInbox()
	sub, err := nc.Subscribe(atWork, func(m *nats.Msg) {
		if string(m.Data) != id {
			m.Respond([]byte(id)) // who is not told goes on, as without a connection
		}
	})
	if err != nil {
		return nil, err
	}
	release = func() { sub.Unsubscribe() } // of a connection that is gone there is nothing left
	if _, err = nc.Request(atWork, []byte(id), time.Second); errors.Is(err, nats.ErrTimeout) {
		return release, nil
	}
	release()
	if err == nil {
		err = errors.New("another kvmesh reshard is at work")
	}
	return nil, err
}

// logs returns all streams of logs.
func (r *resharding) logs(ctx context.Context) (map[event.Log]streams, error) {
	taking, put, err := event.LogStreams(ctx, r.js)
	if err != nil {
		return nil, err
	}
	out := map[event.Log]streams{}
	for _, name := range append(taking, put...) {
		l, shard, ok := event.LogOf(name)
		if !ok {
			return nil, fmt.Errorf("stream %s takes records, and is none of the log's", name)
		}
		stream, err := r.js.Stream(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", name, err)
		}
		s := out[l]
		if s.byShard == nil {
			s.byShard = map[int]jetstream.Stream{}
		}
		s.byShard[shard] = stream
		s.aside = s.aside || slices.Contains(put, name)
		out[l] = s
	}
	return out, nil
}

// decide finds out which log has the records, and deletes the other one if there are
// two, which is what an interruption leaves.
func (r *resharding) decide(ctx context.Context, logs map[event.Log]streams) error {
	all := slices.SortedFunc(maps.Keys(logs), func(a, b event.Log) int { return a.Shards - b.Shards })
	switch len(all) {
	case 0:
		return nil
	case 1:
		r.from = all[0]
		return nil
	}
	from, to := all[0], all[1]
	if logs[to].aside {
		from, to = to, from
	}
	if len(all) > 2 || !logs[from].aside || logs[to].aside {
		return fmt.Errorf("there are streams of logs that are split in different ways, like %s and %s: which is to be kept can't be told, delete the others", from.Name(0), to.Name(0))
	}
	if first := logs[to].byShard[0]; first != nil && first.CachedInfo().Config.Metadata[copied] == from.Name(0) {
		from, to = to, from
	}
	r.from = from
	fmt.Fprintf(r.out, "an earlier reshard was interrupted: the log in %d streams is whole, that in %d is deleted\n", from.Shards, to.Shards)
	return r.remove(ctx, logs[to])
}

// remove deletes the streams of a log.
func (r *resharding) remove(ctx context.Context, log streams) error {
	for _, shard := range log.shards() {
		name := log.byShard[shard].CachedInfo().Config.Name
		if err := r.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return fmt.Errorf("delete stream %s: %w", name, err)
		}
	}
	return nil
}

// subjects gives streams other subjects.
func (r *resharding) subjects(ctx context.Context, log streams, of func(shard int) []string) error {
	for _, shard := range log.shards() {
		config := log.byShard[shard].CachedInfo().Config
		config.Subjects = of(shard)
		if _, err := r.js.UpdateStream(ctx, config); err != nil {
			return fmt.Errorf("subjects of stream %s: %w", config.Name, err)
		}
	}
	return nil
}

// copyAll puts the old streams aside, and copies them.
func (r *resharding) copyAll(ctx context.Context, old streams) error {
	if err := r.subjects(ctx, old, func(shard int) []string { return event.Aside(r.from.Name(shard)) }); err != nil {
		return err
	}
	config := old.byShard[old.shards()[0]].CachedInfo().Config
	// A log that has lost its beginning is read with care, and whether the old one has
	// shows no more when its records begin anew at 1.
	config.FirstSeq, config.Metadata = 2, nil
	for shard := range r.to.Shards {
		want := r.to.Config(shard, config.Replicas)
		config.Name, config.Subjects = want.Name, want.Subjects
		if _, err := r.js.CreateStream(ctx, config); err != nil {
			return fmt.Errorf("make stream %s: %w", want.Name, err)
		}
	}
	all := uint64(0)
	for _, shard := range old.shards() {
		n, err := r.copyShard(ctx, old.byShard[shard])
		if err != nil {
			return fmt.Errorf("copy stream %s: %w", r.from.Name(shard), err)
		}
		fmt.Fprintf(r.out, "%s: %d records copied\n", r.from.Name(shard), n)
		all += n
	}
	return r.mark(ctx, all)
}

// mark marks the new log as whole, if it has so many records.
func (r *resharding) mark(ctx context.Context, want uint64) error {
	var first jetstream.StreamConfig
	have := uint64(0)
	for shard := range r.to.Shards {
		stream, err := r.js.Stream(ctx, r.to.Name(shard))
		if err != nil {
			return fmt.Errorf("stream %s: %w", r.to.Name(shard), err)
		}
		info := stream.CachedInfo()
		if have += info.State.Msgs; shard == 0 {
			first = info.Config
		}
	}
	if have != want {
		return fmt.Errorf("%d records were copied, and there are %d: let nobody use the log, and start again", want, have)
	}
	first.Metadata = map[string]string{copied: r.from.Name(0)}
	if _, err := r.js.UpdateStream(ctx, first); err != nil {
		return fmt.Errorf("mark stream %s: %w", first.Name, err)
	}
	return nil
}

// copyBatch is how many records are under way at a time.
const copyBatch = 500

// copyShard copies the records of one stream, in order, and returns how many.
func (r *resharding) copyShard(ctx context.Context, stream jetstream.Stream) (n uint64, err error) {
	consumer, err := stream.CreateConsumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverAllPolicy, AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: patienceOfNATS,
	})
	if err != nil {
		return 0, err
	}
	came := uint64(0)
	for left := consumer.CachedInfo().NumPending; left > 0; { // may get less faster than it is copied: indexers purge
		got, err := consumer.Fetch(int(min(left, copyBatch)), jetstream.FetchMaxWait(5*time.Second), jetstream.FetchHeartbeat(time.Second))
		if err != nil {
			return n, err
		}
		var stored []jetstream.PubAckFuture
		before := came
		for msg := range got.Messages() {
			meta, err := msg.Metadata()
			if err != nil {
				return n, err
			}
			if came++; meta.Sequence.Consumer != came {
				return n, fmt.Errorf("record %d came as number %d", meta.Sequence.Consumer, came)
			}
			left = meta.NumPending
			source, err := r.from.Parse(msg.Subject())
			if err != nil {
				fmt.Fprintf(r.out, "left out: %v\n", err)
				continue
			}
			// Not tried again: it would come behind the ones after it.
			f, err := r.js.PublishMsgAsync(&nats.Msg{Subject: r.to.Subject(source), Data: msg.Data()},
				jetstream.WithExpectStream(r.to.StreamOf(source)), jetstream.WithRetryAttempts(0))
			if err != nil {
				return n, err
			}
			stored = append(stored, f)
		}
		if err := got.Error(); err != nil {
			return n, err
		}
		if came == before {
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
