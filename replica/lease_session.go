package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// keepSession says that this bridge is alive until ctx ends.
func (l *Leases) keepSession(ctx context.Context) {
	interval, retry := l.cfg.TTL/3, min(l.cfg.TTL/8, 250*time.Millisecond)
	var revision uint64
	said, known := session{}, false
	next := time.NewTimer(0)
	defer next.Stop()
	ticker := time.NewTicker(retry)
	defer ticker.Stop()
	for {
		l.mu.Lock()
		at := session{Nonce: l.nonce, Claim: l.cfg.Claim, Draining: l.draining}
		there := l.kv != nil
		_, seen := l.sessions[l.cfg.ID]
		lost := known && !seen && l.told == nil // it ended, or the bucket is a new one
		l.mu.Unlock()
		due := false
		select {
		case <-next.C:
			due = true
		default:
		}
		if there && (due || lost || at.Draining != said.Draining) {
			var err error
			if revision, err = l.say(ctx, at, revision); err == nil {
				said, known = at, true
				next.Reset(interval)
			} else {
				next.Reset(retry)
			}
			l.note(ctx, err)
		} else if due {
			next.Reset(retry)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// errUsurped: another process has the same name, and started later.
var errUsurped = errors.New("leases: another bridge has the same id, and started later")

// say renews the session that has the given revision, 0 if that is not known.
func (l *Leases) say(ctx context.Context, at session, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, max(l.cfg.TTL/3, 250*time.Millisecond))
	defer cancel()
	value, err := json.Marshal(at)
	if err != nil {
		return revision, err
	}
	key := sessionPrefix + event.Escape(l.cfg.ID)
	if revision > 0 {
		next, err := l.bucket.put(ctx, key, value, revision, l.cfg.TTL)
		if !errors.Is(err, jetstream.ErrKeyExists) {
			if err != nil {
				next = revision
			}
			return next, err
		}
	}
	// What is there is ours, of an earlier life, of somebody else, or nothing.
	l.mu.Lock()
	kv := l.kv
	l.mu.Unlock()
	current, err := kv.Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return kv.Create(ctx, key, value, jetstream.KeyTTL(l.cfg.TTL))
	case err != nil:
		return revision, err
	}
	var other session
	if err := json.Unmarshal(current.Value(), &other); err == nil && other.Nonce != l.nonce && revision > 0 {
		return revision, errUsurped
	}
	return l.bucket.put(ctx, key, value, current.Revision(), l.cfg.TTL)
}

// note remembers what became of renewing the session.
func (l *Leases) note(ctx context.Context, err error) {
	l.mu.Lock()
	was := l.usurped
	l.usurped = errors.Is(err, errUsurped)
	now := l.usurped
	l.mu.Unlock()
	switch {
	case now && !was:
		l.log.Error("giving all workers up", "error", err)
	case was && !now && err == nil:
		l.log.Info("the other bridge of this id is gone")
	case err != nil && !now && ctx.Err() == nil:
		l.log.Warn("session not renewed", "error", err)
	}
	if was != now {
		l.signal()
	}
}

// hears tells whether what this bridge says of itself comes back to it. If not,
// it hears nobody else either, and must not take them for dead. Called with mu
// held.
func (l *Leases) hears(now time.Time) bool {
	own, ok := l.sessions[l.cfg.ID]
	return ok && now.Sub(own.seen) < l.cfg.TTL
}

// alive tells whether a bridge counts as alive. Called with mu held.
func (l *Leases) alive(id string, now time.Time) bool {
	if id == l.cfg.ID {
		return true
	}
	if at, ok := l.sessions[id]; ok {
		// NATS ends sessions; this is for a NATS that does not.
		return now.Sub(at.seen) < 2*l.cfg.TTL
	}
	from, ok := l.gone[id]
	if !ok {
		from = now.Add(l.cfg.TTL) // it may be about to say something
		l.gone[id] = from
	}
	return now.Before(from)
}

// present tells whether a bridge has a session. Called with mu held.
func (l *Leases) present(id string) bool {
	_, ok := l.sessions[id]
	return ok
}

// candidates returns the bridges that may get sources. Called with mu held.
func (l *Leases) candidates(now time.Time) []candidate {
	var out []candidate
	for id, at := range l.sessions {
		if !at.Draining && id != l.cfg.ID && l.alive(id, now) {
			out = append(out, candidate{id: id, claim: at.Claim})
		}
	}
	if !l.draining {
		out = append(out, candidate{id: l.cfg.ID, claim: l.cfg.Claim})
	}
	return out
}

// drained tells whether nothing is left that another bridge could take over.
func (l *Leases) drained() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.bucket.js.Conn().IsClosed() {
		return true
	}
	now := time.Now()
	if own := l.sessions[l.cfg.ID]; now.Sub(own.seen) > 2*l.cfg.TTL || len(l.candidates(now)) == 0 {
		return true
	}
	for _, p := range l.parts {
		if p.doing != nothing || p.busy {
			return false
		}
	}
	for _, c := range l.claims {
		if c.Holder == l.cfg.ID {
			return false
		}
	}
	return true
}

// set changes a claim from the revision that was seen, and tells whether that was
// possible: if not, somebody else changed it, which will be told.
func (l *Leases) set(ctx context.Context, s event.Source, to claim) bool {
	ctx, cancel := context.WithTimeout(ctx, bucketTimeout)
	defer cancel()
	value, err := json.Marshal(to)
	if err != nil {
		return false
	}
	revision, err := l.bucket.put(ctx, claimPrefix+s.Key(), value, to.revision, 0)
	if err != nil && to.revision == 0 && errors.Is(err, jetstream.ErrKeyExists) {
		// A key that was deleted has a revision that nobody is told.
		l.mu.Lock()
		kv := l.kv
		l.mu.Unlock()
		revision, err = kv.Create(ctx, claimPrefix+s.Key(), value)
	}
	if err != nil {
		if !errors.Is(err, jetstream.ErrKeyExists) && ctx.Err() == nil {
			l.log.Warn("claim not changed", "source", s.Key(), "error", err)
		}
		time.AfterFunc(250*time.Millisecond, l.signal)
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if revision > l.claims[s].revision {
		to.revision = revision
		l.claims[s] = to
	}
	return true
}

// clear deletes a claim that has the given revision.
func (l *Leases) clear(ctx context.Context, s event.Source, revision uint64) error {
	ctx, cancel := context.WithTimeout(ctx, bucketTimeout)
	defer cancel()
	l.mu.Lock()
	kv := l.kv
	l.mu.Unlock()
	if err := kv.Delete(ctx, claimPrefix+s.Key(), jetstream.LastRevision(revision)); err != nil {
		return fmt.Errorf("claim of %s not deleted: %w", s.Key(), err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.claims[s].revision == revision {
		delete(l.claims, s)
	}
	return nil
}
