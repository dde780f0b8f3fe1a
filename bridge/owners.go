package bridge

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// ErrNoSlot: as many cache owners are attached as the bridge has slots. Their
// workers are read when one is free.
var ErrNoSlot = errors.New("bridge: no slot is free for the worker's cache owner")

// Attachments is where it is on record which cache owner is attached to which
// bridge. Its methods are called for one worker at a time.
type Attachments interface {
	Attach(ctx context.Context, w event.Worker, bridge string) error
	Detach(ctx context.Context, w event.Worker, bridge string) error
}

// ownerSlots are the cache owners that the bridge has room for.
type ownerSlots struct {
	max int

	mu   sync.Mutex
	held map[string]event.Source // by id: whose owner is attached
}

// attach gives a worker's cache owner a slot. Errors wrap ErrNoSlot.
func (o *ownerSlots) attach(w *event.Worker) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if by, ok := o.held[w.CacheOwner]; ok {
		return fmt.Errorf("%w: %s is attached to rank %d of instance %q still", ErrNoSlot, w.CacheOwner, by.Rank, by.Instance)
	}
	if len(o.held) >= o.max {
		return fmt.Errorf("%w: this bridge has %d (--max-slots), and all are in use", ErrNoSlot, o.max)
	}
	o.held[w.CacheOwner] = w.Source
	return nil
}

func (o *ownerSlots) detach(w *event.Worker) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.held, w.CacheOwner)
}

// attach takes a slot for a worker that has a cache owner.
func (b *Bridge) attach(ctx context.Context, w *event.Worker) error {
	if w.CacheOwner == "" {
		return nil
	}
	err := b.owners.attach(w)
	if err != nil {
		b.metrics.refused.Add(ctx, 1)
	}
	return err
}

// record puts on record that a worker's cache owner is attached here.
func (b *Bridge) record(ctx context.Context, w *event.Worker) error {
	if w.CacheOwner == "" || b.attachments == nil {
		return nil
	}
	return b.attachments.Attach(ctx, *w, b.cfg.ID)
}

// detach gives the slot of a worker back, and has those look again that wait for
// one.
func (b *Bridge) detach(w *event.Worker) {
	if w.CacheOwner == "" {
		return
	}
	if b.attachments != nil {
		ctx, cancel := context.WithTimeout(context.Background(), b.cfg.PublishTimeout)
		defer cancel()
		if err := b.attachments.Detach(ctx, *w, b.cfg.ID); err != nil {
			b.log.Warn("cache owner is on record as attached still", "instance", w.Instance, "rank", w.Rank, "cache_owner", w.CacheOwner, "error", err)
		}
	}
	b.owners.detach(w)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.slots {
		s.mu.Lock()
		if errors.Is(s.err, ErrNoSlot) {
			s.signal()
		}
		s.mu.Unlock()
	}
}
