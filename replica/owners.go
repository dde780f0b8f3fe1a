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

// A cache owner has a key of its own in the catalog: which worker has claimed its id,
// and to which bridge it is attached. The key is changed only from the value that
// was seen, so of two workers that claim an id at once, with different replicas, one
// gets it. A claim whose worker is not registered any more is nobody's.

const ownerPrefix = "o."

func ownerKey(id string) string { return ownerPrefix + event.Escape(id) }

// attachment is a cache owner as the bucket has it.
type attachment struct {
	Owner  string    `json:"cache_owner"`
	Source string    `json:"source"` // its key
	Bridge string    `json:"bridge,omitempty"`
	Since  time.Time `json:"since"`
}

func (a *attachment) encode() []byte {
	data, _ := json.Marshal(a) // nothing in it has an error
	return data
}

// owned takes in a change of a cache owner's key.
func (c *Catalog) owned(e change) {
	var a attachment
	err := json.Unmarshal(e.value, &a)
	c.reached(e.revision, func() {
		switch {
		case e.gone:
			delete(c.owners, e.key)
		case err == nil:
			c.owners[e.key] = a
		}
	})
	if err != nil && !e.gone {
		c.log.Warn("cache owner of the catalog can't be read", "key", e.key, "error", err)
	}
}

// Attachment returns what is on record of a cache owner; false if nobody has claimed
// it.
func (c *Catalog) Attachment(id string) (event.Attachment, bool) {
	c.mu.Lock()
	a, ok := c.owners[ownerKey(id)]
	c.mu.Unlock()
	source, err := event.ParseKey(a.Source)
	return event.Attachment{Source: source, Bridge: a.Bridge, Since: a.Since}, ok && err == nil
}

func ownedByAnother(id string, by event.Source) error {
	return fmt.Errorf("%w: cache owner %s is that of rank %d of instance %q of model %q: unregister that, or give this worker another id", event.ErrConflict, id, by.Rank, by.Instance, by.Model)
}

// claimOwner claims the id of a worker's cache owner, if it has one.
func (c *Catalog) claimOwner(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) (err error) {
	if w.CacheOwner == "" {
		return nil
	}
	key := ownerKey(w.CacheOwner)
	fresh := attachment{Owner: w.CacheOwner, Source: w.Key(), Since: time.Now()}
	return c.claimWith(ctx, kv, w, key, &fresh)
}

// claimOwnerAgain claims an id in a bucket that was made anew, with what was on
// record of it.
func (c *Catalog) claimOwnerAgain(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) error {
	key := ownerKey(w.CacheOwner)
	if was, ok := c.ownersBefore[key]; ok && was.Source == w.Key() {
		return c.claimWith(ctx, kv, w, key, &was)
	}
	return c.claimOwner(ctx, kv, w)
}

// claimWith claims an id with what is to be on record of it.
func (c *Catalog) claimWith(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, key string, fresh *attachment) (err error) {
	for range 5 {
		var e jetstream.KeyValueEntry
		e, err = kv.Get(ctx, key)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
			_, err = kv.Create(ctx, key, fresh.encode())
		case err == nil:
			err = c.claimAgain(ctx, kv, w, e, fresh)
		}
		if err == nil || !errors.Is(err, jetstream.ErrKeyExists) {
			break
		}
	}
	if err != nil && !errors.Is(err, event.ErrConflict) {
		return fmt.Errorf("catalog: %w", err)
	}
	return err
}

// claimAgain claims an id that somebody has claimed: the worker itself, or one that is
// gone.
func (c *Catalog) claimAgain(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, e jetstream.KeyValueEntry, fresh *attachment) error {
	var a attachment
	if json.Unmarshal(e.Value(), &a) == nil && a.Source == w.Key() {
		return nil
	}
	other, err := kv.Get(ctx, workerPrefix+a.Source)
	if err == nil {
		by, err := decode(other.Value())
		if err == nil && by.CacheOwner == w.CacheOwner {
			return ownedByAnother(w.CacheOwner, by.Source)
		}
	} else if !errors.Is(err, jetstream.ErrKeyNotFound) {
		return err
	}
	_, err = c.bucket.put(ctx, e.Key(), fresh.encode(), e.Revision(), 0)
	return err
}

// confirmOwner has the claim of a worker stand, now that the worker is in the bucket:
// who read the claim before, and found no worker, can't change it any more. If
// somebody has, the claim is lost.
func (c *Catalog) confirmOwner(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) error {
	if w.CacheOwner == "" {
		return nil
	}
	return c.changeOwner(ctx, kv, w, func(*attachment) bool { return true })
}

// changeOwner changes what is on record of a worker's cache owner, if f says so. A
// claim that is not there, because an earlier registration ended just now, is made.
func (c *Catalog) changeOwner(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, f func(*attachment) bool) error {
	key := ownerKey(w.CacheOwner)
	for {
		a := attachment{Owner: w.CacheOwner, Source: w.Key(), Since: time.Now()}
		e, err := kv.Get(ctx, key)
		there := !errors.Is(err, jetstream.ErrKeyNotFound)
		if there && err == nil {
			err = json.Unmarshal(e.Value(), &a)
		}
		if there && err != nil {
			return fmt.Errorf("cache owner %s: %w", w.CacheOwner, err)
		}
		if a.Source != w.Key() {
			source, _ := event.ParseKey(a.Source)
			return ownedByAnother(w.CacheOwner, source)
		}
		if !f(&a) {
			return nil
		}
		if there {
			_, err = c.bucket.put(ctx, key, a.encode(), e.Revision(), 0)
		} else {
			_, err = kv.Create(ctx, key, a.encode())
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return err
		}
	}
}

// Attach puts on record that a worker's cache owner is attached to a bridge. The
// error wraps event.ErrConflict if it is another worker's now.
func (c *Catalog) Attach(ctx context.Context, w event.Worker, bridge string) error {
	return c.attach(ctx, &w, func(a *attachment) bool {
		a.Bridge, a.Since = bridge, time.Now()
		return true
	})
}

// Detach puts on record that it is not any more.
func (c *Catalog) Detach(ctx context.Context, w event.Worker, bridge string) error {
	err := c.attach(ctx, &w, func(a *attachment) bool {
		mine := a.Bridge == bridge
		a.Bridge, a.Since = "", time.Now()
		return mine
	})
	if errors.Is(err, event.ErrConflict) {
		return nil // the record is another worker's
	}
	return err
}

func (c *Catalog) attach(ctx context.Context, w *event.Worker, f func(*attachment) bool) error {
	ctx, cancel := context.WithTimeout(ctx, bucketTimeout)
	defer cancel()
	kv, err := c.bucketNow()
	if err != nil {
		return err
	}
	return c.changeOwner(ctx, kv, w, f)
}

// releaseOwner takes away the claim of a worker that was unregistered. If that fails,
// or the worker's time was over, the claim stays, and is nobody's.
func (c *Catalog) releaseOwner(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) {
	if w.CacheOwner == "" {
		return
	}
	e, err := kv.Get(ctx, ownerKey(w.CacheOwner))
	var a attachment
	if err == nil {
		err = json.Unmarshal(e.Value(), &a)
	}
	if err == nil && a.Source == w.Key() {
		err = kv.Delete(ctx, e.Key(), jetstream.LastRevision(e.Revision()))
	}
	if err != nil {
		c.log.Debug("claim of a cache owner stays", "cache_owner", w.CacheOwner, "error", err)
	}
}
