package bridge

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Errors of publishing.
var (
	// ErrFenced: another bridge writes the subject.
	ErrFenced = errors.New("bridge: another bridge writes this source")
	// errLogLost: the log no longer has what was written to it. What was in
	// flight is void; a checkpoint is due.
	errLogLost = errors.New("bridge: the log began anew")
)

// JetStream API error codes that mean something here.
const (
	codeWrongLastSeq   = 10071
	codeInProcess      = 10164 // the servers of a replicated stream are still at an earlier message of the subject
	codeMsgNotFound    = 10037
	codeStreamNotFound = 10059
	codeOtherStream    = 10060 // another stream has the subject
)

// publication is where the publisher of a lane stands.
type publication struct {
	session         string     // sets the message ids of this lane apart from those of any other
	lastSeq         uint64     // last sequence of the subject
	bytes           int        // in the log since the last checkpoint, and in that
	checkpointBytes int        // in the last checkpoint
	record          []byte     // the record in flight, or memory for the next one
	id              string     // message id of the record in flight; "" if there is none
	count           uint64     // records so far
	anew            bool       // the log has lost what was written before
	span            trace.Span // of the record in flight, if it is traced
}

// publish publishes a record, and returns when JetStream has stored it, or ctx
// has ended; then the record stays in flight, and settle goes on with it.
func (n *lane) publish(ctx context.Context, record []byte, h event.Header) error {
	n.log.record = record
	n.log.count++
	n.log.span = n.l.b.trace.record(ctx, n, &h, len(record))
	n.log.id = fmt.Sprintf("%s|%d|%d|%s.%d", n.subject, h.Incarnation, h.Last, n.log.session, n.log.count)
	return n.settle(ctx)
}

// settle brings the record in flight, if there is one, to its end: stored once,
// void, or refused because the subject has another writer.
//
// A record that JetStream stored although no acknowledgement came is recognised
// twice: by its message id within the stream's window, and after that by being
// the last message of the subject.
func (n *lane) settle(ctx context.Context) error {
	if n.log.id == "" {
		return nil
	}
	start := time.Now()
	backoff := 50 * time.Millisecond
	for {
		seq, err := n.try(ctx)
		if err == nil {
			n.log.lastSeq = seq
			n.log.bytes += len(n.log.record)
			n.log.id = ""
			n.log.traced(nil)
			n.l.published()
			n.l.b.metrics.published(ctx, len(n.log.record), time.Since(start))
			n.landed()
			return nil
		}
		if errors.Is(err, errLogLost) {
			n.l.log.WarnContext(n.log.context(ctx), "the log has lost this source: writing a checkpoint", "subject", n.subject)
			n.log.traced(err)
			n.log.lastSeq, n.log.bytes, n.log.checkpointBytes, n.log.id, n.log.anew = 0, 0, 0, "", true
			n.l.mu.Lock()
			for _, other := range n.l.lanes { // nobody asks for ranks without a worker
				other.due = true
				other.signal()
			}
			n.l.mu.Unlock()
			n.landed()
			return err
		}
		if errors.Is(err, ErrFenced) || errors.Is(err, nats.ErrConnectionClosed) { // closed for good
			n.log.traced(err)
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		n.log.retried(err)
		n.l.failed(fmt.Errorf("publish: %w", err))
		select {
		case <-time.After(backoff):
		case <-ctx.Done():
			return ctx.Err()
		}
		backoff = min(2*backoff, 2*time.Second)
	}
}

// try makes one attempt to have the record in flight stored, and returns its
// sequence.
func (n *lane) try(ctx context.Context) (uint64, error) {
	b := n.l.b
	ctx, cancel := context.WithTimeout(ctx, b.cfg.PublishTimeout)
	defer cancel()
	msg := &nats.Msg{Subject: n.subject, Data: n.log.record, Header: n.log.header(ctx)}
	ack, err := b.js.PublishMsg(ctx, msg,
		jetstream.WithMsgID(n.log.id),
		jetstream.WithExpectLastSequencePerSubject(n.log.lastSeq),
		jetstream.WithExpectStream(n.stream),
		jetstream.WithRetryAttempts(0))
	if err == nil {
		return ack.Sequence, nil
	}
	var api *jetstream.APIError
	switch {
	case errors.As(err, &api) && api.ErrorCode == codeWrongLastSeq:
		return n.resolve(ctx)
	case errors.As(err, &api) && (api.ErrorCode == codeStreamNotFound || api.ErrorCode == codeOtherStream), errors.Is(err, jetstream.ErrNoStreamResponse):
		if err := b.ensureStream(ctx, n.source); err != nil {
			return 0, err
		}
	}
	return 0, err
}

// resolve finds out why the subject's last sequence is not the one expected.
func (n *lane) resolve(ctx context.Context) (uint64, error) {
	last, err := n.l.b.lastMessage(ctx, n.source)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return 0, errLogLost
	case err != nil:
		return 0, err
	}
	id := last.Header.Get(jetstream.MsgIDHeader)
	switch {
	case id == n.log.id: // stored, and nobody said so
		return last.Sequence, nil
	case last.Sequence == n.log.lastSeq:
		return 0, errors.New("the servers of NATS don't agree on the last record")
	case strings.Contains(id, "|"+n.log.session+"."):
		// An earlier record of this lane, stored unheard and then given up.
		n.log.lastSeq = last.Sequence
		return 0, errors.New("an earlier record turned up")
	}
	return 0, fmt.Errorf("%w: the last message of %s is %d, %q", ErrFenced, n.subject, last.Sequence, id)
}
