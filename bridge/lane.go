package bridge

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// lane is the way of one source into the log: its state, the operations that
// JetStream has not acknowledged yet, and the goroutine that publishes them,
// one record at a time. What comes while a record is in flight is joined into
// the next one.
//
// A listener has a lane for its own rank, its home, and one for each other rank
// that its engine's batches name. The records of the home lane carry the numbers
// of all batches, and one is published only after what the batches meant for
// other lanes: a bridge that starts again reads its place off the home lane.
type lane struct {
	l       *listener
	source  event.Source
	stream  string        // of the log, that has the source
	subject string        // there
	wake    chan struct{} // there may be something to publish

	// Guarded by l.mu.
	state   *residency.State
	ops     residency.Ops // not taken by the publisher yet
	marks   []mark        // where the batches in ops end
	flying  int           // bytes in flight
	first   uint64        // if flying > 0, lowest number of a batch in flight
	sent    mark          // the last batch that was taken
	touched bool          // the batch being applied has events for this lane
	due     bool          // a checkpoint is asked for
	base    *base         // to be written before all else; nil: nothing
	ended   bool          // it writes no more

	checkpointAt uint64 // log sequence of the first chunk of the last checkpoint

	// What the log said when the lane was made.
	incarnation uint64 // that the state is of
	recalled    mark   // the last batch that is in the state; none after a reset

	// The publisher's own.
	log     publication
	digest  []byte               // scratch
	turn    time.Time            // when a checkpoint that is due may be written; zero: not asked for
	batches []*trace.SpanContext // sampled batches that the next record has something of
}

// mark is where the operations of a batch end, or those of no batch, such as a
// reset.
type mark struct {
	batch       bool
	seq         uint64 // number of the batch
	ts          float64
	fingerprint uint64
	ops         int // operations up to here
	digests     event.Digests
	span        *trace.SpanContext // of the batch, if it is sampled
}

// newLane returns the lane of a source with what the log says of it. Whoever
// calls it starts run.
func newLane(l *listener, source event.Source, p past) *lane {
	n := &lane{
		l:       l,
		source:  source,
		stream:  l.b.cfg.Log.StreamOf(source),
		subject: l.b.cfg.Log.Subject(source),
		wake:    make(chan struct{}, 1),
		state:   p.state,
		due:     p.dirty,

		incarnation: p.incarnation,
		log:         publication{session: nuid.Next(), lastSeq: p.lastSeq, bytes: p.bytes, checkpointBytes: p.checkpointBytes},
	}
	if p.batches {
		n.sent = mark{batch: true, seq: p.last, ts: p.ts, fingerprint: p.fingerprint}
		n.recalled = n.sent
	}
	if n.due {
		n.signal()
	}
	return n
}

// mark ends the operations of a batch, or of none.
func (n *lane) mark(m mark) {
	m.ops, m.digests = n.ops.Len(), n.state.Digests()
	n.marks = append(n.marks, m)
	n.touched = false
	n.signal()
}

// base is what a source begins a life with, if that is not nothing: a checkpoint.
type base struct {
	header event.Header
	chunks []residency.Chunk
}

// reset empties the source, but for what outlives an engine that starts again. What
// was not taken yet is void with it.
func (n *lane) reset(reason string) {
	n.recalled = mark{}
	n.ops.Reset()
	n.marks = n.marks[:0]
	n.base = nil
	if reason != event.ReasonGap {
		n.sent = mark{} // batch numbers start again
	}
	if reason == event.ReasonRestart && (n.state.Restart() || n == n.l.home && n.l.doubted()) {
		n.base = &base{n.header(nil), n.chunks()}
		n.signal()
		return
	}
	n.state.Reset()
	n.ops.Add(func(b []byte) []byte { return event.AppendReset(b, reason) })
	n.tellHome(&n.ops)
	n.mark(mark{})
}

// chunks returns the chunks of a checkpoint of the state as it is.
func (n *lane) chunks() []residency.Chunk {
	var tail residency.Ops
	if n == n.l.home {
		n.l.history(&tail)
	}
	n.tellHome(&tail)
	return n.state.Checkpoint(n.l.b.maxMessage()/2, &tail)
}

// tellHome appends whose engine it is that names the lane's rank, if that is
// another one's.
func (n *lane) tellHome(ops *residency.Ops) {
	if home := n.l.worker.Rank; home != n.source.Rank {
		ops.Add(func(b []byte) []byte { return event.AppendHome(b, home) })
	}
}

func (n *lane) signal() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// backlog returns how many bytes wait for an acknowledgement.
func (n *lane) backlog() int { return n.flying + len(n.ops.Buf) }

// outstanding returns the lowest number of a batch that is not acknowledged. A
// reset stands before all of them, and so does what is left by one.
func (n *lane) outstanding() (seq uint64, ok bool) {
	if n.base != nil {
		return 0, true
	}
	if n.flying > 0 {
		return n.first, true
	}
	if len(n.marks) == 0 {
		return 0, false
	}
	return n.marks[0].seq, true
}

// allowed returns how many marks may be published now: those of the home lane
// wait for the other lanes.
func (n *lane) allowed() int {
	count := len(n.marks)
	switch {
	case n.held():
		return 0
	case n != n.l.home:
		return count
	}
	for _, other := range n.l.lanes[1:] {
		seq, ok := other.outstanding()
		for i := 0; ok && i < count; i++ {
			if n.marks[i].batch && n.marks[i].seq >= seq {
				count = i
			}
		}
	}
	return count
}

// held tells whether all else waits: for what the source begins a life with, and at
// the home lane for that of the others.
func (n *lane) held() bool {
	return n.base != nil || n == n.l.home && slices.ContainsFunc(n.l.lanes[1:], func(other *lane) bool { return other.base != nil })
}

// take takes as many operations out of the queue as fit a record of max bytes,
// and returns the record, appended to b; nil if there is nothing to publish.
func (n *lane) take(b []byte, max int) ([]byte, event.Header) {
	n.l.mu.Lock()
	defer n.l.mu.Unlock()
	return n.takeLocked(b, max)
}

func (n *lane) takeLocked(b []byte, max int) ([]byte, event.Header) {
	const digestRoom = 128
	max -= event.HeaderRoom + digestRoom
	allowed := n.allowed()
	if allowed == 0 {
		return nil, event.Header{}
	}
	first, _ := n.outstanding()
	count := 0
	for count < allowed && n.size(n.marks[count].ops) <= max {
		count++
	}
	h := n.header(n.marks[:count])
	ops := 1
	if count > 0 {
		n.follow(n.marks[:count])
		last := &n.marks[count-1]
		ops = last.ops
		n.digest = event.AppendDigest(n.digest[:0], &last.digests)
		b = event.AppendRecord(b, h, ops+1, n.ops.Buf[:n.size(ops)], n.digest)
	} else { // the first batch alone is too much for one record
		for ops < n.marks[0].ops-1 && n.size(ops+1) <= max {
			ops++
		}
		h.Partial = true
		n.follow(n.marks[:1])
		b = event.AppendRecord(b, h, ops, n.ops.Buf[:n.size(ops)])
	}
	n.taken(ops, count, len(b), first)
	return b, h
}

// size returns how many bytes the first operations of the queue take.
func (n *lane) size(ops int) int {
	if ops == 0 {
		return 0
	}
	return n.ops.Ends[ops-1]
}

// header returns the header of a record that ends with the given marks.
func (n *lane) header(marks []mark) event.Header {
	first, found := uint64(0), false
	for _, m := range marks {
		if m.batch {
			if !found {
				first, found = m.seq, true
			}
			n.sent = m
		}
	}
	h := event.Header{Incarnation: n.l.incarnation, TS: n.sent.ts, Fingerprint: n.sent.fingerprint}
	if n.sent.batch {
		h.Batches, h.First, h.Last = true, n.sent.seq+1, n.sent.seq
	}
	if found {
		h.First = first
	}
	return h
}

// keepMarks is for how many batches a lane that has published all keeps room.
const keepMarks = 32

// taken removes what a record has taken from the queue. first is the lowest
// number of a batch that it has anything of.
func (n *lane) taken(ops, marks, bytes int, first uint64) {
	n.ops.Shift(ops)
	if marks == len(n.marks) && cap(n.marks) > keepMarks {
		n.marks = nil
	}
	n.marks = append(n.marks[:0], n.marks[min(marks, len(n.marks)):]...)
	for i := range n.marks {
		n.marks[i].ops -= ops
	}
	n.flying, n.first = bytes, first
}

// landed is called when nothing is in flight any more.
func (n *lane) landed() {
	n.l.mu.Lock()
	n.flying = 0
	home := n.l.home
	n.l.roomMade()
	n.l.mu.Unlock()
	if n != home {
		home.signal()
	}
}

// run publishes until ctx ends, and then what is left until the Bridge's stop
// timeout. It returns why it could not go on.
func (n *lane) run(ctx context.Context) error {
	defer n.end(ctx)
	for {
		select {
		case <-n.wake:
		case <-ctx.Done():
			return n.finish(ctx)
		}
		if err := n.flush(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

// end is called when the lane writes no more. A record may be in flight still.
func (n *lane) end(ctx context.Context) {
	n.log.traced(context.Cause(ctx))
	n.l.mu.Lock()
	n.ended = true
	n.l.mu.Unlock()
	n.wakeHome()
}

// finish publishes what is left when the listener stops, and leaves a
// checkpoint, so that whoever starts next need not read the history. What waits of
// a worker that is gone for good is void.
func (n *lane) finish(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), n.l.b.cfg.StopTimeout)
	defer cancel()
	if n.l.retired.Load() {
		return nil
	}
	err := n.flush(ctx)
	for err == nil && n.othersFirst() && !n.othersEnded() {
		select {
		case <-n.wake:
			err = n.flush(ctx)
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if err != nil || n.log.bytes <= 2*n.log.checkpointBytes+4096 {
		return err
	}
	return n.checkpoint(ctx)
}

// flush publishes all there is.
func (n *lane) flush(ctx context.Context) error {
	for {
		more, err := n.step(ctx)
		if errors.Is(err, errLogLost) {
			more, err = true, nil
		}
		if err != nil || !more {
			return err
		}
	}
}

// step publishes one record or one checkpoint, and tells whether there was one
// to publish.
func (n *lane) step(ctx context.Context) (more bool, err error) {
	if err := n.settle(ctx); err != nil {
		return false, err
	}
	if n.othersFirst() {
		return false, nil // it is woken again
	}
	if base := n.baseDue(); base != nil {
		return true, n.begin(ctx, base)
	}
	if n.checkpointDue() {
		return true, n.checkpoint(ctx)
	}
	record, h := n.take(n.log.record[:0], n.l.b.maxMessage())
	if record == nil {
		return false, nil
	}
	return true, n.publish(ctx, record, h)
}

// othersFirst tells whether the home lane has to wait for the other lanes: before
// it writes to a log that began anew, because what it writes says that they are
// there, and before it begins a life, because that makes void what they have of
// the one before.
func (n *lane) othersFirst() bool {
	n.l.mu.Lock()
	defer n.l.mu.Unlock()
	return n == n.l.home && slices.ContainsFunc(n.l.lanes[1:], func(other *lane) bool {
		return n.log.anew && other.due || other.base != nil
	})
}

// othersEnded tells whether there is none to wait for.
func (n *lane) othersEnded() bool {
	n.l.mu.Lock()
	defer n.l.mu.Unlock()
	return !slices.ContainsFunc(n.l.lanes[1:], func(other *lane) bool { return !other.ended })
}

// baseDue returns what is to be written before all else.
func (n *lane) baseDue() *base {
	n.l.mu.Lock()
	defer n.l.mu.Unlock()
	return n.base
}

// begin publishes what the source begins a life with.
func (n *lane) begin(ctx context.Context, b *base) error {
	if err := n.write(ctx, b.chunks, b.header); err != nil {
		return err
	}
	n.l.mu.Lock()
	if n.base == b { // else there is a newer life
		n.base = nil
	}
	n.l.mu.Unlock()
	n.wakeHome()
	return nil
}

// checkpointDue tells whether a checkpoint is to be written now.
func (n *lane) checkpointDue() bool {
	n.l.mu.Lock()
	defer n.l.mu.Unlock()
	if n.held() || !n.due && n.log.bytes < max(n.l.b.cfg.CheckpointBytes, 4*n.log.checkpointBytes) {
		return false
	}
	if !n.log.anew && !n.hasTurn(time.Now()) {
		return false
	}
	return n.allowed() == len(n.marks) // everything that was applied is in it
}

// hasTurn tells whether it is the lane's turn to write a checkpoint. If not the
// lane is woken when it is.
func (n *lane) hasTurn(now time.Time) bool {
	if n.turn.IsZero() {
		n.turn = n.l.b.turns.next(now)
		if n.turn.After(now) {
			time.AfterFunc(n.turn.Sub(now), n.signal)
		}
	}
	return !n.turn.After(now)
}

// turns spaces the checkpoints of all lanes. Sources with the same load are due at
// the same time, and all of them at once would keep the processors from everything
// else for tens of milliseconds.
type turns struct {
	mu   sync.Mutex
	last time.Time
}

// turnGap is several times what a checkpoint of 4,096 blocks takes.
const turnGap = 4 * time.Millisecond

// next returns the next turn that is free.
func (t *turns) next(now time.Time) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = t.last.Add(turnGap)
	if t.last.Before(now) {
		t.last = now
	}
	return t.last
}

// checkpoint publishes what waits, and then the whole state of the source as it
// is after that: a reader that is up to date need not look at it. To a log that
// began anew it writes the state alone.
func (n *lane) checkpoint(ctx context.Context) error {
	limit := n.l.b.maxMessage()
	n.l.mu.Lock()
	n.due = true // until it is written
	var record []byte
	var last event.Header
	if n.log.anew {
		n.header(n.marks)
		n.follow(n.marks)
		n.ops.Reset()
		n.marks = n.marks[:0]
	} else {
		record, last = n.takeLocked(n.log.record[:0], limit)
	}
	var chunks []residency.Chunk
	if len(n.marks) == 0 && !n.held() { // what is in the state is in the log, or in the record
		chunks = n.chunks()
	}
	h := n.header(nil)
	n.l.mu.Unlock()
	if record != nil {
		if err := n.publish(ctx, record, last); err != nil {
			return err
		}
	}
	if chunks == nil {
		return nil // it is still due
	}
	if err := n.write(ctx, chunks, h); err != nil {
		return err
	}
	n.l.mu.Lock()
	n.due = false
	n.l.mu.Unlock()
	n.wakeHome()
	return nil
}

// wakeHome has the home lane look again whether it may write.
func (n *lane) wakeHome() {
	n.l.mu.Lock()
	home := n.l.home
	n.l.mu.Unlock()
	if n != home {
		home.signal()
	}
}

// write publishes the chunks of a checkpoint.
func (n *lane) write(ctx context.Context, chunks []residency.Chunk, h event.Header) error {
	total, at := 0, uint64(0)
	for i, c := range chunks {
		record := event.AppendRecord(n.log.record[:0], h, c.Count, c.Ops)
		total += len(record)
		if err := n.publish(ctx, record, h); err != nil {
			return err
		}
		if i == 0 {
			at = n.log.lastSeq
		}
	}
	n.log.bytes, n.log.checkpointBytes, n.log.anew = total, total, false
	n.turn = time.Time{}
	n.l.mu.Lock()
	n.checkpointAt = at
	n.l.mu.Unlock()
	n.l.b.metrics.checkpoints.Add(ctx, 1)
	return nil
}
