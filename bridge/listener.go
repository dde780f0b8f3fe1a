package bridge

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// endMarker is the batch number that ends a replay. No batch has it.
const endMarker = math.MaxUint64

// listener reads one worker rank: it keeps the engine's batches in their order,
// has what is missing sent again, tells an engine's lives apart, and hands each
// batch, once, to the lane of the source that it is about.
//
// Three goroutines meet here, at mu: that of the live connection, which calls
// the methods of zmtp.Handler, that of a repair, of which there is at most one,
// and those of the lanes, which publish.
type listener struct {
	b       *Bridge
	worker  event.Worker
	profile engine.Profile
	log     *slog.Logger
	ctx     context.Context         // ends when the listener is to stop
	cancel  context.CancelCauseFunc // ends it, and says why
	retired atomic.Bool             // it stops because the worker is gone for good
	room    chan struct{}           // a lane or the window has room again
	tasks   sync.WaitGroup          // the listener's goroutines

	mu      sync.Mutex
	decoder *engine.Decoder
	batch   *engine.Batch // while one is being applied

	incarnation uint64
	next        uint64      // number of the batch to apply next
	recent      recent      // fingerprints of what was applied last
	publisher   []byte      // identity that the engine's publisher gives itself
	conn        uint64      // number of the live connection; 0 before the first
	connected   bool        //
	proven      bool        // the engine on this connection is the one whose batches were applied
	verify      bool        // that is being found out: live batches wait
	lastLive    uint64      // highest number that came over this connection
	hasLive     bool        //
	window      window      // batches that wait
	home        *lane       // of the worker's own rank
	lanes       []*lane     // of all ranks, home first
	opening     bool        // a lane is being opened: batches wait
	standby     bool        // another bridge writes: batches wait, the oldest go when they are too many
	meeting     *time.Timer // runs while what came in standby may be of another life than what the log has
	account     account     // gaps and drops
	repair      repairState //
	engineErr   string      // what is wrong with the engine's sockets
	logErr      string      // what is wrong with the log
	heard       time.Time   // when something came from the engine last
}

// account is what went wrong with a source.
type account struct {
	gaps    uint64 // in this incarnation; any make the source uncertain
	lost    uint64 // batches in them
	dropped map[string]uint64
}

func newListener(ctx context.Context, cancel context.CancelCauseFunc, b *Bridge, w event.Worker) *listener {
	profile, _ := engine.ProfileOf(w.Engine) // an unknown engine has the zero profile
	l := &listener{
		b:       b,
		worker:  w,
		profile: profile,
		log:     b.log.With("instance", w.Instance, "rank", w.Rank, "model", w.Model),
		ctx:     ctx,
		cancel:  cancel,
		room:    make(chan struct{}, 1),
		decoder: engine.NewDecoder(profile, b.cfg.Media),
		heard:   time.Now(),
	}
	l.account.dropped = map[string]uint64{}
	l.window.timed = b.trace != nil
	return l
}

// clears returns the tiers that the engine means by "all blocks".
func (l *listener) clears() event.TierMask {
	if l.profile.ClearsOnlyDevice {
		return event.Device.Mask()
	}
	return event.AllTiers
}

// -- the live connection: zmtp.Handler ----------------------------------------

// Connected implements zmtp.Handler.
func (l *listener) Connected(peer string) {
	l.mu.Lock()
	l.conn++
	l.connected = true
	l.engineErr = ""
	l.hasLive = false
	l.proven = l.next == 0
	l.verify = l.next > 0 && l.replays()
	l.heard = time.Now()
	l.repair.connected()
	l.reconnectedInStandby()
	if l.next == 0 && l.replays() {
		l.window.DropBefore(l.conn) // nothing tells whether it is of the same life
	}
	l.mu.Unlock()
	l.log.Info("connected to engine", "peer", peer)
	l.mend()
}

// Disconnected implements zmtp.Handler.
func (l *listener) Disconnected(err error) {
	l.mu.Lock()
	was := l.connected
	l.connected = false
	l.engineErr = err.Error()
	l.mu.Unlock()
	if was {
		l.log.Warn("connection to engine lost", "error", err)
	} else {
		l.log.Debug("no connection to engine", "error", err)
	}
}

// Refused implements zmtp.Handler.
func (l *listener) Refused(peer string) {
	l.mu.Lock()
	l.drop("second_publisher", 1)
	l.engineErr = "a second publisher, " + peer + ", was refused: one source has one engine"
	l.mu.Unlock()
}

// Message implements zmtp.Handler.
func (l *listener) Message(frames [][]byte) {
	seq, payload, reason := l.parse(frames)
	if reason != "" {
		l.mu.Lock()
		l.drop(reason, 1)
		l.mu.Unlock()
		return
	}
	if !l.waitForRoom(len(payload)) {
		return
	}
	l.mu.Lock()
	l.heard = time.Now()
	l.live(seq, payload)
	l.mu.Unlock()
	l.mend()
}

// parse reads the frames of a live message: topic, number, payload.
func (l *listener) parse(frames [][]byte) (seq uint64, payload []byte, reason string) {
	switch {
	case len(frames) != 3:
		return 0, nil, "frame_count"
	case l.worker.Topic != "" && string(frames[0]) != l.worker.Topic:
		return 0, nil, "other_topic"
	case len(frames[1]) != 8:
		return 0, nil, "sequence_frame"
	}
	seq = binary.BigEndian.Uint64(frames[1])
	if seq == endMarker {
		return 0, nil, "end_marker"
	}
	return seq, frames[2], ""
}

// waitForRoom waits until a batch of n bytes may be taken in, and tells whether
// it may; it may not when the listener stops. A batch of 0 bytes is one that
// need not be held.
func (l *listener) waitForRoom(n int) bool {
	for {
		l.mu.Lock()
		full := l.full(n)
		l.mu.Unlock()
		if !full {
			return l.ctx.Err() == nil
		}
		select {
		case <-l.room:
		case <-l.ctx.Done():
			return false
		}
	}
}

// full tells whether the bounds on what is held are reached.
func (l *listener) full(n int) bool {
	if n > 0 && l.window.Len() > 0 && l.window.bytes+n > l.b.cfg.MaxHeld && !l.standby {
		return true
	}
	for _, lane := range l.lanes {
		if lane.backlog() > l.b.cfg.MaxBacklog {
			return true
		}
	}
	return false
}

// roomMade wakes who waits for room.
func (l *listener) roomMade() {
	select {
	case l.room <- struct{}{}:
	default:
	}
}

// -- the order of batches -----------------------------------------------------

// live takes a batch from the live connection.
func (l *listener) live(seq uint64, payload []byte) {
	late := l.proven && !(l.hasLive && seq <= l.lastLive)
	if !l.hasLive || seq > l.lastLive {
		l.lastLive, l.hasLive = seq, true
	}
	switch {
	case l.standby:
		l.stand(seq, payload)
	case l.meeting != nil:
		l.window.Add(seq, l.conn, payload)
		l.meet()
	case l.verify || l.opening:
		l.hold(seq, payload)
	case seq < l.next && !late && l.replays() && !l.repair.resting() && !l.remembers(seq):
		// Only the engine can tell whether this is the same batch once more.
		l.verify, l.proven = true, false
		l.hold(seq, payload)
	case seq < l.next:
		l.old(seq, payload, late, true)
	case seq == l.next:
		if l.accept(seq, l.conn, payload, l.heard) {
			l.drain()
		}
	case l.replays() && !l.repair.resting():
		l.hold(seq, payload)
	default:
		reason := event.ReasonNoReplay
		if l.replays() {
			reason = event.ReasonUnreachable
		}
		l.lose(seq-1, reason)
		if l.accept(seq, l.conn, payload, l.heard) {
			l.drain()
		}
	}
}

// hold keeps a live batch until its turn comes. If another batch of its number is
// held, from a connection before this one or from a replay, that was of another
// life of the engine.
func (l *listener) hold(seq uint64, payload []byte) {
	if !l.opening && l.window.Other(seq, l.conn, payload) {
		l.restart(fmt.Sprintf("batch %d, which was waiting, is another one now", seq))
		defer l.drain()
	}
	l.window.Add(seq, l.conn, payload)
}

// remembers tells whether it is known what the batch of that number was.
func (l *listener) remembers(seq uint64) bool {
	_, known := l.recent.get(seq)
	return known
}

// replays tells whether the engine has a replay endpoint.
func (l *listener) replays() bool { return l.worker.ReplayEndpoint != "" }

// drain applies the batches of the window whose turn has come.
func (l *listener) drain() {
	for l.window.Len() > 0 && !l.verify && !l.opening && l.window.First() <= l.next {
		b := l.window.Pop()
		if b.seq < l.next {
			l.old(b.seq, b.payload, l.proven, false)
		} else if !l.accept(b.seq, b.conn, b.payload, b.at) {
			return
		}
	}
	l.roomMade()
}

// old meets a live batch whose number was applied before: the same batch once
// more, which is nothing, or the first sign of another life of the engine.
// late says that the batch may be one that a replay brought sooner, arriving that
// it comes just now, behind everything that is held.
func (l *listener) old(seq uint64, payload []byte, late, arriving bool) {
	print, known := l.recent.get(seq)
	if known && print == hash.Bytes(payload) || !known && late {
		l.b.metrics.duplicates.Add(l.ctx, 1)
		return
	}
	l.restart(fmt.Sprintf("batch %d came with other content", seq))
	if arriving { // numbers grow in a life: what this connection brought before is of another
		l.window.DropBefore(l.conn + 1)
		l.hasLive = false
	}
	l.live(seq, payload)
}

// accept applies the batch whose turn it is, which came at a time, or just now. It
// tells whether that was possible: if not, the batch is in the window.
func (l *listener) accept(seq, conn uint64, payload []byte, at time.Time) bool {
	if l.otherLife(seq, payload) {
		l.restart(fmt.Sprintf("batch %d, which another rank's records end with, is another one now", seq))
		if seq > 0 {
			l.window.Add(seq, l.conn, payload)
			return false
		}
	}
	l.batch = l.b.batches.Get().(*engine.Batch)
	defer l.b.batches.Put(l.batch)
	times := l.b.trace.time(at)
	err := l.decoder.Decode(payload, l.batch)
	times.done()
	if err == nil && l.meetPublisher() && seq > 0 {
		l.window.Add(seq, l.conn, payload)
		return false
	}
	if err == nil && l.laneFor(l.batch) == nil {
		l.window.Add(seq, conn, payload)
		l.openLane(l.batch.Rank)
		return false
	}
	span := l.b.trace.batch(l, seq, len(payload), conn == 0, &times, err)
	if err != nil {
		l.drop("undecodable", 1)
		l.log.WarnContext(span.context(l.ctx), "undecodable batch", "batch", seq, "error", err)
		l.loss(seq, seq, event.ReasonUndecodable)
	} else {
		l.apply(seq)
		if l.batch.Partial {
			l.loss(seq, seq, event.ReasonUndecodable)
		}
	}
	print := hash.Bytes(payload)
	l.next = seq + 1
	l.recent.add(seq, print)
	m := mark{batch: true, seq: seq, ts: l.batch.TS, fingerprint: print, span: span.end()}
	for _, lane := range l.lanes {
		if lane == l.home || lane.touched {
			lane.mark(m)
		}
	}
	l.b.metrics.batches.Add(l.ctx, 1)
	return true
}

// otherLife tells whether a batch is not the one that a rank which only batches
// name had last when its records were read back. Such a rank may have come further
// than the home lane before a bridge was killed, and its engine may have started
// again since.
func (l *listener) otherLife(seq uint64, payload []byte) bool {
	for _, n := range l.lanes[1:] {
		if n.recalled.batch && n.recalled.seq == seq && n.recalled.fingerprint != hash.Bytes(payload) {
			return true
		}
	}
	return false
}

// apply applies the events of the batch that was decoded. A bridge that was killed
// may have written more of another lane than of the home lane.
func (l *listener) apply(seq uint64) {
	lane := l.laneFor(l.batch)
	if lane.recalled.batch && seq <= lane.recalled.seq {
		return
	}
	// Where ranks wait for each other, a record may have to end between any two batches.
	lane.ops.Join = len(l.lanes) == 1
	for i := range l.batch.Events {
		if reason, n := lane.state.Apply(&l.batch.Events[i], &lane.ops); n > 0 {
			l.drop(string(reason), uint64(n))
		}
	}
	lane.touched = true
	for reason, n := range l.batch.Dropped {
		if n > 0 {
			l.drop(engine.Reason(reason).String(), uint64(n))
		}
	}
}

// meetPublisher looks at the identity that the batch's publisher gives itself,
// if it does, and tells whether it is another one than before: then a new
// incarnation has begun.
func (l *listener) meetPublisher() bool {
	if l.batch.Publisher == nil {
		return false
	}
	if bytes.Equal(l.batch.Publisher, l.publisher) {
		return false
	}
	other := l.publisher != nil
	if other {
		l.restart("the publisher has a new identity")
	}
	l.publisher = bytes.Clone(l.batch.Publisher)
	l.home.ops.Add(func(b []byte) []byte { return event.AppendPublisher(b, l.batch.Publisher) })
	return other
}

// restart begins a new incarnation: the engine started again, and has nothing but
// what is its cache owner's.
func (l *listener) restart(why string) {
	l.incarnation = l.b.mint(l.incarnation)
	l.log.Info("engine restarted", "reason", why, "incarnation", l.incarnation)
	l.next, l.recent, l.publisher = 0, recent{}, nil
	l.proven, l.verify = true, false
	l.window.DropBefore(l.conn)
	l.repair.restarted()
	for _, lane := range slices.Backward(l.lanes) { // the home lane last: what is left of the others counts there
		lane.reset(event.ReasonRestart)
	}
	l.forgive()
	l.b.metrics.restarts.Add(l.ctx, 1)
}

// forgive forgets, in a new life, what was lost before, unless something is left that
// it may have been about.
func (l *listener) forgive() {
	if l.home.base == nil {
		l.account.gaps, l.account.lost = 0, 0
	}
}

// doubted tells whether a rank that batches name has blocks left that may be wrong for
// what was lost: the home lane, whose records say so, can't begin with nothing.
func (l *listener) doubted() bool {
	return l.worker.CacheOwner != "" && l.account.gaps > 0 &&
		slices.ContainsFunc(l.lanes[1:], func(n *lane) bool { return n.state.Digests() != event.Digests{} })
}

// lose gives up the batches from next to last.
func (l *listener) lose(last uint64, reason string) {
	l.log.Warn("engine batches lost", "from", l.next, "to", last, "reason", reason)
	l.loss(l.next, last, reason)
	l.next = last + 1
}

// loss puts a gap on record.
func (l *listener) loss(from, to uint64, reason string) {
	l.account.gaps++
	l.account.lost += to - from + 1
	l.b.metrics.gap(l.ctx, reason, to-from+1)
	if l.b.cfg.OnGap == ResetOnGap {
		for _, lane := range l.lanes {
			lane.reset(event.ReasonGap)
		}
	}
	l.home.ops.Add(func(b []byte) []byte { return event.AppendGap(b, from, to, reason) })
}

// drop counts what was dropped.
func (l *listener) drop(reason string, n uint64) {
	l.account.dropped[reason] += n
	l.b.metrics.drop(l.ctx, reason, n)
}

// recent remembers the fingerprints of the batches applied last.
type recent struct {
	ring [256]struct {
		next, print uint64 // next is the batch's number and one; 0: there is none
	}
}

func (r *recent) add(seq, print uint64) {
	e := &r.ring[seq%uint64(len(r.ring))]
	e.next, e.print = seq+1, print
}

func (r *recent) get(seq uint64) (print uint64, ok bool) {
	e := &r.ring[seq%uint64(len(r.ring))]
	return e.print, e.next == seq+1
}

var _ zmtp.Handler = (*listener)(nil)
