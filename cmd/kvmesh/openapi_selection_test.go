package main

import (
	"encoding/json"
	"fmt"
	"strings"
)

// selections makes every request of a client that selects workers.
func (d *described) selections() {
	d.t.Helper()
	type object = map[string]any
	tokens := []int{1, 2, 3, 4, 5, 6, 7, 8, 9}
	full := object{
		"worker_id": "s", "model_name": "sel", "routing_group": "default", "endpoint": "http://s", "kv_events_endpoint": "tcp://" + freeAddr(d.t),
		"replay_endpoint": "tcp://" + freeAddr(d.t), "block_size": 4, "data_parallel_start_rank": 0, "data_parallel_size": 1, "max_num_batched_tokens": 8192,
		"total_kv_blocks": 1000, "stable_routing_id": "s", "is_eagle": false, "taints": []string{"x"}, "topology_domains": object{"zone": "z"},
		"kv_transfer_domain": "zone", "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.5, "router_hint_worker_type": "decode",
		"router_hint_source_control_endpoints": object{"0": "tcp://127.0.0.1:9"}, "engine": "vllm", "topic": "kv", "labels": object{"zone": "a"}, "draining": false, "ttl_seconds": 600,
		"kv_events_endpoints": object{}, "replay_endpoints": object{},
	}
	full["kv_events_endpoints"] = object{"0": full["kv_events_endpoint"]}
	full["replay_endpoints"] = object{"0": full["replay_endpoint"]}
	d.call("POST", "/workers", object{"worker_id": 8, "model_name": "sel"}, 201) // incomplete
	d.call("POST", "/workers", full, 201)
	d.call("PATCH", "/workers/s", object{"endpoint": "http://t", "taints": []string{"y"}, "draining": true}, 200)
	d.call("GET", "/workers?model_name=sel&routing_group=default", nil, 200)
	d.call("GET", "/ready?schedulable=1", nil, 200)
	d.call("PATCH", "/workers/s", object{"draining": false}, 200)
	other := object{"worker_id": "other", "model_name": "sel", "endpoint": "http://x", "block_size": 8, "kv_events_endpoint": "tcp://" + freeAddr(d.t)}
	d.call("POST", "/workers", other, 409)
	d.call("POST", "/workers", object{"worker_id": ""}, 400)
	d.call("PATCH", "/workers/s", object{"endpoint": 1}, 400)
	d.call("PATCH", "/workers/nobody", object{}, 404)
	d.call("DELETE", "/workers/nobody", nil, 404)

	mm := object{"routing_token_ids": tokens, "block_mm_infos": []any{nil, object{"mm_objects": []any{object{"mm_hash": 5}}}}}
	prompts := []object{
		{"token_ids": tokens, "lora_name": nil, "cache_salt": nil, "is_eagle": false},
		{"block_hashes": []any{1, "2"}, "sequence_hashes": []any{3, "4"}, "isl_tokens": 9}, {"mm_routing_info": mm},
	}
	override := object{
		"overlap_score_credit": 1, "overlap_score_credit_decay": 0.1, "host_cache_hit_weight": 0.5, "disk_cache_hit_weight": 0.1, "prefill_load_scale": 2,
		"decode_active_request_weight": 1, "session_credit": 0.5, "router_temperature": 0.1, "track_prefill_tokens": true,
	}
	with := func(prompt object, more ...object) object {
		out := object{"model_name": "sel", "routing_group": "default"}
		for _, m := range append(more, prompt) {
			for k, v := range m {
				out[k] = v
			}
		}
		return out
	}
	ask := object{
		"priority_jump": 1.5, "strict_priority": 1, "session_id": "c", "session_context": object{"session_id": "c", "session_final": true},
		"pinned_worker": object{"worker_id": "s", "dp_rank": 0}, "allowed_worker_ids": []any{"s", 8},
		"routing_constraints": object{"required_taints": []string{"y"}, "preferred_taints": object{"y": 0.5}}, "router_config_override": override,
	}
	for _, p := range prompts {
		d.call("POST", "/select", with(p, ask, object{"selection_id": "kept", "advisory": true}), 200)
		d.call("POST", "/potential_loads", with(p, object{"router_config_override": override}), 200)
		d.call("POST", "/overlap_scores", with(p, object{"router_config_override": override}), 200)
		r := d.call("POST", "/select_and_reserve", with(p, ask, object{"selection_id": "a"}), 200)
		if at(r, "worker_id") != "s" {
			d.t.Errorf("chosen: %v", r)
		}
		d.call("POST", "/select_and_reserve", with(p, object{"selection_id": "a"}), 409)
		d.call("GET", "/loads?model_name=sel&routing_group=default", nil, 200)
		d.call("POST", "/reservations/a/prefill_complete", nil, 200)
		d.call("POST", "/reservations/a/output_block", object{"decay_fraction": 0.5}, 200)
		d.call("POST", "/reservations/a/output_block", object{"decay_fraction": 5}, 400)
		d.call("DELETE", "/reservations/a", nil, 200)
	}
	d.call("POST", "/reservations", object{"model_name": "sel", "selection_id": "kept"}, 201)
	d.call("DELETE", "/reservations/kept", nil, 200)
	d.call("POST", "/reservations", object{"model_name": "sel", "selection_id": "kept"}, 404)
	d.call("POST", "/reservations", with(prompts[0], object{"selection_id": "b", "worker_id": "s", "dp_rank": 0, "effective_prefill_tokens": 3, "track_prefill_tokens": true,
		"session_id": "c", "router_config_override": override}), 201)
	d.call("POST", "/reservations", with(prompts[0], object{"selection_id": "b", "worker_id": "s"}), 409)
	d.call("DELETE", "/reservations/b", nil, 200)
	for _, path := range []string{"/reservations/b/prefill_complete", "/reservations/b/output_block"} {
		d.call("POST", path, nil, 404)
	}
	d.call("DELETE", "/reservations/b", nil, 404)
	d.call("POST", "/reservations", "{", 400)
	large := `{"model_name": "` + strings.Repeat("x", 8<<20) + `"}`
	d.call("POST", "/workers", large, 413)
	for _, path := range []string{"/select", "/select_and_reserve"} {
		d.call("POST", path, "{", 400)
		d.call("POST", path, large, 413)
		d.call("POST", path, object{"model_name": "nobody", "token_ids": tokens}, 404)
		d.call("POST", path, with(prompts[0], object{"routing_constraints": object{"required_taints": []string{"nothing"}}}), 503)
	}
	for _, path := range []string{"/potential_loads", "/overlap_scores"} {
		d.call("POST", path, "{", 400)
		d.call("POST", path, object{"model_name": "nobody", "token_ids": tokens}, 404)
	}
	for _, l := range d.call("GET", "/loads?model_name=sel", nil, 200).([]any) {
		for _, w := range at(l, "loads").([]any) {
			if at(w, "active_requests") != json.Number("0") || at(w, "potential_decode_blocks") != json.Number("0") {
				d.t.Errorf("load of an idle fleet: %v", l)
			}
		}
	}
	d.hint()
	d.call("DELETE", "/workers/s", nil, 200)
	d.call("DELETE", "/workers/8", nil, 200)
}

// hint selects a worker that holds less than another one.
func (d *described) hint() {
	d.t.Helper()
	type object = map[string]any
	for _, id := range []string{"w0", "7"} {
		before := at(d.worker(id), "endpoints")
		got := d.call("PATCH", "/workers/"+id, object{"endpoint": "http://" + id, "router_hint_worker_type": "decode",
			"router_hint_source_control_endpoints": object{"0": "tcp://" + id + ":9"}}, 200)
		if at(got, "lifecycle") != "schedulable" || fmt.Sprint(at(d.worker(id), "endpoints")) != fmt.Sprint(before) {
			d.t.Errorf("described: %v, it was registered with %v", got, before)
		}
	}
	for _, path := range []string{"/select", "/select_and_reserve"} {
		var h any
		eventually(d.t, "the bridge has said in time how the engine names blocks", func() bool {
			r := d.call("POST", path, object{"model_name": "m", "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8, 9}, "selection_id": "h", "pinned_worker": object{"worker_id": "7"}}, 200)
			if h = at(r, "router_hint"); h == nil && path == "/select_and_reserve" {
				d.call("DELETE", "/reservations/h", nil, 200)
			}
			return h != nil
		})
		if at(h, "source_control_endpoint") != "tcp://w0:9" || fmt.Sprint(at(h, "block_hashes")) != "[11 12]" || at(h, "source_worker_id") != "w0" {
			d.t.Errorf("%s: hint %v", path, h)
		}
	}
	d.call("DELETE", "/reservations/h", nil, 200)
	r := d.call("POST", "/select", object{"model_name": "m", "token_ids": []int{1, 2, 3, 4, 5, 6, 7, 8}, "pinned_worker": object{"worker_id": "w0"}}, 200)
	if at(r, "router_hint") != nil {
		d.t.Errorf("the best stocked worker got a hint: %v", r)
	}
}

// worker returns what /workers says of one.
func (d *described) worker(id string) any {
	d.t.Helper()
	for _, w := range d.call("GET", "/workers", nil, 200).([]any) {
		if fmt.Sprint(at(w, "instance_id")) == id {
			return w
		}
	}
	d.t.Fatalf("no worker %s", id)
	return nil
}
