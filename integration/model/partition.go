package model

import "github.com/kvmesh/kvmesh/indexer/hash"

// Rank names a source of a partition.
type Rank struct {
	Instance string
	Rank     uint32
}

// Partition is every source of one model and routing group.
type Partition struct {
	blockSize int
	sources   map[Rank]*Source
}

// NewPartition returns a Partition without sources. blockSize is in tokens.
func NewPartition(blockSize int) *Partition {
	return &Partition{blockSize: blockSize, sources: map[Rank]*Source{}}
}

// Source returns the source of a rank. The first call for a rank makes it, with
// the profile given.
func (p *Partition) Source(instance string, rank uint32, profile Profile) *Source {
	at := Rank{instance, rank}
	if p.sources[at] == nil {
		p.sources[at] = New(p.blockSize, profile)
	}
	return p.sources[at]
}

// Drop forgets one rank of an instance.
func (p *Partition) Drop(instance string, rank uint32) { delete(p.sources, Rank{instance, rank}) }

// DropInstance forgets every rank of an instance.
func (p *Partition) DropInstance(instance string) {
	for at := range p.sources {
		if at.Instance == instance {
			delete(p.sources, at)
		}
	}
}

// Row is how much of a prompt an instance holds, in tokens. Each tier continues
// the one before, so GPU <= CPU <= Disk = Longest.
type Row struct {
	GPU, CPU, Disk, Longest int
	DP                      map[uint32]int // device tokens of each rank that has any
}

// Answer returns the rows of the instances that hold the beginning of a prompt,
// given by the local hashes of its blocks.
func (p *Partition) Answer(locals []uint64) map[string]Row { return p.State().Answer(locals) }

// State is what every source of a partition holds at one moment. It answers
// many prompts for the price of one look.
type State struct {
	BlockSize int
	Held      map[Rank]map[Tier]map[uint64]bool // sequence hashes
}

// State returns the present state. Later events do not change it.
func (p *Partition) State() State {
	st := State{BlockSize: p.blockSize, Held: map[Rank]map[Tier]map[uint64]bool{}}
	for at, s := range p.sources {
		st.Held[at] = s.Resident()
	}
	return st
}

// Answer is Partition.Answer for the state.
func (st State) Answer(locals []uint64) map[string]Row {
	seqs := hash.AppendSequence(nil, locals)
	out := map[string]Row{}
	for at, held := range st.Held {
		var ends [tiers]int
		n := 0
		for t := range tiers {
			for n < len(seqs) && held[t][seqs[n]] {
				n++
			}
			ends[t] = n * st.BlockSize
		}
		if n == 0 {
			continue
		}
		row, ok := out[at.Instance]
		if !ok {
			row.DP = map[uint32]int{}
		}
		row.GPU = max(row.GPU, ends[Device])
		row.CPU = max(row.CPU, ends[Host])
		row.Disk = max(row.Disk, ends[External])
		row.Longest = max(row.Longest, ends[External])
		if ends[Device] > 0 {
			row.DP[at.Rank] = ends[Device]
		}
		out[at.Instance] = row
	}
	return out
}
