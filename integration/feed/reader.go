package feed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Reader applies a log from its first record on.
type Reader struct {
	// Log is where the records are.
	Log event.Log
	// After, if not nil, looks at a source after each record of it. Its error is
	// what is wrong with the record.
	After func(*Source) error

	sources map[event.Source]*Source
	shards  map[int]*shard
}

// shard is how far one stream was read.
type shard struct {
	seq     uint64    // of the last record that was applied
	created time.Time // of the stream that Read reads
}

// NewReader returns a Reader that has read nothing.
func NewReader() *Reader {
	return &Reader{Log: event.DefaultLog(), sources: map[event.Source]*Source{}, shards: map[int]*shard{}}
}

// forget forgets all of a shard.
func (r *Reader) forget(i int) {
	delete(r.shards, i)
	for name := range r.sources {
		if r.Log.Shard(name) == i {
			delete(r.sources, name)
		}
	}
}

func (r *Reader) shard(i int) *shard {
	if r.shards[i] == nil {
		r.shards[i] = &shard{}
	}
	return r.shards[i]
}

// Seq returns the log sequence of the last record of a shard that was applied.
func (r *Reader) Seq(shard int) uint64 { return r.shard(shard).seq }

// Source returns what the log says of a source, nil if it says nothing.
func (r *Reader) Source(name event.Source) *Source { return r.sources[name] }

// Sources returns all sources, in the order of their names.
func (r *Reader) Sources() []*Source {
	var out []*Source
	for _, s := range r.sources {
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b *Source) int { return strings.Compare(a.Name.Key(), b.Name.Key()) })
	return out
}

// Apply applies the message at a log sequence. A message that is no record, which
// changes nothing, is an ErrRecord; a record that breaks a rule, of which it
// applies what it can, an ErrRule.
func (r *Reader) Apply(seq uint64, subject string, data []byte) error {
	err := r.apply(seq, subject, data)
	if err != nil {
		return fmt.Errorf("message %d on %s: %w", seq, subject, err)
	}
	return nil
}

func (r *Reader) apply(seq uint64, subject string, data []byte) (err error) {
	name, err := r.Log.Parse(subject)
	if err != nil {
		return err
	}
	in := r.shard(r.Log.Shard(name))
	if seq <= in.seq {
		return fmt.Errorf("%w: it comes after message %d", ErrRule, in.seq)
	}
	in.seq = seq
	rec, err := decode(data)
	if err != nil {
		return err
	}
	s := r.sources[name]
	if s == nil {
		s = &Source{Name: name, held: blocks{}}
		r.sources[name] = s
	}
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v", ErrRecord, p)
		}
	}()
	err = s.apply(seq, rec)
	if r.After != nil {
		err = errors.Join(err, r.After(s))
	}
	return err
}

// Read applies what the log has beyond what was read before, up to its present
// end. If a stream is another one now, or not as long any more, it forgets
// all of that and begins anew. It returns all that is wrong with the records.
func (r *Reader) Read(ctx context.Context, js jetstream.JetStream) error {
	var errs []error
	for i := range r.Log.Shards {
		errs = append(errs, r.readShard(ctx, js, i))
	}
	return errors.Join(errs...)
}

func (r *Reader) readShard(ctx context.Context, js jetstream.JetStream, i int) error {
	st, err := js.Stream(ctx, r.Log.Name(i))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		r.forget(i)
		return nil
	}
	if err != nil {
		return err
	}
	info, in := st.CachedInfo(), r.shard(i)
	if !info.Created.Equal(in.created) || info.State.LastSeq < in.seq {
		r.forget(i)
		in = r.shard(i)
		in.created = info.Created
	}
	if info.State.LastSeq <= in.seq || info.State.Msgs == 0 {
		return nil
	}
	consumer, err := st.CreateConsumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: in.seq + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, InactiveThreshold: 10 * time.Second,
	})
	if err != nil {
		return err
	}
	defer st.DeleteConsumer(context.WithoutCancel(ctx), consumer.CachedInfo().Name)
	var problems []error
	for left := int(consumer.CachedInfo().NumPending); left > 0; {
		got, err := consumer.Fetch(min(left, 500), jetstream.FetchMaxWait(5*time.Second), jetstream.FetchHeartbeat(time.Second))
		if err != nil {
			return errors.Join(append(problems, err)...)
		}
		n := 0
		for msg := range got.Messages() {
			n++
			meta, err := msg.Metadata()
			if err == nil {
				err = r.Apply(meta.Sequence.Stream, msg.Subject(), msg.Data())
			}
			if err != nil {
				problems = append(problems, err)
			}
		}
		if err := errors.Join(got.Error(), ctx.Err()); err != nil {
			return errors.Join(append(problems, err)...)
		}
		if left -= n; n == 0 { // the log was purged meanwhile: the next call sees it
			break
		}
	}
	return errors.Join(problems...)
}

// Until reads the log again and again until done tells that it has seen enough,
// or a record is wrong, or ctx ends. A server that is away meanwhile is waited for.
func (r *Reader) Until(ctx context.Context, js jetstream.JetStream, done func(*Reader) bool) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := r.Read(attempt, js)
		cancel()
		switch {
		case errors.Is(err, ErrRule), errors.Is(err, ErrRecord), errors.Is(err, event.ErrSubject):
			return err
		case err == nil && done(r):
			return nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("log read up to %v: %w", r.reached(), errors.Join(ctx.Err(), err))
		}
	}
}

// reached returns how far each shard was read.
func (r *Reader) reached() []uint64 {
	out := make([]uint64, r.Log.Shards)
	for i := range out {
		out[i] = r.Seq(i)
	}
	return out
}
