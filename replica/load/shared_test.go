package load

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func TestReservationIsEverywhere(t *testing.T) {
	ctx := t.Context()
	r := startThree(t, testConfig())
	b := Booking{ID: "a", Worker: worker(1), PrefillTokens: 100, Blocks: 10, Tokens: 160}
	if err := r[0].Reserve(b); err != nil {
		t.Fatal(err)
	}
	want := func(l Load) {
		t.Helper()
		for _, x := range r {
			eventually(t, fmt.Sprintf("load is %+v", l), func() bool { return x.Of(worker(1)) == l })
		}
	}
	want(Load{Prefill: 100, Blocks: 10 * Unit, Requests: 1})
	if err := r[1].Reserve(b); !errors.Is(err, ErrExists) {
		t.Errorf("reserving it again elsewhere: %v, want ErrExists", err)
	}
	if err := r[1].PrefillComplete(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	want(Load{Blocks: 10 * Unit, Requests: 1})
	for i, x := range r {
		fraction := 1.0
		if i == 2 {
			fraction = 0.5
		}
		if err := x.OutputBlock(ctx, "a", fraction); err != nil {
			t.Fatal(err)
		}
	}
	want(Load{Blocks: 13 * Unit / 2, Requests: 1})
	if err := r[2].Free(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	want(Load{})
	idle(t, r...)
	for i, x := range r {
		if err := x.Free(ctx, "a"); !errors.Is(err, ErrUnknown) {
			t.Errorf("replica %d, freeing it again: %v, want ErrUnknown", i, err)
		}
		if err := x.PrefillComplete(ctx, "a"); !errors.Is(err, ErrUnknown) {
			t.Errorf("replica %d, completing it again: %v, want ErrUnknown", i, err)
		}
	}
	idle(t, r...) // a second free leaves nothing behind either
	// The id may be used again, whoever freed it.
	for _, x := range r {
		if err := x.Reserve(b); err != nil {
			t.Fatal(err)
		}
		if err := x.Free(ctx, "a"); err != nil {
			t.Fatal(err)
		}
		idle(t, r...)
	}
}

// booked is a reservation of the naive model.
type booked struct {
	b       Booking
	done    bool
	outputs int64
	decay   int64
}

func loads(model map[string]*booked) map[event.Source]Load {
	out := map[event.Source]Load{}
	for _, m := range model {
		l := out[m.b.Worker]
		l.Requests++
		l.Blocks += (int64(m.b.Blocks) + m.outputs) * m.decay
		if !m.done {
			l.Prefill += int64(m.b.PrefillTokens)
		}
		out[m.b.Worker] = l
	}
	return out
}

// TestRandomOperationsUnderFaults does random things at random replicas while
// messages are lost, delayed, repeated and reordered, and compares every replica
// with a naive model each time the network is whole again.
func TestRandomOperationsUnderFaults(t *testing.T) {
	const workers, rounds, operations = 7, 6, 250
	for seed := uint64(1); seed <= 2; seed++ {
		t.Run(fmt.Sprint("seed", seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 0))
			cfg := testConfig()
			cfg.Settle = 5 * time.Millisecond
			r := startThree(t, cfg)
			model := map[string]*booked{}
			next := 0
			for round := range rounds {
				for _, x := range r {
					x.net.Set([]float64{0, 0.1, 0.5}[round%3], 0.2, time.Duration(round%4)*10*time.Millisecond)
				}
				for range operations {
					randomOperation(t, rng, r, model, &next, workers)
				}
				for _, x := range r {
					x.net.Set(0, 0, 0)
				}
				compare(t, r, model, workers)
			}
			for id := range model {
				free(t, r[rng.IntN(3)], id)
			}
			idle(t, r...)
		})
	}
}

func randomOperation(t *testing.T, rng *rand.Rand, r []*replica, model map[string]*booked, next *int, workers int) {
	ctx := t.Context()
	x := r[rng.IntN(len(r))]
	if len(model) == 0 || rng.IntN(3) == 0 {
		*next++
		b := Booking{
			ID: fmt.Sprint("r", *next), Worker: worker(rng.IntN(workers)),
			PrefillTokens: uint32(rng.IntN(1000)), Blocks: uint32(rng.IntN(100)),
		}
		if err := x.Reserve(b); err != nil {
			t.Fatal(err)
		}
		model[b.ID] = &booked{b: b, decay: Unit}
		return
	}
	var id string
	for id = range model {
		break
	}
	m := model[id]
	switch rng.IntN(4) {
	case 0:
		if err := x.PrefillComplete(ctx, id); err == nil {
			m.done = true
		} else if !errors.Is(err, ErrUnknown) {
			t.Fatal(err)
		}
	case 1:
		fraction := float64(rng.IntN(5)) / 4
		if err := x.OutputBlock(ctx, id, fraction); err == nil {
			m.outputs++
			m.decay = min(m.decay, int64(fraction*Unit))
		} else if !errors.Is(err, ErrUnknown) {
			t.Fatal(err)
		}
	default:
		free(t, x, id)
		delete(model, id)
	}
}

// free frees a reservation that the replica may not have heard of yet.
func free(t *testing.T, x *replica, id string) {
	t.Helper()
	if err := x.Free(t.Context(), id); err != nil && !errors.Is(err, ErrUnknown) {
		t.Fatal(err)
	}
}

func compare(t *testing.T, r []*replica, model map[string]*booked, workers int) {
	t.Helper()
	want := loads(model)
	for i, x := range r {
		for w := range workers {
			end := time.Now().Add(30 * time.Second)
			for x.Of(worker(w)) != want[worker(w)] {
				if time.Now().After(end) {
					t.Fatalf("replica %d: load of worker %d is %+v, want %+v", i, w, x.Of(worker(w)), want[worker(w)])
				}
				time.Sleep(2 * time.Millisecond)
			}
		}
	}
}

func TestFreeThatComesFirst(t *testing.T) {
	r := startThree(t, testConfig())
	// What replica 0 says is not heard for a while.
	r[0].net.Cut(true)
	if err := r[0].Reserve(Booking{ID: "a", Worker: worker(0), Blocks: 5}); err != nil {
		t.Fatal(err)
	}
	if err := r[1].Free(t.Context(), "a"); !errors.Is(err, ErrUnknown) {
		t.Fatalf("free of what is not known yet: %v, want ErrUnknown", err)
	}
	r[0].net.Cut(false)
	idle(t, r...)
	// A free that comes before anybody has booked.
	if err := r[1].Free(t.Context(), "b"); !errors.Is(err, ErrUnknown) {
		t.Fatalf("free of nothing: %v, want ErrUnknown", err)
	}
	eventually(t, "replica 2 knows of the free", func() bool { _, _, marks := r[2].Total(); return marks > 0 })
	if err := r[2].Reserve(Booking{ID: "b", Worker: worker(0), Blocks: 5}); !errors.Is(err, ErrFreed) {
		t.Fatalf("reserving what was freed: %v, want ErrFreed", err)
	}
	idle(t, r...) // and that is forgotten in time
	if err := r[2].Reserve(Booking{ID: "b", Worker: worker(0), Blocks: 5}); err != nil {
		t.Fatal(err)
	}
	free(t, r[2], "b")
	idle(t, r...)
}

func TestJoinerHasTheWholeView(t *testing.T) {
	cfg := testConfig()
	url := natsServer(t, false)
	a := start(t, url, cfg)
	const n = 3000
	for i := range n {
		if err := a.Reserve(Booking{ID: fmt.Sprint("r", i), Worker: worker(i % 10), PrefillTokens: 7, Blocks: 3}); err != nil {
			t.Fatal(err)
		}
	}
	if !a.Keep(Booking{ID: "s", Worker: worker(3), PrefillTokens: 1, Blocks: 2}) {
		t.Fatal("selection not kept")
	}
	a.SetSession("session", worker(4))
	b := start(t, url, cfg)
	if got, want := b.Of(worker(0)), (Load{Prefill: 7 * n / 10, Blocks: 3 * n / 10 * Unit, Requests: n / 10}); got != want {
		t.Errorf("a replica that has joined has load %+v, want %+v", got, want)
	}
	if w, ok := b.Session("session"); !ok || w != worker(4) {
		t.Errorf("session is with %v, %v, want %v", w, ok, worker(4))
	}
	if got, err := b.Take(t.Context(), "s"); err != nil || got.Worker != worker(3) {
		t.Errorf("selection taken: %+v, %v", got, err)
	}
	// A replica that is gone is known to those who come later.
	a.stop()
	cfg.DeadAfter, cfg.DeadExpiry = 200*time.Millisecond, time.Minute
	for i := range n {
		free(t, b, fmt.Sprint("r", i))
	}
	eventually(t, "nothing is left but what b booked", func() bool { s, _, _ := b.Total(); return s.Requests == 1 })
	free(t, b, "s")
	eventually(t, "nothing counts", func() bool { s, _, _ := b.Total(); return s == Load{} })
}

func TestDeadReplicasReservationsExpire(t *testing.T) {
	cfg := testConfig()
	cfg.DeadAfter, cfg.DeadExpiry = 500*time.Millisecond, 1500*time.Millisecond
	url := natsServer(t, false)
	a, b := start(t, url, cfg), start(t, url, cfg)
	for i := range 20 {
		if err := a.Reserve(Booking{ID: fmt.Sprint("r", i), Worker: worker(i), PrefillTokens: 1, Blocks: 1}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "b has them", func() bool { s, _, _ := b.Total(); return s.Requests == 20 })
	a.net.Cut(true) // as if it had been killed
	a.stop()
	c := start(t, url, cfg)
	eventually(t, "all has expired", func() bool {
		s, n, _ := b.Total()
		s2, n2, _ := c.Total()
		return s == Load{} && s2 == Load{} && n+n2 == 0
	})
	idle(t, b, c)
}

func TestSilentReplicaComesBack(t *testing.T) {
	cfg := testConfig()
	cfg.DeadAfter, cfg.DeadExpiry = 300*time.Millisecond, 300*time.Millisecond
	url := natsServer(t, false)
	a, b := start(t, url, cfg), start(t, url, cfg)
	if err := a.Reserve(Booking{ID: "x", Worker: worker(0), Blocks: 4}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "b has it", func() bool { return b.Of(worker(0)).Requests == 1 })
	a.net.Cut(true)
	eventually(t, "it has expired on b", func() bool { return b.Of(worker(0)).Requests == 0 })
	a.net.Cut(false)
	eventually(t, "it is back", func() bool { return b.Of(worker(0)).Requests == 1 })
	free(t, b, "x")
	idle(t, a, b)
}

func TestReservationsExpire(t *testing.T) {
	cfg := testConfig()
	cfg.Expiry, cfg.PendingExpiry, cfg.SessionExpiry = 300*time.Millisecond, 300*time.Millisecond, 300*time.Millisecond
	r := startThree(t, cfg)
	for i := range 30 {
		if err := r[i%3].Reserve(Booking{ID: fmt.Sprint("r", i), Worker: worker(i), PrefillTokens: 1, Blocks: 1}); err != nil {
			t.Fatal(err)
		}
		r[i%3].Keep(Booking{ID: fmt.Sprint("s", i), Worker: worker(i)})
		r[i%3].SetSession(fmt.Sprint("c", i), worker(i))
	}
	idle(t, r...)
	for _, x := range r {
		eventually(t, "sessions are gone", func() bool { return x.Sessions() == 0 })
	}
}

func TestSelectionsAreBookedOnceAnywhere(t *testing.T) {
	ctx := t.Context()
	r := startThree(t, testConfig())
	b := Booking{ID: "s", Worker: worker(2), PrefillTokens: 9, Blocks: 3, Tokens: 12, Session: "c"}
	r[0].Keep(Booking{ID: "s", Worker: worker(1)})
	eventually(t, "replica 1 knows it", func() bool { _, err := r[1].Kept(ctx, "s"); return err == nil })
	r[1].Keep(b) // takes its place
	eventually(t, "all know the later one", func() bool {
		for _, x := range r {
			x.mu.Lock()
			n := 0
			for _, p := range x.order {
				n += len(p.reservations)
			}
			x.mu.Unlock()
			if got, err := x.Kept(ctx, "s"); n != 1 || err != nil || got.Worker != worker(2) {
				return false
			}
		}
		return true
	})
	if got, err := r[2].Take(ctx, "s"); err != nil || got != b {
		t.Fatalf("taken: %+v, %v, want %+v", got, err, b)
	}
	for i, x := range r {
		eventually(t, "the load is there", func() bool { return x.Of(worker(2)) == Load{Prefill: 9, Blocks: 3 * Unit, Requests: 1} })
		if _, err := x.Take(ctx, "s"); !errors.Is(err, ErrUnknown) {
			t.Errorf("replica %d, taken again: %v, want ErrUnknown", i, err)
		}
	}
	free(t, r[0], "s")
	idle(t, r...)
	if _, err := r[0].Take(ctx, "never"); !errors.Is(err, ErrUnknown) {
		t.Errorf("taking what was never kept: %v, want ErrUnknown", err)
	}
	// One that can't be booked still waits.
	r[0].Keep(Booking{ID: "t", Worker: worker(1)})
	if err := r[0].Reserve(Booking{ID: "t", Worker: worker(5)}); err != nil {
		t.Fatal(err)
	}
	if _, err := r[0].Take(ctx, "t"); !errors.Is(err, ErrExists) {
		t.Errorf("taking one whose id is booked: %v, want ErrExists", err)
	}
	free(t, r[0], "t")
	if _, err := r[0].Take(ctx, "t"); err != nil {
		t.Errorf("taking it then: %v", err)
	}
	free(t, r[0], "t")
	idle(t, r...)
}

func TestSessionsAreShared(t *testing.T) {
	r := startThree(t, testConfig())
	var all sync.WaitGroup
	for i, x := range r { // at once, on all replicas
		all.Go(func() {
			for n := range 50 {
				x.SetSession(fmt.Sprint("c", n), worker(i))
			}
		})
	}
	all.Wait()
	eventually(t, "all agree", func() bool {
		for n := range 50 {
			id := fmt.Sprint("c", n)
			a, _ := r[0].Session(id)
			b, _ := r[1].Session(id)
			c, ok := r[2].Session(id)
			if !ok || a != b || b != c {
				return false
			}
		}
		return true
	})
	r[1].EndSession("c0")
	for _, x := range r {
		eventually(t, "the session is over", func() bool { _, ok := x.Session("c0"); return !ok })
	}
}

func TestLimits(t *testing.T) {
	cfg := testConfig()
	cfg.MaxReservations, cfg.MaxPending, cfg.MaxSessions = 2, 1, 1
	s, err := New(nil, cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{nil, nil, ErrFull} {
		if err := s.Reserve(Booking{ID: fmt.Sprint(i), Worker: worker(0)}); !errors.Is(err, want) {
			t.Errorf("reservation %d: %v, want %v", i, err, want)
		}
	}
	if !s.Keep(Booking{ID: "a"}) || s.Keep(Booking{ID: "b"}) || !s.Keep(Booking{ID: "a"}) {
		t.Error("want room for one selection")
	}
	s.SetSession("a", worker(0))
	s.SetSession("b", worker(0))
	if s.Sessions() != 1 {
		t.Errorf("%d sessions, want room for one", s.Sessions())
	}
	for _, b := range []Booking{{}, {ID: string(make([]byte, MaxID+1))}, {ID: "x", Blocks: MaxBlocks + 1}, {ID: "x", PrefillTokens: MaxTokens + 1}} {
		if err := s.Reserve(b); !errors.Is(err, ErrMessage) {
			t.Errorf("%d bytes of id, %d blocks, %d tokens: %v, want ErrMessage", len(b.ID), b.Blocks, b.PrefillTokens, err)
		}
	}
	// Slots are given back.
	_ = s.Free(context.Background(), "0")
	_ = s.Free(context.Background(), "1")
	s.Discard("a")
	for i := range 100 {
		slot := s.Hold(worker(i))
		if slot > 1 {
			t.Fatalf("slot %d for the only worker that is held", slot)
		}
		s.Release(slot)
	}
	if err := (&Config{}).Validate(); err == nil {
		t.Error("an empty configuration is valid")
	}
}

// TestNATSGoesAway: replicas go on alone, and agree again when NATS is back.
func TestNATSGoesAway(t *testing.T) {
	r := startThree(t, testConfig())
	for i, x := range r {
		nc := x.nc
		_ = nc.ForceReconnect() // what is published meanwhile fails
		for n := range 50 {
			if err := x.Reserve(Booking{ID: fmt.Sprint(i, "-", n), Worker: worker(0), Blocks: 1}); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "it is connected again", func() bool { return nc.Status() == nats.CONNECTED })
	}
	for _, x := range r {
		eventually(t, "all have all", func() bool { return x.Of(worker(0)).Requests == 150 })
	}
	for i := range r {
		for n := range 50 {
			free(t, r[(i+1)%3], fmt.Sprint(i, "-", n))
		}
	}
	idle(t, r...)
}

// TestSmallMessages: a server that takes small messages only gets all of a large
// state.
func TestSmallMessages(t *testing.T) {
	url := natsServer(t, false, func(o *server.Options) { o.MaxPayload = 8 << 10 })
	long := strings.Repeat("x", event.MaxName)
	at := func(i int) event.Source {
		return event.Source{Model: long, Group: long, Instance: fmt.Sprint(i%3) + long[:250]}
	}
	a := start(t, url, testConfig())
	for i := range 300 {
		if err := a.Reserve(Booking{ID: fmt.Sprint(i), Worker: at(i), Blocks: 1}); err != nil {
			t.Fatal(err)
		}
	}
	b := start(t, url, testConfig())
	for i := range 300 {
		if err := a.Reserve(Booking{ID: fmt.Sprint("live", i), Worker: at(i), Blocks: 1}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all have all", func() bool { s, _, _ := b.Total(); return s.Requests == 600 })
	for i := range 300 {
		free(t, b, fmt.Sprint(i))
		free(t, b, fmt.Sprint("live", i))
	}
	idle(t, a, b)
}

func FuzzMessages(f *testing.F) {
	s, err := New(nil, testConfig(), Options{})
	if err != nil {
		f.Fatal(err)
	}
	out := &recorder{}
	from, err := New(out, testConfig(), Options{})
	if err != nil {
		f.Fatal(err)
	}
	if err := from.Reserve(Booking{ID: "a", Worker: worker(0), Blocks: 1, Session: "x"}); err != nil {
		f.Fatal(err)
	}
	from.Keep(Booking{ID: "b", Worker: worker(0)})
	from.SetSession("c", worker(1))
	_ = from.OutputBlock(context.Background(), "a", 0.3)
	_ = from.PrefillComplete(context.Background(), "a")
	from.beat(time.Now())
	from.answer("x")
	_ = from.Free(context.Background(), "a")
	_ = from.Free(context.Background(), "early")
	from.flush()
	if len(out.sent) < 4 {
		f.Fatalf("%d messages recorded", len(out.sent))
	}
	for _, data := range out.sent {
		f.Add(data)
	}
	s.transport = &recorder{}
	f.Fuzz(func(t *testing.T, data []byte) {
		s.take(data)
		s.take(data)
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range s.order[1:] { // whatever it said, it can be forgotten
			for _, r := range p.reservations {
				s.drop(r)
			}
		}
		for slot, l := range s.sums {
			if l != (Load{}) {
				t.Fatalf("slot %d has load %+v", slot, l)
			}
		}
		s.order, s.peers = s.order[:1], map[string]*peer{s.self.id: s.self}
	})
}

// recorder is a Transport to nobody.
type recorder struct{ sent [][]byte }

func (r *recorder) Publish(_ string, data []byte) error {
	r.sent = append(r.sent, append([]byte(nil), data...))
	return nil
}

func (r *recorder) Subscribe(string, func([]byte)) (func(), error) { return func() {}, nil }
