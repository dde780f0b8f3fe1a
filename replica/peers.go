package replica

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// PeersSubjects is where the processes of a deployment say what they are, and
// indexers what they hold, each under its own id.
const PeersSubjects = "kvmesh.replica.>"

const peersPrefix = "kvmesh.replica."

// Holding is what an indexer holds of a source after the source's record at a log
// sequence.
type Holding struct {
	Source  event.Source
	LogSeq  uint64
	Digests event.Digests
}

// Snapshot is what an indexer holds.
type Snapshot struct {
	Ready bool
	event.Position
	Sources []Holding
}

// Peer is what is known of another process of the deployment.
type Peer struct {
	ID      string    `json:"id"`
	Role    string    `json:"role"`
	Version string    `json:"version"`
	Self    bool      `json:"self"`
	Heard   time.Time `json:"heard"`
	// What follows is of indexers, with the position that its answers are true
	// for.
	Ready *bool `json:"ready,omitempty"`
	event.PositionJSON
	// Compared is how many sources both had at one log sequence when they
	// were compared last, and Differing which of them were not the same.
	// DigestEqual is nil if nothing could be compared.
	Compared    int      `json:"compared"`
	Differing   []string `json:"differing"`
	DigestEqual *bool    `json:"digest_equal"`
}

// PeersConfig is who this process is.
type PeersConfig struct {
	ID, Role, Version string
	// Interval is how often it says so. A process that says nothing for five
	// times as long is gone.
	Interval time.Duration
	// Snapshot returns what its index holds; nil if it has none.
	Snapshot func() Snapshot
	Logger   *slog.Logger
	Meter    metric.MeterProvider
}

// Peers are the processes of a deployment. Indexers tell each other the digests of
// what they hold, source by source, and compare those that are of one log
// sequence. One that differs should not be: it is counted, and a checkpoint of
// the source, which shows each of them who is wrong, mends it.
type Peers struct {
	cfg  PeersConfig
	nc   *nats.Conn
	log  *slog.Logger
	diff metric.Int64Counter
	reg  metric.Registration

	mu    sync.Mutex
	peers map[string]*peer
	asked map[event.Source]time.Time // for a checkpoint
}

type peer struct {
	Peer
	round uint64
}

// announcement is what a process says. An indexer with many sources says it in
// several messages of one round.
type announcement struct {
	ID      string `json:"id"`
	Role    string `json:"role"`
	Version string `json:"version"`
	Gone    bool   `json:"gone,omitempty"`
	Round   uint64 `json:"round"`
	Ready   *bool  `json:"ready,omitempty"`
	event.PositionJSON
	// Sources has 24 bytes a source: XXH3-64 of its key, the log sequence of
	// its last record, and XXH3-64 of its digests, all little-endian.
	Sources []byte `json:"sources,omitempty"`
}

const (
	sumSize    = 24
	sumsAtOnce = 10_000
)

// NewPeers returns the Peers of a process. Run runs it.
func NewPeers(nc *nats.Conn, cfg PeersConfig) (*Peers, error) {
	if cfg.ID == "" {
		return nil, errors.New("peers: ID is empty")
	}
	if cfg.Interval <= 0 {
		cfg.Interval = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Meter == nil {
		cfg.Meter = noop.NewMeterProvider()
	}
	p := &Peers{cfg: cfg, nc: nc, log: cfg.Logger, peers: map[string]*peer{}, asked: map[event.Source]time.Time{}}
	meter := cfg.Meter.Meter("github.com/kvmesh/kvmesh/replica")
	var errs [4]error
	p.diff, errs[0] = meter.Int64Counter("kvmesh.replica.differences", metric.WithUnit("{source}"),
		metric.WithDescription("Sources that another indexer held otherwise at the same log sequence."))
	p.diff.Add(context.Background(), 0) // there from the beginning
	count, err := meter.Int64ObservableGauge("kvmesh.replica.peers", metric.WithUnit("{process}"), metric.WithDescription("Other processes of the deployment."))
	errs[1] = err
	compared, err := meter.Int64ObservableGauge("kvmesh.replica.compared", metric.WithUnit("{source}"),
		metric.WithDescription("Sources that were compared with other indexers at one log sequence, in the last round of each."))
	errs[2] = err
	p.reg, errs[3] = meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		others, sources := 0, 0
		for _, x := range p.List() {
			if !x.Self {
				others++
				sources += x.Compared
			}
		}
		o.ObserveInt64(count, int64(others))
		o.ObserveInt64(compared, int64(sources))
		return nil
	}, count, compared)
	return p, errors.Join(errs[:]...)
}

// Run tells and listens until ctx ends.
func (p *Peers) Run(ctx context.Context) error {
	defer p.reg.Unregister()
	sub, err := p.nc.Subscribe(PeersSubjects, p.take)
	if err != nil {
		return fmt.Errorf("peers: %w", err)
	}
	defer sub.Unsubscribe()
	ticker := time.NewTicker(p.cfg.Interval)
	defer ticker.Stop()
	for round := uint64(1); ; round++ {
		p.announce(round)
		select {
		case <-ticker.C:
		case <-ctx.Done():
			p.tell(announcement{Gone: true})
			return nil
		}
	}
}

// announce says what this process is, and holds.
func (p *Peers) announce(round uint64) {
	a := announcement{Round: round}
	if p.cfg.Snapshot == nil {
		p.tell(a)
		return
	}
	s := p.cfg.Snapshot()
	a.Ready, a.PositionJSON = &s.Ready, s.JSON()
	for first := true; first || len(s.Sources) > 0; first = false {
		n := min(len(s.Sources), sumsAtOnce)
		a.Sources = a.Sources[:0]
		if s.Ready {
			for i := range s.Sources[:n] {
				a.Sources = appendSum(a.Sources, &s.Sources[i])
			}
		}
		p.tell(a)
		s.Sources = s.Sources[n:]
	}
}

func (p *Peers) tell(a announcement) {
	a.ID, a.Role, a.Version = p.cfg.ID, p.cfg.Role, p.cfg.Version
	data, err := json.Marshal(a)
	if err == nil {
		err = p.nc.Publish(peersPrefix+event.Escape(a.ID), data)
	}
	if err != nil {
		p.log.Debug("peers not told", "error", err)
	}
}

func appendSum(b []byte, h *Holding) []byte {
	b = binary.LittleEndian.AppendUint64(b, hash.Bytes([]byte(h.Source.Key())))
	b = binary.LittleEndian.AppendUint64(b, h.LogSeq)
	return binary.LittleEndian.AppendUint64(b, sumOf(&h.Digests))
}

func sumOf(d *event.Digests) uint64 {
	var b []byte
	for t := range d {
		b = binary.LittleEndian.AppendUint64(b, d[t].Count)
		b = binary.LittleEndian.AppendUint64(b, d[t].Sum)
	}
	return hash.Bytes(b)
}

// take takes in what another process says.
func (p *Peers) take(msg *nats.Msg) {
	var a announcement
	if err := json.Unmarshal(msg.Data, &a); err != nil || a.ID == "" || len(a.Sources)%sumSize != 0 {
		p.log.Warn("announcement of a replica can't be read", "subject", msg.Subject, "error", err)
		return
	}
	if a.ID == p.cfg.ID {
		return
	}
	compared, differing := 0, []event.Source(nil)
	if p.cfg.Snapshot != nil && len(a.Sources) > 0 {
		compared, differing = p.compare(a.Sources)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if a.Gone {
		delete(p.peers, a.ID)
		return
	}
	x := p.peers[a.ID]
	if x == nil {
		x = &peer{}
		p.peers[a.ID] = x
	}
	if x.round != a.Round {
		x.round, x.Compared, x.Differing = a.Round, 0, []string{}
	}
	x.ID, x.Role, x.Version, x.Heard, x.Ready, x.PositionJSON = a.ID, a.Role, a.Version, time.Now(), a.Ready, a.PositionJSON
	x.Compared += compared
	for _, s := range differing {
		x.Differing = append(x.Differing, s.Key())
		p.mend(s, a.ID)
	}
	x.DigestEqual = nil
	if x.Compared > 0 {
		equal := len(x.Differing) == 0
		x.DigestEqual = &equal
	}
}

// compare compares what another indexer holds with what this one holds now, where
// both are at one log sequence.
func (p *Peers) compare(sums []byte) (compared int, differing []event.Source) {
	s := p.cfg.Snapshot()
	if !s.Ready {
		return 0, nil
	}
	own := make(map[uint64]*Holding, len(s.Sources))
	for i := range s.Sources {
		own[hash.Bytes([]byte(s.Sources[i].Source.Key()))] = &s.Sources[i]
	}
	for ; len(sums) > 0; sums = sums[sumSize:] {
		h := own[binary.LittleEndian.Uint64(sums)]
		if h == nil || h.LogSeq != binary.LittleEndian.Uint64(sums[8:]) {
			continue
		}
		compared++
		if sumOf(&h.Digests) != binary.LittleEndian.Uint64(sums[16:]) {
			differing = append(differing, h.Source)
		}
	}
	return compared, differing
}

// mend has the bridge of a source say what it holds. Called with mu held.
func (p *Peers) mend(s event.Source, other string) {
	p.diff.Add(context.Background(), 1)
	if time.Since(p.asked[s]) < 5*p.cfg.Interval {
		return
	}
	p.asked[s] = time.Now()
	p.log.Error("another indexer holds something else at the same log sequence", "instance", s.Instance, "rank", s.Rank, "model", s.Model, "other", other)
	if err := p.nc.Publish(event.CheckpointSubject(s.Key()), nil); err != nil {
		p.log.Debug("checkpoint not asked for", "error", err)
	}
}

// List returns this process and the others, in the order of their ids.
func (p *Peers) List() []Peer {
	now := time.Now()
	self := Peer{ID: p.cfg.ID, Role: p.cfg.Role, Version: p.cfg.Version, Self: true, Heard: now, Differing: []string{}}
	if p.cfg.Snapshot != nil {
		s := p.cfg.Snapshot()
		equal := true
		self.Ready, self.PositionJSON, self.Compared, self.DigestEqual = &s.Ready, s.JSON(), len(s.Sources), &equal
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	out := []Peer{self}
	for id, x := range p.peers {
		if now.Sub(x.Heard) > 5*p.cfg.Interval {
			delete(p.peers, id)
			continue
		}
		out = append(out, x.Peer)
	}
	slices.SortFunc(out, func(a, b Peer) int { return cmp.Or(strings.Compare(a.ID, b.ID), strings.Compare(a.Role, b.Role)) })
	return out
}
