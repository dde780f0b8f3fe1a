package indexer

import "github.com/kvmesh/kvmesh/indexer/event"

// Records of partitions that are served elsewhere. Nothing of what they store is
// kept, but every Indexer knows which records are still needed, whoever needs
// them: the floor of the log is the same for all, and any of them may purge what
// lies before it, also where none serves everything. That takes where each
// source's state begins in the log, how large it is by the bridge's word, and
// what tells whether the source still counts: some hundred bytes a source.

// pass notes what a record of a source that is not in the share says of the
// log.
func (x *shard) pass(name event.Source, seq uint64, subject string, data []byte) {
	x.metrics.passed.Add(x.metrics.ctx, 1)
	err := x.dec.Reset(data)
	x.mu.Lock()
	defer x.mu.Unlock()
	defer x.advance(seq)
	if err != nil {
		x.badPassed(subject, seq, err)
		return
	}
	s := x.source(name, subject, seq)
	s.logSeq = seq
	if s.ignored {
		return
	}
	h := x.dec.Header
	more := x.dec.Next()
	if more && x.dec.Op.Kind == event.OpCheckpoint {
		if s.stage(x.dec.Op.Chunk, x.dec.Op.Chunks, seq, nil) != nil {
			x.passOutlived(s, h.Incarnation, seq)
			x.header(s, &h)
		}
	} else {
		s.staged = nil // an unfinished checkpoint ends here
		x.passOutlived(s, h.Incarnation, seq)
		x.header(s, &h)
	}
	for ; more; more = x.dec.Next() {
		s.note(&x.dec.Op, seq)
	}
	if err := x.dec.Err(); err != nil {
		x.badPassed(subject, seq, err)
	}
	if s.retired {
		x.forget(s, seq)
	}
}

func (x *shard) badPassed(subject string, seq uint64, err error) {
	x.metrics.bad.Add(x.metrics.ctx, 1)
	x.log.Error("record of a partition that is served elsewhere can't be read", "subject", subject, "log_seq", seq, "error", err)
}

// passOutlived forgets the ranks that only batches of a source's engine name, if
// its new record is of a later life of it.
func (x *shard) passOutlived(s *source, incarnation, seq uint64) {
	if incarnation <= s.incarnation {
		return
	}
	var old []*source
	s.outlived(incarnation, func(o *source) { old = append(old, o) })
	for _, o := range old {
		x.forget(o, seq)
	}
}

// note takes in what an operation of a source that is not in the share says of
// where its state begins, how large it is, and whose it is.
func (s *source) note(op *event.Op, seq uint64) {
	switch op.Kind {
	case event.OpReset:
		s.keep, s.based = seq, true
	case event.OpRetired:
		s.retired = true
	case event.OpHome:
		s.home, s.hasHome = op.Home, true
	case event.OpDigest:
		s.digests = op.Digests
	}
}
