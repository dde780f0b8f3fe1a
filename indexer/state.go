package indexer

import (
	"maps"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// era is all that queries read, as long as the log is one. When the log has to be
// read anew there is another, so that no answer mixes the two.
type era struct {
	position   atomic.Uint64                                  // log sequence that has been applied
	ready      atomic.Bool                                    // the position has reached target
	whole      atomic.Bool                                    // no worker's beginning is missing in the log
	partitions atomic.Pointer[map[event.Partition]*partition] // copied when it changes
}

func newEra() *era {
	e := &era{}
	e.partitions.Store(&map[event.Partition]*partition{})
	return e
}

func (e *era) partition(name event.Partition) *partition { return (*e.partitions.Load())[name] }

// open returns a partition that has workers; nil if there is none of that name.
func (e *era) open(name event.Partition) *partition {
	if p := e.partition(name); p != nil && p.open.Load() {
		return p
	}
	return nil
}

// set puts a partition in, or takes it out if p is nil.
func (e *era) set(name event.Partition, p *partition) {
	all := maps.Clone(*e.partitions.Load())
	if p == nil {
		delete(all, name)
	} else {
		all[name] = p
	}
	e.partitions.Store(&all)
}

// partition is one index. What is not atomic is guarded by shard.mu; queries
// read the index and the atomics.
type partition struct {
	name      event.Partition
	served    bool          // it is in the share; else the index is empty and nobody is shown
	blockSize atomic.Uint32 // 0: no worker has said
	open      atomic.Bool   // there are workers
	index     *prefix.Index
	instances map[string]*instance
	sources   map[*source]struct{}
	applied   atomic.Pointer[Applied] // the last record that was traced
}

func newPartition(name event.Partition, served bool) *partition {
	return &partition{name: name, served: served, index: prefix.New(), instances: map[string]*instance{}, sources: map[*source]struct{}{}}
}

// instance is an engine of a partition, as the catalog knows it.
type instance struct {
	workers map[uint32]event.Worker // by rank
}

// source is what the log says of one source. Guarded by shard.mu; only the
// reader writes it.
type source struct {
	name   event.Source
	part   *partition
	holder prefix.Holder
	keep   uint64 // log sequence of the oldest record that the state needs

	incarnation uint64
	engineSeq   uint64
	batches     bool // engineSeq is one
	logSeq      uint64
	gaps, lost  uint64
	digests     event.Digests
	diverged    bool
	based       bool      // its state has a beginning in the log
	asked       time.Time // when a checkpoint was asked for last

	listed  bool      // it is registered, as of the last look
	home    uint32    // rank whose engine names this one
	hasHome bool      //
	gone    bool      // its worker was registered, and is no longer
	orphan  time.Time // since when no worker is registered for it
	ignored bool      // it was dropped for that
	retired bool      // its last record says that the worker is gone

	staged [][]byte // chunks of a checkpoint that is not complete yet
	first  uint64   // log sequence of the first of them
}

// registered tells whether a source has a worker: its own or, if only batches
// name its rank, that of the engine that does so.
func (s *source) registered() bool {
	in := s.part.instances[s.name.Instance]
	if in == nil || s.gone {
		return false
	}
	if _, own := in.workers[s.name.Rank]; own || !s.hasHome {
		return true
	}
	_, ok := in.workers[s.home]
	return ok
}

// outlived calls f for the ranks that only batches of a source's engine name, and
// whose state is of an earlier life of it than the given one.
func (s *source) outlived(incarnation uint64, f func(*source)) {
	for o := range s.part.sources {
		if o.hasHome && o.home == s.name.Rank && o != s && o.name.Instance == s.name.Instance && o.incarnation < incarnation {
			f(o)
		}
	}
}

// answered tells whether a source is one to answer with.
func (s *source) answered() bool {
	return s.part.served && s.listed && !s.diverged && !s.ignored
}

// show has queries see a source if it is one to answer with.
func (s *source) show(w prefix.Writer) { w.Show(s.holder, s.answered()) }

// empty takes away all that a source holds. Queries see it at once; what it held
// is swept up later.
func (s *source) empty(w prefix.Writer) {
	w.Drop(s.holder)
	s.holder = w.Add(&s.name)
}

// stage takes in a chunk of a checkpoint. It returns all chunks if that was the
// last one: the state is in them.
func (s *source) stage(chunk, chunks int, seq uint64, data []byte) [][]byte {
	if chunk == 0 {
		s.staged, s.first = s.staged[:0], seq
	}
	if chunk != len(s.staged) {
		s.staged = nil // its beginning is missing
		return nil
	}
	s.staged = append(s.staged, data)
	if len(s.staged) < chunks {
		return nil
	}
	staged := s.staged
	s.staged, s.keep, s.based = nil, s.first, true
	return staged
}

// -- the catalog --------------------------------------------------------------

// Registered says that a worker of the shard is in the catalog, new or changed.
func (x *shard) Registered(w event.Worker) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.partition(w.Partition())
	p.blockSize.Store(w.BlockSize)
	in := p.instances[w.Instance]
	if in == nil {
		in = &instance{workers: map[uint32]event.Worker{}}
		p.instances[w.Instance] = in
	}
	in.workers[w.Rank] = w
	x.setGone(w.Source, false)
	p.open.Store(true)
	x.review(p, w.Instance)
}

// Unregistered says that a worker of the shard is not in the catalog any more.
func (x *shard) Unregistered(s event.Source) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.setGone(s, true)
	p := x.now().partition(s.Partition())
	if p == nil || p.instances[s.Instance] == nil {
		return
	}
	in := p.instances[s.Instance]
	delete(in.workers, s.Rank)
	if len(in.workers) == 0 {
		delete(p.instances, s.Instance)
	}
	p.open.Store(len(p.instances) > 0)
	x.review(p, s.Instance)
	x.dropIfEmpty(p)
}

// setGone remembers of a source whether its worker was unregistered. Its records
// may come later.
func (x *shard) setGone(name event.Source, gone bool) {
	if gone {
		x.gone[name] = true
	} else {
		delete(x.gone, name)
	}
	if s := x.sources[name]; s != nil {
		s.gone = gone
	}
}

// CatalogRead says that all workers of the catalog have been told of.
func (x *shard) CatalogRead() { x.synced.Store(true) }

// review looks again which sources of an instance are answered with.
func (x *shard) review(p *partition, instance string) {
	p.index.Update(x.now().position.Load(), func(w prefix.Writer) {
		for s := range p.sources {
			if s.name.Instance == instance {
				s.listed = s.registered()
				s.show(w)
			}
		}
	})
}

// partition returns a partition, new or not.
func (x *shard) partition(name event.Partition) *partition {
	p := x.now().partition(name)
	if p == nil {
		p = newPartition(name, x.cfg.Share.Has(name))
		x.now().set(name, p)
	}
	return p
}

// dropIfEmpty drops a partition that has neither workers nor sources.
func (x *shard) dropIfEmpty(p *partition) {
	if len(p.instances) == 0 && len(p.sources) == 0 {
		x.now().set(p.name, nil)
	}
}

// now returns the era.
func (x *shard) now() *era { return x.era.Load() }
