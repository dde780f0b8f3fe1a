// Package residency keeps what one engine rank holds, as its events tell it,
// and turns each event into operations of the log.
//
// An engine speaks of engine blocks by names of its own, counts physical copies,
// tells children before parents, and names blocks without saying what they
// hold. The log speaks of index blocks by sequence hash. A State stands between
// the two: it knows each engine block's place in its prompt, counts copies per
// (tier, owner, group, engine hash), parks what has no known parent yet, and
// remembers for a while what left every tier. It can write itself out as a
// checkpoint, and read itself back from the operations that it wrote.
//
// A State is one source's, does no I/O and is not for concurrent use.
package residency

import (
	"github.com/kvmesh/kvmesh/indexer/event"
)

// Limits bound a State's memory beyond the blocks that the engine holds.
type Limits struct {
	// Known is how many blocks that left every tier are remembered, the
	// oldest forgotten first: a store without tokens may name them, and their
	// children may come.
	Known int
	// Parked is how many blocks may wait for their parent.
	Parked int
}

// DefaultLimits is 16,384 blocks of either sort.
func DefaultLimits() Limits { return Limits{Known: 16384, Parked: 16384} }

// State is what one source holds.
type State struct {
	cfg Config

	cells arena
	free  map[uint16]uint32
	ints  directory         // engine hash → head cell, of hashes that are integers
	names map[string]uint32 // the same of all others; the key is a typeByte and the name
	named map[uint32]string // head cell → its key in names
	seqs  directory         // sequence hash → first of the cells that cover it

	spilled map[spill]uint32 // copies that a cell has no room for
	pools   []pool
	digests event.Digests

	waiting map[engineKey][]uint32 // name of a missing parent → parked head cells
	parents map[uint32]engineKey   // parked head cell → its parent's name
	parked  int                    // parked head cells

	unlinked map[parentRef][]uint32 // blocks read back before their parent was

	oldest, newest uint32 // known blocks
	known          int

	groups map[int64]bool // KV cache group → whether it is a main attention group

	emit    emitter
	scratch scratch
	memory  *Memory // where scratch and what emit collects come from; nil: they are the State's own
}

// cell stands for one index block of an engine block. An engine block of k
// index blocks is k cells in a row, of which the first, its head, speaks for
// all: it has the name, the copies and the links.
type cell struct {
	seq    uint64 // sequence hash; nothing while parked
	local  uint64 // local hash
	parent uint64 // sequence hash of the block before
	key    uint64 // head: the engine hash, if that is an integer

	next   uint32    // next cell of the same seq, of another engine block; of a free cell: next free one
	base   uint32    // position in the prompt, in blocks
	before uint32    // head: the engine block that was named as parent; it may be gone, and its cell another's
	copies [2]uint32 // head: copies in two pools, as packed by packCopies; of a known block: its neighbours

	k     uint16 // head: number of cells; others: 0
	back  uint16 // distance to the head
	flags flags
}

type flags uint8

const (
	flagRoot   flags = 1 << iota // the first block of a prompt
	flagNamed                    // head: the name is in State.named
	flagParked                   // head: waits for its parent
	flagKnown                    // head: no copies, remembered
	flagSpill                    // head: has copies in State.spilled
)

// pool is where physical copies are counted: whose memory of a tier, and for which
// KV cache group. A block is in a tier while any pool there has a copy: what the
// log and the digests tell apart is tiers.
type pool struct {
	tier  event.Tier
	owner string
	group event.Group
}

type spill struct {
	id   uint32
	pool uint8
}

// Config is what a State has to know of its source.
type Config struct {
	// BlockSize is the index's, in tokens.
	BlockSize int
	// Clears are the tiers that the engine means when it says that all its own
	// blocks are cleared.
	Clears event.TierMask
	// CacheOwner says that the worker has a cache owner, whose memory outlives
	// the engine. Else all memory is the engine's own, whatever it says.
	CacheOwner bool
	Limits     Limits
}

// New returns the State of a source that holds nothing.
func New(cfg Config) *State {
	s := &State{cfg: cfg}
	s.Reset()
	return s
}

// Reset forgets everything: the state is given up.
func (s *State) Reset() {
	*s = State{
		cfg:     s.cfg,
		free:    map[uint16]uint32{},
		groups:  map[int64]bool{},
		scratch: s.scratch,
		memory:  s.memory,
	}
}

// Restart forgets what goes with the engine's process: all but the cache owner's
// blocks, and which groups are main. It tells whether anything is left. No
// operation says what went.
func (s *State) Restart() (kept bool) {
	if s.cfg.CacheOwner {
		s.emit.begin(s, nil)
		s.drop(func(p *pool) bool { return p.owner != cacheOwner })
		for s.oldest != 0 {
			s.forget(s.oldest)
		}
	}
	if !s.cfg.CacheOwner || s.ints.n+len(s.names) == 0 {
		s.Reset()
		return false
	}
	return true
}

// Digests returns what the source holds, by tier.
func (s *State) Digests() event.Digests { return s.digests }

// Parked returns how many blocks wait for their parent.
func (s *State) Parked() int { return s.parked }

// Known returns how many blocks are remembered that no tier holds.
func (s *State) Known() int { return s.known }

// Bytes returns how much memory the blocks take, spare room included. Names that are
// no integers come on top.
func (s *State) Bytes() int {
	return s.cells.bytes() + s.ints.bytes() + s.seqs.bytes()
}

// -- pools and copies ---------------------------------------------------------

// maxPools is how many pools a cell's copies can tell apart.
const maxPools = 255

// findPool returns the number of a pool, which is at least 1; 0 if there is
// none.
func (s *State) findPool(tier event.Tier, owner string, group event.Group) uint8 {
	for i := range s.pools {
		if s.pools[i] == (pool{tier, owner, group}) {
			return uint8(i + 1)
		}
	}
	return 0
}

// makePool returns the number of a pool, new or not; 0 if there are too many.
func (s *State) makePool(tier event.Tier, owner string, group event.Group) uint8 {
	if p := s.findPool(tier, owner, group); p != 0 {
		return p
	}
	if len(s.pools) == maxPools {
		return 0
	}
	s.pools = append(s.pools, pool{tier, owner, group})
	return uint8(len(s.pools))
}

// maxCopies is the largest number of copies that is counted.
const maxCopies = 1<<24 - 1

func packCopies(pool uint8, n uint32) uint32 { return uint32(pool)<<24 | n }

// copies returns how many copies a block has in a pool.
func (s *State) copies(id uint32, pool uint8) uint32 {
	c := s.cells.at(id)
	if c.flags&flagKnown != 0 {
		return 0
	}
	for _, v := range c.copies {
		if uint8(v>>24) == pool {
			return v & maxCopies
		}
	}
	if c.flags&flagSpill != 0 {
		return s.spilled[spill{id, pool}]
	}
	return 0
}

// writeCopies stores how many copies a block has in a pool, and nothing else.
func (s *State) writeCopies(id uint32, pool uint8, n uint32) {
	c := s.cells.at(id)
	free := -1
	for i, v := range c.copies {
		if uint8(v>>24) == pool {
			if n == 0 {
				c.copies[i] = 0
			} else {
				c.copies[i] = packCopies(pool, n)
			}
			return
		}
		if v == 0 {
			free = i
		}
	}
	key := spill{id, pool}
	if c.flags&flagSpill != 0 {
		if _, ok := s.spilled[key]; ok {
			if n == 0 {
				delete(s.spilled, key)
			} else {
				s.spilled[key] = n
			}
			return
		}
	}
	switch {
	case n == 0:
	case free >= 0:
		c.copies[free] = packCopies(pool, n)
	default:
		if s.spilled == nil {
			s.spilled = map[spill]uint32{}
		}
		c.flags |= flagSpill
		s.spilled[key] = n
	}
}

// eachCopy calls f for every pool that a block has copies in.
func (s *State) eachCopy(id uint32, f func(pool uint8, n uint32)) {
	c := s.cells.at(id)
	if c.flags&flagKnown != 0 {
		return
	}
	for _, v := range c.copies {
		if v != 0 {
			f(uint8(v>>24), v&maxCopies)
		}
	}
	if c.flags&flagSpill != 0 {
		for p := range s.pools {
			if n := s.spilled[spill{id, uint8(p + 1)}]; n != 0 {
				f(uint8(p+1), n)
			}
		}
	}
}

// resident tells whether a block has a copy anywhere.
func (s *State) resident(id uint32) bool {
	c := s.cells.at(id)
	if c.flags&flagKnown != 0 {
		return false
	}
	if c.copies != [2]uint32{} {
		return true
	}
	found := false
	if c.flags&flagSpill != 0 {
		s.eachCopy(id, func(uint8, uint32) { found = true })
	}
	return found
}

// inTier tells whether a block has a copy in a tier.
func (s *State) inTier(id uint32, tier event.Tier) bool {
	c := s.cells.at(id)
	if c.flags&flagKnown != 0 {
		return false
	}
	for _, v := range c.copies {
		if v != 0 && s.pools[v>>24-1].tier == tier {
			return true
		}
	}
	found := false
	if c.flags&flagSpill != 0 {
		s.eachCopy(id, func(p uint8, _ uint32) { found = found || s.pools[p-1].tier == tier })
	}
	return found
}
