package selection

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
)

// Index says who holds how much of a prompt. *indexer.Indexer is one.
type Index interface {
	Match(q *indexer.Query, name event.Partition, locals []uint64) (indexer.Answer, error)
}

// An Index that does not hold all partitions says which with Serves; of others a
// Selector chooses no workers.
type partial interface {
	Serves(p event.Partition) bool
}

// Options are what a Selector takes from its surroundings. The zero Options score
// and pick as described at CostScorer and CostPicker, and log, measure and
// trace nothing.
type Options struct {
	Scorer Scorer
	Picker Picker
	// Strict, if not nil, books instead of the load: see load.Strict.
	Strict *load.Strict
	Logger *slog.Logger
	Meter  load.MeterProvider
	// Tracer makes spans of selections; nil: nothing is traced.
	Tracer trace.TracerProvider
}

// Selector selects workers. Any number of goroutines may use it. It is an
// observer of the catalog of workers.
type Selector struct {
	cfg     Config
	index   Index
	serves  func(event.Partition) bool // nil: all
	load    *load.Shared
	strict  *load.Strict
	scorer  Scorer
	picker  Picker
	log     *slog.Logger
	metrics *metrics
	tracer  trace.Tracer // nil: nothing is traced
	pools   atomic.Pointer[map[event.Partition]*pool]
	buffers sync.Pool
	synced  atomic.Bool // the catalog has been read
	stale   atomic.Bool // changed is not empty

	mu         sync.Mutex
	registered map[instanceKey]map[uint32]event.Worker // by the catalog
	described  map[instanceKey]*Worker                 // by Describe
	changed    map[event.Partition]bool                // their pools are to be made anew
	queues     map[event.Partition]*queue
}

// instanceKey names an instance. An instance is in one partition.
type instanceKey struct {
	event.Partition
	instance string
}

func keyOf(p event.Partition, instance string) instanceKey { return instanceKey{p, instance} }

// New returns a Selector over an index and a load.
func New(index Index, shared *load.Shared, cfg Config, opts Options) (*Selector, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	s := &Selector{
		cfg: cfg, index: index, load: shared, strict: opts.Strict, scorer: opts.Scorer, picker: opts.Picker, log: opts.Logger, tracer: newTracer(opts.Tracer),
		registered: map[instanceKey]map[uint32]event.Worker{}, described: map[instanceKey]*Worker{}, queues: map[event.Partition]*queue{}, changed: map[event.Partition]bool{},
	}
	if part, ok := index.(partial); ok {
		s.serves = part.Serves
	}
	if s.scorer == nil {
		s.scorer = CostScorer{}
	}
	if s.picker == nil {
		s.picker = CostPicker{}
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.pools.Store(&map[event.Partition]*pool{})
	s.buffers.New = func() any { return &buffer{} }
	m, err := newMetrics(opts.Meter, s)
	if err != nil {
		return nil, err
	}
	s.metrics = m
	return s, nil
}

// -- workers ------------------------------------------------------------------

// Registered says that a worker rank is in the catalog.
func (s *Selector) Registered(w event.Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := keyOf(w.Partition(), w.Instance)
	if s.registered[key] == nil {
		s.registered[key] = map[uint32]event.Worker{}
	}
	s.registered[key][w.Rank] = w
	s.change(key.Partition)
}

// Unregistered says that a worker rank is not in the catalog any more.
func (s *Selector) Unregistered(w event.Source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := keyOf(w.Partition(), w.Instance)
	delete(s.registered[key], w.Rank)
	if len(s.registered[key]) == 0 {
		delete(s.registered, key)
	}
	s.change(key.Partition)
}

// CatalogRead says that all workers of the catalog have been told of.
func (s *Selector) CatalogRead() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced.Store(true)
	for key := range s.described {
		s.change(key.Partition)
	}
}

// Describe says what a worker is like. Those that are registered and not
// described can be chosen too, and have no limits or taints.
func (s *Selector) Describe(w Worker) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := keyOf(w.Partition(), w.Instance)
	s.described[key] = &w
	s.change(key.Partition)
}

// Forget takes back what Describe said.
func (s *Selector) Forget(p event.Partition, instance string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.described, keyOf(p, instance))
	s.change(p)
}

// change notes that a partition's workers have changed. Its pool is made anew when
// somebody asks: a thousand workers that register make one pool, not a thousand.
func (s *Selector) change(p event.Partition) {
	s.changed[p] = true
	s.stale.Store(true)
}

// current returns the pools as they are now.
func (s *Selector) current() map[event.Partition]*pool {
	if s.stale.Load() {
		s.mu.Lock()
		for p := range s.changed {
			s.rebuild(p)
		}
		clear(s.changed)
		s.stale.Store(false)
		s.mu.Unlock()
	}
	return *s.pools.Load()
}

// rebuild makes the pool of a partition anew. It is called with mu held.
func (s *Selector) rebuild(name event.Partition) {
	before := (*s.pools.Load())[name]
	p := &pool{at: map[event.Source]int32{}}
	add := func(w *Worker, rank uint32) {
		c := Candidate{Source: event.Source{Model: name.Model, Group: name.Group, Instance: w.Instance, Rank: rank}, Worker: w, capacity: float64(w.MaxBatchedTokens)}
		if c.capacity == 0 {
			c.capacity = defaultBatchedTokens
		}
		p.blockSize = max(p.blockSize, w.BlockSize)
		p.eagle = p.eagle || w.Eagle
		p.hints = p.hints || w.HintType != ""
		p.candidates = append(p.candidates, c)
	}
	for key, w := range s.described {
		if key.Partition == name && !w.Draining && len(w.missing(s.registered[key], s.synced.Load())) == 0 {
			for _, rank := range w.ranks() {
				add(w, rank)
			}
		}
	}
	for key, ranks := range s.registered {
		if key.Partition != name || s.described[key] != nil {
			continue
		}
		var w *Worker
		for rank, r := range ranks {
			if w == nil {
				w = &Worker{Instance: r.Instance, Model: r.Model, Group: r.Group, IntegerID: r.IntegerID, BlockSize: r.BlockSize}
			}
			add(w, rank)
		}
	}
	slices.SortFunc(p.candidates, func(a, b Candidate) int {
		if c := strings.Compare(a.Source.Instance, b.Source.Instance); c != 0 {
			return c
		}
		return int(a.Source.Rank) - int(b.Source.Rank)
	})
	for i := range p.candidates {
		c := &p.candidates[i]
		c.slot = s.load.Hold(c.Source)
		p.at[c.Source] = int32(i)
	}
	pools := map[event.Partition]*pool{}
	for n, other := range *s.pools.Load() {
		pools[n] = other
	}
	pools[name] = p
	if len(p.candidates) == 0 && !s.inhabited(name) {
		delete(pools, name)
	}
	s.pools.Store(&pools)
	if before != nil {
		for i := range before.candidates {
			s.load.Release(before.candidates[i].slot)
		}
	}
}

func (s *Selector) inhabited(name event.Partition) bool {
	for key := range s.registered {
		if key.Partition == name {
			return true
		}
	}
	for key := range s.described {
		if key.Partition == name {
			return true
		}
	}
	return false
}

// Status is a worker and whether it can be chosen.
type Status struct {
	Worker    Worker
	Described bool
	Lifecycle Lifecycle
	// Reasons say why it can't be chosen.
	Reasons []string
}

// Workers returns all workers that are registered or described, sorted.
func (s *Selector) Workers() []Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Status
	for key, w := range s.described {
		st := Status{Worker: *w, Described: true, Lifecycle: Schedulable, Reasons: w.missing(s.registered[key], s.synced.Load())}
		switch {
		case len(st.Reasons) > 0:
			st.Lifecycle = Incomplete
		case w.Draining:
			st.Lifecycle = Draining
		}
		out = append(out, st)
	}
	for key, ranks := range s.registered {
		if s.described[key] != nil {
			continue
		}
		w := Worker{StartRank: math.MaxUint32, EventEndpoints: map[uint32]string{}, ReplayEndpoints: map[uint32]string{}}
		for rank, r := range ranks {
			w.Instance, w.Model, w.Group, w.IntegerID, w.BlockSize = r.Instance, r.Model, r.Group, r.IntegerID, r.BlockSize
			w.StartRank = min(w.StartRank, rank)
			w.Ranks++
			w.Engine, w.Topic, w.Labels, w.TTL = r.Engine, r.Topic, r.Labels, r.TTL
			w.EventEndpoints[rank] = r.Endpoint
			if r.ReplayEndpoint != "" {
				w.ReplayEndpoints[rank] = r.ReplayEndpoint
			}
		}
		out = append(out, Status{Worker: w, Lifecycle: Schedulable})
	}
	slices.SortFunc(out, func(a, b Status) int {
		if c := strings.Compare(a.Worker.Partition().String(), b.Worker.Partition().String()); c != 0 {
			return c
		}
		return strings.Compare(a.Worker.Instance, b.Worker.Instance)
	})
	return out
}

// Partition is a partition as a Selector knows it.
type Partition struct {
	BlockSize  uint32
	Eagle      bool
	Candidates []Candidate
}

// Partition returns the worker ranks of a partition that can be chosen. Errors
// wrap indexer.ErrUnknownPartition or indexer.ErrNotReady.
func (s *Selector) Partition(name event.Partition) (Partition, error) {
	p, err := s.pool(name)
	if err != nil {
		return Partition{}, err
	}
	return Partition{p.blockSize, p.eagle, p.candidates}, nil
}

// Partitions returns the names of all partitions.
func (s *Selector) Partitions() []event.Partition {
	var out []event.Partition
	for name := range s.current() {
		out = append(out, name)
	}
	slices.SortFunc(out, func(a, b event.Partition) int { return strings.Compare(a.String(), b.String()) })
	return out
}

func (s *Selector) pool(name event.Partition) (*pool, error) {
	p := s.current()[name]
	if p == nil {
		if !s.synced.Load() {
			return nil, fmt.Errorf("%w: the catalog of workers has not been read yet", indexer.ErrNotReady)
		}
		return nil, fmt.Errorf("model=%s routing_group=%s: %w", name.Model, name.Group, indexer.ErrUnknownPartition)
	}
	return p, nil
}

// Schedulable returns how many worker ranks can be chosen.
func (s *Selector) Schedulable() int {
	n := 0
	for _, p := range s.current() {
		n += len(p.candidates)
	}
	return n
}

// -- load ---------------------------------------------------------------------

// Load returns the load that the Selector reads and books.
func (s *Selector) Load() *load.Shared { return s.load }

// LoadOf returns what is active on a candidate.
func (s *Selector) LoadOf(c *Candidate) (l load.Load) {
	s.load.View(func(loads []load.Load) { l = loads[c.slot] })
	return l
}

// Loads appends what is active on each candidate.
func (s *Selector) Loads(dst []load.Load, candidates []Candidate) []load.Load {
	s.load.View(func(loads []load.Load) {
		for i := range candidates {
			dst = append(dst, loads[candidates[i].slot])
		}
	})
	return dst
}

// Reserve books on a worker rank that is known, without choosing. Errors are
// those of load.Shared.Reserve, or wrap ErrUnknownWorker.
func (s *Selector) Reserve(ctx context.Context, b load.Booking) error {
	p, err := s.pool(b.Worker.Partition())
	if err != nil {
		return err
	}
	if _, ok := p.at[b.Worker]; !ok {
		return fmt.Errorf("%w: %s, rank %d can't be chosen", ErrUnknownWorker, b.Worker.Instance, b.Worker.Rank)
	}
	if s.strict != nil {
		err = s.strict.Reserve(ctx, b)
	} else {
		err = s.load.Reserve(b)
	}
	return s.booked(b, err)
}

// Replay books what a selection chose that was kept under an id. Errors are
// those of load.Shared.Take, or wrap ErrUnknownWorker if its worker is gone.
func (s *Selector) Replay(ctx context.Context, name event.Partition, id string) (load.Booking, error) {
	b, err := s.load.Kept(ctx, id)
	if err != nil {
		return b, err
	}
	if b.Worker.Partition() != name {
		return b, fmt.Errorf("no selection %q waits to be booked in model=%s routing_group=%s: it is %w there", id, name.Model, name.Group, load.ErrUnknown)
	}
	p, err := s.pool(name)
	if err != nil {
		return b, err
	}
	if _, ok := p.at[b.Worker]; !ok {
		return b, fmt.Errorf("%w: %s, rank %d, which was selected, can't be chosen any more", ErrUnknownWorker, b.Worker.Instance, b.Worker.Rank)
	}
	if s.strict != nil {
		b, err = s.strict.Take(ctx, id)
	} else {
		b, err = s.load.Take(ctx, id)
	}
	return b, s.booked(b, err)
}

func (s *Selector) booked(b load.Booking, err error) error {
	if err == nil && b.Session != "" {
		s.load.SetSession(b.Session, b.Worker)
	}
	return err
}

// Free ends a reservation. Errors wrap load.ErrUnknown.
func (s *Selector) Free(ctx context.Context, id string) error {
	err := s.load.Free(ctx, id)
	if s.strict != nil && err == nil {
		s.strict.Freed(ctx, id)
	}
	return err
}

// NewID returns a name for a selection that nobody else has.
func NewID() string { return nuid.Next() }

// registrations returns what the catalog has of an instance.
func (s *Selector) registrations(instance string) map[event.Source]event.Worker {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := map[event.Source]event.Worker{}
	for key, ranks := range s.registered {
		if key.instance == instance {
			for _, w := range ranks {
				out[w.Source] = w
			}
		}
	}
	return out
}
