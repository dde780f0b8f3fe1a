// Package replica is what the replicas of one service share through NATS.
package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Catalog is the workers of the fleet, in a NATS key-value bucket: registered
// with any replica or bridge, all see them. It keeps a copy in memory that
// follows the bucket.
type Catalog struct {
	bucket bucket
	log    *slog.Logger
	see    []Observer

	mu       sync.Mutex
	kv       jetstream.KeyValue // nil until the bucket is there
	created  time.Time          // of the bucket
	workers  map[event.Source]event.Worker
	owners   map[string]attachment   // by key
	at       map[event.Source]uint64 // their revisions
	revision uint64                  // of the bucket, up to which workers is true
	read     bool                    // all of the bucket has been read
	changed  chan struct{}

	// The follower's own.
	told         map[event.Source]bool // while the bucket is read from the beginning; else nil
	ownersBefore map[string]attachment // those of the bucket before it was read again
	rescue       bool                  // the bucket was made anew: what is known is put back
}

// Observer is told of every change of the catalog, from one goroutine and in
// order. Both methods may be called again for what has been told before.
type Observer interface {
	Registered(event.Worker)
	Unregistered(event.Source)
	// CatalogRead is called when all that was in the catalog at the beginning
	// has been told.
	CatalogRead()
}

// CatalogConfig is where a Catalog is.
type CatalogConfig struct {
	// Bucket is the name of the key-value bucket, and Replicas how many NATS
	// servers keep it, should it have to be made.
	Bucket   string
	Replicas int
}

// DefaultCatalog returns the configuration of the catalog that all parts of a
// deployment share.
func DefaultCatalog() CatalogConfig { return CatalogConfig{Bucket: "KVMESH_WORKERS", Replicas: 1} }

// NewCatalog returns a Catalog that tells the observers what it sees. Run runs
// it.
func NewCatalog(js jetstream.JetStream, cfg CatalogConfig, logger *slog.Logger, observers ...Observer) *Catalog {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Catalog{
		bucket: bucket{js: js, log: logger, config: jetstream.KeyValueConfig{
			Bucket:         cfg.Bucket,
			Description:    "kvmesh: the workers of the fleet",
			Storage:        jetstream.FileStorage,
			Replicas:       cfg.Replicas,
			LimitMarkerTTL: time.Hour,
		}},
		log:     logger,
		see:     observers,
		workers: map[event.Source]event.Worker{},
		owners:  map[string]attachment{},
		at:      map[event.Source]uint64{},
		changed: make(chan struct{}),
	}
}

// Keys of the bucket: a worker rank, a partition with its block size, and a cache
// owner.
const (
	workerPrefix    = "w."
	partitionPrefix = "p."
)

func partitionKey(p event.Partition) string {
	return partitionPrefix + event.Escape(p.Model) + "." + event.Escape(p.Group)
}

// entry is a worker as the bucket has it.
type entry struct {
	Instance       string            `json:"instance_id"`
	IntegerID      bool              `json:"integer_id,omitempty"`
	Model          string            `json:"model_name"`
	Group          string            `json:"routing_group"`
	Rank           uint32            `json:"dp_rank"`
	Endpoint       string            `json:"endpoint"`
	ReplayEndpoint string            `json:"replay_endpoint,omitempty"`
	Topic          string            `json:"topic,omitempty"`
	Engine         string            `json:"engine,omitempty"`
	BlockSize      uint32            `json:"block_size"`
	CacheOwner     string            `json:"cache_owner,omitempty"`
	Labels         map[string]string `json:"labels,omitempty"`
	TTL            int64             `json:"ttl_seconds,omitempty"`
	Life           string            `json:"life,omitempty"`
}

func encode(w *event.Worker) ([]byte, error) {
	return json.Marshal(entry{
		Instance: w.Instance, IntegerID: w.IntegerID, Model: w.Model, Group: w.Group, Rank: w.Rank, Endpoint: w.Endpoint,
		ReplayEndpoint: w.ReplayEndpoint, Topic: w.Topic, Engine: w.Engine, BlockSize: w.BlockSize, CacheOwner: w.CacheOwner, Labels: w.Labels,
		TTL: int64(w.TTL / time.Second), Life: w.Life,
	})
}

func decode(data []byte) (event.Worker, error) {
	var e entry
	if err := json.Unmarshal(data, &e); err != nil {
		return event.Worker{}, err
	}
	w := event.Worker{
		Source:   event.Source{Model: e.Model, Group: e.Group, Instance: e.Instance, Rank: e.Rank},
		Endpoint: e.Endpoint, ReplayEndpoint: e.ReplayEndpoint, Topic: e.Topic, Engine: e.Engine,
		BlockSize: e.BlockSize, CacheOwner: e.CacheOwner, Labels: e.Labels, IntegerID: e.IntegerID, TTL: time.Duration(e.TTL) * time.Second,
		Life: e.Life,
	}
	return w, w.Validate()
}

// -- following the bucket -----------------------------------------------------

// Run follows the bucket until ctx ends, and returns nil.
func (c *Catalog) Run(ctx context.Context) error {
	c.bucket.follow(ctx, c)
	return nil
}

// begin implements follower.
func (c *Catalog) begin(kv jetstream.KeyValue, created time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rescue = c.read && !created.Equal(c.created)
	c.kv, c.created, c.revision = kv, created, 0 // a bucket made anew counts from the beginning
	c.told, c.ownersBefore, c.owners = map[event.Source]bool{}, c.owners, map[string]attachment{}
}

// each implements follower.
func (c *Catalog) each(e change) {
	key, ok := strings.CutPrefix(e.key, workerPrefix)
	if strings.HasPrefix(e.key, ownerPrefix) {
		c.owned(e)
		return
	}
	if !ok {
		c.reached(e.revision, func() {})
		return
	}
	source, err := event.ParseKey(key)
	if err != nil {
		c.log.Warn("entry of the catalog is no worker", "key", e.key, "error", err)
		return
	}
	if e.gone {
		if e.expired {
			c.log.Info("a worker's registration is over", "instance", source.Instance, "rank", source.Rank, "model", source.Model)
		}
		c.remove(source, e.revision)
		return
	}
	w, err := decode(e.value)
	if err == nil && w.Source != source {
		err = fmt.Errorf("it says that it is %s", w.Key())
	}
	if err != nil {
		c.log.Warn("entry of the catalog can't be used", "key", e.key, "error", err)
		return
	}
	if c.told != nil {
		c.told[source] = true
	}
	c.put(w, e.revision)
}

// whole implements follower: what it was not told of is gone.
func (c *Catalog) whole() {
	c.mu.Lock()
	var gone []event.Worker
	for source, w := range c.workers {
		if !c.told[source] {
			gone = append(gone, w)
		}
	}
	first := !c.read
	c.read = true
	c.mu.Unlock()
	c.told = nil
	if c.rescue {
		c.putBack(gone)
		gone = nil
	}
	for _, w := range gone {
		c.remove(w.Source, 0)
	}
	if first {
		for _, o := range c.see {
			o.CatalogRead()
		}
	}
}

// putBack puts workers into a bucket that has lost them: its files are gone, or
// somebody has deleted it. Every replica that is up does so.
func (c *Catalog) putBack(workers []event.Worker) {
	c.log.Warn("the catalog has been made anew: putting the workers back", "bucket", c.bucket.config.Bucket, "workers", len(workers))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for i := range workers {
		w := &workers[i]
		if _, err := c.claimBlockSize(ctx, c.kv, w); err != nil {
			c.log.Warn("worker not put back", "instance", w.Instance, "rank", w.Rank, "error", err)
			continue
		}
		if err := c.claimOwnerAgain(ctx, c.kv, w); err != nil {
			c.log.Warn("worker not put back", "instance", w.Instance, "rank", w.Rank, "error", err)
			continue
		}
		if _, err := c.write(ctx, c.kv, w, 0); err != nil && !errors.Is(err, jetstream.ErrKeyExists) {
			c.log.Warn("worker not put back", "instance", w.Instance, "rank", w.Rank, "error", err)
		}
	}
}

func (c *Catalog) put(w event.Worker, revision uint64) {
	c.mu.Lock()
	before, known := c.workers[w.Source]
	c.mu.Unlock()
	if known && before.Life != w.Life {
		// It was unregistered in between, and of two changes that follow
		// each other closely NATS tells the last.
		c.remove(w.Source, 0)
		known = false
	}
	if !known || !before.Equal(&w) || before.TTL != w.TTL {
		for _, o := range c.see {
			o.Registered(w)
		}
	}
	c.reached(revision, func() { c.workers[w.Source], c.at[w.Source] = w, revision })
}

// remove tells of a worker that is gone, even if it was not there: the log may
// still have what it held.
func (c *Catalog) remove(source event.Source, revision uint64) {
	for _, o := range c.see {
		o.Unregistered(source)
	}
	c.reached(revision, func() { delete(c.workers, source); delete(c.at, source) })
}

// reached makes a change to the copy that all observers have been told of, and
// wakes who waits for it.
func (c *Catalog) reached(revision uint64, change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
	if revision > c.revision {
		c.revision = revision
	}
	close(c.changed)
	c.changed = make(chan struct{})
}

// await waits until a revision has been told to all observers of this process.
func (c *Catalog) await(ctx context.Context, revision uint64) error {
	for {
		c.mu.Lock()
		at, changed := c.revision, c.changed
		c.mu.Unlock()
		if at >= revision {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the catalog took the change, but has not told of it yet: %w", ctx.Err())
		}
	}
}

// bucketNow returns the bucket, or why it can't be had.
func (c *Catalog) bucketNow() (jetstream.KeyValue, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kv == nil || !c.read {
		return nil, fmt.Errorf("the catalog of workers, bucket %s, has not been reached yet", c.bucket.config.Bucket)
	}
	return c.kv, nil
}

// -- changing it --------------------------------------------------------------

// Register puts a worker into the catalog. When it returns, the observers of this
// process have been told. Registering a worker again as it is is fine. Errors
// wrap event.ErrWorker or event.ErrConflict, or say why NATS could not be reached.
func (c *Catalog) Register(ctx context.Context, w event.Worker) error {
	w.Complete()
	if err := w.Validate(); err != nil {
		return err
	}
	kv, err := c.bucketNow()
	if err != nil {
		return err
	}
	before, err := c.conflict(&w)
	if err != nil {
		return err
	}
	if before > 0 {
		return c.again(ctx, kv, &w, before)
	}
	alone := !c.inhabited(w.Partition())
	claim, err := c.claimBlockSize(ctx, kv, &w)
	if err != nil {
		return err
	}
	if err := c.claimOwner(ctx, kv, &w); err != nil {
		return err
	}
	w.Life = nuid.Next()
	revision, err := c.write(ctx, kv, &w, 0)
	if errors.Is(err, jetstream.ErrKeyExists) {
		revision, err = c.meet(ctx, kv, &w)
	}
	if err == nil {
		if alone {
			err = c.confirmBlockSize(ctx, kv, &w, claim)
		}
		if err == nil {
			err = c.confirmOwner(ctx, kv, &w)
		}
		if errors.Is(err, event.ErrConflict) {
			err = errors.Join(err, kv.Delete(ctx, workerPrefix+w.Key(), jetstream.LastRevision(revision)))
		}
	}
	if errors.Is(err, event.ErrConflict) {
		return err
	}
	if err != nil {
		return fmt.Errorf("catalog: %w", err)
	}
	return c.await(ctx, revision)
}

// meet looks at a registration that somebody else has made just now. It returns
// its revision if it is the same.
func (c *Catalog) meet(ctx context.Context, kv jetstream.KeyValue, w *event.Worker) (uint64, error) {
	e, err := kv.Get(ctx, workerPrefix+w.Key())
	if err != nil {
		return 0, err
	}
	if other, err := decode(e.Value()); err == nil && other.Equal(w) {
		return e.Revision(), nil
	}
	return 0, fmt.Errorf("%w: rank %d of instance %q was registered by somebody else just now", event.ErrConflict, w.Rank, w.Instance)
}

// write writes a worker that has the given revision, 0 for none.
func (c *Catalog) write(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, revision uint64) (uint64, error) {
	data, err := encode(w)
	if err != nil {
		return 0, err
	}
	key := workerPrefix + w.Key()
	switch {
	case revision > 0:
		return c.bucket.put(ctx, key, data, revision, w.TTL)
	case w.TTL > 0:
		return kv.Create(ctx, key, data, jetstream.KeyTTL(w.TTL))
	}
	return kv.Create(ctx, key, data)
}

// again registers a worker that is registered just so: its time begins again, if
// it has one.
func (c *Catalog) again(ctx context.Context, kv jetstream.KeyValue, w *event.Worker, revision uint64) error {
	c.mu.Lock()
	before := c.workers[w.Source]
	c.mu.Unlock()
	if w.TTL == 0 && before.TTL == 0 {
		return nil
	}
	w.Life = before.Life
	revision, err := c.write(ctx, kv, w, revision)
	if errors.Is(err, jetstream.ErrKeyExists) {
		return nil // somebody did so just now
	}
	if err != nil {
		return fmt.Errorf("catalog: %w", err)
	}
	return c.await(ctx, revision)
}

// Refresh has the time of a registration begin again, because the worker was
// heard. A worker that is registered without an end is left alone.
func (c *Catalog) Refresh(ctx context.Context, s event.Source) error {
	ctx, cancel := context.WithTimeout(ctx, bucketTimeout)
	defer cancel()
	kv, err := c.bucketNow()
	if err != nil {
		return err
	}
	c.mu.Lock()
	w, ok := c.workers[s]
	revision := c.at[s]
	c.mu.Unlock()
	if !ok || w.TTL == 0 {
		return nil
	}
	return c.again(ctx, kv, &w, revision)
}

// conflict compares a registration with the workers there are. If the worker is
// registered just so already, it returns the revision of that.
func (c *Catalog) conflict(w *event.Worker) (revision uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if before, ok := c.workers[w.Source]; ok {
		if before.Equal(w) {
			return max(c.at[w.Source], 1), nil
		}
		return 0, fmt.Errorf("%w: rank %d of instance %q is registered with endpoint %s; unregister it before you change it", event.ErrConflict, w.Rank, w.Instance, before.Endpoint)
	}
	for _, other := range c.workers {
		if w.CacheOwner != "" && other.CacheOwner == w.CacheOwner {
			return 0, ownedByAnother(w.CacheOwner, other.Source)
		}
		if other.Instance == w.Instance && other.Partition() != w.Partition() {
			return 0, fmt.Errorf("%w: instance %q is registered for model %q, routing group %q", event.ErrConflict, w.Instance, other.Model, other.Group)
		}
		if other.Partition() == w.Partition() && other.BlockSize != w.BlockSize {
			return 0, fmt.Errorf("%w: block_size is %d, but the workers of model %q, routing group %q have %d", event.ErrConflict, w.BlockSize, w.Model, w.Group, other.BlockSize)
		}
	}
	return 0, nil
}

// Unregister takes workers out of the catalog, and returns which: those of an
// instance of a model, of one routing group unless group is empty, and of one
// rank unless rank is nil. When it returns, the observers of this process have
// been told. Errors wrap event.ErrNotRegistered, or say why NATS could not be
// reached.
func (c *Catalog) Unregister(ctx context.Context, instance, model, group string, rank *uint32) ([]event.Source, error) {
	kv, err := c.bucketNow()
	if err != nil {
		return nil, err
	}
	var out []event.Source
	var owned []event.Worker
	c.mu.Lock()
	for s, w := range c.workers {
		if s.Instance == instance && s.Model == model && (group == "" || group == s.Group) && (rank == nil || *rank == s.Rank) {
			out, owned = append(out, s), append(owned, w)
		}
	}
	c.mu.Unlock()
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: instance %q of model %q", event.ErrNotRegistered, instance, model)
	}
	slices.SortFunc(out, func(a, b event.Source) int { return strings.Compare(a.Key(), b.Key()) })
	for _, s := range out {
		if err := kv.Delete(ctx, workerPrefix+s.Key()); err != nil {
			return nil, fmt.Errorf("catalog: %w", err)
		}
	}
	for i := range owned {
		c.releaseOwner(ctx, kv, &owned[i])
	}
	return out, c.awaitGone(ctx, out)
}

// awaitGone waits until workers are not in the copy any more.
func (c *Catalog) awaitGone(ctx context.Context, sources []event.Source) error {
	for {
		c.mu.Lock()
		there := slices.ContainsFunc(sources, func(s event.Source) bool { _, ok := c.workers[s]; return ok })
		changed := c.changed
		c.mu.Unlock()
		if !there {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the catalog took the change, but has not told of it yet: %w", ctx.Err())
		}
	}
}

// Workers returns the workers there are.
func (c *Catalog) Workers() []event.Worker {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]event.Worker, 0, len(c.workers))
	for _, w := range c.workers {
		out = append(out, w)
	}
	return out
}
