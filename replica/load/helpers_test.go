package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// natsServer starts a NATS server on a free port of the loopback.
func natsServer(t *testing.T, jetStream bool) string {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: -1, NoSigs: true, JetStream: jetStream}
	if jetStream {
		o.StoreDir = t.TempDir()
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(30 * time.Second) {
		t.Fatal("NATS server not ready")
	}
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	return s.ClientURL()
}

func connect(t *testing.T, url string) *nats.Conn {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectBufSize(-1), nats.ReconnectWait(20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// faults is a Transport that loses, delays, repeats and reorders what is
// published through it.
type faults struct {
	Transport
	mu     sync.Mutex
	rng    *rand.Rand
	lose   float64
	repeat float64
	delay  time.Duration // of one message in three, at most
	cut    bool          // nothing comes through
	ended  bool
	late   sync.WaitGroup
}

func (f *faults) set(lose, repeat float64, delay time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lose, f.repeat, f.delay = lose, repeat, delay
}

func (f *faults) Publish(subject string, data []byte) error {
	f.mu.Lock()
	lost := f.cut || f.ended || f.rng.Float64() < f.lose
	n, wait := 1, time.Duration(0)
	if f.rng.Float64() < f.repeat {
		n = 2
	}
	if f.delay > 0 && f.rng.IntN(3) == 0 {
		wait = time.Duration(f.rng.Int64N(int64(f.delay)))
	}
	f.mu.Unlock()
	if lost {
		return nil
	}
	for i := range n {
		if wait == 0 {
			if err := f.Transport.Publish(subject, data); err != nil {
				return err
			}
			continue
		}
		late := append([]byte(nil), data...)
		f.later(func() {
			time.Sleep(wait * time.Duration(1+i)) // the delay that is injected
			_ = f.Transport.Publish(subject, late)
		})
	}
	return nil
}

func (f *faults) later(publish func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.ended {
		f.late.Go(publish)
	}
}

// end waits for what is late. Nothing comes through after it.
func (f *faults) end() {
	f.mu.Lock()
	f.ended = true
	f.mu.Unlock()
	f.late.Wait()
}

// replica is one that runs.
type replica struct {
	*Shared
	net  *faults
	stop func()
}

func testConfig() Config {
	cfg := Default()
	cfg.Beat, cfg.DeadAfter = 50*time.Millisecond, time.Minute
	cfg.Settle, cfg.JoinWindow, cfg.AskInterval = 50*time.Millisecond, 100*time.Millisecond, 50*time.Millisecond
	cfg.EarlyExpiry = 2 * time.Second
	return cfg
}

// start runs a replica. The test waits until it has joined.
func start(t *testing.T, url string, cfg Config) *replica {
	t.Helper()
	r := launch(t, url, cfg)
	eventually(t, "the replica has joined", func() bool { return r.Ready() == nil })
	return r
}

func launch(t *testing.T, url string, cfg Config) *replica {
	t.Helper()
	net := &faults{Transport: OverNATS(connect(t, url)), rng: rand.New(rand.NewPCG(1, uint64(len(cfg.ID))))}
	s, err := New(net, cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	r := &replica{Shared: s, net: net}
	r.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		net.end()
	})
	t.Cleanup(r.stop)
	return r
}

func startThree(t *testing.T, cfg Config) []*replica {
	url := natsServer(t, false)
	out := []*replica{launch(t, url, cfg), launch(t, url, cfg), launch(t, url, cfg)}
	for _, r := range out {
		eventually(t, "three replicas know each other", func() bool { return r.Ready() == nil && len(r.Peers()) == 3 })
	}
	return out
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("not so after 30 s: %s", what)
}

// idle waits until nothing is left on any replica: no load, no reservation, no
// mark, no slot that is held.
func idle(t *testing.T, replicas ...*replica) {
	t.Helper()
	for i, r := range replicas {
		eventually(t, fmt.Sprintf("replica %d is idle", i), func() bool {
			sum, n, marks := r.Total()
			return sum == Load{} && n == 0 && marks == 0
		})
		r.mu.Lock()
		for slot, l := range r.sums {
			if l != (Load{}) || r.workers[slot].refs != 0 {
				t.Errorf("replica %d: slot %d has load %+v, held %d times", i, slot, l, r.workers[slot].refs)
			}
		}
		r.mu.Unlock()
	}
}

func worker(i int) event.Source {
	return event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i), Rank: uint32(i % 2)}
}
