package indexer

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Holding is what one worker rank holds of a prompt, in blocks from the
// beginning. The tiers continue each other: Ends[t] is how far one gets with the
// tiers up to t.
type Holding struct {
	Instance string
	Rank     uint32
	Ends     [event.Tiers]int
}

// Answer is who holds how much of a prompt.
type Answer struct {
	// LogSeq is the log sequence that the answer is true for.
	LogSeq uint64
	// BlockSize is the partition's, in tokens.
	BlockSize uint32
	// Holdings has those who hold at least the first block, in no order.
	Holdings []Holding
}

// BlockSize returns the block size of a partition, in tokens. Errors wrap
// ErrUnknownPartition, or ErrNotReady while it is not known what partitions there
// are.
func (x *Indexer) BlockSize(name event.Partition) (uint32, error) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	p := x.partitions[name]
	if p == nil || len(p.instances) == 0 {
		if err := x.Ready(); err != nil {
			return 0, err
		}
		return 0, ErrUnknownPartition
	}
	return p.blockSize, nil
}

// Match answers who holds how much of a prompt, given by the local hashes of its
// blocks. Errors wrap ErrUnknownPartition or ErrNotReady.
func (x *Indexer) Match(name event.Partition, locals []uint64) (Answer, error) {
	if err := x.Ready(); err != nil {
		return Answer{}, err
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	p := x.partitions[name]
	if p == nil || len(p.instances) == 0 {
		return Answer{}, ErrUnknownPartition
	}
	a := Answer{BlockSize: p.blockSize}
	matches := p.index.Match(nil, locals, func() { a.LogSeq = x.position.Load() })
	for i := range matches {
		if s := p.holders[matches[i].Holder]; s != nil && s.answered() {
			a.Holdings = append(a.Holdings, Holding{Instance: s.name.Instance, Rank: s.name.Rank, Ends: matches[i].Ends})
		}
	}
	return a, nil
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

// Sources returns what is known of every source, and the log sequence that it is
// true for.
func (x *Indexer) Sources() ([]SourceInfo, uint64) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	out := make([]SourceInfo, 0, len(x.sources))
	for _, s := range x.sources {
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
	return out, x.position.Load()
}

// Workers returns the workers that are registered.
func (x *Indexer) Workers() []event.Worker {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []event.Worker
	for _, p := range x.partitions {
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
	if err := x.Ready(); err != nil {
		return nil, 0, 0, err
	}
	x.mu.RLock()
	defer x.mu.RUnlock()
	p := x.partitions[name]
	if p == nil || len(p.instances) == 0 {
		return nil, 0, 0, ErrUnknownPartition
	}
	for _, s := range p.holders {
		if !s.answered() {
			continue
		}
		d := Dumped{Source: s.name}
		p.index.Walk(s.holder, nil, func(b prefix.Block, tiers event.TierMask) {
			d.Blocks = append(d.Blocks, DumpedBlock{b, tiers})
		})
		sources = append(sources, d)
	}
	return sources, p.blockSize, x.position.Load(), nil
}

// Partitions returns the partitions that have workers.
func (x *Indexer) Partitions() []event.Partition {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []event.Partition
	for name, p := range x.partitions {
		if len(p.instances) > 0 {
			out = append(out, name)
		}
	}
	return out
}
