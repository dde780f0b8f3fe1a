package check

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/replica"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

const patience = 60 * time.Second

// want is a finding that has to be there.
type want struct {
	level Level
	area  string
	text  string // part of the text or of the subject
	fix   string // part of the fix
}

func (w want) in(found []Finding) bool {
	return slices.ContainsFunc(found, func(f Finding) bool {
		return f.Level == w.level && f.Area == w.area && strings.Contains(f.Subject+": "+f.Text, w.text) && strings.Contains(f.Fix, w.fix)
	})
}

func expect(t *testing.T, found []Finding, all ...want) {
	t.Helper()
	for _, w := range all {
		if !w.in(found) {
			var out bytes.Buffer
			Print(&out, found)
			t.Errorf("no finding %q in\n%s", w, &out)
		}
	}
}

func run(t *testing.T, o Options) []Finding {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if o.Timeout == 0 {
		o.Timeout = 20 * time.Second
	}
	return Run(ctx, o)
}

func startNATS(t *testing.T, change func(*server.Options)) *server.Server {
	t.Helper()
	o := &server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true}
	if change != nil {
		change(o)
	}
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	return s
}

func connect(t *testing.T, s *server.Server) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}

func startEngine(t *testing.T, o mock.Options) *mock.Engine {
	t.Helper()
	e, err := mock.NewEngine(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

func worker(instance string, rank uint32, endpoint, replay string) event.Worker {
	return event.Worker{Source: event.Source{Model: "m", Group: "default", Instance: instance, Rank: rank}, Endpoint: endpoint, ReplayEndpoint: replay, BlockSize: 16}
}

// In a whole deployment nothing has to be mended.
func TestSoundDeployment(t *testing.T) {
	t.Parallel()
	s := startNATS(t, nil)
	nc, js := connect(t, s)
	e := startEngine(t, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	edge, err := bridge.New(nc, js, bridge.Default("edge-1"), bridge.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil, observer{edge})
	ended := make(chan struct{}, 2)
	for _, run := range []func(context.Context) error{edge.Run, catalog.Run} {
		go func() { run(ctx); ended <- struct{}{} }()
	}
	defer func() { stop(); <-ended; <-ended }()
	registering, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for catalog.Register(registering, worker("w0", 0, e.Addr(), e.ReplayAddr())) != nil && registering.Err() == nil {
		time.Sleep(10 * time.Millisecond)
	}
	if err := e.WaitSubscribers(registering, 1); err != nil {
		t.Fatal(err)
	}
	var found []Finding
	all := []want{
		{OK, "nats", "version 2.", ""}, {OK, "nats", "JetStream has room", ""}, {OK, "clock", "within", ""}, {OK, "log", "stream KV: ", ""},
		{OK, "bridges", "edge-1: reads 1 of 1 workers", ""},
		{OK, "engines", "w0 rank 0: a PUB socket answers", ""}, {OK, "engines", "w0 rank 0: the replay socket answers", ""}, {OK, "ports", "2 sockets", ""},
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if found = run(t, Options{NATS: s.ClientURL(), Replicas: 1}); !slices.ContainsFunc(all, func(w want) bool { return !w.in(found) }) {
			break
		}
	}
	expect(t, found, all...)
	if worst := Worst(found); worst == Fail {
		t.Errorf("something has to be mended: %v", found)
	}
	if after := run(t, Options{NATS: s.ClientURL()}); len(after) == 0 {
		t.Error("the second look finds nothing")
	}
}

type observer struct{ b *bridge.Bridge }

func (o observer) Registered(w event.Worker)   { o.b.Set(w) }
func (o observer) Unregistered(s event.Source) { o.b.Remove(s) }
func (o observer) CatalogRead()                {}

func TestNATSFindings(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := "nats://user:hush@" + l.Addr().String()
	l.Close()
	found := run(t, Options{NATS: nobody})
	expect(t, found, want{Fail, "nats", "no servers", "start nats-server"})
	if strings.Contains(fmt.Sprint(found), "hush") {
		t.Errorf("the password is shown: %v", found)
	}

	plain := startNATS(t, func(o *server.Options) { o.JetStream = false })
	expect(t, run(t, Options{NATS: plain.ClientURL()}), want{Fail, "nats", "JetStream does not answer", "-js"})

	locked := startNATS(t, func(o *server.Options) { o.Username, o.Password = "u", "p" })
	expect(t, run(t, Options{NATS: locked.ClientURL()}), want{Fail, "nats", "uthorization", "user"})

	small := startNATS(t, func(o *server.Options) { o.MaxPayload = 128 << 10 })
	expect(t, run(t, Options{NATS: small.ClientURL(), Replicas: 3}),
		want{Fail, "nats", "max_payload is 131072", "max_payload"}, want{Fail, "nats", "1 servers are known", "cluster"},
		want{OK, "log", "not there yet", ""}, want{Warn, "bridges", "no bridge answers", "kvmesh bridge"}, want{OK, "bridges", "no worker is registered", ""},
		want{Warn, "engines", "no worker", "register"})
	medium := startNATS(t, func(o *server.Options) { o.MaxPayload = 300 << 10 })
	expect(t, run(t, Options{NATS: medium.ClientURL()}), want{Warn, "nats", "split more often", ""})
}

func TestAccountLimits(t *testing.T) {
	t.Parallel()
	s := startNATS(t, nil)
	account := s.GlobalAccount()
	if err := account.UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": {MaxStore: 1 << 20, MaxMemory: 1 << 20, MaxStreams: 0, MaxConsumers: -1}}); err != nil {
		t.Fatal(err)
	}
	expect(t, run(t, Options{NATS: s.ClientURL()}), want{Fail, "nats", "may have 0 streams", "max_streams"})
	if err := account.UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": {MaxStore: 1 << 20, MaxMemory: 1 << 20, MaxStreams: -1, MaxConsumers: -1}}); err != nil {
		t.Fatal(err)
	}
	nc, js := connect(t, s)
	if _, err := js.CreateStream(t.Context(), event.DefaultLog().Config(0, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(t.Context(), "kv.m.default.w0.0", make([]byte, 900<<10)); err != nil {
		t.Fatal(err)
	}
	nc.Flush()
	expect(t, run(t, Options{NATS: s.ClientURL()}), want{Warn, "nats", "of 1.0 MiB are used", "max_file"})
}

func TestStreamFindings(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*jetstream.StreamConfig)
		want   want
	}{
		"age":     {func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }, want{Fail, "log", "max age 1h", "--max-age=-1"}},
		"number":  {func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 10 }, want{Fail, "log", "10 a subject", "--max-msgs-per-subject=-1"}},
		"discard": {func(c *jetstream.StreamConfig) { c.Discard, c.MaxBytes = jetstream.DiscardOld, 1<<20 }, want{Fail, "log", "forgets", "--discard=new"}},
		"memory":  {func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, want{Warn, "log", "in memory", "delete"}},
		"window":  {func(c *jetstream.StreamConfig) { c.Duplicates = time.Second }, want{Warn, "log", "for 1s only", "--dupe-window"}},
		"subject": {func(c *jetstream.StreamConfig) { c.Subjects = []string{"kv.*.*.*.*"} }, want{Fail, "log", "subjects", "kv.>"}},
		"copies":  {func(*jetstream.StreamConfig) {}, want{Warn, "log", "1 servers keep it, 3 are wanted", "--replicas=3"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startNATS(t, nil)
			_, js := connect(t, s)
			config := event.DefaultLog().Config(0, 1)
			c.change(&config)
			if _, err := js.CreateStream(t.Context(), config); err != nil {
				t.Fatal(err)
			}
			expect(t, run(t, Options{NATS: s.ClientURL(), Replicas: 3}), c.want)
		})
	}
}

// A log in several streams is looked at one by one. Streams of logs that are split
// otherwise are told of.
func TestSplitLog(t *testing.T) {
	t.Parallel()
	s := startNATS(t, nil)
	_, js := connect(t, s)
	split := event.Log{Stream: "KV", Shards: 3}
	add := func(l event.Log, shard int, change func(*jetstream.StreamConfig)) {
		t.Helper()
		config := l.Config(shard, 1)
		if change != nil {
			change(&config)
		}
		if _, err := js.CreateStream(t.Context(), config); err != nil {
			t.Fatal(err)
		}
	}
	add(split, 0, nil)
	add(split, 2, func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour })
	expect(t, run(t, Options{NATS: s.ClientURL()}), want{OK, "log", "stream KV-3-0: 0 records", ""}, want{OK, "log", "stream KV-3-1: not there yet", ""},
		want{Fail, "log", "stream KV-3-2: records go by age", "nats stream edit KV-3-2 --max-age=-1"})
	expect(t, run(t, Options{NATS: s.ClientURL(), Shards: 2}), want{Fail, "log", "stream KV-3-0: it is of a log in 3 streams, where one in 2 is wanted", "--log-shards"})
	add(event.Log{Stream: "KV", Shards: 2}, 1, nil)
	expect(t, run(t, Options{NATS: s.ClientURL()}), want{Fail, "log", "of a log in", "--log-shards"})
	expect(t, run(t, Options{NATS: s.ClientURL(), Shards: 3}), want{Fail, "log", "stream KV-2-1: it is of a log in 2 streams", "--log-shards"})
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ARCHIVE", Subjects: []string{"kv.archive.>"}}); err != nil {
		t.Fatal(err)
	}
	expect(t, run(t, Options{NATS: s.ClientURL()}), want{Fail, "log", "stream ARCHIVE: it takes records", ""})
}

// A server whose clock is wrong, a log without leader and a listener that failed: a
// NATS server without JetStream, behind which this test answers.
func TestClockLeaderAndListeners(t *testing.T) {
	t.Parallel()
	s := startNATS(t, func(o *server.Options) { o.JetStream = false })
	nc, _ := connect(t, s)
	answer := func(subject string, body func(asked string) any) {
		if _, err := nc.Subscribe(subject, func(m *nats.Msg) {
			data, err := json.Marshal(body(string(m.Data)))
			if err != nil {
				t.Error(err)
			}
			to := m.Reply
			if to == "" {
				to = event.StatusSubject("edge-9")
			}
			nc.Publish(to, data)
		}); err != nil {
			t.Fatal(err)
		}
	}
	answer("$JS.API.INFO", func(string) any {
		return map[string]any{"limits": map[string]any{"max_storage": -1, "max_streams": -1}}
	})
	answer("$JS.API.STREAM.NAMES", func(asked string) any {
		names := []string{"KV"}
		if !strings.Contains(asked, `"kv.`) {
			names = nil // none is put aside
		}
		return map[string]any{"total": len(names), "streams": names}
	})
	answer("$JS.API.STREAM.INFO.KV", func(string) any {
		return jetstream.StreamInfo{Config: event.DefaultLog().Config(0, 1), TimeStamp: time.Now().Add(90 * time.Minute),
			Cluster: &jetstream.ClusterInfo{Name: "c", Replicas: []*jetstream.PeerInfo{{Name: "nats-2", Offline: true, Lag: 7}}}}
	})
	answer("$JS.API.STREAM.INFO.KV_KVMESH_WORKERS", func(string) any { return map[string]any{"error": map[string]any{"code": 404, "err_code": 10059}} })
	answer(event.StatusRequestSubject, func(string) any {
		return event.Status{Bridge: "edge-9", Listeners: []event.ListenerStatus{
			{Source: "m.default.w0.0", State: event.StateFailed, LastError: "out of luck"}, {Source: "m.default.w1.0", State: event.StateActive, Uncertain: true}}}
	})
	nc.Flush()
	expect(t, run(t, Options{NATS: s.ClientURL()}),
		want{Fail, "nats", "no keys that end by themselves", "2.11"}, want{Fail, "clock", "1h", "NTP"}, want{Fail, "log", "no leader", "majority"}, want{Warn, "log", "nats-2 is not up to date", ""},
		want{OK, "bridges", "edge-9: reads 1 of 2", ""}, want{Fail, "bridges", "w0.0: out of luck", ""}, want{Warn, "bridges", "w1.0: batches were lost", "buffer_steps"})
}

func TestEngineFindings(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := "tcp://" + l.Addr().String()
	l.Close()
	web := httptest.NewServer(http.NotFoundHandler())
	defer web.Close()
	e := startEngine(t, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	silent := startEngine(t, mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0", Replay: mock.Replay{Silent: -1}})
	found := run(t, Options{Timeout: 3 * time.Second, Workers: []event.Worker{
		worker("refused", 0, nobody, ""),
		worker("web", 0, "tcp://"+web.Listener.Addr().String(), ""),
		worker("swapped", 0, e.ReplayAddr(), e.Addr()),
		worker("silent", 0, silent.Addr(), silent.ReplayAddr()),
		worker("binds", 0, "tcp://*:5557", ""),
	}})
	expect(t, found,
		want{Fail, "engines", "refused rank 0", "nothing listens there"}, want{Warn, "engines", "refused rank 0: there is no replay socket", "replay_endpoint"},
		want{Fail, "engines", "web rank 0", "HTTP port"},
		want{Fail, "engines", "swapped rank 0: " + e.ReplayAddr(), "wrong way round"}, want{Fail, "engines", "swapped rank 0: " + e.Addr(), "wrong way round"},
		want{OK, "engines", "silent rank 0: a PUB socket", ""}, want{Fail, "engines", "silent rank 0: the replay socket", "hang"},
		want{OK, "engines", "binds rank 0", ""})
	if fix := dialFix(fmt.Errorf("dial: %w", &net.DNSError{Name: "nowhere"}), "PUB"); !strings.Contains(fix, "host name") {
		t.Errorf("of an unknown host: %q", fix)
	}
}

func TestPortFindings(t *testing.T) {
	t.Parallel()
	look := func(ranks int, workers ...event.Worker) []Finding {
		c := checker{Options: Options{Ranks: ranks}}
		c.ports(workers)
		return c.found
	}
	one := worker("w0", 0, "tcp://h:5557", "tcp://h:5558")
	expect(t, look(0, one), want{OK, "ports", "2 sockets", ""}, want{Warn, "ports", "as soon as there are 2", "5657"})
	expect(t, look(2, one), want{Fail, "ports", "with 2 ranks they collide", "5657"})
	expect(t, look(0, one, worker("w0", 1, "tcp://h:5558", "tcp://h:5559")),
		want{Fail, "ports", "tcp h:5558: the replay socket of w0 rank 0 is also the PUB socket of w0 rank 1", "ports of its own"})
	expect(t, look(0, one, worker("w1", 0, "tcp://h:5557", "")), want{Fail, "ports", "tcp h:5557", ""})
	far := worker("w0", 0, "tcp://h:5557", "tcp://h:5657")
	for _, f := range look(8, far, worker("w0", 1, "tcp://h:5558", "tcp://h:5658"), worker("w1", 0, "tcp://g:5557", "tcp://g:5657")) {
		if f.Level != OK {
			t.Errorf("sound ports: %v", f)
		}
	}
	expect(t, look(101, far), want{Fail, "ports", "with 101 ranks", ""})
}

func TestServerFindings(t *testing.T) {
	t.Parallel()
	reply := func(ready string, status int, date time.Time) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Date", date.UTC().Format(http.TimeFormat))
			if r.URL.Path == "/ready" {
				w.Write([]byte(ready))
			} else {
				w.WriteHeader(status)
				w.Write([]byte("[]"))
			}
		}))
	}
	for _, c := range []struct {
		server *httptest.Server
		want   []want
	}{
		{reply(`{"ready":true,"lag":0}`, 200, time.Now()), []want{{OK, "server", "ready, 0 records", ""}}},
		{reply(`{"ready":false,"reasons":["behind"]}`, 200, time.Now().Add(-time.Hour)), []want{{Fail, "server", "not ready: behind", "lag"}, {Fail, "clock", "-1h0m", "NTP"}}},
		{reply(`{"ready":true}`, 401, time.Now()), []want{{Fail, "server", "bearer token", "--token"}}},
		{reply(`<html>`, 200, time.Now()), []want{{Fail, "server", "no kvmesh", ""}}},
	} {
		expect(t, run(t, Options{Server: c.server.URL, Workers: []event.Worker{worker("w", 0, "tcp://*:1", "")}}), c.want...)
		c.server.Close()
	}
}
