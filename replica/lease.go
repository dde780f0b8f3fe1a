package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Edge is what reads engines and writes the log: a bridge. Leases tells it what
// is its own. The methods return at once, but those that wait; they are called
// from several goroutines, never two at once for one source but Connected and
// Heard.
type Edge interface {
	// Known and Unknown say for which sources workers are registered,
	// whichever bridge reads them.
	Known(event.Source)
	Unknown(event.Source)
	// Set has a source read and written.
	Set(event.Worker)
	// Standby has a source read, and what comes held until Set, because
	// another bridge writes it still.
	Standby(event.Worker)
	// AwaitStandby waits until nothing is missed if the other bridge stops.
	AwaitStandby(ctx context.Context, s event.Source) error
	// Release has a source left alone, after what was read is written. Remove
	// has it retired. AwaitGone waits until that is done.
	Release(event.Source)
	Remove(event.Source)
	AwaitGone(ctx context.Context, s event.Source) error
	// Connected tells whether a source's engine is connected, and Heard when
	// something came from it last.
	Connected(event.Source) bool
	Heard(event.Source) (time.Time, bool)
}

// LeaseConfig is how Leases works. DefaultLeases has the values that fit most
// fleets.
type LeaseConfig struct {
	// ID names the bridge; no other may have the same name. A bridge that
	// starts again under its name has its sources at once.
	ID string
	// Claim are labels of the workers that the bridge is for. Others it reads
	// only as long as nobody else does. Empty: it is for all.
	Claim map[string]string
	// Bucket is the name of the key-value bucket, and Replicas how many NATS
	// servers keep it, should it have to be made.
	Bucket   string
	Replicas int
	// TTL is after how long a bridge that says nothing counts as dead. At
	// least a second; NATS counts in seconds.
	TTL time.Duration
	// Moves is how many sources are taken over from other bridges at a time.
	Moves int
	// StandbyTimeout is how long the next bridge of a source may take to
	// reach the engine. After that it says so, and gets the source only if
	// the bridge before goes, or does not reach the engine either.
	StandbyTimeout time.Duration
	// DrainTimeout bounds how long a bridge that stops waits for others to
	// take its sources over.
	DrainTimeout time.Duration
}

// DefaultLeases returns the configuration of a bridge with the given id.
func DefaultLeases(id string) LeaseConfig {
	return LeaseConfig{
		ID: id, Bucket: "KVMESH_LEASES", Replicas: 1, TTL: 5 * time.Second, Moves: 64,
		StandbyTimeout: 3 * time.Second, DrainTimeout: 20 * time.Second,
	}
}

// Validate tells what is wrong with a configuration.
func (c *LeaseConfig) Validate() error {
	switch {
	case c.ID == "":
		return errors.New("leases: ID is empty")
	case c.Bucket == "":
		return errors.New("leases: Bucket is empty")
	case c.TTL < time.Second:
		return fmt.Errorf("leases: TTL is %v, want at least 1s", c.TTL)
	case c.Replicas < 1 || c.Moves < 1 || c.StandbyTimeout <= 0 || c.DrainTimeout <= 0:
		return fmt.Errorf("leases: Replicas %d, Moves %d, StandbyTimeout %v, DrainTimeout %v: all must be more than 0", c.Replicas, c.Moves, c.StandbyTimeout, c.DrainTimeout)
	}
	return nil
}

// Leases settles which bridge reads which source. Each bridge has a session, a
// key that NATS drops when the bridge says nothing for the TTL, and each source
// a claim, a key that says whose it is, and that is changed only from the value
// that was seen last. Nobody is the leader: all bridges see the same, work out
// the same spread, and each takes what is its own.
//
// A source goes from one bridge to the next in four steps: the next one puts its
// name on the claim as the successor, and reads the engine in standby; it says
// that it is ready; the one before writes what it has and makes the successor the
// holder; the successor reads the log back and goes on. The source of a bridge
// that is dead is taken at once. Nothing depends on clocks that agree, and an old
// holder that does not know yet is fenced by the log.
//
// Leases is an Observer of the catalog.
type Leases struct {
	cfg     LeaseConfig
	bucket  bucket
	edge    Edge
	log     *slog.Logger
	refresh func(context.Context, event.Source) error
	metrics *leaseMetrics
	nonce   string // sets this life apart from others under the same name
	wake    chan struct{}
	slots   chan struct{} // one token a task
	tasks   sync.WaitGroup
	ctx     context.Context // of tasks

	mu       sync.Mutex
	kv       jetstream.KeyValue
	created  time.Time       // of the bucket
	told     map[string]bool // keys, while the bucket is read from the beginning; else nil
	synced   time.Time       // when that was done last
	settled  time.Time       // until when claims that are not there are left alone
	catalog  bool            // has been read
	workers  map[event.Source]event.Worker
	ended    map[event.Source]bool // unregistered, also if registered again since
	sessions map[string]session
	gone     map[string]time.Time // bridges without a session: from when on they count as dead
	claims   map[event.Source]claim
	parts    map[event.Source]*part
	draining bool
	usurped  bool // another bridge has our name
	renewed  map[event.Source]time.Time
}

// session is what a bridge says of itself.
type session struct {
	Nonce    string            `json:"nonce"`
	Claim    map[string]string `json:"claim,omitempty"`
	Draining bool              `json:"draining,omitempty"`

	revision uint64
	seen     time.Time
}

// claim is whose a source is.
type claim struct {
	Holder    string `json:"holder"`
	Successor string `json:"successor,omitempty"`
	Ready     string `json:"ready,omitempty"` // how the successor is

	revision uint64
}

// How a successor is.
const (
	readyHolding = "holding" // it reads the engine
	readyBlind   = "blind"   // it does not reach the engine
)

// part is what the edge of this bridge does with a source.
type part struct {
	doing  doing
	worker event.Worker
	busy   bool // a task is at it
}

type doing uint8

const (
	nothing doing = iota
	standing
	writing
)

// Keys of the bucket.
const (
	sessionPrefix = "s."
	claimPrefix   = "c."
)

// LeaseOptions are what Leases takes from its surroundings. The zero options log
// and measure nothing.
type LeaseOptions struct {
	Logger *slog.Logger
	Meter  metric.MeterProvider
	// Refresh, if not nil, is called now and then for a source of this bridge
	// whose worker is registered for a time only, if its engine was heard.
	Refresh func(context.Context, event.Source) error
}

// NewLeases returns a Leases that tells edge what is its own. Run runs it.
func NewLeases(js jetstream.JetStream, edge Edge, cfg LeaseConfig, opts LeaseOptions) (*Leases, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	l := &Leases{
		cfg: cfg,
		bucket: bucket{js: js, log: opts.Logger, config: jetstream.KeyValueConfig{
			Bucket:         cfg.Bucket,
			Description:    "kvmesh: which bridge reads which worker",
			Storage:        jetstream.FileStorage,
			Replicas:       cfg.Replicas,
			LimitMarkerTTL: time.Hour,
		}},
		edge:     edge,
		log:      opts.Logger.With("bridge", cfg.ID),
		refresh:  opts.Refresh,
		nonce:    nuid.Next(),
		wake:     make(chan struct{}, 1),
		slots:    make(chan struct{}, cfg.Moves),
		workers:  map[event.Source]event.Worker{},
		ended:    map[event.Source]bool{},
		sessions: map[string]session{},
		gone:     map[string]time.Time{},
		claims:   map[event.Source]claim{},
		parts:    map[event.Source]*part{},
		renewed:  map[event.Source]time.Time{},
	}
	m, err := newLeaseMetrics(opts.Meter, l)
	if err != nil {
		return nil, err
	}
	l.metrics = m
	return l, nil
}

// Run claims sources until ctx ends. Then it waits until other bridges have taken
// them over, if there are any, for no longer than the drain timeout. What is left
// after that is for the caller to stop; Close tells the others.
func (l *Leases) Run(ctx context.Context) error {
	defer l.metrics.gauges.Unregister()
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	l.mu.Lock()
	l.ctx = life
	l.mu.Unlock()
	var loops sync.WaitGroup
	loops.Go(func() { l.bucket.follow(life, l) })
	loops.Go(func() { l.keepSession(life) })
	l.loop(ctx, func() bool { return false })
	l.mu.Lock()
	l.draining = true
	l.mu.Unlock()
	l.signal()
	draining, stop := context.WithTimeout(life, l.cfg.DrainTimeout)
	l.loop(draining, l.drained)
	stop()
	end()
	loops.Wait()
	l.tasks.Wait()
	return nil
}

// Close says that this bridge is gone, so that others need not wait for its
// session to end. Its edge has stopped.
func (l *Leases) Close(ctx context.Context) error {
	l.mu.Lock()
	kv, usurped := l.kv, l.usurped
	l.mu.Unlock()
	if kv == nil || usurped {
		return nil
	}
	if err := kv.Purge(ctx, sessionPrefix+event.Escape(l.cfg.ID), jetstream.PurgeTTL(10*time.Minute)); err != nil {
		return fmt.Errorf("leases: session not ended, it will end by itself: %w", err)
	}
	return nil
}

// settleTime is how long changes are gathered before what follows from them is
// worked out.
const settleTime = 10 * time.Millisecond

// loop acts on changes until ctx ends, or done.
func (l *Leases) loop(ctx context.Context, done func() bool) {
	ticker := time.NewTicker(l.cfg.TTL / 8)
	defer ticker.Stop()
	for ctx.Err() == nil && !done() {
		select {
		case <-l.wake:
			select {
			case <-time.After(settleTime):
			case <-ctx.Done():
				return
			}
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		l.plan(time.Now())
	}
}

func (l *Leases) signal() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Holding returns the sources that this bridge reads and writes.
func (l *Leases) Holding() []event.Source {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []event.Source
	for s, p := range l.parts {
		if p.doing == writing {
			out = append(out, s)
		}
	}
	return out
}

// -- the catalog: Observer ----------------------------------------------------

// Registered implements Observer.
func (l *Leases) Registered(w event.Worker) {
	l.edge.Known(w.Source)
	l.mu.Lock()
	l.workers[w.Source] = w
	l.mu.Unlock()
	l.signal()
}

// Unregistered implements Observer.
func (l *Leases) Unregistered(s event.Source) {
	l.edge.Unknown(s)
	l.mu.Lock()
	delete(l.workers, s)
	delete(l.renewed, s)
	l.ended[s] = true
	l.mu.Unlock()
	l.signal()
}

// CatalogRead implements Observer.
func (l *Leases) CatalogRead() {
	l.mu.Lock()
	l.catalog = true
	l.mu.Unlock()
	l.signal()
}

// -- the bucket: follower -----------------------------------------------------

func (l *Leases) begin(kv jetstream.KeyValue, created time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	again := !l.created.IsZero()
	l.kv, l.told = kv, map[string]bool{}
	if again && !created.Equal(l.created) {
		// Whatever was agreed is lost: each says anew what it does, before
		// anybody takes what seems to be nobody's.
		l.claims, l.sessions = map[event.Source]claim{}, map[string]session{}
		l.settled = time.Now().Add(l.cfg.TTL)
	}
	l.created = created
}

func (l *Leases) each(c change) {
	defer l.signal()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.told != nil {
		l.told[c.key] = true
	}
	if name, ok := strings.CutPrefix(c.key, sessionPrefix); ok {
		if id, err := event.Unescape(name); err == nil {
			l.session(id, c)
		}
		return
	}
	s, err := event.ParseKey(strings.TrimPrefix(c.key, claimPrefix))
	if err != nil {
		l.log.Warn("entry of the leases is no claim", "key", c.key)
		return
	}
	if c.revision < l.claims[s].revision {
		return // of before our own change
	}
	var at claim
	if c.gone || json.Unmarshal(c.value, &at) != nil {
		delete(l.claims, s)
		return
	}
	at.revision = c.revision
	l.claims[s] = at
}

// session takes in what a bridge says of itself.
func (l *Leases) session(id string, c change) {
	now := time.Now()
	if c.gone {
		delete(l.sessions, id)
		from := now
		if c.expired {
			// After an outage all sessions are over at once, before anybody
			// can renew his own.
			from = maxTime(now, l.synced.Add(l.cfg.TTL))
			if l.told != nil {
				from = now.Add(l.cfg.TTL)
			}
		}
		l.gone[id] = from
		return
	}
	var at session
	if err := json.Unmarshal(c.value, &at); err != nil {
		l.log.Warn("session can't be read", "of", id, "error", err)
		return
	}
	at.revision, at.seen = c.revision, now
	l.sessions[id] = at
	delete(l.gone, id)
}

func (l *Leases) whole() {
	defer l.signal()
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for id, at := range l.sessions {
		if !l.told[sessionPrefix+event.Escape(id)] {
			delete(l.sessions, id)
			l.gone[id] = now.Add(l.cfg.TTL)
			continue
		}
		at.seen = now
		l.sessions[id] = at
	}
	for s := range l.claims {
		if !l.told[claimPrefix+s.Key()] {
			delete(l.claims, s)
		}
	}
	l.told, l.synced = nil, now
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
