package indexer

import (
	"maps"
	"slices"

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

// Answer is who holds how much of a prompt. What is in it is valid until the next use
// of the Query.
type Answer struct {
	// Position is what the answer is true for.
	event.Position
	// BlockSize is the partition's, in tokens.
	BlockSize uint32
	// Holdings has those who hold at least the first block, in no order.
	Holdings []Holding
}

// Query is the memory of a query, to be used again for the next one. The zero
// Query is ready. One goroutine may use it at a time.
type Query struct {
	prefix   prefix.Query
	holdings []Holding
	seqs     []uint64
}

// Serves tells whether a partition is in the Indexer's share.
func (x *Indexer) Serves(name event.Partition) bool { return x.cfg.Share.Has(name) }

// Share returns the partitions that the Indexer serves.
func (x *Indexer) Share() event.Share { return x.cfg.Share }

// BlockSize returns the block size of a partition, in tokens, also of one that is
// served elsewhere. Errors wrap ErrUnknownPartition, or ErrNotReady while it is not
// known what partitions there are.
func (x *Indexer) BlockSize(name event.Partition) (uint32, error) {
	for _, s := range x.shards {
		if p := s.now().open(name); p != nil {
			return p.blockSize.Load(), nil
		}
	}
	if x.Serves(name) || !x.shards[0].synced.Load() { // else the catalog says it all
		if err := x.Ready(); err != nil {
			return 0, err
		}
	}
	return 0, ErrUnknownPartition
}

// Match answers who holds how much of a prompt, given by the local hashes of its
// blocks. It never waits for the readers of the log. Errors wrap
// ErrUnknownPartition, ErrNotReady or ErrElsewhere.
func (x *Indexer) Match(q *Query, name event.Partition, locals []uint64) (Answer, error) {
	if !x.Serves(name) {
		return Answer{}, ErrElsewhere
	}
	q.holdings, q.seqs = q.holdings[:0], q.seqs[:0]
	known, size := false, uint32(0)
	for _, s := range x.shards {
		p, err := s.match(q, name, locals)
		if err != nil {
			return Answer{}, err
		}
		if p != nil { // else the shard has none of its workers
			known, size = true, p.blockSize.Load()
		}
	}
	if !known {
		return Answer{}, ErrUnknownPartition
	}
	return Answer{Position: event.PositionOf(q.seqs), BlockSize: size, Holdings: q.holdings}, nil
}

// match appends the holdings of the shard's sources, and the log sequence that they
// are true for. It returns the partition; nil if the shard has no workers of it.
func (x *shard) match(q *Query, name event.Partition, locals []uint64) (*partition, error) {
	e := x.now() // one for all: the log may begin anew meanwhile
	if err := x.readyIn(e); err != nil {
		return nil, err
	}
	// The position is read first: what is applied to other partitions by then
	// does not change this one's answer.
	p, at := e.open(name), e.position.Load()
	if p == nil {
		q.seqs = append(q.seqs, at)
		return nil, nil
	}
	matches, logSeq := p.index.Match(&q.prefix, locals)
	for i := range matches {
		q.holdings = append(q.holdings, Holding{q.prefix.Source(matches[i].Holder), matches[i].Ends})
	}
	q.seqs = append(q.seqs, max(at, logSeq))
	return p, nil
}

// SourceInfo is what an Indexer knows of a source.
type SourceInfo struct {
	Source      event.Source
	Incarnation uint64
	// EngineSeq is the engine's number of the last batch that has been
	// applied; nil if there is none.
	EngineSeq *uint64
	LogSeq    uint64 // of the source's last record, in its stream
	Gaps      uint64 // in this incarnation
	Lost      uint64 // batches in them
	Diverged  bool
	Answered  bool // queries are answered with it
	Digests   event.Digests
}

// Sources returns what is known of every source in the share, and the position
// that it is true for.
func (x *Indexer) Sources() ([]SourceInfo, event.Position) {
	var out []SourceInfo
	seqs := make([]uint64, len(x.shards))
	for i, s := range x.shards {
		out, seqs[i] = s.appendSources(out)
	}
	return out, event.PositionOf(seqs)
}

func (x *shard) appendSources(out []SourceInfo) ([]SourceInfo, uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	out = slices.Grow(out, len(x.sources))
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
	var out []event.Worker
	for _, s := range x.shards {
		out = s.appendWorkers(out)
	}
	return out
}

func (x *shard) appendWorkers(out []event.Worker) []event.Worker {
	x.mu.RLock()
	defer x.mu.RUnlock()
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
// answered with, and the position that they are true for.
func (x *Indexer) Dump(name event.Partition) (sources []Dumped, blockSize uint32, at event.Position, err error) {
	if err := x.Ready(); err != nil {
		return nil, 0, event.Position{}, err
	}
	if blockSize, err = x.BlockSize(name); err != nil {
		return nil, 0, event.Position{}, err
	}
	if !x.Serves(name) {
		return nil, 0, event.Position{}, ErrElsewhere
	}
	seqs := make([]uint64, len(x.shards))
	for i, s := range x.shards {
		if sources, seqs[i], err = s.appendDump(sources, name); err != nil {
			return nil, 0, event.Position{}, err
		}
	}
	return sources, blockSize, event.PositionOf(seqs), nil
}

func (x *shard) appendDump(out []Dumped, name event.Partition) ([]Dumped, uint64, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if err := x.Ready(); err != nil {
		return nil, 0, err
	}
	p := x.now().open(name)
	if p == nil {
		return out, x.Position(), nil
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
			out = append(out, d)
		}
	})
	return out, x.Position(), nil
}

// Partitions returns the partitions of the share that have workers.
func (x *Indexer) Partitions() []event.Partition {
	open := map[event.Partition]bool{}
	for _, s := range x.shards {
		for name, p := range *s.now().partitions.Load() {
			if p.served && p.open.Load() {
				open[name] = true
			}
		}
	}
	return slices.Collect(maps.Keys(open))
}
