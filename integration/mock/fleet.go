package mock

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"sync/atomic"
	"time"
)

// FleetOptions say what a Fleet is. Zero fields have defaults.
type FleetOptions struct {
	Engines int    // 1
	Ranks   int    // of each engine; 1
	Host    string // that all sockets bind; 127.0.0.1
	// Port of the first PUB; the ranks of an engine and then the next engine
	// follow. 0: any free ports.
	Port int
	// Replay gives every rank a replay socket, at ports that follow those of the
	// PUBs.
	Replay bool

	Engine   Options         // of every rank, but for its rank, block size and endpoints
	Workload WorkloadOptions // of every rank; the seed is only the first

	Rate    float64       // batches a second over all; 0: as fast as subscribers take them
	Batches int           // in all; 0: no end
	Tick    time.Duration // how often what is due is published; 1 ms

	// Before, if not nil, is called before each batch is published, from the
	// goroutine of Run.
	Before func(m *Member, seq uint64)
}

// Member is one rank of an engine of a fleet.
type Member struct {
	Instance string
	Rank     uint32
	*Engine
	Workload *Workload // only Fleet.Run may use it while that runs

	ready [][]byte // payloads made ahead
}

// Fleet is a number of engines that do the same kind of work. Equal options make
// equal batches.
type Fleet struct {
	Members []*Member // by engine and rank; not changed after NewFleet

	o    FleetOptions
	sent atomic.Uint64
}

// NewFleet returns a Fleet that is not started yet.
func NewFleet(o FleetOptions) (*Fleet, error) {
	o.Engines, o.Ranks = max(o.Engines, 1), max(o.Ranks, 1)
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	if o.Tick <= 0 {
		o.Tick = time.Millisecond
	}
	if last := o.Port + 2*o.Engines*o.Ranks; o.Port < 0 || last > 1<<16 {
		return nil, fmt.Errorf("mock: %d engines of %d ranks from port %d on need ports up to %d", o.Engines, o.Ranks, o.Port, last)
	}
	o.Workload.defaults()
	o.Engine.BlockSize = o.Workload.BlockSize
	f := &Fleet{o: o}
	for i := range o.Engines * o.Ranks {
		w := o.Workload
		w.Seed += uint64(i)
		eo := o.Engine
		eo.Rank = uint32(i % o.Ranks)
		eo.Endpoint = o.endpoint(i)
		if o.Replay {
			eo.ReplayEndpoint = o.endpoint(o.Engines*o.Ranks + i)
		}
		e, err := NewEngine(eo)
		if err != nil {
			return nil, err
		}
		f.Members = append(f.Members, &Member{Instance: fmt.Sprintf("mock-%d", i/o.Ranks), Rank: eo.Rank, Engine: e, Workload: NewWorkload(w)})
	}
	return f, nil
}

func (o FleetOptions) endpoint(i int) string {
	port := 0
	if o.Port > 0 {
		port = o.Port + i
	}
	return "tcp://" + net.JoinHostPort(o.Host, strconv.Itoa(port))
}

// Start starts all engines, or none.
func (f *Fleet) Start() error {
	for i, m := range f.Members {
		if err := m.Start(); err != nil {
			for _, m := range f.Members[:i] {
				m.Stop()
			}
			return fmt.Errorf("%s rank %d: %w", m.Instance, m.Rank, err)
		}
	}
	return nil
}

// Stop stops all engines. The caller ends Run first.
func (f *Fleet) Stop() {
	for _, m := range f.Members {
		m.Stop()
	}
}

// Sent returns how many batches have been published.
func (f *Fleet) Sent() uint64 { return f.sent.Load() }

// Prepare makes the next batches, so many in all, which costs about as much as
// publishing them: Run has less to do then. The batches are the same as without
// it. It does not run beside Run.
func (f *Fleet) Prepare(batches int) error {
	made := 0
	for _, m := range f.Members {
		made += len(m.ready)
	}
	for ; made < batches; made++ {
		if err := f.member(f.Sent() + uint64(made)).prepare(); err != nil {
			return err
		}
	}
	return nil
}

// member returns whose turn it is after so many batches.
func (f *Fleet) member(sent uint64) *Member { return f.Members[sent%uint64(len(f.Members))] }

func (m *Member) prepare() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	payload, err := m.encode(m.next+uint64(len(m.ready)), m.Workload.Next())
	if err == nil {
		m.ready = append(m.ready, payload)
	}
	return err
}

// publish publishes the next batch of a member.
func (m *Member) publish() error {
	if len(m.ready) > 0 {
		m.PublishRaw(m.ready[0], Sent)
		m.ready = m.ready[1:]
		return nil
	}
	_, err := m.Publish(m.Workload.Next()...)
	return err
}

// Pace changes the rate and the number of batches of later Runs.
func (f *Fleet) Pace(rate float64, batches int) { f.o.Rate, f.o.Batches = rate, batches }

// Run publishes batches, the members in turn, until all are out or ctx ends,
// which is no error. A later Run goes on where the one before ended.
func (f *Fleet) Run(ctx context.Context) error {
	tick := time.NewTicker(f.o.Tick)
	defer tick.Stop()
	begin, before := time.Now(), f.Sent()
	for {
		due := 1 << 20
		if f.o.Rate > 0 {
			due = int(time.Since(begin).Seconds()*f.o.Rate) - int(f.Sent()-before)
		}
		for ; due > 0 && ctx.Err() == nil; due-- {
			if f.o.Batches > 0 && f.Sent() >= uint64(f.o.Batches) {
				return nil
			}
			m := f.member(f.Sent())
			if f.o.Rate <= 0 && m.Backlog() >= backlogMost {
				break
			}
			if f.o.Before != nil {
				f.o.Before(m, m.Next())
			}
			if err := m.publish(); err != nil {
				return err
			}
			f.sent.Add(1)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// backlogMost is how far subscribers may be behind a fleet without a rate.
const backlogMost = 1024
