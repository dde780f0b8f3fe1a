package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
	"github.com/kvmesh/kvmesh/replica"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what has to come.
const patience = 30 * time.Second

const blockSize = 4

// partition is the one that most tests are about.
var partition = event.Partition{Model: "m/7b", Group: "default"}

// world is a server with all that is behind it, but for bridges: tests write the
// log themselves, and note what each source holds.
type world struct {
	t       *testing.T
	nc      *nats.Conn
	js      jetstream.JetStream
	index   *indexer.Indexer
	url     string
	handler http.Handler
	client  *http.Client
	token   string
	batches map[event.Source]uint64
	truth   map[event.Partition]model.State
	lastSeq uint64
}

// options are how a test wants its world.
type options struct {
	config func(*api.Config)
	server func(*http.Server)
	tracer trace.TracerProvider // of the index; that of the API is in config
	share  event.Share
	alone  bool  // nothing is passed on to other indexers
	unread bool  // the catalog is never read
	room   int32 // max_payload of NATS; 0: enough
	cert   string
	key    string
}

func newWorld(t *testing.T, o options) *world {
	t.Helper()
	if o.room == 0 {
		o.room = 16 << 20
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, MaxPayload: o.room})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	w := &world{t: t, batches: map[event.Source]uint64{}, truth: map[event.Partition]model.State{}}
	if w.nc, err = nats.Connect(s.ClientURL()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.nc.Close)
	if w.js, err = jetstream.New(w.nc); err != nil {
		t.Fatal(err)
	}
	w.run(o)
	return w
}

// beside returns another server on the same NATS and the same truth.
func (w *world) beside(o options) *world {
	w.t.Helper()
	nc, err := nats.Connect(w.nc.ConnectedUrl())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(nc.Close)
	other := &world{t: w.t, nc: nc, batches: w.batches, truth: w.truth}
	if other.js, err = jetstream.New(nc); err != nil {
		w.t.Fatal(err)
	}
	other.run(o)
	return other
}

// run runs an indexer, and serves the API over it.
func (w *world) run(o options) {
	w.t.Helper()
	t := w.t
	cfg := indexer.Default()
	cfg.Share = o.share
	var err error
	if w.index, err = indexer.New(w.nc, w.js, cfg, indexer.Options{Tracer: o.tracer}); err != nil {
		t.Fatal(err)
	}
	quiet := slog.New(slog.DiscardHandler)
	catalog := replica.NewCatalog(w.js, replica.DefaultCatalog(), quiet, w.index)
	ctx, stop := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	t.Cleanup(func() { stop(); tasks.Wait() })
	if !o.unread {
		tasks.Go(func() { catalog.Run(ctx) })
	}
	tasks.Go(func() { w.index.Run(ctx) })
	w.serve(o, catalog)
	// A NATS server that ends while a stream is being made leaves its store open.
	w.until("a stream", func() bool {
		_, err := w.js.Stream(ctx, event.DefaultLog().Name(0))
		return err == nil
	})
	if !o.unread {
		w.until("ready", func() bool { return w.index.Ready() == nil })
	}
}

// serve serves the API over HTTP and NATS.
func (w *world) serve(o options, registry api.Registry) {
	w.t.Helper()
	config := api.Default()
	if o.config != nil {
		o.config(&config)
	}
	w.token = config.Token
	fleet := api.NewFleet(nil)
	unfollow, err := fleet.Follow(w.nc)
	if err != nil {
		w.t.Fatal(err)
	}
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "kvmesh_up 1\n") })
	front := api.New(config, w.index, registry, fleet, metrics, nil)
	if !o.alone {
		front.Forward(api.NewElsewhere(w.nc, w.index, config))
	}
	unlisten, err := front.Listen(w.nc, "v1.2.3")
	if err != nil {
		w.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	web := front.HTTPServer()
	if o.server != nil {
		o.server(web)
	}
	w.handler = web.Handler
	served := make(chan struct{})
	w.url = "http://" + listener.Addr().String()
	go func() {
		defer close(served)
		if o.cert != "" {
			web.ServeTLS(listener, o.cert, o.key)
		} else {
			web.Serve(listener)
		}
	}()
	transport := &http.Transport{}
	w.client = &http.Client{Transport: transport, Timeout: 2 * patience}
	w.t.Cleanup(func() {
		transport.CloseIdleConnections()
		web.Close()
		<-served
		unlisten()
		unfollow()
	})
}

// until waits for a condition.
func (w *world) until(what string, ok func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("not %s within %v", what, patience)
		}
	}
}

// -- HTTP ---------------------------------------------------------------------

// reply is a reply as it came.
type reply struct {
	status int
	header http.Header
	body   []byte
}

func (r reply) String() string { return strconv.Itoa(r.status) + " " + string(r.body) }

// do makes a request. contentType may be empty.
func (w *world) do(method, path, contentType string, body []byte) reply {
	w.t.Helper()
	r, err := http.NewRequest(method, w.url+path, bytes.NewReader(body))
	if err != nil {
		w.t.Fatal(err)
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	if w.token != "" {
		r.Header.Set("Authorization", "Bearer "+w.token)
	}
	return w.send(r)
}

func (w *world) send(r *http.Request) reply {
	w.t.Helper()
	resp, err := w.client.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, body}
}

// post posts a value as JSON, and reads the reply's JSON into the other unless it
// is nil. The status has to be the one given.
func (w *world) post(path string, body any, status int, into any) reply {
	w.t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		w.t.Fatal(err)
	}
	return w.want(w.do("POST", path, "application/json", data), status, into)
}

func (w *world) get(path string, status int, into any) reply {
	w.t.Helper()
	return w.want(w.do("GET", path, "", nil), status, into)
}

func (w *world) want(r reply, status int, into any) reply {
	w.t.Helper()
	if r.status != status {
		w.t.Fatalf("status %v, want %d", r, status)
	}
	if into != nil {
		if err := json.Unmarshal(r.body, into); err != nil {
			w.t.Fatalf("%s: %v", r.body, err)
		}
	}
	return r
}

// failure is the body of an error.
type failure struct {
	Error string `json:"error"`
	Code  string `json:"code"`
}

// refused checks that a reply is an error of the documented form.
func (w *world) refused(what string, r reply, status int, code string) {
	w.t.Helper()
	var f failure
	dec := json.NewDecoder(bytes.NewReader(r.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&f); err != nil || f.Error == "" || r.header.Get("Content-Type") != "application/json" {
		w.t.Errorf("%s: %v is no error of ours (%v)", what, r, err)
		return
	}
	if r.status != status || f.Code != code {
		w.t.Errorf("%s: %v, want %d %s", what, r, status, code)
	}
}

// -- answers ------------------------------------------------------------------

type answer struct {
	Scores      map[string]map[string]int `json:"scores"`
	Frequencies []int                     `json:"frequencies"`
	Instances   map[string]struct {
		Longest int            `json:"longest_matched"`
		GPU     int            `json:"gpu"`
		DP      map[string]int `json:"dp"`
		CPU     int            `json:"cpu"`
		Disk    int            `json:"disk"`
	} `json:"instances"`
	LogSeq uint64 `json:"log_seq"`

	Error, Code string // of a prompt of a batch
}

// rows returns an answer in the form of the model, after a look at what that form
// does not have.
func (w *world) rows(a *answer) map[string]model.Row {
	w.t.Helper()
	if a.Scores == nil || a.Instances == nil || a.Frequencies == nil || len(a.Frequencies) > 0 || len(a.Scores) != len(a.Instances) {
		w.t.Fatalf("%+v is not the documented form", a)
	}
	out := map[string]model.Row{}
	for name, in := range a.Instances {
		row := model.Row{GPU: in.GPU, CPU: in.CPU, Disk: in.Disk, Longest: in.Longest, DP: map[uint32]int{}}
		if !maps.Equal(in.DP, a.Scores[name]) {
			w.t.Fatalf("%s: dp %v, scores %v", name, in.DP, a.Scores[name])
		}
		for rank, n := range in.DP {
			r, err := strconv.ParseUint(rank, 10, 32)
			if err != nil {
				w.t.Fatal(err)
			}
			row.DP[uint32(r)] = n
		}
		out[name] = row
	}
	return out
}

// -- the fleet ----------------------------------------------------------------

func at(instance string, rank uint32) event.Source {
	return event.Source{Model: partition.Model, Group: partition.Group, Instance: instance, Rank: rank}
}

// register registers a worker over HTTP.
func (w *world) register(s event.Source) {
	w.t.Helper()
	w.post("/register", map[string]any{
		"instance_id": s.Instance, "dp_rank": s.Rank, "model_name": s.Model, "routing_group": s.Group,
		"endpoint": "tcp://127.0.0.1:" + strconv.Itoa(20000+int(s.Rank)), "block_size": blockSize,
	}, http.StatusCreated, nil)
	if _, ok := w.truth[s.Partition()]; !ok {
		w.truth[s.Partition()] = model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	}
}

// held returns what a source holds in a tier, to be changed.
func (w *world) held(s event.Source, t event.Tier) map[uint64]bool {
	rank := model.Rank{Instance: s.Instance, Rank: s.Rank}
	tiers := w.truth[s.Partition()].Held[rank]
	if tiers == nil {
		tiers = map[model.Tier]map[uint64]bool{}
		w.truth[s.Partition()].Held[rank] = tiers
	}
	if tiers[model.Tier(t)] == nil {
		tiers[model.Tier(t)] = map[uint64]bool{}
	}
	return tiers[model.Tier(t)]
}

// write writes one operation of a source to the log, and returns its sequence.
func (w *world) write(s event.Source, op []byte) uint64 {
	w.t.Helper()
	n := w.batches[s]
	w.batches[s]++
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	ack, err := w.js.Publish(ctx, event.DefaultLog().Subject(s), event.AppendRecord(nil, event.Header{Incarnation: 7, Batches: true, First: n, Last: n}, 1, op))
	if err != nil {
		w.t.Fatal(err)
	}
	w.lastSeq = ack.Sequence
	return ack.Sequence
}

// store has a source store the blocks from and before end of a prompt.
func (w *world) store(s event.Source, t event.Tier, locals []uint64, from, end int) uint64 {
	w.t.Helper()
	seqs := hash.AppendSequence(nil, locals)
	run := event.Run{Root: from == 0, Base: uint32(from), Locals: locals[from:end]}
	if from > 0 {
		run.Parent = seqs[from-1]
	}
	for _, seq := range seqs[from:end] {
		w.held(s, t)[seq] = true
	}
	return w.write(s, event.AppendStored(nil, t, "", run, nil))
}

// remove has a source remove the blocks from and before end of a prompt.
func (w *world) remove(s event.Source, t event.Tier, locals []uint64, from, end int) uint64 {
	w.t.Helper()
	seqs := hash.AppendSequence(nil, locals)[from:end]
	for _, seq := range seqs {
		delete(w.held(s, t), seq)
	}
	return w.write(s, event.AppendRemoved(nil, t, "", seqs, event.Group{}, nil))
}

// prompt returns tokens, the same for each seed.
func prompt(seed uint64, blocks int) []uint32 {
	out := make([]uint32, blocks*blockSize)
	for i := range out {
		out[i] = uint32(event.Mix(seed<<32|uint64(i), 0) % model.Vocab)
	}
	return out
}

func locals(tokens []uint32) []uint64 {
	return hash.AppendLocals(nil, tokens, blockSize, 0, hash.Seed)
}
