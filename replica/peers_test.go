package replica_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

// held is what a pretended indexer holds.
type held struct {
	mu sync.Mutex
	s  replica.Snapshot
}

func (h *held) snapshot() replica.Snapshot {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := h.s
	out.Sources = slices.Clone(h.s.Sources)
	return out
}

func (h *held) change(f func(s *replica.Snapshot)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f(&h.s)
}

func sourceOf(instance string) event.Source {
	return event.Source{Model: "m", Group: "g", Instance: instance}
}

// pretendedPeers starts two indexers, which hold the same of three sources, and a
// bridge.
func pretendedPeers(f *fleet) (holds map[string]*held, peers map[string]*replica.Peers, stops map[string]func()) {
	f.t.Helper()
	holds, peers, stops = map[string]*held{}, map[string]*replica.Peers{}, map[string]func(){}
	for _, id := range []string{"x0", "x1", "bridge"} {
		cfg := replica.PeersConfig{ID: id, Role: "indexer", Version: "v1", Interval: 20 * time.Millisecond, Logger: f.log.With("of", id)}
		if id == "bridge" {
			cfg.Role = "bridge"
		} else {
			h := &held{s: replica.Snapshot{Ready: true, Position: event.Position{LogSeq: 50}}}
			for i, name := range []string{"a", "b", "c"} {
				var d event.Digests
				d[event.Device].Add(uint64(i), uint64(i)*77)
				h.s.Sources = append(h.s.Sources, replica.Holding{Source: sourceOf(name), LogSeq: uint64(40 + i), Digests: d})
			}
			holds[id], cfg.Snapshot = h, h.snapshot
		}
		nc, _ := f.connect()
		f.t.Cleanup(nc.Close)
		p, err := replica.NewPeers(nc, cfg)
		if err != nil {
			f.t.Fatal(err)
		}
		peers[id] = p
		stops[id] = sync.OnceFunc(run(func(ctx context.Context) error { return p.Run(ctx) }))
		f.t.Cleanup(stops[id])
	}
	return holds, peers, stops
}

func TestPeersCompare(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 0, mock.Options{})
	holds, peers, stops := pretendedPeers(f)
	nc, _ := f.connect()
	t.Cleanup(nc.Close)
	asked := make(chan *nats.Msg, 100)
	if _, err := nc.ChanSubscribe(event.CheckpointSubject(">"), asked); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	view := func(of, id string) (replica.Peer, bool) {
		for _, p := range peers[of].List() {
			if p.ID == id {
				return p, true
			}
		}
		return replica.Peer{}, false
	}
	is := func(of, id string, compared int, equal string, differing ...string) func() bool {
		return func() bool {
			p, ok := view(of, id)
			have := "unknown"
			if p.DigestEqual != nil && *p.DigestEqual {
				have = "equal"
			} else if p.DigestEqual != nil {
				have = "differs"
			}
			return ok && p.Compared == compared && have == equal && slices.Equal(p.Differing, differing)
		}
	}
	f.await("they are equal", is("x0", "x1", 3, "equal"))
	f.await("they are equal, seen from the other", is("x1", "x0", 3, "equal"))
	f.await("a bridge has nothing to compare", is("x0", "bridge", 0, "unknown"))
	f.await("a bridge sees the indexers", is("bridge", "x0", 0, "unknown"))
	if p, _ := view("bridge", "x0"); p.LogSeq == nil || *p.LogSeq != 50 || p.Ready == nil || !*p.Ready || p.Role != "indexer" || p.Version != "v1" {
		t.Errorf("seen from the bridge: %+v", p)
	}
	if p, _ := view("x0", "x0"); !p.Self {
		t.Errorf("itself: %+v", p)
	}

	// One goes on: what is at another log sequence can't be compared.
	holds["x1"].change(func(s *replica.Snapshot) {
		s.Sources[0].LogSeq = 51
		s.Sources[0].Digests[event.Host].Add(1, 5)
	})
	f.await("two are equal", is("x0", "x1", 2, "equal"))

	// One is wrong: it is found, and the bridge asked.
	holds["x1"].change(func(s *replica.Snapshot) { s.Sources[1].Digests[event.Disk].Add(1, 5) })
	f.await("one differs", is("x0", "x1", 2, "differs", sourceOf("b").Key()))
	select {
	case msg := <-asked:
		if !strings.HasSuffix(msg.Subject, sourceOf("b").Key()) {
			t.Errorf("a checkpoint was asked for on %s", msg.Subject)
		}
	case <-f.ctx.Done():
		t.Fatal("nobody asked for a checkpoint")
	}
	holds["x1"].change(func(s *replica.Snapshot) { s.Sources[1].Digests[event.Disk].Sub(1, 5) })
	f.await("it is mended", is("x0", "x1", 2, "equal"))

	// One that is not ready does not count.
	holds["x1"].change(func(s *replica.Snapshot) { s.Ready = false })
	f.await("nothing can be compared", is("x0", "x1", 0, "unknown"))

	stops["x1"]()
	f.await("it is gone", func() bool { _, ok := view("x0", "x1"); return !ok })
}

// More sources than one message holds are compared all the same.
func TestPeersCompareMany(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 0, mock.Options{})
	const n = 25_000
	h := &held{s: replica.Snapshot{Ready: true, Position: event.Position{LogSeq: n}}}
	for i := range n {
		s := sourceOf("w")
		s.Rank = uint32(i)
		h.s.Sources = append(h.s.Sources, replica.Holding{Source: s, LogSeq: uint64(i)})
	}
	var all []*replica.Peers
	for _, id := range []string{"x0", "x1"} {
		nc, _ := f.connect()
		t.Cleanup(nc.Close)
		p, err := replica.NewPeers(nc, replica.PeersConfig{ID: id, Interval: 500 * time.Millisecond, Snapshot: h.snapshot, Logger: f.log})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
		t.Cleanup(run(p.Run))
	}
	f.await("all are compared", func() bool {
		for _, p := range all[0].List() {
			if p.ID == "x1" {
				return p.Compared == n && p.DigestEqual != nil && *p.DigestEqual
			}
		}
		return false
	})
}
