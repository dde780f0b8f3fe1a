package mock

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/integration/model"
)

// TestWorkloadIsWhatItSays plays workloads of two engines to the model: each
// holds what it has stored, of its own prompts and of the beginnings that both
// share, and never more than its capacity.
func TestWorkloadIsWhatItSays(t *testing.T) {
	o := WorkloadOptions{BlockSize: 4, PerBatch: 3, Prompt: 20, Shared: 8, Capacity: 100}
	p := model.NewPartition(4)
	work := map[string]*Workload{}
	for i, name := range []string{"a", "b"} {
		o.Seed = uint64(i)
		work[name] = NewWorkload(o)
	}
	removed := false
	for step := range 200 {
		for name, w := range work {
			for _, e := range w.Next() {
				removed = removed || e.Op == model.Remove
				p.Source(name, 0, model.VLLM).Apply(e)
			}
			if held := len(p.Source(name, 0, model.VLLM).Resident()[model.Device]); held != w.held || held > o.Capacity {
				t.Fatalf("step %d: %s holds %d blocks, believes %d, may hold %d", step, name, held, w.held, o.Capacity)
			}
		}
		for name, w := range work {
			for i, prompt := range w.Prompts(3) {
				rows := p.Answer(prompt.Locals)
				want := 20 * 4
				if i == 0 {
					want = w.growth * 4
				}
				if rows[name].GPU != want {
					t.Fatalf("step %d: %s holds %d tokens of prompt %d, want %d", step, name, rows[name].GPU, w.newest-uint64(i), want)
				}
				for other, row := range rows {
					if other != name && row.GPU != 8*4 && step > 40 {
						t.Fatalf("step %d: %s holds %d tokens of a prompt of %s", step, other, row.GPU, name)
					}
				}
				if step > 40 && len(rows) != 2 {
					t.Fatalf("step %d: beginnings are not shared", step)
				}
			}
		}
	}
	if !removed {
		t.Error("nothing was evicted")
	}
}

// A prompt that is longer than the engine's capacity stays until the next one.
func TestWorkloadOfLittleCapacity(t *testing.T) {
	w := NewWorkload(WorkloadOptions{BlockSize: 4, PerBatch: 5, Prompt: 20, Shared: 5, Capacity: 8})
	src := model.New(4, model.VLLM)
	for step := range 40 {
		for _, e := range w.Next() {
			src.Apply(e)
		}
		if held := len(src.Resident()[model.Device]); held != w.held || held < w.growth {
			t.Fatalf("step %d: %d blocks, believes %d, of which the newest prompt is %d", step, held, w.held, w.growth)
		}
	}
}

func TestWorkloadFills1KB(t *testing.T) {
	w := NewWorkload(WorkloadOptions{})
	for range 1000 {
		b, err := VLLMMap.Encode(Batch{TS: 1.5, Events: w.Next()})
		if err != nil || len(b) < 800 || len(b) > 2000 {
			t.Fatalf("a payload of %d bytes, error %v", len(b), err)
		}
	}
}

func fleet(t *testing.T, o FleetOptions) *Fleet {
	t.Helper()
	f, err := NewFleet(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

func TestFleet(t *testing.T) {
	o := FleetOptions{Engines: 3, Ranks: 2, Replay: true, Batches: 60, Workload: WorkloadOptions{Seed: 9}, Engine: Options{Topic: "kv"}}
	var before [][]string
	for _, prepared := range []int{0, 10, 40, 60} {
		f := fleet(t, o)
		for n := 0; n <= prepared; n += 10 {
			if err := f.Prepare(n); err != nil {
				t.Fatal(err)
			}
		}
		var subs []*sub
		for i, m := range f.Members {
			if want := fmt.Sprintf("mock-%d", i/2); m.Instance != want || m.Rank != uint32(i%2) {
				t.Errorf("member %d is %s rank %d", i, m.Instance, m.Rank)
			}
			subs = append(subs, subscribed(t, m.Engine))
		}
		// In two pieces: the second goes on where the first ended.
		f.o.Batches = 31
		if err := f.Run(t.Context()); err != nil || f.Sent() != 31 {
			t.Fatalf("%d batches, error %v", f.Sent(), err)
		}
		f.o.Batches = 60
		if err := f.Run(t.Context()); err != nil || f.Sent() != 60 {
			t.Fatalf("%d batches, error %v", f.Sent(), err)
		}
		var got [][]string
		for i, s := range subs {
			var payloads []string
			for seq := range uint64(10) {
				topic, n, p := s.mustNext(t)
				if topic != "kv" || n != seq {
					t.Errorf("member %d: message %q %d, want number %d", i, topic, n, seq)
				}
				payloads = append(payloads, p)
			}
			got = append(got, payloads)
			if a := mustDealer(t, f.Members[i].Engine).answer(t, 0); len(a) != 11 {
				t.Errorf("member %d: replay of %d", i, len(a)-1)
			}
		}
		if before != nil && !reflect.DeepEqual(got, before) {
			t.Error("one seed, two fleets")
		}
		if reflect.DeepEqual(got[0], got[1]) {
			t.Error("members are equal")
		}
		before = got
		f.Stop()
	}
}

func TestFleetPorts(t *testing.T) {
	// A port where the one that the last replay socket wants is taken.
	var port int
	for last := net.Listener(nil); last == nil; {
		ln, err := listenAnywhere("127.0.0.1")
		if err != nil {
			t.Fatal(err)
		}
		port = ln.Addr().(*net.TCPAddr).Port
		ln.Close()
		if last, err = net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port+7)); err == nil {
			defer last.Close()
		}
	}
	f, err := NewFleet(FleetOptions{Engines: 2, Ranks: 2, Port: port, Replay: true})
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range f.Members {
		if m.Addr() != fmt.Sprintf("tcp://127.0.0.1:%d", port+i) || m.ReplayAddr() != fmt.Sprintf("tcp://127.0.0.1:%d", port+4+i) {
			t.Errorf("member %d at %s and %s", i, m.Addr(), m.ReplayAddr())
		}
	}
	// None is left running.
	if err := f.Start(); err == nil {
		t.Error("started on a taken port")
		f.Stop()
	}
	for _, m := range f.Members {
		if err := m.PublishFrames([]byte("x")); err == nil {
			t.Errorf("%s rank %d still runs", m.Instance, m.Rank)
		}
	}
	for _, o := range []FleetOptions{{Port: -1}, {Port: 65000, Engines: 300}, {Engine: Options{Dialect: "x"}}} {
		if _, err := NewFleet(o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}

// TestFleetKeepsItsRate publishes at a rate that takes a while, and checks only
// that it takes at least that.
func TestFleetKeepsItsRate(t *testing.T) {
	f := fleet(t, FleetOptions{Engines: 2, Batches: 100, Rate: 400})
	start := time.Now()
	if err := f.Run(t.Context()); err != nil || f.Sent() != 100 {
		t.Fatalf("%d batches, error %v", f.Sent(), err)
	}
	if took := time.Since(start); took < 240*time.Millisecond {
		t.Errorf("100 batches at 400 a second took %v", took)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f.o.Batches = 0
	if err := f.Run(ctx); err != nil || f.Sent() != 100 {
		t.Errorf("after the end: %d batches, error %v", f.Sent(), err)
	}
}

// TestFleetWaitsForSubscribers runs without a rate against a subscriber that
// does not read yet: nothing is dropped.
func TestFleetWaitsForSubscribers(t *testing.T) {
	f := fleet(t, FleetOptions{Batches: 20_000, Engine: Options{Ring: 1, HWM: backlogMost}})
	e := f.Members[0].Engine
	s := subscribed(t, e)
	done := make(chan error)
	go func() { done <- f.Run(context.Background()) }()
	eventually(t, "the subscriber is far behind", func() bool { return e.Backlog() >= backlogMost })
	if err := s.skip(20_000); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil || e.Dropped() > 0 {
		t.Errorf("error %v, %d dropped", err, e.Dropped())
	}
}

func TestFleetFails(t *testing.T) {
	f := fleet(t, FleetOptions{})
	f.Members[0].Engine.o.Dialect = "x"
	if err := f.Prepare(1); !errors.Is(err, ErrDialect) {
		t.Errorf("Prepare: %v", err)
	}
	if err := f.Run(t.Context()); !errors.Is(err, ErrDialect) {
		t.Errorf("Run: %v", err)
	}
}

// BenchmarkFleet measures batches of about 1 KB from 64 engines, made, encoded,
// published and read by plain subscribers in one process.
func BenchmarkFleet(b *testing.B) {
	for _, c := range []struct {
		name string
		FleetOptions
		prepare bool
	}{
		{"max", FleetOptions{}, false},
		{"40000", FleetOptions{Rate: 40_000}, false},
		{"max, prepared", FleetOptions{}, true},
		{"40000, prepared", FleetOptions{Rate: 40_000}, true},
		{"40000, prepared, every 10 ms", FleetOptions{Rate: 40_000, Tick: 10 * time.Millisecond}, true},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			o := c.FleetOptions
			o.Engines, o.Batches, o.Engine.Ring = 64, b.N, 16
			f, err := NewFleet(o)
			if err != nil {
				b.Fatal(err)
			}
			if c.prepare {
				if err := f.Prepare(b.N); err != nil {
					b.Fatal(err)
				}
			}
			if err := f.Start(); err != nil {
				b.Fatal(err)
			}
			defer f.Stop()
			var readers sync.WaitGroup
			for i, m := range f.Members {
				s := subscribed(b, m.Engine)
				readers.Go(func() { s.skip((b.N + len(f.Members) - 1 - i) / len(f.Members)) })
			}
			b.ResetTimer()
			start, spent := time.Now(), cpu()
			if err := f.Run(b.Context()); err != nil {
				b.Fatal(err)
			}
			readers.Wait()
			b.ReportMetric(float64((cpu()-spent).Nanoseconds())/float64(b.N), "cpu-ns/batch")
			b.ReportMetric(float64(b.N)/time.Since(start).Seconds(), "batches/s")
		})
	}
}
