package api_test

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// What means another host to everybody who reads it is not registered from afar as
// where a cache owner is.
func TestOwnersHosts(t *testing.T) {
	w := newWorld(t, options{})
	for i, tt := range []struct {
		from, fields string
		want         int
	}{
		{"192.0.2.1:9", `"endpoint":"tcp://127.0.0.1:5001","cache_owner":"auto"`, 400},
		{"192.0.2.1:9", `"endpoint":"tcp://10.0.0.1:5002","replay_endpoint":"tcp://localhost:5003","cache_owner":"auto"`, 400},
		{"192.0.2.1:9", `"endpoint":"ipc:///tmp/engine","cache_owner":"auto"`, 400},
		{"192.0.2.1:9", `"endpoint":"tcp://10.0.0.1:5004","cache_owner":"auto"`, 201},
		{"192.0.2.1:9", `"endpoint":"tcp://127.0.0.1:5005"`, 201},
		{"[::1]:9", `"endpoint":"tcp://[::1]:5006","cache_owner":"auto"`, 201},
		{"[::ffff:127.0.0.1]:9", `"endpoint":"tcp://127.0.0.1:5007","replay_endpoint":"tcp://127.0.0.1:5008","cache_owner":"auto"`, 201},
		{"127.0.0.1:9", `"endpoint":"ipc:///tmp/engine","cache_owner":"auto"`, 201},
		{"127.0.0.1:9", `"endpoint":"tcp://*:5009","cache_owner":"auto"`, 400},
		{"127.0.0.1:9", `"endpoint":"tcp://127.0.0.1:5010","replay_endpoint":"tcp://0.0.0.0:5011","cache_owner":"auto"`, 400},
		{"127.0.0.1:9", `"endpoint":"tcp://127.0.0.1:5012","cache_owner":"mine"`, 400},
		{"127.0.0.1:9", `"endpoint":"tcp://127.0.0.1:5013","cache_owner":7}`, 400},
	} {
		body := fmt.Sprintf(`{"instance_id":"owned-%d","model_name":"owned","block_size":16,%s}`, i, tt.fields)
		r, reply := httptest.NewRequest("POST", "/register", strings.NewReader(body)), httptest.NewRecorder()
		r.RemoteAddr = tt.from
		w.handler.ServeHTTP(reply, r)
		if reply.Code != tt.want || tt.want == 400 && !strings.Contains(reply.Body.String(), "error") {
			t.Errorf("%s from %s: %d, want %d: %s", tt.fields, tt.from, reply.Code, tt.want, reply.Body)
		}
		if owned := strings.Contains(tt.fields, "cache_owner"); reply.Code == 201 && owned != strings.Contains(reply.Body.String(), `"topic":"kvcr-`) {
			t.Errorf("%s: %s", tt.fields, reply.Body)
		}
	}
}

// An owner that no bridge is attached to is detached.
func TestOwnersInWorkers(t *testing.T) {
	w := newWorld(t, options{})
	id := "[" + strings.Repeat("0a", 16) + ":" + strings.Repeat("0b", 16) + "]/" + strings.Repeat("0c", 8) + "/" + strings.Repeat("0d", 16)
	w.post("/register", map[string]any{"instance_id": "owned", "model_name": "owned", "block_size": 16, "endpoint": "tcp://10.0.0.1:5557", "cache_owner": id}, 201, nil)
	var workers []struct {
		Listeners map[string]struct {
			Topic      string
			CacheOwner map[string]any `json:"cache_owner"`
		}
	}
	w.get("/workers?model_name=owned", 200, &workers)
	l := workers[0].Listeners["0"]
	if l.Topic != event.OwnerTopic(id) || l.CacheOwner["id"] != id || l.CacheOwner["state"] != "detached" || l.CacheOwner["bridge"] != nil {
		t.Errorf("got %+v", l)
	}
	w.get("/workers?model_name=m/7b", 200, &workers)
	for _, x := range workers {
		for _, l := range x.Listeners {
			if l.CacheOwner != nil {
				t.Errorf("an owner that nobody spoke of: %+v", l)
			}
		}
	}
}
