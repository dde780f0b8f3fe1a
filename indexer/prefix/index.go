// Package prefix holds which worker rank has which blocks of which prompts, and
// finds for a prompt who has how much of its beginning.
//
// A block is known by its sequence hash, which names the whole prompt up to it,
// so a block that many holders have is kept once. Answers are exact whatever was
// removed in between.
package prefix

import (
	"sync"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// Holder is a number that the caller gives to one worker rank.
type Holder uint32

// Match is how much of a prompt a holder has, in blocks. The tiers continue each
// other: Ends[t] is how far one gets with the tiers up to t.
type Match struct {
	Holder Holder
	Ends   [event.Tiers]int
}

// Longest returns how far one gets with all tiers.
func (m *Match) Longest() int { return m.Ends[event.Tiers-1] }

// Index is the blocks of one partition. Any number of goroutines may use it.
type Index struct {
	mu     sync.RWMutex
	blocks map[uint64]*block
	held   map[Holder]*[event.Tiers]int
}

// block is a block that somebody holds.
type block struct {
	local   uint64
	parent  uint64 // sequence hash of the block before
	base    uint32 // position in the prompt; 0 has no parent
	holders []holding
}

type holding struct {
	holder Holder
	tiers  event.TierMask
}

// New returns an empty Index.
func New() *Index {
	return &Index{blocks: map[uint64]*block{}, held: map[Holder]*[event.Tiers]int{}}
}

// Update calls f with the only access there is to the Index while it runs.
// Queries see all of its changes or none.
func (x *Index) Update(f func(w Writer)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f(Writer{x})
}

// Writer changes an Index. It is valid while Update runs.
type Writer struct{ x *Index }

// Store makes holder have a run of blocks in a tier. It returns how many it did
// not have there yet, and the sum of their Mix with salt.
func (w Writer) Store(holder Holder, tier event.Tier, salt uint64, run *event.Run) (added, sum uint64) {
	seq, root := run.Parent, run.Root
	for i, local := range run.Locals {
		parent := seq
		if root {
			parent, seq, root = 0, local, false
		} else {
			seq = hash.Next(seq, local)
		}
		b := w.x.blocks[seq]
		if b == nil {
			b = &block{local: local, parent: parent, base: run.Base + uint32(i)}
			w.x.blocks[seq] = b
		}
		if b.add(holder, tier) {
			added++
			sum += event.Mix(seq, salt)
		}
	}
	w.count(holder)[tier] += int(added)
	return added, sum
}

// Remove makes holder have blocks in a tier no longer. It returns how many it
// had, and the sum of their Mix with salt.
func (w Writer) Remove(holder Holder, tier event.Tier, salt uint64, seqs []uint64) (removed, sum uint64) {
	for _, seq := range seqs {
		b := w.x.blocks[seq]
		if b == nil || !b.remove(holder, tier.Mask()) {
			continue
		}
		removed++
		sum += event.Mix(seq, salt)
		if len(b.holders) == 0 {
			delete(w.x.blocks, seq)
		}
	}
	w.count(holder)[tier] -= int(removed)
	return removed, sum
}

// Clear makes holder have nothing in some tiers.
func (w Writer) Clear(holder Holder, tiers event.TierMask) {
	if w.x.held[holder] == nil {
		return
	}
	for seq, b := range w.x.blocks {
		if b.remove(holder, tiers) && len(b.holders) == 0 {
			delete(w.x.blocks, seq)
		}
	}
	n := w.count(holder)
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			n[t] = 0
		}
	}
	if *n == [event.Tiers]int{} {
		delete(w.x.held, holder)
	}
}

func (w Writer) count(h Holder) *[event.Tiers]int {
	n := w.x.held[h]
	if n == nil {
		n = &[event.Tiers]int{}
		w.x.held[h] = n
	}
	return n
}

func (b *block) add(h Holder, t event.Tier) bool {
	for i := range b.holders {
		if b.holders[i].holder == h {
			had := b.holders[i].tiers.Has(t)
			b.holders[i].tiers |= t.Mask()
			return !had
		}
	}
	b.holders = append(b.holders, holding{h, t.Mask()})
	return true
}

// remove tells whether the holder had the block in one of the tiers.
func (b *block) remove(h Holder, tiers event.TierMask) bool {
	for i := range b.holders {
		if b.holders[i].holder != h {
			continue
		}
		if b.holders[i].tiers&tiers == 0 {
			return false
		}
		if b.holders[i].tiers &^= tiers; b.holders[i].tiers == 0 {
			b.holders[i] = b.holders[len(b.holders)-1]
			b.holders = b.holders[:len(b.holders)-1]
		}
		return true
	}
	return false
}

// Match appends to dst what each holder has of a prompt, given by its local
// hashes, that has anything of its beginning. seen is called while the answer
// is being made, when the Index can't change.
func (x *Index) Match(dst []Match, locals []uint64, seen func()) []Match {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if seen != nil {
		seen()
	}
	if len(locals) == 0 {
		return dst
	}
	type walk struct {
		at   int
		tier int
		ends [event.Tiers]int
	}
	walks := map[Holder]*walk{}
	seq := uint64(0)
	for i, local := range locals {
		if i == 0 {
			seq = local
		} else {
			seq = hash.Next(seq, local)
		}
		b := x.blocks[seq]
		if b == nil {
			break
		}
		alive := false
		for _, h := range b.holders {
			w := walks[h.holder]
			if w == nil && i == 0 {
				w = &walk{}
				walks[h.holder] = w
			}
			if w == nil || w.at != i {
				continue
			}
			for w.tier < event.Tiers && !h.tiers.Has(event.Tier(w.tier)) {
				w.ends[w.tier] = w.at
				w.tier++
			}
			if w.tier < event.Tiers {
				w.at++
				alive = true
			}
		}
		if !alive {
			break
		}
	}
	for h, w := range walks {
		for ; w.tier < event.Tiers; w.tier++ {
			w.ends[w.tier] = w.at
		}
		if w.at > 0 {
			dst = append(dst, Match{h, w.ends})
		}
	}
	return dst
}

// Block is one block that a holder has, as Walk tells of it.
type Block struct {
	Seq, Local uint64
	Parent     uint64 // sequence hash of the block before; nothing if Base is 0
	Base       uint32 // position in the prompt, in blocks
}

// Walk calls f for each block that a holder has, with the tiers that it has it
// in, in no order. seen is as for Match.
func (x *Index) Walk(holder Holder, seen func(), f func(Block, event.TierMask)) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if seen != nil {
		seen()
	}
	for seq, b := range x.blocks {
		for _, h := range b.holders {
			if h.holder == holder {
				f(Block{Seq: seq, Local: b.local, Parent: b.parent, Base: b.base}, h.tiers)
			}
		}
	}
}

// Held returns how many blocks a holder has, by tier.
func (x *Index) Held(holder Holder) [event.Tiers]int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if n := x.held[holder]; n != nil {
		return *n
	}
	return [event.Tiers]int{}
}

// Len returns how many different blocks are held.
func (x *Index) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.blocks)
}
