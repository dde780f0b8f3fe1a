package prefix

// NewMasked returns an Index that takes a mask of every sequence hash: a narrow
// one forces collisions.
func NewMasked(mask uint64) *Index {
	x := New()
	x.mask = mask
	return x
}

// Check panics if what the Index knows of itself is not so.
func (x *Index) Check() {
	x.mu.Lock()
	defer x.mu.Unlock()
	entries, unheld := 0, 0
	for id := uint32(1); id < x.pages.used; id++ {
		p := x.pages.get(id)
		if p == nil || x.pages.state[id].retired {
			continue
		}
		entries += len(p.seqs)
		unheld += int(x.pages.state[id].dead)
		for at, seq := range p.seqs {
			if found, _ := x.find(seq); found != placeOf(id, at) {
				panic("a block is not found where it is")
			}
		}
		for i, s := range p.spans {
			if s.last() >= len(p.seqs) || s.from() > s.last() {
				panic("a span is not in its page")
			}
			if i > 0 && (s <= p.spans[i-1] || s.owner() == p.spans[i-1].owner() && s.from() <= p.spans[i-1].last()+1) {
				panic("spans are not in order, or touch")
			}
		}
	}
	if entries != x.table.len || unheld != x.unheld {
		panic("the counts are wrong")
	}
}
