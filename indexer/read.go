package indexer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// The reader is the package's own, because a consumer that heals itself heals
// slowly when a leader is lost, and says nothing when the stream under it was
// cut or made anew. This one is made again from the position whenever anything
// seems wrong, and compares the position with the stream each time.
const (
	pullBatch      = 2000
	pullHeartbeat  = 500 * time.Millisecond
	requestTimeout = time.Second
	retryMin       = 50 * time.Millisecond
	retryMax       = time.Second
)

// readLoop reads the log until ctx ends.
func (x *shard) readLoop(ctx context.Context) {
	backoff := retryMin
	for ctx.Err() == nil {
		before := x.Position()
		err := x.read(ctx)
		if ctx.Err() != nil {
			return
		}
		if x.Position() != before {
			backoff = retryMin
		}
		switch {
		case errors.Is(err, errRecheck), errors.Is(err, errReconnected):
		case errors.Is(err, nats.ErrReconnectBufExceeded): // not connected, which whoever owns the connection is told of
			x.log.Debug("reading the log waits for NATS", "log_seq", x.Position())
		default:
			x.log.Warn("reading the log failed, trying again", "error", err, "log_seq", x.Position())
		}
		select {
		case <-time.After(backoff):
		case <-ctx.Done():
		}
		backoff = min(2*backoff, retryMax)
	}
}

// errRecheck ends a read because the position is another one now.
var errRecheck = errors.New("indexer: position changed")

// read reads from the position on until something is wrong.
func (x *shard) read(ctx context.Context) error {
	if err := x.locate(ctx); err != nil {
		return err
	}
	next := x.Position() + 1
	created, cancel := context.WithTimeout(ctx, requestTimeout)
	consumer, err := x.js.CreateConsumer(created, x.stream, jetstream.ConsumerConfig{
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       next,
		AckPolicy:         jetstream.AckNonePolicy,
		MemoryStorage:     true,
		Replicas:          1,
		InactiveThreshold: 30 * time.Second,
	})
	cancel()
	if err != nil {
		return fmt.Errorf("create a consumer: %w", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
		defer cancel()
		if err := x.js.DeleteConsumer(ctx, x.stream, consumer.CachedInfo().Name); err != nil {
			x.log.Debug("consumer not deleted, it will go by itself", "error", err)
		}
	}()
	messages, err := newPuller(x.nc, x.js, consumer)
	if err != nil {
		return fmt.Errorf("pull: %w", err)
	}
	defer messages.close()
	for {
		msg, seq, err := messages.next(ctx)
		if err != nil {
			return fmt.Errorf("pull: %w", err)
		}
		if seq > x.end.Load() {
			x.end.Store(seq)
		}
		if seq > x.Position()+1 {
			// What should come next is not there any more: the log was cut
			// behind the position, or somebody deleted single records. The
			// latter shows in the digests.
			before := x.Position()
			if err := x.locate(ctx); err != nil {
				return err
			}
			if x.Position() != before {
				return errRecheck
			}
		}
		if x.trace.tracer == nil {
			x.apply(seq, msg.Subject, msg.Data)
		} else {
			x.applyTraced(seq, msg.Subject, msg.Header, msg.Data)
		}
	}
}

// locate compares the position with the stream, and makes the stream if there is
// none. A position that is not in the stream is given up: everything is read
// anew.
func (x *shard) locate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	stream, err := x.cfg.Log.Open(ctx, x.js, x.number, x.cfg.Replicas)
	if errors.Is(err, event.ErrLog) {
		x.refused.Store(&err)
	}
	if err != nil {
		return err
	}
	x.refused.Store(nil)
	info := stream.CachedInfo()
	at := x.Position()
	x.end.Store(info.State.LastSeq)
	switch {
	case x.created.IsZero(): // the first look
	case !info.Created.Equal(x.created):
		x.log.Warn("the log is a new stream: reading it anew", "created", info.Created)
	case info.State.LastSeq < at:
		x.log.Warn("the log ends before the position: reading it anew", "last", info.State.LastSeq, "log_seq", at)
	case info.State.FirstSeq > at+1:
		x.log.Warn("the log was cut behind the position: reading it anew", "first", info.State.FirstSeq, "log_seq", at)
	default:
		return nil
	}
	x.restart(info.Created, info.State.FirstSeq, info.State.LastSeq)
	return nil
}

// restart forgets everything, and begins before the first record there is.
func (x *shard) restart(created time.Time, first, last uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	e := newEra()
	e.whole.Store(x.created.IsZero() && first <= 1)
	x.created, x.target = created, last
	for name, old := range *x.now().partitions.Load() {
		if len(old.instances) == 0 {
			continue
		}
		p := newPartition(name, old.served)
		p.blockSize.Store(old.blockSize.Load())
		p.open.Store(true)
		p.instances = old.instances
		e.set(name, p)
	}
	x.sources, x.writers = map[event.Source]*source{}, map[string]*source{}
	x.era.Store(e)
	x.advance(max(first, 1) - 1)
}
