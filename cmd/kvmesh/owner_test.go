package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
)

// ownerOf is what /workers says of a listener's cache owner.
type ownerOf struct {
	ID, State, Bridge string
	Since             time.Time
}

// ownedListener is what it says of a listener.
type ownedListener struct {
	Topic, Status string
	LastError     string  `json:"last_error"`
	CacheOwner    ownerOf `json:"cache_owner"`
}

// owners returns the listeners of all ranks.
func owners(t *testing.T, url string) map[string]ownedListener {
	t.Helper()
	var workers []struct {
		Instance  any `json:"instance_id"`
		Listeners map[string]ownedListener
	}
	get(t, url+"/workers", &workers)
	out := map[string]ownedListener{}
	for _, w := range workers {
		for rank, l := range w.Listeners {
			out[fmt.Sprint(w.Instance, ":", rank)] = l
		}
	}
	return out
}

// Mock engines with cache owners are read under topics of their own, and what is on
// their hosts outlives them. One has no slot.
func TestMockOwners(t *testing.T) {
	url := startServe(t, "--probe-interval", "200ms", "--max-slots", "3")
	addr := freeAddr(t)
	mockURL := "http://" + addr
	out, _ := begin(t, "mock", "--engines", "2", "--ranks", "2", "--port", "0", "--http", addr, "--rate", "0", "--register", "--server", url,
		"--device-blocks", "64", "--host-blocks", "256", "--transfer", "10us", "--context", "1024", "--owner", "--model", "m")
	eventually(t, "three engines are read, and one is not", func() bool {
		attached, failed := 0, 0
		for _, l := range owners(t, url) {
			switch {
			case l.CacheOwner.State == "attached" && l.CacheOwner.Bridge != "" && !l.CacheOwner.Since.IsZero():
				attached++
			case l.Status == "failed" && l.CacheOwner.State == "detached" && strings.Contains(l.LastError, "--max-slots"):
				failed++
			}
		}
		return attached == 3 && failed == 1
	})
	read := map[string]bool{}
	seen := map[string]bool{}
	for name, l := range owners(t, url) {
		read[name] = l.CacheOwner.State == "attached"
		if seen[l.Topic] || l.Topic != event.OwnerTopic(l.CacheOwner.ID) {
			t.Errorf("%s has topic %q", name, l.Topic)
		}
		seen[l.Topic] = true
	}
	if lines := out.String(); strings.Count(lines, ",owner=auto\n") != 4 {
		t.Errorf("printed %s", lines)
	}
	agree := func() bool {
		var truth engines.Truth
		get(t, mockURL+"/digests", &truth)
		have := digestsOf(t, url)
		for _, w := range truth.Workers {
			if name := fmt.Sprintf("%s:%d", w.Instance, w.Rank); read[name] && have[name] != w.Digests {
				return false
			}
		}
		return truth.Settled
	}
	generate := func(base int) {
		for n := range 4 {
			for k := range 4 {
				tokens := make([]uint32, 600)
				for i := range tokens {
					tokens[i] = uint32(base + n*10_000 + k*1000 + i)
				}
				var got engines.Generated
				post(t, fmt.Sprintf("%s/workers/mock-%d/%d/generate", mockURL, n/2, n%2), map[string]any{"token_ids": tokens, "max_tokens": 4}, &got)
			}
		}
	}
	generate(0)
	eventually(t, "the index is what the caches are", agree)
	before := digestsOf(t, url)
	for n := range 4 {
		fault := map[string]any{"instance_id": fmt.Sprintf("mock-%d", n/2), "dp_rank": n % 2, "fault": "restart"}
		data, err := json.Marshal(fault)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := http.Post(mockURL+"/faults", "application/json", bytes.NewReader(data))
		if err != nil || resp.StatusCode >= 300 {
			t.Fatal(resp, err)
		}
		resp.Body.Close()
	}
	for name, d := range digestsOf(t, url) {
		if d[event.Host] != before[name][event.Host] || read[name] && d[event.Host].Count == 0 {
			t.Errorf("%s: %v is on the host, %v was", name, d[event.Host], before[name][event.Host])
		}
	}
	generate(500_000)
	eventually(t, "the index is what the caches are after a restart", agree)
}

// The registration says what an engine has to be started with, and so does the
// command that needs none.
func TestOwnerIDsAreTold(t *testing.T) {
	url := startServe(t)
	endpoint := "tcp://" + freeAddr(t)
	first, err := command(t, "owner", "--endpoint", endpoint, "--model", "m", "--label", "dc=west", "--rank", "1")
	if err != nil {
		t.Fatal(err)
	}
	second, err := command(t, "register", "--server", url, "--model", "m", "--label", "dc=west", "--cache-owner", "auto", "--worker", "w:1="+endpoint)
	if err != nil {
		t.Fatal(err)
	}
	var told struct {
		CacheOwner string `json:"cache_owner"`
		Topic      string
	}
	for _, out := range []string{first, second} {
		before := told
		if err := json.Unmarshal([]byte(out), &told); err != nil || told.Topic != event.OwnerTopic(told.CacheOwner) || before.Topic != "" && before != told {
			t.Errorf("told %s, %v", out, err)
		}
	}
	if l := owners(t, url)["w:1"]; l.CacheOwner.ID != told.CacheOwner || l.Topic != told.Topic {
		t.Errorf("/workers has %+v, want %+v", l, told)
	}
	_, err = command(t, "register", "--server", url, "--model", "m", "--worker", "x=tcp://10.0.0.1:5557,owner="+told.CacheOwner)
	if text := errText(t, err); !strings.Contains(text, `"w"`) || !strings.Contains(text, told.CacheOwner) {
		t.Errorf("a second worker with the id: %s", text)
	}
	for _, args := range [][]string{{"--endpoint", "tcp://*:5557"}, {}, {"--endpoint", endpoint, "--cache-owner", "mine"}} {
		_, err := command(t, append([]string{"owner"}, args...)...)
		errText(t, err)
	}
}
