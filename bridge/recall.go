package bridge

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// past is what the log says of a source.
type past struct {
	fresh bool // there is nothing to go on from: a new incarnation begins
	dirty bool // the log ends in the middle of something: a checkpoint is due

	state       *residency.State
	incarnation uint64
	batches     bool   // a batch is complete in the log
	last        uint64 // its number
	ts          float64
	fingerprint uint64
	publisher   []byte
	gaps, lost  uint64
	home        uint32 // rank whose engine names this one
	hasHome     bool   //

	lastSeq         uint64 // last sequence of the subject, 0 if it has none
	bytes           int    // in the log since the last checkpoint, and in that
	checkpointBytes int
}

// recall reads a source's own records back. fresh makes an empty state.
func (b *Bridge) recall(ctx context.Context, source event.Source, fresh func() *residency.State) (past, error) {
	subject := b.cfg.Log.Subject(source)
	last, err := b.lastMessage(ctx, source)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return past{fresh: true, state: fresh()}, nil
	}
	if err != nil {
		return past{}, fmt.Errorf("last record of %s: %w", subject, err)
	}
	r := recall{past: past{state: fresh(), lastSeq: last.Sequence}, fresh: fresh}
	if err := b.readBack(ctx, source, last.Sequence, r.record); err != nil {
		return past{}, fmt.Errorf("records of %s: %w", subject, err)
	}
	p, err := r.end()
	if err != nil {
		b.log.Error("the log of a source can't be read back: it starts anew", "subject", subject, "error", err)
	}
	return p, nil
}

// readBack calls f with each record of a source up to a sequence.
func (b *Bridge) readBack(ctx context.Context, source event.Source, last uint64, f func([]byte)) error {
	stream := b.cfg.Log.StreamOf(source)
	consumer, err := b.js.CreateConsumer(ctx, stream, jetstream.ConsumerConfig{
		FilterSubject:     b.cfg.Log.Subject(source),
		DeliverPolicy:     jetstream.DeliverAllPolicy,
		AckPolicy:         jetstream.AckNonePolicy,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 10 * time.Second,
	})
	if err != nil {
		return err
	}
	defer func() {
		name := consumer.CachedInfo().Name
		if err := b.js.DeleteConsumer(ctx, stream, name); err != nil {
			b.log.Debug("consumer not deleted, it will go by itself", "consumer", name, "error", err)
		}
	}()
	const idle = 3 // empty answers in a row before the log counts as changed under us
	complete := false
	for left, empty := int(consumer.CachedInfo().NumPending), 0; left > 0 && empty < idle; empty++ {
		// Never more than there are: what waits for more outlives its need.
		// Without heartbeats a request that gets lost is waited for for ever.
		got, err := consumer.Fetch(min(left, 256), jetstream.FetchMaxWait(b.cfg.PublishTimeout), jetstream.FetchHeartbeat(b.cfg.PublishTimeout/4))
		if err != nil {
			return err
		}
		for msg := range got.Messages() {
			meta, err := msg.Metadata()
			if err != nil {
				return err
			}
			if meta.Sequence.Stream <= last {
				f(msg.Data())
			}
			left--
			empty = -1
			complete = complete || meta.Sequence.Stream >= last
		}
		if complete {
			return nil
		}
		if err := errors.Join(got.Error(), ctx.Err()); err != nil {
			return err
		}
	}
	return fmt.Errorf("the record at %d did not come", last)
}

// recall builds a source's state from its records.
type recall struct {
	past    past
	fresh   func() *residency.State
	dec     event.Decoder
	partial [][]byte // records of a batch that is not complete yet
	staged  *past    // what a checkpoint that is not complete yet says
	next    int      // the chunk of it to come next
	size    int      // bytes of it
	retired bool
	damaged error // why the state is not what the records say
}

// record takes in the next record of the subject.
func (r *recall) record(data []byte) {
	if err := r.dec.Reset(data); err != nil {
		r.damaged = err
		return
	}
	if r.dec.Header.Partial {
		r.partial = append(r.partial, append([]byte(nil), data...))
		return
	}
	parts := r.partial
	r.partial = nil
	checkpoint, err := r.checkpoint(data)
	if !checkpoint {
		for _, part := range append(parts, data) {
			err = errors.Join(err, r.apply(part))
		}
	}
	if err != nil {
		r.damaged = err
	}
}

// apply applies a record that is no part of a checkpoint.
func (r *recall) apply(data []byte) error {
	r.staged = nil // whatever it was, it ends here
	r.past.bytes += len(data)
	if err := r.dec.Reset(data); err != nil {
		return err
	}
	for r.dec.Next() {
		if err := r.op(&r.past); err != nil {
			return err
		}
	}
	r.header()
	return r.dec.Err()
}

// checkpoint applies a record that is a chunk of a checkpoint, and tells whether
// it was one. The last chunk puts the state in force, whatever was before it.
func (r *recall) checkpoint(data []byte) (bool, error) {
	if err := r.dec.Reset(data); err != nil || !r.dec.Next() || r.dec.Op.Kind != event.OpCheckpoint {
		return false, err
	}
	chunk, chunks := r.dec.Op.Chunk, r.dec.Op.Chunks
	if chunk == 0 {
		p := r.past
		p.state = r.fresh()
		if r.dec.Header.Incarnation > p.incarnation {
			p.newLife()
		}
		r.staged, r.next, r.size = &p, 0, 0
	}
	if r.staged == nil || chunk != r.next {
		r.staged = nil // its beginning is missing
		return true, nil
	}
	r.next++
	r.size += len(data)
	for more := true; more; more = r.dec.Next() {
		if err := r.op(r.staged); err != nil {
			return true, err
		}
	}
	if r.next == chunks {
		r.past, r.staged = *r.staged, nil
		r.past.bytes, r.past.checkpointBytes = r.size, r.size
		r.damaged = nil
		r.header()
	}
	return true, r.dec.Err()
}

func (r *recall) header() {
	p, h := &r.past, &r.dec.Header
	p.incarnation = h.Incarnation
	p.batches, p.last, p.ts, p.fingerprint = h.Batches, h.Last, h.TS, h.Fingerprint
}

// newLife forgets what was the engine's before.
func (p *past) newLife() { p.gaps, p.lost, p.publisher = 0, 0, nil }

// op applies one operation to what is known.
func (r *recall) op(p *past) error {
	op := &r.dec.Op
	r.retired = false
	switch op.Kind {
	case event.OpReset:
		r.damaged = nil // whatever is missing before, as after a purge
		if op.Reason != event.ReasonGap {
			p.newLife()
		}
	case event.OpGap:
		p.gaps++
		p.lost += op.To - op.From + 1
	case event.OpGaps:
		p.gaps, p.lost = op.From, op.To
	case event.OpHome:
		p.home, p.hasHome = op.Home, true
	case event.OpPublisher:
		p.publisher = append([]byte(nil), op.Publisher...)
	case event.OpDigest:
		if got := p.state.Digests(); got != op.Digests {
			return fmt.Errorf("digest is %v, the record says %v", got, op.Digests)
		}
	case event.OpRetired:
		r.retired, r.damaged = true, nil
	}
	return p.state.Restore(op)
}

// end returns what came of it, and why the source starts anew although it has
// records, if it does.
func (r *recall) end() (past, error) {
	p := r.past
	p.dirty = r.partial != nil || r.staged != nil
	if r.retired || r.damaged != nil {
		return past{fresh: true, state: r.fresh(), incarnation: p.incarnation, lastSeq: p.lastSeq, bytes: p.bytes}, r.damaged
	}
	return p, nil
}
