package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestBenchQuery runs the benchmark, as short as it can be, over its two
// processes.
func TestBenchQuery(t *testing.T) {
	t.Setenv("KVMESH_TEST_AS_COMMAND", "yes") // for the server
	file := filepath.Join(t.TempDir(), "figures.json")
	if out, err := command(t, "bench", "query", "--rate", "100", "--duration", "300ms", "--rounds", "1", "--connections", "2", "--json", file); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var f map[string]float64
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"json_16k", "binary_16k", "json_floor", "binary_floor"} {
		if f[name+"_cpu_us"] <= 0 || f[name+"_p50_us"] <= 0 || f[name+"_p99_us"] < f[name+"_p50_us"] {
			t.Errorf("%s: %v", name, f)
		}
	}
	if errors, ok := f["errors"]; !ok || errors != 0 || f["mismatches"] != 0 || f["queries"] != 120 {
		t.Errorf("%v errors, %v mismatches of %v queries, want none of 120", errors, f["mismatches"], f["queries"])
	}
}

// TestBenchQueryFindsWrongReplies: the checker tells right from wrong.
func TestBenchQueryFindsWrongReplies(t *testing.T) {
	c := newChecker()
	reply := func(change func(scores, instances map[string]any)) []byte {
		scores, instances := map[string]any{}, map[string]any{}
		for i := range fleetGroup {
			name, dp := fmt.Sprintf("worker-%02d", i), map[string]int{"0": fleetBlocks * fleetBlockSize}
			scores[name] = dp
			instances[name] = map[string]any{"longest_matched": 16384, "gpu": 16384, "dp": dp, "cpu": 16384, "disk": 16384}
		}
		change(scores, instances)
		data, err := json.Marshal(map[string]any{"scores": scores, "instances": instances})
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	c.check("json", 0, reply(func(_, _ map[string]any) {}), nil)
	if c.asked != 1 || c.mismatches != 0 || c.errors != 0 {
		t.Fatalf("a right reply: %d mismatches, %d errors", c.mismatches, c.errors)
	}
	for i, change := range []func(scores, instances map[string]any){
		func(scores, instances map[string]any) {
			delete(scores, "worker-03")
			delete(instances, "worker-03")
		},
		func(scores, _ map[string]any) { delete(scores, "worker-03") },
		func(scores, _ map[string]any) { scores["worker-03"] = map[string]int{"1": 16384} },
		func(_, instances map[string]any) { instances["worker-03"].(map[string]any)["cpu"] = 16368 },
		func(scores, instances map[string]any) { clear(scores); clear(instances) },
	} {
		if c.check("json", 0, reply(change), nil); c.mismatches != i+1 {
			t.Errorf("wrong reply %d was found right", i)
		}
	}
	c.check("json", 0, []byte(strings.Repeat("x", 10)), nil)
	c.check("json", 1, reply(func(_, _ map[string]any) {}), nil) // right for another prompt
	c.check("json", 0, nil, errors.New("lost"))
	if c.asked != 9 || c.mismatches != 7 || c.errors != 1 {
		t.Errorf("%d asked, %d mismatches, %d errors, want 9, 7, 1", c.asked, c.mismatches, c.errors)
	}
}
