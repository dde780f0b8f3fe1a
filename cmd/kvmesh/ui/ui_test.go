package ui

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

const patience = 60 * time.Second

// board is a UI over a real NATS server, with an index that nobody runs.
type board struct {
	*UI
	js  jetstream.JetStream
	web *httptest.Server
}

func newBoard(t *testing.T, change func(*Config)) *board {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), event.DefaultLog().Config(0, 1)); err != nil {
		t.Fatal(err)
	}
	index, err := indexer.New(nc, js, indexer.Default(), indexer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Default("a")
	if change != nil {
		change(&cfg)
	}
	b := &board{UI: New(cfg, index, nc, js, nil), js: js}
	b.web = httptest.NewServer(b.UI)
	t.Cleanup(func() { b.Close(); b.web.Close() })
	return b
}

// record returns a record with these operations.
func record(batch uint64, ops ...[]byte) []byte {
	return event.AppendRecord(nil, event.Header{Incarnation: 7, First: batch, Last: batch, Batches: true}, len(ops), ops...)
}

// Every kind of operation is shown by its name, none as a number.
func TestRecordsForPeople(t *testing.T) {
	run := event.Run{Root: true, Base: 3, Locals: []uint64{1, 2, 3}}
	digests := event.Digests{}
	digests[event.Host].Add(5, 99)
	var none []event.EngineHash
	var d event.Decoder
	v := viewRecord(&d, record(9,
		event.AppendStored(nil, event.Device, "", run, none),
		event.AppendRemoved(nil, event.Disk, "store", []uint64{4, 5}, event.Group{}, none),
		event.AppendCleared(nil, event.Device.Mask()|event.Host.Mask(), ""),
		event.AppendReset(nil, "restart"),
		event.AppendGap(nil, 10, 12, "trimmed"),
		event.AppendDigest(nil, &digests),
		event.AppendRetired(nil),
		event.AppendGaps(nil, 1, 2),
		event.AppendPublisher(nil, []byte{0xab}),
		event.AppendGroupKind(nil, 1, true),
		event.AppendKnown(nil, run, none),
	))
	if v.Error != "" || v.Incarnation != 7 || *v.Last != 9 {
		t.Errorf("%+v", v)
	}
	data, err := json.Marshal(v.Ops)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`{"op":"stored","tier":"device","blocks":3,"base":3}`, `{"op":"removed","tier":"disk","owner":"store","blocks":2}`, `"op":"cleared","blocks":0,"text":"tiers 0011"`,
		`"op":"reset","blocks":0,"text":"restart"`, `"text":"batches 10 to 12: trimmed"`, `"op":"digest","blocks":5,"text":"host 5 "`, `"op":"retired"`, `"text":"1 gaps, 2 batches"`,
		`"text":"ab"`, `"text":"main: true"`, `"op":"known","blocks":3`,
	} {
		if !strings.Contains(string(data), want) {
			t.Errorf("%s is not in %s", want, data)
		}
	}
	if strings.Contains(string(data), "kind ") {
		t.Errorf("an operation has no name: %s", data)
	}
	chunk := viewRecord(&d, record(9, event.AppendCheckpoint(nil, 0, 2, event.Device, "", 0)))
	if len(chunk.Ops) != 1 || chunk.Ops[0].Op != "checkpoint" || chunk.Ops[0].Text != "chunk 1 of 2" {
		t.Errorf("a checkpoint: %+v", chunk)
	}
	if v := viewRecord(&d, []byte("no record")); v.Error == "" {
		t.Errorf("what is no record: %+v", v)
	}
}

// follow opens a tail, and returns how to read its next records.
func (b *board) follow(t *testing.T, query string) (resp *http.Response, next func() recordView) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, b.web.URL+"/ui/data/tail?"+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err = http.DefaultClient.Do(req); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	pending := ""
	return resp, func() recordView {
		t.Helper()
		for {
			if line, rest, ok := strings.Cut(pending, "\n"); ok {
				pending = rest
				if data, ok := strings.CutPrefix(line, "data: "); ok {
					var v recordView
					if err := json.Unmarshal([]byte(data), &v); err != nil {
						t.Fatal(err)
					}
					return v
				}
				continue
			}
			buffer := make([]byte, 4096)
			n, err := resp.Body.Read(buffer)
			if n == 0 && err != nil {
				t.Fatalf("the tail ends: %v", err)
			}
			pending += string(buffer[:n])
		}
	}
}

// A tail begins with the last record of its source, has no other's, and there are
// not more of them than may be.
func TestTail(t *testing.T) {
	b := newBoard(t, func(c *Config) { c.Tails = 1 })
	source := event.Source{Model: "org/m 1", Group: "default", Instance: "w.0", Rank: 3}
	other := event.Source{Model: "m", Group: "default", Instance: "x"}
	publish := func(s event.Source, batch uint64) {
		t.Helper()
		if _, err := b.js.Publish(t.Context(), event.DefaultLog().Subject(s), record(batch, event.AppendReset(nil, "new"))); err != nil {
			t.Fatal(err)
		}
	}
	publish(source, 1)
	publish(source, 2)
	publish(other, 77)
	query := "model=org%2Fm+1&group=default&instance=w.0&rank=3"
	resp, next := b.follow(t, query)
	if kind := resp.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Errorf("a tail is %q", kind)
	}
	if v := next(); *v.Last != 2 || v.LogSeq != 2 || v.Time.IsZero() {
		t.Errorf("the first is %+v", v)
	}
	if busy, _ := b.follow(t, query); busy.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("one tail too many: %s", busy.Status)
	}
	publish(other, 78)
	publish(source, 3)
	if v := next(); *v.Last != 3 || v.LogSeq != 5 {
		t.Errorf("the second is %+v", v)
	}
	resp.Body.Close()
	for deadline := time.Now().Add(patience); b.tails.Load() != 0; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a tail that the client has left goes on")
		}
	}
	again, next := b.follow(t, query)
	if next(); again.StatusCode != http.StatusOK {
		t.Errorf("after the first has ended: %s", again.Status)
	}
	b.Close() // as when the server stops
	buffer := make([]byte, 1)
	if n, err := again.Body.Read(buffer); n > 0 || err == nil {
		t.Errorf("the tail goes on after the server: %d, %v", n, err)
	}
}

func TestHistoryKeepsTheLast(t *testing.T) {
	h := newHistory(3)
	for i := range int64(10) {
		h.add(sample{Time: i})
	}
	if got := h.since(-1); len(got) != 3 || got[0].Time != 7 || got[2].Time != 9 {
		t.Errorf("kept: %v", got)
	}
	if got := h.since(8); len(got) != 1 || got[0].Time != 9 {
		t.Errorf("since 8: %v", got)
	}
	if got := h.since(9); got == nil || len(got) != 0 {
		t.Errorf("since 9: %v", got)
	}
}

// Digests are compared only where they are of one log sequence.
func TestReplicasAreCompared(t *testing.T) {
	with := func(id string, seq uint64, sum string) replicaView {
		return replicaView{ID: id, PositionJSON: event.Position{LogSeq: seq}.JSON(), Partitions: map[string]tierCounts{"m:g": {"device": {1, sum}}}}
	}
	for name, c := range map[string]struct {
		replicas []replicaView
		compared int
		equal    bool
	}{
		"equal":      {[]replicaView{with("a", 5, "x"), with("b", 5, "x"), with("c", 6, "y")}, 1, true},
		"differ":     {[]replicaView{with("a", 5, "x"), with("b", 5, "x"), with("c", 5, "y")}, 1, false},
		"no two":     {[]replicaView{with("a", 5, "x"), with("b", 6, "y")}, 0, true},
		"two groups": {[]replicaView{with("a", 5, "x"), with("b", 6, "y"), with("c", 5, "x"), with("d", 6, "z")}, 2, false},
	} {
		v := replicasView{Replicas: c.replicas, Equal: true}
		v.compare()
		if len(v.Compared) != c.compared || v.Equal != c.equal {
			t.Errorf("%s: compared at %v, equal: %v", name, v.Compared, v.Equal)
		}
	}
}

// A dashboard shows its own replica also when no other answers.
func TestReplicasWithoutOthers(t *testing.T) {
	b := newBoard(t, func(c *Config) { c.Gather = 10 * time.Millisecond })
	resp, err := http.Get(b.web.URL + "/ui/data/replicas")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var v replicasView
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		t.Fatal(err)
	}
	if len(v.Replicas) != 1 || !v.Replicas[0].This || v.Replicas[0].Ready || v.Replicas[0].Reason == "" {
		t.Errorf("%+v", v)
	}
}
