package blocks

import (
	"fmt"
	"runtime"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Soak is an index under traffic that never lets it grow: workers that are full
// serve conversations, and restart now and then.
type Soak struct {
	Index   *prefix.Index
	Holders []prefix.Holder
	Fleet   *Fleet

	sessions *Sessions
	logSeq   uint64
	served   int
	// Blocks is how many were stored and removed so far.
	Blocks int
	// Wrong is how many queries were answered wrong.
	Wrong int
	query prefix.Query
}

// NewSoak returns a soak of so many workers with so many blocks each.
func NewSoak(seed uint64, workers, size int) *Soak {
	s := &Soak{Index: prefix.New(), Fleet: NewFleet(workers, size), sessions: NewSessions(seed, workers*8)}
	s.update(func(w prefix.Writer) {
		for i := range workers {
			s.Holders = append(s.Holders, w.Add(&event.Source{Instance: fmt.Sprint("w", i)}))
			w.Show(s.Holders[i], true)
		}
	})
	return s
}

func (s *Soak) update(f func(prefix.Writer)) {
	s.logSeq++
	s.Index.Update(s.logSeq, f)
}

// Step serves one prompt: it is asked for, and goes to the worker that has most
// of it, or to the next one if it is new.
func (s *Soak) Step() {
	p := s.sessions.Next()
	matched := s.Fleet.Match(p.Seqs)
	s.ask(&p, matched)
	worker := s.Fleet.Route(matched)
	if s.served++; s.served%5 == 0 {
		worker = s.served % len(s.Holders) // prompts move from worker to worker
	}
	from, removed := s.Fleet.Serve(worker, &p)
	if from < len(p.Locals) {
		run := p.Run(from, len(p.Locals))
		s.update(func(w prefix.Writer) {
			w.Store(s.Holders[worker], event.Device, &run)
		})
	}
	if len(removed) > 0 {
		s.update(func(w prefix.Writer) { w.Remove(s.Holders[worker], event.Device, removed) })
	}
	s.Blocks += len(p.Locals) - from + len(removed)
	if s.served%20000 == 0 {
		s.Fleet.Restart(worker)
		s.update(func(w prefix.Writer) {
			w.Drop(s.Holders[worker])
			s.Holders[worker] = w.Add(&event.Source{Instance: fmt.Sprint("again ", s.served)})
			w.Show(s.Holders[worker], true)
		})
	}
}

// ask compares an answer with what the workers have.
func (s *Soak) ask(p *Prompt, matched []int) {
	matches, _ := s.Index.Match(&s.query, p.Locals)
	sum := 0
	for _, m := range matches {
		sum += int(m.Longest())
		if w := s.worker(m.Holder); w < 0 || matched[w] != int(m.Longest()) {
			s.Wrong++
			return
		}
	}
	for _, n := range matched {
		sum -= n
	}
	if sum != 0 {
		s.Wrong++
	}
}

func (s *Soak) worker(h prefix.Holder) int {
	for w, at := range s.Holders {
		if at == h {
			return w
		}
	}
	return -1
}

// Check returns what is wrong with the index: its counts, or its blocks.
func (s *Soak) Check() error {
	st := s.Index.Stats()
	switch n := s.Fleet.Differences(s.Index, s.Holders); {
	case s.Wrong > 0:
		return fmt.Errorf("%d wrong answers", s.Wrong)
	case st.Blocks != s.Fleet.Len() || st.Entries != s.Fleet.Entries():
		return fmt.Errorf("the index counts %d blocks, %d entries; there are %d, %d", st.Blocks, st.Entries, s.Fleet.Len(), s.Fleet.Entries())
	case n > 0:
		return fmt.Errorf("%d blocks are wrong", n)
	}
	return nil
}

// Run serves prompts for a while, and returns the bytes that the index takes at
// the end by its own account.
func (s *Soak) Run(d time.Duration) int {
	for start := time.Now(); time.Since(start) < d; {
		for range 100 {
			s.Step()
		}
	}
	runtime.GC()
	return s.Index.Stats().Bytes
}
