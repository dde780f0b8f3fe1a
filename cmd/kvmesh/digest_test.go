package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/kvmesh/kvmesh/integration/mock"
)

// startIndexer runs `kvmesh indexer` on a NATS server, and returns its URL when it
// is ready.
func startIndexer(t *testing.T, nats, id string) string {
	t.Helper()
	addr := freeAddr(t)
	begin(t, "indexer", "--nats", nats, "--id", id, "--http", addr, "--log-level", "warn")
	url := "http://" + addr
	eventually(t, "kvmesh indexer is ready", func() bool {
		status, _, err := ask(http.MethodGet, url+"/ready", nil)
		return err == nil && status == http.StatusOK
	})
	return url
}

func TestDigestsAreCompared(t *testing.T) {
	nats := startNATS(t)
	e, err := mock.NewEngine(mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	worker := fmt.Sprintf("w0=%s,replay=%s", e.Addr(), e.ReplayAddr())
	begin(t, "bridge", "--nats", nats, "--id", "edge", "--log-level", "warn", "--worker", worker, "--model", "m")
	a, b := startIndexer(t, nats, "x0"), startIndexer(t, nats, "x1")
	other := startServe(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	load := mock.NewWorkload(mock.WorkloadOptions{})
	for range 20 {
		if _, err := e.Publish(load.Next()...); err != nil {
			t.Fatal(err)
		}
	}
	applied := func(url string) bool {
		var workers []struct {
			Listeners map[string]struct {
				Applied *uint64 `json:"applied_engine_seq"`
			}
		}
		if err := json.Unmarshal(mustAsk(t, http.MethodGet, url+"/workers", nil), &workers); err != nil {
			t.Fatal(err)
		}
		return len(workers) == 1 && workers[0].Listeners["0"].Applied != nil && *workers[0].Listeners["0"].Applied == 19
	}
	for _, url := range []string{a, b} {
		eventually(t, "all is applied", func() bool { return applied(url) })
	}
	out, err := command(t, "digest", "--compare", a+","+b)
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, out, "2 indexers, 1 workers compared at one log sequence each, 0 differ, 0 not compared")

	// An indexer of another log does not have the worker.
	_, err = command(t, "digest", "--compare", a+","+other, "--patience", "300ms")
	mustContain(t, errText(t, err), `"w0", rank 0, of m:default: an indexer does not have it`)
	if _, err = command(t, "digest", "--compare", a); err == nil {
		t.Error("one URL is compared with nothing")
	}

	eventually(t, "each indexer sees all three processes, and that the other one is equal", func() bool {
		for _, url := range []string{a, b} {
			var peers []struct {
				ID, Role string
				Compared int
				Equal    *bool `json:"digest_equal"`
			}
			if err := json.Unmarshal(mustAsk(t, http.MethodGet, url+"/peers", nil), &peers); err != nil {
				t.Fatal(err)
			}
			equal := 0
			for _, p := range peers {
				if p.Role == "indexer" && p.Compared == 1 && p.Equal != nil && *p.Equal {
					equal++
				}
			}
			if len(peers) != 3 || equal != 2 {
				return false
			}
		}
		return true
	})
}
