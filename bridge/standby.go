package bridge

import (
	"context"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// A source goes from one bridge to another without a gap if the next one reads
// the engine before the one before stops: it holds what comes, in standby, until
// the source is its own. Then it reads back what the log has, puts what it holds
// behind that, and has the rest replayed. What it holds matters where the
// engine's ring is short, or where there is none.

// standbyPoll is how often it is looked whether a listener in standby is
// connected.
const standbyPoll = 10 * time.Millisecond

// AwaitStandby waits until a source that was given to Standby is connected to its
// engine, so that nothing which the engine sends from then on is missed. It
// returns the error of ctx, which says why there is no connection, if that takes
// too long.
func (b *Bridge) AwaitStandby(ctx context.Context, source event.Source) error {
	ticker := time.NewTicker(standbyPoll)
	defer ticker.Stop()
	for {
		connected, why := b.connection(source)
		if connected {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("not connected to the engine, %s: %w", why, ctx.Err())
		}
	}
}

// Connected tells whether a source's engine is connected.
func (b *Bridge) Connected(source event.Source) bool {
	connected, _ := b.connection(source)
	return connected
}

func (b *Bridge) connection(source event.Source) (connected bool, why string) {
	b.mu.Lock()
	s := b.slots[source]
	b.mu.Unlock()
	if s == nil {
		return false, "no listener"
	}
	s.mu.Lock()
	l, err := s.listener, s.err
	s.mu.Unlock()
	switch {
	case l == nil && err != nil:
		return false, err.Error()
	case l == nil:
		return false, "no listener yet"
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.connected, l.engineErr
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
