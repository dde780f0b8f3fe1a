package cache

import (
	"time"

	"github.com/kvmesh/kvmesh/integration/model"
)

// store is a block on its way to the host.
type store struct {
	seq uint64
	end time.Time
}

// Tick ends the transfers that have ended by now.
func (c *Cache) Tick(now time.Time) {
	c.clock = later(c.clock, now)
	for {
		toHost := len(c.stores) > 0 && !c.stores[0].end.After(now)
		toDevice := len(c.loads) > 0 && !c.loads[0].Ready.After(now)
		switch {
		case toDevice && (!toHost || !c.loads[0].Ready.After(c.stores[0].end)):
			r := c.loads[0]
			c.loads = c.loads[1:]
			c.unpin(r)
			r.loading = false
			c.commit(r.Ready, r)
		case toHost:
			c.storesEnded(now)
		default:
			return
		}
	}
}

// Next returns when the next transfer ends, false if there is none.
func (c *Cache) Next() (time.Time, bool) {
	switch {
	case len(c.stores) == 0 && len(c.loads) == 0:
		return time.Time{}, false
	case len(c.loads) == 0 || len(c.stores) > 0 && c.stores[0].end.Before(c.loads[0].Ready):
		return c.stores[0].end, true
	}
	return c.loads[0].Ready, true
}

// storesEnded puts the blocks on the host that arrive before the next load does,
// and says so in one event.
func (c *Cache) storesEnded(now time.Time) {
	var gone, came []model.Hash
	for len(c.stores) > 0 && !c.stores[0].end.After(now) {
		s := c.stores[0]
		if len(c.loads) > 0 && !c.loads[0].Ready.After(s.end) {
			break
		}
		c.stores = c.stores[1:]
		delete(c.storing, s.seq)
		victim, evicted, ok := c.host.put(s.seq)
		if !ok {
			continue // every block is being loaded: it stays where it is
		}
		if evicted {
			name := c.name(victim)
			if i := index(came, name); i >= 0 { // came and went at once
				came = append(came[:i], came[i+1:]...)
			} else {
				gone = append(gone, name)
			}
		}
		came = append(came, c.name(s.seq))
	}
	c.removed(gone, c.o.Medium)
	if len(came) > 0 {
		none := 0
		c.events = append(c.events, c.tag(model.Event{Hashes: came, Medium: c.o.Medium, BlockSize: &none}))
	}
}

func index(hashes []model.Hash, h model.Hash) int {
	for i := range hashes {
		if hashes[i] == h {
			return i
		}
	}
	return -1
}

// toHost begins to copy a block to the host, unless it is or soon will be there.
func (c *Cache) toHost(now time.Time, seq uint64) {
	if c.o.Host == 0 || c.host.has(seq) || c.storing[seq] {
		return
	}
	c.storing[seq] = true
	c.storeEnd = later(c.storeEnd, now).Add(c.o.Transfer)
	c.stores = append(c.stores, store{seq, c.storeEnd})
}

// grow gives a request slots until it has need.
func (c *Cache) grow(r *Request, need int) {
	var gone []model.Hash
	for len(r.slots) < need {
		i, seq, evicted, last := c.device.alloc()
		if evicted {
			gone = append(gone, c.name(seq))
		}
		if last && !c.o.WriteThrough {
			c.toHost(c.clock, seq)
		}
		r.slots = append(r.slots, i)
	}
	c.removed(gone, "")
}

// commit lets other requests hit the whole blocks of a request.
func (c *Cache) commit(now time.Time, r *Request) {
	from, to := r.committed, len(r.seqs)
	if from == to {
		return
	}
	n := (to - from) * c.o.BlockSize
	e := model.Event{Hashes: make([]model.Hash, 0, to-from), Tokens: make([]int64, n), LoRA: r.lora, Salt: r.salt}
	if from > 0 {
		e.Parent = c.name(r.seqs[from-1])
	}
	for i, t := range r.fresh[:n] {
		e.Tokens[i] = int64(t)
	}
	for i := from; i < to; i++ {
		c.device.put(r.slots[i], r.seqs[i])
		e.Hashes = append(e.Hashes, c.name(r.seqs[i]))
		if c.o.WriteThrough {
			c.toHost(now, r.seqs[i])
		}
	}
	c.events = append(c.events, e)
	r.fresh = append(r.fresh[:0:0], r.fresh[n:]...)
	r.committed = to
}

// unpin lets go of the host blocks that a request loads.
func (c *Cache) unpin(r *Request) {
	from := r.HitDevice / c.o.BlockSize
	for _, seq := range r.seqs[from : from+r.HitHost/c.o.BlockSize] {
		c.host.unpin(seq)
	}
}

// removed says that copies are gone from a medium, the device if it is empty.
func (c *Cache) removed(gone []model.Hash, medium string) {
	per := 1
	if c.o.GroupRemoved {
		per = max(1, len(gone))
	}
	for ; len(gone) > 0; gone = gone[per:] {
		e := model.Event{Op: model.Remove, Hashes: gone[:per:per], Medium: medium}
		if medium != "" {
			e = c.tag(e)
		}
		c.events = append(c.events, e)
	}
}

// tag adds the owner of the host tier.
func (c *Cache) tag(e model.Event) model.Event {
	if c.o.Owner != "" {
		e.Owner = c.o.Owner
	}
	return e
}
