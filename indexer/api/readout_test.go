package api_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// TestRegistrations registers with every field, under every name, and takes out
// what was registered.
func TestRegistrations(t *testing.T) {
	w := newWorld(t, options{})
	for _, body := range []string{
		`{"instance_id":18446744073709551615,"endpoint":"tcp://h:1","model_name":"m","block_size":4,"tenant_id":"t","additionalsalt":"s","unknown":{"a":1}}`,
		`{"instance_id":-5,"endpoint":"tcp://*:1","modelname":"m","block_size":4,"routing_group":null,"replay_endpoint":null,"topic":null,"engine":null,"dp_rank":null}`,
		`{"instance_id":"a","endpoint":"ipc:///run/a","replay_endpoint":"ipc:///run/b","model_name":"m","routing_group":"g","block_size":8,"dp_rank":3,"topic":"kv","engine":"vllm","labels":{"zone":"z1"}}`,
	} {
		for range 2 { // the same again is no conflict
			if r := w.want(w.do("POST", "/register", "", []byte(body)), 201, nil); strings.TrimSpace(string(r.body)) != `{"status":"ok"}` {
				t.Errorf("%s: %v", body, r)
			}
		}
	}
	var workers []map[string]any
	w.get("/workers", 200, &workers)
	if len(workers) != 3 {
		t.Fatalf("%d workers, want 3: %v", len(workers), workers)
	}
	if r := w.get("/workers?routing_group=default", 200, nil); !strings.Contains(string(r.body), `"instance_id":18446744073709551615,`) || !strings.Contains(string(r.body), `"instance_id":-5,`) {
		t.Errorf("integers are not integers: %v", r)
	}
	for _, field := range []string{`"labels":{"zone":"z1"}`, `"topic":"kv"`, `"engine":"vllm"`, `"replay_endpoint":"ipc:///run/b"`, `"endpoints":{"3":"ipc:///run/a"}`} {
		if r := w.get("/workers?routing_group=g", 200, nil); !strings.Contains(string(r.body), field) {
			t.Errorf("no %s in %v", field, r)
		}
	}
	for query, want := range map[string]int{"?model_name=m": 3, "?routing_group=g": 1, "?model_name=m&routing_group=g": 1, "?model_name=x": 0, "?routing_group=default": 2} {
		if r := w.get("/workers"+query, 200, &workers); len(workers) != want || want == 0 && strings.TrimSpace(string(r.body)) != "[]" {
			t.Errorf("/workers%s: %v, want %d", query, r, want)
		}
	}
	for _, body := range []string{`{"instance_id":-5,"model_name":"m"}`, `{"instance_id":"18446744073709551615","modelname":"m"}`, `{"instance_id":"a","model_name":"m","routing_group":"g","dp_rank":3}`} {
		w.want(w.do("POST", "/unregister", "", []byte(body)), 200, nil)
		w.refused(body, w.do("POST", "/unregister", "", []byte(body)), 404, "not_registered")
	}
	w.get("/workers", 200, &workers)
	if len(workers) != 0 {
		t.Errorf("left: %v", workers)
	}
	w.refused("a partition without workers", w.post("/query", map[string]any{"model_name": "m", "token_ids": []int{1}}, 404, nil), 404, "unknown_partition")
}

// TestUnregisteredIsNotAnsweredWith: neither a whole instance nor one rank.
func TestUnregisteredIsNotAnsweredWith(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 3)
	for _, s := range []event.Source{at("w0", 0), at("w0", 1), at("w1", 0)} {
		w.register(s)
		w.store(s, event.Device, locals(tokens), 0, 1+int(s.Rank))
	}
	ask := func() map[string]model.Row {
		var got answer
		w.post("/query", map[string]any{"model_name": partition.Model, "token_ids": tokens, "min_log_seq": w.lastSeq}, 200, &got)
		return w.rows(&got)
	}
	if rows := ask(); !reflect.DeepEqual(rows, w.truth[partition].Answer(locals(tokens))) {
		t.Fatalf("before: %v", rows)
	}
	w.post("/unregister", map[string]any{"instance_id": "w0", "model_name": partition.Model, "dp_rank": 1}, 200, nil)
	if rows := ask(); rows["w0"].GPU != blockSize || len(rows["w0"].DP) != 1 || rows["w1"].GPU != blockSize {
		t.Errorf("without rank 1: %v", rows)
	}
	w.post("/unregister", map[string]any{"instance_id": "w0", "model_name": partition.Model}, 200, nil)
	if rows := ask(); len(rows) != 1 || rows["w1"].GPU != blockSize {
		t.Errorf("without w0: %v", rows)
	}
}

// TestWorkers has a bridge tell of listeners, and looks at every field.
func TestWorkers(t *testing.T) {
	w := newWorld(t, options{})
	type listener struct {
		Endpoint    string
		Status      string
		LastError   string `json:"last_error"`
		Bridge      string
		Incarnation *uint64
		EngineSeq   *uint64           `json:"engine_seq"`
		Applied     *uint64           `json:"applied_engine_seq"`
		LogSeq      *uint64           `json:"log_seq"`
		Blocks      map[string]uint64 `json:"blocks"`
		Uncertain   *bool
		Gaps        *uint64
		Lost        *uint64 `json:"lost_batches"`
		Dropped     map[string]uint64
	}
	type worker struct {
		Instance  any `json:"instance_id"`
		Source    string
		Status    string
		Model     string `json:"model_name"`
		Group     string `json:"routing_group"`
		BlockSize int    `json:"block_size"`
		Endpoints map[string]string
		Listeners map[string]listener
		Labels    map[string]string
	}
	only := func() worker {
		t.Helper()
		var all []worker
		w.get("/workers?model_name="+partition.Model, 200, &all)
		if len(all) != 1 {
			t.Fatalf("%+v", all)
		}
		return all[0]
	}
	w.register(at("w0", 0))
	w.register(at("w0", 7))
	v := only()
	if v.Instance != "w0" || v.Source != "zmq" || v.Status != "pending" || v.Model != partition.Model || v.Group != "default" || v.BlockSize != blockSize ||
		v.Endpoints["7"] != "tcp://127.0.0.1:20007" || len(v.Listeners) != 2 {
		t.Errorf("%+v", v)
	}
	if l := v.Listeners["0"]; l.Endpoint != v.Endpoints["0"] || l.Status != "pending" || l.LastError == "" || l.Bridge != "" || l.Incarnation != nil || l.EngineSeq != nil || l.Applied != nil ||
		*l.LogSeq != 0 || *l.Uncertain || *l.Gaps != 0 || *l.Lost != 0 || l.Dropped == nil || l.Blocks["device"] != 0 || len(l.Blocks) != event.Tiers {
		t.Errorf("a listener that nobody has: %+v", l)
	}
	l := locals(prompt(1, 6))
	w.store(at("w0", 0), event.Device, l, 0, 6)
	w.store(at("w0", 0), event.External, l, 0, 2)
	w.remove(at("w0", 0), event.Device, l, 5, 6)
	w.write(at("w0", 0), event.AppendGap(nil, 10, 14, event.ReasonTrimmed))
	seventh := uint64(7)
	tell := func(state, problem string, gone bool) {
		t.Helper()
		status := event.Status{Bridge: "b1", Time: time.Now()}
		for _, rank := range []uint32{0, 7} {
			status.Listeners = append(status.Listeners, event.ListenerStatus{
				Source: at("w0", rank).Key(), State: event.StateActive, EngineSeq: &seventh, Dropped: map[string]uint64{"bad_event": 3}, Gone: gone,
			})
		}
		status.Listeners[1].State, status.Listeners[1].LastError, status.Listeners[1].Uncertain = state, problem, true
		data, err := json.Marshal(status)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.nc.Publish(event.StatusSubject("b1"), data); err != nil {
			t.Fatal(err)
		}
	}
	for _, state := range []string{event.StateFailed, event.StatePending, event.StateCatchingUp, event.StateActive} {
		tell(state, "what is wrong", false)
		w.until(state, func() bool { return only().Status == state })
	}
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq })
	v = only()
	if l := v.Listeners["0"]; l.Status != "active" || l.LastError != "" || l.Bridge != "b1" || *l.Incarnation != 7 || *l.EngineSeq != 7 || *l.Applied != 3 || *l.LogSeq != w.lastSeq ||
		!reflect.DeepEqual(l.Blocks, map[string]uint64{"device": 5, "host": 0, "disk": 0, "external": 2}) || !*l.Uncertain || *l.Gaps != 1 || *l.Lost != 5 || l.Dropped["bad_event"] != 3 {
		t.Errorf("rank 0: %+v", l)
	}
	if l := v.Listeners["7"]; l.LastError != "what is wrong" || !*l.Uncertain || *l.Gaps != 0 {
		t.Errorf("rank 7: %+v", l)
	}
	tell(event.StateActive, "", true)
	w.until("gone", func() bool { return only().Listeners["0"].Bridge == "" })
	if err := w.nc.Publish(event.StatusSubject("b2"), []byte("{")); err != nil { // is logged, and nothing else
		t.Fatal(err)
	}
	only()
}

// TestDump builds the state again from the dump.
func TestDump(t *testing.T) {
	w := newWorld(t, options{})
	var prompts [][]uint32
	for i := range 4 {
		prompts = append(prompts, prompt(uint64(i/2), 8))
		copy(prompts[i][4*blockSize*(1+i%2):], prompt(uint64(10+i), 8))
	}
	w.fleet(rand.New(rand.NewPCG(3, 3)), prompts, 120)
	other := event.Source{Model: "other", Group: "g:1", Instance: "w9", Rank: 2}
	w.register(other)
	w.store(other, event.Disk, locals(prompts[0]), 0, 3)
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq })
	var dump map[string]struct {
		BlockSize int    `json:"block_size"`
		LogSeq    uint64 `json:"log_seq"`
		Events    []struct {
			WorkerID    string `json:"worker_id"`
			StorageTier string `json:"storage_tier"`
			Event       struct {
				EventID *uint64 `json:"event_id"`
				Rank    *uint32 `json:"dp_rank"`
				Data    struct {
					Stored *struct {
						Parent *uint64 `json:"parent_hash"`
						Start  *uint32 `json:"start_position"`
						Blocks []struct {
							Block  uint64 `json:"block_hash"`
							Tokens uint64 `json:"tokens_hash"`
						}
					}
				}
			}
		}
	}
	w.get("/dump", 200, &dump)
	if len(dump) != 2 || dump["other:g:1"].BlockSize != blockSize {
		t.Fatalf("partitions: %v", dump)
	}
	names := []string{"device", "host_pinned", "disk", "external"}
	for name, truth := range map[string]model.State{partition.String(): w.truth[partition], "other:g:1": w.truth[other.Partition()]} {
		d := dump[name]
		if d.LogSeq != w.lastSeq {
			t.Errorf("%s: at %d, want %d", name, d.LogSeq, w.lastSeq)
		}
		got := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
		lastTier := 0
		for i, e := range d.Events {
			tier := slices.Index(names, e.StorageTier)
			stored := e.Event.Data.Stored
			if tier < lastTier || stored == nil || stored.Start == nil || e.Event.Rank == nil || e.Event.EventID == nil || *e.Event.EventID != uint64(i) || (stored.Parent == nil) != (*stored.Start == 0) {
				t.Fatalf("%s: event %d: %+v", name, i, e)
			}
			lastTier = tier
			rank := model.Rank{Instance: e.WorkerID, Rank: *e.Event.Rank}
			if got.Held[rank] == nil {
				got.Held[rank] = map[model.Tier]map[uint64]bool{}
			}
			if got.Held[rank][model.Tier(tier)] == nil {
				got.Held[rank][model.Tier(tier)] = map[uint64]bool{}
			}
			for j, b := range stored.Blocks {
				want := b.Tokens // sequence hash of a first block
				if j > 0 {
					want = hash.Next(stored.Blocks[j-1].Block, b.Tokens)
				} else if stored.Parent != nil {
					want = hash.Next(*stored.Parent, b.Tokens)
				}
				if b.Block != want || got.Held[rank][model.Tier(tier)][b.Block] {
					t.Fatalf("%s: event %d: block %d is %+v, want hash %d, and once", name, i, j, b, want)
				}
				got.Held[rank][model.Tier(tier)][b.Block] = true
			}
		}
		want := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
		for rank, tiers := range truth.Held {
			for tier, blocks := range tiers {
				if len(blocks) == 0 {
					continue
				}
				if want.Held[rank] == nil {
					want.Held[rank] = map[model.Tier]map[uint64]bool{}
				}
				want.Held[rank][tier] = blocks
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: the dump is of another state:\n%v\nwant\n%v", name, got.Held, want.Held)
		}
	}
}

// TestDigest compares counts and sums with the model's.
func TestDigest(t *testing.T) {
	w := newWorld(t, options{})
	w.fleet(rand.New(rand.NewPCG(4, 4)), [][]uint32{prompt(1, 9), prompt(2, 9)}, 100)
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq })
	type tier struct {
		Count uint64
		Sum   string
	}
	var got struct {
		LogSeq  uint64 `json:"log_seq"`
		Sources []struct {
			Instance string `json:"instance_id"`
			Model    string `json:"model_name"`
			Group    string `json:"routing_group"`
			Rank     uint32 `json:"dp_rank"`
			LogSeq   uint64 `json:"log_seq"`
			Diverged bool
			Digest   map[string]tier
		}
		Partitions map[string]map[string]tier
	}
	w.get("/digest", 200, &got)
	var sums event.Digests
	text := func(d *event.Digests) map[string]tier {
		out := map[string]tier{}
		for i, t := range d {
			out[event.Tier(i).String()] = tier{t.Count, fmt.Sprintf("%016x", t.Sum)}
		}
		return out
	}
	if got.LogSeq != w.lastSeq || len(got.Sources) != len(w.truth[partition].Held) {
		t.Fatalf("at %d with %d sources, want %d with %d", got.LogSeq, len(got.Sources), w.lastSeq, len(w.truth[partition].Held))
	}
	for _, s := range got.Sources {
		var mine event.Digests
		for i, blocks := range w.truth[partition].Held[model.Rank{Instance: s.Instance, Rank: s.Rank}] {
			for seq := range blocks {
				mix := event.Mix(seq, event.Salt(event.Tier(i)))
				mine[i].Add(1, mix)
				sums[i].Add(1, mix)
			}
		}
		if !reflect.DeepEqual(s.Digest, text(&mine)) || s.Model != partition.Model || s.Group != partition.Group || s.LogSeq == 0 || s.Diverged {
			t.Errorf("%+v, want %v", s, text(&mine))
		}
	}
	if !reflect.DeepEqual(got.Partitions, map[string]map[string]tier{partition.String(): text(&sums)}) {
		t.Errorf("partitions %v, want %v", got.Partitions, text(&sums))
	}
}

// TestHealth looks at the paths that tell how the process is.
func TestHealth(t *testing.T) {
	w := newWorld(t, options{})
	var v struct {
		Ready   bool
		Reasons []string
		LogSeq  uint64 `json:"log_seq"`
		Lag     uint64
	}
	w.register(at("w0", 0))
	w.store(at("w0", 0), event.Device, locals(prompt(1, 1)), 0, 1)
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq })
	w.get("/ready", 200, &v)
	if !v.Ready || v.Reasons == nil || len(v.Reasons) > 0 || v.LogSeq != w.lastSeq || v.Lag != 0 {
		t.Errorf("%+v", v)
	}
	w.get("/health", 200, nil)
	if r := w.get("/metrics", 200, nil); string(r.body) != "kvmesh_up 1\n" {
		t.Errorf("metrics: %v", r)
	}
	var peers []any
	w.get("/peers", 200, &peers)
	if r := w.do("HEAD", "/health", "", nil); r.status != 200 || len(r.body) > 0 {
		t.Errorf("HEAD: %v", r)
	}
}
