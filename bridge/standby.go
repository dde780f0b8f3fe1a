package bridge

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// A source goes from one bridge to another without a gap if the next one reads
// the engine before the one before stops: it holds what comes, in standby, until
// the source is its own. Then it reads back what the log has, puts what it holds
// behind that, and has the rest replayed. What it holds matters where the
// engine's ring is short, or where there is none.

// standbyPoll is how often it is looked whether a listener in standby is
// subscribed.
const standbyPoll = 10 * time.Millisecond

// standbySilence is for how long nothing happens, on a connection or in the log,
// before nothing is expected to. A connection alone proves nothing: the engine
// takes the subscription in when it gets to it.
const standbySilence = time.Second

// AwaitStandby waits until nothing is missed if the bridge that writes a source
// stops: the source, which was given to Standby, is subscribed to at its engine,
// and the log has come to where that began. Without that the other bridge would
// leave unread what it has been sent already. It returns the error of ctx, which
// says what is missing, if that takes too long.
func (b *Bridge) AwaitStandby(ctx context.Context, source event.Source) error {
	ticker := time.NewTicker(standbyPoll)
	defer ticker.Stop()
	var at uint64 // the next batch in the log
	since := time.Now()
	for {
		l, why := b.connection(source)
		if l != nil && l.subscribed() {
			first, held := l.oldestHeld()
			if !held {
				return nil
			}
			next, err := b.nextInLog(ctx, source)
			switch {
			case err == nil && (next >= first || next == at && time.Since(since) >= standbySilence):
				return nil
			case err != nil:
				why = err.Error()
			default:
				why = fmt.Sprintf("the log is not at batch %d yet", first)
			}
			if next != at {
				at, since = next, time.Now()
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("not in standby yet, %s: %w", why, ctx.Err())
		}
	}
}

// nextInLog returns the number of the engine batch that the log of a source has
// to go on with.
func (b *Bridge) nextInLog(ctx context.Context, source event.Source) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, b.cfg.PublishTimeout)
	defer cancel()
	last, err := b.lastMessage(ctx, source)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var dec event.Decoder
	if err := dec.Reset(last.Data); err != nil || !dec.Header.Batches {
		return 0, err
	}
	return dec.Header.Last + 1, nil
}

// oldestHeld returns the lowest number of a batch that is held, if one is.
func (l *listener) oldestHeld() (seq uint64, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.window.Len() == 0 {
		return 0, false
	}
	return l.window.First(), true
}

// Connected tells whether a source's engine is connected.
func (b *Bridge) Connected(source event.Source) bool {
	l, _ := b.connection(source)
	return l != nil
}

// Heard returns when something came from a source's engine last; false if it is
// not connected.
func (b *Bridge) Heard(source event.Source) (at time.Time, ok bool) {
	l, _ := b.connection(source)
	if l == nil {
		return at, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.heard, true
}

// connection returns the listener that is connected to a source's engine; nil if
// there is none, and why.
func (b *Bridge) connection(source event.Source) (connected *listener, why string) {
	b.mu.Lock()
	s := b.slots[source]
	b.mu.Unlock()
	if s == nil {
		return nil, "no listener"
	}
	s.mu.Lock()
	l, err := s.listener, s.err
	s.mu.Unlock()
	switch {
	case l == nil && err != nil:
		return nil, err.Error()
	case l == nil:
		return nil, "no listener yet"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.connected {
		return nil, l.engineErr
	}
	return l, "which has not sent anything yet"
}

// subscribed tells whether the engine is known to have taken in the subscription,
// or would most likely have done so.
func (l *listener) subscribed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.connected && (l.hasLive || time.Since(l.heard) >= standbySilence)
}

// AwaitGone waits until a source that was given to Release or Remove is neither
// read nor written any more.
func (b *Bridge) AwaitGone(ctx context.Context, source event.Source) error {
	b.mu.Lock()
	s := b.slots[source]
	b.mu.Unlock()
	if s == nil {
		return nil
	}
	select {
	case <-s.gone:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("source %s is not given up yet: %w", source.Key(), ctx.Err())
	}
}

// -- the listener -------------------------------------------------------------

func (l *listener) inStandby() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.standby
}

// stand holds a batch in standby. Of what is too much the oldest goes: the log
// will have that, or a replay.
func (l *listener) stand(seq uint64, payload []byte) {
	for l.window.Len() > 0 && l.window.bytes+len(payload) > l.b.cfg.MaxHeld {
		l.window.Pop()
	}
	l.window.Add(seq, l.conn, payload)
}

// reconnectedInStandby drops what came over an earlier connection: it may be of
// another life of the engine, and numbers alone don't tell.
func (l *listener) reconnectedInStandby() {
	if l.standby || l.meeting != nil {
		l.window.DropBefore(l.conn)
	}
	l.endMeeting()
}

func (l *listener) endMeeting() {
	if l.meeting != nil {
		l.meeting.Stop()
		l.meeting = nil
	}
}

// leaveStandby puts what is held behind what the log has.
func (l *listener) leaveStandby() {
	if !l.standby {
		return
	}
	l.standby = false
	if l.next == 0 {
		l.drain()
		l.skipHoles()
		return
	}
	l.proven = false
	l.meet()
}

// meetingTime is for how long an engine without a replay socket may be behind, on
// this connection, what another bridge got from it.
const meetingTime = 5 * time.Second

// meet finds out whether what is held is of the life that the log tells of. The
// last batch in the log proves or disproves it, once it came here too; else the
// engine is asked for it.
func (l *listener) meet() {
	last := l.next - 1
	if payload, ok := l.window.Get(last); ok {
		l.endMeeting()
		if print, known := l.recent.get(last); known && print != hash.Bytes(payload) {
			l.restart(fmt.Sprintf("batch %d is another one now", last))
		} else {
			l.proven = true
		}
		l.drain()
		l.skipHoles()
		return
	}
	switch {
	case l.replays():
		l.verify = true // the repair goes on from here
	case l.window.Len() == 0:
		// As after any reconnection.
	case l.window.Last() > last:
		l.endMeeting()
		l.drain()
		l.skipHoles()
	case l.meeting == nil:
		l.meeting = time.AfterFunc(meetingTime, l.missed)
	}
}

// missed is called when the last batch in the log did not come here: the engine
// that is connected never sent it.
func (l *listener) missed() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.meeting == nil || l.ctx.Err() != nil {
		return
	}
	l.endMeeting()
	l.restart("it does not come to the batch that was applied last")
	l.drain()
	l.skipHoles()
}

// skipHoles gives up what is missing before batches that are held, if nobody can
// be asked for it.
func (l *listener) skipHoles() {
	for !l.replays() && l.hole() {
		l.lose(l.window.First()-1, event.ReasonNoReplay)
		l.drain()
	}
}

// straySources returns the sources beside its own that the listener writes.
func (l *listener) straySources() []event.Source {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []event.Source
	for _, n := range l.lanes {
		if n != l.home {
			out = append(out, n.source)
		}
	}
	return out
}
