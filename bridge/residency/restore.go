package residency

import (
	"errors"
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// ErrForeign says that an operation can't be of the State's own making: it
// speaks of a block that the State does not know, or names none.
var ErrForeign = errors.New("residency: operation does not fit the state")

// Restore applies an operation that an earlier State of the source wrote. It
// writes nothing. Operations that are not about blocks change nothing. A
// checkpoint's chunks must come to a State that was reset before the first one.
// Errors wrap ErrForeign.
func (s *State) Restore(op *event.Op) error {
	s.emit.begin(s, nil)
	switch op.Kind {
	case event.OpStored:
		return s.restoreStored(op.Tier, op.Owner, &op.Run)
	case event.OpRemoved:
		return s.restoreRemoved(op)
	case event.OpCleared:
		s.clear(op.Tiers, op.Owner)
	case event.OpReset, event.OpRetired:
		s.Reset()
	case event.OpCheckpoint:
		for i := range op.Runs {
			if err := s.restoreStored(op.Tier, op.Owner, &op.Runs[i]); err != nil {
				return err
			}
		}
	case event.OpCopies:
		return s.restoreCopies(op)
	case event.OpParked:
		return s.restoreParked(op)
	case event.OpGroup:
		s.groups[op.Group.Index] = op.Main
	case event.OpKnown:
		return s.restoreKnown(&op.Run)
	}
	return nil
}

// eachBlock calls f for each engine block of a run, with its index blocks.
func eachBlock(run *event.Run, f func(h *event.EngineHash, locals []uint64)) error {
	n := run.Engine.Len()
	if n == 0 && len(run.Locals) > 0 {
		return fmt.Errorf("%w: %d blocks without engine hashes", ErrForeign, len(run.Locals))
	}
	names := run.Engine.AppendTo(nil)
	for i := range names {
		split := len(run.Locals) / n
		if split < 1 || split > maxSplit {
			return fmt.Errorf("%w: an engine block of %d index blocks", ErrForeign, split)
		}
		f(&names[i], run.Locals[i*split:(i+1)*split])
	}
	return nil
}

func (s *State) restoreStored(tier event.Tier, owner string, run *event.Run) error {
	pool := s.makePool(tier, owner, run.Group)
	if pool == 0 {
		return fmt.Errorf("%w: too many groups", ErrForeign)
	}
	at, ref := s.spotOf(run)
	return eachBlock(run, func(h *event.EngineHash, locals []uint64) {
		id := s.restoreBlock(h, locals, at)
		if s.copies(id, pool) == 0 {
			s.setCopies(id, pool, 1)
		}
		s.unlink(id, at, ref)
		at = s.after(id)
	})
}

// spotOf returns where a run begins, and how it refers to its parent.
func (s *State) spotOf(run *event.Run) (spot, parentRef) {
	at := spot{root: run.Root, placed: !run.Root, parent: run.Parent, base: run.Base}
	ref := parentRef{seq: run.Parent}
	if run.HasParentName {
		ref = parentRef{name: keyOf(&run.ParentName)}
		at.before = s.find(&run.ParentName)
	} else if c := s.seqs.get(run.Parent); c != 0 {
		at.before = c - uint32(s.cells.at(c).back)
	}
	return at, ref
}

// unlink remembers of a block whose parent was not read back yet which one that
// is.
func (s *State) unlink(id uint32, at spot, ref parentRef) {
	if at.root || at.before != 0 {
		return
	}
	if s.unlinked == nil {
		s.unlinked = map[parentRef][]uint32{}
	}
	s.unlinked[ref] = append(s.unlinked[ref], id)
}

// restoreBlock returns the engine block of that name, with that content at that
// spot.
func (s *State) restoreBlock(h *event.EngineHash, locals []uint64, at spot) uint32 {
	if id := s.find(h); id != 0 {
		if again := s.again(id, h, locals, at); again != 0 {
			return again
		}
		return id // no State wrote this: the digest will tell
	}
	id := s.newBlock(h, locals)
	s.put(id, at)
	return id
}

func (s *State) restoreRemoved(op *event.Op) error {
	pool := s.findPool(op.Tier, op.Owner, op.Group)
	for _, h := range op.Engine.AppendTo(nil) {
		id := s.find(&h)
		if id == 0 || pool == 0 || s.copies(id, pool) == 0 {
			return fmt.Errorf("%w: removal of a block that is not there", ErrForeign)
		}
		s.setCopies(id, pool, 0)
	}
	return nil
}

func (s *State) restoreCopies(op *event.Op) error {
	pool := s.makePool(op.Tier, op.Owner, op.Group)
	for i, h := range op.Engine.AppendTo(nil) {
		id := s.find(&h)
		if id == 0 || pool == 0 {
			return fmt.Errorf("%w: copies of a block that is not there", ErrForeign)
		}
		s.setCopies(id, pool, uint32(min(op.Counts[i], maxCopies)))
	}
	return nil
}

func (s *State) restoreParked(op *event.Op) error {
	pool := s.makePool(op.Tier, op.Owner, op.Group)
	if pool == 0 {
		return fmt.Errorf("%w: too many groups", ErrForeign)
	}
	at := spot{name: keyOf(&op.ParentName)}
	return eachBlock(&op.Run, func(h *event.EngineHash, locals []uint64) {
		id := s.restoreBlock(h, locals, at)
		if s.copies(id, pool) == 0 {
			s.setCopies(id, pool, 1)
		}
		at = spot{name: keyOf(h)}
	})
}

func (s *State) restoreKnown(run *event.Run) error {
	at, ref := s.spotOf(run)
	return eachBlock(run, func(h *event.EngineHash, locals []uint64) {
		id := s.restoreBlock(h, locals, at)
		if !s.resident(id) && s.cells.at(id).flags&flagKnown == 0 {
			s.know(id)
		}
		s.unlink(id, at, ref)
		at = s.after(id)
	})
}
