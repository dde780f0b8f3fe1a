package bridge_test

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// handover is a NATS server, an engine that publishes without pause, and
// bridges that pass its source around.
type handover struct {
	t      *testing.T
	ctx    context.Context
	nats   *natsHub
	js     jetstream.JetStream
	engine *mock.Engine
	worker event.Worker

	mu    sync.Mutex
	truth *model.Source
	load  *mock.Workload
}

func newHandover(t *testing.T, o mock.Options) *handover {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	nats := newHub(t, 0)
	nats.start()
	e, err := mock.NewEngine(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	h := &handover{t: t, ctx: ctx, nats: nats, engine: e, truth: model.New(16, ""), load: mock.NewWorkload(mock.WorkloadOptions{Capacity: 256})}
	h.worker = event.Worker{
		Source: event.Source{Model: "m", Group: "default", Instance: "w"}, Endpoint: e.Addr(), ReplayEndpoint: e.ReplayAddr(), BlockSize: 16,
	}
	_, h.js = h.connect()
	return h
}

func (h *handover) connect() (*nats.Conn, jetstream.JetStream) {
	h.t.Helper()
	nc, js := h.nats.connect()
	h.t.Cleanup(nc.Close)
	return nc, js
}

// bridge starts a bridge, and returns it with what stops it.
func (h *handover) bridge(id string) (*bridge.Bridge, func()) {
	h.t.Helper()
	nc, js := h.connect()
	cfg := bridge.Default(id)
	cfg.ZMTP.BackoffMin, cfg.ZMTP.BackoffMax = 2*time.Millisecond, 50*time.Millisecond
	cfg.RepairInterval, cfg.ProbeInterval = 10*time.Millisecond, 50*time.Millisecond
	b, err := bridge.New(nc, js, cfg, bridge.Options{Logger: slog.New(slog.NewTextHandler(h.t.Output(), nil)).With("bridge", id)})
	if err != nil {
		h.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := b.Run(ctx); err != nil {
			h.t.Error(err)
		}
	})
	stop := sync.OnceFunc(func() { cancel(); done.Wait() })
	h.t.Cleanup(stop)
	return b, stop
}

// publish publishes batches.
func (h *handover) publish(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for range n {
		events := h.load.Next()
		for _, e := range events {
			h.truth.Apply(e)
		}
		if _, err := h.engine.Publish(events...); err != nil {
			h.t.Error(err)
		}
	}
}

// keepPublishing publishes until stop is called.
func (h *handover) keepPublishing() (stop func()) {
	ctx, cancel := context.WithCancel(h.ctx)
	var done sync.WaitGroup
	done.Go(func() {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for ctx.Err() == nil {
			h.publish(1)
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
	})
	return func() { cancel(); done.Wait() }
}

// restart begins a new life of the engine.
func (h *handover) restart() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.engine.Restart(); err != nil {
		h.t.Error(err)
	}
	h.truth.Reset()
	h.load = h.load.Again()
}

// log reads the log until it has the engine's last batch.
func (h *handover) log() *feed.Source {
	h.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	last := h.engine.Next() - 1
	want := h.truth.Resident()
	r := feed.NewReader()
	err := r.Until(h.ctx, h.js, func(r *feed.Reader) bool {
		s := r.Source(h.worker.Source)
		return s != nil && s.Batches && s.Last == last && s.Diff(want) == ""
	})
	s := r.Source(h.worker.Source)
	if err != nil {
		if s == nil {
			h.t.Fatalf("the log has nothing of the source: %v", err)
		}
		h.t.Fatalf("the log has come to batch %d of %d, %s: %v", s.Last, last, s.Diff(want), err)
	}
	return s
}

func (h *handover) await(what string, cond func() bool) {
	h.t.Helper()
	for !cond() {
		select {
		case <-time.After(2 * time.Millisecond):
		case <-h.ctx.Done():
			h.t.Fatalf("%s: that did not come to be", what)
		}
	}
}

// pass hands the source over from one bridge to another.
func (h *handover) pass(from, to *bridge.Bridge) {
	h.t.Helper()
	to.Standby(h.worker)
	if err := to.AwaitStandby(h.ctx, h.worker.Source); err != nil {
		h.t.Fatal(err)
	}
	from.Release(h.worker.Source)
	if err := from.AwaitGone(h.ctx, h.worker.Source); err != nil {
		h.t.Fatal(err)
	}
	to.Set(h.worker)
}

func TestHandOverLosesNothing(t *testing.T) {
	for name, o := range map[string]mock.Options{
		"with replay":       {ReplayEndpoint: "tcp://127.0.0.1:0"},
		"with a short ring": {ReplayEndpoint: "tcp://127.0.0.1:0", Ring: 1},
		"without replay":    {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHandover(t, o)
			a, _ := h.bridge("a")
			b, _ := h.bridge("b")
			a.Set(h.worker)
			if err := h.engine.WaitSubscribers(h.ctx, 1); err != nil {
				t.Fatal(err)
			}
			stop := h.keepPublishing()
			for i := range 6 {
				before := h.engine.Next()
				h.await("traffic", func() bool { return h.engine.Next() >= before+100 })
				if i%2 == 0 {
					h.pass(a, b)
				} else {
					h.pass(b, a)
				}
			}
			stop()
			s := h.log()
			if len(s.Gaps) > 0 || s.LostBefore > 0 {
				t.Errorf("gaps %v and %d batches before: nothing was lost", s.Gaps, s.LostBefore)
			}
			if len(s.Resets) > 1 {
				t.Errorf("resets %v: the engine had one life", s.Resets)
			}
		})
	}
}

// An engine that restarts while its source is passed on has a new incarnation,
// whatever the next bridge has held of either life.
func TestHandOverAcrossARestart(t *testing.T) {
	for name, o := range map[string]mock.Options{
		"with replay":    {ReplayEndpoint: "tcp://127.0.0.1:0"},
		"without replay": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHandover(t, o)
			a, _ := h.bridge("a")
			b, _ := h.bridge("b")
			a.Set(h.worker)
			if err := h.engine.WaitSubscribers(h.ctx, 1); err != nil {
				t.Fatal(err)
			}
			h.publish(50)
			h.log()
			b.Standby(h.worker)
			if err := b.AwaitStandby(h.ctx, h.worker.Source); err != nil {
				t.Fatal(err)
			}
			h.publish(5)
			h.log()
			a.Release(h.worker.Source)
			if err := a.AwaitGone(h.ctx, h.worker.Source); err != nil {
				t.Fatal(err)
			}
			h.restart()
			if err := h.engine.WaitSubscribers(h.ctx, 1); err != nil {
				t.Fatal(err)
			}
			h.publish(10)
			b.Set(h.worker)
			s := h.log()
			if len(s.Gaps) > 0 {
				t.Errorf("gaps: %v", s.Gaps)
			}
		})
	}
}

// Two bridges that are told to write one source: one writes, the other says that
// it does not.
func TestTwoWriters(t *testing.T) {
	h := newHandover(t, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a, stopA := h.bridge("a")
	b, stopB := h.bridge("b")
	told := make(chan *nats.Msg, 1024)
	nc, _ := h.connect()
	if _, err := nc.ChanSubscribe(event.StatusSubjects, told); err != nil {
		t.Fatal(err)
	}
	a.Set(h.worker)
	b.Set(h.worker)
	if err := h.engine.WaitSubscribers(h.ctx, 2); err != nil {
		t.Fatal(err)
	}
	h.publish(1) // at the least
	stop := h.keepPublishing()
	refused := []byte("another bridge writes")
	h.await("one says that the other writes", func() bool {
		select {
		case msg := <-told:
			return bytes.Contains(msg.Data, refused)
		default:
			return false
		}
	})
	stop()
	h.publish(1)
	s := h.log()
	if len(s.Gaps) > 0 {
		t.Errorf("gaps: %v", s.Gaps)
	}
	stopA()
	stopB()
}

func TestRetiredOnce(t *testing.T) {
	h := newHandover(t, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	a, _ := h.bridge("a")
	b, _ := h.bridge("b")
	a.Set(h.worker)
	if err := h.engine.WaitSubscribers(h.ctx, 1); err != nil {
		t.Fatal(err)
	}
	h.publish(20)
	h.log()
	// Both are told, one that writes the source and one that never did.
	b.Remove(h.worker.Source)
	a.Remove(h.worker.Source)
	for _, x := range []*bridge.Bridge{a, b} {
		if err := x.AwaitGone(h.ctx, h.worker.Source); err != nil {
			t.Fatal(err)
		}
	}
	b.Remove(h.worker.Source)
	if err := b.AwaitGone(h.ctx, h.worker.Source); err != nil {
		t.Fatal(err)
	}
	if n := h.retirements(); n != 1 {
		t.Errorf("the log says %d times that the worker is gone", n)
	}
}

// retirements counts the records that say that the worker is gone.
func (h *handover) retirements() int {
	h.t.Helper()
	stream, err := h.js.Stream(h.ctx, "KV")
	if err != nil {
		h.t.Fatal(err)
	}
	info, err := stream.Info(h.ctx)
	if err != nil {
		h.t.Fatal(err)
	}
	n := 0
	var dec event.Decoder
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		msg, err := stream.GetMsg(h.ctx, seq)
		if err != nil {
			h.t.Fatal(err)
		}
		if err := dec.Reset(msg.Data); err != nil {
			h.t.Fatal(err)
		}
		for dec.Next() {
			if dec.Op.Kind == event.OpRetired {
				n++
			}
		}
	}
	return n
}
