package residency

import (
	"sync"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Memory is what States need while they apply an event, and only then: states that
// share one have it once for each that is applying. A thousand sources would
// otherwise all keep what their largest events took.
type Memory struct {
	pool sync.Pool // of *work
}

// NewMemory returns a Memory that has nothing yet.
func NewMemory() *Memory {
	return &Memory{sync.Pool{New: func() any { return new(work) }}}
}

// work is what one event is applied with.
type work struct {
	scratch scratch
	hashes  []uint64
	engine  []event.EngineHash
	counts  []uint64
}

// keepLocals is how many local hashes are room for in what is kept; a larger event
// pays for itself. All else is bounded by what an operation may take.
const keepLocals = 1 << 14

// Share has the State take its working memory from m.
func (s *State) Share(m *Memory) { s.memory = m }

// borrow takes working memory, if it is shared.
func (s *State) borrow() *work {
	if s.memory == nil {
		return nil
	}
	w := s.memory.pool.Get().(*work)
	s.scratch = w.scratch
	s.emit.hashes, s.emit.engine, s.emit.counts = w.hashes, w.engine, w.counts
	return w
}

// giveBack is the opposite of borrow.
func (s *State) giveBack(w *work) {
	if w == nil {
		return
	}
	if cap(s.scratch.locals) > keepLocals {
		s.scratch.locals = nil
	}
	*w = work{s.scratch, s.emit.hashes, s.emit.engine, s.emit.counts}
	s.scratch = scratch{}
	s.emit.hashes, s.emit.engine, s.emit.counts = nil, nil, nil
	s.memory.pool.Put(w)
}
