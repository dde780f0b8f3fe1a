package load

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/faults"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// natsServer starts a NATS server on a free port of the loopback.
func natsServer(t *testing.T, jetStream bool, change ...func(*server.Options)) string {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: -1, NoSigs: true, JetStream: jetStream}
	if jetStream {
		o.StoreDir = t.TempDir()
	}
	for _, f := range change {
		f(o)
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

// replica is one that runs.
type replica struct {
	*Shared
	net  *faults.Transport
	nc   *nats.Conn
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
	nc := connect(t, url)
	net := faults.Over(OverNATS(nc), 1)
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
	r := &replica{Shared: s, net: net, nc: nc}
	r.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		net.End()
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
		var left []string
		held := func() bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			left = nil
			for slot, l := range r.sums {
				if l != (Load{}) || r.workers[slot].refs != 0 {
					left = append(left, fmt.Sprintf("slot %d has load %+v, held %d times", slot, l, r.workers[slot].refs))
				}
			}
			return len(left) > 0
		}
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(2 * time.Millisecond) {
			sum, n, marks := r.Total()
			if sum == (Load{}) && n == 0 && marks == 0 && !held() { // what waits to be booked holds a slot too
				break
			}
			if time.Now().After(end) {
				t.Fatalf("replica %d is not idle: %+v, %d reservations, %d marks, %v", i, sum, n, marks, left)
			}
		}
	}
}

func worker(i int) event.Source {
	return event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i), Rank: uint32(i % 2)}
}
