package faults

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRollingRestart restarts every process, one after the other, as an operator
// does, while engines publish and indexers are asked. What the restarted one does
// not answer the others do.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	d := deploy(t, 3, size{nodes: 3, bridges: 2, indexers: 2, engines: 4}, nil)
	for i, a := range d.askers {
		d.ready(a)
		other := d.askers[1-i]
		d.ready(other)
		before := other.refusals()
		d.indexers[i].stop()
		d.indexers[i].start()
		d.ready(a)
		if n := other.refusals() - before; n > 0 {
			t.Errorf("%s refused %d requests while %s was restarted", other.name, n, a.name)
		}
	}
	before := d.askers[0].refusals() + d.askers[1].refusals()
	for _, p := range d.bridges {
		p.stop()
		p.start()
		d.caughtUp()
	}
	for _, p := range d.nodes {
		p.stop()
		p.start()
		d.awaitCluster()
		d.caughtUp()
	}
	if n := d.askers[0].refusals() + d.askers[1].refusals() - before; n > 0 {
		t.Errorf("%d requests were refused while bridges and NATS were restarted", n)
	}
	d.finish()
}

func (a *asker) refusals() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.refused
}

func (d *deployment) ready(a *asker) {
	d.t.Helper()
	await(d.t, a.name+" is ready", func() bool {
		return call(context.Background(), d.client, http.MethodGet, a.url+"/ready", nil, nil) == nil
	})
}

// caughtUp waits until what engines have said by now is in every index.
func (d *deployment) caughtUp() {
	d.t.Helper()
	reached := map[string]uint64{}
	for _, e := range d.engines {
		reached[e.source.Instance] = e.Next()
	}
	for _, a := range d.askers {
		await(d.t, a.name+" has caught up", func() bool {
			var workers []struct {
				Instance  string `json:"instance_id"`
				Listeners map[string]struct {
					Applied *uint64 `json:"applied_engine_seq"`
				}
			}
			if call(context.Background(), d.client, http.MethodGet, a.url+"/workers", nil, &workers) != nil || len(workers) != len(d.engines) {
				return false
			}
			for _, w := range workers {
				// The last batch may be one that is gone: the one after it tells.
				if at := w.Listeners["0"].Applied; at == nil || *at < reached[w.Instance] {
					return false
				}
			}
			return true
		})
	}
}

// TestAllDisksLost ends all NATS servers and takes their files away: bridges write
// the state anew, and the catalog comes back from what they know.
func TestAllDisksLost(t *testing.T) {
	t.Parallel()
	d := deploy(t, 4, size{nodes: 3, bridges: 2, indexers: 2, engines: 4}, nil)
	d.caughtUp()
	d.asking() // log sequences begin anew: answers of before and after don't mix
	d.recording()
	for _, p := range d.nodes {
		p.kill()
	}
	for i := range d.nodes {
		if err := os.RemoveAll(filepath.Join(d.dir, d.nodes[i].name)); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(d.dir, strings.Replace(d.nodes[i].name, "n", "nats", 1))); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range d.nodes {
		p.start()
	}
	d.awaitCluster()
	d.publishing()
	for _, a := range d.askers {
		d.settled(a)
		d.ready(a)
	}
	// Whoever starts now has nothing but the new log.
	for i, a := range d.askers {
		d.indexers[i].kill()
		d.indexers[i].start()
		d.ready(a)
		d.settled(a)
	}
}

// TestDiskIsFull has the disk of NATS fill up: bridges hold back, nothing is
// acknowledged that is not stored, and when there is room again all of it comes.
func TestDiskIsFull(t *testing.T) {
	t.Parallel()
	const room = 3 << 20
	d := deploy(t, 5, size{nodes: 1, bridges: 2, indexers: 2, engines: 4}, func(c *natsConfig) { c.MaxStore = room })
	await(t, "the disk is full", func() bool {
		d.burst(20)
		data, err := os.ReadFile(d.nodes[0].log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Contains(string(data), "resource limits exceeded")
	})
	d.burst(200) // which the bridges have to hold
	d.nodes[0].stop()
	d.nodes[0].replace(func(env string) string { return strings.Replace(env, `"MaxStore":3145728`, `"MaxStore":4294967296`, 1) })
	d.nodes[0].start()
	d.finish()
}

// burst publishes batches at once.
func (d *deployment) burst(n int) {
	for _, e := range d.engines {
		for range n {
			e.publish(d.t, true)
		}
	}
}

// replace changes the environment that the process is started with.
func (p *process) replace(change func(string) string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.env {
		p.env[i] = change(p.env[i])
	}
}
