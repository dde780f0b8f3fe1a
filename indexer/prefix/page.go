package prefix

import (
	"sync/atomic"
	"unsafe"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// pageSize is how many blocks a page has at most: positions are bytes.
const pageSize = 256

// page is one state of a run of blocks that follow each other in a prompt, and
// of who holds them. The writer makes a new state in each Update that changes
// anything; the one before stays for queries that have begun before.
type page struct {
	version uint64               // of the Update that made it
	before  atomic.Pointer[page] // the state before; nil if nobody should need it
	parent  uint64               // sequence hash of the block before the first one
	base    uint32               // position of the first block in its prompt
	born    bool                 // before this state there was nothing of it anywhere
	locals  []uint64
	seqs    []uint64
	spans   []span // sorted
	one     [1]span
}

// span says that a holder has the blocks from one position of a page up to and
// including another, in a tier. Spans of one holder and tier neither overlap nor
// touch. Sorted as numbers they are by tier, holder and position.
type span uint64

const (
	tierShift   = 62
	holderShift = 32
	holderMask  = 1<<(tierShift-holderShift) - 1
	fromShift   = 8
)

func spanOf(t event.Tier, h Holder, from, last int) span {
	return ownerOf(t, h) | span(from)<<fromShift | span(last)
}

// ownerOf returns the part of a span that says whose it is.
func ownerOf(t event.Tier, h Holder) span {
	return span(t)<<tierShift | span(h)<<holderShift
}

func (s span) tier() event.Tier { return event.Tier(s >> tierShift) }
func (s span) holder() Holder   { return Holder(s>>holderShift) & holderMask }
func (s span) owner() span      { return s >> holderShift << holderShift }
func (s span) from() int        { return int(uint8(s >> fromShift)) }
func (s span) last() int        { return int(uint8(s)) }

// search returns the index of the first span that is not below s.
func search(spans []span, s span) int {
	lo, hi := 0, len(spans)
	for hi-lo > 8 {
		mid := int(uint(lo+hi) / 2)
		if spans[mid] < s {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	for lo < hi && spans[lo] < s {
		lo++
	}
	return lo
}

// holds tells whether a holder has anything of the page.
func (p *page) holds(h Holder) bool {
	for t := range event.Tier(event.Tiers) {
		if i := search(p.spans, ownerOf(t, h)); i < len(p.spans) && p.spans[i].owner() == ownerOf(t, h) {
			return true
		}
	}
	return false
}

// next returns a state to be changed that follows p. more is how many spans may
// come to it.
func (p *page) next(version uint64, more int) *page {
	n := &page{version: version, parent: p.parent, base: p.base, locals: p.locals, seqs: p.seqs}
	if len(p.spans)+more > len(n.one) {
		n.spans = make([]span, len(p.spans), len(p.spans)+more)
		copy(n.spans, p.spans)
	} else {
		n.spans = append(n.one[:0], p.spans...)
	}
	return n
}

// grow makes room for more blocks.
func (p *page) grow(more int) {
	need := len(p.seqs) + more
	if need <= cap(p.seqs) {
		return
	}
	if len(p.seqs) > 0 { // it may grow again
		need = min(need+need/4, pageSize)
	}
	p.locals = append(make([]uint64, 0, need), p.locals...)
	p.seqs = append(make([]uint64, 0, need), p.seqs...)
}

// common returns how many hashes at the beginning are the same.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	const step = 32
	i := 0
	for i+step <= n && equal(a[i:i+step], b[i:i+step]) {
		i += step
	}
	for i < n && a[i] == b[i] {
		i++
	}
	return i
}

// equal compares as memory, which is several times faster than hash by hash.
func equal(a, b []uint64) bool {
	return unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(a))), 8*len(a)) ==
		unsafe.String((*byte)(unsafe.Pointer(unsafe.SliceData(b))), 8*len(b))
}

// pages are all pages by number. Readers see a slot at any time.
type pages struct {
	chunks atomic.Pointer[[]*chunk]
	// The writer's own.
	free  []uint32
	used  uint32
	state []pageState
}

const chunkPages = 512

type chunk [chunkPages]atomic.Pointer[page]

// pageState is what the writer remembers of a page.
type pageState struct {
	queued  bool   // waits to be swept
	check   bool   // may have blocks that nobody holds
	retired bool   // its blocks are elsewhere
	dead    uint16 // blocks that nobody holds, when last looked at
}

func (p *pages) get(id uint32) *page {
	return (*p.chunks.Load())[id/chunkPages][id%chunkPages].Load()
}

func (p *pages) set(id uint32, s *page) {
	(*p.chunks.Load())[id/chunkPages][id%chunkPages].Store(s)
}

// add returns the number of a new page.
func (p *pages) add(s *page) uint32 {
	var id uint32
	if n := len(p.free); n > 0 {
		id = p.free[n-1]
		p.free = p.free[:n-1]
	} else {
		if p.used == 0 {
			p.used, p.state = 1, make([]pageState, 1) // 0 is no page
		}
		id = p.used
		if id == maxPages {
			panic("prefix: more than 2^28 pages")
		}
		p.used++
		p.state = append(p.state, pageState{})
		var chunks []*chunk
		if at := p.chunks.Load(); at != nil {
			chunks = *at
		}
		if int(id)/chunkPages == len(chunks) {
			chunks = append(chunks[:len(chunks):len(chunks)], new(chunk))
			p.chunks.Store(&chunks)
		}
	}
	p.state[id] = pageState{}
	p.set(id, s)
	return id
}

// drop gives a page's number back.
func (p *pages) drop(id uint32) {
	p.set(id, nil)
	p.state[id] = pageState{}
	p.free = append(p.free, id)
}
