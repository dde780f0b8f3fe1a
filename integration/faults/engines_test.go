package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

const blockSize = 4

// engine is a mock engine behind a network of its own, with what an exact index
// has to say of it.
type engine struct {
	*mock.Engine
	source event.Source
	pub    *link
	replay *link

	mu      sync.Mutex
	rng     *rand.Rand
	traffic *model.Traffic
	truth   *model.Source // what can be known: without the batches that are gone
	lost    int           // batches of this life that nobody got, and no replay has
	lives   int
}

func newEngine(t *testing.T, i int, seed uint64, prompts []model.Prompt) *engine {
	t.Helper()
	e, err := mock.NewEngine(mock.Options{BlockSize: blockSize, ReplayEndpoint: "tcp://127.0.0.1:0", Ring: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	x := &engine{
		Engine: e,
		source: event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i)},
		pub:    newLink(t, strings.TrimPrefix(e.Addr(), "tcp://")),
		replay: newLink(t, strings.TrimPrefix(e.ReplayAddr(), "tcp://")),
		rng:    rand.New(rand.NewPCG(seed, uint64(i))),
		truth:  model.New(blockSize, model.VLLM),
		lives:  1,
	}
	x.traffic = model.NewTraffic(model.TrafficOptions{Seed: seed + uint64(i), BlockSize: blockSize, Profile: model.VLLM, Features: model.Everything &^ model.Bad}, prompts)
	return x
}

func (e *engine) registration() map[string]any {
	return map[string]any{
		"instance_id": e.source.Instance, "model_name": e.source.Model, "block_size": blockSize, "engine": "vllm",
		"endpoint": "tcp://" + e.pub.addr(), "replay_endpoint": "tcp://" + e.replay.addr(),
	}
}

// publish publishes a batch, now and then one that is lost on its way, or lost
// for good.
func (e *engine) publish(t *testing.T, last bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	how := mock.Sent
	switch n := e.rng.IntN(1000); {
	case last:
	case n < 30:
		how = mock.Lost
	case n == 30 && e.Next() > 0: // not often: it takes three requests, a second apart, to give one up
		how = mock.Gone
	}
	events := e.traffic.Batch()
	if _, err := e.PublishAs(how, events...); err != nil {
		t.Error(err)
		return
	}
	if how == mock.Gone {
		e.lost++
		return
	}
	for _, v := range events {
		e.truth.Apply(v)
	}
}

// restart begins a new life.
func (e *engine) restart(t *testing.T) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.Restart(); err != nil {
		t.Error(err)
	}
	e.traffic.Restart()
	e.truth.Reset()
	e.lost = 0
	e.lives++
}

// keepPublishing has all engines publish until stop is called.
func keepPublishing(t *testing.T, engines []*engine) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, e := range engines {
		wg.Go(func() {
			ticker := time.NewTicker(10 * time.Millisecond)
			defer ticker.Stop()
			for ctx.Err() == nil {
				e.publish(t, false)
				select {
				case <-ticker.C:
				case <-ctx.Done():
				}
			}
			e.publish(t, true)
		})
	}
	return sync.OnceFunc(func() { cancel(); wg.Wait() })
}
