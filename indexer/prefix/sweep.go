package prefix

import (
	"math/bits"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
)

const (
	// queueMax is how many pages may wait to be swept. Their states before
	// are kept meanwhile, for queries that began before.
	queueMax = 256
	// sweepStep is about how many blocks one step looks at, so that the
	// writer does not stop for long.
	sweepStep = 512
	// gapMin is from how many blocks on that nobody holds a page is divided:
	// below, the pages would take more than the blocks do.
	gapMin = 6
)

// Sweep does one step of giving back what nobody holds, and tells whether more is
// to be done. Updates do as much as they cause, except for dropped holders.
func (x *Index) Sweep() (more bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.sweep(sweepStep) {
		return true
	}
	if len(x.retired) > 0 {
		x.publish(x.moment.Load().logSeq)
		x.release()
	}
	return false
}

// sweep is Sweep, of about so many blocks.
func (x *Index) sweep(budget int) (more bool) {
	x.release()
	n := 0
	for ; n < len(x.queue) && budget > 0; n++ {
		budget -= x.tidy(x.queue[n])
	}
	x.queue = slices.Delete(x.queue, 0, n)
	for len(x.leaving) > 0 && budget > 0 {
		if h := x.leaving[0]; x.leave(h, &budget) {
			x.leaving = slices.Delete(x.leaving, 0, 1)
			x.members.list[h] = nil
			x.members.free = append(x.members.free, h)
			x.members.roster = nil
		}
	}
	return len(x.queue) > 0 || len(x.leaving) > 0
}

// release gives back the pages that queries can't be led to any more.
func (x *Index) release() {
	n := 0
	for n < len(x.retired) && x.retired[n].version < x.version {
		n++
	}
	if n == 0 {
		return
	}
	x.swept.Store(x.version)
	for _, r := range x.retired[:n] {
		x.pages.drop(r.page)
	}
	x.retired = slices.Delete(x.retired, 0, n)
}

// retire takes a page away whose blocks are elsewhere now. Queries that have been
// led to it may still read it.
func (x *Index) retire(id uint32) {
	x.pages.state[id].retired = true
	x.retired = append(x.retired, retired{id, x.version})
}

// tidy sweeps one page. It returns about how many blocks it looked at.
func (x *Index) tidy(id uint32) (cost int) {
	s := &x.pages.state[id]
	check := s.check
	s.queued, s.check = false, false
	p := x.pages.get(id)
	if p == nil || s.retired {
		delete(x.merges, id)
		return 1
	}
	p.before.Store(nil)
	cost = 2
	if check {
		cost += x.reclaim(id, p)
	}
	if next, ok := x.merges[id]; ok {
		delete(x.merges, id)
		cost += x.merge(id, next)
	}
	return cost
}

// extent is blocks of a page, from one position up to another.
type extent struct{ from, end int }

// reclaim gives back the blocks of a page that nobody holds.
func (x *Index) reclaim(id uint32, p *page) (cost int) {
	live, n := p.live()
	x.unheld += len(p.seqs) - n - int(x.pages.state[id].dead)
	x.pages.state[id].dead = uint16(len(p.seqs) - n)
	if n == len(p.seqs) {
		return len(p.spans) / 8
	}
	kept := extents(&live, len(p.seqs))
	if len(kept) == 1 && kept[0] == (extent{0, len(p.seqs)}) {
		return len(p.spans) / 8
	}
	x.swept.Store(x.version)
	x.warm(p.seqs)
	at := 0
	for _, k := range append(kept, extent{len(p.seqs), len(p.seqs)}) {
		for ; at < k.from; at++ {
			x.table.remove(p.seqs[at], placeOf(id, at))
		}
		at = k.end
	}
	x.unheld -= int(x.pages.state[id].dead)
	switch {
	case len(kept) == 0:
		x.pages.drop(id)
	case len(kept) == 1 && kept[0].from == 0:
		x.pages.set(id, p.cut(kept[0]))
		x.recount(id)
	default:
		for _, k := range kept {
			x.moveOut(id, p, k)
		}
		x.retire(id)
	}
	return len(p.seqs)
}

// recount counts the blocks of a page that nobody holds.
func (x *Index) recount(id uint32) {
	p := x.pages.get(id)
	_, n := p.live()
	x.pages.state[id].dead = uint16(len(p.seqs) - n)
	x.unheld += len(p.seqs) - n
}

// live returns the set of positions that somebody holds, and how many they are.
func (p *page) live() (set [pageSize / 64]uint64, n int) {
	end := len(p.seqs) - 1
	for _, s := range p.spans {
		if s.from() == 0 && s.last() == end {
			return set, len(p.seqs)
		}
	}
	for _, s := range p.spans {
		for at := s.from(); at <= s.last(); {
			word := at / 64
			to := min(s.last(), word*64+63)
			set[word] |= (^uint64(0) >> (63 - (to - at))) << (at % 64)
			at = to + 1
		}
	}
	for _, w := range set {
		n += bits.OnesCount64(w)
	}
	return set, n
}

// extents returns what is kept of a page: all that is held, and what is between
// if it is little.
func extents(live *[pageSize / 64]uint64, n int) []extent {
	var out []extent
	for at := range n {
		if live[at/64]>>(at%64)&1 == 0 {
			continue
		}
		if k := len(out); k > 0 && at-out[k-1].end < gapMin {
			out[k-1].end = at + 1
		} else {
			out = append(out, extent{at, at + 1})
		}
	}
	return out
}

// cut returns a state that has only some of the blocks. It is as good as p for
// every query that may read p, if nobody holds the others.
func (p *page) cut(k extent) *page {
	n := &page{version: p.version, born: p.born, parent: p.parent, base: p.base + uint32(k.from)}
	if k.from > 0 {
		n.parent = p.seqs[k.from-1]
	}
	n.locals, n.seqs = p.locals[k.from:k.end:k.end], p.seqs[k.from:k.end:k.end]
	if k.from > 0 || 4*(k.end-k.from) < 3*cap(p.seqs) {
		n.locals, n.seqs = slices.Clone(n.locals), slices.Clone(n.seqs)
	}
	n.spans = n.one[:0]
	for _, s := range p.spans {
		if s.last() >= k.from && s.from() < k.end {
			n.spans = append(n.spans, spanOf(s.tier(), s.holder(), s.from()-k.from, s.last()-k.from))
		}
	}
	return n
}

// moveOut makes some of the blocks of a page a page of their own.
func (x *Index) moveOut(from uint32, p *page, k extent) {
	n := p.cut(k)
	id := x.pages.add(n)
	for i, seq := range n.seqs {
		x.table.move(seq, placeOf(from, k.from+i), placeOf(id, i))
	}
	for _, s := range n.spans {
		x.joins(s.holder(), id)
	}
	x.recount(id)
}

// merge has a page take in the one that follows, if it still does.
func (x *Index) merge(a, b uint32) (cost int) {
	p, q := x.pages.get(a), x.pages.get(b)
	if p == nil || q == nil || x.pages.state[a].retired || x.pages.state[b].retired || x.pages.state[b].check {
		return 1
	}
	n := len(p.seqs)
	if n+len(q.seqs) > pageSize || q.parent != p.seqs[n-1] || q.base == 0 {
		return 1
	}
	m := &page{version: max(p.version, q.version), parent: p.parent, base: p.base}
	m.locals = slices.Concat(p.locals, q.locals)
	m.seqs = slices.Concat(p.seqs, q.seqs)
	spans := slices.Clone(p.spans)
	for _, s := range q.spans {
		spans = append(spans, spanOf(s.tier(), s.holder(), s.from()+n, s.last()+n))
	}
	slices.Sort(spans)
	joined := spans[:1]
	for _, s := range spans[1:] {
		if end := &joined[len(joined)-1]; end.owner() == s.owner() && end.last()+1 == s.from() {
			*end += span(s.last() - end.last())
		} else {
			joined = append(joined, s)
		}
	}
	m.spans = append(m.one[:0], joined...)
	x.pages.set(a, m)
	for i, seq := range q.seqs {
		x.table.move(seq, placeOf(b, i), placeOf(a, n+i))
	}
	for _, s := range q.spans {
		x.joins(s.holder(), a)
	}
	x.unheld -= int(x.pages.state[a].dead) + int(x.pages.state[b].dead)
	x.recount(a)
	x.retire(b)
	return n + len(q.seqs)
}

// leave takes a dropped holder out of pages, and tells whether it is in none any
// more.
func (x *Index) leave(h Holder, budget *int) bool {
	m := x.members.list[h]
	for len(m.pages) > 0 && *budget > 0 {
		id := m.pages[len(m.pages)-1]
		m.pages = m.pages[:len(m.pages)-1]
		p := x.pages.get(id)
		*budget--
		if p == nil || x.pages.state[id].retired || !p.holds(h) {
			continue
		}
		n := p.next(x.version, 0)
		if p.version == x.version {
			n.before.Store(p.before.Load())
			n.born = p.born
		} else {
			n.before.Store(p)
			p.before.Store(nil)
		}
		n.spans = slices.DeleteFunc(n.spans, func(s span) bool { return s.holder() == h })
		x.pages.set(id, n)
		x.enqueue(id, true)
		*budget -= x.tidyNow(id)
	}
	return len(m.pages) == 0
}

// tidyNow is tidy for a page that may be queued, and stays so.
func (x *Index) tidyNow(id uint32) int {
	s := &x.pages.state[id]
	s.check = false
	return x.reclaim(id, x.pages.get(id))
}

// Stats is what an Index takes.
type Stats struct {
	Blocks  int // different ones that somebody holds
	Entries int // (holder, tier, block)
	Pages   int
	Unheld  int // blocks that nobody holds, kept because they are between others
	Bytes   int // of memory, about
}

// Stats sweeps all that is to be swept, and counts.
func (x *Index) Stats() Stats {
	for x.Sweep() {
		continue
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	s := Stats{Blocks: x.table.len - x.unheld, Unheld: x.unheld, Bytes: x.table.bytes()}
	for id := uint32(1); id < x.pages.used; id++ {
		p := x.pages.get(id)
		if p == nil {
			continue
		}
		s.Pages++
		s.Bytes += 112 + 8*(cap(p.locals)+cap(p.seqs))
		if len(p.spans) > 1 {
			s.Bytes += 8 * cap(p.spans)
		}
	}
	for _, m := range x.members.list {
		if m == nil || m.gone {
			continue
		}
		s.Bytes += 4 * cap(m.pages)
		for t := range event.Tier(event.Tiers) {
			s.Entries += m.held[t]
		}
	}
	return s
}
