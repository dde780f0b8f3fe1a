package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"testing"
)

// replicaProcess is a replica in a process of its own.
type replicaProcess struct {
	url string
	cmd *exec.Cmd
}

// startProcess runs `kvmesh indexer` as a process, and returns when it is ready.
func startProcess(t *testing.T, nats string, args ...string) *replicaProcess {
	t.Helper()
	addr := freeAddr(t)
	p := &replicaProcess{url: "http://" + addr}
	p.cmd = exec.Command(os.Args[0], append([]string{"indexer", "--nats", nats, "--http", addr, "--log-level", "warn"}, args...)...)
	p.cmd.Env = append(os.Environ(), "KVMESH_TEST_AS_COMMAND=1")
	p.cmd.Stderr = os.Stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	eventually(t, "the replica is ready", func() bool { return p.status(t, "GET", "/ready", nil) == http.StatusOK })
	return p
}

// kill kills the process with SIGKILL.
func (p *replicaProcess) kill() {
	_ = p.cmd.Process.Kill() // it may be gone
	_ = p.cmd.Wait()
}

func (p *replicaProcess) do(t *testing.T, method, path string, body, reply any) int {
	t.Helper()
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), method, p.url+path, bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	if reply != nil {
		if err := json.NewDecoder(resp.Body).Decode(reply); err != nil {
			t.Fatalf("%s %s: %v", method, path, err)
		}
	}
	return resp.StatusCode
}

func (p *replicaProcess) status(t *testing.T, method, path string, body any) int {
	t.Helper()
	return p.do(t, method, path, body, nil)
}

// active returns how many requests are active, and the sum of all that is.
func (p *replicaProcess) active(t *testing.T) (requests, all int64) {
	t.Helper()
	var models []struct {
		Loads []struct {
			Requests int64 `json:"active_requests"`
			Blocks   int64 `json:"potential_decode_blocks"`
			Prefill  int64 `json:"potential_prefill_tokens"`
		} `json:"loads"`
	}
	p.do(t, "GET", "/loads", nil, &models)
	for _, m := range models {
		for _, l := range m.Loads {
			requests += l.Requests
			all += l.Requests + l.Blocks + l.Prefill
		}
	}
	return requests, all
}

// TestReplicaIsKilled kills one of three replicas with SIGKILL while it has
// reservations: some are freed on others, the rest expires, and a replica that
// joins later sees the same.
func TestReplicaIsKilled(t *testing.T) {
	type object = map[string]any
	nats := startNATS(t)
	var replicas []*replicaProcess
	for range 3 {
		replicas = append(replicas, startProcess(t, nats, "--dead-replica-expiry", "4s"))
	}
	a, b, c := replicas[0], replicas[1], replicas[2]
	for i := range 4 {
		w := object{"worker_id": i, "endpoint": "http://w", "block_size": 16, "kv_events_endpoint": fmt.Sprintf("ipc:///nonexistent/%d", i)}
		if got := b.status(t, "POST", "/workers", w); got != http.StatusCreated {
			t.Fatalf("worker %d: status %d", i, got)
		}
	}
	tokens := make([]int, 160)
	const each = 20
	for i, p := range replicas {
		eventually(t, "the replica can choose", func() bool {
			var r struct {
				N int `json:"schedulable_workers"`
			}
			p.do(t, "GET", "/ready", nil, &r)
			return r.N == 4
		})
		for n := range each {
			id := fmt.Sprint(i, "-", n)
			if got := p.status(t, "POST", "/select_and_reserve", object{"token_ids": tokens, "selection_id": id}); got != http.StatusOK {
				t.Fatalf("reservation %s: status %d", id, got)
			}
		}
		if got := p.status(t, "POST", "/select", object{"token_ids": tokens, "selection_id": fmt.Sprint("kept", i)}); got != http.StatusOK {
			t.Fatalf("selection: status %d", got)
		}
	}
	know := func(p *replicaProcess, want int64) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d requests are known to be active", want), func() bool { n, _ := p.active(t); return n == want })
	}
	for _, p := range replicas {
		know(p, 3*each)
	}
	a.kill()
	for n := range each / 2 { // a client of the one that is gone goes to another
		if got := b.status(t, "DELETE", fmt.Sprint("/reservations/0-", n), nil); got != http.StatusOK {
			t.Errorf("freeing 0-%d elsewhere: status %d", n, got)
		}
	}
	if got := c.status(t, "POST", "/reservations", object{"selection_id": "kept0"}); got != http.StatusCreated {
		t.Errorf("booking what was selected on the one that is gone: status %d", got)
	}
	d := startProcess(t, nats, "--dead-replica-expiry", "4s")
	for _, p := range []*replicaProcess{b, c, d} {
		know(p, 2*each+1) // what nobody freed has expired
	}
	for i := 1; i < 3; i++ {
		for n := range each {
			if got := d.status(t, "DELETE", fmt.Sprint("/reservations/", i, "-", n), nil); got != http.StatusOK {
				t.Errorf("freeing %d-%d: status %d", i, n, got)
			}
		}
	}
	if got := d.status(t, "DELETE", "/reservations/kept0", nil); got != http.StatusOK {
		t.Errorf("freeing kept0: status %d", got)
	}
	for _, p := range []*replicaProcess{b, c, d} {
		eventually(t, "nothing is active", func() bool { _, all := p.active(t); return all == 0 })
	}
}
