package bridge

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// retire writes that the slot's worker is gone, unless that has been written, and
// the same for the ranks without a worker that it was read for.
func (s *slot) retire(ctx context.Context) error {
	sources := append([]event.Source{s.source}, s.strays...)
	if !s.b.kin(s.source) {
		strays, err := s.b.unregistered(ctx, s.source)
		if err != nil {
			return err
		}
		sources = append(sources, strays...)
	}
	for _, source := range sources {
		if err := s.b.retire(ctx, source); err != nil {
			return fmt.Errorf("retire %s: %w", source.Key(), err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.strays = nil
	if s.role == retiring {
		s.role = idle
	}
	return nil
}

// retire makes the last record of a source say that its worker is gone. It does
// so once, whoever else tries: the message id is the same for all, and none is
// written behind one that is there.
func (b *Bridge) retire(ctx context.Context, source event.Source) error {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.StopTimeout)
	defer cancel()
	subject := b.cfg.Log.Subject(source)
	for {
		last, err := b.lastMessage(ctx, source)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		h, retired := lastWord(last.Data)
		if retired {
			return nil
		}
		msg := &nats.Msg{Subject: subject, Data: event.AppendRecord(nil, h, 1, event.AppendRetired(nil))}
		attempt, done := context.WithTimeout(ctx, b.cfg.PublishTimeout)
		_, err = b.js.PublishMsg(attempt, msg,
			jetstream.WithMsgID(fmt.Sprintf("%s|%d|retired|%d", subject, h.Incarnation, last.Sequence)),
			jetstream.WithExpectLastSequencePerSubject(last.Sequence),
			jetstream.WithExpectStream(b.cfg.Log.StreamOf(source)),
			jetstream.WithRetryAttempts(0))
		done()
		var api *jetstream.APIError
		if err == nil || !errors.As(err, &api) || api.ErrorCode != codeWrongLastSeq && api.ErrorCode != codeInProcess {
			return err
		}
		// Somebody wrote meanwhile: look again.
	}
}

// lastWord reads the last record of a source, as far as a retirement needs it.
func lastWord(data []byte) (h event.Header, retired bool) {
	var dec event.Decoder
	if dec.Reset(data) != nil {
		return h, false // whatever it says, it is not the last word
	}
	for dec.Next() {
		retired = dec.Op.Kind == event.OpRetired
	}
	return event.Header{Incarnation: dec.Header.Incarnation}, retired && dec.Err() == nil
}

// kin tells whether another rank of a source's instance has a worker.
func (b *Bridge) kin(source event.Source) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for other := range b.known {
		if other != source && other.Partition() == source.Partition() && other.Instance == source.Instance {
			return true
		}
	}
	return false
}

// unregistered returns the sources of the same instance that the log has records
// of, and that no worker is registered for: ranks that its engine's batches
// named.
func (b *Bridge) unregistered(ctx context.Context, source event.Source) ([]event.Source, error) {
	subject := b.cfg.Log.Subject(source)
	pattern := subject[:strings.LastIndexByte(subject, '.')+1] + "*"
	stream, err := b.js.Stream(ctx, b.cfg.Log.StreamOf(source))
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("sources of %s: %w", source.Instance, err)
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(pattern))
	if err != nil {
		return nil, fmt.Errorf("sources of %s: %w", source.Instance, err)
	}
	var out []event.Source
	b.mu.Lock()
	defer b.mu.Unlock()
	for subject := range info.State.Subjects {
		other, err := b.cfg.Log.Parse(subject)
		if err == nil && other != source && !b.known[other] {
			out = append(out, other)
		}
	}
	return out, nil
}
