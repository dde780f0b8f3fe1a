package indexer

import (
	"context"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// A log that does not have its first record any more, or that is another one than
// before, may have lost what it knew of a worker: somebody purged it, or its disks
// are gone. Bridges write it again when they are asked. Until then an answer
// would say, wrongly, that the worker holds nothing.
const (
	// gatherTime bounds how long an Indexer waits for that. A worker that no
	// bridge reads is not waited for longer.
	gatherTime = 10 * time.Second
	gatherPoll = 50 * time.Millisecond
	gatherAsk  = time.Second
)

// gatherLoop finds out when all that a log has lost is there again.
func (x *shard) gatherLoop(ctx context.Context) {
	ticker := time.NewTicker(gatherPoll)
	defer ticker.Stop()
	var waiting *era
	var since, asked time.Time
	for {
		e := x.now()
		if !e.whole.Load() && e.ready.Load() && x.synced.Load() {
			now := time.Now()
			if waiting != e {
				waiting, since, asked = e, now, time.Time{}
			}
			ask := now.Sub(asked) > gatherAsk
			if ask {
				asked = now
			}
			missing := x.lacking(ask)
			if missing == 0 || now.Sub(since) > gatherTime {
				if missing > 0 {
					x.log.Warn("no bridge says what some workers hold: not waiting for them any longer", "workers", missing)
				}
				e.whole.Store(true)
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// lacking counts the workers that the log does not say all of, and asks for
// their checkpoints.
func (x *shard) lacking(ask bool) (n int) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	for _, p := range *x.now().partitions.Load() {
		if !p.served {
			continue // answers don't say anything of it
		}
		for _, in := range p.instances {
			for _, w := range in.workers {
				s := x.sources[w.Source]
				if s != nil && s.based && !s.diverged {
					continue
				}
				n++
				if !ask {
					continue
				}
				if err := x.nc.Publish(event.CheckpointSubject(w.Key()), nil); err != nil {
					x.log.Debug("checkpoint not asked for", "error", err)
				}
			}
		}
	}
	return n
}

// baseless asks for checkpoints of the sources whose oldest needed record the log
// has lost: this Indexer has their state, but the next one will not.
func (x *shard) baseless(first uint64) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, s := range x.sources {
		if s.keep < first && s.registered() && !s.ignored {
			x.askCheckpoint(s, first)
		}
	}
}
