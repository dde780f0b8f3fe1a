package cache

// device is the slots of a device, each of which has one block or none. A block
// may have copies in several slots. Slots that nobody references are in a list,
// the one to be used next first.
type device struct {
	slots []slot
	heads map[uint64]int32 // newest slot with a block, by sequence hash
	first int32            // of the list of free slots; -1: none
	last  int32
	free  int
}

// slot is the room for one block.
type slot struct {
	seq        uint64 // of the block in it, if named
	named      bool
	refs       int32
	older      int32 // slot with another copy of the block; -1: none
	prev, next int32 // in the list of free slots; -1: none
}

func newDevice(size int) device {
	d := device{slots: make([]slot, size), heads: map[uint64]int32{}, first: -1, last: -1}
	for i := range d.slots {
		d.slots[i].older = -1
		d.pushBack(int32(i))
	}
	return d
}

func (d *device) has(seq uint64) bool {
	_, ok := d.heads[seq]
	return ok
}

// room tells whether n slots are left to use when the blocks in held, which the
// device has, are referenced.
func (d *device) room(held []uint64, n int) bool {
	left := d.free
	for _, seq := range held {
		if d.slots[d.heads[seq]].refs == 0 {
			left--
		}
	}
	return n <= left
}

// take references the newest slot with a block.
func (d *device) take(seq uint64) int32 {
	i := d.heads[seq]
	if d.slots[i].refs == 0 {
		d.unlink(i)
	}
	d.slots[i].refs++
	return i
}

// alloc references the first free slot, which there must be, and empties it. It
// returns what was in it, and whether that was the last copy.
func (d *device) alloc() (i int32, seq uint64, evicted, last bool) {
	i = d.first
	d.unlink(i)
	s := &d.slots[i]
	s.refs = 1
	if !s.named {
		return i, 0, false, false
	}
	seq = s.seq
	if at := d.heads[seq]; at == i {
		if s.older < 0 {
			delete(d.heads, seq)
			last = true
		} else {
			d.heads[seq] = s.older
		}
	} else {
		for d.slots[at].older != i {
			at = d.slots[at].older
		}
		d.slots[at].older = s.older
	}
	s.named, s.older = false, -1
	return i, seq, true, last
}

// put names the block that is in a slot.
func (d *device) put(i int32, seq uint64) {
	s := &d.slots[i]
	s.seq, s.named, s.older = seq, true, -1
	if head, ok := d.heads[seq]; ok {
		s.older = head
	}
	d.heads[seq] = i
}

// release drops a reference. A slot with a block is used again after all that
// are free now, one without before them.
func (d *device) release(i int32) {
	s := &d.slots[i]
	if s.refs--; s.refs > 0 {
		return
	}
	if s.named {
		d.pushBack(i)
	} else {
		d.pushFront(i)
	}
}

func (d *device) names() []uint64 {
	out := make([]uint64, 0, len(d.heads))
	for seq := range d.heads {
		out = append(out, seq)
	}
	return out
}

func (d *device) pushBack(i int32) {
	d.slots[i].prev, d.slots[i].next = d.last, -1
	if d.last >= 0 {
		d.slots[d.last].next = i
	} else {
		d.first = i
	}
	d.last = i
	d.free++
}

func (d *device) pushFront(i int32) {
	d.slots[i].prev, d.slots[i].next = -1, d.first
	if d.first >= 0 {
		d.slots[d.first].prev = i
	} else {
		d.last = i
	}
	d.first = i
	d.free++
}

func (d *device) unlink(i int32) {
	s := &d.slots[i]
	if s.prev >= 0 {
		d.slots[s.prev].next = s.next
	} else {
		d.first = s.next
	}
	if s.next >= 0 {
		d.slots[s.next].prev = s.prev
	} else {
		d.last = s.prev
	}
	d.free--
}
