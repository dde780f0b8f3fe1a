package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// configured settles the flags of `kvmesh serve` from a file with this text.
func configured(t *testing.T, text string) (workers []string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kvmesh.yaml")
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := serveCommand()
	if err := cmd.ParseFlags([]string{"--config", path}); err != nil {
		t.Fatal(err)
	}
	if err := settle(cmd); err != nil {
		return nil, err
	}
	workers, err = cmd.Flags().GetStringArray("worker")
	if err != nil {
		t.Fatal(err)
	}
	f := workerFlags{workers: workers, model: "m", group: "g", blockSize: 16}
	_, err = f.parse(cmd.Flags())
	return workers, err
}

func TestConfigurationFile(t *testing.T) {
	workers, err := configured(t, "# comment\nhttp: 127.0.0.1:0\nworker:\n  - a=tcp://h:1\n  - b=tcp://h:2\ncompact: false\nreplicas: 3\ngrace: 5s\n")
	if err != nil || len(workers) != 2 {
		t.Errorf("%v, %v", workers, err)
	}
	if _, err := configured(t, ""); err != nil {
		t.Errorf("an empty file: %v", err)
	}
}

// What is wrong in a file is named with its line.
func TestConfigurationErrorsNameTheLine(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []string
	}{
		"unknown":     {"http: 127.0.0.1:0\n\nfoo: 1\n", []string{"line 3", `"foo"`}},
		"misspelt":    {"data-dir: x\nreplica: 3\n", []string{"line 2", `"replica"`, `"replicas" is`}},
		"number":      {"\nreplicas: three\n", []string{"line 2", `replicas is "three"`, "want a number"}},
		"duration":    {"http: x\ngrace: 5\n", []string{"line 2", "grace", "duration"}},
		"bool":        {"compact: maybe\n", []string{"line 1", "true or false"}},
		"twice":       {"http: a\nmodel: m\nhttp: b\n", []string{"line 3", "http", "line 1"}},
		"list":        {"model:\n  - a\n  - b\n", []string{"line 3", "model takes one value"}},
		"mapping":     {"model: {a: b}\n", []string{"line 1", "a value or a list"}},
		"nested list": {"worker:\n  - a=tcp://h:1\n  - [b]\n", []string{"line 3", "want a value"}},
		"no mapping":  {"- a\n- b\n", []string{"line 1"}},
		"help":        {"help: true\n", []string{"line 1", `"help"`}},
		"syntax":      {"http: a\n\tmodel: b\n", []string{"line 2"}},
		"worker":      {"worker:\n  - a=tcp://h:1\n  - b=nowhere\n", []string{"line 3", "nowhere"}},
		"all of them": {"replicas: x\ngrace: y\n", []string{"line 1", "line 2"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := configured(t, c.text)
			text := errText(t, err)
			mustContain(t, text, c.want...)
			if !strings.Contains(text, "kvmesh.yaml") {
				t.Errorf("the file is not named: %s", text)
			}
		})
	}
}

func TestCommandLineWinsOverEnvironmentOverFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte("model: file\nhttp: file\ngrace: 1s\nworker: [a=tcp://h:1]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KVMESH_MODEL", "environment")
	t.Setenv("KVMESH_HTTP", "environment")
	t.Setenv("KVMESH_CONFIG", path)
	t.Setenv("KVMESH_WORKER", "b=tcp://h:2 c=tcp://h:3")
	cmd := serveCommand()
	if err := cmd.ParseFlags([]string{"--model", "line"}); err != nil {
		t.Fatal(err)
	}
	if err := settle(cmd); err != nil {
		t.Fatal(err)
	}
	get := func(name string) string { return cmd.Flags().Lookup(name).Value.String() }
	if get("model") != "line" || get("http") != "environment" || get("grace") != time.Second.String() || get("worker") != "[b=tcp://h:2,c=tcp://h:3]" {
		t.Errorf("model %s, http %s, grace %s, workers %s", get("model"), get("http"), get("grace"), get("worker"))
	}
	t.Setenv("KVMESH_GRACE", "long")
	cmd = serveCommand()
	mustContain(t, errText(t, settle(cmd)), "KVMESH_GRACE", "duration")
}
