package serve

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

func TestWorkersOverHTTP(t *testing.T) {
	v := newService(t)
	a, b := v.start(selection.Default(), "", false), v.start(selection.Default(), "", false)
	// An incomplete worker is accepted, and not schedulable.
	got := a.must(201, "POST", "/workers", `{"worker_id":7,"model_name":"m"}`)
	same(t, "lifecycle", got["lifecycle"], "incomplete")
	same(t, "reasons", len(got["not_schedulable_reasons"].([]any)), 3)
	a.must(503, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8)})
	a.must(503, "GET", "/ready?schedulable=1", nil)
	// It is completed by a patch, on the other replica.
	got = b.must(200, "PATCH", "/workers/7", object{"endpoint": "http://7", "block_size": blockSize, "kv_events_endpoint": "ipc:///nonexistent/7"})
	same(t, "lifecycle", got["lifecycle"], "schedulable")
	same(t, "id", got["worker_id"], 7)
	eventually(t, "the other replica can choose it", func() bool { return a.selector.Schedulable() == 1 })
	got = a.must(200, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8)})
	same(t, "worker", got["worker_id"], 7)
	same(t, "endpoint", got["endpoint"], "http://7")
	// The index knows it too, and both views are one.
	_, list := a.do("GET", "/workers?model_name=m", nil)
	one := list.([]any)[0].(object)
	for _, f := range []string{"instance_id", "worker_id", "status", "listeners", "endpoints", "lifecycle", "endpoint", "block_size"} {
		if _, ok := one[f]; !ok {
			t.Errorf("GET /workers has no %s: %v", f, one)
		}
	}
	ready := a.must(200, "GET", "/ready", nil)
	same(t, "schedulable", ready["schedulable_workers"], 1)
	same(t, "ready", ready["ready"], true)
	// Draining, and back.
	got = a.must(200, "PATCH", "/workers/7", object{"draining": true})
	same(t, "lifecycle", got["lifecycle"], "draining")
	a.must(503, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8)})
	a.must(200, "PATCH", "/workers/7", object{"draining": false, "taints": []string{"x"}})
	got = a.must(200, "PATCH", "/workers/7", object{"topology_domains": object{"zone": "z"}})
	same(t, "taints", got["taints"], []any{"x"})
	// Several ranks, each with its own endpoint; moving to another group.
	ranks := worker("many", object{"data_parallel_start_rank": 2, "data_parallel_size": 2, "kv_events_endpoint": nil,
		"kv_events_endpoints": object{"2": "ipc:///nonexistent/r2", "3": "ipc:///nonexistent/r3"}})
	a.must(201, "POST", "/workers", ranks)
	same(t, "ranks that can be chosen", a.selector.Schedulable(), 3)
	ranks["routing_group"] = "other"
	got = a.must(201, "POST", "/workers", ranks)
	same(t, "group", got["routing_group"], "other")
	got = a.must(200, "POST", "/select", object{"model_name": "m", "routing_group": "other", "token_ids": tokens(8)})
	same(t, "worker", got["worker_id"], "many")
	// A rank less.
	a.must(200, "PATCH", "/workers/many", object{"data_parallel_size": 1, "kv_events_endpoints": object{"2": "ipc:///nonexistent/r2"}})
	same(t, "ranks that can be chosen", a.selector.Schedulable(), 2)
	// What is wrong changes nothing.
	a.must(409, "POST", "/workers", worker("odd", object{"block_size": blockSize * 2}))
	a.must(400, "POST", "/workers", worker("odd", object{"kv_events_endpoint": "http://x"}))
	a.must(400, "POST", "/workers", `{"worker_id":`)
	a.must(400, "POST", "/workers", `{"model_name":"m"}`)
	a.must(400, "PATCH", "/workers/many", object{"block_size": "x"})
	a.must(404, "PATCH", "/workers/nobody", object{})
	a.must(404, "DELETE", "/workers/nobody", nil)
	same(t, "ranks that can be chosen", a.selector.Schedulable(), 2)
	for _, st := range a.selector.Workers() {
		if st.Worker.Instance == "odd" {
			t.Error("a worker that was refused is known")
		}
	}
	a.must(200, "DELETE", "/workers/many", nil)
	a.must(200, "DELETE", "/workers/7", nil)
	a.must(404, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8)})
	eventually(t, "the other replica knows of no worker", func() bool { return len(b.selector.Workers()) == 0 && len(b.index.Workers()) == 0 })
	for path, methods := range map[string]string{"/select": "POST", "/workers/many": "PATCH, DELETE", "/workers": "GET, POST", "/ready": "GET"} {
		same(t, "methods of "+path, a.must(405, "PUT", path, nil)["error"], path+" takes "+methods+", not PUT")
	}
	a.must(404, "GET", "/nothing", nil)
}

func TestSelectionOverHTTP(t *testing.T) {
	v := newService(t)
	n := v.start(selection.Default(), "", false)
	for i := range 3 {
		n.must(201, "POST", "/workers", worker(i, object{"taints": []string{fmt.Sprint("t", i)}}))
	}
	source := func(i int) event.Source {
		return event.Source{Model: "m", Group: "default", Instance: fmt.Sprint(i)}
	}
	v.store(source(1), event.Device, tokens(8))
	v.store(source(1), event.Host, tokens(16))
	v.store(source(2), event.Device, tokens(4))
	eventually(t, "the index has read it", func() bool { return n.index.Position().LogSeq == 3 })
	body := object{"model_name": "m", "token_ids": tokens(22), "selection_id": "s"}
	got := n.must(200, "POST", "/select", body)
	same(t, "worker", got["worker_id"], 1)
	same(t, "selection_id", got["selection_id"], "s")
	same(t, "isl_tokens", got["isl_tokens"], 22)
	o := got["overlap"].(object)
	same(t, "overlap", []any{o["gpu"], o["cpu"], o["disk"], o["longest_matched"], o["dp"]}, []any{8, 16, 16, 16, object{"0": 8}})
	same(t, "effective_prefill_tokens", got["effective_prefill_tokens"], 22-8-6) // host blocks count for 0.75
	same(t, "potential_decode_blocks", got["potential_decode_blocks"], 6)
	same(t, "log_seq", got["log_seq"], 3)
	idle(t, n) // selecting books nothing
	// The same prompt as hashes.
	locals := hash.AppendLocals(nil, tokens(22), blockSize, 0, hash.Seed)
	signed := make([]int64, len(locals))
	for i, l := range locals {
		signed[i] = int64(l)
	}
	byHash := n.must(200, "POST", "/select", object{"model_name": "m", "block_hashes": signed, "sequence_hashes": signed, "isl_tokens": 22})
	same(t, "by hash", byHash["overlap"], got["overlap"])
	// Another namespace has none of it.
	salted := n.must(200, "POST", "/overlap_scores", object{"model_name": "m", "token_ids": tokens(22), "cache_salt": "x"})
	for _, w := range salted["workers"].([]any) {
		same(t, "salted", w.(object)["device_blocks"], 0)
	}
	scores := n.must(200, "POST", "/overlap_scores", object{"model_name": "m", "token_ids": tokens(22)})
	same(t, "all workers, those with nothing too", len(scores["workers"].([]any)), 3)
	best := scores["workers"].([]any)[0].(object)
	same(t, "scores", []any{best["worker_id"], best["device_blocks"], best["host_pinned_blocks"], best["host_pinned_extension_blocks"], best["router_credit_blocks"]}, []any{1, 2, 4, 2, 3.5})
	same(t, "num_blocks", scores["num_blocks"], 5)
	potential := n.must(200, "POST", "/potential_loads", object{"model_name": "m", "token_ids": tokens(22)})["list"].([]any)
	for _, l := range potential {
		want := map[string]any{"0": 22, "1": 8, "2": 18}[fmt.Sprint(l.(object)["worker_id"])]
		same(t, "potential_prefill_tokens", l.(object)["potential_prefill_tokens"], want)
		same(t, "potential_decode_blocks", l.(object)["potential_decode_blocks"], 6)
	}
	n.choices(body)
	n.must(400, "POST", "/select", "")
	n.must(400, "POST", "/select", "[]")
	n.must(400, "POST", "/select", `{"token_ids":[1,2,3`)
	n.must(400, "POST", "/select", `{"token_ids":[1,2,3],"model_name":"m"`)
	n.must(413, "POST", "/select", `{"x":"`+strings.Repeat("x", 9<<20)+`"}`)
	n.must(400, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(4), "advisory": true})
	idle(t, n)
}

// choices asks for all that a request may ask for, beside a body.
func (n *node) choices(body object) {
	t := n.t
	t.Helper()
	for _, c := range []struct {
		more object
		want any // worker, or status
	}{
		{object{"allowed_worker_ids": []any{0}}, "0"},
		{object{"allowed_worker_ids": []any{"2"}}, "2"},
		{object{"pinned_worker": object{"worker_id": 2, "dp_rank": 0}}, "2"},
		{object{"pinned_worker": object{"worker_id": 2, "dp_rank": 1}}, 503},
		{object{"pinned_worker": object{"dp_rank": 1}}, 400},
		{object{"routing_constraints": object{"required_taints": []string{"t0"}}}, "0"},
		{object{"routing_constraints": object{"required_taints": []string{"t9"}}}, 503},
		{object{"routing_constraints": object{"preferred_taints": object{"t2": 5}}}, "2"},
		{object{"router_config_override": object{"overlap_score_credit": 0, "host_cache_hit_weight": 0}, "routing_constraints": object{"preferred_taints": object{"t0": 0.01}}}, "0"},
		{object{"router_config_override": object{"overlap_score_credit": 2}}, 400},
		{object{"router_config_override": object{"router_temperature": -1}}, 400},
		{object{"router_config_override": object{"router_temperature": "warm"}}, 400},
		{object{"allowed_worker_ids": []any{1.5}}, 400},
		{object{"block_hashes": []int{1}}, 400},
		{object{"selection_id": ""}, 400},
		{object{"selection_id": strings.Repeat("x", 300)}, 400},
		{object{"token_ids": []int{-1}}, 400},
		{object{"token_ids": []any{4294967296}}, 400},
		{object{"token_ids": "x"}, 400},
		{object{"token_ids": nil}, 400},
		{object{"model_name": "other"}, 404},
		{object{"advisory": true}, "1"},
		{object{"token_ids": nil, "mm_routing_info": object{"routing_token_ids": tokens(22)}}, "1"},
	} {
		b := object{}
		for k, x := range body {
			b[k] = x
		}
		for k, x := range c.more {
			b[k] = x
		}
		status, reply := n.do("POST", "/select", b)
		if want, ok := c.want.(int); ok {
			same(t, fmt.Sprint("status for ", c.more), status, want)
		} else if status != 200 || fmt.Sprint(reply.(object)["worker_id"]) != c.want {
			t.Errorf("%v: %d, %v, want worker %v", c.more, status, reply, c.want)
		}
	}
}

func TestReservationsOnThreeReplicas(t *testing.T) {
	for _, strict := range []bool{false, true} {
		t.Run(fmt.Sprint("strict ", strict), func(t *testing.T) {
			v := newService(t)
			var n []*node
			for range 3 {
				n = append(n, v.start(selection.Default(), "", strict))
			}
			for i := range 4 {
				n[0].must(201, "POST", "/workers", worker(i, nil))
			}
			for _, x := range n {
				eventually(t, "all workers can be chosen", func() bool { return x.selector.Schedulable() == 4 && len(x.selector.Load().Peers()) == 3 })
			}
			booked := func(want int64) {
				t.Helper()
				for _, x := range n {
					eventually(t, fmt.Sprintf("%d reservations are known", want), func() bool { sum, _, _ := x.selector.Load().Total(); return sum.Requests == want })
				}
			}
			// Made on one, completed, grown and freed on the others.
			got := n[0].must(200, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(40), "selection_id": "a"})
			same(t, "selection_id", got["selection_id"], "a")
			n[0].must(409, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(40), "selection_id": "a"})
			booked(1)
			n[2].must(409, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(40), "selection_id": "a"})
			n[1].must(200, "POST", "/reservations/a/prefill_complete", nil)
			n[2].must(200, "POST", "/reservations/a/output_block", object{"decay_fraction": 0.5})
			n[2].must(200, "POST", "/reservations/a/output_block", nil)
			n[2].must(400, "POST", "/reservations/a/output_block", object{"decay_fraction": 2})
			for _, x := range n {
				eventually(t, "the load is 12 blocks at half weight", func() bool {
					sum, _, _ := x.selector.Load().Total()
					return sum == load.Load{Blocks: 6 * load.Unit, Requests: 1}
				})
			}
			n[1].must(200, "DELETE", "/reservations/a", nil)
			booked(0)
			n[0].must(404, "DELETE", "/reservations/a", nil)
			n[0].must(404, "POST", "/reservations/a/prefill_complete", nil)
			n[0].must(404, "POST", "/reservations/a/output_block", nil)
			// An id may be used again.
			n[2].must(200, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(40), "selection_id": "a"})
			n[2].must(200, "DELETE", "/reservations/a", nil)
			booked(0)
			// Selected on one, booked on another, once.
			chosen := n[0].must(200, "POST", "/select", object{"model_name": "m", "token_ids": tokens(16), "selection_id": "b", "session_id": "c"})
			replay := n[1].must(201, "POST", "/reservations", object{"model_name": "m", "selection_id": "b"})
			same(t, "replayed on", replay["worker_id"], chosen["worker_id"])
			booked(1)
			for _, x := range n {
				eventually(t, "it waits no longer", func() bool { _, err := x.selector.Load().Kept(t.Context(), "b"); return err != nil })
				x.must(404, "POST", "/reservations", object{"model_name": "m", "selection_id": "b"})
			}
			n[2].must(404, "POST", "/reservations", object{"model_name": "m", "selection_id": "never"})
			// The session goes where it was, on any replica.
			for _, x := range n {
				eventually(t, "the session is known", func() bool { _, ok := x.selector.Load().Session("c"); return ok })
				again := x.must(200, "POST", "/select", object{"model_name": "m", "token_ids": tokens(400), "session_context": object{"session_id": "c"}})
				same(t, "session", again["worker_id"], chosen["worker_id"])
			}
			n[2].must(200, "DELETE", "/reservations/b", nil)
			// Explicit.
			for _, x := range n {
				eventually(t, "the replica is idle", func() bool { sum, _, _ := x.selector.Load().Total(); return sum == load.Load{} })
			}
			explicitly(t, n)
			idle(t, n...)
		})
	}
}

// explicitly books on a worker that is given.
func explicitly(t *testing.T, n []*node) {
	t.Helper()
	explicit := object{"model_name": "m", "selection_id": "e", "worker_id": 3, "sequence_hashes": []int{1, 2, 3}, "isl_tokens": 14, "effective_prefill_tokens": 5}
	n[0].must(201, "POST", "/reservations", explicit)
	if l := n[0].selector.Load().Of(event.Source{Model: "m", Group: "default", Instance: "3"}); l != (load.Load{Prefill: 5, Blocks: 4 * load.Unit, Requests: 1}) {
		t.Errorf("load of an explicit reservation: %+v", l)
	}
	n[0].must(409, "POST", "/reservations", explicit)
	explicit["selection_id"], explicit["worker_id"] = "f", 9
	n[0].must(404, "POST", "/reservations", explicit)
	explicit["worker_id"], explicit["effective_prefill_tokens"] = 3, 15
	n[0].must(400, "POST", "/reservations", explicit)
	n[0].must(400, "POST", "/reservations", object{"model_name": "m", "worker_id": 3, "token_ids": tokens(4)})
	n[0].must(400, "POST", "/reservations", object{"model_name": "m", "selection_id": "g", "worker_id": 3})
	n[1].must(200, "DELETE", "/reservations/e", nil)
}

func TestQueueOverHTTP(t *testing.T) {
	v := newService(t)
	cfg := selection.Default()
	cfg.QueueThreshold, cfg.MaxQueue, cfg.QueueTimeout = 1, 1, 30*time.Second
	n := v.start(cfg, "", false)
	n.must(201, "POST", "/workers", worker("w", object{"max_num_batched_tokens": 10}))
	first := n.must(200, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(20)})
	var all sync.WaitGroup
	all.Go(func() {
		second := n.must(200, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(20), "selection_id": "second", "strict_priority": 1})
		same(t, "held back, then booked", second["selection_id"], "second")
	})
	eventually(t, "one is held back", func() bool {
		_, v := n.do("GET", "/loads?model_name=m", nil)
		m := v.([]any)[0].(object)
		return m["pending_count"].(json.Number) == "1" && m["pending_isl_tokens"].(json.Number) == "20"
	})
	full := n.must(503, "POST", "/select", object{"model_name": "m", "token_ids": tokens(20)})
	same(t, "code", full["code"], "queue_full")
	n.must(200, "DELETE", "/reservations/"+first["selection_id"].(string), nil)
	all.Wait()
	n.must(200, "DELETE", "/reservations/second", nil)
	idle(t, n)
}

func TestSelectionOverNATS(t *testing.T) {
	v := newService(t)
	a, b := v.start(selection.Default(), "", false), v.start(selection.Default(), "", false)
	ask := func(operation, body string) (object, string) {
		t.Helper()
		m, err := v.nc.Request(subjectPrefix+operation, []byte(body), 30*time.Second)
		if err != nil {
			t.Fatalf("%s: %v", operation, err)
		}
		var reply any
		if err := json.Unmarshal(m.Data, &reply); err != nil {
			t.Fatalf("%s: answered with %q", operation, m.Data)
		}
		o, ok := reply.(object)
		if !ok {
			o = object{"list": reply}
		}
		return o, m.Header.Get("Nats-Service-Error-Code")
	}
	w, _ := json.Marshal(worker("w1", nil))
	if got, code := ask("upsert_worker", string(w)); code != "" || got["lifecycle"] != "schedulable" {
		t.Fatalf("upsert: %v %v", got, code)
	}
	for _, n := range []*node{a, b} {
		eventually(t, "the worker can be chosen", func() bool { return n.selector.Schedulable() == 1 })
	}
	got, code := ask("select_and_reserve", `{"model_name":"m","token_ids":[1,2,3,4,5],"selection_id":"x y.z"}`)
	if code != "" || got["worker_id"] != "w1" {
		t.Fatalf("select_and_reserve: %v %v", got, code)
	}
	id := event.Escape("x y.z")
	for _, op := range []string{"prefill_complete." + id, "output_block." + id, "free." + id} {
		if got, code := ask(op, ""); code != "" || got["status"] != "ok" {
			t.Errorf("%s: %v %v", op, got, code)
		}
	}
	idle(t, a, b)
	if got, code := ask("free."+id, ""); code != "404" || got["code"] != "unknown_reservation" {
		t.Errorf("free again: %v %v", got, code)
	}
	if got, code := ask("free.=4", ""); code != "400" {
		t.Errorf("a token that is no id: %v %v", got, code)
	}
	if got, code := ask("select", `{"model_name":"m"}`); code != "400" {
		t.Errorf("no prompt: %v %v", got, code)
	}
	if got, code := ask("loads", `{"model_name":"other"}`); code != "" || len(got["list"].([]any)) != 0 {
		t.Errorf("loads of another model: %v %v", got, code)
	}
	if got, code := ask("loads", ""); code != "" || len(got["list"].([]any)) != 1 {
		t.Errorf("loads: %v %v", got, code)
	}
	idle(t, a, b)
}

func TestToken(t *testing.T) {
	v := newService(t)
	n := v.start(selection.Default(), "secret", false)
	for _, path := range []string{"POST /select", "POST /workers", "GET /workers", "GET /loads", "DELETE /reservations/x", "POST /query"} {
		method, path, _ := strings.Cut(path, " ")
		n.must(401, method, path, nil)
	}
	n.must(200, "GET", "/ready", nil)
	r, _ := http.NewRequestWithContext(t.Context(), "GET", n.url+"/loads", nil)
	r.Header.Set("Authorization", "Bearer secret")
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	same(t, "status with the token", resp.StatusCode, 200)
}
