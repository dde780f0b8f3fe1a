package faults

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// fault is something that goes wrong, and what mends it.
type fault struct {
	name  string
	begin func(d *deployment) (mend func())
}

// upTo returns a random time.
func (d *deployment) upTo(most time.Duration) time.Duration {
	return time.Duration(d.rng.Int64N(int64(most)))
}

func pick[T any](d *deployment, from []T) (int, T) {
	i := d.rng.IntN(len(from))
	return i, from[i]
}

// faults are all that can happen. Each is mended before the next one.
func faults() []fault { return append(processFaults(), otherFaults()...) }

// processFaults are those of processes.
func processFaults() []fault {
	return []fault{
		{"a bridge is killed", func(d *deployment) func() {
			_, p := pick(d, d.bridges)
			p.kill()
			return p.start
		}},
		{"all bridges are killed", func(d *deployment) func() {
			for _, p := range d.bridges {
				p.kill()
			}
			return func() {
				for _, p := range d.bridges {
					p.start()
				}
			}
		}},
		{"a bridge is restarted", func(d *deployment) func() {
			_, p := pick(d, d.bridges)
			p.stop()
			return p.start
		}},
		{"a bridge is paused for longer than its lease", func(d *deployment) func() {
			_, p := pick(d, d.bridges)
			p.signal(syscall.SIGSTOP)
			time.Sleep(4 * time.Second)
			return func() { p.signal(syscall.SIGCONT) }
		}},
		{"an indexer is killed", func(d *deployment) func() {
			_, p := pick(d, d.indexers)
			p.kill()
			return p.start
		}},
		{"a NATS server is killed", func(d *deployment) func() {
			_, p := pick(d, d.nodes)
			p.kill()
			return p.start
		}},
		{"a NATS server is paused", func(d *deployment) func() {
			_, p := pick(d, d.nodes)
			p.signal(syscall.SIGSTOP)
			return func() { p.signal(syscall.SIGCONT) }
		}},
		{"a clock jumps", func(d *deployment) func() {
			_, p := pick(d, slices.Concat(d.nodes, d.bridges, d.indexers))
			p.jump(d.rng.IntN(7200) - 3600)
			return func() { p.jump(0) }
		}},
		{"NATS loses its quorum", func(d *deployment) func() {
			i, p := pick(d, d.nodes)
			q := d.nodes[(i+1)%len(d.nodes)]
			p.kill()
			q.kill()
			return func() { p.start(); q.start() }
		}},
	}
}

// otherFaults are those of networks, engines and operators.
func otherFaults() []fault {
	return []fault{
		{"a bridge or an indexer is cut off from NATS", func(d *deployment) func() {
			_, path := pick(d, d.paths)
			for _, l := range path {
				l.sever()
			}
			return func() {
				for _, l := range path {
					l.mend()
				}
			}
		}},
		{"a network to NATS is frozen", func(d *deployment) func() {
			_, path := pick(d, d.paths)
			for _, l := range path {
				l.freeze()
			}
			return func() {
				for _, l := range path {
					l.mend()
				}
			}
		}},
		{"an engine is cut off", func(d *deployment) func() {
			_, e := pick(d, d.engines)
			e.pub.sever()
			e.replay.sever()
			return func() { e.pub.mend(); e.replay.mend() }
		}},
		{"an engine is read slowly", func(d *deployment) func() {
			_, e := pick(d, d.engines)
			e.pub.freeze()
			return e.pub.mend
		}},
		{"an engine restarts", func(d *deployment) func() {
			_, e := pick(d, d.engines)
			e.restart(d.t)
			return func() {}
		}},
		{"the log is purged", func(d *deployment) func() {
			d.purge()
			return func() {}
		}},
		{"catalog and leases are deleted", func(d *deployment) func() {
			d.deleteBuckets()
			return func() {}
		}},
	}
}

// purge is an operator's purge of the log, when the history has it.
func (d *deployment) purge() {
	js, done, err := d.js()
	if err != nil {
		return
	}
	defer done()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for shard, h := range d.history.shards {
		stream, err := js.Stream(ctx, d.log.Name(shard))
		if err != nil {
			return
		}
		last := stream.CachedInfo().State.LastSeq
		await(d.t, "the history has what is purged", func() bool { return h.reached() >= last })
		if err := stream.Purge(ctx, jetstream.WithPurgeSequence(last+1)); err != nil {
			d.t.Logf("%s not purged before %d: %v", d.log.Name(shard), last, err)
		}
		h.mu.Lock()
		h.purged = append(h.purged, last)
		h.mu.Unlock()
	}
}

// deleteBuckets takes away what bridges have agreed on, and who is registered:
// each says again what it knows.
func (d *deployment) deleteBuckets() {
	js, done, err := d.js()
	if err != nil {
		return
	}
	defer done()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, name := range []string{"KVMESH_LEASES", "KVMESH_WORKERS"} {
		if err := js.DeleteKeyValue(ctx, name); err != nil {
			d.t.Logf("%s not deleted: %v", name, err)
		}
	}
}

// TestFaults runs random schedules of faults.
func TestFaults(t *testing.T) {
	t.Parallel()
	seeds, first := 1, uint64(time.Now().UnixNano())
	for name, into := range map[string]func(uint64){
		"KVMESH_FAULT_SEEDS": func(n uint64) { seeds = int(n) },
		"KVMESH_FAULT_SEED":  func(n uint64) { first = n },
	} {
		if text := os.Getenv(name); text != "" {
			n, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			into(n)
		}
	}
	for i := range seeds {
		seed := first + uint64(i)
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { schedule(t, seed) })
	}
}

func schedule(t *testing.T, seed uint64) {
	t.Logf("repeat with KVMESH_FAULT_SEED=%d", seed)
	d := deploy(t, seed, size{nodes: 3, bridges: 2, indexers: 2, engines: 4}, nil)
	all := faults()
	for range 6 {
		time.Sleep(d.upTo(time.Second)) // a random point of the traffic, not a wait for something
		_, f := pick(d, all)
		t.Logf("%s: %s", time.Now().Format("15:04:05.000"), f.name)
		mend := f.begin(d)
		time.Sleep(d.upTo(2 * time.Second))
		mend()
	}
	d.finish()
}

// TestEachFault runs every fault once, by itself, and measures how long it takes
// until all indexers have all of it again.
func TestEachFault(t *testing.T) {
	if os.Getenv("KVMESH_FAULTS_EACH") == "" {
		t.Skip("KVMESH_FAULTS_EACH is not set: it takes minutes")
	}
	for i, f := range faults() {
		t.Run(f.name, func(t *testing.T) {
			d := deploy(t, uint64(i), size{nodes: 3, bridges: 2, indexers: 3, engines: 4}, nil)
			time.Sleep(2 * time.Second)
			began := time.Now()
			mend := f.begin(d)
			time.Sleep(time.Second)
			mend()
			d.finish()
			t.Logf("settled %v after it began", time.Since(began).Round(10*time.Millisecond))
		})
	}
}
