package prefix

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Match is how much of a prompt a holder has, in blocks. The tiers continue each
// other: Ends[t] is how far one gets with the tiers up to t.
type Match struct {
	Holder Holder
	Ends   [event.Tiers]uint32
}

// Longest returns how far one gets with all tiers.
func (m *Match) Longest() uint32 { return m.Ends[event.Tiers-1] }

// Query is the memory of a query, to be used again for the next one. The zero
// Query is ready. One goroutine may use it at a time.
type Query struct {
	matches []Match
	index   []uint32 // by Holder: where in matches it is, if it is there
	roster  *roster
}

// Source returns whom a holder stands for, of the last query.
func (q *Query) Source(h Holder) *event.Source { return q.roster.sources[h] }

func trailingByte(set uint64) int { return bits.TrailingZeros64(set) / 8 }

// tries is how often a query begins again before it has the writer wait.
const tries = 64

// Match returns what each holder that is shown has of a prompt, given by its
// local hashes, if it has anything of its beginning; in no order, and valid until
// the next use of q. It is true for the returned log sequence.
func (x *Index) Match(q *Query, locals []uint64) (matches []Match, logSeq uint64) {
	for range tries {
		m := x.moment.Load()
		if q.match(x, m, locals) {
			return q.matches, m.logSeq
		}
	}
	x.mu.Lock() // no Update and no Sweep: nothing can be in the way
	defer x.mu.Unlock()
	m := x.moment.Load()
	q.match(x, m, locals)
	return q.matches, m.logSeq
}

// match answers as of a moment. It returns false if that is over: what it would
// need is not kept any more.
func (q *Query) match(x *Index, m *moment, locals []uint64) bool {
	q.matches, q.roster = q.matches[:0], m.roster
	if len(locals) == 0 {
		return true
	}
	if n := len(m.roster.sources); len(q.index) < n {
		q.index = make([]uint32, n+n/2)
	}
	seq := locals[0] & x.mask
	for pos := 0; ; {
		p, at, ok := x.look(seq, m.version)
		if !ok {
			return false
		}
		if p == nil {
			return true
		}
		n := 1 + common(locals[pos+1:], p.locals[at+1:])
		more := false
		if pos == 0 {
			more = q.begin(p, at, n)
		} else {
			more = q.proceed(p, at, n, pos)
		}
		if pos += n; !more || pos == len(locals) {
			return true
		}
		seq = x.next(p.seqs[at+n-1], locals[pos])
	}
}

// look finds a block as of a version: the page that it is in and where. It
// returns ok = false if that can't be told any more.
func (x *Index) look(seq, version uint64) (p *page, at int, ok bool) {
	k := keyOf(seq)
	if in := x.table.parts[k.part].Load(); in != nil {
		for b, n := in.home(k.tag), len(in.buckets); n > 0; b, n = in.next(b), n-1 {
			bucket := &in.buckets[b]
			marks := atomic.LoadUint64(&bucket.marks)
			for c := candidates(marks, k.mark); c != 0; c &= c - 1 {
				entry := atomic.LoadUint64(&bucket.slot[trailingByte(c)])
				if tagOf(entry) != k.tag {
					continue
				}
				place := placeIn(entry)
				p, ok := x.pageAt(place.page(), version)
				if !ok {
					return nil, 0, false
				}
				if at := place.at(); p != nil && at < len(p.seqs) && p.seqs[at] == seq {
					return p, at, true
				}
			}
			if marks>>wentOn == 0 {
				break
			}
		}
	}
	return nil, 0, x.swept.Load() <= version
}

// pageAt returns the state of a page as of a version, nil if it did not exist.
// It returns ok = false if that is not kept any more.
func (x *Index) pageAt(id uint32, version uint64) (p *page, ok bool) {
	p = x.pages.get(id)
	for p != nil && p.version > version {
		if p.born {
			return nil, true
		}
		if p = p.before.Load(); p == nil {
			return nil, false
		}
	}
	return p, true
}

// begin takes the first blocks of the prompt: n blocks of a page from at on. It
// tells whether any holder has all of them.
func (q *Query) begin(p *page, at, n int) (more bool) {
	shown := q.roster.shown
	q.matches = slices.Grow(q.matches, min(len(p.spans), len(q.roster.sources)))
	matches := q.matches[:cap(q.matches)]
	i, k := 0, 0
	for ; i < len(p.spans); i++ { // the device's come first, one a holder at most here
		s := p.spans[i]
		if s>>tierShift != 0 {
			break
		}
		if s.from() > at || s.last() < at {
			continue
		}
		h := s.holder()
		if shown[h/64]>>(h%64)&1 == 0 {
			continue
		}
		end := uint32(min(s.last()+1-at, n))
		q.index[h] = uint32(k)
		m := &matches[k] // field by field: a literal is made elsewhere and copied
		m.Holder = h
		m.Ends[0], m.Ends[1], m.Ends[2], m.Ends[3] = end, end, end, end
		k++
		more = more || int(end) == n
	}
	matches = matches[:k]
	q.matches = matches
	for _, s := range p.spans[i:] {
		h := s.holder()
		if m := q.find(h); m != nil {
			more = m.extend(s, at, n, 0) || more
			continue
		}
		if s.from() > at || s.last() < at || !q.roster.shows(h) {
			continue
		}
		end := min(s.last()+1-at, n)
		q.index[h] = uint32(len(q.matches))
		q.matches = append(q.matches, Match{Holder: h})
		q.matches[len(q.matches)-1].reach(s.tier(), uint32(end))
		more = more || end == n
	}
	return more
}

// proceed takes n more blocks, those from at on of a page. pos of the prompt have
// been taken.
func (q *Query) proceed(p *page, at, n, pos int) (more bool) {
	for _, s := range p.spans {
		if m := q.find(s.holder()); m != nil {
			more = m.extend(s, at, n, pos) || more
		}
	}
	return more
}

// find returns what there is for a holder.
func (q *Query) find(h Holder) *Match {
	if int(h) >= len(q.index) {
		return nil // newer than the moment
	}
	if i := q.index[h]; int(i) < len(q.matches) && q.matches[i].Holder == h {
		return &q.matches[i]
	}
	return nil
}

// extend goes on with the blocks of a span, where it goes on at all: n blocks of
// the page stand, from at on, for those of the prompt from pos on. It tells
// whether the holder has all of them.
func (m *Match) extend(s span, at, n, pos int) bool {
	t, end := s.tier(), int(m.Longest())
	if end < pos || end >= pos+n || m.Ends[t] != m.Longest() {
		return false // lost before, through already, or in a lower tier by now
	}
	if now := at + end - pos; s.from() > now || s.last() < now {
		return false
	}
	to := min(s.last()+1-at, n)
	m.reach(t, uint32(pos+to))
	return to == n
}

// reach sets how far one gets with a tier and those below.
func (m *Match) reach(t event.Tier, end uint32) {
	for ; t < event.Tiers; t++ {
		m.Ends[t] = end
	}
}
