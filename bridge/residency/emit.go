package residency

import "github.com/kvmesh/kvmesh/indexer/event"

// Ops collects operations of the log as bytes.
type Ops struct {
	// Buf holds the operations, one after the other.
	Buf []byte
	// Ends holds the offset behind each.
	Ends []int
	// Join lets blocks that follow those of the last operation be added to it,
	// though they are of another event. Answers grow block by block, and many
	// operations of one block cost readers more than one of many.
	Join bool

	chain chain
}

// chain is where the blocks of the last operation end, if it stores any.
type chain struct {
	ops   int // the operation is the last one of so many; 0: there is none
	pool  uint8
	split uint16
	block uint32 // the last engine block
	seq   uint64 // and its sequence hash
}

// Reset empties the list and keeps its memory.
func (o *Ops) Reset() { o.Buf, o.Ends, o.chain = o.Buf[:0], o.Ends[:0], chain{} }

// Len returns the number of operations.
func (o *Ops) Len() int { return len(o.Ends) }

// Add appends one operation, which f appends to its argument.
func (o *Ops) Add(f func(b []byte) []byte) {
	o.Buf = f(o.Buf)
	o.end()
}

// Shift drops the first n operations.
func (o *Ops) Shift(n int) {
	if n == 0 {
		return
	}
	at := o.Ends[n-1]
	o.Buf = append(o.Buf[:0], o.Buf[at:]...)
	o.Ends = append(o.Ends[:0], o.Ends[n:]...)
	for i := range o.Ends {
		o.Ends[i] -= at
	}
	if o.chain.ops -= n; o.chain.ops <= 0 {
		o.chain = chain{}
	}
}

// end closes the operation that the caller has appended to Buf.
func (o *Ops) end() { o.Ends = append(o.Ends, len(o.Buf)) }

// MaxOp is how many bytes one operation takes at most, so that any operation fits
// a message.
const MaxOp = 40 << 10

// maxSize is what an operation is filled up to: MaxOp less what is not hashes. One
// engine block of maxSplit index blocks fits.
const maxSize = MaxOp - 1<<10

// size returns how many bytes an engine block takes in an operation, with k hashes
// of 8 bytes beside its name.
func size(h *event.EngineHash, k int) int { return 8*k + 8 + len(h.Name) }

// emitter writes changes as operations and joins those of a kind that follow
// each other: a chain of blocks is one operation, and so is a list of removals.
type emitter struct {
	s   *State
	out *Ops // nil: nothing is written

	kind   event.OpKind // what is being collected; 0 is nothing
	pool   uint8
	split  uint16    // stored, parked: index blocks an engine block
	run    event.Run // stored, parked
	tail   uint64    // stored: sequence hash of the last block
	block  uint32    // stored: the last engine block
	before uint32    // stored: the engine block before the first one
	parent engineKey // parked: the missing parent
	last   engineKey // parked: name of the last block
	hashes []uint64
	engine []event.EngineHash
	counts []uint64
	size   int // bytes of them
}

func (e *emitter) begin(s *State, out *Ops) {
	e.s, e.out, e.kind = s, out, 0
}

// open makes kind the one that is collected for a pool, with room for n bytes
// more, and tells whether it was so already.
func (e *emitter) open(kind event.OpKind, pool uint8, n int) bool {
	if e.kind == kind && e.pool == pool && e.size+n <= maxSize {
		e.size += n
		return true
	}
	e.flush()
	e.kind, e.pool, e.size = kind, pool, n
	return false
}

// stored tells that a placed block has its first copy in a pool.
func (e *emitter) stored(id uint32, pool uint8) {
	if e.out == nil {
		return
	}
	head := e.s.cells.at(id)
	root := head.flags&flagRoot != 0
	name := e.s.engineHash(id)
	n := size(&name, int(head.k))
	if !e.open(event.OpStored, pool, n) || root || head.parent != e.tail || head.k != e.split {
		e.flush()
		e.kind, e.pool, e.split, e.size = event.OpStored, pool, head.k, n
		e.run = event.Run{Root: root, Parent: head.parent, Base: head.base}
		e.run.ParentName, e.run.HasParentName = e.s.parentName(id)
		e.before = head.before
	}
	e.block = id
	for j := range uint32(head.k) {
		c := e.s.cells.at(id + j)
		e.hashes = append(e.hashes, c.local)
		e.tail = c.seq
	}
	e.engine = append(e.engine, name)
}

// parked tells that a block without a place has its first copy in a pool.
func (e *emitter) parked(id uint32, pool uint8) {
	if e.out == nil {
		return
	}
	head, parent := e.s.cells.at(id), e.s.parents[id]
	name := e.s.engineHash(id)
	n := size(&name, int(head.k))
	if !e.open(event.OpParked, pool, n) || parent != e.last || head.k != e.split {
		e.flush()
		e.kind, e.pool, e.split, e.size = event.OpParked, pool, head.k, n
		e.parent = parent
	}
	for j := range uint32(head.k) {
		e.hashes = append(e.hashes, e.s.cells.at(id+j).local)
	}
	e.engine = append(e.engine, name)
	e.last = e.s.key(id)
}

// removed tells that the last copy of an engine block in a pool is gone. It is
// called once for each of the block's cells; gone says that nothing else holds
// the cell's sequence hash in the pool's tier.
func (e *emitter) removed(id uint32, pool uint8, gone bool) {
	if e.out == nil {
		return
	}
	c := e.s.cells.at(id)
	if c.back != 0 {
		e.open(event.OpRemoved, pool, 8)
	} else {
		name := e.s.engineHash(id)
		e.open(event.OpRemoved, pool, size(&name, 1))
		e.engine = append(e.engine, name)
	}
	if gone {
		e.hashes = append(e.hashes, c.seq)
	}
}

// copies tells how many copies of a block a pool has.
func (e *emitter) copies(id uint32, pool uint8, n uint32) {
	if e.out == nil {
		return
	}
	name := e.s.engineHash(id)
	e.open(event.OpCopies, pool, size(&name, 1))
	e.engine = append(e.engine, name)
	e.counts = append(e.counts, uint64(n))
}

func (e *emitter) cleared(tiers event.TierMask, owner string) {
	if e.out == nil {
		return
	}
	e.flush()
	e.out.Add(func(b []byte) []byte { return event.AppendCleared(b, tiers, owner) })
}

func (e *emitter) group(index int64, main bool) {
	if e.out == nil {
		return
	}
	e.flush()
	e.out.Add(func(b []byte) []byte { return event.AppendGroupKind(b, index, main) })
}

// flush writes what has been collected.
func (e *emitter) flush() {
	if len(e.hashes)+len(e.engine) == 0 {
		e.kind = 0
		return
	}
	p := &e.s.pools[e.pool-1]
	b := e.out.Buf
	switch e.kind {
	case event.OpStored:
		e.run.Locals, e.run.Group = e.hashes, p.group
		joined := false
		if b, joined = e.extend(b); !joined {
			b = event.AppendStored(b, p.tier, p.owner, e.run, e.engine)
		}
	case event.OpParked:
		b = event.AppendParked(b, p.tier, p.owner, p.group, e.parent.hash(), e.hashes, e.engine)
	case event.OpRemoved:
		b = event.AppendRemoved(b, p.tier, p.owner, e.hashes, p.group, e.engine)
	case event.OpCopies:
		b = event.AppendCopies(b, p.tier, p.owner, p.group, e.engine, e.counts)
	}
	e.out.Buf = b
	e.out.end()
	if e.kind == event.OpStored {
		e.out.chain = chain{ops: e.out.Len(), pool: e.pool, split: e.split, block: e.block, seq: e.tail}
	}
	e.kind = 0
	e.hashes, e.engine, e.counts = e.hashes[:0], e.engine[:0], e.counts[:0]
}

// joinMax is how many bytes an operation has that blocks of another event are added
// to: adding copies it.
const joinMax = 4 << 10

// extend adds the run that has been collected to the operation before, if it goes on
// there, and takes that out of the list: it ends anew.
func (e *emitter) extend(b []byte) ([]byte, bool) {
	o, c := e.out, &e.out.chain
	n := o.Len()
	if !o.Join || n == 0 || c.ops != n || c.pool != e.pool || c.split != e.split ||
		e.run.Root || e.run.HasParentName || e.run.Parent != c.seq || e.before != c.block {
		return b, false
	}
	start := 0
	if n > 1 {
		start = o.Ends[n-2]
	}
	if len(b)-start > joinMax {
		return b, false
	}
	b, joined := event.ExtendStored(b, start, e.hashes, e.engine)
	if joined {
		o.Ends = o.Ends[:n-1]
	}
	return b, joined
}
