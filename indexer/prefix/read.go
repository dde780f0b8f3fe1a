package prefix

import "github.com/kvmesh/kvmesh/indexer/event"

// Block is one block that a holder has, as Reader.Walk tells of it.
type Block struct {
	Seq, Local uint64
	Parent     uint64 // sequence hash of the block before; nothing if Base is 0
	Base       uint32 // position in the prompt, in blocks
}

// Read calls f, which may read everything as it is at one moment. Updates wait
// meanwhile; queries don't.
func (x *Index) Read(f func(r Reader)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f(Reader{x})
}

// Reader reads an Index. It is valid while Read runs.
type Reader struct{ x *Index }

// LogSeq returns the log sequence that the Index is true for.
func (r Reader) LogSeq() uint64 { return r.x.moment.Load().logSeq }

// Held returns how many blocks a holder has, by tier.
func (r Reader) Held(h Holder) [event.Tiers]int { return r.x.members.list[h].held }

// Walk calls f for each block that a holder has, with the tiers that it has it
// in: page by page, in each from the beginning of the prompt on.
func (r Reader) Walk(h Holder, f func(Block, event.TierMask)) {
	m := r.x.members.list[h]
	m.pages = r.x.pagesOf(m.pages, h)
	for _, id := range m.pages {
		p := r.x.pages.get(id)
		var tiers [pageSize]event.TierMask
		for t := range event.Tier(event.Tiers) {
			owner := ownerOf(t, h)
			for i := search(p.spans, owner); i < len(p.spans) && p.spans[i].owner() == owner; i++ {
				for at := p.spans[i].from(); at <= p.spans[i].last(); at++ {
					tiers[at] |= t.Mask()
				}
			}
		}
		b := Block{Parent: p.parent, Base: p.base}
		for at, seq := range p.seqs {
			b.Seq, b.Local = seq, p.locals[at]
			if tiers[at] != 0 {
				f(b, tiers[at])
			}
			b.Parent = seq
			b.Base++
		}
	}
}
