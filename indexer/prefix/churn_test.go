package prefix_test

import (
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

// Blocks come and go in a small index for long. A block that is not there is
// looked for, and not found, however many have gone past its place.
func TestChurnOfFewBlocks(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	x := prefix.New()
	source := event.Source{Model: "m", Group: "g", Instance: "i"}
	var h prefix.Holder
	x.Update(0, func(w prefix.Writer) {
		h = w.Add(&source)
		w.Show(h, true)
	})
	var held []uint64
	var q prefix.Query
	for i := range 60_000 {
		seq := rng.Uint64()
		if matches, _ := x.Match(&q, []uint64{seq}); len(matches) > 0 {
			t.Fatalf("a block that nobody has is held %d times", len(matches))
		}
		x.Update(uint64(i), func(w prefix.Writer) {
			w.Store(h, event.Device, &event.Run{Root: true, Locals: []uint64{seq}})
			if held = append(held, seq); len(held) > 2500 {
				at := rng.IntN(len(held))
				w.Remove(h, event.Device, []uint64{held[at]})
				held[at] = held[len(held)-1]
				held = held[:len(held)-1]
			}
		})
		for i%64 == 0 && x.Sweep() {
		}
	}
	for _, seq := range held {
		if matches, _ := x.Match(&q, []uint64{seq}); len(matches) != 1 {
			t.Fatalf("a block is held %d times, want once", len(matches))
		}
	}
	x.Check()
}
