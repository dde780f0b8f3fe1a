package integration

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// blockSize of the random tests, in tokens.
const blockSize = 4

// actor is one engine rank of a random test: it makes traffic, loses some of it
// on purpose, and knows what an exact index says of it.
type actor struct {
	engine  *mock.Engine
	rng     *rand.Rand
	worker  event.Worker
	dialect mock.Dialect
	profile model.Profile
	reset   bool // the bridge gives the state up on a gap

	labels  []uint32 // ranks that its batches name: its own first
	traffic map[uint32]*model.Traffic
	truth   *model.Partition

	life   []delivery // of this life, by number
	lives  int
	high   int     // numbers below it were used in earlier lives
	stale  bool    // nobody has seen anything of this life yet
	target *uint64 // fingerprint of the last batch that somebody can see
	after  uint64  // log sequence behind which there has to be something
}

// delivery is what became of one batch.
type delivery struct {
	rank   uint32
	events []model.Event
	seen   bool // the bridge has it, or can ask for it
	kept   bool // the bridge can ask for it
	broken bool // it can't be decoded
	print  uint64
}

// replays tells whether lost batches can be asked for.
func (a *actor) replays() bool { return a.worker.ReplayEndpoint != "" }

// publish publishes a batch.
func (a *actor) publish(how mock.Delivery) error {
	d := delivery{rank: a.labels[a.rng.IntN(len(a.labels))], seen: how != mock.Gone, kept: how == mock.Sent || how == mock.Lost}
	if how == mock.Lost && !a.replays() {
		d.seen = false
	}
	d.kept = d.kept && a.replays()
	var payload []byte
	if a.rng.IntN(60) == 0 {
		d.broken = true
		payload = fmt.Appendf([]byte{0xc1}, "%d %d", a.lives, len(a.life))
	} else {
		d.events = a.traffic[d.rank].Batch()
		var err error
		ts := 1.7e9 + 1000*float64(a.lives) + float64(len(a.life))/16
		payload, err = a.dialect.Encode(mock.Batch{TS: ts, Events: d.events, Rank: &d.rank, BlockSize: blockSize})
		if err != nil {
			return err
		}
	}
	d.print = hash.Bytes(payload)
	a.engine.PublishRaw(payload, how)
	a.life = append(a.life, d)
	if !d.seen {
		return nil
	}
	if a.stale {
		a.forget()
		a.stale = false
	}
	a.target = &d.print
	lost := len(a.life) > 1 && !a.life[len(a.life)-2].seen
	a.apply(d, lost)
	return nil
}

// apply applies a batch to the truth. lost says that batches before it are lost.
func (a *actor) apply(d delivery, lost bool) {
	if a.reset && (lost || d.broken) {
		a.forget()
	}
	for _, e := range d.events {
		a.truth.Source(a.worker.Instance, d.rank, a.profile).Apply(e)
	}
}

// forget empties the truth.
func (a *actor) forget() {
	for _, rank := range a.labels {
		a.truth.Source(a.worker.Instance, rank, a.profile).Reset()
	}
}

// recount makes the truth anew from what the bridge can still ask for: it starts
// to read this engine as if it had never been there.
func (a *actor) recount() {
	a.forget()
	a.target = nil
	a.stale = false
	last := -1
	for i, d := range a.life {
		if !d.kept {
			a.life[i].seen = false
			continue
		}
		a.apply(d, i != last+1)
		last = i
	}
	if last < 0 {
		return
	}
	a.target = &a.life[last].print
}

// restart begins a new life of the engine.
func (a *actor) restart() error {
	a.high = max(a.high, len(a.life))
	a.life, a.stale, a.target = nil, true, nil
	a.lives++
	for _, t := range a.traffic {
		t.Restart()
	}
	a.engine.Stop()
	a.engine.NewLife()
	return a.start()
}

// start opens the engine's sockets, when nobody else has their ports.
func (a *actor) start() (err error) {
	eventually(func() bool {
		err = a.engine.Start()
		return err == nil
	})
	return err
}

// connected waits until the bridge reads the engine.
func (a *actor) connected(n int) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return a.engine.WaitSubscribers(ctx, n)
}

// newActor invents an engine.
func newActor(rng *rand.Rand, source event.Source, prompts []model.Prompt, truth *model.Partition, reset bool) (*actor, error) {
	dialects := mock.Dialects()
	a := &actor{rng: rng, dialect: dialects[rng.IntN(len(dialects))], truth: truth, reset: reset, lives: 1, traffic: map[uint32]*model.Traffic{}}
	a.profile = []model.Profile{"", model.VLLM, model.SGLang}[rng.IntN(3)]
	features := a.dialect.Features() | model.Feature(rng.Uint32())&^(1<<16-1)
	if rng.IntN(3) == 0 {
		features = a.dialect.Features() | model.Everything&^(1<<16-1)
	}
	a.labels = []uint32{source.Rank}
	if source.Rank == 0 && a.dialect != mock.VLLMArray08 && rng.IntN(5) == 0 {
		a.labels = append(a.labels, 100, 101)
	}
	for _, rank := range a.labels {
		a.traffic[rank] = model.NewTraffic(model.TrafficOptions{Seed: rng.Uint64(), BlockSize: blockSize, Profile: a.profile, Events: 1 + rng.IntN(6), Features: features}, prompts)
	}
	topics := []string{"", "kv-events", "kv@" + source.Instance + "@m"}
	o := mock.Options{Dialect: a.dialect, Rank: source.Rank, BlockSize: blockSize, Topic: topics[rng.IntN(3)]}
	if rng.IntN(4) > 0 {
		o.ReplayEndpoint = "tcp://127.0.0.1:0"
		o.Replay.Topic = rng.IntN(2) == 0
		o.Replay.Twice = rng.IntN(8) == 0
		o.Replay.Early = uint64(rng.IntN(8) / 6)
		o.Replay.Limit = []int{0, 0, 0, 7}[rng.IntN(4)]
	}
	if rng.IntN(6) == 0 {
		o.PUB = mock.PUBZMQ4
	}
	var err error
	if a.engine, err = mock.NewEngine(o); err != nil {
		return nil, err
	}
	if err := a.engine.Start(); err != nil {
		return nil, err
	}
	a.worker = event.Worker{Source: source, Endpoint: a.engine.Addr(), ReplayEndpoint: a.engine.ReplayAddr(), Engine: string(a.profile), BlockSize: blockSize}
	if rng.IntN(2) == 0 {
		a.worker.Topic = o.Topic
	}
	return a, nil
}
