package replica

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// blockSizeOf is what the bucket has of a partition.
func blockSizeOf(w *event.Worker) (key, value string) {
	return partitionKey(w.Partition()), fmt.Sprintf(`{"block_size":%d}`, w.BlockSize)
}

func otherBlockSize(w *event.Worker, have []byte) error {
	return fmt.Errorf("%w: block_size is %d, but model %q, routing group %q has %s", event.ErrConflict, w.BlockSize, w.Model, w.Group, have)
}

// claimBlockSize makes the worker's block size that of its partition, unless
// somebody has workers there with another one. It returns the revision of that.
func (c *Catalog) claimBlockSize(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) (revision uint64, err error) {
	key, want := blockSizeOf(w)
	for range 5 {
		e, err := kv.Get(ctx, key)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
			revision, err = kv.Create(ctx, key, []byte(want))
		case err != nil:
		case string(e.Value()) == want:
			return e.Revision(), nil
		case c.inhabited(w.Partition()):
			return 0, otherBlockSize(w, e.Value())
		default: // of workers that are gone, or that this copy has not heard of
			var there bool
			if there, err = c.listed(ctx, kv, w.Partition()); there {
				return 0, otherBlockSize(w, e.Value())
			}
			if err == nil {
				revision, err = c.bucket.put(ctx, key, []byte(want), e.Revision(), 0)
			}
		}
		if err == nil {
			return revision, nil
		}
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return 0, fmt.Errorf("catalog: %w", err)
		}
	}
	return 0, fmt.Errorf("%w: several registrations set the block size of model %q, routing group %q at once", event.ErrConflict, w.Model, w.Group)
}

// confirmBlockSize has the claim on the block size of a partition stand, now that
// the worker is in the bucket: who read the claim before, and found no worker,
// can't change it any more. If somebody has, the claim is lost.
func (c *Catalog) confirmBlockSize(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, revision uint64) error {
	key, want := blockSizeOf(w)
	for {
		_, err := c.bucket.put(ctx, key, []byte(want), revision, 0)
		if !errors.Is(err, jetstream.ErrKeyExists) {
			return err
		}
		e, err := kv.Get(ctx, key)
		if err != nil {
			return err
		}
		if string(e.Value()) != want {
			return otherBlockSize(w, e.Value())
		}
		revision = e.Revision()
	}
}

// listed tells whether the bucket has workers of a partition.
func (c *Catalog) listed(ctx context.Context, kv jetstream.KeyValue, p event.Partition) (bool, error) {
	keys, err := kv.ListKeysFiltered(ctx, workerPrefix+event.Escape(p.Model)+"."+event.Escape(p.Group)+".>")
	if err != nil {
		return false, err
	}
	defer keys.Stop()
	_, there := <-keys.Keys()
	return there, nil
}

func (c *Catalog) inhabited(p event.Partition) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for source := range c.workers {
		if source.Partition() == p {
			return true
		}
	}
	return false
}
