package load

import (
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// session is which worker served a session last. Of two that were said at once,
// the one with the higher stamp holds, on every replica.
type session struct {
	worker   event.Source
	stamp    uint64 // ms since 1970, or one more than the one before
	writer   string // id of the replica
	deadline time.Time
}

// Session returns the worker rank that served a session last.
func (s *Shared) Session(id string) (event.Source, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sessionOf(id)
}

func (s *Shared) sessionOf(id string) (event.Source, bool) {
	if e := s.sessions[id]; e != nil && time.Now().Before(e.deadline) {
		return e.worker, true
	}
	return event.Source{}, false
}

// SetSession says which worker rank serves a session. Saying it again keeps the
// session from expiring.
func (s *Shared) SetSession(id string, w event.Source) {
	if id == "" || len(id) > MaxID {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	e := s.sessions[id]
	if e != nil && e.worker == w && e.deadline.Sub(now) > s.cfg.SessionExpiry*3/4 {
		return // nothing that others would have to know
	}
	if e == nil && len(s.sessions) >= s.cfg.MaxSessions {
		s.metrics.notKept.Add(s.metrics.ctx, 1)
		return
	}
	s.clock = max(s.clock+1, uint64(now.UnixMilli()))
	e = &session{worker: w, stamp: s.clock, writer: s.self.id, deadline: now.Add(s.cfg.SessionExpiry)}
	s.sessions[id] = e
	s.tellSession(id, e)
}

// EndSession forgets a session of this replica's view; those of others let it
// expire, or learn of its next worker.
func (s *Shared) EndSession(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.sessions[id]
	if e == nil {
		return
	}
	s.clock = max(s.clock+1, uint64(time.Now().UnixMilli()))
	// It is over at once, but its stamp stands until what was said before
	// can't come any more.
	gone := &session{worker: e.worker, stamp: s.clock, writer: s.self.id, deadline: time.Now()}
	s.sessions[id] = gone
	s.tellSession(id, gone)
}

// heardSession takes in what another replica says of a session.
func (s *Shared) heardSession(id string, e *session) {
	s.clock = max(s.clock, e.stamp)
	before := s.sessions[id]
	if before != nil && (before.stamp > e.stamp || before.stamp == e.stamp && before.writer >= e.writer) {
		return
	}
	if before == nil && len(s.sessions) >= s.cfg.MaxSessions {
		s.metrics.notKept.Add(s.metrics.ctx, 1)
		return
	}
	s.sessions[id] = e
}

// Sessions returns how many sessions are remembered.
func (s *Shared) Sessions() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, now := 0, time.Now()
	for _, e := range s.sessions {
		if now.Before(e.deadline) {
			n++
		}
	}
	return n
}
