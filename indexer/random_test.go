package indexer_test

import (
	"fmt"
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

// history is the naive state of a partition after each of its records, and the
// answers that were given meanwhile.
type history struct {
	seqs   []uint64 // in order
	states []model.State

	mu    sync.Mutex
	given []given
}

type given struct {
	prompt int
	seq    uint64
	rows   map[string]model.Row
}

// at returns the state at a log sequence.
func (h *history) at(seq uint64) model.State {
	i, found := slices.BinarySearch(h.seqs, seq)
	if !found {
		i--
	}
	if i < 0 {
		return model.State{BlockSize: blockSize}
	}
	return h.states[i]
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
		rows, seq, err := answer(x, &q, partition, prompts[i])
		if err != nil {
			return err
		}
		h.mu.Lock()
		h.given = append(h.given, given{i, seq, rows})
		h.mu.Unlock()
	}
}

// TestRandomRecords writes random records of several sources: all kinds of
// operations in all tiers, checkpoints in many chunks, some of which are broken
// off or stand between others', workers that retire and come back. Every answer,
// of an indexer that goes along and is asked by several goroutines all the time,
// and of those that start late, has to be the naive model's at the log sequence
// that the answer claims.
func TestRandomRecords(t *testing.T) {
	seeds, first := 12, uint64(1)
	if text, ok := os.LookupEnv("KVMESH_SEEDS"); ok {
		seeds, _ = strconv.Atoi(text)
	}
	if text, ok := os.LookupEnv("KVMESH_SEED"); ok {
		first, _ = strconv.ParseUint(text, 10, 64)
	}
	for seed := first; seed < first+uint64(seeds); seed++ {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("repeat with: KVMESH_SEED=%d KVMESH_SEEDS=1 go test ./indexer -run 'TestRandomRecords$'", seed)
				}
			}()
			randomRecords(t, seed)
		})
	}
}

func randomRecords(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := newWorld(t, seed)
	for i := range 1 + rng.IntN(4) {
		for rank := range uint32(1 + rng.IntN(3)) {
			w.writer(fmt.Sprintf("w%d", i), rank)
		}
	}
	other := feed.NewWriter(event.Source{Model: "org/m", Group: "other", Instance: "x"}, 5)
	h := &history{}
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
	last := uint64(0)
	note := func(seq uint64) {
		h.seqs, h.states = append(h.seqs, seq), append(h.states, stateOf(w.writers...))
		last = seq
	}
	for range 150 {
		of := w.writers[rng.IntN(len(w.writers))]
		switch x := rng.IntN(30); {
		case x == 0:
			w.fill(rng, other, 1)
		case x == 1:
			pending[of] = of.Checkpoint(rng, 1+rng.IntN(6))
		case x == 2:
			note(w.write(of, of.Retire()))
			delete(pending, of)
			of.Reset(event.ReasonNew)
		case x < 12 && len(pending[of]) > 0:
			note(w.write(of, pending[of][0]))
			pending[of] = pending[of][1:]
		default:
			for range 1 + rng.IntN(3) {
				of.Random(rng, w.locals)
			}
			note(w.write(of, of.Record()))
			delete(pending, of) // an unfinished one means nothing from here on
		}
		if rng.IntN(40) == 0 {
			x.reach(last)
			x.agrees(stateOf(w.writers...))
		}
		if rng.IntN(60) == 0 {
			late := w.start(nil)
			late.Registered(worker(other))
			late.reach(last)
			late.agrees(stateOf(w.writers...))
			late.stop()
		}
	}
	x.reach(last)
	x.agrees(stateOf(w.writers...))
	close(done)
	asking.Wait()
	for _, g := range h.given {
		if want := h.at(g.seq).Answer(w.locals[g.prompt]); !reflect.DeepEqual(g.rows, want) {
			t.Fatalf("prompt %d at log seq %d: %v, want %v", g.prompt, g.seq, g.rows, want)
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
