package indexer

import (
	"context"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// tidyLoop does what is to be done now and then.
func (x *shard) tidyLoop(ctx context.Context) {
	ticker := time.NewTicker(x.cfg.CheckInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if x.Ready() == nil {
				x.tidySources(time.Now())
				x.sweep()
				x.checkStream(ctx)
			}
		case <-ctx.Done():
			return
		}
	}
}

// sweep gives back the memory of what nobody holds, as far as the records since
// have not done it.
func (x *shard) sweep() {
	for _, p := range *x.now().partitions.Load() {
		for p.index.Sweep() {
			continue
		}
	}
}

// tidySources drops sources whose workers are gone for good, and asks for the
// state of those that the log does not tell of, or not rightly.
func (x *shard) tidySources(now time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.sources {
		switch {
		case s.registered():
			s.orphan = time.Time{}
			if s.ignored { // it is back, and what came meanwhile was not read
				s.ignored, s.diverged = false, true
			}
		case s.orphan.IsZero():
			s.orphan = now
		case now.Sub(s.orphan) > x.cfg.Grace && !s.ignored:
			x.log.Info("dropping a source without a worker", "instance", s.name.Instance, "rank", s.name.Rank)
			x.drop(s)
		}
		if s.diverged && s.part.served {
			x.askCheckpoint(s, s.logSeq+1)
		}
	}
	for _, p := range *x.now().partitions.Load() {
		for _, in := range p.instances {
			for _, w := range in.workers {
				x.missing(w, now)
			}
		}
	}
}

// drop gives back the memory of a source, and reads its records no longer.
func (x *shard) drop(s *source) {
	s.digests = event.Digests{}
	s.ignored = true
	s.part.index.Update(x.Position(), func(w prefix.Writer) { s.empty(w) })
	s.staged = nil
}

// missing asks for the state of a worker that the log has no record of, though it
// was registered a while ago: the log was cut.
func (x *shard) missing(w event.Worker, now time.Time) {
	if x.sources[w.Source] != nil {
		delete(x.absent, w.Source)
		return
	}
	since, ok := x.absent[w.Source]
	switch {
	case !ok:
		x.absent[w.Source] = now
	case now.Sub(since) > x.cfg.CheckInterval*3:
		x.absent[w.Source] = now
		if err := x.nc.Publish(event.CheckpointSubject(w.Key()), nil); err != nil {
			x.log.Debug("checkpoint not asked for", "error", err)
		}
	}
}

// -- keeping the log small ----------------------------------------------------

// purgeStep is how many records one purge takes away at most. JetStream answers
// nobody else while it purges: measured at a quarter of a microsecond a record.
const purgeStep = 20000

// checkStream looks at the size of the log, and compacts it if it has grown.
func (x *shard) checkStream(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, x.cfg.CheckInterval*5)
	defer cancel()
	stream, err := x.js.Stream(ctx, x.stream)
	if err != nil {
		x.log.Debug("stream not looked at", "error", err)
		return
	}
	state := stream.CachedInfo().State
	if last := state.LastSeq; last > x.end.Load() {
		x.end.Store(last)
	}
	x.askCut(state.FirstSeq)
	x.baseless(state.FirstSeq)
	if !x.cfg.Compact {
		return
	}
	floor := x.floor()
	if floor > state.FirstSeq && (floor-state.FirstSeq > purgeStep || state.Bytes > x.cfg.MinLog) {
		x.purge(ctx, stream, state.FirstSeq, floor)
	}
	if state.Bytes > max(x.cfg.MinLog, 4*x.stateSize()) {
		x.askOldest(state)
	}
}

// askCut asks for the state of sources whose records somebody has purged. They
// are known here, but the log does not tell others of them.
func (x *shard) askCut(first uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.sources {
		if s.keep < first && !s.ignored {
			x.askCheckpoint(s, first)
		}
	}
}

// floor returns the log sequence before which no record is needed any more: each
// source has been reset, or has written a whole checkpoint, later. Sources that
// were dropped need nothing: a bridge that finds a part of their records only
// begins anew.
func (x *shard) floor() uint64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	floor := x.Position() + 1
	for _, s := range x.sources {
		if !s.ignored {
			floor = min(floor, s.keep)
		}
	}
	return floor
}

// stateSize estimates how many bytes checkpoints of all sources would take.
func (x *shard) stateSize() uint64 {
	x.mu.RLock()
	defer x.mu.RUnlock()
	size := uint64(0)
	for _, s := range x.sources {
		for _, d := range s.digests {
			size += 16 * d.Count
		}
		size += 256
	}
	return size
}

// purge takes the records before floor away, a step at a time.
func (x *shard) purge(ctx context.Context, stream jetstream.Stream, first, floor uint64) {
	for first < floor {
		first = min(first+purgeStep, floor)
		if err := stream.Purge(ctx, jetstream.WithPurgeSequence(first)); err != nil {
			x.log.Warn("log not purged", "error", err)
			return
		}
		x.metrics.purges.Add(ctx, 1)
	}
}

// askOldest asks the sources that need the oldest records for checkpoints.
func (x *shard) askOldest(state jetstream.StreamState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	half := state.FirstSeq + (state.LastSeq-state.FirstSeq)/2
	var old []*source
	for _, s := range x.sources {
		if s.keep < half {
			old = append(old, s)
		}
	}
	slices.SortFunc(old, func(a, b *source) int { return int(int64(a.keep) - int64(b.keep)) })
	const atOnce = 64
	for _, s := range old[:min(len(old), atOnce)] {
		x.askCheckpoint(s, s.logSeq+1)
	}
}
