package cache

import (
	"slices"
	"time"

	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// naive is a Cache in the plainest form: lists that are searched, and a number
// for each use. It says its events as lines.
type naive struct {
	o     Options
	slots []*naiveSlot
	host  []*naiveHost
	moves []*naiveMove // transfers, in the order in which they began
	uses  int          // counts up with every use
	fore  int          // counts down: slots to be used before all others
	began map[bool]time.Time
	runs  int
	lines []line
}

type naiveSlot struct {
	seq    uint64
	named  int // when it was named, 0 if it has no block
	refs   int
	freed  int
	number int
}

type naiveHost struct {
	seq  uint64
	used int
	pins int
}

// naiveMove is a block on its way to the host, or a request's from there.
type naiveMove struct {
	seq uint64
	req *naiveRequest
	end time.Time
}

type naiveRequest struct {
	prompt    Prompt
	slots     []*naiveSlot
	committed int
	pinned    []*naiveHost
	hits      [2]int
	loading   bool
	done      bool
	ready     time.Time
}

// line is what an event says of one block.
type line struct {
	op     model.Op
	host   bool
	seq    uint64
	parent uint64
	first  uint32 // token of the block
}

func newNaive(o Options) *naive {
	n := &naive{o: o, began: map[bool]time.Time{}}
	n.empty()
	return n
}

func (n *naive) empty() {
	n.slots = nil
	for i := range n.o.Device {
		n.uses++
		n.slots = append(n.slots, &naiveSlot{freed: n.uses, number: i})
	}
}

// seqs recomputes the sequence hashes of a request's whole blocks.
func (n *naive) seqs(r *naiveRequest) []uint64 {
	p := r.prompt
	return hash.AppendSequence(nil, hash.AppendLocals(nil, p.Tokens, n.o.BlockSize, 0, hash.SeedOf(p.LoRA, p.Salt)))
}

func (n *naive) onDevice(seq uint64) *naiveSlot {
	var newest *naiveSlot
	for _, s := range n.slots {
		if s.named > 0 && s.seq == seq && (newest == nil || s.named > newest.named) {
			newest = s
		}
	}
	return newest
}

func (n *naive) onHost(seq uint64) *naiveHost {
	for _, h := range n.host {
		if h.seq == seq {
			return h
		}
	}
	return nil
}

func (n *naive) free() []*naiveSlot {
	var out []*naiveSlot
	for _, s := range n.slots {
		if s.refs == 0 {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b *naiveSlot) int { return a.freed - b.freed })
	return out
}

func (n *naive) start(now time.Time, p Prompt) (*naiveRequest, error) {
	n.tick(now)
	r := &naiveRequest{prompt: p, ready: now}
	seqs := n.seqs(r)
	need := (len(p.Tokens) + n.o.BlockSize - 1) / n.o.BlockSize
	if need > n.o.Device {
		return nil, ErrTooLong
	}
	i, unused := 0, 0
	for ; (i+1)*n.o.BlockSize < len(p.Tokens) && n.onDevice(seqs[i]) != nil; i++ {
		s := n.onDevice(seqs[i])
		if s.refs == 0 {
			unused++
		}
		r.slots = append(r.slots, s)
	}
	if need-i > len(n.free())-unused {
		return nil, ErrFull
	}
	r.hits[0], r.committed = i*n.o.BlockSize, i
	for _, s := range r.slots {
		s.refs++
	}
	for ; (i+1)*n.o.BlockSize < len(p.Tokens) && n.onHost(seqs[i]) != nil; i++ {
		h := n.onHost(seqs[i])
		n.uses++
		h.pins, h.used = h.pins+1, n.uses
		r.pinned = append(r.pinned, h)
		r.hits[1] += n.o.BlockSize
	}
	n.grow(r, need, now)
	n.runs++
	if len(r.pinned) > 0 {
		r.loading = true
		r.ready = n.queue(now, false, len(r.pinned))
		n.moves = append(n.moves, &naiveMove{req: r, end: r.ready})
		n.tick(now)
	} else {
		n.commit(now, r)
	}
	return r, nil
}

// queue returns when a transfer of so many blocks ends.
func (n *naive) queue(now time.Time, toHost bool, blocks int) time.Time {
	at := n.began[toHost]
	if at.Before(now) {
		at = now
	}
	n.began[toHost] = at.Add(time.Duration(blocks) * n.o.Transfer)
	return n.began[toHost]
}

func (n *naive) append(now time.Time, r *naiveRequest, tokens []uint32) error {
	n.tick(now)
	need := (len(r.prompt.Tokens) + len(tokens) + n.o.BlockSize - 1) / n.o.BlockSize
	if need > n.o.Device {
		return ErrTooLong
	}
	if need-len(r.slots) > len(n.free()) {
		return ErrFull
	}
	r.prompt.Tokens = slices.Concat(r.prompt.Tokens, tokens)
	n.grow(r, need, now)
	if !r.loading {
		n.commit(now, r)
	}
	return nil
}

func (n *naive) finish(now time.Time, r *naiveRequest) {
	n.tick(now)
	if r.loading {
		for _, h := range r.pinned {
			h.pins--
		}
		n.moves = slices.DeleteFunc(n.moves, func(m *naiveMove) bool { return m.req == r })
	}
	r.done = true
	n.runs--
	for _, s := range slices.Backward(r.slots) {
		if s.refs--; s.refs == 0 && s.named > 0 {
			n.uses++
			s.freed = n.uses
		} else if s.refs == 0 {
			n.fore--
			s.freed = n.fore
		}
	}
}

func (n *naive) clear(now time.Time) error {
	n.tick(now)
	if n.runs > 0 {
		return ErrBusy
	}
	n.empty()
	if n.o.ClearHost {
		n.host, n.moves = nil, nil
	}
	n.lines = append(n.lines, line{op: model.Clear})
	return nil
}

func (n *naive) grow(r *naiveRequest, need int, now time.Time) {
	for len(r.slots) < need {
		s := n.free()[0]
		s.refs = 1
		if s.named > 0 {
			s.named = 0
			n.lines = append(n.lines, line{op: model.Remove, seq: s.seq})
			if n.onDevice(s.seq) == nil && !n.o.WriteThrough {
				n.toHost(now, s.seq)
			}
		}
		r.slots = append(r.slots, s)
	}
}

func (n *naive) toHost(now time.Time, seq uint64) {
	moving := slices.ContainsFunc(n.moves, func(m *naiveMove) bool { return m.req == nil && m.seq == seq })
	if n.o.Host > 0 && n.onHost(seq) == nil && !moving {
		n.moves = append(n.moves, &naiveMove{seq: seq, end: n.queue(now, true, 1)})
	}
}

func (n *naive) commit(now time.Time, r *naiveRequest) {
	seqs := n.seqs(r)
	for i := r.committed; i < len(seqs); i++ {
		n.uses++
		r.slots[i].seq, r.slots[i].named = seqs[i], n.uses
		l := line{seq: seqs[i], first: r.prompt.Tokens[i*n.o.BlockSize]}
		if i > 0 {
			l.parent = seqs[i-1]
		}
		n.lines = append(n.lines, l)
		if n.o.WriteThrough {
			n.toHost(now, seqs[i])
		}
	}
	r.committed = len(seqs)
}

// tick ends the transfers one at a time, the earliest first, those from the host
// before those to it.
func (n *naive) tick(now time.Time) {
	for {
		var m *naiveMove
		for _, other := range n.moves {
			sooner := m != nil && (other.end.Before(m.end) || other.end.Equal(m.end) && other.req != nil && m.req == nil)
			if !other.end.After(now) && (m == nil || sooner) {
				m = other
			}
		}
		if m == nil {
			return
		}
		n.moves = slices.DeleteFunc(n.moves, func(other *naiveMove) bool { return other == m })
		if m.req == nil {
			n.arrived(m.seq)
			continue
		}
		for _, h := range m.req.pinned {
			h.pins--
		}
		m.req.loading = false
		n.commit(m.end, m.req)
	}
}

func (n *naive) arrived(seq uint64) {
	if len(n.host) == n.o.Host {
		var oldest *naiveHost
		for _, h := range n.host {
			if h.pins == 0 && (oldest == nil || h.used < oldest.used) {
				oldest = h
			}
		}
		if oldest == nil {
			return
		}
		n.host = slices.DeleteFunc(n.host, func(h *naiveHost) bool { return h == oldest })
		n.lines = append(n.lines, line{op: model.Remove, host: true, seq: oldest.seq})
	}
	n.uses++
	n.host = append(n.host, &naiveHost{seq: seq, used: n.uses})
	n.lines = append(n.lines, line{host: true, seq: seq})
}
