// Package blocks has what tests and benchmarks of the index compare it with: a
// plain model, and the traffic of the benchmarks.
package blocks

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Naive says the same as a prefix.Index, in the plainest way: a map from sequence
// hashes to who has the block. Nobody else may use it at the same time.
type Naive struct {
	// Mask is taken of every sequence hash. Narrow ones force collisions.
	Mask   uint64
	blocks map[uint64]*block
	held   map[prefix.Holder]*[event.Tiers]int
}

type block struct {
	local   uint64
	parent  uint64
	base    uint32
	holders map[prefix.Holder]event.TierMask
}

// NewNaive returns an empty model.
func NewNaive() *Naive {
	return &Naive{Mask: ^uint64(0), blocks: map[uint64]*block{}, held: map[prefix.Holder]*[event.Tiers]int{}}
}

// Store makes a holder have a run of blocks in a tier.
func (x *Naive) Store(h prefix.Holder, tier event.Tier, run *event.Run) (added, sum uint64) {
	seq := run.Parent
	for i, local := range run.Locals {
		parent := seq
		if i == 0 && run.Root {
			parent, seq = 0, local&x.Mask
		} else {
			seq = hash.Next(seq, local) & x.Mask
		}
		b := x.blocks[seq]
		if b == nil {
			b = &block{local: local, parent: parent, base: run.Base + uint32(i), holders: map[prefix.Holder]event.TierMask{}}
			x.blocks[seq] = b
		}
		if m := b.holders[h]; !m.Has(tier) {
			b.holders[h] = m | tier.Mask()
			added++
			sum += event.Mix(seq, event.Salt(tier))
		}
	}
	x.count(h)[tier] += int(added)
	return added, sum
}

// Remove makes a holder have blocks in a tier no longer.
func (x *Naive) Remove(h prefix.Holder, tier event.Tier, seqs []uint64) (removed, sum uint64) {
	for _, seq := range seqs {
		if b := x.blocks[seq]; b != nil && b.holders[h].Has(tier) {
			removed++
			sum += event.Mix(seq, event.Salt(tier))
			x.drop(seq, b, h, tier.Mask())
		}
	}
	x.count(h)[tier] -= int(removed)
	return removed, sum
}

// Clear makes a holder have nothing in some tiers.
func (x *Naive) Clear(h prefix.Holder, tiers event.TierMask) {
	for seq, b := range x.blocks {
		if b.holders[h] != 0 {
			x.drop(seq, b, h, tiers)
		}
	}
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			x.count(h)[t] = 0
		}
	}
}

func (x *Naive) drop(seq uint64, b *block, h prefix.Holder, tiers event.TierMask) {
	if b.holders[h] &^= tiers; b.holders[h] == 0 {
		delete(b.holders, h)
	}
	if len(b.holders) == 0 {
		delete(x.blocks, seq)
	}
}

func (x *Naive) count(h prefix.Holder) *[event.Tiers]int {
	n := x.held[h]
	if n == nil {
		n = &[event.Tiers]int{}
		x.held[h] = n
	}
	return n
}

// Held returns how many blocks a holder has, by tier.
func (x *Naive) Held(h prefix.Holder) [event.Tiers]int { return *x.count(h) }

// Len returns how many different blocks are held.
func (x *Naive) Len() int { return len(x.blocks) }

// Match returns what each holder has of a prompt, if it has anything of its
// beginning.
func (x *Naive) Match(locals []uint64) map[prefix.Holder][event.Tiers]uint32 {
	type walk struct {
		at   uint32
		tier event.Tier
		ends [event.Tiers]uint32
	}
	walks := map[prefix.Holder]*walk{}
	seq := uint64(0)
	for i, local := range locals {
		if seq = hash.Next(seq, local) & x.Mask; i == 0 {
			seq = local & x.Mask
		}
		b := x.blocks[seq]
		if b == nil {
			break
		}
		alive := false
		for h, tiers := range b.holders {
			w := walks[h]
			if w == nil && i == 0 {
				w = &walk{}
				walks[h] = w
			}
			if w == nil || w.at != uint32(i) {
				continue
			}
			for w.tier < event.Tiers && !tiers.Has(w.tier) {
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
	out := map[prefix.Holder][event.Tiers]uint32{}
	for h, w := range walks {
		for ; w.tier < event.Tiers; w.tier++ {
			w.ends[w.tier] = w.at
		}
		if w.at > 0 {
			out[h] = w.ends
		}
	}
	return out
}

// Walk calls f for each block that a holder has, in no order.
func (x *Naive) Walk(h prefix.Holder, f func(prefix.Block, event.TierMask)) {
	for seq, b := range x.blocks {
		if m := b.holders[h]; m != 0 {
			f(prefix.Block{Seq: seq, Local: b.local, Parent: b.parent, Base: b.base}, m)
		}
	}
}
