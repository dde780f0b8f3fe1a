package residency

import "github.com/kvmesh/kvmesh/indexer/event"

// Names appends the names that the engine has for the blocks of a prompt, given
// by its sequence hashes from the first block on, as far as it has them without a
// hole. An engine block of several index blocks has one name, and is there as a
// whole or not at all.
func (s *State) Names(dst []event.EngineHash, seqs []uint64) []event.EngineHash {
	for len(seqs) > 0 {
		id := s.holding(seqs)
		if id == 0 {
			break
		}
		dst = append(dst, s.engineHash(id))
		seqs = seqs[s.cells.at(id).k:]
	}
	return dst
}

// holding returns an engine block, with copies in some tier, that begins with the
// first of the sequence hashes and covers no other ones.
func (s *State) holding(seqs []uint64) uint32 {
	for id := s.seqs.get(seqs[0]); id != 0; id = s.cells.at(id).next {
		c := s.cells.at(id)
		if c.back != 0 || int(c.k) > len(seqs) || c.flags&(flagParked|flagKnown) != 0 {
			continue
		}
		covers := true
		for j := range uint32(c.k) {
			covers = covers && s.cells.at(id+j).seq == seqs[j]
		}
		if covers {
			return id
		}
	}
	return 0
}
