package event

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/hash"
)

// subjectPrefix is the first token of every subject of the log.
const subjectPrefix = "kv"

// aside is what the subjects of streams begin with that are put aside: their records
// are being copied to those of another Log, and they take none.
const aside = "kvmesh.aside."

// MaxShards is the most streams that a log may be split into.
const MaxShards = 64

// Log says where the records are: in one stream, or in several, the shards of the
// log, each of which has some sources. All of a deployment have to agree on it.
//
// One stream is named Stream and has subjects kv.<model>.<group>.<instance>.<rank>.
// Of n streams that of shard i is named <Stream>-<n>-<i>, and has subjects
// kv.<n>.<i>.<model>.<group>.<instance>.<rank>.
type Log struct {
	Stream string
	Shards int
}

// DefaultLog returns the log of most fleets: one stream.
func DefaultLog() Log { return Log{Stream: "KV", Shards: 1} }

// Validate tells what is wrong with a Log.
func (l Log) Validate() error {
	if l.Stream == "" {
		return errors.New("the stream of the log has no name")
	}
	if l.Shards < 1 || l.Shards > MaxShards {
		return fmt.Errorf("the log is in %d shards, want 1 to %d", l.Shards, MaxShards)
	}
	return nil
}

// Shard returns which shard has a source. It is the same one for all ranks of an
// instance: ranks that an engine's batches name are in one order with their home.
func (l Log) Shard(s Source) int {
	if l.Shards == 1 {
		return 0
	}
	return l.shardOf(s.Key())
}

// shardOf is Shard for a source's key: XXH3-64 of it without the rank, modulo the
// number of shards.
func (l Log) shardOf(key string) int {
	instance := key[:max(strings.LastIndexByte(key, '.'), 0)]
	return int(hash.Text(instance) % uint64(l.Shards))
}

// Name returns the name of a shard's stream.
func (l Log) Name(shard int) string {
	if l.Shards == 1 {
		return l.Stream
	}
	return fmt.Sprintf("%s-%d-%d", l.Stream, l.Shards, shard)
}

// LogOf returns the Log that has a stream of the given name as one of its own, and which
// shard that is; ok is false if DefaultLog has not, however it is split.
func LogOf(name string) (l Log, shard int, ok bool) {
	l = DefaultLog()
	if name == l.Stream {
		return l, 0, true
	}
	if n, _ := fmt.Sscanf(name, l.Stream+"-%d-%d", &l.Shards, &shard); n != 2 || l.Shards < 2 || l.Validate() != nil || l.Name(shard) != name {
		return Log{}, 0, false
	}
	return l, shard, shard >= 0 && shard < l.Shards
}

// StreamOf returns the name of the stream that has a source.
func (l Log) StreamOf(s Source) string { return l.Name(l.Shard(s)) }

// prefix returns what the subjects of a shard begin with.
func (l Log) prefix(shard int) string {
	if l.Shards == 1 {
		return subjectPrefix + "."
	}
	return fmt.Sprintf("%s.%d.%d.", subjectPrefix, l.Shards, shard)
}

// Subject returns the NATS subject that a source's records are on.
func (l Log) Subject(s Source) string { return l.prefix(l.Shard(s)) + s.Key() }

// Parse is the inverse of Subject. It accepts no other spelling of a source than
// the one that Subject returns, and no subject of another shard or another Log.
// Errors wrap ErrSubject.
func (l Log) Parse(subject string) (Source, error) {
	key, ok := strings.CutPrefix(subject, subjectPrefix+".")
	if !ok {
		return Source{}, fmt.Errorf("%w: %q does not start with %q", ErrSubject, subject, subjectPrefix+".")
	}
	if l.Shards == 1 {
		return ParseKey(key)
	}
	shards, rest, _ := strings.Cut(key, ".")
	shard, key, _ := strings.Cut(rest, ".")
	s, err := ParseKey(key)
	if err == nil && (shards != strconv.Itoa(l.Shards) || shard != strconv.Itoa(l.shardOf(key))) {
		err = fmt.Errorf("%w: %q is not %q", ErrSubject, subject, l.Subject(s))
	}
	if err != nil {
		return Source{}, err
	}
	return s, nil
}

// Config returns the configuration of a shard's stream. There is no limit of age
// or size: checkpoints keep it small, and a log that is full refuses records
// instead of losing some.
func (l Log) Config(shard, replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:        l.Name(shard),
		Description: "kvmesh: KV-cache events of engines, one subject a worker rank",
		Subjects:    []string{l.prefix(shard) + ">"},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew,
		Replicas:    replicas,
		Duplicates:  30 * time.Second,
		AllowDirect: true,
	}
}

// Open returns the stream of a shard, and makes it if it is not there. Errors wrap
// ErrLog if the log is split otherwise: then nothing is made, and what is there
// must not be read, which would be a part of the log only.
func (l Log) Open(ctx context.Context, js jetstream.JetStream, shard, replicas int) (jetstream.Stream, error) {
	if err := l.Check(ctx, js); err != nil {
		return nil, err
	}
	want := l.Config(shard, replicas)
	stream, err := js.Stream(ctx, want.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		stream, err = js.CreateStream(ctx, want)
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", want.Name, err)
	}
	if have := stream.CachedInfo().Config.Subjects; !slices.Equal(have, want.Subjects) {
		return nil, fmt.Errorf("%w: stream %s has subjects %v, and --log-shards %d wants %v", ErrLog, want.Name, have, l.Shards, want.Subjects)
	}
	return stream, nil
}

// Check tells whether there are streams of a log that is split otherwise, or that are
// put aside; the error wraps ErrLog then. What can't be found out is another error.
func (l Log) Check(ctx context.Context, js jetstream.JetStream) error {
	own := make(map[string]bool, l.Shards)
	for shard := range l.Shards {
		own[l.Name(shard)] = true
	}
	taking, put, err := LogStreams(ctx, js)
	if err != nil {
		return err
	}
	if len(put) > 0 {
		return fmt.Errorf("%w: kvmesh reshard has put %s aside, and is at work or was interrupted: let it end, or start it again", ErrLog, strings.Join(put, ", "))
	}
	other := slices.DeleteFunc(taking, func(name string) bool { return own[name] })
	if len(other) > 0 {
		return fmt.Errorf("%w: --log-shards is %d here, which is for streams named like %s, but there is %s: "+
			"give all bridges and indexers the number that the log was made with, or change that with kvmesh reshard",
			ErrLog, l.Shards, l.Name(0), strings.Join(other, ", "))
	}
	return nil
}

// APIPrefix returns what the subjects of JetStream's API begin with.
func APIPrefix(js jetstream.JetStream) string {
	o := js.Options()
	switch {
	case o.Domain != "":
		return "$JS." + o.Domain + ".API."
	case o.APIPrefix != "" && o.APIPrefix[len(o.APIPrefix)-1] != '.':
		return o.APIPrefix + "."
	case o.APIPrefix != "":
		return o.APIPrefix
	}
	return jetstream.DefaultAPIPrefix
}

// Aside returns the subjects of a stream that is put aside. Nobody opens a log while
// there is one.
func Aside(stream string) []string { return []string{aside + stream} }

// LogStreams returns the names of all streams that take records, of whatever log, and
// of those that are put aside.
func LogStreams(ctx context.Context, js jetstream.JetStream) (taking, put []string, err error) {
	if taking, err = streamsOn(ctx, js, subjectPrefix+".>"); err == nil {
		put, err = streamsOn(ctx, js, aside+">")
	}
	return taking, put, err
}

// streamsOn returns the names of the streams that have some of the given subjects.
func streamsOn(ctx context.Context, js jetstream.JetStream, subjects string) (names []string, err error) {
	list := js.StreamNames(ctx, jetstream.WithStreamListSubject(subjects))
	for name := range list.Name() {
		names = append(names, name)
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("streams of the log: %w", err)
	}
	slices.Sort(names)
	return names, nil
}
