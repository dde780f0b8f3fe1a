package blocks

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Fleet is workers that cache prefixes: each keeps the blocks used last, and
// gives the end of a prompt up before its beginning. It knows who has what, so
// that an index can be held against it.
type Fleet struct {
	workers []lru
	size    int
	holders map[uint64][]uint64 // sequence hash → set of workers
	words   int
}

// NewFleet returns a fleet of empty workers with room for size blocks each.
func NewFleet(workers, size int) *Fleet {
	f := &Fleet{workers: make([]lru, workers), size: size, holders: map[uint64][]uint64{}, words: (workers + 63) / 64}
	for i := range f.workers {
		f.workers[i].init(size)
	}
	return f
}

// Match returns how many blocks each worker has of a prompt.
func (f *Fleet) Match(seqs []uint64) []int {
	out := make([]int, len(f.workers))
	alive := make([]uint64, f.words)
	for i := range alive {
		alive[i] = ^uint64(0)
	}
	for at, seq := range seqs {
		set := f.holders[seq]
		if set == nil {
			break
		}
		any := uint64(0)
		for i := range alive {
			alive[i] &= set[i]
			any |= alive[i]
			for left := alive[i]; left != 0; left &= left - 1 {
				out[i*64+trailing(left)] = at + 1
			}
		}
		if any == 0 {
			break
		}
	}
	return out
}

// Route returns the worker with most blocks of a prompt; of those with the same,
// the one with the fewest blocks at all; of those, the first.
func (f *Fleet) Route(matched []int) int {
	best := 0
	for w := range f.workers {
		d := matched[w] - matched[best]
		if d > 0 || d == 0 && f.workers[w].len() < f.workers[best].len() {
			best = w
		}
	}
	return best
}

// Serve has a worker take a prompt. It returns from which block on they are
// stored anew, and what is given up for them, in the order of its going.
func (f *Fleet) Serve(worker int, p *Prompt) (from int, removed []uint64) {
	c := &f.workers[worker]
	for from < len(p.Seqs) && c.has(p.Seqs[from]) {
		from++
	}
	for _, seq := range p.Seqs { // what is in use is not given up
		c.touch(seq)
	}
	for i := len(p.Seqs) - 1; i >= 0; i-- { // the beginning is used last
		seq := p.Seqs[i]
		if c.touch(seq) {
			continue
		}
		if c.len() == f.size {
			old := c.evict()
			f.set(worker, old, false)
			removed = append(removed, old)
		}
		c.add(seq)
		f.set(worker, seq, true)
	}
	return from, removed
}

func (f *Fleet) set(worker int, seq uint64, has bool) {
	set := f.holders[seq]
	if set == nil {
		set = make([]uint64, f.words)
		f.holders[seq] = set
	}
	if has {
		set[worker/64] |= 1 << (worker % 64)
		return
	}
	set[worker/64] &^= 1 << (worker % 64)
	for _, w := range set {
		if w != 0 {
			return
		}
	}
	delete(f.holders, seq)
}

// Restart empties a worker.
func (f *Fleet) Restart(worker int) {
	c := &f.workers[worker]
	for c.len() > 0 {
		f.set(worker, c.evict(), false)
	}
}

// Len returns how many different blocks the fleet has.
func (f *Fleet) Len() int { return len(f.holders) }

// Entries returns how many blocks its workers have together.
func (f *Fleet) Entries() int {
	n := 0
	for i := range f.workers {
		n += f.workers[i].len()
	}
	return n
}

// Differences returns how many blocks an index has wrong: not there, or there
// though the worker has them no longer.
func (f *Fleet) Differences(x *prefix.Index, holders []prefix.Holder) int {
	wrong := 0
	x.Read(func(r prefix.Reader) {
		for w, h := range holders {
			n := 0
			r.Walk(h, func(b prefix.Block, tiers event.TierMask) {
				n++
				if tiers != event.Device.Mask() || !f.workers[w].has(b.Seq) {
					wrong++
				}
			})
			wrong += max(0, f.workers[w].len()-n)
		}
	})
	return wrong
}

// lru is blocks in the order of their last use.
type lru struct {
	at   map[uint64]int32
	seqs []uint64
	prev []int32 // of each, the one used before; of the sentinel 0, the one used last
	next []int32
	free []int32
}

func (c *lru) init(size int) {
	c.at = make(map[uint64]int32, size)
	c.seqs, c.prev, c.next = make([]uint64, 1, size+1), make([]int32, 1, size+1), make([]int32, 1, size+1)
}

func (c *lru) len() int { return len(c.at) }

func (c *lru) has(seq uint64) bool {
	_, ok := c.at[seq]
	return ok
}

func (c *lru) touch(seq uint64) bool {
	i, ok := c.at[seq]
	if ok {
		c.unlink(i)
		c.link(i)
	}
	return ok
}

func (c *lru) add(seq uint64) {
	var i int32
	if n := len(c.free); n > 0 {
		i = c.free[n-1]
		c.free = c.free[:n-1]
		c.seqs[i] = seq
	} else {
		i = int32(len(c.seqs))
		c.seqs, c.prev, c.next = append(c.seqs, seq), append(c.prev, 0), append(c.next, 0)
	}
	c.at[seq] = i
	c.link(i)
}

// evict gives up the block that was not used for longest.
func (c *lru) evict() uint64 {
	i := c.next[0]
	c.unlink(i)
	c.free = append(c.free, i)
	delete(c.at, c.seqs[i])
	return c.seqs[i]
}

func (c *lru) link(i int32) {
	last := c.prev[0]
	c.prev[i], c.next[i] = last, 0
	c.next[last], c.prev[0] = i, i
}

func (c *lru) unlink(i int32) {
	p, n := c.prev[i], c.next[i]
	c.next[p], c.prev[n] = n, p
}
