package engines

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/workload"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// reader subscribes to a worker and keeps what it says, as a bridge would if
// nothing were ever lost.
type reader struct {
	t       *testing.T
	mu      sync.Mutex
	decoder *engine.Decoder
	batch   engine.Batch
	state   *residency.State
	ops     residency.Ops
	seqs    []uint64
	topics  map[string]bool
}

func (r *reader) Connected(string)   {}
func (r *reader) Disconnected(error) {}
func (r *reader) Refused(string)     {}

func (r *reader) Message(frames [][]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(frames) != 3 || len(frames[1]) != 8 {
		r.t.Errorf("message of %d frames", len(frames))
		return
	}
	r.topics[string(frames[0])] = true
	r.seqs = append(r.seqs, binary.BigEndian.Uint64(frames[1]))
	if err := r.decoder.Decode(frames[2], &r.batch); err != nil {
		r.t.Errorf("batch: %v", err)
	}
	for i := range r.batch.Events {
		if reason, n := r.state.Apply(&r.batch.Events[i], &r.ops); n > 0 {
			r.t.Errorf("event dropped: %v", reason)
		}
	}
	r.ops.Reset()
}

func (r *reader) digests() event.Digests {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.state.Digests()
}

// seen returns the numbers of the batches so far.
func (r *reader) seen() []uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.seqs)
}

// follow subscribes to a worker until the test ends.
func follow(t *testing.T, f *Fleet, w *Worker) *reader {
	t.Helper()
	profile, ok := engine.ProfileOf(f.Profile())
	if !ok {
		t.Fatalf("nobody knows the engine %q", f.Profile())
	}
	media, err := engine.NewMedia(nil)
	if err != nil {
		t.Fatal(err)
	}
	clears := event.AllTiers
	if profile.ClearsOnlyDevice {
		clears = event.Device.Mask()
	}
	r := &reader{t: t, decoder: engine.NewDecoder(profile, media), topics: map[string]bool{},
		state: residency.New(residency.Config{BlockSize: f.BlockSize(), Clears: clears, Limits: residency.DefaultLimits()})}
	sub, err := zmtp.NewSub("tcp", strings.TrimPrefix(w.Engine.Addr(), "tcp://"), false, []byte(w.Topic), zmtp.Default(), r)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { sub.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	if err := w.Engine.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	return r
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

func start(t *testing.T, o Options) *Fleet {
	t.Helper()
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

// post sends a request, and returns the status.
func post(t *testing.T, h http.Handler, path string, in, out any, header ...string) int {
	t.Helper()
	data, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequest(http.MethodPost, path, bytes.NewReader(data))
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if out != nil {
		if err := json.Unmarshal(w.Body.Bytes(), out); err != nil {
			t.Fatalf("%s: %d %s", path, w.Code, w.Body)
		}
	}
	return w.Code
}

// TestEventsTellAll runs sessions over caches that are too small for them. Whoever
// follows the events knows what each cache holds, whatever the dialect.
func TestEventsTellAll(t *testing.T) {
	for _, d := range []mock.Dialect{mock.VLLMMap, mock.VLLMArray23, mock.SGLangArray, mock.SGLangMap} {
		t.Run(string(d), func(t *testing.T) {
			t.Parallel()
			f := start(t, Options{Engines: 2, Ranks: 2, Dialect: d, Topic: "kv@%w", Seed: 3, Islands: 1, Cache: cache.Options{
				Device: 400, Host: 600, Transfer: 20 * time.Microsecond, WriteThrough: d == mock.SGLangMap}})
			var readers []*reader
			for _, w := range f.Workers {
				readers = append(readers, follow(t, f, w))
			}
			runSessions(t, f)
			runSessions(t, f) // what was evicted is on the host
			eventually(t, "transfers", f.Settled)
			if err := f.Err(); err != nil {
				t.Fatal(err)
			}
			for i, w := range f.Workers {
				eventually(t, "batches", func() bool { return uint64(len(readers[i].seen())) == w.Engine.Next() })
				if got, want := readers[i].digests(), w.Digests(); got != want || want[event.Device].Count == 0 || want[event.Host].Count == 0 {
					t.Errorf("%s rank %d: announced %v, held %v", w.Instance, w.Rank, got, want)
				}
				if topic := fmt.Sprintf("kv@mock-%d:%d", i/2, i%2); !readers[i].topics[topic] || len(readers[i].topics) != 1 {
					t.Errorf("topics %v, want %s", readers[i].topics, topic)
				}
				if want := fmt.Sprintf("island-%d", i/2); w.Domain != want {
					t.Errorf("domain %q, want %q", w.Domain, want)
				}
			}
			sum := f.Totals()
			if sum.CachedDevice == 0 || sum.CachedHost == 0 || sum.Requests == 0 || sum.Output == 0 || sum.Dropped != 0 {
				t.Errorf("totals %+v", sum)
			}
		})
	}
}

// runSessions runs sessions on all workers, several at a time.
func runSessions(t *testing.T, f *Fleet) {
	o := workload.Default()
	o.Context, o.SystemPrompts, o.System.Max, o.Turns.Max = 6000, 3, 2048, 8
	g, err := workload.New(o)
	if err != nil {
		t.Fatal(err)
	}
	h := f.Handler()
	var wg sync.WaitGroup
	for n := range uint64(24) {
		wg.Go(func() {
			w := f.Workers[int(n)%len(f.Workers)]
			s := g.Session(n)
			for turn, ok := s.Next(); ok; turn, ok = s.Next() {
				in := Generate{MaxTokens: turn.Output.Tokens, Seed: turn.Output.Seed}
				for _, seg := range turn.Prompt {
					in.Segments = append(in.Segments, [2]uint64{seg.Seed, uint64(seg.Tokens)})
				}
				var out Generated
				path := fmt.Sprintf("/workers/%s/%d/generate", w.Instance, w.Rank)
				if code := post(t, h, path, in, &out); code != 200 || out.Prompt != workload.Length(turn.Prompt) {
					t.Errorf("generate: %d %+v", code, out)
				}
			}
		})
	}
	wg.Wait()
}

func TestGenerate(t *testing.T) {
	f := start(t, Options{Cache: cache.Options{BlockSize: 4, Device: 8}, Latency: Latency{Base: time.Millisecond, PerToken: time.Millisecond, PerStep: time.Microsecond}})
	h := f.Handler()
	var out Generated
	in := Generate{Instance: "mock-0", Tokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}, MaxTokens: 3}
	post(t, h, "/generate", in, &out)
	if want := (Generated{Instance: "mock-0", Prompt: 9, Output: 3, PrefillMS: 10, DecodeMS: .003}); out.PrefillMS < 10 || !sameButPrefill(out, want) {
		t.Errorf("first %+v, want %+v", out, want)
	}
	post(t, h, "/generate", in, &out)
	if want := (Generated{Instance: "mock-0", Prompt: 9, Cached: 8, CachedDevice: 8, Output: 3, DecodeMS: .003}); out.PrefillMS < 2 || out.PrefillMS > 9 || !sameButPrefill(out, want) {
		t.Errorf("second %+v, want %+v", out, want)
	}

	var completed struct {
		Choices []struct{ Text string }
		Usage   usage
	}
	body := map[string]any{"model": "m", "prompt": "eight by", "max_tokens": 5}
	for range 2 {
		if code := post(t, h, "/v1/completions", body, &completed, WorkerHeader, "mock-0:0"); code != 200 {
			t.Fatalf("status %d", code)
		}
	}
	if u := completed.Usage; u.Prompt != 8 || u.Completion != 5 || u.Total != 13 || u.Details.Cached != 4 || len(completed.Choices) != 1 {
		t.Errorf("completion %+v", completed)
	}
	body = map[string]any{"prompt": []int{1, 2, 3, 4, 5}}
	if code := post(t, h, "/workers/mock-0/0/v1/completions", body, &completed); code != 200 || completed.Usage.Details.Cached != 4 || completed.Usage.Completion != 16 {
		t.Errorf("status %d, completion %+v", code, completed)
	}
}

func sameButPrefill(a, b Generated) bool {
	if a.Next == 0 || a.Published == 0 {
		return false
	}
	a.PrefillMS, b.PrefillMS, a.Next, a.Published = 0, 0, 0, 0
	return reflect.DeepEqual(a, b)
}

func TestBadRequests(t *testing.T) {
	f := start(t, Options{Cache: cache.Options{BlockSize: 4, Device: 8}})
	h := f.Handler()
	big := []uint32{0}
	for _, c := range []struct {
		path, header string
		in           any
		want         int
	}{
		{"/generate", "", Generate{Instance: "nobody"}, 404},
		{"/generate", "", Generate{Instance: "mock-0", Rank: 1}, 404},
		{"/workers/mock-0/x/generate", "", Generate{}, 400},
		{"/generate", "", "text", 400},
		{"/generate", "", Generate{Instance: "mock-0", MaxTokens: -1}, 400},
		{"/generate", "", Generate{Instance: "mock-0", Tokens: make([]uint32, 100)}, 400},
		{"/generate", "", Generate{Instance: "mock-0", Tokens: big, Segments: [][2]uint64{{1, 2}}}, 400},
		{"/generate", "", Generate{Instance: "mock-0", Segments: [][2]uint64{{1, 1 << 63}, {1, 1 << 63}}}, 400},
		{"/generate", "", Generate{Instance: strings.Repeat("x", maxBody)}, 413},
		{"/v1/completions", "", map[string]any{"prompt": "x"}, 400},
		{"/v1/completions", "mock-0:x", map[string]any{"prompt": "x"}, 400},
		{"/v1/completions", "mock-1", map[string]any{"prompt": "x"}, 404},
		{"/v1/completions", "mock-0", map[string]any{"prompt": 7}, 400},
		{"/v1/completions", "mock-0", map[string]any{"prompt": "x", "max_tokens": -1}, 400},
		{"/faults", "", map[string]any{"instance_id": "mock-0", "fault": "rust"}, 400},
		{"/faults", "", map[string]any{"instance_id": "mock-0", "fault": "stall"}, 400},
		{"/faults", "", map[string]any{"instance_id": "mock-9", "fault": "drop"}, 404},
	} {
		var out struct{ Error string }
		if code := post(t, h, c.path, c.in, &out, WorkerHeader, c.header); code != c.want || out.Error == "" {
			t.Errorf("%s %.60v: %d %q, want %d and a reason", c.path, c.in, code, out.Error, c.want)
		}
	}
	for _, o := range []Options{{Port: 65_535}, {Port: -1}, {Dialect: "klingon"}, {Dialect: mock.VLLMArray08, Cache: cache.Options{Host: 1}}, {Cache: cache.Options{Device: -1}}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}

// A request waits for room until another one ends, its caller gives up, or the
// engine does.
func TestWaitsForRoom(t *testing.T) {
	f := start(t, Options{Cache: cache.Options{BlockSize: 4, Device: 2}, Latency: Latency{Base: time.Hour}})
	w := f.Workers[0]
	first, giveUp := context.WithCancel(within(t))
	var wg sync.WaitGroup
	defer wg.Wait()
	run := func(ctx context.Context, tokens int, want error) {
		wg.Go(func() {
			if _, err := w.Generate(ctx, Job{Prompt: cache.Prompt{Tokens: make([]uint32, tokens)}}); !errors.Is(err, want) {
				t.Errorf("error is %v, want %v", err, want)
			}
		})
	}
	blocks := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.cache.Running()
	}
	run(first, 8, context.Canceled)
	eventually(t, "the first request runs", func() bool { return blocks() == 1 })
	second, giveUpToo := context.WithCancel(within(t))
	run(second, 5, context.Canceled)
	run(within(t), 5, ErrRestarted)
	giveUp()
	eventually(t, "another request runs", func() bool { return blocks() == 1 && first.Err() != nil })
	giveUpToo()
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	eventually(t, "all requests end", func() bool { // one may begin after a restart
		if err := w.Restart(); err != nil {
			t.Fatal(err)
		}
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
	if blocks() != 0 {
		t.Errorf("%d requests run", blocks())
	}
}

func TestFaults(t *testing.T) {
	f := start(t, Options{Cache: cache.Options{BlockSize: 1, Device: 100}, Ring: 5})
	w := f.Workers[0]
	r := follow(t, f, w)
	h := f.Handler()
	token := uint32(0)
	batch := func() {
		token++
		if _, err := w.Generate(within(t), Job{Prompt: cache.Prompt{Tokens: []uint32{token}}}); err != nil {
			t.Fatal(err)
		}
	}
	fault := func(kind string, count, ms int) {
		t.Helper()
		in := map[string]any{"instance_id": "mock-0", "fault": kind, "count": count, "duration_ms": ms}
		if code := post(t, h, "/faults", in, nil); code != 200 {
			t.Fatalf("%s: %d", kind, code)
		}
	}
	expect := func(want ...uint64) {
		t.Helper()
		eventually(t, fmt.Sprint("batches ", want), func() bool { return slices.Equal(r.seen(), want) })
	}
	batch()
	fault(Drop, 2, 0)
	batch()
	batch()
	batch()
	expect(0, 3)
	if err := w.Engine.Resend(1); err != nil {
		t.Errorf("a dropped batch is not in the ring: %v", err)
	}
	expect(0, 3, 1)
	fault(Lose, 1, 0)
	batch()
	batch()
	expect(0, 3, 1, 5)
	if err := w.Engine.Resend(4); !errors.Is(err, mock.ErrNotKept) {
		t.Errorf("a lost batch: %v", err)
	}
	fault(Duplicate, 2, 0) // of which one is lost
	expect(0, 3, 1, 5, 5)
	fault(Overflow, 1, 0)
	batch()
	if err := w.Engine.Resend(5); !errors.Is(err, mock.ErrNotKept) {
		t.Errorf("a batch before the overflow: %v", err)
	}
	fault(Stall, 0, 50)
	if w.Settled() {
		t.Error("settled, and stalled")
	}
	batch()
	batch()
	fault(Clear, 0, 0)
	expect(0, 3, 1, 5, 5, 7, 8, 9)
	eventually(t, "the stall ends", w.Settled)
	if d := w.Digests(); d != (event.Digests{}) {
		t.Errorf("cleared, and holds %v", d)
	}
	fault(Silent, 1, 0)
	fault(Restart, 0, 0)
	if err := w.Engine.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	batch()
	expect(0, 3, 1, 5, 5, 7, 8, 9, 0)
	if f.Totals().Restarts != 1 {
		t.Errorf("totals %+v", f.Totals())
	}
}

// Ranks of an engine are at ports that follow each other, the replay sockets
// behind them.
func TestPorts(t *testing.T) {
	for range 50 {
		base := 20_000 + rand.IntN(12_000)
		f, err := New(Options{Engines: 2, Ranks: 3, Port: base})
		if err != nil {
			t.Fatal(err)
		}
		if f.Start() != nil {
			continue // somebody else has one of them
		}
		defer f.Stop()
		server := httptest.NewServer(f.Handler())
		defer server.Close()
		resp, err := server.Client().Get(server.URL + "/workers")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		var got []Described
		if err != nil || json.Unmarshal(data, &got) != nil || len(got) != 6 {
			t.Fatalf("%v %s", err, data)
		}
		for i, w := range got {
			want := Described{Instance: fmt.Sprintf("mock-%d", i/3), Rank: uint32(i % 3), Engine: "vllm", BlockSize: 16,
				Endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", base+i), Replay: fmt.Sprintf("tcp://127.0.0.1:%d", base+6+i)}
			if w != want {
				t.Errorf("worker %d is %+v, want %+v", i, w, want)
			}
		}
		return
	}
	t.Fatal("no free ports")
}
