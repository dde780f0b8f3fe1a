package residency

import (
	"cmp"
	"maps"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// checkpointKnown is how many of the blocks that no tier holds a checkpoint has
// at most: those that left last, which a store may still name.
const checkpointKnown = 1024

// Chunk is what one message of a checkpoint holds: operations, one after the
// other.
type Chunk struct {
	Ops   []byte
	Count int
}

// Checkpoint writes the whole state as the chunks of a checkpoint, each of
// about limit bytes at most. The last one ends with the operations in tail and
// with the digest. The State stays as it is.
func (s *State) Checkpoint(limit int, tail *Ops) []Chunk {
	pieces := s.pieces()
	var ops Ops
	s.extras(&ops)
	base := len(ops.Buf)
	ops.Buf = append(ops.Buf, tail.Buf...)
	for _, end := range tail.Ends {
		ops.Ends = append(ops.Ends, base+end)
	}
	d := s.Digests()
	ops.Add(func(b []byte) []byte { return event.AppendDigest(b, &d) })
	return pack(pieces, &ops, limit)
}

// piece is one run of a checkpoint, as bytes.
type piece struct {
	pool *pool
	run  []byte
}

// pieces writes all blocks that have copies, pool by pool.
func (s *State) pieces() []piece {
	var out []piece
	for i := range s.pools {
		pool := uint8(i + 1)
		var ids []uint32
		for id := uint32(1); id < s.cells.n; id++ {
			if c := s.cells.at(id); c.k > 0 && c.flags&flagParked == 0 && s.copies(id, pool) > 0 {
				ids = append(ids, id)
			}
		}
		s.chains(ids, func(run event.Run, engine []event.EngineHash) {
			run.Group = s.pools[i].group
			out = append(out, piece{&s.pools[i], event.AppendRun(nil, run, engine)})
		})
	}
	return out
}

// chains calls f with placed blocks as runs, each as long as it gets. A run
// comes before those that go on from a block of it.
func (s *State) chains(ids []uint32, f func(event.Run, []event.EngineHash)) {
	slices.SortStableFunc(ids, func(a, b uint32) int { return cmp.Compare(s.cells.at(a).base, s.cells.at(b).base) })
	type chain struct {
		ids  []uint32
		size int // bytes
	}
	var chains []chain
	open := map[uint64]int{} // sequence hash of a chain's last block → number of the chain
	for _, id := range ids {
		head := s.cells.at(id)
		name := s.engineHash(id)
		more := size(&name, int(head.k))
		n, ok := open[head.parent]
		if ok && head.flags&flagRoot == 0 && s.cells.at(chains[n].ids[0]).k == head.k && chains[n].size+more <= maxSize {
			delete(open, head.parent)
		} else {
			n = len(chains)
			chains = append(chains, chain{})
		}
		chains[n].ids = append(chains[n].ids, id)
		chains[n].size += more
		open[s.last(id).seq] = n
	}
	var locals []uint64
	var engine []event.EngineHash
	for _, c := range chains {
		head := s.cells.at(c.ids[0])
		locals, engine = locals[:0], engine[:0]
		for _, id := range c.ids {
			for j := range uint32(head.k) {
				locals = append(locals, s.cells.at(id+j).local)
			}
			engine = append(engine, s.engineHash(id))
		}
		run := event.Run{Root: head.flags&flagRoot != 0, Parent: head.parent, Base: head.base, Locals: locals}
		run.ParentName, run.HasParentName = s.parentName(c.ids[0])
		f(run, engine)
	}
}

// extras writes what only a bridge needs: groups, parked blocks, numbers of
// copies, and the blocks that no tier holds.
func (s *State) extras(out *Ops) {
	s.emit.begin(s, out)
	for _, index := range slices.Sorted(maps.Keys(s.groups)) {
		s.emit.group(index, s.groups[index])
	}
	s.parkedChains()
	for id := uint32(1); id < s.cells.n; id++ {
		if s.cells.at(id).k > 0 {
			s.eachCopy(id, func(pool uint8, n uint32) {
				if n > 1 {
					s.emit.copies(id, pool, n)
				}
			})
		}
	}
	s.emit.flush()

	var ids []uint32
	for id := s.newest; id != 0 && len(ids) < checkpointKnown; id = s.cells.at(id).copies[older] {
		ids = append(ids, id)
	}
	s.chains(ids, func(run event.Run, engine []event.EngineHash) {
		out.Add(func(b []byte) []byte { return event.AppendKnown(b, run, engine) })
	})
}

// parkedChains writes the parked blocks, pool by pool, a parent before its
// children.
func (s *State) parkedChains() {
	var tops, all []uint32 // tops: parked blocks whose parent is not parked too
	for id, parent := range s.parents {
		all = append(all, id)
		if h := parent.hash(); s.find(&h) == 0 {
			tops = append(tops, id)
		}
	}
	slices.Sort(tops)
	slices.Sort(all)
	order, seen := make([]uint32, 0, len(all)), make(map[uint32]bool, len(all))
	for _, from := range [][]uint32{tops, all} { // in no chain are those that wait for each other
		for stack := slices.Clone(from); len(stack) > 0; {
			id := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			if !seen[id] {
				seen[id] = true
				order = append(order, id)
				stack = append(stack, s.waiting[s.key(id)]...)
			}
		}
	}
	for i := range s.pools {
		pool := uint8(i + 1)
		for _, id := range order {
			if s.copies(id, pool) > 0 {
				s.emit.parked(id, pool)
			}
		}
	}
}

// pack divides a checkpoint into chunks of about limit bytes.
func pack(pieces []piece, ops *Ops, limit int) []Chunk {
	type chunk struct {
		pieces  []piece
		ops     []byte
		opCount int
		size    int
	}
	chunks := []chunk{{}}
	room := func(n int) *chunk {
		c := &chunks[len(chunks)-1]
		if c.size > 0 && c.size+n > limit {
			chunks = append(chunks, chunk{})
			c = &chunks[len(chunks)-1]
		}
		c.size += n
		return c
	}
	for _, p := range pieces {
		c := room(len(p.run) + 32)
		c.pieces = append(c.pieces, p)
	}
	at := 0
	for _, end := range ops.Ends {
		c := room(end - at)
		c.ops = append(c.ops, ops.Buf[at:end]...)
		c.opCount++
		at = end
	}
	out := make([]Chunk, len(chunks))
	for i, c := range chunks {
		b := event.AppendCheckpoint(nil, i, len(chunks), event.Device, "", 0)
		n := 1
		for from := 0; from < len(c.pieces); n++ {
			to := from + 1
			p := c.pieces[from].pool
			for to < len(c.pieces) && c.pieces[to].pool.tier == p.tier && c.pieces[to].pool.owner == p.owner {
				to++
			}
			b = event.AppendCheckpoint(b, i, len(chunks), p.tier, p.owner, to-from)
			for _, p := range c.pieces[from:to] {
				b = append(b, p.run...)
			}
			from = to
		}
		out[i] = Chunk{Ops: append(b, c.ops...), Count: n + c.opCount}
	}
	return out
}
