package residency

import (
	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// addCopy counts one more copy of a block.
func (s *State) addCopy(id uint32, pool uint8) {
	n := s.copies(id, pool)
	if n < maxCopies {
		s.setCopies(id, pool, n+1)
	}
}

// setCopies sets the number of copies of a block in a pool, and tells the log.
func (s *State) setCopies(id uint32, pool uint8, n uint32) {
	before := s.copies(id, pool)
	if n == before {
		return
	}
	parked := s.cells.at(id).flags&flagParked != 0
	switch {
	case before == 0:
		s.unknow(id)
		s.writeCopies(id, pool, n)
		if parked {
			s.emit.parked(id, pool)
		} else {
			s.enter(id, pool)
		}
		if n == 1 {
			return
		}
		fallthrough
	case n > 0:
		s.writeCopies(id, pool, n)
		s.emit.copies(id, pool, n)
		return
	}
	s.writeCopies(id, pool, 0)
	if parked {
		s.emit.removed(id, pool, false)
	} else {
		s.leave(id, pool)
	}
	s.settleGone(id)
}

// settleGone remembers a block that lost copies, if those were its last, or
// forgets it: what neither is anywhere nor has a place is not known.
func (s *State) settleGone(id uint32) {
	switch {
	case s.resident(id):
	case s.cells.at(id).flags&flagParked != 0:
		s.forget(id)
	default:
		s.know(id)
	}
}

// enter tells the log and the digest that a placed block has its first copy in
// a pool.
func (s *State) enter(id uint32, pool uint8) {
	s.emit.stored(id, pool)
	tier := s.pools[pool-1].tier
	for j := range uint32(s.cells.at(id).k) {
		if !s.covered(id+j, tier) && !s.elsewhere(id, pool, tier) {
			s.digests[tier].Add(1, event.Mix(s.cells.at(id+j).seq, event.Salt(tier)))
		}
	}
}

// leave tells them that its last copy in a pool is gone; the copies are written
// already.
func (s *State) leave(id uint32, pool uint8) {
	tier := s.pools[pool-1].tier
	left := !s.elsewhere(id, pool, tier)
	for j := range uint32(s.cells.at(id).k) {
		gone := left && !s.covered(id+j, tier)
		s.emit.removed(id+j, pool, gone)
		if gone {
			s.digests[tier].Sub(1, event.Mix(s.cells.at(id+j).seq, event.Salt(tier)))
		}
	}
}

// elsewhere tells whether a block has a copy in another pool of a tier.
func (s *State) elsewhere(id uint32, pool uint8, tier event.Tier) bool {
	found := false
	c := s.cells.at(id)
	for _, v := range c.copies {
		if p := uint8(v >> 24); v != 0 && p != pool && s.pools[p-1].tier == tier {
			found = true
		}
	}
	if c.flags&flagSpill != 0 {
		s.eachCopy(id, func(p uint8, _ uint32) { found = found || p != pool && s.pools[p-1].tier == tier })
	}
	return found
}

// -- removals -----------------------------------------------------------------

// remove applies a removal, hash by hash.
func (s *State) remove(ev *engine.Event, owner string) (Reason, int) {
	unknown := 0
	pool := s.findPool(ev.Tier, owner, group(ev))
	for i := range ev.Hashes {
		id := s.find(&ev.Hashes[i])
		if id == 0 || pool == 0 {
			unknown++
			continue
		}
		n := s.copies(id, pool)
		if n == 0 {
			unknown++
			continue
		}
		left := n - 1
		if ev.HasRemaining {
			left = uint32(min(ev.Remaining[i], maxCopies))
		}
		s.setCopies(id, pool, left)
	}
	if unknown > 0 {
		return UnknownBlock, unknown
	}
	return "", 0
}

// clear takes an owner's copies out of some tiers. Of a tier that is the owner's
// alone the log says that it is empty; of one where others may have blocks, what
// went.
func (s *State) clear(tiers event.TierMask, owner string) {
	alone := tiers
	for i := range s.pools {
		if p := &s.pools[i]; p.owner != owner {
			alone &^= p.tier.Mask()
		}
	}
	if alone != 0 && s.empty(alone) {
		s.emit.cleared(alone, owner)
	}
	if alone != tiers {
		s.drop(func(p *pool) bool { return tiers.Has(p.tier) && p.owner == owner })
	}
}

// empty takes all copies out of some tiers, without a word to the log, and tells
// whether there were any.
func (s *State) empty(tiers event.TierMask) (hit bool) {
	s.each(func(id uint32, pool uint8) {
		if tiers.Has(s.pools[pool-1].tier) {
			s.writeCopies(id, pool, 0)
			hit = true
			s.settleGone(id)
		}
	})
	for t := range event.Tier(event.Tiers) {
		if tiers.Has(t) {
			s.digests[t] = event.Digest{}
		}
	}
	return hit
}

// drop takes all copies out of some pools, one by one.
func (s *State) drop(from func(*pool) bool) {
	s.each(func(id uint32, pool uint8) {
		if from(&s.pools[pool-1]) {
			s.setCopies(id, pool, 0)
		}
	})
}

// each calls f for every block and pool that it has copies in. f may take those
// away.
func (s *State) each(f func(id uint32, pool uint8)) {
	for id := uint32(1); id < s.cells.n; id++ {
		if s.cells.at(id).k > 0 {
			s.eachCopy(id, func(pool uint8, _ uint32) { f(id, pool) })
		}
	}
}
