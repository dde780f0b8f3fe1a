package feed_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/model"
)

// TestWriterKeepsTheRules has a Reader, which looks at every rule of the log,
// read what a Writer writes.
func TestWriterKeepsTheRules(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	var prompts [][]uint64
	for _, p := range model.Prompts(model.PromptOptions{Seed: 1, BlockSize: 4, N: 8}) {
		prompts = append(prompts, p.Locals)
	}
	w := feed.NewWriter(event.Source{Model: "m", Group: "g", Instance: "w", Rank: 1}, 7)
	r := feed.NewReader()
	seq := uint64(0)
	apply := func(record []byte) {
		t.Helper()
		seq++
		if err := r.Apply(seq, event.DefaultLog().Subject(w.Source), record); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 500 {
		for range rng.IntN(4) {
			w.Random(rng, prompts)
		}
		apply(w.Record())
		if i%50 == 49 {
			for _, chunk := range w.Restart(rng, 1+rng.IntN(5), event.TierMask(rng.IntN(16))) {
				apply(chunk)
			}
		}
		if i%20 == 0 {
			for _, chunk := range w.Checkpoint(rng, 1+rng.IntN(5)) {
				apply(chunk)
			}
		}
		if diff := r.Source(w.Source).Diff(w.Held()); diff != "" {
			t.Fatalf("record %d: %s", seq, diff)
		}
	}
	s := r.Source(w.Source)
	if len(s.Gaps) == 0 || len(s.Resets) < 2 || s.Checkpoints != 35 || s.Restarts != 10 {
		t.Errorf("%d gaps, %d resets, %d checkpoints, %d restarts", len(s.Gaps), len(s.Resets), s.Checkpoints, s.Restarts)
	}
	apply(w.Retire())
	if !s.Retired || len(s.Resident()) > 0 {
		t.Errorf("retired %v, holds %v", s.Retired, s.Resident())
	}
}
