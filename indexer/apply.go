package indexer

import (
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// apply applies the record at a log sequence.
func (x *shard) apply(seq uint64, subject string, data []byte) {
	name, served, err := x.sourceOf(subject)
	if err == nil && !served {
		x.pass(name, seq, subject, data)
		return
	}
	if err == nil {
		err = x.dec.Reset(data)
	}
	h := x.dec.Header
	x.applyRecord(name, seq, subject, data, err)
	if x.applied != nil && err == nil {
		x.applied(name, h, seq)
	}
}

// sourceOf returns whose records a subject has, and whether it is in the share.
func (x *shard) sourceOf(subject string) (name event.Source, served bool, err error) {
	if s := x.writers[subject]; s != nil {
		return s.name, s.part.served, nil
	}
	name, err = x.cfg.Log.Parse(subject)
	return name, err == nil && x.cfg.Share.Has(name.Partition()), err
}

// applyRecord applies a record whose header has been read. What can't be read is
// counted and skipped: the next digest of its source shows the difference.
func (x *shard) applyRecord(name event.Source, seq uint64, subject string, data []byte, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.advance(seq)
	if err != nil {
		x.metrics.bad.Add(x.metrics.ctx, 1)
		x.trace.failed(err)
		x.log.ErrorContext(x.trace.ctx, "record can't be read", "subject", subject, "log_seq", seq, "error", err)
		return
	}
	s := x.source(name, subject, seq)
	s.logSeq = seq
	if s.ignored {
		return
	}
	more := x.dec.Next()
	if more && x.dec.Op.Kind == event.OpCheckpoint {
		x.chunk(s, seq, data)
		x.traced(s, seq, 0)
		return
	}
	s.staged = nil // an unfinished checkpoint ends here
	h := x.dec.Header
	blocks := 0
	var old []*source
	if h.Incarnation > s.incarnation {
		s.outlived(h.Incarnation, func(o *source) { old = append(old, o) })
	}
	s.part.index.Update(seq, func(w prefix.Writer) {
		for _, o := range old {
			w.Drop(o.holder)
		}
		for ; more; more = x.dec.Next() {
			blocks += x.op(w, s, seq)
		}
		if err = x.dec.Err(); err != nil {
			x.diverge(s)
		}
		s.show(w)
	})
	x.traced(s, seq, blocks)
	x.metrics.blocks.Add(x.metrics.ctx, int64(blocks))
	x.header(s, &h)
	for _, o := range old {
		x.leave(o)
	}
	if s.retired {
		x.forget(s, seq)
	}
	if err != nil {
		x.metrics.bad.Add(x.metrics.ctx, 1)
		x.trace.failed(err)
		x.log.ErrorContext(x.trace.ctx, "record can't be read to its end", "subject", subject, "log_seq", seq, "error", err)
	}
}

// source returns the source of a subject, new or not.
func (x *shard) source(name event.Source, subject string, seq uint64) *source {
	s := x.writers[subject]
	if s == nil {
		p := x.partition(name.Partition())
		s = &source{name: name, part: p, keep: seq, gone: x.gone[name]}
		s.listed = s.registered()
		p.index.Update(x.Position(), func(w prefix.Writer) { s.holder = w.Add(&s.name) })
		x.sources[name], x.writers[subject] = s, s
		p.sources[s] = struct{}{}
	}
	return s
}

// forget drops all that is known of a source whose last record is at a log
// sequence.
func (x *shard) forget(s *source, seq uint64) {
	s.part.index.Update(seq, func(w prefix.Writer) { w.Drop(s.holder) })
	x.leave(s)
}

// leave takes a source out of the tables; the index has dropped it.
func (x *shard) leave(s *source) {
	delete(s.part.sources, s)
	delete(x.sources, s.name)
	x.dropIfEmpty(s.part)
	delete(x.writers, x.cfg.Log.Subject(s.name))
}

func (x *shard) header(s *source, h *event.Header) {
	s.incarnation = h.Incarnation
	s.batches, s.engineSeq = h.Batches, h.Last
}

// op applies the operation that was read to a source. It returns how many blocks
// it names.
func (x *shard) op(w prefix.Writer, s *source, seq uint64) (blocks int) {
	op := &x.dec.Op
	switch op.Kind {
	case event.OpStored:
		x.did.stored[op.Tier]++
		s.digests[op.Tier].Add(w.Store(s.holder, op.Tier, &op.Run))
		return len(op.Locals)
	case event.OpRemoved:
		x.did.removed[op.Tier]++
		s.digests[op.Tier].Sub(w.Remove(s.holder, op.Tier, op.Seqs))
		return len(op.Seqs)
	case event.OpCleared:
		for t := range event.Tier(event.Tiers) {
			if op.Tiers.Has(t) {
				x.did.cleared[t]++
			}
		}
		x.clear(w, s, op.Tiers)
	case event.OpReset:
		x.clear(w, s, event.AllTiers)
		s.keep, s.based = seq, true
		s.diverged = false
		if op.Reason != event.ReasonGap {
			s.gaps, s.lost = 0, 0
		}
	case event.OpRetired:
		x.clear(w, s, event.AllTiers)
		s.retired = true
	case event.OpGap:
		s.gaps++
		s.lost += op.To - op.From + 1
	case event.OpGaps:
		s.gaps, s.lost = op.From, op.To
	case event.OpHome:
		s.home, s.hasHome = op.Home, true
		s.listed = s.registered()
	case event.OpDigest:
		switch {
		case s.digests == op.Digests:
		case !s.based: // what came before was purged, and a checkpoint follows or is asked for
			s.diverged = true
		default:
			x.log.ErrorContext(x.trace.ctx, "digest differs", "instance", s.name.Instance, "rank", s.name.Rank, "log_seq", seq, "have", s.digests, "want", op.Digests)
			x.diverge(s)
		}
	}
	return 0
}

// clear empties some tiers of a source.
func (x *shard) clear(w prefix.Writer, s *source, tiers event.TierMask) {
	if tiers == event.AllTiers {
		s.empty(w)
	} else {
		w.Clear(s.holder, tiers)
	}
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			s.digests[t] = event.Digest{}
		}
	}
}

// diverge marks a source whose state is not what its bridge says, and has the
// bridge write a checkpoint.
func (x *shard) diverge(s *source) {
	if !s.diverged {
		s.diverged = true
		x.metrics.divergences.Add(x.metrics.ctx, 1)
	}
	x.askCheckpoint(s, s.logSeq+1)
}

// askInterval is how long a request for a checkpoint is given before it is made
// again.
const askInterval = 2 * time.Second

// askCheckpoint asks the bridge of a source for a checkpoint, unless it has
// written one at the log sequence from, or later.
func (x *shard) askCheckpoint(s *source, from uint64) {
	if time.Since(s.asked) < askInterval {
		return
	}
	s.asked = time.Now()
	if err := x.nc.Publish(event.CheckpointSubject(s.name.Key()), event.CheckpointRequest(from)); err != nil {
		x.log.Debug("checkpoint not asked for", "error", err)
	}
}

// chunk takes in a chunk of a checkpoint. The last one puts the state in force,
// unless it is the state already.
func (x *shard) chunk(s *source, seq uint64, data []byte) {
	chunks := x.dec.Op.Chunks
	staged := s.stage(x.dec.Op.Chunk, chunks, seq, append([]byte(nil), data...))
	if staged == nil {
		return
	}
	h := x.dec.Header
	anew := h.Incarnation > s.incarnation // what a cache owner kept of the life before
	if want, ok := x.digestOf(staged[chunks-1]); ok && want == s.digests && !s.diverged && !anew {
		x.header(s, &h)
		return
	}
	var old []*source
	if anew {
		s.outlived(h.Incarnation, func(o *source) { old = append(old, o) })
		s.gaps, s.lost = 0, 0
	}
	before := s.diverged
	s.part.index.Update(seq, func(w prefix.Writer) {
		for _, o := range old {
			w.Drop(o.holder)
		}
		x.clear(w, s, event.AllTiers)
		s.diverged = false
		for _, data := range staged {
			x.restore(w, s, seq, data)
		}
		s.show(w)
	})
	x.header(s, &h)
	for _, o := range old {
		x.leave(o)
	}
	if before && !s.diverged {
		x.log.Info("healed by a checkpoint", "instance", s.name.Instance, "rank", s.name.Rank, "log_seq", seq)
	}
}

// digestOf returns the digest that a record ends with.
func (x *shard) digestOf(data []byte) (event.Digests, bool) {
	var d event.Digests
	found := false
	if x.dec.Reset(data) != nil {
		return d, false
	}
	for x.dec.Next() {
		if x.dec.Op.Kind == event.OpDigest {
			d, found = x.dec.Op.Digests, true
		}
	}
	return d, found && x.dec.Err() == nil
}

// restore applies one chunk of a checkpoint.
func (x *shard) restore(w prefix.Writer, s *source, seq uint64, data []byte) {
	if err := x.dec.Reset(data); err != nil {
		x.diverge(s)
		return
	}
	for x.dec.Next() {
		op := &x.dec.Op
		if op.Kind != event.OpCheckpoint {
			x.op(w, s, seq)
			continue
		}
		for i := range op.Runs {
			s.digests[op.Tier].Add(w.Store(s.holder, op.Tier, &op.Runs[i]))
		}
	}
	if x.dec.Err() != nil {
		x.diverge(s)
	}
}
