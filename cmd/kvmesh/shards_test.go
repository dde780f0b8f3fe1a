package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// splitMesh is a deployment of processes whose log is in several streams.
type splitMesh struct {
	t       *testing.T
	shards  int
	nats    string
	engines []*mock.Engine
	loads   []*mock.Workload
	sources []event.Source
	workers []string // flags
}

// newSplitMesh starts NATS, and an engine for each model. ring is how many batches each
// can send again; 0: many.
func newSplitMesh(t *testing.T, shards, ring int, models ...string) *splitMesh {
	m := &splitMesh{t: t, shards: shards, nats: startNATS(t)}
	for i, model := range models {
		e, err := mock.NewEngine(mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0", Ring: ring})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		m.engines = append(m.engines, e)
		m.loads = append(m.loads, mock.NewWorkload(mock.WorkloadOptions{Seed: uint64(i)}))
		m.sources = append(m.sources, event.Source{Model: model, Group: "default", Instance: fmt.Sprint("w", i)})
		m.workers = append(m.workers, fmt.Sprintf("w%d=%s,replay=%s", i, e.Addr(), e.ReplayAddr()))
	}
	return m
}

// publish has all engines publish batches.
func (m *splitMesh) publish(n int) {
	m.t.Helper()
	for range n {
		for i, e := range m.engines {
			if _, err := e.Publish(m.loads[i].Next()...); err != nil {
				m.t.Fatal(err)
			}
		}
	}
}

// settle waits until an indexer has applied all that the engines of models that it
// holds have said.
func (m *splitMesh) settle(url string) {
	m.t.Helper()
	eventually(m.t, "all is applied", func() bool {
		var workers []struct {
			Elsewhere bool
			Listeners map[string]struct {
				Applied *uint64 `json:"applied_engine_seq"`
				LogSeq  uint64  `json:"log_seq"`
			}
			Instance string `json:"instance_id"`
		}
		if err := json.Unmarshal(mustAsk(m.t, http.MethodGet, url+"/workers", nil), &workers); err != nil {
			m.t.Fatal(err)
		}
		for _, w := range workers {
			l, i := w.Listeners["0"], slices.IndexFunc(m.sources, func(s event.Source) bool { return s.Instance == w.Instance })
			if !w.Elsewhere && (l.Applied == nil || *l.Applied+1 != m.engines[i].Next() || l.LogSeq == 0) {
				return false
			}
		}
		return len(workers) == len(m.engines)
	})
}

// get returns the members of an object that a server answers with.
func (m *splitMesh) get(method, url string, body any, status int) map[string]any {
	m.t.Helper()
	got, data, err := ask(method, url, body)
	if err != nil || got != status {
		m.t.Fatalf("%s %s %v: %d, %v, %s; want %d", method, url, body, got, err, data, status)
	}
	var out map[string]any
	if err := json.Unmarshal(data, &out); err != nil {
		m.t.Fatalf("%s %s: %v in %s", method, url, err, data)
	}
	return out
}

// seqs returns the log sequences of a reply, which has to have one for each shard and
// not the one of a log in one stream.
func (m *splitMesh) seqs(of string, reply map[string]any) []any {
	m.t.Helper()
	seqs, _ := reply["log_seqs"].([]any)
	if _, one := reply["log_seq"]; one || len(seqs) != m.shards {
		m.t.Errorf("%s: log_seqs %v, of %v", of, reply["log_seqs"], slices.Sorted(maps.Keys(reply)))
	}
	return seqs
}

// query returns the body of a query for what an engine has.
func (m *splitMesh) query(i int, more ...any) map[string]any {
	body := map[string]any{"model_name": m.sources[i].Model, "token_ids": m.loads[i].Prompts(1)[0].Tokens}
	for j := 0; j < len(more); j += 2 {
		body[more[j].(string)] = more[j+1]
	}
	return body
}

// agree asks indexers about what all engines have, at the position of the first one.
func (m *splitMesh) agree(urls ...string) {
	m.t.Helper()
	at := m.seqs("/ready", m.get(http.MethodGet, urls[0]+"/ready", nil, 200))
	for i, s := range m.sources {
		var first map[string]any
		for _, url := range urls {
			got := m.get(http.MethodPost, url+"/query", m.query(i, "min_log_seqs", at), 200)
			m.seqs("/query", got)
			delete(got, "log_seqs")
			if first == nil {
				first = m.get(http.MethodPost, url+"/query", m.query(i, "min_log_seqs", at), 200)
				delete(first, "log_seqs")
			}
			if !reflect.DeepEqual(got, first) {
				m.t.Errorf("%s asked about what %s has: %v, another one %v", url, s.Instance, got, first)
			}
			instances, _ := got["instances"].(map[string]any)
			own, _ := instances[s.Instance].(map[string]any)
			most := longest(map[string]any{s.Instance: own})
			delete(instances, s.Instance) // the others have the same beginning at most
			if most <= longest(instances) {
				m.t.Errorf("%s asked about what %s has: %d tokens, of others %v", url, s.Instance, most, instances)
			}
		}
	}
}

// TestSplitLog runs a bridge and two indexers with a log in three streams. Both
// kinds are killed and started again.
func TestSplitLog(t *testing.T) {
	m := newSplitMesh(t, 3, 0, "m", "m", "m", "m", "m", "m")
	bridge := func() *spawned {
		args := []string{"bridge", "--nats", m.nats, "--id", "edge", "--log-shards", "3", "--model", "m", "--lease-ttl", "2s"}
		for _, w := range m.workers {
			args = append(args, "--worker", w)
		}
		return spawnKvmesh(t, nil, args...)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(config, []byte("log-shards: 3\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	indexer := func(id string, env []string, args ...string) *spawned {
		p := spawnKvmesh(t, env, append([]string{"indexer", "--nats", m.nats, "--id", id, "--http", "127.0.0.1:0"}, args...)...)
		p.ready(t)
		return p
	}
	b := bridge()
	x, y := indexer("x", []string{"KVMESH_LOG_SHARDS=3"}), indexer("y", nil, "--config", config)
	connected := func() {
		t.Helper()
		for _, e := range m.engines {
			if err := e.WaitSubscribers(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
	}
	connected()
	m.publish(20)
	for _, p := range []*spawned{x, y} {
		m.settle(p.url)
	}
	m.agree(x.url, y.url)
	compare := func() {
		t.Helper()
		out, err := command(t, "digest", "--compare", x.url+","+y.url)
		if err != nil {
			t.Error(err)
		}
		mustContain(t, out, "2 indexers, 6 workers compared at one log sequence each, 0 differ, 0 not compared")
	}
	compare()
	m.streams()
	m.shapes(x.url)

	b.kill()
	y.kill()
	m.publish(5)
	b, y = bridge(), indexer("y", nil, "--config", config)
	m.publish(5)
	for _, p := range []*spawned{x, y} {
		m.settle(p.url)
	}
	m.agree(y.url, x.url)
	compare()

	// Who is started with another number is told so, and ends.
	for _, args := range [][]string{
		{"indexer", "--log-shards", "2", "--http", "127.0.0.1:0"}, {"indexer", "--http", "127.0.0.1:0"}, {"bridge"}, {"bridge", "--log-shards", "4"},
	} {
		p := spawnKvmesh(t, nil, append(args, "--nats", m.nats, "--id", "other")...)
		if err := p.wait(t); err == nil {
			t.Errorf("kvmesh %v ends well", args)
		}
		mustContain(t, p.logs.String(), "--log-shards is", "KV-3-0, KV-3-1, KV-3-2")
	}
	out, err := command(t, "check", "--nats", m.nats, "--server", x.url)
	if err != nil {
		t.Error(err)
	}
	mustContain(t, out, "stream KV-3-0: ", "stream KV-3-1: ", "stream KV-3-2: ")
	b.stop(t)
}

// streams checks that each source is in the stream of its shard, and that none is
// empty.
func (m *splitMesh) streams() {
	m.t.Helper()
	nc, err := nats.Connect(m.nats)
	if err != nil {
		m.t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		m.t.Fatal(err)
	}
	log := event.Log{Stream: "KV", Shards: m.shards}
	found := 0
	for shard := range m.shards {
		stream, err := js.Stream(m.t.Context(), log.Name(shard))
		if err != nil {
			m.t.Fatal(err)
		}
		info, err := stream.Info(m.t.Context(), jetstream.WithSubjectFilter(">"))
		if err != nil {
			m.t.Fatal(err)
		}
		for subject := range info.State.Subjects {
			if s, err := log.Parse(subject); err != nil || !slices.Contains(m.sources, s) {
				m.t.Errorf("%s in %s: %v", subject, log.Name(shard), err)
			}
			found++
		}
		if info.State.Msgs == 0 {
			m.t.Errorf("%s is empty: the test needs other names", log.Name(shard))
		}
	}
	if found != len(m.sources) {
		m.t.Errorf("%d sources, want %d", found, len(m.sources))
	}
}

// shapes looks at where positions are in replies, and how they may be asked for.
func (m *splitMesh) shapes(url string) {
	m.t.Helper()
	seqs := m.seqs("/digest", m.get(http.MethodGet, url+"/digest", nil, 200))
	for name, v := range m.get(http.MethodGet, url+"/dump", nil, 200) {
		m.seqs("/dump of "+name, v.(map[string]any))
	}
	m.seqs("/select", m.get(http.MethodPost, url+"/select", m.query(0), 200))
	m.seqs("/overlap_scores", m.get(http.MethodPost, url+"/overlap_scores", m.query(0), 200))
	replicas := m.get(http.MethodGet, url+"/ui/data/replicas", nil, 200)
	for _, v := range replicas["replicas"].([]any) {
		m.seqs("/ui/data/replicas", v.(map[string]any))
	}
	if !reflect.DeepEqual(replicas["compared"], []any{seqs}) || replicas["equal"] != true {
		m.t.Errorf("compared at %v, equal %v; want %v", replicas["compared"], replicas["equal"], seqs)
	}
	var peers []map[string]any
	if err := json.Unmarshal(mustAsk(m.t, http.MethodGet, url+"/peers", nil), &peers); err != nil {
		m.t.Fatal(err)
	}
	for _, p := range peers {
		if p["role"] == "indexer" {
			m.seqs("/peers", p)
		}
	}
	for _, bad := range []map[string]any{
		m.query(0, "min_log_seq", 1), m.query(0, "min_log_seqs", []int{1, 1}), m.query(0, "min_log_seqs", []int{1, 1, 1, 1}), m.query(0, "min_log_seqs", []any{1, "x", 1}),
	} {
		if reply := m.get(http.MethodPost, url+"/query", bad, 400); !strings.Contains(reply["error"].(string), "min_log_seqs") {
			m.t.Errorf("%v: %v", bad["min_log_seqs"], reply)
		}
	}
	far := slices.Clone(seqs)
	far[1] = far[1].(float64) + 1e6
	if reply := m.get(http.MethodPost, url+"/query", m.query(0, "min_log_seqs", far), 503); reply["code"] != "behind" || !strings.Contains(reply["error"].(string), "in shard 1") {
		m.t.Errorf("a position that is far away: %v", reply)
	}
	metrics := string(mustAsk(m.t, http.MethodGet, url+"/metrics", nil))
	for shard, seq := range seqs {
		at := slices.IndexFunc(strings.Split(metrics, "\n"), func(line string) bool {
			return strings.HasPrefix(line, "kvmesh_indexer_log_seq{") && strings.Contains(line, fmt.Sprintf(`shard="%d"`, shard)) && strings.HasSuffix(line, fmt.Sprint(" ", seq))
		})
		if at < 0 {
			m.t.Errorf("the metrics don't have that shard %d is at %v", shard, seq)
		}
	}
	m.tail(url)
}

// tail follows a source as the dashboard does.
func (m *splitMesh) tail(url string) {
	m.t.Helper()
	client := &http.Client{Timeout: patience}
	resp, err := client.Get(url + "/ui/data/tail?model=m&group=default&rank=0&instance=" + m.sources[0].Instance)
	if err != nil {
		m.t.Fatal(err)
	}
	defer resp.Body.Close()
	var got strings.Builder
	buf := make([]byte, 4096)
	for deadline := time.Now().Add(patience); !strings.Contains(got.String(), `"log_seq":`); {
		n, err := resp.Body.Read(buf)
		got.Write(buf[:n])
		if err != nil || time.Now().After(deadline) {
			m.t.Fatalf("the source is not followed: %v, %s", err, got.String())
		}
	}
}

// digests returns what an indexer holds, by instance, and fails for losses.
func (m *splitMesh) digests(url string) map[string]string {
	m.t.Helper()
	out := map[string]string{}
	for _, v := range m.get(http.MethodGet, url+"/digest", nil, 200)["sources"].([]any) {
		s := v.(map[string]any)
		out[s["instance_id"].(string)] = fmt.Sprint(s["digest"], s["diverged"])
	}
	var workers []struct {
		Instance  string `json:"instance_id"`
		Listeners map[string]struct {
			Uncertain bool
			Gaps      int
		}
	}
	if err := json.Unmarshal(mustAsk(m.t, http.MethodGet, url+"/workers", nil), &workers); err != nil {
		m.t.Fatal(err)
	}
	for _, w := range workers {
		if l := w.Listeners["0"]; l.Uncertain || l.Gaps > 0 {
			m.t.Errorf("%s: %+v", w.Instance, l)
		}
	}
	return out
}

// TestReshard changes how many streams the log is in, also where that was
// interrupted. Engines could not say again what is in the log, and it is kept.
func TestReshard(t *testing.T) {
	m := newSplitMesh(t, 1, 3, "m", "m", "m", "m", "m", "m")
	nc, err := nats.Connect(m.nats)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	// up runs a deployment until down is called.
	up := func() (url string, down func()) {
		t.Helper()
		shards := fmt.Sprint(m.shards)
		args := []string{"bridge", "--nats", m.nats, "--id", "edge", "--log-level", "warn", "--log-shards", shards, "--model", "m"}
		for _, w := range m.workers {
			args = append(args, "--worker", w)
		}
		_, stopBridge := begin(t, args...)
		addr := freeAddr(t)
		_, stopIndexer := begin(t, "indexer", "--nats", m.nats, "--id", "x", "--http", addr, "--log-level", "warn", "--log-shards", shards)
		url = "http://" + addr
		eventually(t, "kvmesh indexer is ready", func() bool {
			status, _, err := ask(http.MethodGet, url+"/ready", nil)
			return err == nil && status == http.StatusOK
		})
		for _, e := range m.engines {
			if err := e.WaitSubscribers(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
		return url, func() { stopBridge(); stopIndexer() }
	}
	url, down := up()
	m.publish(20)
	m.settle(url)
	for _, shards := range []int{3, 2, 1} {
		before := m.digests(url)
		down()
		from, to := event.Log{Stream: "KV", Shards: m.shards}, event.Log{Stream: "KV", Shards: shards}
		if shards == 2 { // an attempt that was interrupted while it copied
			for shard := range from.Shards {
				config := from.Config(shard, 1)
				config.Subjects = event.Aside(from.Name(shard))
				if _, err := js.UpdateStream(t.Context(), config); err != nil {
					t.Fatal(err)
				}
			}
			for shard := range to.Shards {
				if _, err := js.CreateStream(t.Context(), to.Config(shard, 1)); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := js.Publish(t.Context(), to.Subject(m.sources[0]), []byte("half")); err != nil {
				t.Fatal(err)
			}
			for _, l := range []event.Log{from, to} {
				if err := l.Check(t.Context(), js); !errors.Is(err, event.ErrLog) {
					t.Errorf("half of a log in %d streams may be opened: %v", l.Shards, err)
				}
			}
		}
		out, err := command(t, "reshard", "--nats", m.nats, "--log-shards", fmt.Sprint(shards))
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		mustContain(t, out, fmt.Sprintf("in %d streams now", shards))
		names, put, err := event.LogStreams(t.Context(), js)
		if err != nil || len(names) != shards || len(put) > 0 {
			t.Fatalf("streams %v, aside %v, %v", names, put, err)
		}
		m.shards = shards
		m.streams()
		url, down = up()
		m.settle(url)
		if after := m.digests(url); !reflect.DeepEqual(after, before) {
			t.Errorf("in %d streams: %v, before %v", shards, after, before)
		}
		m.publish(3)
		m.settle(url)
	}
	m.digests(url)
	down()

	// One that was interrupted while it deleted goes on with that.
	from, to := event.Log{Stream: "KV", Shards: 3}, event.Log{Stream: "KV", Shards: 1}
	config := to.Config(0, 1)
	config.Metadata = map[string]string{"kvmesh.copied": from.Name(0)}
	if _, err := js.UpdateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	config = from.Config(2, 1)
	config.Subjects = event.Aside(from.Name(2))
	if _, err := js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	if out, err := command(t, "reshard", "--nats", m.nats); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	m.streams()
	if out, err := command(t, "reshard", "--nats", m.nats); err != nil || !strings.Contains(out, "nothing to do") {
		t.Errorf("again: %v\n%s", err, out)
	}
}

// TestReshardEmbedded does it to the files of kvmesh serve.
func TestReshardEmbedded(t *testing.T) {
	m := newSplitMesh(t, 2, 3, "m", "m", "m")
	dir := t.TempDir()
	args := []string{"--model", "m"}
	for _, w := range m.workers {
		args = append(args, "--worker", w)
	}
	p := spawnServe(t, dir, args...)
	for _, e := range m.engines {
		if err := e.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	m.publish(10)
	m.settle(p.url)
	before := m.digests(p.url)
	p.stop(t)
	if out, err := command(t, "reshard", "--data-dir", dir, "--log-shards", "2"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p = spawnServe(t, dir, append(args, "--log-shards", "2")...)
	m.settle(p.url)
	if after := m.digests(p.url); !reflect.DeepEqual(after, before) {
		t.Errorf("%v, before %v", after, before)
	}
	m.agree(p.url)
	p.stop(t)
}

// Indexers that hold some models each pass on what the other one holds, also where
// the log is in several streams.
func TestSplitLogElsewhere(t *testing.T) {
	m := newSplitMesh(t, 2, 0, "a", "b", "a", "b")
	for i, s := range m.sources {
		begin(t, "bridge", "--nats", m.nats, "--id", fmt.Sprint("edge", i), "--log-level", "warn", "--log-shards", "2", "--model", s.Model, "--worker", m.workers[i])
	}
	var urls []string
	for _, model := range []string{"a", "b"} {
		addr := freeAddr(t)
		begin(t, "indexer", "--nats", m.nats, "--id", model, "--http", addr, "--log-level", "warn", "--log-shards", "2", "--models", model)
		urls = append(urls, "http://"+addr)
		eventually(t, "kvmesh indexer is ready", func() bool {
			status, _, err := ask(http.MethodGet, "http://"+addr+"/ready", nil)
			return err == nil && status == http.StatusOK
		})
	}
	for _, e := range m.engines {
		if err := e.WaitSubscribers(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	m.publish(4)
	for _, url := range urls {
		m.settle(url)
	}
	m.agree(urls...)
	for i := range m.sources {
		other := urls[1-i%2]
		if reply := m.get(http.MethodPost, other+"/query", m.query(i, "min_log_seq", 1), 400); !strings.Contains(reply["error"].(string), "min_log_seqs") {
			t.Errorf("%v", reply)
		}
	}
}

// split asks a server whose log is in two streams.
func (d *described) split() {
	d.t.Helper()
	d.url = startServe(d.t, "--log-shards", "2", "--http-token", apiToken)
	d.call("POST", "/workers", map[string]any{"worker_id": "s", "model_name": "sel", "endpoint": "http://s", "block_size": 4, "kv_events_endpoint": "tcp://" + freeAddr(d.t)}, 201)
	prompt := map[string]any{"model_name": "sel", "token_ids": []int{1, 2, 3, 4}}
	eventually(d.t, "the worker is known", func() bool { return len(d.call("GET", "/workers?model_name=sel", nil, 200).([]any)) == 1 })
	at := at(d.call("GET", "/ready", nil, 200), "log_seqs")
	for path, content := range map[string]string{"/query": `"token_ids":[1,2,3,4]`, "/query_by_hash": `"block_hashes":[1]`} {
		seqs, err := json.Marshal(at)
		if err != nil {
			d.t.Fatal(err)
		}
		d.call("POST", path, `{"model_name":"sel",`+content+`,"min_log_seqs":`+string(seqs)+`}`, 200)
		d.call("POST", path, `{"model_name":"sel",`+content+`,"min_log_seq":1}`, 400)
	}
	for _, path := range []string{"/digest", "/dump", "/peers"} {
		d.call("GET", path, nil, 200)
	}
	for _, path := range []string{"/select", "/select_and_reserve", "/overlap_scores"} {
		d.call("POST", path, prompt, 200)
	}
}
