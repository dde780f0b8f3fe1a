package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
)

// post sends JSON and decodes the reply.
func post(t *testing.T, url string, in, out any) {
	t.Helper()
	data, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(url, "application/json", bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s: %d %v", url, resp.StatusCode, err)
	}
}

func get(t *testing.T, url string, out any) {
	t.Helper()
	resp, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%s: %d %v", url, resp.StatusCode, err)
	}
}

// digestsOf returns what an indexer holds of each worker.
func digestsOf(t *testing.T, url string) map[string]event.Digests {
	t.Helper()
	var view struct {
		Sources []struct {
			Instance string `json:"instance_id"`
			Rank     uint32 `json:"dp_rank"`
			Digest   map[string]struct {
				Count uint64
				Sum   string
			}
		}
	}
	get(t, url+"/digest", &view)
	out := map[string]event.Digests{}
	for _, s := range view.Sources {
		var d event.Digests
		for tier := range event.Tier(event.Tiers) {
			d[tier].Count = s.Digest[tier.String()].Count
			fmt.Sscanf(s.Digest[tier.String()].Sum, "%x", &d[tier].Sum)
		}
		out[fmt.Sprintf("%s:%d", s.Instance, s.Rank)] = d
	}
	return out
}

// agrees tells whether an indexer holds what the caches of mock engines hold.
func agrees(t *testing.T, mockURL, url string) bool {
	t.Helper()
	var truth engines.Truth
	get(t, mockURL+"/digests", &truth)
	have := digestsOf(t, url)
	for _, w := range truth.Workers {
		if have[fmt.Sprintf("%s:%d", w.Instance, w.Rank)] != w.Digests {
			return false
		}
	}
	return truth.Settled && len(truth.Workers) > 0
}

// A request over HTTP fills the cache of a mock engine; the index knows what of
// it is left, on both tiers, and the engine finds what the index says.
func TestMockServes(t *testing.T) {
	url := startServe(t, "--probe-interval", "200ms")
	addr := freeAddr(t)
	mockURL := "http://" + addr
	out, _ := begin(t, "mock", "--engines", "2", "--ranks", "2", "--port", "0", "--http", addr, "--rate", "0", "--register", "--server", url,
		"--device-blocks", "256", "--host-blocks", "512", "--transfer", "10us", "--context", "4096", "--topic", "kv@%w", "--seed", "5")
	eventually(t, "the engines are registered", func() bool {
		return strings.Count(out.String(), "\n") == 4 && len(digestsOf(t, url)) == 4
	})
	generate := func(n int, tokens []uint32) engines.Generated {
		var got engines.Generated
		post(t, fmt.Sprintf("%s/workers/mock-%d/%d/generate", mockURL, n/2, n%2), map[string]any{"token_ids": tokens, "max_tokens": 20}, &got)
		return got
	}
	prompt := func(n int) []uint32 {
		tokens := make([]uint32, 3000)
		for i := range tokens {
			tokens[i] = uint32(n*1000 + i)
		}
		return tokens
	}
	for n := range 4 {
		for k := range 3 { // 190 blocks each: the third pushes the others to the host
			generate(n, prompt(10*n+k))
		}
	}
	eventually(t, "the index is what the caches are", func() bool { return agrees(t, mockURL, url) })
	for n := range 4 {
		var answer struct {
			Instances map[string]struct{ GPU, CPU int }
		}
		post(t, url+"/query", map[string]any{"model_name": "default", "token_ids": prompt(10*n + 1)}, &answer)
		held := answer.Instances[fmt.Sprintf("mock-%d", n/2)]
		got := generate(n, prompt(10*n+1))
		if got.CachedDevice != held.GPU || got.Cached != held.CPU || got.CachedHost == 0 {
			t.Errorf("worker %d: predicted %+v, found %+v", n, held, got)
		}
	}
}

// A fleet that runs by itself under faults that cost nothing ends as its caches
// are, when it is asked for nothing more.
func TestMockRunsByItself(t *testing.T) {
	url := startServe(t, "--probe-interval", "200ms")
	addr := freeAddr(t)
	mockURL := "http://" + addr
	begin(t, "mock", "--engines", "3", "--port", "0", "--http", addr, "--rate", "300", "--sessions", "12", "--register", "--server", url,
		"--device-blocks", "1500", "--fault", "drop:2=5ms", "--fault", "duplicate=7ms", "--fault", "stall:5ms=20ms")
	eventually(t, "requests", func() bool {
		resp, err := http.Get(mockURL + "/totals")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		var sum engines.Totals
		return json.NewDecoder(resp.Body).Decode(&sum) == nil && sum.Requests > 100 && sum.CachedDevice > 0
	})
	eventually(t, "the index holds blocks", func() bool {
		n := uint64(0)
		for _, d := range digestsOf(t, url) {
			n += d[event.Device].Count
		}
		return n > 100
	})
}

// Engines on transfer islands: a request may require one, or the other.
func TestMockIslands(t *testing.T) {
	url := startServe(t)
	out, _ := begin(t, "mock", "--engines", "4", "--ranks", "2", "--port", "0", "--rate", "0", "--islands", "2", "--topic", "kv", "--register", "--server", url)
	eventually(t, "the engines are registered", func() bool {
		return strings.Count(out.String(), "\n") == 8 && len(digestsOf(t, url)) == 8
	})
	for island, want := range map[string][]string{"island-0": {"mock-0", "mock-1"}, "island-1": {"mock-2", "mock-3"}} {
		for range 8 {
			var choice struct {
				WorkerID string `json:"worker_id"`
			}
			post(t, url+"/select", map[string]any{"token_ids": make([]int, 64),
				"routing_constraints": map[string]any{"required_taints": []string{"dynamo.topology/transfer=" + island}}}, &choice)
			if !slices.Contains(want, choice.WorkerID) {
				t.Errorf("%s: %q was chosen, want one of %v", island, choice.WorkerID, want)
			}
		}
	}
}

func TestMockRefusesNonsense(t *testing.T) {
	for _, args := range [][]string{
		{"--fault", "rust=1s"}, {"--dialect", "klingon"}, {"--device-blocks", "10"}, {"--port", "65535"}, {"--http", "nowhere"},
		{"--dialect", "vllm-array-0.8", "--host-blocks", "10"}, {"--islands", "1", "--topic", "%w", "--ranks", "2"},
		{"--owner", "--host-blocks", "10", "--islands", "1"}, {"--owner", "--host-blocks", "10", "--dialect", "vllm-array-0.23"},
	} {
		_, err := command(t, append([]string{"mock", "--port", "0"}, args...)...)
		errText(t, err)
	}
	_, err := command(t, "mock", "--port", "0", "--owner")
	if text := errText(t, err); !strings.Contains(text, "host tier") || strings.Contains(text, "vllm-map") {
		t.Errorf("an owner of nothing: %s", text)
	}
}
