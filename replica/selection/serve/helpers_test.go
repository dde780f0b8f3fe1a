package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/faults"
	"github.com/kvmesh/kvmesh/replica"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"))
}

const blockSize = 4

// service is a NATS server and the replicas that share it.
type service struct {
	t   *testing.T
	url string
	srv *server.Server
	nc  *nats.Conn
	js  jetstream.JetStream
	seq map[event.Source]uint64
}

func newService(t *testing.T) *service {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(30 * time.Second) {
		t.Fatal("NATS not ready")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	v := &service{t: t, srv: s, url: s.ClientURL(), seq: map[event.Source]uint64{}}
	v.nc, v.js = v.connect()
	if _, err := v.js.CreateStream(t.Context(), event.DefaultLog().Config(0, 1)); err != nil {
		t.Fatal(err)
	}
	return v
}

func (v *service) connect() (*nats.Conn, jetstream.JetStream) {
	v.t.Helper()
	nc, err := nats.Connect(v.url, nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	if err != nil {
		v.t.Fatal(err)
	}
	v.t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		v.t.Fatal(err)
	}
	return nc, js
}

// store writes to the log that a worker holds a prompt's blocks in a tier.
func (v *service) store(s event.Source, tier event.Tier, tokens []uint32) {
	v.t.Helper()
	locals := hash.AppendLocals(nil, tokens, blockSize, 0, hash.Seed)
	v.seq[s]++
	h := event.Header{Incarnation: 1, Batches: true, First: v.seq[s], Last: v.seq[s]}
	data := event.AppendRecord(nil, h, 1, event.AppendStored(nil, tier, "", event.Run{Root: true, Locals: locals}, nil))
	if _, err := v.js.Publish(v.t.Context(), event.DefaultLog().Subject(s), data); err != nil {
		v.t.Fatal(err)
	}
}

// node is one replica, as a process has it.
type node struct {
	t        *testing.T
	url      string
	selector *selection.Selector
	index    *indexer.Indexer
	nc       *nats.Conn
	net      *faults.Transport // what it says to other replicas goes through
}

func (v *service) start(cfg selection.Config, token string, strict bool, models ...string) *node {
	t := v.t
	t.Helper()
	nc, js := v.connect()
	ic := indexer.Default()
	share, err := event.ParseShare(models)
	if err != nil {
		t.Fatal(err)
	}
	ic.Share = share
	index, err := indexer.New(nc, js, ic, indexer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	lc := load.Default()
	lc.Beat, lc.JoinWindow, lc.DeadAfter = 100*time.Millisecond, 100*time.Millisecond, time.Minute
	net := faults.Over(load.OverNATS(nc), 1)
	shared, err := load.New(net, lc, load.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var options selection.Options
	if strict {
		options.Strict = load.NewStrict(shared, js, "BOOKINGS", 1, nil)
	}
	selector, err := selection.New(index, shared, cfg, options)
	if err != nil {
		t.Fatal(err)
	}
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil, index, selector)
	roster := selection.NewRoster(js, selection.DefaultRoster(), selector, catalog, nil)
	fleet := api.NewFleet(nil)
	unfollow, err := fleet.Follow(nc)
	if err != nil {
		t.Fatal(err)
	}
	ac := api.Default()
	ac.Token = token
	sc := Default()
	sc.Token, sc.Share = token, ic.Share
	door := New(sc, selector, roster, nil, api.New(ac, index, catalog, fleet, nil, nil), nil)
	unlisten, err := door.Listen(nc, "test")
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(door)
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	for _, run := range []func(context.Context) error{index.Run, shared.Run, catalog.Run, roster.Run} {
		tasks.Go(func() { _ = run(ctx) })
	}
	t.Cleanup(func() {
		web.Close()
		_ = unlisten()
		unfollow()
		cancel()
		tasks.Wait()
		net.End()
	})
	n := &node{t: t, url: web.URL, selector: selector, index: index, nc: nc, net: net}
	eventually(t, "the replica is ready", func() bool {
		resp, err := http.Get(n.url + "/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return n
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(3 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("not so after 30 s: %s", what)
}

type object = map[string]any

// do makes a request and returns its status and what it was answered with.
func (n *node) do(method, path string, body any) (int, any) {
	n.t.Helper()
	var data []byte
	switch b := body.(type) {
	case nil:
	case string:
		data = []byte(b)
	default:
		data, _ = json.Marshal(body)
	}
	r, err := http.NewRequestWithContext(n.t.Context(), method, n.url+path, bytes.NewReader(data))
	if err != nil {
		n.t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		n.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		n.t.Fatal(err)
	}
	var v any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		n.t.Fatalf("%s %s: answered with %q: %v", method, path, text, err)
	}
	return resp.StatusCode, v
}

// must makes a request that has to have a status.
func (n *node) must(status int, method, path string, body any) object {
	n.t.Helper()
	got, v := n.do(method, path, body)
	if got != status {
		n.t.Fatalf("%s %s %v: status %d, want %d: %v", method, path, body, got, status, v)
	}
	if o, ok := v.(object); ok {
		if _, readiness := o["ready"]; readiness {
			return o
		}
		if status >= 400 && (o["error"] == "" || o["error"] == nil || o["code"] == nil) {
			n.t.Errorf("%s %s: an error without a reason or a code: %v", method, path, o)
		}
		return o
	}
	return object{"list": v}
}

// worker describes a worker that can be chosen.
func worker(id any, more object) object {
	o := object{
		"worker_id": id, "model_name": "m", "endpoint": fmt.Sprint("http://", id), "block_size": blockSize,
		"kv_events_endpoint": fmt.Sprintf("ipc:///nonexistent/%v", id),
	}
	for k, v := range more {
		o[k] = v
	}
	return o
}

func tokens(n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = uint32(i + 1)
	}
	return out
}

func same(t *testing.T, what string, got, want any) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// idle waits until no replica has any load.
func idle(t *testing.T, nodes ...*node) {
	t.Helper()
	for i, n := range nodes {
		eventually(t, fmt.Sprintf("replica %d is idle", i), func() bool {
			sum, reservations, _ := n.selector.Load().Total()
			return sum == load.Load{} && reservations == 0
		})
		_, v := n.do("GET", "/loads", nil)
		for _, m := range v.([]any) {
			for _, l := range m.(object)["loads"].([]any) {
				for _, f := range []string{"potential_prefill_tokens", "potential_decode_blocks", "active_requests"} {
					if l.(object)[f].(json.Number) != "0" {
						t.Errorf("replica %d: load of an idle fleet: %v", i, l)
					}
				}
			}
		}
	}
}
