package bridge

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// What a replay socket does is nothing to rely on: it drops without a word when
// its queue is full, starts where its ring starts instead of where it was asked
// to, sends the end marker without what was to come before it or never at all,
// and serves everything up to the newest batch. So a repair looks only at which
// numbers came. It asks from the first missing batch, takes what comes, asks
// again from the next hole, and gives a batch up when no request brings it.

// repairState is where the repairs of a listener stand. Guarded by its mu.
type repairState struct {
	running  bool      // there is a goroutine
	probe    bool      // ask once from next on, though nothing is known to be missing
	attempts int       // requests in a row that did not help
	asked    time.Time // when the last request was made
	rest     time.Time // until when the engine is not asked, because it did not answer
	quiet    int       // probes in a row that brought nothing
}

// connected: what came while the connection was away is to be asked for.
func (r *repairState) connected() {
	r.probe, r.attempts, r.quiet, r.rest = true, 0, 0, time.Time{}
}

// restarted: all of the new incarnation is to be asked for.
func (r *repairState) restarted() { r.probe, r.attempts = true, 0 }

// resting tells whether the replay endpoint was found not to answer lately.
func (r *repairState) resting() bool { return time.Now().Before(r.rest) }

// hole tells whether a batch is missing that others wait for.
func (l *listener) hole() bool {
	return !l.opening && !l.standby && l.window.Len() > 0 && l.window.First() > l.next
}

// mend starts a repair if one is needed and none is going on.
func (l *listener) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.repair.running || !l.replays() || !l.repairNeeded() || l.ctx.Err() != nil {
		return
	}
	l.repair.running = true
	l.tasks.Go(l.repairLoop)
}

// repairNeeded tells whether the engine is to be asked for something. An engine
// that is out of reach is not: what waits does so until it is back, when all that
// is missing is asked for anew.
func (l *listener) repairNeeded() bool {
	return l.connected && !l.standby && (l.verify || l.hole() || l.repair.probe)
}

// probeIfIdle has the engine asked for lost batches at the end if it has been
// silent for long.
func (l *listener) probeIfIdle(now time.Time) {
	l.mu.Lock()
	wait := l.b.cfg.ProbeInterval << min(l.repair.quiet, 4)
	if l.replays() && l.connected && !l.repair.running && now.Sub(l.heard) >= wait && now.Sub(l.repair.asked) >= wait {
		l.repair.probe, l.repair.attempts = true, 0
	}
	l.mu.Unlock()
	l.mend()
}

// request is one replay request and what came of it.
type request struct {
	conn        uint64 // number of the live connection that it is made for
	incarnation uint64 // when it was made

	start   uint64
	overlap bool // the batch at start was applied: it must come as it was
	verify  bool // live batches wait for that
	census  bool // only to see what the engine has
	again   bool // it was made a second time, without the overlap

	got      int
	first    uint64 // number of the first batch that came
	highest  uint64
	same     bool // census: one of the batches is one that was applied
	end      bool // the end marker came
	restarts bool // the request showed that the engine restarted
	err      error
}

// repairLoop makes requests until nothing is missing, or is given up.
func (l *listener) repairLoop() {
	census := false
	for {
		l.mu.Lock()
		if !l.repairNeeded() && !(census && l.connected) || l.ctx.Err() != nil {
			l.repair.running = false
			l.mu.Unlock()
			return
		}
		// Each request asks for the batch that was applied last, too: it tells
		// whether the engine is still the same, which may have started again
		// unheard, and a trimmed ring from a batch that is absent.
		q := request{conn: l.conn, incarnation: l.incarnation, start: l.next, overlap: l.next > 0, verify: l.verify, census: census}
		switch {
		case q.census:
			q.start, q.overlap = 0, false
		case q.overlap:
			q.start--
		}
		wait := time.Until(l.repair.asked.Add(l.b.cfg.RepairInterval))
		if l.hole() && l.repair.attempts == 0 && !l.repair.probe {
			wait = min(wait, l.b.cfg.RepairInterval/10) // the last one helped: go on
		}
		before := l.next
		l.mu.Unlock()

		if !l.b.enterRepair(l.ctx, wait) {
			continue // the listener stops
		}
		l.ask(&q)
		l.b.leaveRepair()
		l.mu.Lock()
		census = l.conclude(&q, l.next != before || q.restarts)
		l.mu.Unlock()
	}
}

// ask makes one request, and takes in what comes.
func (l *listener) ask(q *request) {
	l.mu.Lock()
	l.repair.asked = time.Now()
	l.mu.Unlock()
	l.b.metrics.replays.Add(l.ctx, 1)
	q.err = l.replay(q)
	l.mu.Lock()
	l.repair.asked = time.Now()
	l.mu.Unlock()
}

// replay is the conversation of one request over a connection of its own.
func (l *listener) replay(q *request) error {
	at, err := event.ParseEndpoint(l.worker.ReplayEndpoint)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(l.ctx, 2*time.Minute)
	defer cancel()
	conn, err := zmtp.Dial(ctx, at.Network, at.Address, zmtp.DEALER, l.b.cfg.ZMTP)
	if err != nil {
		return err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var start [8]byte
	binary.BigEndian.PutUint64(start[:], q.start)
	if err := conn.Send(nil, start[:]); err != nil {
		return err
	}
	var msg zmtp.Message
	for {
		conn.SetDeadline(time.Now().Add(l.b.cfg.RepairTimeout))
		if err := conn.Recv(&msg); err != nil {
			return err
		}
		frames := msg.Frames
		if len(frames) > 0 && len(frames[0]) == 0 {
			frames = frames[1:] // the delimiter
		}
		if len(frames) < 2 || len(frames[len(frames)-2]) != 8 {
			return fmt.Errorf("a replay message of %d frames", len(msg.Frames))
		}
		if l.otherTopic(frames) {
			l.mu.Lock()
			l.drop("other_topic", 1)
			l.mu.Unlock()
			continue
		}
		seq, payload := binary.BigEndian.Uint64(frames[len(frames)-2]), frames[len(frames)-1]
		if seq == endMarker {
			if !l.askOn(q, start[:]) {
				q.end = true
				return nil
			}
			if err := conn.Send(nil, start[:]); err != nil {
				return err
			}
			continue
		}
		if !l.waitForRoom(0) {
			return l.ctx.Err()
		}
		l.mu.Lock()
		done := l.replayed(q, seq, payload)
		l.mu.Unlock()
		if done {
			return nil
		}
	}
}

// otherTopic tells whether a batch of a replay was published under another topic than
// the worker's. Engines say the topic between the delimiter and the number, or don't.
func (l *listener) otherTopic(frames [][]byte) bool {
	if l.worker.Topic == "" || len(frames) < 3 {
		return false
	}
	topic := frames[len(frames)-3]
	return len(topic) > 0 && string(topic) != l.worker.Topic
}

// maxAhead is how far a replay may be ahead of the live batches. What is further
// away is no number that the engine has come to meanwhile.
const maxAhead = 1 << 20

// askOn tells whether the engine has answered with the overlap alone, though more
// is missing: an answer may have room for one batch only. Then it is asked, once,
// for what comes next, over the same connection, which leads to the same process;
// start becomes the number.
func (l *listener) askOn(q *request, start []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q.again || !q.overlap || q.got == 0 || q.first != q.start || q.highest != q.start || !l.hole() || l.verify {
		return false
	}
	q.again = true
	binary.BigEndian.PutUint64(start, l.next)
	return true
}

// replayed takes in one batch of a replay, and tells whether the request has
// brought all that it was made for.
func (l *listener) replayed(q *request, seq uint64, payload []byte) (done bool) {
	if q.conn != l.conn || q.incarnation != l.incarnation {
		return true // it may be of the engine before
	}
	if l.hasLive && seq > l.lastLive && seq-l.lastLive > maxAhead {
		l.drop("replay_ahead", 1)
		return true
	}
	if q.got == 0 {
		q.first = seq
	}
	q.got++
	q.highest = max(q.highest, seq)
	if q.census {
		print, known := l.recent.get(seq)
		q.same = q.same || known && print == hash.Bytes(payload)
		return false
	}
	if q.overlap && seq == q.start {
		if print, known := l.recent.get(seq); known && print != hash.Bytes(payload) {
			l.restart(fmt.Sprintf("batch %d is another one now", seq))
			q.restarts = true
			return true
		}
	}
	if l.verify && q.verify {
		switch {
		case seq < q.start:
			return false
		case seq == q.start:
			l.proven = true
		default:
			// Beyond the overlap without having seen it: the ring has lost it,
			// and nothing proves or disproves that this is the same life. What
			// waits since before the connection may be another one's.
			l.window.DropBefore(l.conn)
		}
		l.verify = false
		l.drain()
	}
	if !l.opening && seq >= l.next && l.window.Other(seq, l.conn, payload) {
		l.restart(fmt.Sprintf("batch %d, which was waiting, is another one now", seq))
		q.restarts = true
		return true
	}
	switch {
	case seq == l.next && !l.opening:
		if l.accept(seq, 0, payload, time.Time{}) {
			l.drain()
		}
	case seq >= l.next && l.window.bytes+len(payload) <= l.b.cfg.MaxHeld:
		l.window.Add(seq, 0, payload)
	}
	return q.caught(l)
}

// caught tells whether a request that was made because of a hole has closed it.
func (q *request) caught(l *listener) bool {
	return !l.repair.probe && !l.hole() && l.hasLive && l.next > l.lastLive
}

// conclude draws the conclusions from a request that has ended. It tells whether
// a census is to be taken: a request that shows what the engine has.
func (l *listener) conclude(q *request, helped bool) (census bool) {
	r := &l.repair
	if q.err != nil && l.ctx.Err() == nil && !errors.Is(q.err, context.Canceled) {
		l.log.Debug("replay ended early", "start", q.start, "got", q.got, "error", q.err)
	}
	if helped {
		r.attempts, r.quiet = 0, 0
	}
	switch {
	case q.restarts || !l.connected || q.conn != l.conn || q.incarnation != l.incarnation:
		return false // what an engine that is away does not answer now it may answer when it is back
	case q.census:
		if l.concludeCensus(q) {
			return false
		}
	case q.overlap && q.end && (q.got == 0 || q.verify && l.verify):
		// The engine has nothing from the overlap on. It may have started again
		// unnoticed, also if it was believed to be the one from before: its
		// replay socket may have been silent then.
		return true
	}
	answered := q.end || q.got > 0
	if !helped && (l.verify || l.hole() || !answered) {
		r.attempts++
	}
	if r.attempts >= l.b.cfg.RepairAttempts {
		l.giveUp(q, answered)
		return false
	}
	if answered && !l.verify {
		if r.probe && !helped {
			r.quiet++
		}
		r.probe = r.probe && helped // it may have sent a part of what it has only
	}
	return false
}

// concludeCensus decides whether an engine that has nothing from the overlap on
// is a new one: it is if it has batches, all with lower numbers, and none that
// was applied.
func (l *listener) concludeCensus(q *request) (restarted bool) {
	if q.got > 0 && !q.same && l.next > 0 && q.highest < l.next-1 {
		l.restart(fmt.Sprintf("its last batch is %d, that of the engine before was %d", q.highest, l.next-1))
		return true
	}
	if q.err == nil {
		l.proven = q.same
		l.repair.probe = false // there is nothing from next on
	}
	if q.got > 0 && !q.same {
		l.window.DropBefore(l.conn)
	}
	l.verify = false
	l.drain()
	return false
}

// giveUp ends a repair that does not help: what is missing is lost.
func (l *listener) giveUp(q *request, answered bool) {
	r := &l.repair
	r.attempts, r.probe = 0, false
	if !answered {
		l.engineErr = fmt.Sprintf("replay endpoint %s: %v", l.worker.ReplayEndpoint, q.err)
		if l.verify || l.hole() {
			r.rest = time.Now().Add(l.b.cfg.RepairCooldown)
		}
	}
	if l.verify {
		l.log.Warn("can't tell whether the engine is still the same", "error", q.err)
		l.window.DropBefore(l.conn)
		l.verify = false
		l.drain()
	}
	for l.hole() {
		reason := event.ReasonAbsent
		switch {
		case !answered:
			reason = event.ReasonUnreachable
		case q.got > 0 && q.first > q.start:
			reason = event.ReasonTrimmed
		}
		l.lose(l.window.First()-1, reason)
		l.drain()
		if answered {
			return // the next hole gets requests of its own
		}
	}
}
