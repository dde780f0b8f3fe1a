package bridge_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

var (
	seeds = flag.Int("seeds", 8, "how many random runs")
	first = flag.Uint64("seed", 1, "the first of them")
)

// chaos is one random run: engines that say anything, and a bridge, a NATS server
// and connections that fail at any time.
type chaos struct {
	*rig
	rng    *rand.Rand
	e      *edge
	config func(*bridge.Config)
	actors []*actor
	says   map[*actor]*model.Traffic
	down   map[*actor]bool
	lossy  bool // batches may be lost for good
}

// TestRandom runs random traffic of every dialect through a bridge, with batches
// that are lost, sent again and replayed badly, engines that restart or are out of
// reach, bridges that stop or are killed, checkpoints, and NATS restarting. After
// each record the log has to hold what the naive model holds after the record's
// last batch, and in the end after the engines' last ones. Every other log is in
// three streams.
func TestRandom(t *testing.T) {
	for i := range *seeds {
		seed := *first + uint64(i)
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			defer func() {
				if t.Failed() {
					t.Logf("repeat with: go test ./bridge -run TestRandom -seed %d -seeds 1", seed)
				}
			}()
			c := newChaos(t, seed)
			for range 120 {
				c.step()
			}
			c.finish()
		})
	}
}

func newChaos(t *testing.T, seed uint64) *chaos {
	rng := rand.New(rand.NewPCG(seed, 7))
	c := &chaos{rig: newRig(t), rng: rng, says: map[*actor]*model.Traffic{}, down: map[*actor]bool{}, lossy: rng.IntN(3) == 0}
	c.log.Log.Shards = 1 + 2*int(seed%2)
	onGap := c.lossy && rng.IntN(2) == 0
	small := rng.IntN(3) == 0
	c.config = func(cfg *bridge.Config) {
		cfg.RepairTimeout = 300 * time.Millisecond
		if !c.lossy {
			cfg.RepairAttempts = 1000 // nothing that the ring has is given up
		}
		if onGap {
			cfg.OnGap = bridge.ResetOnGap
		}
		if small {
			cfg.MaxHeld, cfg.MaxMessage, cfg.MaxBacklog = 1<<20, 256<<10, 256<<10
		}
		cfg.PublishTimeout = time.Second
		cfg.CheckpointBytes = 2000 << rng.IntN(6)
		cfg.ProbeInterval = 300 * time.Millisecond
	}
	dir, err := os.MkdirTemp("", "kvmesh-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	prompts := model.Prompts(model.PromptOptions{Seed: seed, BlockSize: blockSize, N: 4 + rng.IntN(8), Spaced: 2})
	dialects := mock.Dialects()
	for i := range 2 + rng.IntN(2) {
		dialect := dialects[rng.IntN(len(dialects))]
		profile := []model.Profile{model.VLLM, model.SGLang}[rng.IntN(2)]
		a := c.engine(fmt.Sprintf("e%d", i), func(o *mock.Options) {
			o.Dialect = dialect
			// Nobody else takes them while the engine is down.
			o.Endpoint, o.ReplayEndpoint = fmt.Sprintf("ipc://%s/p%d", dir, i), fmt.Sprintf("ipc://%s/r%d", dir, i)
			o.Replay.Topic = rng.IntN(2) == 0
			if c.lossy && rng.IntN(2) == 0 {
				o.Ring = 30
			}
		})
		a.worker.Engine = string(profile)
		a.oracle = newOracle(a, profile)
		a.oracle.onGap, a.lossy = onGap, c.lossy
		features := dialect.Features() | model.Feature(rng.Uint32())&^(1<<16-1)
		c.says[a] = model.NewTraffic(model.TrafficOptions{Seed: seed*10 + uint64(i), BlockSize: blockSize, Profile: profile, Events: 1 + rng.IntN(4), Features: features}, prompts)
		c.actors = append(c.actors, a)
	}
	c.up()
	return c
}

// up starts a bridge.
func (c *chaos) up() {
	c.e = c.bridge(c.config)
	for _, a := range c.actors {
		c.e.Set(a.worker)
	}
}

func (c *chaos) publish(a *actor, d mock.Delivery) {
	a.deliver(d, c.says[a].Batch()...)
}

// step does one thing.
func (c *chaos) step() {
	a := c.actors[c.rng.IntN(len(c.actors))]
	switch x := c.rng.IntN(100); {
	case x < 60:
		for range 1 + c.rng.IntN(8) {
			c.publish(a, mock.Sent)
		}
	case x < 70:
		d := mock.Lost
		if c.lossy {
			d = []mock.Delivery{mock.Lost, mock.Gone, mock.Unkept}[c.rng.IntN(3)]
		}
		c.publish(a, d)
	case x < 75:
		if n := a.Next(); n > 0 && !c.down[a] {
			if err := a.Resend(uint64(c.rng.IntN(int(n)))); err != nil && !errors.Is(err, mock.ErrNotKept) {
				c.t.Fatal(err)
			}
		}
	case x < 79: // out of reach, and back
		if c.down[a] {
			a.start()
		} else {
			a.Stop()
		}
		c.down[a] = !c.down[a]
	case x < 82: // another life
		a.Stop()
		a.reborn()
		c.says[a].Restart()
		for range c.rng.IntN(12) {
			c.publish(a, mock.Sent)
		}
		a.start()
		c.down[a] = false
	case x < 88:
		a.SetReplay(func(r *mock.Replay) {
			topic := r.Topic
			*r = mock.Replay{Topic: topic}
			switch c.rng.IntN(7) {
			case 0:
				r.Silent = 1
			case 1:
				r.Lossy, r.Skip = 3, []uint64{uint64(c.rng.IntN(20)), uint64(c.rng.IntN(40))}
			case 2:
				r.NoEnd = true
			case 3:
				r.Limit = 1 + c.rng.IntN(5)
			case 4:
				r.Early, r.Twice = 3, true
			case 5:
				r.Delay = 20 * time.Millisecond
			}
		})
	case x < 92:
		if c.rng.IntN(2) == 0 {
			c.e.kill()
		} else {
			c.e.stop()
		}
		c.up()
	case x < 93: // the worker goes, and comes again
		c.e.Remove(a.worker.Source)
		if c.rng.IntN(2) == 0 {
			c.publish(a, mock.Sent)
			time.Sleep(10 * time.Millisecond)
		}
		c.e.Set(a.worker)
	case x < 94:
		c.hub.Stop()
		for range c.rng.IntN(5) {
			c.publish(a, mock.Sent)
		}
		c.hub.start()
	case x < 96:
		// An answer may be lost with the connection: it is only asked for.
		c.nc.PublishMsg(&nats.Msg{Subject: event.CheckpointSubject(a.worker.Key()), Data: event.CheckpointRequest(1 << 62)})
	default:
		time.Sleep(time.Duration(c.rng.IntN(20)) * time.Millisecond)
	}
}

// finish waits for the log, and compares.
func (c *chaos) finish() {
	for _, a := range c.actors {
		a.SetReplay(func(r *mock.Replay) { *r = mock.Replay{Topic: r.Topic} })
		if c.down[a] {
			a.start()
		}
		c.e.connected(a)
		c.publish(a, mock.Sent)
	}
	c.await("NATS is there", c.nc.IsConnected)
	c.synced(c.actors...)
	for _, a := range c.actors {
		if gaps := c.source(a).Gaps; len(gaps) > 0 && !c.lossy {
			c.t.Errorf("%s: gaps %v", a.worker.Instance, gaps)
		}
	}
}
