package selection

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const blockSize = 16

var part = event.Partition{Model: "m", Group: "default"}

func source(i int) event.Source {
	return event.Source{Model: part.Model, Group: part.Group, Instance: fmt.Sprint("w", i)}
}

// holdings is an Index of one prompt, which every query is about: how far each
// worker holds it, by tier.
type holdings map[event.Source][event.Tiers]uint32

func (h holdings) Match(_ *indexer.Query, name event.Partition, locals []uint64) (indexer.Answer, error) {
	a := indexer.Answer{BlockSize: blockSize, Position: event.Position{LogSeq: 7}}
	for s, ends := range h {
		for t := range ends {
			ends[t] = min(ends[t], uint32(len(locals)))
		}
		a.Holdings = append(a.Holdings, indexer.Holding{Source: &s, Ends: ends})
	}
	return a, nil
}

// fleet returns a Selector over n workers, each of one rank.
func fleet(t testing.TB, n int, index Index, cfg Config, opts Options) *Selector {
	t.Helper()
	shared, err := load.New(nil, load.Default(), load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(index, shared, cfg, opts)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		s.Registered(event.Worker{Source: source(i), Endpoint: "tcp://127.0.0.1:1", BlockSize: blockSize})
	}
	s.CatalogRead()
	return s
}

func prompt(blocks int) []uint64 { return make([]uint64, blocks) }

// TestCostIsTheFormula compares costs with the formula as it is written down, on
// random loads and overlaps.
func TestCostIsTheFormula(t *testing.T) {
	const n = 12
	rng := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		index := holdings{}
		for i := range n {
			device := uint32(rng.IntN(20))
			host := device + uint32(rng.IntN(5))
			disk := host + uint32(rng.IntN(5))
			index[source(i)] = [event.Tiers]uint32{device, host, disk, disk + uint32(rng.IntN(2))}
		}
		p := Params{
			DeviceCredit: rng.Float64(), HostCredit: rng.Float64(), DiskCredit: rng.Float64(), PrefillScale: rng.Float64() * 2,
			RequestWeight: rng.Float64(), CreditDecay: float64(rng.IntN(2)), TrackPrefill: rng.IntN(2) == 0,
		}
		s := fleet(t, n, index, Config{Params: p}, Options{})
		for i := range 40 {
			if err := s.load.Reserve(load.Booking{ID: fmt.Sprint(i), Worker: source(rng.IntN(n)), PrefillTokens: uint32(rng.IntN(500)), Blocks: uint32(rng.IntN(40))}); err != nil {
				t.Fatal(err)
			}
		}
		r := &Request{Partition: part, Locals: prompt(24), Tokens: 24*blockSize + 5, Preferred: map[string]float64{"x": 0.5}}
		for i := range n {
			if i%3 == 0 {
				w := Worker{Instance: source(i).Instance, Model: part.Model, Group: part.Group, Endpoint: "http://x", BlockSize: blockSize, Ranks: 1, Taints: []string{"x"}}
				s.Describe(w)
			}
		}
		least := int64(math.MaxInt64)
		for i := range n {
			least = min(least, s.load.Of(source(i)).Prefill)
		}
		want := make([]float64, n)
		for i := range n {
			l, ends := s.load.Of(source(i)), index[source(i)]
			for t := range ends {
				ends[t] = min(ends[t], 24)
			}
			raw := float64(r.Tokens) / blockSize
			if p.TrackPrefill {
				raw += float64(l.Prefill) / blockSize
			}
			credit := p.DeviceCredit
			if p.CreditDecay > 0 {
				credit /= 1 + float64(l.Prefill-least)/float64(r.Tokens)
			}
			adjusted := math.Max(0, raw-credit*float64(ends[0])-p.HostCredit*float64(ends[1]-ends[0])-p.DiskCredit*float64(ends[3]-ends[1]))
			want[i] = p.PrefillScale*adjusted + float64(l.Blocks)/load.Unit + 25 + p.RequestWeight*float64(l.Requests)
			if i%3 == 0 {
				want[i] *= math.Exp(-math.Tanh(0.5))
			}
		}
		for i := range n { // each one on its own, then all of them
			if p.CreditDecay > 0 {
				break // on its own, none is busier than the least busy one
			}
			r.Pinned = source(i).Instance
			got, err := s.Select(t.Context(), r)
			if err != nil || got.Source != source(i) || math.Abs(got.Cost-want[i]) > 1e-9 {
				t.Fatalf("pinned to %d: %v, cost %v, error %v, want cost %v", i, got.Source, got.Cost, err, want[i])
			}
		}
		r.Pinned = ""
		got, err := s.Select(t.Context(), r)
		if err != nil || math.Abs(got.Cost-slices.Min(want)) > 1e-9 {
			t.Fatalf("cost %v, error %v, want %v", got.Cost, err, slices.Min(want))
		}
		if got.LogSeq != 7 || got.Blocks != 25 {
			t.Fatalf("log seq %d, %d blocks", got.LogSeq, got.Blocks)
		}
	}
}

func TestTiesAreBrokenAtRandom(t *testing.T) {
	s := fleet(t, 8, holdings{}, Default(), Options{})
	got := map[string]int{}
	for range 4000 {
		r, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 100})
		if err != nil {
			t.Fatal(err)
		}
		got[r.Source.Instance]++
	}
	for i := range 8 {
		if n := got[source(i).Instance]; n < 300 || n > 700 { // 500 on average, 21 the deviation
			t.Errorf("worker %d was chosen %d times of 4000", i, n)
		}
	}
}

func TestTemperature(t *testing.T) {
	s := fleet(t, 3, holdings{source(0): {10, 10, 10, 10}, source(1): {5, 5, 5, 5}}, Default(), Options{})
	p := DefaultParams()
	p.Temperature = 0.5
	const n = 20000
	got := map[string]float64{}
	for range n {
		r, err := s.Select(t.Context(), &Request{Partition: part, Locals: prompt(10), Params: &p})
		if err != nil {
			t.Fatal(err)
		}
		got[r.Source.Instance]++
		if want := map[string]float64{"w0": 10, "w1": 15, "w2": 20}[r.Source.Instance]; r.Cost != want {
			t.Fatalf("%s: cost %v, want %v", r.Source.Instance, r.Cost, want)
		}
	}
	// Costs 10, 15 and 20, scaled to 0, 0.5 and 1: weights 1, exp(-1), exp(-2).
	sum := 1 + math.Exp(-1) + math.Exp(-2)
	for i := range 3 {
		want := math.Exp(-float64(i)) / sum
		if have := got[source(i).Instance] / n; math.Abs(have-want) > 0.02 {
			t.Errorf("worker %d: %.3f of all choices, want %.3f", i, have, want)
		}
	}
}

func TestConstraints(t *testing.T) {
	s := fleet(t, 4, holdings{}, Default(), Options{})
	describe := func(i int, f func(*Worker)) {
		w := Worker{Instance: source(i).Instance, Model: part.Model, Group: part.Group, Endpoint: "http://x", BlockSize: blockSize, Ranks: 1}
		f(&w)
		s.Describe(w)
	}
	describe(1, func(w *Worker) { w.Taints = []string{"a", "b"} })
	describe(2, func(w *Worker) {
		w.Taints, w.TopologyDomains = []string{"a"}, map[string]string{"zone": "z"}
	})
	describe(3, func(w *Worker) { w.Draining = true })
	zero, one := uint32(0), uint32(1)
	for _, c := range []struct {
		name string
		r    Request
		want []int
		err  error
	}{
		{"nothing", Request{}, []int{0, 1, 2}, nil},
		{"allowed", Request{Allowed: []string{"w1", "w2", "w3", "nobody"}}, []int{1, 2}, nil},
		{"many allowed", Request{Allowed: []string{"w1", "a", "b", "c", "d", "e", "f", "g", "h", "i"}}, []int{1}, nil},
		{"none allowed", Request{Allowed: []string{}}, nil, ErrNoWorkers},
		{"pinned", Request{Pinned: "w2"}, []int{2}, nil},
		{"pinned rank", Request{Pinned: "w2", PinnedRank: &zero}, []int{2}, nil},
		{"pinned rank that is not there", Request{Pinned: "w2", PinnedRank: &one}, nil, ErrNoWorkers},
		{"pinned to one that drains", Request{Pinned: "w3"}, nil, ErrNoWorkers},
		{"pinned to one that is not allowed", Request{Pinned: "w2", Allowed: []string{"w1"}}, nil, ErrRequest},
		{"taint", Request{Required: []string{"a"}}, []int{1, 2}, nil},
		{"taints", Request{Required: []string{"a", "b"}}, []int{1}, nil},
		{"topology", Request{Required: []string{TopologyTaint("zone", "z")}}, []int{2}, nil},
		{"unknown taint", Request{Required: []string{"c"}}, nil, ErrNoWorkers},
		{"preferred", Request{Preferred: map[string]float64{"a": 1, "b": 1}}, []int{1}, nil},
		{"avoided", Request{Preferred: map[string]float64{"a": -1}}, []int{0}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.r.Partition, c.r.Tokens = part, 160
			got := map[event.Source]bool{}
			for range 200 {
				r, err := s.Select(t.Context(), &c.r)
				if !errors.Is(err, c.err) {
					t.Fatalf("error %v, want %v", err, c.err)
				}
				if err == nil {
					got[r.Source] = true
				}
			}
			want := map[event.Source]bool{}
			for _, i := range c.want {
				want[source(i)] = true
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("chosen: %v, want %v", got, want)
			}
		})
	}
	if _, err := s.Select(t.Context(), &Request{Partition: event.Partition{Model: "other", Group: "default"}}); !errors.Is(err, indexer.ErrUnknownPartition) {
		t.Errorf("an unknown model: %v", err)
	}
}

// TestHotPrefixMeltsNobody sends requests with one prefix, which one worker has,
// faster than they end.
func TestHotPrefixMeltsNobody(t *testing.T) {
	const workers, requests, shared, own = 16, 1600, 64, 8
	for _, prefilled := range []bool{false, true} {
		s := fleet(t, workers, holdings{source(0): {shared, shared, shared, shared}}, Default(), Options{})
		for i := range requests {
			r, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, Locals: prompt(shared + own)})
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 && r.Source != source(0) {
				t.Errorf("the first request goes to %v, want the worker that holds its prefix", r.Source)
			}
			if prefilled {
				if err := s.load.PrefillComplete(t.Context(), r.ID); err != nil {
					t.Fatal(err)
				}
			}
		}
		work := func(i int) float64 {
			l := s.load.Of(source(i))
			return float64(l.Prefill)/blockSize + float64(l.Blocks)/load.Unit
		}
		mean := 0.0
		for i := range workers {
			mean += work(i) / workers
		}
		for i := range workers {
			if w := work(i); w > mean*1.05 || w < mean*0.95 {
				t.Errorf("prefilled %v: worker %d has %v blocks of work, the mean is %v", prefilled, i, w, mean)
			}
		}
	}
}

func TestSessionsStay(t *testing.T) {
	s := fleet(t, 10, holdings{}, Default(), Options{})
	first, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, Tokens: 1600, Session: "c"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Free(t.Context(), first.ID); err != nil {
		t.Fatal(err)
	}
	for range 50 {
		r, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 1600, Session: "c"})
		if err != nil || r.Source != first.Source {
			t.Fatalf("the session went from %v to %v, error %v", first.Source, r.Source, err)
		}
	}
	// It moves on when its worker has too much to do, and stays there.
	for i := range 5 {
		if err := s.Reserve(t.Context(), load.Booking{ID: fmt.Sprint(i), Worker: first.Source, PrefillTokens: 1600, Blocks: 100}); err != nil {
			t.Fatal(err)
		}
	}
	second, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, Tokens: 1600, Session: "c"})
	if err != nil || second.Source == first.Source {
		t.Fatalf("the session stays with a worker that is overloaded, error %v", err)
	}
	if w, ok := s.load.Session("c"); !ok || w != second.Source {
		t.Errorf("the session is with %v, want %v", w, second.Source)
	}
}

func TestQueue(t *testing.T) {
	cfg := Default()
	cfg.QueueThreshold, cfg.MaxQueue, cfg.QueueTimeout = 0.5, 3, time.Minute
	s := fleet(t, 2, holdings{}, cfg, Options{})
	for i := range 2 {
		w := Worker{Instance: source(i).Instance, Model: part.Model, Group: part.Group, Endpoint: "http://x", BlockSize: blockSize, Ranks: 1, MaxBatchedTokens: 1000}
		s.Describe(w)
	}
	for i := range 2 {
		if _, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, ID: fmt.Sprint("busy", i), Tokens: 501}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 10, Advisory: true}); err != nil {
		t.Errorf("advice does not wait: %v", err)
	}
	var mu sync.Mutex
	var order []string
	var all sync.WaitGroup
	for i, r := range []*Request{{ID: "late", Jump: 0}, {ID: "jumps", Jump: 60}, {ID: "first", Priority: 1}} {
		r.Partition, r.Tokens = part, 600
		all.Go(func() {
			got, err := s.SelectAndReserve(t.Context(), r)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			order = append(order, r.ID)
			mu.Unlock()
			if err := s.Free(t.Context(), got.ID); err != nil { // lets the next one in
				t.Error(err)
			}
		})
		eventually(t, "the request is held back", func() bool { n, _ := s.Queued(part); return n == i+1 })
	}
	if _, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 10}); !errors.Is(err, ErrQueueFull) {
		t.Errorf("one too many: %v, want ErrQueueFull", err)
	}
	if err := s.load.PrefillComplete(t.Context(), "busy0"); err != nil {
		t.Fatal(err)
	}
	all.Wait()
	// The first one is freed when the second one asks, or a moment later, so
	// only who came first is certain.
	if len(order) != 3 || order[0] != "first" {
		t.Errorf("order %v", order)
	}
	if n, tokens := s.Queued(part); n != 0 || tokens != 0 {
		t.Errorf("%d requests of %d tokens are still held", n, tokens)
	}
	// Nobody waits for ever.
	s.cfg.QueueTimeout = 20 * time.Millisecond
	_ = s.load.PrefillComplete(t.Context(), "busy1")
	for i := range 2 {
		if _, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, ID: fmt.Sprint("more", i), Tokens: 501}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 10}); !errors.Is(err, ErrOverloaded) {
		t.Errorf("all busy: %v, want ErrOverloaded", err)
	}
}

// TestQueueIsFair: who comes later does not overtake those who wait for the same
// workers, and is not held up by those who wait for others.
func TestQueueIsFair(t *testing.T) {
	cfg := Default()
	cfg.QueueThreshold, cfg.MaxQueue, cfg.QueueTimeout = 0.5, 10, time.Minute
	s := fleet(t, 2, holdings{}, cfg, Options{})
	for i := range 2 {
		s.Describe(Worker{Instance: source(i).Instance, Model: part.Model, Group: part.Group, Endpoint: "http://x", BlockSize: blockSize, Ranks: 1, MaxBatchedTokens: 1000})
	}
	reserve := func(id, pinned string) error {
		_, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, ID: id, Tokens: 600, Pinned: pinned})
		return err
	}
	if err := reserve("busy", "w0"); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var order []string
	var all sync.WaitGroup
	wait := func(id string) {
		all.Go(func() {
			if err := reserve(id, "w0"); err != nil {
				t.Error(err)
			}
			mu.Lock()
			order = append(order, id)
			mu.Unlock()
		})
	}
	wait("a")
	eventually(t, "it is held back", func() bool { n, _ := s.Queued(part); return n == 1 })
	if err := reserve("other", "w1"); err != nil { // does not wait
		t.Errorf("a request for another worker: %v", err)
	}
	wait("b")
	eventually(t, "both are held back", func() bool { n, _ := s.Queued(part); return n == 2 })
	for _, done := range []string{"busy", "a"} { // each lets one in
		if err := s.Free(t.Context(), done); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the next one is in", func() bool {
			mu.Lock()
			defer mu.Unlock()
			return len(order) > 0 && (done == "busy" || len(order) == 2)
		})
	}
	all.Wait()
	if !slices.Equal(order, []string{"a", "b"}) {
		t.Errorf("order %v, want a before b", order)
	}
}

func eventually(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not so after 30 s: %s", what)
		}
	}
}

func TestWorkersComeAndGo(t *testing.T) {
	s := fleet(t, 3, holdings{}, Default(), Options{})
	r, err := s.SelectAndReserve(t.Context(), &Request{Partition: part, Tokens: 100, Pinned: "w1"})
	if err != nil {
		t.Fatal(err)
	}
	s.Unregistered(source(1))
	if _, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 100, Pinned: "w1"}); !errors.Is(err, ErrNoWorkers) {
		t.Errorf("a worker that is gone: %v", err)
	}
	s.Registered(event.Worker{Source: source(9), Endpoint: "tcp://127.0.0.1:1", BlockSize: blockSize})
	p, err := s.Partition(part)
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.Candidates { // none has the load of the one that is gone
		if l := s.LoadOf(&p.Candidates[i]); l != (load.Load{}) {
			t.Errorf("%v has load %+v", p.Candidates[i].Source, l)
		}
	}
	s.Registered(event.Worker{Source: source(1), Endpoint: "tcp://127.0.0.1:1", BlockSize: blockSize})
	if l := s.load.Of(source(1)); l.Requests != 1 {
		t.Errorf("back again, it has load %+v, want its request", l)
	}
	if err := s.Free(t.Context(), r.ID); err != nil {
		t.Fatal(err)
	}
	if sum, n, _ := s.load.Total(); sum != (load.Load{}) || n != 0 {
		t.Errorf("%+v is left of %d reservations", sum, n)
	}
	// One that is described and lacks something is known, and not chosen.
	s.Describe(Worker{Instance: "new", Model: part.Model, Group: part.Group, Ranks: 2})
	for _, st := range s.Workers() {
		if st.Worker.Instance == "new" && (st.Lifecycle != Incomplete || len(st.Reasons) != 4) {
			t.Errorf("a worker of which little is known is %s: %q", st.Lifecycle, st.Reasons)
		}
	}
	if _, err := s.Select(t.Context(), &Request{Partition: part, Tokens: 1, Pinned: "new"}); !errors.Is(err, ErrNoWorkers) {
		t.Errorf("it is chosen: %v", err)
	}
}

func TestBetterSource(t *testing.T) {
	index := holdings{source(0): {4, 4, 4, 4}, source(1): {2, 9, 9, 9}, source(2): {12, 12, 12, 12}}
	s := fleet(t, 4, index, Default(), Options{})
	for i, kind := range []string{"decode", "decode", "prefill", "decode"} {
		w := Worker{
			Instance: source(i).Instance, Model: part.Model, Group: part.Group, Endpoint: "http://x", BlockSize: blockSize, Ranks: 1,
			HintType: kind, HintEndpoints: map[uint32]string{0: fmt.Sprint("tcp://", i)},
		}
		s.Describe(w)
	}
	for i, want := range []*Better{{source(1), "tcp://1", 9}, nil, nil, {source(1), "tcp://1", 9}} {
		r, err := s.Select(t.Context(), &Request{Partition: part, Locals: prompt(16), Pinned: source(i).Instance})
		if err != nil {
			t.Fatal(err)
		}
		if (r.Better == nil) != (want == nil) || want != nil && *r.Better != *want {
			t.Errorf("worker %d: better is %+v, want %+v", i, r.Better, want)
		}
	}
}

func TestParamsThatAreWrong(t *testing.T) {
	for _, f := range []func(*Params){
		func(p *Params) { p.DeviceCredit = 1.1 },
		func(p *Params) { p.HostCredit = -0.1 },
		func(p *Params) { p.Temperature = math.NaN() },
		func(p *Params) { p.PrefillScale = math.Inf(1) },
		func(p *Params) { p.PrefillScale = 1e308 },
		func(p *Params) { p.SessionCredit = math.MaxFloat64 },
	} {
		p := DefaultParams()
		f(&p)
		if err := p.Validate(); !errors.Is(err, ErrRequest) {
			t.Errorf("%+v: %v, want ErrRequest", p, err)
		}
	}
}

func TestWeightsAtTheirLimits(t *testing.T) {
	cfg := Default()
	cfg.Params = Params{CreditDecay: MaxWeight, PrefillScale: MaxWeight, RequestWeight: MaxWeight, SessionCredit: MaxWeight, TrackPrefill: true}
	s := fleet(t, 3, holdings{source(1): {5, 5, 5, 5}}, cfg, Options{})
	for i := range 3 {
		b := load.Booking{ID: fmt.Sprint(i), Worker: source(i), PrefillTokens: load.MaxTokens, Tokens: load.MaxTokens, Blocks: load.MaxBlocks, Session: "s"}
		if err := s.Load().Reserve(b); err != nil {
			t.Fatal(err)
		}
	}
	for _, temperature := range []float64{0, math.SmallestNonzeroFloat64, 1e-300, 1, MaxWeight} {
		p := cfg.Params
		p.Temperature = temperature
		for _, r := range []Request{
			{Locals: prompt(10)},
			{Locals: prompt(10), Session: "s"},
			{Tokens: load.MaxTokens, Session: "s"},
			{Locals: prompt(10), Preferred: map[string]float64{"a": MaxWeight, "b": -MaxWeight}},
		} {
			r.Partition, r.Params = part, &p
			got, err := s.Select(t.Context(), &r)
			if err != nil || math.IsNaN(got.Cost) || math.IsInf(got.Cost, 0) {
				t.Errorf("temperature %v: cost %v, error %v", temperature, got.Cost, err)
			}
		}
	}
	for _, weight := range []float64{math.NaN(), math.Inf(1), 1e308, -1e308} {
		_, err := s.Select(t.Context(), &Request{Partition: part, Locals: prompt(10), Preferred: map[string]float64{"a": weight}})
		if !errors.Is(err, ErrRequest) {
			t.Errorf("a taint preferred by %v: error %v, want ErrRequest", weight, err)
		}
	}
}

func TestColdIsTheLeastCost(t *testing.T) {
	s := fleet(t, 3, holdings{source(0): {5, 5, 5, 5}, source(1): {10, 10, 10, 10}}, Default(), Options{})
	p := DefaultParams()
	for _, p.Temperature = range []float64{math.SmallestNonzeroFloat64, 1e-308, 1e-6} {
		for range 50 {
			r, err := s.Select(t.Context(), &Request{Partition: part, Locals: prompt(10), Params: &p})
			if err != nil || r.Source != source(1) || r.Cost != 10 {
				t.Fatalf("temperature %v: %s at cost %v, error %v, want w1 at 10", p.Temperature, r.Source.Instance, r.Cost, err)
			}
		}
	}
}
