package selection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica"
)

// Registry is the catalog of worker ranks, by whose endpoints bridges read events.
// *replica.Catalog is one.
type Registry interface {
	Register(ctx context.Context, w event.Worker) error
	Unregister(ctx context.Context, instance, model, group string, rank *uint32) ([]event.Source, error)
}

// RosterConfig is where a Roster is.
type RosterConfig struct {
	// Bucket is the name of the key-value bucket, and Replicas how many NATS
	// servers keep it, should it have to be made.
	Bucket   string
	Replicas int
}

// DefaultRoster returns the configuration that all parts of a deployment share.
func DefaultRoster() RosterConfig { return RosterConfig{Bucket: "KVMESH_SELECTION", Replicas: 1} }

// Roster is the descriptions of workers in a NATS key-value bucket: given to any
// replica, all see them. It tells its Selector, and keeps the catalog in step with
// the endpoints that the descriptions name.
type Roster struct {
	config   jetstream.KeyValueConfig
	js       jetstream.JetStream
	selector *Selector
	registry Registry
	log      *slog.Logger

	changing sync.Mutex // one change at a time

	mu       sync.Mutex
	kv       jetstream.KeyValue // nil until the bucket is there and has been read
	records  map[string]Record  // by instance
	revision uint64
	changed  chan struct{}

	// Of the goroutine that follows the bucket.
	next    jetstream.KeyValue
	told    map[string]bool // instances that there are, since Begin
	created time.Time       // of the bucket
	rescue  bool            // it is another one than before
}

// NewRoster returns a Roster. Run runs it.
func NewRoster(js jetstream.JetStream, cfg RosterConfig, s *Selector, registry Registry, logger *slog.Logger) *Roster {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Roster{
		config: jetstream.KeyValueConfig{
			Bucket:      cfg.Bucket,
			Description: "kvmesh: what workers are like, for selection",
			Storage:     jetstream.FileStorage,
			Replicas:    cfg.Replicas,
		},
		js: js, selector: s, registry: registry, log: logger,
		records: map[string]Record{}, changed: make(chan struct{}),
	}
}

// Run follows the bucket until ctx ends, and returns nil.
func (r *Roster) Run(ctx context.Context) error {
	replica.Follow(ctx, r.js, r.config, r, r.log)
	return nil
}

// Begin implements replica.Follower.
func (r *Roster) Begin(kv jetstream.KeyValue, created time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rescue = r.kv != nil && !created.Equal(r.created)
	r.next, r.created, r.told = kv, created, map[string]bool{}
	r.revision = 0 // a bucket made anew counts from the beginning
}

// Changed implements replica.Follower.
func (r *Roster) Changed(c replica.Change) {
	instance, err := event.Unescape(c.Key)
	var record Record
	var w Worker
	if err == nil && !c.Gone {
		if record, err = ParseRecord(c.Value); err == nil {
			w, err = record.Worker()
		}
	}
	if err == nil && !c.Gone && w.Instance != instance {
		err = fmt.Errorf("it says that it is %q", w.Instance)
	}
	if err != nil {
		r.log.Warn("description of a worker can't be used", "key", c.Key, "error", err)
	} else {
		r.told[instance] = !c.Gone
		r.tell(instance, record, w, c.Gone)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revision = max(r.revision, c.Revision)
	close(r.changed)
	r.changed = make(chan struct{})
}

// Whole implements replica.Follower: what was not told of is gone, unless the
// bucket was made anew.
func (r *Roster) Whole() {
	r.mu.Lock()
	r.kv = r.next
	gone := map[string]Record{}
	for instance, record := range r.records {
		if !r.told[instance] {
			gone[instance] = record
		}
	}
	r.mu.Unlock()
	if r.rescue {
		r.putBack(gone)
		return
	}
	for instance := range gone {
		r.tell(instance, Record{}, Worker{}, true)
	}
}

// putBack puts descriptions into a bucket that has lost them: its files are gone,
// or somebody has deleted it. Every replica that is up does so.
func (r *Roster) putBack(records map[string]Record) {
	r.log.Warn("the descriptions of workers have been made anew: putting them back", "bucket", r.config.Bucket, "workers", len(records))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for instance, record := range records {
		data, err := json.Marshal(record)
		if err == nil {
			_, err = r.next.Create(ctx, event.Escape(instance), data)
		}
		if err != nil && !errors.Is(err, jetstream.ErrKeyExists) {
			r.log.Warn("description not put back", "instance", instance, "error", err)
		}
	}
}

// tell tells the Selector.
func (r *Roster) tell(instance string, record Record, w Worker, gone bool) {
	r.mu.Lock()
	before, known := r.records[instance]
	if gone {
		delete(r.records, instance)
	} else {
		r.records[instance] = record
	}
	r.mu.Unlock()
	old := event.Partition{Model: before.ModelName, Group: before.RoutingGroup}
	if known && (gone || old != w.Partition()) {
		r.selector.Forget(old, instance)
	}
	if !gone {
		r.selector.Describe(w)
	}
}

// Ready returns nil if the descriptions have been read.
func (r *Roster) Ready() error {
	_, err := r.bucket()
	return err
}

func (r *Roster) bucket() (jetstream.KeyValue, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kv == nil {
		return nil, fmt.Errorf("the descriptions of workers, bucket %s, have not been reached yet", r.config.Bucket)
	}
	return r.kv, nil
}

func (r *Roster) await(ctx context.Context, revision uint64) error {
	for {
		r.mu.Lock()
		at, changed := r.revision, r.changed
		r.mu.Unlock()
		if at >= revision {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("the change was taken, but has not been told of yet: %w", ctx.Err())
		}
	}
}

// -- changes ------------------------------------------------------------------

// Upsert describes a worker, new or not, and registers its endpoints. Errors wrap
// event.ErrWorker or event.ErrConflict, or say why NATS could not be reached.
func (r *Roster) Upsert(ctx context.Context, record Record) error {
	r.changing.Lock()
	defer r.changing.Unlock()
	return r.change(ctx, record)
}

// Patch changes the description of a worker by a function. Errors are those of
// Upsert and of the function, or wrap ErrUnknownWorker.
func (r *Roster) Patch(ctx context.Context, instance string, f func(Record) (Record, error)) error {
	r.changing.Lock()
	defer r.changing.Unlock()
	kv, err := r.bucket()
	if err != nil {
		return err
	}
	record, err := r.known(ctx, kv, instance)
	if err != nil {
		return err
	}
	if record, err = f(record); err != nil {
		return err
	}
	return r.change(ctx, record)
}

// known returns what is known of a worker: what was described, be it on another
// replica a moment ago, or what the catalog says.
func (r *Roster) known(ctx context.Context, kv jetstream.KeyValue, instance string) (Record, error) {
	e, err := kv.Get(ctx, event.Escape(instance))
	if err == nil {
		if record, err := ParseRecord(e.Value()); err == nil {
			return record, r.await(ctx, e.Revision())
		}
	} else if !errors.Is(err, jetstream.ErrKeyNotFound) {
		return Record{}, fmt.Errorf("descriptions of workers: %w", err)
	}
	for _, st := range r.selector.Workers() {
		if st.Worker.Instance == instance {
			record := RecordOf(&st)
			record.Lifecycle, record.Reasons = "", nil
			return record, nil
		}
	}
	return Record{}, fmt.Errorf("%w %q", ErrUnknownWorker, instance)
}

func (r *Roster) change(ctx context.Context, record Record) error {
	kv, err := r.bucket()
	if err != nil {
		return err
	}
	w, err := record.Worker()
	if err != nil {
		return err
	}
	undo, err := r.reconcile(ctx, &w)
	if err != nil {
		return err
	}
	record.Lifecycle, record.Reasons = "", nil
	data, err := json.Marshal(record)
	var revision uint64
	if err == nil {
		revision, err = kv.Put(ctx, event.Escape(w.Instance), data)
	}
	if err != nil {
		undo()
		return fmt.Errorf("descriptions of workers: %w", err)
	}
	return r.await(ctx, revision)
}

// reconcile makes the catalog have what a worker's endpoints say, or leaves it
// as it was. undo takes it back.
func (r *Roster) reconcile(ctx context.Context, w *Worker) (undo func(), err error) {
	before := r.selector.registrations(w.Instance)
	want := map[event.Source]event.Worker{}
	if w.BlockSize > 0 {
		for _, reg := range w.Registrations() {
			want[reg.Source] = reg
		}
	}
	r.mu.Lock()
	old, described := r.records[w.Instance]
	r.mu.Unlock()
	ours := map[event.Source]bool{} // what an earlier description registered
	if described {
		if ow, err := old.Worker(); err == nil {
			for _, reg := range ow.Registrations() {
				ours[reg.Source] = true
			}
		}
	}
	var steps []func(context.Context) error // to go back
	undo = func() {
		back, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		for i := len(steps) - 1; i >= 0; i-- {
			if err := steps[i](back); err != nil {
				r.log.Error("a registration could not be taken back", "instance", w.Instance, "error", err)
			}
		}
	}
	remove := func(reg event.Worker) error {
		if _, err := r.registry.Unregister(ctx, reg.Instance, reg.Model, reg.Group, &reg.Rank); err != nil && !errors.Is(err, event.ErrNotRegistered) {
			return err
		}
		steps = append(steps, func(ctx context.Context) error { return r.registry.Register(ctx, reg) })
		return nil
	}
	for s, reg := range before {
		next, wanted := want[s]
		if wanted && next.Equal(&reg) || !wanted && !ours[s] && s.Partition() == w.Partition() {
			continue
		}
		if err := remove(reg); err != nil {
			undo()
			return nil, err
		}
	}
	for s, reg := range want {
		there, ok := before[s]
		same := ok && there.Equal(&reg)
		if same && reg.TTL == 0 {
			continue
		}
		if err := r.registry.Register(ctx, reg); err != nil { // again, if it is for a time
			undo()
			return nil, err
		}
		if same {
			continue
		}
		steps = append(steps, func(ctx context.Context) error {
			_, err := r.registry.Unregister(ctx, reg.Instance, reg.Model, reg.Group, &reg.Rank)
			return err
		})
	}
	return undo, nil
}

// Delete forgets a worker, and takes it out of the catalog. It returns what was
// known of it. Errors wrap ErrUnknownWorker, or say why NATS could not be
// reached.
func (r *Roster) Delete(ctx context.Context, instance string) (Record, error) {
	r.changing.Lock()
	defer r.changing.Unlock()
	kv, err := r.bucket()
	if err != nil {
		return Record{}, err
	}
	record, err := r.known(ctx, kv, instance)
	if err != nil {
		return record, err
	}
	_, err = r.registry.Unregister(ctx, instance, record.ModelName, record.RoutingGroup, nil)
	if err != nil && !errors.Is(err, event.ErrNotRegistered) {
		return record, err
	}
	r.mu.Lock()
	_, described := r.records[instance]
	r.mu.Unlock()
	if !described {
		return record, nil
	}
	if err := kv.Delete(ctx, event.Escape(instance)); err != nil {
		return record, fmt.Errorf("descriptions of workers: %w", err)
	}
	for {
		r.mu.Lock()
		_, there := r.records[instance]
		changed := r.changed
		r.mu.Unlock()
		if !there {
			return record, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return record, fmt.Errorf("the change was taken, but has not been told of yet: %w", ctx.Err())
		}
	}
}
