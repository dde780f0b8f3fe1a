package load

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// tick is how often a Shared looks at what is late, dead or expired.
const tick = 25 * time.Millisecond

// Run shares the load until ctx ends, and returns nil, or why the transport can't
// be listened to.
func (s *Shared) Run(ctx context.Context) error {
	defer s.metrics.close()
	if s.transport != nil {
		for _, subject := range []string{subjectAll(s.cfg.Group), subjectTo(s.cfg.Group, s.self.id)} {
			stop, err := s.transport.Subscribe(subject, s.take)
			if err != nil {
				return err
			}
			defer stop()
		}
	}
	var tasks sync.WaitGroup
	defer tasks.Wait()
	tasks.Go(func() { s.tickLoop(ctx) })
	for {
		select {
		case <-s.wake:
			s.flush()
		case <-ctx.Done():
			s.flush()
			return nil
		}
	}
}

// flush publishes the operations that wait.
func (s *Shared) flush() {
	s.flushing.Lock()
	defer s.flushing.Unlock()
	for {
		s.mu.Lock()
		var b batch
		if len(s.out.full) > 0 {
			b, s.out.full = s.out.full[0], s.out.full[1:]
		} else {
			b, s.out.last = s.out.last, batch{}
		}
		s.out.bytes -= len(b.ops)
		s.mu.Unlock()
		if b.n == 0 {
			return
		}
		data := appendHead(make([]byte, 0, len(b.ops)+64), 3, kindOps, s.self.id)
		data = mpack.AppendUint(data, b.first)
		data = mpack.AppendUint(data, uint64(b.n))
		data = append(mpack.AppendArray(data, b.n), b.ops...)
		s.publish(subjectAll(s.cfg.Group), data)
	}
}

// publish sends a message. One that is not sent will be missed, and asked for.
func (s *Shared) publish(subject string, data []byte) error {
	err := s.transport.Publish(subject, data)
	if err != nil {
		s.metrics.unsent.Add(s.metrics.ctx, 1)
		s.log.Debug("message to other replicas not sent", "error", err)
	}
	return err
}

func (s *Shared) tickLoop(ctx context.Context) {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	var beaten, swept time.Time
	sweep := max(min(s.cfg.Expiry, s.cfg.PendingExpiry, s.cfg.DeadExpiry, s.cfg.EarlyExpiry)/20, tick)
	for {
		now := time.Now()
		if s.transport != nil {
			if now.Sub(beaten) >= s.beatInterval() {
				beaten = now
				s.beat(now)
			}
			s.chase(now)
			s.join(now)
		}
		if now.Sub(swept) >= sweep {
			swept = now
			s.sweep(now)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// beatInterval is short until the others have been found.
func (s *Shared) beatInterval() time.Duration {
	if s.joined.Load() {
		return s.cfg.Beat
	}
	return min(s.cfg.Beat, 4*tick)
}

// beat says that this replica is there, and how far it is.
func (s *Shared) beat(now time.Time) {
	s.flush() // so that nobody misses what is about to come
	s.mu.Lock()
	data := appendHead(nil, 4, kindBeat, s.self.id)
	data = mpack.AppendUint(data, s.self.seq)
	data = mpack.AppendUint(data, s.self.digest.count)
	data = mpack.AppendUint(data, s.self.digest.sum)
	data = mpack.AppendBool(data, !s.joined.Load())
	s.mu.Unlock()
	if s.publish(subjectAll(s.cfg.Group), data) == nil {
		s.mu.Lock()
		if s.began.IsZero() {
			s.began = now
		}
		s.mu.Unlock()
	}
}

// join ends the start: the others have had time to answer, and all who did have
// told their state.
func (s *Shared) join(now time.Time) {
	if s.joined.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.began.IsZero() || now.Sub(s.began) < s.cfg.JoinWindow {
		return
	}
	for _, p := range s.order[1:] {
		if !p.dead && p.sync.behind {
			return
		}
	}
	s.joined.Store(true)
	s.log.Info("load of other replicas is known", "replicas", len(s.order))
}

// sweep drops what has expired, and marks as dead who is silent.
func (s *Shared) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.order {
		if p != s.self && !p.dead && now.Sub(p.heard) > s.cfg.DeadAfter {
			s.bury(p, now)
		}
		// A living owner says itself what has expired.
		if p == s.self || p.dead {
			for _, r := range p.reservations {
				if now.Before(r.deadline) {
					continue
				}
				if !r.waits && !r.ended {
					s.metrics.expired.Add(s.metrics.ctx, 1)
				}
				s.drop(r)
				if p == s.self {
					s.tellFree(r)
				}
			}
		}
		for key, m := range p.marks {
			if now.After(m.deadline) {
				delete(p.marks, key)
			}
		}
	}
	s.order = slices.DeleteFunc(s.order, func(p *peer) bool {
		gone := p.dead && len(p.reservations) == 0 && len(p.marks) == 0 && now.Sub(p.heard) > s.cfg.DeadAfter+s.cfg.DeadExpiry
		if gone {
			delete(s.peers, p.id)
		}
		return gone
	})
	for id, e := range s.sessions {
		if now.Sub(e.deadline) > s.cfg.EarlyExpiry {
			delete(s.sessions, id)
		}
	}
}

// bury marks a replica as dead: what it owns expires.
func (s *Shared) bury(p *peer, now time.Time) {
	p.dead = true
	p.sync = syncState{}
	latest := now.Add(s.cfg.DeadExpiry)
	for _, r := range p.reservations {
		if r.deadline.After(latest) {
			r.deadline = latest
		}
	}
	s.log.Warn("a replica is silent: its reservations expire", "replica", p.id, "reservations", len(p.reservations))
}

// PeerInfo is what is known of a replica.
type PeerInfo struct {
	ID           string
	Seq          uint64
	Reservations int
	Behind       bool // messages of it are missing
	Self         bool
}

// Peers returns the replicas that are there, this one first.
func (s *Shared) Peers() []PeerInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []PeerInfo
	for _, p := range s.order {
		if p.dead {
			continue
		}
		n := 0
		for _, r := range p.reservations {
			if !r.waits && !r.ended {
				n++
			}
		}
		out = append(out, PeerInfo{ID: p.id, Seq: p.seq, Reservations: n, Behind: p.sync.behind, Self: p == s.self})
	}
	return out
}

// WaitFor waits until what a replica did up to its number seq is known here.
func (s *Shared) WaitFor(ctx context.Context, id string, seq uint64) error {
	for {
		s.mu.Lock()
		p, applied := s.peers[id], s.applied
		there := p != nil && p.seq >= seq
		s.mu.Unlock()
		if there {
			return nil
		}
		select {
		case <-applied:
		case <-ctx.Done():
			return errors.Join(ErrNotJoined, ctx.Err())
		}
	}
}
