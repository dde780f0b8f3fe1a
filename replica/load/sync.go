package load

import (
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// Most messages of a replica that are held while others before them are missing.
const (
	maxEarly      = 4096
	maxEarlyBytes = 16 << 20
)

// syncState is how far this replica is behind another.
type syncState struct {
	behind bool      // something is missing
	since  time.Time // since when
	asked  time.Time // when the state was asked for last
	early  map[uint64][]byte
	bytes  int // of early
	// chunks of a state that is being told
	telling telling
	chunks  [][]operation
	have    int
}

// telling names one telling of a state: its chunks belong together.
type telling struct {
	from string
	n    uint64 // the teller's number of it
	seq  uint64
}

// take takes in a message. Bad ones are counted and dropped, and what they said
// is missed and asked for.
func (s *Shared) take(data []byte) {
	if err := s.read(data); err != nil {
		s.metrics.bad.Add(s.metrics.ctx, 1)
		s.log.Warn("message of another replica can't be read", "error", err)
	}
}

func (s *Shared) read(data []byte) error {
	r := mpack.NewReader(data)
	if n := r.Array(); n < 3 {
		return ErrMessage
	}
	version, kind, from := r.Uint(), r.Uint(), string(r.Str())
	if err := r.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrMessage, err)
	}
	if version != wireVersion {
		return fmt.Errorf("%w: version %d", ErrMessage, version)
	}
	if from == s.self.id || from == "" || len(from) > MaxID {
		return nil // our own comes back
	}
	if kind == kindAsk {
		s.answer(from)
		return nil
	}
	var st state
	if kind == kindState { // read before others have to wait for it
		var err error
		if st, err = readState(&r); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.meet(from)
	p.heard = time.Now()
	if p.dead { // it is back
		p.dead = false
		s.missing(p)
	}
	var err error
	switch kind {
	case kindOps:
		err = s.takeOps(p, r, data)
	case kindBeat:
		err = s.takeBeat(p, r)
	case kindState:
		err = s.takeState(p, &st)
	}
	close(s.applied)
	s.applied = make(chan struct{})
	return err
}

// meet returns a replica, known or new. A new one's state is missing, unless
// nothing of it has been missed.
func (s *Shared) meet(id string) *peer {
	p := s.peers[id]
	if p == nil {
		p = newPeer(id)
		p.heard = time.Now()
		s.peers[id] = p
		s.order = append(s.order, p)
	}
	return p
}

// missing notes that something of a replica is missing.
func (s *Shared) missing(p *peer) {
	if !p.sync.behind {
		p.sync.behind, p.sync.since = true, time.Now()
	}
}

func (s *Shared) takeOps(p *peer, r mpack.Reader, data []byte) error {
	first, n := r.Uint(), r.Uint()
	if r.Err() != nil || n == 0 || n > uint64(len(data)) || first == 0 || first+n < first {
		return fmt.Errorf("%w: operations %d, %d of them", ErrMessage, first, n)
	}
	switch {
	case first+n-1 <= p.seq:
		return nil // again
	case first > p.seq+1:
		s.missing(p)
		y := &p.sync
		if y.early == nil {
			y.early = map[uint64][]byte{}
		}
		if _, there := y.early[first]; !there && len(y.early) < maxEarly && y.bytes+len(data) <= maxEarlyBytes {
			y.early[first] = append([]byte(nil), data...)
			y.bytes += len(data)
		}
		return nil
	}
	if err := s.applyOps(p, r, first, n); err != nil {
		s.missing(p)
		return err
	}
	s.catchUp(p)
	return nil
}

// applyOps applies the operations that are new of those from first on.
func (s *Shared) applyOps(p *peer, r mpack.Reader, first, n uint64) error {
	now := time.Now()
	if got := r.Array(); uint64(got) != n {
		return fmt.Errorf("%w: %d operations instead of %d", ErrMessage, got, n)
	}
	var o operation
	for seq := first; seq < first+n; seq++ {
		readOp(&r, &o, now)
		if err := r.Err(); err != nil {
			return fmt.Errorf("%w: operation %d: %w", ErrMessage, seq, err)
		}
		if seq > p.seq {
			s.apply(p, &o)
			p.seq = seq
		}
	}
	return nil
}

// catchUp applies what came early and has its turn now.
func (s *Shared) catchUp(p *peer) {
	y := &p.sync
	for progress := true; progress && len(y.early) > 0; {
		progress = false
		for first, data := range y.early {
			if first > p.seq+1 {
				continue
			}
			delete(y.early, first)
			y.bytes -= len(data)
			progress = true
			r, n := opsOf(data)
			if err := s.applyOps(p, r, first, n); err != nil {
				s.metrics.bad.Add(s.metrics.ctx, 1)
				return // still behind
			}
		}
	}
	if len(y.early) == 0 {
		*y = syncState{}
	}
}

// apply applies an operation of a replica.
func (s *Shared) apply(p *peer, o *operation) {
	if o.kind == opAdd || o.kind == opSession {
		w, err := s.source(o.worker)
		if err != nil { // it is missing here then, and its absence shows in the digest
			s.metrics.bad.Add(s.metrics.ctx, 1)
			s.log.Warn("a replica names a worker that can't be", "replica", p.id, "error", err)
			return
		}
		o.r.Worker, o.session.worker = w, w
	}
	switch o.kind {
	case opAdd:
		if p.reservations[o.r.key] == nil {
			r := o.r
			r.owner = p
			s.put(&r)
		}
	case opFree:
		if r := p.reservations[o.r.key]; r != nil && r.stamp == o.r.stamp {
			s.drop(r)
		}
	case opChange:
		if r := p.reservations[o.r.key]; r != nil && r.stamp == o.r.stamp {
			r.done, r.outputs, r.decay = o.r.done, min(o.r.outputs, MaxBlocks), o.r.decay
			s.touched(r)
		}
	case opMark:
		if !s.stale(o.key) {
			m := o.m
			p.marks[o.key] = &m
			s.marked(o.key)
		}
	case opSession:
		e := o.session
		s.heardSession(o.id, &e)
	}
}

// source returns the worker rank of a key.
func (s *Shared) source(key string) (event.Source, error) {
	if slot, ok := s.keys[key]; ok {
		return s.workers[slot].source, nil
	}
	return event.ParseKey(key)
}

// stale tells whether a mark is on what is over.
func (s *Shared) stale(key markKey) bool {
	if key.owner == "" {
		return s.over(key.id) && s.active(key.id) == nil
	}
	owner := s.peers[key.owner]
	if owner == nil || owner.seq < key.stamp {
		return false
	}
	r := owner.reservations[key.id]
	return r == nil || r.stamp != key.stamp
}

// marked counts the reservations that a mark is on anew.
func (s *Shared) marked(key markKey) {
	if key.owner != "" {
		if owner := s.peers[key.owner]; owner != nil {
			if r := owner.reservations[key.id]; r != nil && r.stamp == key.stamp {
				s.touched(r)
			}
		}
		return
	}
	for _, p := range s.order {
		if r := p.reservations[key.id]; r != nil {
			s.touched(r)
		}
	}
}

func (s *Shared) takeBeat(p *peer, r mpack.Reader) error {
	seq, d, joins := r.Uint(), digest{r.Uint(), r.Uint()}, r.Bool()
	if err := r.Err(); err != nil {
		return fmt.Errorf("%w: beat: %w", ErrMessage, err)
	}
	switch {
	case seq > p.seq:
		s.missing(p)
	case seq == p.seq && d != p.digest:
		s.log.Warn("what is known of a replica differs from what it has", "replica", p.id)
		s.missing(p)
	}
	if joins {
		// It learns of us from this, and asks.
		data := appendHead(nil, 4, kindBeat, s.self.id)
		data = mpack.AppendUint(data, s.self.seq)
		data = mpack.AppendUint(data, s.self.digest.count)
		data = mpack.AppendUint(data, s.self.digest.sum)
		s.publish(subjectTo(s.cfg.Group, p.id), mpack.AppendBool(data, false))
	}
	return nil
}

// chase asks those for their state of whom something has been missing for too
// long.
func (s *Shared) chase(now time.Time) {
	var ask []string
	s.mu.Lock()
	for _, p := range s.order[1:] {
		y := &p.sync
		if !y.behind || p.dead || now.Sub(y.asked) < s.cfg.AskInterval {
			continue
		}
		if p.seq > 0 && now.Sub(y.since) < s.cfg.Patience {
			continue
		}
		y.asked = now
		ask = append(ask, p.id)
	}
	s.mu.Unlock()
	for _, id := range ask {
		s.metrics.heals.Add(s.metrics.ctx, 1)
		s.publish(subjectTo(s.cfg.Group, id), appendHead(nil, 0, kindAsk, s.self.id))
	}
}
