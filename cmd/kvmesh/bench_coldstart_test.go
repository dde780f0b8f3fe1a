package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

func TestBenchColdstart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "figures.json")
	out, err := command(t, "bench", "coldstart", "--sources", "20", "--blocks", "300", "--tail", "3", "--rounds", "2", "--json", path)
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, out, "coldstart_s", "checkpoints_s", "purge_s")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f figures
	if err := json.Unmarshal(data, &f); err != nil {
		t.Fatal(err)
	}
	if f["sources"] != 20 || f["blocks"] < 20*250 || f["blocks"] > 20*300 || f["coldstart_s"] <= 0 || f["history_records"] < 20*20 {
		t.Errorf("%v", f)
	}
	_, err = command(t, "bench", "coldstart", "--sources", "0")
	mustContain(t, errText(t, err), "want at least 1")
}
