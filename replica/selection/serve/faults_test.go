package serve

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// reserved is a reservation of a client, as the client knows it.
type reserved struct {
	id, worker string
	blocks     int64
	done       bool
}

// client makes random requests of random replicas.
type client struct {
	t    *testing.T
	rng  *rand.Rand
	name string
	n    []*node
	open []*reserved
	made int
}

// step makes one request, and fails for an answer that can't be.
func (c *client) step() {
	x := c.n[c.rng.IntN(len(c.n))]
	if len(c.open) == 0 || c.rng.IntN(3) == 0 {
		c.made++
		r := &reserved{id: fmt.Sprint(c.name, c.made), blocks: int64(1 + c.rng.IntN(8))}
		body := object{"model_name": "m", "token_ids": tokens(int(r.blocks) * blockSize), "selection_id": r.id, "session_id": fmt.Sprint("s", c.rng.IntN(5))}
		path := "/select_and_reserve"
		if c.rng.IntN(4) == 0 { // in two steps, the second one anywhere
			x.must(200, "POST", "/select", body)
			x, path = c.n[c.rng.IntN(len(c.n))], "/reservations"
		}
		status, v := x.do("POST", path, body)
		switch {
		case status == 200 || status == 201:
			r.worker = fmt.Sprint(v.(object)["worker_id"])
			c.open = append(c.open, r)
		case status != 404 || path != "/reservations": // that replica has not heard of it
			c.t.Errorf("POST %s: %d %v", path, status, v)
		}
		return
	}
	i := c.rng.IntN(len(c.open))
	r := c.open[i]
	switch c.rng.IntN(3) {
	case 0:
		status, v := x.do("POST", "/reservations/"+r.id+"/prefill_complete", nil)
		if r.done = r.done || status == 200; status != 200 && status != 404 {
			c.t.Errorf("prefill_complete: %d %v", status, v)
		}
	case 1:
		status, v := x.do("POST", "/reservations/"+r.id+"/output_block", nil)
		if status == 200 {
			r.blocks++
		} else if status != 404 {
			c.t.Errorf("output_block: %d %v", status, v)
		}
	default: // 404: it is freed when that replica hears of it
		if status, v := x.do("DELETE", "/reservations/"+r.id, nil); status != 200 && status != 404 {
			c.t.Errorf("DELETE: %d %v", status, v)
		}
		c.open = append(c.open[:i], c.open[i+1:]...)
	}
}

// TestThreeReplicasOverABadNetwork has clients book, complete and free on any of
// three replicas, which hear of each other late, twice, in another order or not at
// all. When the network is whole again, each has what the clients have, and
// nothing when they are done.
func TestThreeReplicasOverABadNetwork(t *testing.T) {
	v := newService(t)
	var n []*node
	for range 3 {
		n = append(n, v.start(selection.Default(), "", false))
	}
	for i := range 5 {
		n[0].must(201, "POST", "/workers", worker(i, nil))
	}
	for _, x := range n {
		eventually(t, "all workers can be chosen", func() bool { return x.selector.Schedulable() == 5 && len(x.selector.Load().Peers()) == 3 })
	}
	var clients []*client
	for i := range 4 {
		clients = append(clients, &client{t: t, rng: rand.New(rand.NewPCG(uint64(i), 9)), name: fmt.Sprint("c", i, "-"), n: n})
	}
	for _, f := range []struct {
		lose, repeat float64
		delay        time.Duration
	}{{0, 0, 0}, {0.1, 0.3, 20 * time.Millisecond}, {0.6, 0.1, 0}, {0, 0.5, 60 * time.Millisecond}} {
		for _, x := range n {
			x.net.Set(f.lose, f.repeat, f.delay)
		}
		var all sync.WaitGroup
		for _, c := range clients {
			all.Go(func() {
				for range 60 {
					c.step()
				}
			})
		}
		all.Wait()
		want := map[string]load.Load{}
		for _, x := range n {
			x.net.Set(0, 0, 0)
		}
		for _, c := range clients {
			for _, r := range c.open {
				l := want[r.worker]
				l.Requests++
				l.Blocks += r.blocks * load.Unit
				want[r.worker] = l
			}
		}
		for i, x := range n {
			for w := range 5 {
				s := event.Source{Model: "m", Group: "default", Instance: fmt.Sprint(w)}
				eventually(t, fmt.Sprintf("replica %d has what the clients have on worker %d: %+v", i, w, want[s.Instance]), func() bool {
					l := x.selector.Load().Of(s)
					l.Prefill = 0
					return l == want[s.Instance]
				})
			}
		}
	}
	for _, c := range clients {
		for i, r := range c.open {
			n[i%3].must(200, "DELETE", "/reservations/"+r.id, nil)
		}
	}
	idle(t, n...)
}

// TestWithoutNATS: a replica that has lost NATS goes on alone, and does not wait.
func TestWithoutNATS(t *testing.T) {
	v := newService(t)
	n := v.start(selection.Default(), "", false)
	strict := v.start(selection.Default(), "", true)
	n.must(201, "POST", "/workers", worker("w", nil))
	for _, x := range []*node{n, strict} {
		eventually(t, "the worker can be chosen", func() bool { return x.selector.Schedulable() == 1 })
	}
	v.srv.Shutdown()
	v.srv.WaitForShutdown()
	eventually(t, "NATS is gone", func() bool { return !n.nc.IsConnected() && !strict.nc.IsConnected() })
	for i := range 50 {
		id := fmt.Sprint("r", i)
		n.must(200, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(8), "selection_id": id, "session_id": "s"})
		n.must(200, "POST", "/reservations/"+id+"/prefill_complete", nil)
		n.must(200, "DELETE", "/reservations/"+id, nil)
	}
	if got := n.must(503, "POST", "/workers", worker("x", nil)); got["code"] != "unavailable" {
		t.Errorf("describing a worker: %v", got)
	}
	// Booking strictly needs NATS, and says so.
	if got := strict.must(503, "POST", "/select_and_reserve", object{"model_name": "m", "token_ids": tokens(8)}); got["code"] != "unavailable" {
		t.Errorf("booking strictly: %v", got)
	}
	strict.must(200, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8)})
	idle(t, n, strict)
}

// TestDescriptionsAreLost: what can't be read in the bucket of descriptions is
// passed over, and a bucket that an operator deletes is made anew, with what the
// replicas know.
func TestDescriptionsAreLost(t *testing.T) {
	v := newService(t)
	n := v.start(selection.Default(), "", false)
	n.must(201, "POST", "/workers", worker("w", nil))
	bucket := selection.DefaultRoster().Bucket
	kv, err := v.js.KeyValue(t.Context(), bucket)
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{"x": `{"worker_id":"y"}`, "y": `{`, "z": `{"worker_id":"z","block_size":-1}`, "=4": `{"worker_id":"q"}`} {
		if _, err := kv.Put(t.Context(), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	n.must(201, "POST", "/workers", worker("w2", nil)) // it has been read behind those
	same(t, "workers", len(n.selector.Workers()), 2)
	if err := v.js.DeleteKeyValue(t.Context(), bucket); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was known is in the bucket again", func() bool {
		kv, err := v.js.KeyValue(t.Context(), bucket)
		if err != nil {
			return false
		}
		_, err = kv.Get(t.Context(), "w")
		_, other := kv.Get(t.Context(), "w2")
		return err == nil && other == nil
	})
	same(t, "workers that can be chosen", n.selector.Schedulable(), 2)
	n.must(201, "POST", "/workers", worker("w", object{"taints": []string{"x"}}))
	got := n.must(200, "POST", "/select", object{"model_name": "m", "token_ids": tokens(8), "routing_constraints": object{"required_taints": []string{"x"}}})
	same(t, "worker", got["worker_id"], "w")
}

// TestModelsOfOthers: a replica that does not hold the index of a model passes
// selections on to one that does, and says so if there is none.
func TestModelsOfOthers(t *testing.T) {
	v := newService(t)
	a, b := v.start(selection.Default(), "", false, "other", "m:g"), v.start(selection.Default(), "", false, "m:default")
	for i := range 3 {
		a.must(201, "POST", "/workers", worker(i, nil))
	}
	a.must(201, "POST", "/workers", worker("t", object{"model_name": "nobody's"}))
	source := event.Source{Model: "m", Group: "default", Instance: "1"}
	v.store(source, event.Device, tokens(16))
	for _, x := range []*node{a, b} {
		eventually(t, "workers and blocks are known", func() bool { return x.selector.Schedulable() == 4 && x.index.Position().LogSeq == 1 })
	}
	body := object{"model_name": "m", "token_ids": tokens(16), "selection_id": "s"}
	for _, x := range []*node{a, b} {
		got := x.must(200, "POST", "/select", body)
		same(t, "worker", got["worker_id"], 1)
		same(t, "overlap", got["overlap"].(object)["gpu"], 16)
		x.must(200, "POST", "/select_and_reserve", body)
		x.must(409, "POST", "/select_and_reserve", body)
		x.must(200, "DELETE", "/reservations/s", nil)
		best := x.must(200, "POST", "/overlap_scores", body)["workers"].([]any)[0].(object)
		same(t, "most blocks", best["device_blocks"], 4)
		same(t, "loads", len(x.must(200, "POST", "/potential_loads", body)["list"].([]any)), 3)
		x.must(400, "POST", "/select", object{"model_name": "m", "token_ids": tokens(4), "router_config_override": object{"router_temperature": -1}})
		got = x.must(503, "POST", "/select", object{"model_name": "nobody's", "token_ids": tokens(4)})
		same(t, "code", got["code"], "elsewhere")
		idle(t, a, b)
	}
}
