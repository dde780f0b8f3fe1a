package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// TestBenchFleet runs the benchmark of a whole fleet in small, each part in a
// process of its own, with caches so small that they evict, a host tier, and
// replicas that dial.
func TestBenchFleet(t *testing.T) {
	t.Setenv("KVMESH_TEST_AS_COMMAND", "1")
	path := filepath.Join(t.TempDir(), "fleet.json")
	_, err := command(t, "bench", "fleet", "--workers", "6", "--sessions", "24", "--at-once", "4", "--warmup", "60", "--requests", "200", "--context", "4096",
		"--device-blocks", "512", "--host-blocks", "512", "--compare", "1", "--late-join", "10ms", "--profile", "1s", "--json", path)
	if err != nil {
		t.Fatal(err)
	}
	f := readFigures(t, path)
	for name, want := range map[string]float64{
		"requests": 200, "failed": 0, "digest_equal": 1, "dump_equal": 1, "differing": 0, "dial_differing": 0, "late_unequal": 0,
		"replay_sockets": 0, "lag_missing": 0, "lag_samples": 200, "pub_dropped": 0,
	} {
		if got, ok := f[name]; !ok || got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	for _, name := range []string{
		"os_threads", "rss_mb", "ingest_cpu_ms_per_request", "requests_s", "hit_predicted", "hit_engine", "lag_p99_ms", "replica_cpu_ratio", "sockets",
	} {
		if f[name] <= 0 {
			t.Errorf("%s is %v", name, f[name])
		}
	}
}

// The same from a trace, of which one request is too long for an engine.
func TestBenchFleetTrace(t *testing.T) {
	t.Setenv("KVMESH_TEST_AS_COMMAND", "1")
	dir := t.TempDir()
	lines, trace := filepath.Join(dir, "trace.jsonl"), filepath.Join(dir, "fleet.json")
	file, err := os.Create(lines)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	enc := json.NewEncoder(file)
	for i := range 60 {
		ids := []int{0, 1 + i%3, 10 + i%20}
		if err := enc.Encode(map[string]any{"timestamp": i, "input_length": 1400, "output_length": 20, "hash_ids": ids}); err != nil {
			t.Fatal(err)
		}
	}
	enc.Encode(map[string]any{"timestamp": 99, "input_length": 2560, "output_length": 1, "hash_ids": []int{0, 1, 2, 3, 4}})
	if _, err := command(t, "bench", "fleet", "--workers", "3", "--sessions", "4", "--at-once", "2", "--device-blocks", "128", "--trace", lines, "--route", "select",
		"--profile", "0", "--late-join", "0", "--json", trace); err != nil {
		t.Fatal(err)
	}
	f := readFigures(t, trace)
	if f["trace_too_long"] != 1 || f["requests"] != 54 || f["digest_equal"] != 1 || f["hit_engine"] <= 0 {
		t.Errorf("figures %v", f)
	}
}

func TestBenchFleetRefusesNonsense(t *testing.T) {
	for _, args := range [][]string{{"--workers", "0"}, {"--sessions", "1"}, {"--requests", "0"}, {"--at-once", "0"}, {"--route", "dice"}} {
		_, err := command(t, append([]string{"bench", "fleet"}, args...)...)
		errText(t, err)
	}
}

func readFigures(t *testing.T, path string) figures {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f figures
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	return f
}
