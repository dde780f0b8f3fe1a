package indexer_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/model"
)

// history is the naive state of a partition after each of its records, stream by
// stream, and the answers that were given meanwhile.
type history struct {
	shards []past

	mu    sync.Mutex
	given []given
}

// past is the naive state of the sources in one stream.
type past struct {
	seqs   []uint64 // in order
	states []model.State
}

type given struct {
	prompt int
	at     event.Position
	rows   map[string]model.Row
}

// note remembers the state of the sources that share a stream with one that was
// written to last.
func (h *history) note(w *world, of *feed.Writer) {
	shard := w.log.Shard(of.Source)
	var with []*feed.Writer
	for _, other := range w.writers {
		if w.log.Shard(other.Source) == shard {
			with = append(with, other)
		}
	}
	p := &h.shards[shard]
	p.seqs, p.states = append(p.seqs, w.seqs[shard]), append(p.states, stateOf(with...))
}

// at returns the state at a position.
func (h *history) at(at event.Position) model.State {
	out := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	for shard := range h.shards {
		p := &h.shards[shard]
		i, found := slices.BinarySearch(p.seqs, at.Seq(shard))
		if !found {
			i--
		}
		if i >= 0 {
			maps.Copy(out.Held, p.states[i].Held)
		}
	}
	return out
}

// ask asks an indexer random prompts until done is closed.
func (h *history) ask(x *indexer.Indexer, rng *rand.Rand, prompts [][]uint64, done <-chan struct{}) error {
	var q indexer.Query
	for {
		select {
		case <-done:
			return nil
		default:
		}
		i := rng.IntN(len(prompts))
		rows, at, err := answer(x, &q, partition, prompts[i])
		if err != nil {
			return err
		}
		h.mu.Lock()
		h.given = append(h.given, given{i, at, rows})
		h.mu.Unlock()
	}
}

// TestRandomRecords writes random records of several sources: all kinds of
// operations in all tiers, checkpoints in many chunks, some of which are broken
// off or stand between others', workers that retire and come back. Every answer,
// of an indexer that goes along and is asked by several goroutines all the time,
// and of those that start late, has to be the naive model's at the position that the
// answer claims. The log is in one stream, or in three.
func TestRandomRecords(t *testing.T) {
	seeds, first := 12, uint64(1)
	if text, ok := os.LookupEnv("KVMESH_SEEDS"); ok {
		seeds, _ = strconv.Atoi(text)
	}
	if text, ok := os.LookupEnv("KVMESH_SEED"); ok {
		first, _ = strconv.ParseUint(text, 10, 64)
	}
	for seed := first; seed < first+uint64(seeds); seed++ {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprint(seed, " in ", shards), func(t *testing.T) {
				defer func() {
					if t.Failed() {
						t.Logf("repeat with: KVMESH_SEED=%d KVMESH_SEEDS=1 go test ./indexer -run 'TestRandomRecords$'", seed)
					}
				}()
				randomRecords(t, seed, shards)
			})
		}
	}
}

func randomRecords(t *testing.T, seed uint64, shards int) {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := newSplitWorld(t, seed, shards)
	for i := range 1 + rng.IntN(4) {
		for rank := range uint32(1 + rng.IntN(3)) {
			w.writer(fmt.Sprintf("w%d", i), rank)
		}
	}
	other := feed.NewWriter(event.Source{Model: "org/m", Group: "other", Instance: "x"}, 5)
	h := &history{shards: make([]past, shards)}
	x := w.start(nil)
	x.Registered(worker(other))
	w.await("the indexer is ready", func() bool { return x.Ready() == nil })
	done := make(chan struct{})
	var asking sync.WaitGroup
	for i := range 3 {
		asking.Go(func() {
			if err := h.ask(x.Indexer, rand.New(rand.NewPCG(seed, uint64(i)+10)), w.locals, done); err != nil {
				t.Error(err)
			}
		})
	}
	pending := map[*feed.Writer][][]byte{} // chunks of checkpoints
	for range 150 {
		of := w.writers[rng.IntN(len(w.writers))]
		switch x := rng.IntN(30); {
		case x == 0:
			w.fill(rng, other, 1)
		case x == 1:
			pending[of] = of.Checkpoint(rng, 1+rng.IntN(6))
		case x == 2:
			w.write(of, of.Retire())
			h.note(w, of)
			delete(pending, of)
			of.Reset(event.ReasonNew)
		case x < 12 && len(pending[of]) > 0:
			w.write(of, pending[of][0])
			h.note(w, of)
			pending[of] = pending[of][1:]
		default:
			for range 1 + rng.IntN(3) {
				of.Random(rng, w.locals)
			}
			w.write(of, of.Record())
			h.note(w, of)
			delete(pending, of) // an unfinished one means nothing from here on
		}
		if rng.IntN(40) == 0 {
			x.reachAll()
			x.agrees(stateOf(w.writers...))
		}
		if rng.IntN(60) == 0 {
			late := w.start(nil)
			late.Registered(worker(other))
			late.reachAll()
			late.agrees(stateOf(w.writers...))
			late.stop()
		}
	}
	x.reachAll()
	x.agrees(stateOf(w.writers...))
	close(done)
	asking.Wait()
	for _, g := range h.given {
		if want := h.at(g.at).Answer(w.locals[g.prompt]); !reflect.DeepEqual(g.rows, want) {
			t.Fatalf("prompt %d at %v: %v, want %v", g.prompt, g.at, g.rows, want)
		}
	}
	if len(h.given) == 0 {
		t.Error("nobody asked anything")
	}
	for _, of := range w.writers {
		info, ok := x.info(of.Source)
		if held := len(of.Held()); !ok && held > 0 || info.Diverged {
			t.Errorf("%v: known %v, diverged %v", of.Source, ok, info.Diverged)
		}
	}
	if n := x.counter("kvmesh.indexer.records.bad") + x.counter("kvmesh.indexer.divergences"); n > 0 {
		t.Errorf("%d bad records and divergences", n)
	}
}
