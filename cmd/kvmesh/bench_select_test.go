package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

// The benchmark runs to its end on a small fleet, and finds no wrong choice.
func TestBenchSelect(t *testing.T) {
	path := filepath.Join(t.TempDir(), "figures.json")
	if _, err := command(t, "bench", "select", "--workers", "16", "--blocks", "8", "--duration", "100ms", "--in-flight", "16", "--join", "300",
		"--sessions", "100", "--imbalance-workers", "4", "--rate", "500", "--json", path); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f figures
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"select_reserve_s", "http_tokens_s", "http_hashes_s", "lag_p99_ms", "join_ms", "imbalance_1", "imbalance_3", "choices_compared"} {
		if f[name] <= 0 {
			t.Errorf("%s is %v", name, f[name])
		}
	}
	if f["choices_wrong"] != 0 || f["join_reservations"] != 300 {
		t.Errorf("figures: %v", f)
	}
}
