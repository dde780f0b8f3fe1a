package main

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// Every metric that the documents, alerts and dashboards name is one that
// /metrics has.
func TestDocumentedMetrics(t *testing.T) {
	url := startServe(t)
	boardEngine(t, url)
	exported := map[string]bool{}
	line := regexp.MustCompile(`(?m)^([a-z_]+)[{ ]`)
	eventually(t, "a record has been published and measured", func() bool {
		resp, err := http.Get(url + "/metrics")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return false
		}
		for _, m := range line.FindAllSubmatch(text, -1) {
			exported[string(m[1])] = true
		}
		return exported["kvmesh_bridge_publish_duration_seconds_bucket"]
	})
	exported["kvmesh_bridge_publish_duration_seconds"] = true // the histogram's own name
	named := map[string][]string{}
	metric := regexp.MustCompile(`\b((?:kvmesh|process|go)_[a-z_]+[a-z])\b(\*|_\*)?`)
	for _, pattern := range []string{"docs/*.md", "docs/deploy/*.yml", "docs/deploy/grafana/*.json", "README.md"} {
		files, err := filepath.Glob(filepath.Join(repository, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range metric.FindAllSubmatch(text, -1) {
				if len(m[2]) == 0 {
					named[string(m[1])] = append(named[string(m[1])], filepath.Base(file))
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if !exported[name] {
			t.Errorf("%s is named in %v, and /metrics has none", name, named[name])
		}
	}
	if len(named) < 20 {
		t.Errorf("only %d metrics are named", len(named))
	}
}

// Every alert is complete, and the dashboard has no panel without a query.
func TestAlertsAndGrafana(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(repository, "docs/deploy/alerts.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var rules struct {
		Groups []struct {
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(data, &rules); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if seen[r.Alert] || r.Expr == "" || r.Labels["severity"] == "" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
				t.Errorf("alert %s is incomplete, or there twice", r.Alert)
			}
			seen[r.Alert] = true
			balanced(t, r.Alert, r.Expr)
		}
	}
	for _, want := range []string{"KvmeshLag", "KvmeshDivergence", "KvmeshGaps", "KvmeshUncertain", "KvmeshDropped"} {
		if !seen[want] {
			t.Errorf("there is no alert %s", want)
		}
	}
	data, err = os.ReadFile(filepath.Join(repository, "docs/deploy/grafana/kvmesh.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Type    string
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	ids := map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.Title == "" || p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %d %q is incomplete, or there twice", p.ID, p.Title)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			balanced(t, p.Title, target.Expr)
		}
	}
	if len(board.Panels) < 15 {
		t.Errorf("the dashboard has %d panels", len(board.Panels))
	}
}

func balanced(t *testing.T, where, expr string) {
	t.Helper()
	for _, pair := range []string{"()", "{}", "[]"} {
		if expr == "" || strings.Count(expr, pair[:1]) != strings.Count(expr, pair[1:]) {
			t.Errorf("%s: %q can't be a query", where, expr)
		}
	}
}

// Every file that docker-compose.yml mounts is there, and what Prometheus scrapes
// are services of it.
func TestComposeMounts(t *testing.T) {
	data, err := os.ReadFile(filepath.Join(repository, "docker-compose.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var compose struct {
		Services map[string]struct {
			Volumes []string
			Ports   []string
		}
	}
	if err := yaml.Unmarshal(data, &compose); err != nil {
		t.Fatal(err)
	}
	for name, s := range compose.Services {
		for _, v := range s.Volumes {
			if source, _, _ := strings.Cut(v, ":"); strings.HasPrefix(source, "./") {
				if _, err := os.Stat(filepath.Join(repository, source)); err != nil {
					t.Errorf("%s mounts %v", name, err)
				}
			}
		}
		for _, p := range s.Ports {
			if !strings.HasPrefix(p, "127.0.0.1:") {
				t.Errorf("%s publishes %s not only on the loopback", name, p)
			}
		}
	}
	if data, err = os.ReadFile(filepath.Join(repository, "docs/deploy/prometheus.yml")); err != nil {
		t.Fatal(err)
	}
	targets := regexp.MustCompile(`"([a-z0-9-]+):8090"`).FindAllSubmatch(data, -1)
	for _, target := range targets {
		if _, ok := compose.Services[string(target[1])]; !ok {
			t.Errorf("Prometheus scrapes %s, which is no service", target[1])
		}
	}
	if len(targets) != 5 {
		t.Errorf("Prometheus scrapes %d targets", len(targets))
	}
}
