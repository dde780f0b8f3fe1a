package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Environment of TestRandomEndToEnd.
const (
	envSeeds    = "KVMESH_SEEDS"    // how many seeds; default 20
	envSeed     = "KVMESH_SEED"     // the first of them; default 1
	envParallel = "KVMESH_PARALLEL" // how many run at a time
)

// envInt returns a number from the environment.
func envInt(t *testing.T, name string, otherwise int) int {
	text, ok := os.LookupEnv(name)
	if !ok {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// TestRandomEndToEnd has mock engines publish random traffic on real sockets, a
// bridge read it, NATS keep it and an indexer answer, while batches are lost,
// repeated and garbled, engines, bridge, indexer and NATS stop and start again,
// checkpoints are asked for, workers come and go and the log is purged. Whenever
// all has settled, the index has to hold what the naive model holds, and to
// answer what it answers.
func TestRandomEndToEnd(t *testing.T) {
	seeds, first := envInt(t, envSeeds, 20), envInt(t, envSeed, 1)
	parallel := min(seeds, envInt(t, envParallel, 2*runtime.GOMAXPROCS(0)))
	queue := make(chan uint64)
	var wg sync.WaitGroup
	for range parallel {
		wg.Go(func() {
			for seed := range queue {
				runSeed(t, seed)
			}
		})
	}
	for seed := range seeds {
		queue <- uint64(first + seed)
	}
	close(queue)
	wg.Wait()
}

func runSeed(t *testing.T, seed uint64) {
	var log lastLines
	s := &script{rng: rand.New(rand.NewPCG(seed, 0)), log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	err := s.begin(t)
	if err == nil {
		err = s.play()
	}
	if err == nil && log.alarm != "" {
		err = errors.New(log.alarm)
	}
	records := ""
	if err != nil && s.mesh != nil {
		records = s.mesh.listing()
		for _, a := range s.actors {
			records += a.listLife()
		}
	}
	s.end()
	if err != nil {
		t.Errorf("seed %d: %v\nafter %s\nrepeat with: %s=%d %s=1 go test ./integration -run 'TestRandomEndToEnd$'\nlog:\n%srecords:\n%s",
			seed, err, strings.Join(s.steps, ", "), envSeed, seed, envSeeds, log.String(), records)
	}
}

// script is one random run.
type script struct {
	rng     *rand.Rand
	log     *slog.Logger
	mesh    *mesh
	actors  []*actor
	truth   *model.Partition
	prompts []model.Prompt
	model   event.Partition
	mortal  bool // the bridge will be killed
	onGap   bridge.GapPolicy
	steps   []string
}

// begin starts engines and everything else.
func (s *script) begin(t *testing.T) (err error) {
	s.model = event.Partition{Model: "org/Model v1", Group: "default"}
	s.truth = model.NewPartition(blockSize)
	s.prompts = model.Prompts(model.PromptOptions{Seed: s.rng.Uint64(), BlockSize: blockSize, N: 4 + s.rng.IntN(16), Spaced: 4, Pairs: s.rng.IntN(6) == 0})
	s.onGap = bridge.KeepOnGap
	if s.rng.IntN(4) == 0 {
		s.onGap = bridge.ResetOnGap
	}
	if s.mesh, err = newMesh(t, s.log, 1+2*s.rng.IntN(2)); err != nil {
		return err
	}
	for i := range 1 + s.rng.IntN(3) {
		for rank := range uint32(1 + s.rng.IntN(2)) {
			source := event.Source{Model: s.model.Model, Group: s.model.Group, Instance: fmt.Sprintf("worker.%d", i), Rank: rank}
			a, err := newActor(s.rng, source, s.prompts, s.truth, s.onGap == bridge.ResetOnGap)
			if err != nil {
				return err
			}
			s.actors = append(s.actors, a)
			if err := s.mesh.register(a.worker); err != nil {
				return err
			}
		}
	}
	if err := s.startBridge(); err != nil {
		return err
	}
	return s.startIndexer()
}

func (s *script) end() {
	for _, a := range s.actors {
		a.engine.Stop()
	}
	if s.mesh != nil {
		s.mesh.close()
	}
}

// note puts a step on record.
func (s *script) note(format string, args ...any) {
	step := fmt.Sprintf(format, args...)
	s.steps = append(s.steps, step)
	s.log.Info("-- " + step)
}

// play makes random steps.
func (s *script) play() error {
	for range 14 {
		if err := s.step(); err != nil {
			return err
		}
	}
	if err := s.check(); err != nil {
		return err
	}
	// All is gone but the log.
	s.note("cold start without engines")
	s.mesh.stopBridge()
	s.mesh.stopIndexer()
	for _, a := range s.actors {
		a.engine.Stop()
	}
	if s.rng.IntN(2) == 0 {
		s.mesh.nats.Stop()
		if err := s.mesh.nats.Start(); err != nil {
			return err
		}
	}
	if err := s.startIndexer(); err != nil {
		return err
	}
	return s.compare()
}

func (s *script) step() error {
	if err := s.burst(1 + s.rng.IntN(12)); err != nil {
		return err
	}
	switch s.rng.IntN(13) {
	case 0, 1:
		return s.check()
	case 2:
		return s.flap()
	case 3, 4:
		return s.restartEngine()
	case 5, 6:
		return s.restartBridge()
	case 7:
		return s.restartIndexer()
	case 8:
		return s.restartNATS()
	case 9, 10:
		return s.askCheckpoint()
	case 11:
		return s.reregister()
	case 12:
		return s.purge()
	}
	return nil
}

// burst has engines publish batches, some of which get lost.
func (s *script) burst(n int) error {
	s.note("%d batches", n)
	for range n {
		a := s.actors[s.rng.IntN(len(s.actors))]
		if err := s.publish(a); err != nil {
			return err
		}
	}
	return nil
}

// publish has an engine publish a batch. What the bridge can't ask for later it
// has to get now.
func (s *script) publish(a *actor) error {
	how := mock.Sent
	fresh := len(a.life) >= a.high // else nothing would tell this life from the one before
	switch x := s.rng.IntN(40); {
	case x < 4:
		how = mock.Lost
	case x == 4 && fresh:
		how = mock.Gone
	case x == 5 && fresh:
		how = mock.Unkept
	}
	if how == mock.Lost && !a.replays() && !fresh {
		how = mock.Sent
	}
	live := how == mock.Unkept || how == mock.Sent && !a.replays()
	if live {
		if s.mesh.edge == nil {
			return nil
		}
		if err := a.connected(1); err != nil {
			return err
		}
	}
	if err := a.publish(how); err != nil {
		return err
	}
	if how == mock.Unkept { // no engine loses the newest one it has sent
		if err := a.publish(mock.Sent); err != nil {
			return err
		}
		if err := s.settle(a); err != nil {
			return err
		}
	}
	if how == mock.Sent && s.rng.IntN(20) == 0 && len(a.life) > 1 {
		again := s.rng.IntN(len(a.life))
		if d := a.life[again]; d.kept && !d.broken && again >= len(a.life)-200 {
			return a.engine.Resend(uint64(again))
		}
	}
	return nil
}

// flap cuts the connection to an engine for a while.
func (s *script) flap() error {
	a := s.actors[s.rng.IntN(len(s.actors))]
	s.note("cut %s/%d", a.worker.Instance, a.worker.Rank)
	if !a.replays() {
		if err := s.settle(a); err != nil {
			return err
		}
	}
	a.engine.Stop()
	if a.replays() {
		for range s.rng.IntN(4) {
			if err := a.publish(mock.Lost); err != nil {
				return err
			}
		}
	}
	return a.start()
}

func (s *script) restartEngine() error {
	a := s.actors[s.rng.IntN(len(s.actors))]
	s.note("restart %s/%d", a.worker.Instance, a.worker.Rank)
	if err := a.restart(); err != nil {
		return err
	}
	if !a.replays() { // it is told by the first number that it uses again
		if s.mesh.edge == nil {
			if err := s.startBridge(); err != nil {
				return err
			}
		}
		if err := a.connected(1); err != nil {
			return err
		}
	}
	for range 1 + s.rng.IntN(3) {
		if err := a.publish(mock.Sent); err != nil {
			return err
		}
	}
	return nil
}

func (s *script) startBridge() error {
	s.mortal = s.rng.IntN(2) == 0
	return s.mesh.startBridge(func(c *bridge.Config) {
		c.OnGap = s.onGap
		if s.rng.IntN(2) == 0 {
			c.CheckpointBytes = 2000
		}
		if s.mortal {
			c.StopTimeout = 200 * time.Millisecond
		}
	})
}

// stopBridge stops the bridge, or kills it.
func (s *script) stopBridge() error {
	if s.mesh.edge == nil {
		return nil
	}
	for _, a := range s.actors {
		if !a.replays() {
			if err := s.settle(a); err != nil {
				return err
			}
			// A subscription that is still on its way would count as one that
			// gets what is published after the bridge's end.
			if err := a.connected(1); err != nil {
				return err
			}
		}
	}
	if s.mortal {
		s.mesh.crashBridge()
	} else {
		s.mesh.stopBridge()
	}
	for _, a := range s.actors {
		if !eventually(func() bool { return a.engine.Subscribers() == 0 }) {
			return errors.New("a bridge that ended is still connected")
		}
	}
	return nil
}

func (s *script) restartBridge() error {
	s.note("stop the bridge, mortal=%v", s.mortal)
	if err := s.stopBridge(); err != nil {
		return err
	}
	if err := s.burst(s.rng.IntN(5)); err != nil {
		return err
	}
	if s.rng.IntN(3) == 0 {
		return nil // another step starts it
	}
	s.note("start the bridge")
	return s.startBridge()
}

func (s *script) startIndexer() error {
	return s.mesh.startIndexer(func(c *indexer.Config) {
		if s.rng.IntN(2) == 0 {
			c.MinLog = 20000
		}
	})
}

func (s *script) restartIndexer() error {
	s.note("restart the indexer")
	s.mesh.stopIndexer()
	if err := s.burst(s.rng.IntN(5)); err != nil {
		return err
	}
	if s.mesh.index != nil {
		return nil // a batch of the burst had to be waited for
	}
	return s.startIndexer()
}

func (s *script) restartNATS() error {
	s.note("restart NATS")
	s.mesh.nats.Stop()
	defer func() {
		eventually(s.mesh.admin.nc.IsConnected)
	}()
	for range s.rng.IntN(6) {
		a := s.actors[s.rng.IntN(len(s.actors))]
		if a.replays() || s.mesh.edge != nil && a.engine.Subscribers() > 0 {
			if err := a.publish(mock.Sent); err != nil {
				return err
			}
		}
	}
	return s.mesh.nats.Start()
}

func (s *script) askCheckpoint() error {
	a := s.actors[s.rng.IntN(len(s.actors))]
	s.note("ask %s/%d for a checkpoint", a.worker.Instance, a.worker.Rank)
	var err error
	eventually(func() bool { // the connection may be on its way back
		err = s.mesh.admin.nc.Publish(event.CheckpointSubject(a.worker.Key()), nil)
		return err == nil
	})
	return err
}

// reregister takes a worker out of the catalog for a while.
func (s *script) reregister() error {
	if s.mortal { // it may not have the time to retire a worker
		if err := s.restartBridge(); err != nil {
			return err
		}
	}
	if s.mortal {
		return nil
	}
	a := s.actors[s.rng.IntN(len(s.actors))]
	s.note("unregister %s/%d", a.worker.Instance, a.worker.Rank)
	if err := s.settle(s.actors...); err != nil {
		return err
	}
	if err := a.connected(1); err != nil {
		return err
	}
	if err := s.mesh.unregister(a.worker.Source); err != nil {
		return err
	}
	mine := func(i indexer.SourceInfo) bool {
		return i.Source.Instance == a.worker.Instance && slices.Contains(a.labels, i.Source.Rank)
	}
	if !eventually(func() bool {
		sources, _ := s.mesh.index.Sources()
		return !slices.ContainsFunc(sources, mine) && a.engine.Subscribers() == 0
	}) {
		sources, _ := s.mesh.index.Sources()
		return fmt.Errorf("a worker that was unregistered is not retired: %+v", sources)
	}
	others := slices.DeleteFunc(slices.Clone(s.actors), func(b *actor) bool { return b == a })
	for _, rank := range a.labels {
		s.truth.Drop(a.worker.Instance, rank)
	}
	if len(others) > 0 && s.rng.IntN(2) == 0 {
		if err := s.compare(); err != nil {
			return err
		}
	}
	s.note("register %s/%d", a.worker.Instance, a.worker.Rank)
	a.recount()
	return s.mesh.register(a.worker)
}

// purge empties the log. A bridge that is up writes what it knows again; one that
// is not has to ask the engines.
func (s *script) purge() error {
	up := s.mesh.edge != nil
	s.note("purge the log, bridge up=%v", up)
	if up {
		if err := s.settle(s.actors...); err != nil {
			return err
		}
	}
	lasts := make([]uint64, s.mesh.records.Shards)
	for shard := range lasts {
		if err := retry(func(ctx context.Context) error {
			stream, err := s.mesh.stream(ctx, shard)
			if errors.Is(err, jetstream.ErrStreamNotFound) {
				return nil
			}
			if err != nil {
				return err
			}
			lasts[shard] = stream.CachedInfo().State.LastSeq
			return stream.Purge(ctx)
		}); err != nil {
			return err
		}
	}
	last := func(a *actor) uint64 { return lasts[s.mesh.records.Shard(a.worker.Source)] }
	if !up {
		for _, a := range s.actors {
			a.recount()
			a.after = last(a)
		}
		return nil
	}
	if s.rng.IntN(2) == 0 {
		if err := s.restartIndexer(); err != nil {
			return err
		}
	}
	for _, a := range s.actors {
		if !eventually(func() bool { _, seq := s.mesh.heard.of(a.worker.Source); return seq > last(a) }) {
			return fmt.Errorf("%s/%d is not in the log again after a purge", a.worker.Instance, a.worker.Rank)
		}
	}
	return nil
}

// lastLines keeps the end of a log, and the first line that must not be there: a
// bridge that can't read back what another has written.
type lastLines struct {
	mu    sync.Mutex
	buf   []byte
	alarm string
}

func (l *lastLines) Write(p []byte) (int, error) {
	const most = 64 << 10
	l.mu.Lock()
	defer l.mu.Unlock()
	// What is left of a rank that only batches name, and that is void, may be.
	if l.alarm == "" && bytes.Contains(p, []byte("can't be read back")) && !bytes.Contains(p, []byte(".10")) {
		l.alarm = string(p)
	}
	if l.buf = append(l.buf, p...); len(l.buf) > 2*most {
		l.buf = append(l.buf[:0], l.buf[len(l.buf)-most:]...)
	}
	return len(p), nil
}

func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.buf)
}
