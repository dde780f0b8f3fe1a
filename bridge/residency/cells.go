package residency

import "github.com/kvmesh/kvmesh/indexer/event"

// engineKey is an engine hash that can be a key of a map.
type engineKey struct {
	bits uint64
	name string // typeByte and name; empty if the hash is an integer
}

// Bytes and text of the same content are different names.
const (
	typeBytes = "b"
	typeText  = "t"
)

func nameKey(h *event.EngineHash) string {
	if h.Text {
		return typeText + string(h.Name)
	}
	return typeBytes + string(h.Name)
}

func keyOf(h *event.EngineHash) engineKey {
	if h.Name == nil {
		return engineKey{bits: h.Bits}
	}
	return engineKey{name: nameKey(h)}
}

// hash returns the engine hash that a key stands for.
func (k engineKey) hash() event.EngineHash {
	if k.name == "" {
		return event.EngineHash{Bits: k.bits}
	}
	return event.EngineHash{Name: []byte(k.name[1:]), Text: k.name[:1] == typeText}
}

// find returns the head cell of an engine block, 0 if there is none.
func (s *State) find(h *event.EngineHash) uint32 {
	if h.Name == nil {
		return s.ints.get(h.Bits)
	}
	return s.names[nameKey(h)]
}

// key returns the name of the engine block with the given head cell.
func (s *State) key(id uint32) engineKey {
	c := s.cells.at(id)
	if c.flags&flagNamed != 0 {
		return engineKey{name: s.named[id]}
	}
	return engineKey{bits: c.key}
}

// engineHash returns the name of an engine block as records have it.
func (s *State) engineHash(id uint32) event.EngineHash {
	if c := s.cells.at(id); c.flags&flagNamed == 0 {
		return event.EngineHash{Bits: c.key}
	}
	return s.key(id).hash()
}

// newBlock makes an engine block of the given index blocks, named h, with
// neither copies nor a place in a prompt.
func (s *State) newBlock(h *event.EngineHash, locals []uint64) uint32 {
	k := uint16(len(locals))
	id := s.free[k]
	if id != 0 {
		s.free[k] = s.cells.at(id).next
	} else {
		id = s.cells.add(int(k))
	}
	for j, local := range locals {
		*s.cells.at(id + uint32(j)) = cell{local: local, back: uint16(j)}
	}
	c := s.cells.at(id)
	c.k = k
	if len(s.unlinked) > 0 {
		s.link(id, parentRef{name: keyOf(h)})
	}
	if h.Name == nil {
		c.key = h.Bits
		*s.ints.ref(h.Bits) = id
		return id
	}
	if s.names == nil {
		s.names, s.named = map[string]uint32{}, map[uint32]string{}
	}
	key := nameKey(h)
	c.flags |= flagNamed
	s.names[key], s.named[id] = id, key
	return id
}

// parentRef is how the log refers to the parent of a run: by name if the sequence
// hash is not enough.
type parentRef struct {
	seq  uint64
	name engineKey
}

// link says of the blocks that were read back from the log before their parent
// was that this is it.
func (s *State) link(id uint32, ref parentRef) {
	for _, child := range s.unlinked[ref] {
		s.cells.at(child).before = id
	}
	delete(s.unlinked, ref)
}

// forget drops an engine block that has no copies.
func (s *State) forget(id uint32) {
	c := s.cells.at(id)
	k := c.k
	switch {
	case c.flags&flagParked != 0:
		s.unwait(id)
	default:
		s.unknow(id)
		for j := range uint32(k) {
			s.uncover(id + j)
		}
	}
	if c.flags&flagNamed != 0 {
		delete(s.names, s.named[id])
		delete(s.named, id)
	} else {
		s.ints.del(c.key)
	}
	*s.cells.at(id) = cell{next: s.free[k]}
	s.free[k] = id
}

// settle gives an unplaced engine block its place in a prompt.
func (s *State) settle(id uint32, at spot) {
	root, parent, base := at.root, at.parent, at.base
	s.cells.at(id).before = at.before
	for j := range uint32(s.cells.at(id).k) {
		c := s.cells.at(id + j)
		c.parent, c.base = parent, base+j
		if root && j == 0 {
			c.flags |= flagRoot
			c.seq = c.local
		} else {
			c.seq = next(parent, c.local)
		}
		parent = c.seq
		first := s.seqs.ref(c.seq)
		c.next = *first
		*first = id + j
	}
	if len(s.unlinked) > 0 {
		s.link(id, parentRef{seq: parent})
	}
}

// parentName returns the name of the engine block that was given as the parent
// of another, if others hold the same index block, so that the sequence hash
// alone would not tell which it was.
func (s *State) parentName(id uint32) (name event.EngineHash, ok bool) {
	c := s.cells.at(id)
	first := s.seqs.get(c.parent)
	if c.flags&flagRoot != 0 || first == 0 || s.cells.at(first).next == 0 || !s.follows(id, c.before, c.parent) {
		return event.EngineHash{}, false
	}
	return s.engineHash(c.before), true
}

// follows tells whether a block was said to follow the engine block before, which
// ends with the sequence hash seq.
func (s *State) follows(id, before uint32, seq uint64) bool {
	c := s.cells.at(id)
	return before != 0 && c.before == before && c.parent == seq && c.flags&(flagParked|flagRoot) == 0 &&
		s.cells.at(before).k > 0 && s.last(before).seq == seq
}

// last returns the last cell of an engine block.
func (s *State) last(id uint32) *cell { return s.cells.at(id + uint32(s.cells.at(id).k) - 1) }

// uncover takes a cell out of the list of those that cover its sequence hash.
func (s *State) uncover(id uint32) {
	c := s.cells.at(id)
	at := s.seqs.get(c.seq)
	if at == id {
		if c.next == 0 {
			s.seqs.del(c.seq)
		} else {
			*s.seqs.ref(c.seq) = c.next
		}
		return
	}
	for s.cells.at(at).next != id {
		at = s.cells.at(at).next
	}
	s.cells.at(at).next = c.next
}

// covered tells whether an engine block other than that of the given cell holds
// the cell's sequence hash in a tier.
func (s *State) covered(id uint32, tier event.Tier) bool {
	for i := s.seqs.get(s.cells.at(id).seq); i != 0; i = s.cells.at(i).next {
		if i != id && s.inTier(i-uint32(s.cells.at(i).back), tier) {
			return true
		}
	}
	return false
}

// -- blocks that no tier holds ------------------------------------------------

// Neighbours of a known block, in place of its copies.
const (
	older = 0
	newer = 1
)

// know remembers a block whose last copy went, and forgets the oldest of those
// if they are too many.
func (s *State) know(id uint32) {
	c := s.cells.at(id)
	c.flags |= flagKnown
	c.copies = [2]uint32{older: s.newest}
	if s.newest != 0 {
		s.cells.at(s.newest).copies[newer] = id
	} else {
		s.oldest = id
	}
	s.newest = id
	s.known++
	for s.known > s.cfg.Limits.Known {
		s.forget(s.oldest)
	}
}

// unknow takes a block out of those that are remembered, if it is one.
func (s *State) unknow(id uint32) {
	c := s.cells.at(id)
	if c.flags&flagKnown == 0 {
		return
	}
	before, after := c.copies[older], c.copies[newer]
	c.flags &^= flagKnown
	c.copies = [2]uint32{}
	if before != 0 {
		s.cells.at(before).copies[newer] = after
	} else {
		s.oldest = after
	}
	if after != 0 {
		s.cells.at(after).copies[older] = before
	} else {
		s.newest = before
	}
	s.known--
}

// -- blocks whose parent is unknown -------------------------------------------

// wait parks an unplaced block until its parent is known.
func (s *State) wait(id uint32, parent engineKey) {
	if s.waiting == nil {
		s.waiting, s.parents = map[engineKey][]uint32{}, map[uint32]engineKey{}
	}
	s.cells.at(id).flags |= flagParked
	s.waiting[parent] = append(s.waiting[parent], id)
	s.parents[id] = parent
	s.parked++
}

// unwait takes a block out of those that wait, if it is one.
func (s *State) unwait(id uint32) {
	parent, ok := s.parents[id]
	if !ok {
		return
	}
	s.cells.at(id).flags &^= flagParked
	delete(s.parents, id)
	s.parked--
	list := s.waiting[parent]
	for i, other := range list {
		if other == id {
			list[i] = list[len(list)-1]
			list = list[:len(list)-1]
			break
		}
	}
	if len(list) == 0 {
		delete(s.waiting, parent)
	} else {
		s.waiting[parent] = list
	}
}
