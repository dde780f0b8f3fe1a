package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/integration/mock"
)

// startModels runs `kvmesh indexer` with --models, and returns its URL when it is
// ready.
func startModels(t *testing.T, server, id, models string) string {
	t.Helper()
	addr := freeAddr(t)
	begin(t, "indexer", "--nats", server, "--id", id, "--http", addr, "--log-level", "warn", "--models", models)
	url := "http://" + addr
	eventually(t, "kvmesh indexer is ready", func() bool {
		status, _, err := ask(http.MethodGet, url+"/ready", nil)
		return err == nil && status == http.StatusOK
	})
	return url
}

// An indexer that holds some models answers for others as the one does that holds
// them.
func TestModelsElsewhere(t *testing.T) {
	server := startNATS(t)
	loads := map[string]*mock.Workload{}
	for i, model := range []string{"a", "b/c", "nobody's"} {
		e, err := mock.NewEngine(mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		begin(t, "bridge", "--nats", server, "--id", fmt.Sprint("edge", i), "--log-level", "warn", "--model", model,
			"--worker", fmt.Sprintf("w%d=%s,replay=%s", i, e.Addr(), e.ReplayAddr()))
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := e.WaitSubscribers(ctx, 1); err != nil {
			t.Fatal(err)
		}
		loads[model] = mock.NewWorkload(mock.WorkloadOptions{Seed: uint64(i)})
		for range 4 {
			if _, err := e.Publish(loads[model].Next()...); err != nil {
				t.Fatal(err)
			}
		}
	}
	xa, xb := startModels(t, server, "xa", "a"), startModels(t, server, "xb", "b/c,d")
	query := func(url, model string) map[string]any {
		return map[string]any{"model_name": model, "token_ids": loads[model].Prompts(1)[0].Tokens}
	}
	reply := func(url, path string, body any) (int, map[string]any) {
		t.Helper()
		status, data, err := ask(http.MethodPost, url+path, body)
		if err != nil {
			t.Fatal(err)
		}
		var out map[string]any
		if err := json.Unmarshal(data, &out); err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		return status, out
	}
	for model, at := range map[string]string{"a": xa, "b/c": xb} {
		other := map[string]string{xa: xb, xb: xa}[at]
		eventually(t, "the one that holds the model has all", func() bool {
			status, r := reply(at, "/query", query(at, model))
			instances, _ := r["instances"].(map[string]any)
			return status == http.StatusOK && len(instances) == 1 && longest(instances) == 64*16
		})
		for path, body := range map[string]map[string]any{
			"/query":         query(at, model),
			"/query_by_hash": {"model_name": model, "block_hashes": loads[model].Prompts(1)[0].Locals, "top": 1},
		} {
			status, want := reply(at, path, body)
			gotStatus, got := reply(other, path, body)
			delete(want, "log_seq") // the other partition's records move it
			delete(got, "log_seq")
			if status != http.StatusOK || gotStatus != status || !reflect.DeepEqual(got, want) {
				t.Errorf("%s %s: %d %v passed on, %d %v directly", model, path, gotStatus, got, status, want)
			}
		}
		if status, r := reply(other, "/query", map[string]any{"model_name": model, "routing_group": "none", "token_ids": []int{1}}); status != http.StatusNotFound || r["code"] != "unknown_partition" {
			t.Errorf("%s: an unknown group: %d %v", model, status, r)
		}
	}
	if status, r := reply(xa, "/query", query(xa, "nobody's")); status != http.StatusServiceUnavailable {
		t.Errorf("a model that nobody holds: %d %v", status, r)
	}
	// One batch of both.
	_, batch := reply(xa, "/query", map[string]any{"queries": []any{query(xa, "a"), query(xa, "b/c"), query(xa, "nobody's")}})
	answers, _ := batch["answers"].([]any)
	if len(answers) != 3 {
		t.Fatalf("batch: %v", batch)
	}
	for i, answer := range answers {
		instances, _ := answer.(map[string]any)["instances"].(map[string]any)
		if has := longest(instances) == 64*16; has != (i < 2) {
			t.Errorf("answer %d of the batch: %v", i, answer)
		}
	}
	// Digests are compared among those who serve the worker's model.
	all := "http://" + freeAddr(t)
	begin(t, "indexer", "--nats", server, "--id", "all", "--http", strings.TrimPrefix(all, "http://"), "--log-level", "warn")
	eventually(t, "kvmesh indexer is ready", func() bool {
		status, _, err := ask(http.MethodGet, all+"/ready", nil)
		return err == nil && status == http.StatusOK
	})
	out, err := command(t, "digest", "--compare", xa+","+xb+","+all)
	if err != nil {
		t.Errorf("digests of indexers with different models: %v", err)
	}
	mustContain(t, out, "3 indexers, 3 workers compared", "0 differ, 0 not compared")
}

func longest(instances map[string]any) int {
	best := 0
	for _, v := range instances {
		if m, ok := v.(map[string]any)["longest_matched"].(float64); ok {
			best = max(best, int(m))
		}
	}
	return best
}

// elsewhere asks an indexer that serves another model than the one that a worker
// is registered for, and of which whoever serves it is mute.
func (d *described) elsewhere() {
	d.t.Helper()
	url, addr := startNATS(d.t), freeAddr(d.t)
	begin(d.t, "indexer", "--nats", url, "--http", addr, "--http-token", apiToken, "--models", "another, model:g")
	d.url = "http://" + addr
	eventually(d.t, "the indexer is ready", func() bool {
		_, err := command(d.t, "health", "--ready", "--server", d.url)
		return err == nil
	})
	d.call("GET", "/ready", nil, 200)
	d.call("GET", "/digest", nil, 200)
	d.call("POST", "/register", map[string]any{"instance_id": "w0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4}, 201)
	eventually(d.t, "the worker is known", func() bool { return len(d.call("GET", "/workers", nil, 200).([]any)) == 1 })
	prompt := map[string]any{"model_name": "m", "token_ids": []int{1, 2, 3, 4}, "block_hashes": []int{1}}
	d.call("POST", "/query", prompt, 503)
	nc, err := nats.Connect(url)
	if err != nil {
		d.t.Fatal(err)
	}
	defer nc.Close()
	if _, err := nc.Subscribe("kvmesh.match.m.default", func(*nats.Msg) {}); err != nil {
		d.t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		d.t.Fatal(err)
	}
	for _, path := range []string{"/query", "/query_by_hash"} {
		d.call("POST", path, prompt, 504)
	}
}

func TestModelsFlag(t *testing.T) {
	for _, bad := range []string{":g", "a:", "a,,b"} {
		_, err := command(t, "indexer", "--nats", "nats://127.0.0.1:1", "--models", bad)
		mustContain(t, errText(t, err), "--models", "model:group")
	}
}
