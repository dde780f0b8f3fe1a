// Package prefix holds which worker rank has which blocks of which prompts, and
// finds for a prompt who has how much of its beginning.
//
// A block is known by its sequence hash, which names the whole prompt up to it,
// so a block that many holders have is kept once. Blocks that follow each other
// are kept together, in pages of up to 256: their local hashes, so that a prompt
// is compared as memory; their sequence hashes; and for each holder and tier the
// spans that it has. A table finds the place of a block by its sequence hash, for
// prompts that fork and for blocks that engines name. Answers are exact whatever
// was removed in between.
//
// One goroutine at a time writes, and queries never wait for it: what changes is
// copied first, and a query reads everything as it was after one Update. What
// nobody holds any more is swept up in small steps.
package prefix

import (
	"sync"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// Holder is a number that stands for one worker rank, given by Writer.Add.
type Holder uint32

// Index is the blocks of one partition. Any number of goroutines may use it.
type Index struct {
	moment atomic.Pointer[moment]
	table  table
	pages  pages
	// swept is the version up to which blocks may have been taken out of the
	// table: a query that began before and finds nothing begins again.
	swept atomic.Uint64

	mu      sync.Mutex // the writer's; all that follows is guarded by it
	version uint64     // of the last Update
	writing uint64     // of the Update that runs; 0 if none does
	members members
	queue   []uint32          // pages to be swept
	merges  map[uint32]uint32 // pages that may take in the one that follows
	leaving []Holder          // dropped, but still in pages
	retired []retired         // pages that were moved away
	unheld  int               // blocks in pages that nobody holds, as far as they were swept
	seqs    []uint64          // scratch of ahead
	warmed  uint64            // of no meaning; it keeps warm's loads from being left out
	mask    uint64            // of sequence hashes; all ones but in tests
}

// moment is what a query reads first: which states of pages it may see, and the
// members at that time.
type moment struct {
	version uint64
	logSeq  uint64
	roster  *roster
}

// retired is a page whose blocks are in other pages since some version.
type retired struct {
	page    uint32
	version uint64
}

// New returns an empty Index.
func New() *Index {
	x := &Index{mask: ^uint64(0), merges: map[uint32]uint32{}}
	x.moment.Store(&moment{roster: &roster{}})
	return x
}

// Update calls f, alone with the Index. Queries see all of its changes or none,
// and from then on say that they are true for logSeq.
func (x *Index) Update(logSeq uint64, f func(w Writer)) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.writing = x.version + 1
	f(Writer{x})
	x.writing = 0
	x.publish(logSeq)
	if len(x.queue) > queueMax || len(x.leaving) > 0 {
		x.sweep(sweepStep)
	}
}

// publish makes what was written visible.
func (x *Index) publish(logSeq uint64) {
	x.version++
	x.moment.Store(&moment{version: x.version, logSeq: logSeq, roster: x.members.snapshot()})
}

// Writer changes an Index. It is valid while Update runs.
type Writer struct{ x *Index }

func (x *Index) next(parent, local uint64) uint64 { return hash.Next(parent, local) & x.mask }

// find returns the place of a block, 0 if there is none, as the writer sees it.
func (x *Index) find(seq uint64) (place, *page) {
	k := keyOf(seq)
	in := x.table.parts[k.part].Load()
	if in == nil {
		return 0, nil
	}
	// Every bucket may say that something went on: one round is enough.
	for b, n := in.home(k.tag), len(in.buckets); n > 0; b, n = in.next(b), n-1 {
		at := &in.buckets[b]
		for c := candidates(at.marks, k.mark); c != 0; c &= c - 1 {
			entry := at.slot[trailingByte(c)]
			if tagOf(entry) != k.tag {
				continue
			}
			p := placeIn(entry)
			if page := x.pages.get(p.page()); page.seqs[p.at()] == seq {
				return p, page
			}
		}
		if at.marks>>wentOn == 0 {
			break
		}
	}
	return 0, nil
}

// own returns a page's state to be changed. more is how many spans may come to
// it.
func (x *Index) own(id uint32, p *page, more int) *page {
	if p.version == x.writing {
		return p
	}
	n := p.next(x.writing, more)
	n.before.Store(p)
	p.before.Store(nil) // two states are enough for all but the slowest queries
	x.pages.set(id, n)
	x.enqueue(id, false)
	return n
}

// enqueue has a page swept; check says that it may have blocks that nobody holds.
func (x *Index) enqueue(id uint32, check bool) {
	s := &x.pages.state[id]
	s.check = s.check || check
	if !s.queued {
		s.queued = true
		x.queue = append(x.queue, id)
	}
}

// Store makes a holder have a run of blocks in a tier. It returns how many it did
// not have there yet, and the sum of their Mix.
func (w Writer) Store(h Holder, tier event.Tier, run *event.Run) (added, sum uint64) {
	x := w.x
	s := storing{x: x, h: h, tier: tier, run: run}
	for s.i < len(run.Locals) {
		seq := s.seq()
		if p, page := x.find(seq); p != 0 {
			s.known(p, page)
		} else {
			s.unknown(seq)
		}
	}
	x.members.list[h].held[tier] += int(s.added)
	return s.added, s.sum
}

// storing is one Store on its way.
type storing struct {
	x    *Index
	h    Holder
	tier event.Tier
	run  *event.Run

	i     int    // next block of the run
	prev  uint64 // sequence hash of the block before, if i > 0
	place place  // of it, if known

	added, sum uint64
}

// seq returns the sequence hash of the next block.
func (s *storing) seq() uint64 {
	local := s.run.Locals[s.i]
	switch {
	case s.i > 0:
		return s.x.next(s.prev, local)
	case s.run.Root:
		return local & s.x.mask
	}
	return s.x.next(s.run.Parent, local)
}

// known takes the blocks of the run that are in a page already, from p on.
func (s *storing) known(p place, page *page) {
	at := p.at()
	n := 1 + common(s.run.Locals[s.i+1:], page.locals[at+1:])
	if s.place != 0 && at == 0 {
		s.x.mergeable(s.place.page(), p.page(), len(page.seqs))
	}
	s.cover(p.page(), page, at, at+n-1)
	s.i += n
	s.prev = page.seqs[at+n-1]
	s.place = placeOf(p.page(), at+n-1)
}

// mergeable remembers that one page may follow another in the same page.
func (x *Index) mergeable(a, b uint32, blocks int) {
	if a != b && len(x.pages.get(a).seqs)+blocks <= pageSize {
		x.merges[a] = b
		x.enqueue(a, false)
	}
}

// unknown adds blocks of the run, the first of which is nowhere yet, to the page
// of the one before or to a new one.
func (s *storing) unknown(seq uint64) {
	x, run := s.x, s.run
	if s.i == 0 && !run.Root {
		s.prev = run.Parent
		s.place, _ = x.find(run.Parent)
	}
	left := len(run.Locals) - s.i
	var p *page
	id := s.place.page()
	if s.place != 0 {
		if p = x.pages.get(id); s.place.at() != len(p.seqs)-1 || len(p.seqs) == pageSize {
			p = nil
		}
	}
	if p != nil {
		p = x.own(id, p, 1)
	} else {
		p = &page{version: x.writing, base: run.Base + uint32(s.i), born: true}
		p.spans = p.one[:0]
		if s.i > 0 || !run.Root {
			p.parent = s.prev
		}
		id = x.pages.add(p)
		x.enqueue(id, false)
	}
	left = min(left, pageSize-len(p.seqs))
	first := len(p.seqs)
	p.grow(left)
	seqs := x.ahead(seq, run.Locals[s.i+1:s.i+left])
	for n := 1; ; n++ {
		x.table.insert(seq, placeOf(id, len(p.seqs)))
		p.locals = append(p.locals, run.Locals[s.i])
		p.seqs = append(p.seqs, seq)
		s.prev = seq
		s.i++
		if n == left {
			break
		}
		seq = seqs[n]
		if known, _ := x.find(seq); known != 0 {
			break
		}
	}
	s.place = placeOf(id, len(p.seqs)-1)
	s.cover(id, p, first, len(p.seqs)-1)
}

// ahead returns the sequence hash of a block and of those that follow it, given
// by their local hashes, and warms them.
func (x *Index) ahead(seq uint64, locals []uint64) []uint64 {
	seqs := append(x.seqs[:0], seq)
	for _, l := range locals {
		seq = x.next(seq, l)
		seqs = append(seqs, seq)
	}
	x.seqs = seqs
	x.warm(seqs)
	return seqs
}

// warm has the processor fetch where blocks are or would be in the table, all at
// once. One after the other, changing them would mostly be waiting for memory.
func (x *Index) warm(seqs []uint64) {
	for _, seq := range seqs {
		x.warmed ^= x.table.marks(seq)
	}
}

// cover makes the holder have the blocks of a page from one position up to and
// including another.
func (s *storing) cover(id uint32, p *page, from, last int) {
	x, owner := s.x, ownerOf(s.tier, s.h)
	i := search(p.spans, owner|span(from)<<fromShift)
	if i > 0 && p.spans[i-1].owner() == owner && p.spans[i-1].last() >= from-1 {
		i--
	}
	if i < len(p.spans) {
		if at := p.spans[i]; at.owner() == owner && at.from() <= from && at.last() >= last {
			return
		}
	}
	p = x.own(id, p, 1)
	j, at := i, from
	lo, hi := from, last
	for ; j < len(p.spans) && p.spans[j].owner() == owner && p.spans[j].from() <= last+1; j++ {
		f, l := p.spans[j].from(), p.spans[j].last()
		if f > at {
			s.count(p.seqs[at:f])
		}
		at = max(at, l+1)
		lo, hi = min(lo, f), max(hi, l)
	}
	if at <= last {
		s.count(p.seqs[at : last+1])
	}
	merged := owner | span(lo)<<fromShift | span(hi)
	if j > i {
		p.spans[i] = merged
		p.spans = append(p.spans[:i+1], p.spans[j:]...)
	} else {
		p.spans = insert(p.spans, i, merged)
		x.joins(s.h, id)
	}
	if x.pages.state[id].dead > 0 {
		x.enqueue(id, true)
	}
}

func insert(spans []span, i int, s span) []span {
	spans = append(spans, 0)
	copy(spans[i+1:], spans[i:])
	spans[i] = s
	return spans
}

func (s *storing) count(seqs []uint64) {
	s.added += uint64(len(seqs))
	salt := event.Salt(s.tier)
	for _, seq := range seqs {
		s.sum += event.Mix(seq, salt)
	}
}

// Remove makes a holder have blocks in a tier no longer. It returns how many it
// had, and the sum of their Mix.
func (w Writer) Remove(h Holder, tier event.Tier, seqs []uint64) (removed, sum uint64) {
	x := w.x
	for i := 0; i < len(seqs); {
		p, page := x.find(seqs[i])
		i++
		if p == 0 {
			continue
		}
		from, last := p.at(), p.at()
		for i < len(seqs) { // engines evict runs, mostly from the end on
			switch seq := seqs[i]; {
			case from > 0 && page.seqs[from-1] == seq:
				from--
				i++
				continue
			case last+1 < len(page.seqs) && page.seqs[last+1] == seq:
				last++
				i++
				continue
			}
			break
		}
		n, s := x.uncover(h, tier, p.page(), page, from, last)
		removed += n
		sum += s
	}
	x.members.list[h].held[tier] -= int(removed)
	return removed, sum
}

// uncover makes a holder have the blocks of a page from one position up to and
// including another no longer.
func (x *Index) uncover(h Holder, tier event.Tier, id uint32, p *page, from, last int) (removed, sum uint64) {
	owner := ownerOf(tier, h)
	i := search(p.spans, owner|span(from)<<fromShift)
	if i > 0 && p.spans[i-1].owner() == owner && p.spans[i-1].last() >= from {
		i--
	}
	if i == len(p.spans) || p.spans[i].owner() != owner || p.spans[i].from() > last {
		return 0, 0
	}
	p = x.own(id, p, 1)
	x.enqueue(id, true)
	var rest [2]span
	salt := event.Salt(tier)
	n, j := 0, i
	for ; j < len(p.spans) && p.spans[j].owner() == owner && p.spans[j].from() <= last; j++ {
		f, l := p.spans[j].from(), p.spans[j].last()
		if f < from {
			rest[n] = spanOf(tier, h, f, from-1)
			n++
		}
		if l > last {
			rest[n] = spanOf(tier, h, last+1, l)
			n++
		}
		gone := p.seqs[max(f, from) : min(l, last)+1]
		removed += uint64(len(gone))
		for _, seq := range gone {
			sum += event.Mix(seq, salt)
		}
	}
	if n > j-i { // one became two
		p.spans[i] = rest[0]
		p.spans = insert(p.spans, i+1, rest[1])
		return removed, sum
	}
	copy(p.spans[i:], rest[:n])
	p.spans = append(p.spans[:i+n], p.spans[j:]...)
	return removed, sum
}

// Clear makes a holder have nothing in some tiers. To empty all of them, dropping
// the holder and adding another is faster: queries see that at once.
func (w Writer) Clear(h Holder, tiers event.TierMask) {
	x := w.x
	m := x.members.list[h]
	for _, id := range m.pages {
		p := x.pages.get(id)
		for t := range event.Tier(event.Tiers) {
			if p == nil || x.pages.state[id].retired || !tiers.Has(t) {
				continue
			}
			x.uncover(h, t, id, p, 0, len(p.seqs)-1)
			p = x.pages.get(id)
		}
	}
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			m.held[t] = 0
		}
	}
}
