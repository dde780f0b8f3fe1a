package bridge

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// open reads back what the log says of the listener's sources, and begins to
// read the engine and to publish. In standby it does no more than reading the
// engine.
func (l *listener) open(standby bool) error {
	at, err := event.ParseEndpoint(l.worker.Endpoint)
	if err != nil {
		return err
	}
	sub, err := zmtp.NewSub(at.Network, at.Address, at.Bind, []byte(l.worker.Topic), l.b.cfg.ZMTP, l)
	if err != nil {
		return err
	}
	l.standby = standby
	if !standby {
		if err := l.activate(); err != nil {
			return err
		}
	}
	l.tasks.Go(func() { sub.Run(l.ctx) })
	return nil
}

// activate reads back what the log says, and begins to publish.
func (l *listener) activate() error {
	p, err := l.b.recall(l.ctx, l.worker.Source, l.newState)
	if err != nil {
		return err
	}
	if err := l.b.checkPayload(); err != nil {
		return err
	}
	home := newLane(l, l.worker.Source, p)
	lanes := []*lane{home}
	strays, err := l.b.unregistered(l.ctx, l.worker.Source)
	if err != nil {
		return err
	}
	for _, source := range strays {
		other, err := l.b.recall(l.ctx, source, l.newState)
		if err != nil {
			return err
		}
		if l.owns(other) && l.b.claim(source, l) {
			lanes = append(lanes, newLane(l, source, other))
		}
	}
	l.begin(lanes, p)
	for _, n := range lanes {
		l.serve(n)
	}
	l.mend()
	return nil
}

// close gives back what the listener holds. Its goroutines have ended.
func (l *listener) close() { l.b.release(l) }

// begin takes over what the log says, and then what came from the engine in
// standby.
func (l *listener) begin(lanes []*lane, p past) {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.leaveStandby()
	l.home, l.lanes = lanes[0], lanes
	l.incarnation = p.incarnation
	if p.fresh {
		l.incarnation = l.b.mint(p.incarnation)
		for _, n := range lanes {
			n.reset(event.ReasonNew)
		}
		return
	}
	l.account.gaps, l.account.lost = p.gaps, p.lost
	for _, n := range lanes { // the home lane is told of a new life last
		l.incarnation = max(l.incarnation, n.incarnation)
	}
	for _, n := range slices.Backward(lanes) {
		if n.incarnation != l.incarnation { // it was not told of this life
			n.reset(event.ReasonRestart)
		}
	}
	if p.incarnation != l.incarnation {
		l.forgive()
		return
	}
	if p.batches {
		l.next = p.last + 1
		l.recent.add(p.last, p.fingerprint)
	}
	l.publisher = p.publisher
}

// serve runs a lane's publisher. What ends it ends the listener.
func (l *listener) serve(n *lane) {
	l.tasks.Go(func() {
		if err := n.run(l.ctx); err != nil {
			l.cancel(err)
		}
	})
}

// newState returns an empty state for one of the listener's sources.
func (l *listener) newState() *residency.State {
	s := residency.New(residency.Config{
		BlockSize: int(l.worker.BlockSize), Clears: l.clears(), CacheOwner: l.worker.CacheOwner != "", Limits: l.b.cfg.Residency,
	})
	s.Share(l.b.memory)
	return s
}

// owns tells whether it is this listener's engine that names a rank, by what the
// log says of that rank.
func (l *listener) owns(p past) bool { return !p.fresh && p.hasHome && p.home == l.worker.Rank }

// -- ranks that batches name --------------------------------------------------

// laneFor returns the lane of the source that a batch is about; nil if it is not
// open yet.
func (l *listener) laneFor(batch *engine.Batch) *lane {
	if !batch.HasRank || batch.Rank == l.worker.Rank {
		return l.home
	}
	source := l.worker.Source
	source.Rank = batch.Rank
	for _, n := range l.lanes[1:] {
		if n.source == source {
			return n
		}
	}
	if batch.Rank > event.MaxRank || len(l.lanes) > maxStrays || !l.b.claim(source, l) {
		// The rank has a socket of its own, or is one too many: what comes
		// over this socket is this worker's.
		return l.home
	}
	return nil
}

// recallPause is the wait before records that could not be read are asked for
// again.
const recallPause = 100 * time.Millisecond

// maxStrays is how many ranks beside its own one engine's batches may name.
const maxStrays = 1024

// openLane opens the lane of a rank that a batch names. Batches wait until it is
// open.
func (l *listener) openLane(rank uint32) {
	source := l.worker.Source
	source.Rank = rank
	l.opening = true
	l.log.Info("the engine's batches name another rank", "named", rank)
	l.tasks.Go(func() {
		p, err := l.b.recall(l.ctx, source, l.newState)
		for ; err != nil; p, err = l.b.recall(l.ctx, source, l.newState) {
			l.failed(err) // what the engine sends meanwhile must not be lost
			select {
			case <-time.After(recallPause):
			case <-l.ctx.Done():
				return
			}
		}
		n := newLane(l, source, p)
		l.mu.Lock()
		l.lanes = append(l.lanes, n)
		switch {
		case !l.owns(p):
			n.reset(event.ReasonNew)
		case n.incarnation != l.incarnation:
			n.reset(event.ReasonRestart)
		}
		l.opening = false
		l.drain()
		l.skipHoles()
		l.mu.Unlock()
		l.serve(n)
		l.mend()
	})
}

// -- what others want of a listener -------------------------------------------

// askCheckpoint has a source write a checkpoint, unless its last one is at the
// log sequence before, or later.
func (l *listener) askCheckpoint(source event.Source, before uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lanes {
		if n.source == source && n.checkpointAt < before {
			n.due = true
			n.signal()
		}
	}
}

// history appends what a checkpoint says beside the state.
func (l *listener) history(ops *residency.Ops) {
	if a := &l.account; a.gaps > 0 {
		ops.Add(func(b []byte) []byte { return event.AppendGaps(b, a.gaps, a.lost) })
	}
	if l.publisher != nil {
		ops.Add(func(b []byte) []byte { return event.AppendPublisher(b, l.publisher) })
	}
}

// failed remembers why the log can't be written; published that it can.
func (l *listener) failed(err error) {
	l.mu.Lock()
	fresh := l.logErr == ""
	l.logErr = err.Error()
	l.mu.Unlock()
	if fresh && !errors.Is(err, context.Canceled) {
		l.log.Warn("can't write the log, holding back", "error", err)
	}
}

func (l *listener) published() {
	l.mu.Lock()
	was := l.logErr
	l.logErr = ""
	l.mu.Unlock()
	if was != "" {
		l.log.Info("writing the log again")
	}
}
