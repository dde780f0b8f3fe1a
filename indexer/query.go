package indexer

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Holding is what one worker rank holds of a prompt, in blocks from the
// beginning. The tiers continue each other: Ends[t] is how far one gets with the
// tiers up to t.
type Holding struct {
	*event.Source
	Ends [event.Tiers]uint32
}

// Longest returns how far one gets with all tiers, in blocks.
func (h *Holding) Longest() uint32 { return h.Ends[event.Tiers-1] }

// Answer is who holds how much of a prompt.
type Answer struct {
	// LogSeq is the log sequence that the answer is true for.
	LogSeq uint64
	// BlockSize is the partition's, in tokens.
	BlockSize uint32
	// Holdings has those who hold at least the first block, in no order. They
	// are valid until the next use of the Query.
	Holdings []Holding
}

// Query is the memory of a query, to be used again for the next one. The zero
// Query is ready. One goroutine may use it at a time.
type Query struct {
	prefix   prefix.Query
	holdings []Holding
}

// Serves tells whether a partition is in the Indexer's share.
func (x *Indexer) Serves(name event.Partition) bool { return x.cfg.Share.Has(name) }

// Share returns the partitions that the Indexer serves.
func (x *Indexer) Share() event.Share { return x.cfg.Share }

// BlockSize returns the block size of a partition, in tokens, also of one that is
// served elsewhere. Errors wrap ErrUnknownPartition, or ErrNotReady while it is not
// known what partitions there are.
func (x *Indexer) BlockSize(name event.Partition) (uint32, error) {
	e := x.now()
	p := e.partition(name)
	if p == nil || !p.open.Load() {
		err := x.readyIn(e)
		if !x.Serves(name) && x.synced.Load() { // the catalog says it all
			err = nil
		}
		if err != nil {
			return 0, err
		}
		return 0, ErrUnknownPartition
	}
	return p.blockSize.Load(), nil
}

// Match answers who holds how much of a prompt, given by the local hashes of its
// blocks. It never waits for the reader of the log. Errors wrap
// ErrUnknownPartition, ErrNotReady or ErrElsewhere.
func (x *Indexer) Match(q *Query, name event.Partition, locals []uint64) (Answer, error) {
	if !x.Serves(name) {
		return Answer{}, ErrElsewhere
	}
	e := x.now() // one for all: the log may begin anew meanwhile
	if err := x.readyIn(e); err != nil {
		return Answer{}, err
	}
	p := e.partition(name)
	if p == nil || !p.open.Load() {
		return Answer{}, ErrUnknownPartition
	}
	// The position is read first: what is applied to other partitions by then
	// does not change this one's answer.
	at := e.position.Load()
	matches, logSeq := p.index.Match(&q.prefix, locals)
	q.holdings = q.holdings[:0]
	for i := range matches {
		q.holdings = append(q.holdings, Holding{q.prefix.Source(matches[i].Holder), matches[i].Ends})
	}
	return Answer{LogSeq: max(at, logSeq), BlockSize: p.blockSize.Load(), Holdings: q.holdings}, nil
}

// SourceInfo is what an Indexer knows of a source.
type SourceInfo struct {
	Source      event.Source
	Incarnation uint64
	// EngineSeq is the engine's number of the last batch that has been
	// applied; nil if there is none.
	EngineSeq *uint64
	LogSeq    uint64 // of the source's last record
	Gaps      uint64 // in this incarnation
	Lost      uint64 // batches in them
	Diverged  bool
	Answered  bool // queries are answered with it
	Digests   event.Digests
}

// Sources returns what is known of every source in the share, and the log
// sequence that it is true for.
func (x *Indexer) Sources() ([]SourceInfo, uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	out := make([]SourceInfo, 0, len(x.sources))
	for _, s := range x.sources {
		if !s.part.served {
			continue
		}
		info := SourceInfo{
			Source: s.name, Incarnation: s.incarnation, LogSeq: s.logSeq, Gaps: s.gaps, Lost: s.lost,
			Diverged: s.diverged, Answered: s.answered(), Digests: s.digests,
		}
		if s.batches {
			seq := s.engineSeq
			info.EngineSeq = &seq
		}
		out = append(out, info)
	}
	return out, x.Position()
}

// Workers returns the workers that are registered, also those of partitions that
// are served elsewhere.
func (x *Indexer) Workers() []event.Worker {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []event.Worker
	for _, p := range *x.now().partitions.Load() {
		for _, in := range p.instances {
			for _, w := range in.workers {
				out = append(out, w)
			}
		}
	}
	return out
}

// Dumped is the blocks of one source.
type Dumped struct {
	Source event.Source
	Blocks []DumpedBlock
}

// DumpedBlock is one block that a source holds.
type DumpedBlock struct {
	prefix.Block
	Tiers event.TierMask
}

// Dump returns the blocks of all sources of a partition that queries are
// answered with, and the log sequence that they are true for.
func (x *Indexer) Dump(name event.Partition) (sources []Dumped, blockSize uint32, logSeq uint64, err error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if err := x.Ready(); err != nil {
		return nil, 0, 0, err
	}
	p := x.now().partition(name)
	if p == nil || !p.open.Load() {
		return nil, 0, 0, ErrUnknownPartition
	}
	if !p.served {
		return nil, 0, 0, ErrElsewhere
	}
	p.index.Read(func(r prefix.Reader) {
		for s := range p.sources {
			if !s.answered() {
				continue
			}
			d := Dumped{Source: s.name}
			r.Walk(s.holder, func(b prefix.Block, tiers event.TierMask) {
				d.Blocks = append(d.Blocks, DumpedBlock{b, tiers})
			})
			sources = append(sources, d)
		}
	})
	return sources, p.blockSize.Load(), x.Position(), nil
}

// Partitions returns the partitions of the share that have workers.
func (x *Indexer) Partitions() []event.Partition {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []event.Partition
	for name, p := range *x.now().partitions.Load() {
		if p.served && p.open.Load() {
			out = append(out, name)
		}
	}
	return out
}
