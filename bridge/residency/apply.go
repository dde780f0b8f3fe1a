package residency

import (
	"slices"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// maxSplit is how many index blocks an engine block may cover.
const maxSplit = 4096

// scratch holds buffers that events use one after the other.
type scratch struct {
	locals []uint64
	ids    []uint32
	queue  []uint32
	seen   table
}

func next(parent, local uint64) uint64 { return hash.Next(parent, local) }

// Apply applies one event of the engine and appends to out what it changed. It
// returns why the event, or a part of it, counts for nothing, and how many
// such parts there are; an empty reason is none. An event takes place as a
// whole or not at all, but for a removal, each of whose hashes stands alone.
func (s *State) Apply(ev *engine.Event, out *Ops) (Reason, int) {
	defer s.giveBack(s.borrow())
	s.emit.begin(s, out)
	defer s.emit.flush()
	owner, known := s.owner(ev)
	if !known {
		return UnknownOwner, 1
	}
	if ev.Kind == engine.Cleared {
		if owner == engineOwner {
			s.clear(s.cfg.Clears, owner)
		} else {
			s.clear(event.AllTiers, owner) // whatever the engine's own clears mean
		}
		return "", 0
	}
	if !s.main(ev) {
		return NotMain, 1
	}
	switch {
	case ev.Remote:
		return Remote, 1
	case ev.Tier == engine.TierUnknown:
		return UnknownMedium, 1
	case ev.Kind == engine.Removed:
		return s.remove(ev, owner)
	case len(ev.Hashes) == 0:
		return NoBlocks, 1
	case len(ev.Tokens) == 0:
		return s.storeKnown(ev, owner)
	}
	return s.store(ev, owner)
}

// Whose memory a block is in: the engine's, or the cache owner's.
const (
	engineOwner = ""
	cacheOwner  = "kvcr"
)

// owner returns whose memory an event is about, and whether that is anybody's.
func (s *State) owner(ev *engine.Event) (owner string, known bool) {
	switch string(ev.Owner) {
	case "", "framework":
		return engineOwner, true
	case cacheOwner:
		if s.cfg.CacheOwner {
			return cacheOwner, true
		}
		return engineOwner, true
	}
	return "", false
}

// group returns the KV cache group that an event is about.
func group(ev *engine.Event) event.Group {
	return event.Group{Index: ev.Group, Set: ev.HasGroup}
}

// mainAttention tells whether blocks of an attention kind hold whole prefixes.
func mainAttention(kind []byte) bool {
	switch string(kind) {
	case "full_attention", "mla_attention", "sink_full_attention":
		return true
	}
	return false
}

// main tells whether an event is about a main attention group, which is what
// makes a prefix reusable. Stores teach what a group is.
func (s *State) main(ev *engine.Event) bool {
	if ev.SpecKind != nil && ev.Kind == engine.Stored {
		main := mainAttention(ev.SpecKind)
		if ev.HasGroup {
			if known, ok := s.groups[ev.Group]; !ok || known != main {
				s.groups[ev.Group] = main
				s.emit.group(ev.Group, main)
			}
		}
		return main
	}
	if !ev.HasGroup {
		return true
	}
	if main, ok := s.groups[ev.Group]; ok {
		return main
	}
	return ev.Group == 0
}

// -- stores -------------------------------------------------------------------

// store applies a store that says what its blocks hold.
func (s *State) store(ev *engine.Event, owner string) (Reason, int) {
	split, reason := s.check(ev)
	if reason != "" {
		return reason, 1
	}
	pool := s.makePool(ev.Tier, owner, group(ev))
	if pool == 0 {
		return TooManyGroups, 1
	}
	// Where the first block goes: behind a block that is known, at the root,
	// or to the parked ones.
	at := spot{root: !ev.HasParent}
	if ev.HasParent {
		at = s.behind(&ev.Parent)
	}
	if !at.known() && s.parked+len(ev.Hashes) > s.cfg.Limits.Parked {
		return TooManyParked, 1
	}
	s.hashBlocks(ev)
	for i := range ev.Hashes {
		h, locals := &ev.Hashes[i], s.scratch.locals[i*split:(i+1)*split]
		id := s.find(h)
		if id == 0 {
			id = s.newBlock(h, locals)
			s.put(id, at)
		} else if id = s.again(id, h, locals, at); id == 0 {
			return OwnParent, len(ev.Hashes) - i
		}
		s.addCopy(id, pool)
		at = s.after(id)
	}
	return "", 0
}

// check tells whether a store can be applied, and how many index blocks each of
// its engine blocks is.
func (s *State) check(ev *engine.Event) (split int, reason Reason) {
	n := int64(len(ev.Hashes))
	positions := int64(len(ev.Tokens) - ev.Over)
	switch {
	case ev.HasParent && slices.ContainsFunc(ev.Hashes, func(h event.EngineHash) bool { return equal(&h, &ev.Parent) }):
		return 0, OwnParent
	case s.repeats(ev.Hashes):
		return 0, RepeatedHash
	case ev.BlockSize <= 0 || ev.BlockSize%int64(s.cfg.BlockSize) != 0 || ev.BlockSize/int64(s.cfg.BlockSize) > maxSplit:
		return 0, BlockSize
	case positions%n != 0 || positions/n != ev.BlockSize:
		return 0, TokenCount
	}
	return int(ev.BlockSize) / s.cfg.BlockSize, ""
}

func equal(a, b *event.EngineHash) bool {
	if (a.Name == nil) != (b.Name == nil) {
		return false
	}
	if a.Name == nil {
		return a.Bits == b.Bits
	}
	return a.Text == b.Text && string(a.Name) == string(b.Name)
}

// repeats tells whether a hash is in the list twice.
func (s *State) repeats(hashes []event.EngineHash) bool {
	if len(hashes) < 2 {
		return false
	}
	seen := &s.scratch.seen
	seen.empty(len(hashes))
	for i := range hashes {
		if hashes[i].Name != nil {
			return repeatsNames(hashes)
		}
		at := seen.ref(hashes[i].Bits, hashOf(hashes[i].Bits, seen.seed))
		if *at != 0 {
			return true
		}
		*at = 1
	}
	return false
}

func repeatsNames(hashes []event.EngineHash) bool {
	seen := make(map[engineKey]bool, len(hashes))
	for i := range hashes {
		k := keyOf(&hashes[i])
		if seen[k] {
			return true
		}
		seen[k] = true
	}
	return false
}

// hashBlocks leaves the local hashes of an event's index blocks in
// scratch.locals.
func (s *State) hashBlocks(ev *engine.Event) {
	seed := hash.SeedOf(string(ev.Lora), string(ev.Salt))
	locals := s.scratch.locals[:0]
	if ev.MM.Empty() {
		s.scratch.locals = hash.AppendLocals(locals, ev.Tokens, s.cfg.BlockSize, ev.Over, seed)
		return
	}
	perBlock := int(ev.BlockSize)
	for at := 0; at+s.cfg.BlockSize+ev.Over <= len(ev.Tokens); at += s.cfg.BlockSize {
		locals = append(locals, hash.Local(ev.Tokens[at:at+s.cfg.BlockSize+ev.Over], seed, ev.MM.Block(at/perBlock)))
	}
	s.scratch.locals = locals
}

// spot is where in a prompt a block goes: at the root, behind a block with a
// sequence hash, or behind one that is known by name only.
type spot struct {
	root   bool
	placed bool
	parent uint64
	base   uint32
	before uint32 // the engine block that it is behind; 0: it is not known
	name   engineKey
}

func (p spot) known() bool { return p.root || p.placed }

// behind returns the spot behind the block that the engine calls h.
func (s *State) behind(h *event.EngineHash) spot {
	if id := s.find(h); id != 0 {
		return s.after(id)
	}
	return spot{name: keyOf(h)}
}

// after returns the spot behind an engine block.
func (s *State) after(id uint32) spot {
	if s.cells.at(id).flags&flagParked != 0 {
		return spot{name: s.key(id)}
	}
	c := s.last(id)
	return spot{placed: true, parent: c.seq, base: c.base + 1, before: id}
}

// put gives a block without a place one, or parks it, and then places the
// blocks that waited for it.
func (s *State) put(id uint32, at spot) {
	if !at.known() {
		s.wait(id, at.name)
		return
	}
	s.settle(id, at)
	if s.parked > 0 {
		s.unpark(id)
	}
}

// unpark places the blocks that waited for the block id, and those that waited
// for them.
func (s *State) unpark(id uint32) {
	queue := append(s.scratch.queue[:0], id)
	for len(queue) > 0 {
		id := queue[0]
		queue = queue[1:]
		children := slices.Clone(s.waiting[s.key(id)])
		for _, child := range children {
			s.unwait(child)
			s.move(child, s.after(id))
			queue = append(queue, child)
		}
	}
	s.scratch.queue = queue[:0]
}

// held is a number of copies in a pool.
type held struct {
	pool uint8
	n    uint32
}

// takeCopies takes the copies of a block away, and returns them. gone, if not
// nil, is called for each when it is away.
func (s *State) takeCopies(id uint32, gone func(pool uint8)) []held {
	var out []held
	s.eachCopy(id, func(pool uint8, n uint32) { out = append(out, held{pool, n}) })
	for _, c := range out {
		s.writeCopies(id, c.pool, 0)
		if gone != nil {
			gone(c.pool)
		}
	}
	return out
}

// move gives a block without a place one, and tells the log of its copies.
func (s *State) move(id uint32, at spot) {
	copies := s.takeCopies(id, nil)
	s.settle(id, at)
	s.announce(id, copies)
}

// announce gives a block with a place its copies, and tells the log of them.
func (s *State) announce(id uint32, copies []held) {
	for _, c := range copies {
		s.writeCopies(id, c.pool, c.n)
		s.enter(id, c.pool)
		if c.n > 1 {
			s.emit.copies(id, c.pool, c.n)
		}
	}
}

// again meets a block that the engine has named before. It nearly always holds
// what it held. If it does not, the engine uses the name anew, and what the
// block was before is replaced. A block can't be put behind one that stands
// behind it: then nothing changes, and the result is 0.
func (s *State) again(id uint32, h *event.EngineHash, locals []uint64, at spot) uint32 {
	c := s.cells.at(id)
	same := int(c.k) == len(locals)
	for j := 0; same && j < len(locals); j++ {
		same = s.cells.at(id+uint32(j)).local == locals[j]
	}
	if parked := c.flags&flagParked != 0; parked {
		if same && !at.known() && s.parents[id] == at.name {
			return id
		}
	} else if same && (!at.known() || at.root == (c.flags&flagRoot != 0) && (at.root || c.parent == at.parent)) {
		return id
	} else if s.descends(at.before, id) {
		return 0
	}
	return s.replace(id, h, locals, at)
}

// descends tells whether an engine block is another one, or stands behind it.
func (s *State) descends(id, from uint32) bool {
	for range s.cells.n {
		if id == 0 || id == from {
			return id != 0
		}
		c := s.cells.at(id)
		if !s.follows(id, c.before, c.parent) {
			return false
		}
		id = c.before
	}
	return false
}

// replace gives an engine block new content, and keeps its copies.
func (s *State) replace(id uint32, h *event.EngineHash, locals []uint64, at spot) uint32 {
	placed := s.cells.at(id).flags&flagParked == 0
	var children []uint32
	if placed {
		children = s.children(id)
	}
	s.unknow(id)
	copies := s.takeCopies(id, func(pool uint8) {
		if placed {
			s.leave(id, pool)
		} else {
			s.emit.removed(id, pool, false)
		}
	})
	s.forget(id)
	id = s.newBlock(h, locals)
	if !at.known() {
		s.wait(id, at.name)
		for _, c := range copies {
			s.writeCopies(id, c.pool, c.n)
			s.emit.parked(id, c.pool)
			if c.n > 1 {
				s.emit.copies(id, c.pool, c.n)
			}
		}
		return id
	}
	s.settle(id, at)
	s.announce(id, copies)
	s.moveChildren(id, children)
	s.unpark(id)
	return id
}

// children returns the blocks that stand behind the engine block id. It looks at
// every block: an engine that gives a name to something else is broken, and pays
// for it.
func (s *State) children(id uint32) []uint32 {
	var out []uint32
	seq := s.last(id).seq
	for i := uint32(1); i < s.cells.n; i++ {
		if s.cells.at(i).k > 0 && i != id && s.follows(i, id, seq) {
			out = append(out, i)
		}
	}
	return out
}

// moveChildren puts blocks behind the engine block id, and their children with
// them.
func (s *State) moveChildren(id uint32, children []uint32) {
	for _, child := range children {
		below := s.children(child)
		copies := s.takeCopies(child, func(pool uint8) { s.leave(child, pool) })
		for j := range uint32(s.cells.at(child).k) {
			s.uncover(child + j)
		}
		s.settle(child, s.after(id))
		s.announce(child, copies)
		s.moveChildren(child, below)
	}
}

// storeKnown applies a store that only names its blocks.
func (s *State) storeKnown(ev *engine.Event, owner string) (Reason, int) {
	ids := s.scratch.ids[:0]
	for i := range ev.Hashes {
		id := s.find(&ev.Hashes[i])
		if id == 0 || s.cells.at(id).flags&flagParked != 0 {
			return UnknownBlock, 1
		}
		ids = append(ids, id)
	}
	s.scratch.ids = ids
	pool := s.makePool(ev.Tier, owner, group(ev))
	if pool == 0 {
		return TooManyGroups, 1
	}
	for _, id := range ids {
		s.addCopy(id, pool)
	}
	return "", 0
}
