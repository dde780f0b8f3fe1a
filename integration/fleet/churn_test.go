package fleet

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/engines"
)

// TestSocketChurn has a thousand sources, of which a hundred go and a hundred
// others come at once, twenty times. Each that comes is read, each that goes is
// forgotten, and nothing is left behind.
func TestSocketChurn(t *testing.T) {
	const sources, rounds, each = 1000, 20, 100
	before := descriptors(t)
	v := newService(t, 1, func(c *bridge.Config) {
		// A loaded machine is not to look like a replay socket that does not answer.
		c.RepairTimeout, c.Repairs, c.ZMTP.HandshakeTimeout = patience, 64, patience
	})
	c := &churn{service: v, rng: rand.New(rand.NewPCG(1, 1))}
	defer func() {
		for _, f := range c.live {
			f.Stop()
		}
	}()
	c.come(1)
	c.come(sources - 1)
	c.publish(c.live)
	c.settle()
	full := descriptors(t)
	if full < 3*sources {
		t.Fatalf("%d descriptors with %d sources: they are not connected", full, sources)
	}
	for range rounds {
		gone := c.pick(each)
		var tasks sync.WaitGroup
		tasks.Go(func() { c.drop(gone) })
		new := c.come(each)
		tasks.Wait()
		c.publish(new)
		c.settle()
		if t.Failed() {
			return
		}
	}
	// All of them speak once more, those that stayed too.
	c.publish(c.live)
	c.settle()
	v.eventually("descriptors are as before", func() bool { return descriptors(t) <= full })
	for _, f := range c.live {
		f.Stop()
	}
	c.live = nil
	v.stop()
	v.eventually("descriptors are given back", func() bool { return descriptors(t) <= before+8 }) // some are the runtime's
}

// churn is engines of one rank each that come and go.
type churn struct {
	*service
	rng   *rand.Rand
	live  []*engines.Fleet
	count int
	token uint32
}

// come starts and registers engines, all at once.
func (c *churn) come(n int) []*engines.Fleet {
	c.t.Helper()
	var new []*engines.Fleet
	var workers []*engines.Worker
	for range n {
		c.count++
		f, err := engines.New(engines.Options{Name: fmt.Sprintf("churn-%d", c.count), Seed: uint64(c.count), Ring: 10, Cache: cache.Options{Device: 64}})
		if err != nil {
			c.t.Fatal(err)
		}
		if err := f.Start(); err != nil {
			c.t.Fatal(err)
		}
		new = append(new, f)
		workers = append(workers, f.Workers[0])
	}
	c.live = append(c.live, new...)
	c.register(workers...)
	return new
}

// pick takes engines out of those that live.
func (c *churn) pick(n int) []*engines.Fleet {
	c.rng.Shuffle(len(c.live), func(i, j int) { c.live[i], c.live[j] = c.live[j], c.live[i] })
	gone := slices.Clone(c.live[:n])
	c.live = slices.Delete(c.live, 0, n)
	return gone
}

// drop unregisters engines all at once. Half of them end before that, and half
// after it.
func (c *churn) drop(gone []*engines.Fleet) {
	ctx, cancel := context.WithTimeout(c.ctx, patience)
	defer cancel()
	var tasks sync.WaitGroup
	for i, f := range gone {
		tasks.Go(func() {
			if i%2 == 0 {
				f.Stop()
			}
			w := f.Workers[0]
			if _, err := c.catalog.Unregister(ctx, w.Instance, "m", "default", nil); err != nil {
				c.t.Errorf("%s: %v", w.Instance, err)
			}
			f.Stop()
		})
	}
	tasks.Wait()
}

// publish has each engine store something new.
func (c *churn) publish(all []*engines.Fleet) {
	c.t.Helper()
	for _, f := range all {
		c.token++
		tokens := slices.Repeat([]uint32{c.token}, 48)
		if _, err := f.Workers[0].Generate(c.ctx, engines.Job{Prompt: cache.Prompt{Tokens: tokens}}); err != nil {
			c.t.Errorf("%s: %v", f.Workers[0].Instance, err)
		}
	}
}

// settle waits until each engine that lives is read by one connection and known
// as it is, and no other one is answered with.
func (c *churn) settle() {
	c.t.Helper()
	c.eventually("every engine is known as it is", func() bool {
		have := known(c.indexes[0])
		for _, f := range c.live {
			w := f.Workers[0]
			info := have[event.Source{Model: "m", Group: "default", Instance: w.Instance}]
			if info.Digests != w.Digests() || !info.Answered || info.Gaps > 0 || w.Engine.Subscribers() != 1 {
				return false
			}
		}
		answered := 0
		for _, info := range have {
			if info.Answered {
				answered++
			}
		}
		return answered == len(c.live)
	})
}

// descriptors returns how many file descriptors this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc here")
	}
	return len(entries)
}
