package replica

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// plan looks at every source, and does the next step of what is to be done for it
// here.
func (l *Leases) plan(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.usurped {
		for s, p := range l.parts {
			l.leave(s, p)
		}
		return
	}
	if l.kv == nil || l.told != nil || !l.catalog || !l.hears(now) {
		return
	}
	l.settleEnded()
	target := l.targets(now)
	for s, w := range l.workers {
		if l.ended[s] {
			continue
		}
		p := l.parts[s]
		if p == nil {
			p = &part{}
			l.parts[s] = p
		}
		if !p.busy {
			l.step(s, w, p, target[s], now)
		}
	}
	for s, p := range l.parts {
		if l.registered(s) || p.busy {
			continue
		}
		if c, ok := l.claims[s]; !ok || c.Holder != l.cfg.ID {
			if ok || p.doing == standing {
				l.leave(s, p)
			} else if p.doing == writing {
				l.retire(s, p, claim{})
				continue
			}
		}
		if p.doing == nothing && !p.busy {
			delete(l.parts, s)
		}
	}
	for s, c := range l.claims {
		if !l.registered(s) {
			l.bury(s, c, now)
		}
	}
}

// registered tells whether a source has a worker, and what it did for an earlier
// registration is over.
func (l *Leases) registered(s event.Source) bool {
	_, ok := l.workers[s]
	return ok && !l.ended[s]
}

// settleEnded forgets that workers were unregistered of which nothing is left to
// be ended here.
func (l *Leases) settleEnded() {
	for s := range l.ended {
		p := l.parts[s]
		if l.claims[s].Holder != l.cfg.ID && (p == nil || p.doing == nothing && !p.busy) {
			delete(l.ended, s)
		}
	}
}

// targets returns whose each source is to be.
func (l *Leases) targets(now time.Time) map[event.Source]string {
	workers := make([]event.Worker, 0, len(l.workers))
	owner := make(map[event.Source]string, len(l.workers))
	for s, w := range l.workers {
		workers = append(workers, w)
		c, ok := l.claims[s]
		switch {
		case !ok && l.parts[s] != nil && l.parts[s].doing == writing:
			owner[s] = l.cfg.ID
		case ok && c.Successor != "" && l.alive(c.Successor, now):
			owner[s] = c.Successor
		case ok:
			owner[s] = c.Holder
		}
	}
	return assign(workers, l.candidates(now), owner)
}

// step does the next step for a source that has a worker.
func (l *Leases) step(s event.Source, w event.Worker, p *part, target string, now time.Time) {
	c, claimed := l.claims[s]
	me := l.cfg.ID
	switch {
	case claimed && c.Holder == me:
		l.hold(s, w, p, c, now)
	case claimed && l.alive(c.Holder, now):
		l.succeed(s, w, p, c, target, now)
	case p.doing == writing && !claimed: // what was agreed is lost, but this is how it was
		l.take(s, p, c)
	case target == me && (claimed || !now.Before(l.settled)):
		l.take(s, p, c)
	case p.doing == standing && target != me:
		l.leave(s, p)
	}
}

// hold is for a source that is this bridge's.
func (l *Leases) hold(s event.Source, w event.Worker, p *part, c claim, now time.Time) {
	if p.doing != writing || !p.worker.Equal(&w) {
		p.doing, p.worker = writing, w
		l.edge.Set(w)
	}
	l.renew(s, w, now)
	if c.Successor == "" || c.Ready == "" || !l.alive(c.Successor, now) {
		return
	}
	if c.Ready == readyBlind && !l.draining && l.edge.Connected(s) {
		return
	}
	l.task(p, func(ctx context.Context) {
		l.edge.Release(s)
		if err := l.edge.AwaitGone(ctx, s); err != nil {
			l.log.Warn("handing over", "source", s.Key(), "error", err)
		}
		l.mu.Lock()
		p.doing = nothing
		l.mu.Unlock()
		if l.set(ctx, s, claim{Holder: c.Successor, revision: c.revision}) {
			l.metrics.handovers.Add(ctx, 1)
		}
	})
}

// succeed is for a source that is another living bridge's.
func (l *Leases) succeed(s event.Source, w event.Worker, p *part, c claim, target string, now time.Time) {
	me := l.cfg.ID
	switch {
	case p.doing == writing: // it was taken: this bridge counted as dead, or gave it away
		l.log.Warn("another bridge has taken this worker over", "source", s.Key(), "by", c.Holder)
		l.metrics.yields.Add(l.ctx, 1)
		l.leave(s, p)
	case c.Successor == me && (target != me || l.draining):
		l.leave(s, p)
		l.task(p, func(ctx context.Context) { l.set(ctx, s, claim{Holder: c.Holder, revision: c.revision}) })
	case c.Successor == me && p.doing == nothing:
		p.doing, p.worker = standing, w
		l.edge.Standby(w)
	case c.Successor == me && !p.worker.Equal(&w):
		p.worker = w
		l.edge.Standby(w)
	case c.Successor == me && c.Ready == "":
		l.task(p, func(ctx context.Context) { l.getReady(ctx, s, c) })
	case c.Successor == me && c.Ready == readyBlind && l.edge.Connected(s):
		l.task(p, func(ctx context.Context) { l.getReady(ctx, s, c) })
	case c.Successor != me && p.doing == standing:
		l.leave(s, p)
	case !l.present(c.Holder): // neither there nor dead: after an outage nobody is, and nothing is to move for that
	case target == me && (c.Successor == "" || !l.alive(c.Successor, now)):
		l.task(p, func(ctx context.Context) { l.set(ctx, s, claim{Holder: c.Holder, Successor: me, revision: c.revision}) })
	}
}

// getReady says that this bridge is ready to take a source over.
func (l *Leases) getReady(ctx context.Context, s event.Source, c claim) {
	waiting, cancel := context.WithTimeout(ctx, l.cfg.StandbyTimeout)
	err := l.edge.AwaitStandby(waiting, s)
	cancel()
	to := claim{Holder: c.Holder, Successor: c.Successor, Ready: readyHolding, revision: c.revision}
	if err != nil {
		to.Ready = readyBlind
	}
	if to.Ready != c.Ready && ctx.Err() == nil {
		l.set(ctx, s, to)
	}
}

// take makes a source this bridge's that is nobody's.
func (l *Leases) take(s event.Source, p *part, c claim) {
	if c.Holder != "" {
		l.log.Info("taking a worker over", "source", s.Key(), "from", c.Holder)
	}
	l.task(p, func(ctx context.Context) {
		if l.set(ctx, s, claim{Holder: l.cfg.ID, revision: c.revision}) && c.Holder != "" {
			l.metrics.takeovers.Add(ctx, 1)
		}
	})
}

// leave stops what the edge does with a source.
func (l *Leases) leave(s event.Source, p *part) {
	if p.doing == nothing {
		return
	}
	p.doing = nothing
	l.edge.Release(s)
}

// bury is for a claim without a worker: its source is retired by who has it, or
// by the first bridge that is alive, and then the claim goes.
func (l *Leases) bury(s event.Source, c claim, now time.Time) {
	p := l.parts[s]
	if p == nil {
		p = &part{}
		l.parts[s] = p
	}
	switch {
	case p.busy:
	case c.Holder == l.cfg.ID:
		l.retire(s, p, c)
	case l.alive(c.Holder, now):
	case l.undertaker(s, now) == l.cfg.ID:
		l.take(s, p, c)
	}
}

// undertaker returns which bridge retires the source of one that is dead.
func (l *Leases) undertaker(s event.Source, now time.Time) string {
	best := ""
	for _, c := range l.candidates(now) {
		if best == "" || score(c.id, s) > score(best, s) {
			best = c.id
		}
	}
	return best
}

// retire has a source retired, and takes its claim away.
func (l *Leases) retire(s event.Source, p *part, c claim) {
	l.task(p, func(ctx context.Context) {
		l.edge.Remove(s)
		if err := l.edge.AwaitGone(ctx, s); err != nil {
			l.log.Warn("retiring", "source", s.Key(), "error", err)
			return
		}
		l.mu.Lock()
		p.doing = nothing
		l.mu.Unlock()
		if c.revision == 0 {
			return
		}
		if err := l.clear(ctx, s, c.revision); err != nil {
			l.log.Warn("retired", "error", err)
			time.AfterFunc(250*time.Millisecond, l.signal)
		}
	})
}

// renew has a registration for a time only renewed if the engine was heard since
// that was done last.
func (l *Leases) renew(s event.Source, w event.Worker, now time.Time) {
	if w.TTL <= 0 || l.refresh == nil || now.Sub(l.renewed[s]) < w.TTL/3 {
		return
	}
	heard, ok := l.edge.Heard(s)
	if !ok || heard.Before(l.renewed[s]) {
		return
	}
	l.renewed[s] = now
	l.tasks.Go(func() {
		if err := l.refresh(l.ctx, s); err != nil {
			l.log.Warn("registration not renewed", "source", s.Key(), "error", err)
		}
	})
}

// task does something for a source that takes its time. Nothing else is done for
// it meanwhile, and then what is next.
func (l *Leases) task(p *part, f func(ctx context.Context)) {
	if p.busy {
		return
	}
	select {
	case l.slots <- struct{}{}:
	default:
		return // as many as may be are going on; when one is done, it is looked again
	}
	p.busy = true
	l.tasks.Go(func() {
		defer func() {
			<-l.slots
			l.mu.Lock()
			p.busy = false
			l.mu.Unlock()
			l.signal()
		}()
		f(l.ctx)
	})
}
