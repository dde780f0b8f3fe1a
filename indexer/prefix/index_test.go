package prefix_test

import (
	"flag"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
)

var (
	seeds = flag.Int("seeds", 6, "how many random worlds each test makes")
	first = flag.Uint64("seed", 1, "seed of the first one")
)

// sizes are worlds of several kinds.
var sizes = []struct {
	name                              string
	workers, prompts, length, changes int
	mask                              uint64
}{
	{"few workers", 3, 12, 300, 600, ^uint64(0)},
	{"many workers", 200, 8, 60, 1500, ^uint64(0)},
	{"small blocks", 8, 60, 12, 3000, ^uint64(0)},
	{"long prompts", 4, 6, 1500, 300, ^uint64(0)},
	{"collisions", 4, 20, 40, 1500, 0x1ff},
	{"many collisions", 3, 6, 20, 1000, 0xf},
}

func worlds(t *testing.T, f func(t *testing.T, w *world, changes int)) {
	for _, size := range sizes {
		for i := range *seeds {
			seed := *first + uint64(i)
			if !t.Run(fmt.Sprintf("%s/%d", size.name, seed), func(t *testing.T) {
				f(t, newWorld(seed, size.mask, size.workers, size.prompts, size.length), size.changes)
			}) {
				t.Fatalf("to repeat it: go test ./indexer/prefix -run '%s' -seeds 1 -seed %d", t.Name(), seed)
			}
		}
	}
}

// All that an Index says is what the model says, after any changes.
func TestModel(t *testing.T) {
	worlds(t, func(t *testing.T, w *world, changes int) {
		var q prefix.Query
		for n := range changes {
			var got, want [][2]uint64
			w.update(func(x prefix.Writer) {
				for range 1 + w.rng.IntN(3) {
					c := w.change()
					got, want = append(got, c.index(x)), append(want, c.naive())
				}
			})
			for i := range got {
				if got[i] != want[i] {
					t.Fatalf("change %d: added or removed %v, want %v", n, got[i], want[i])
				}
			}
			for w.rng.IntN(3) == 0 {
				w.index.Sweep()
			}
			locals := w.question()
			if got, logSeq := have(w.index, &q, locals); !equal(got, w.want(locals)) || logSeq != w.logSeq {
				t.Fatalf("change %d: answer %v at %d, want %v at %d", n, got, logSeq, w.want(locals), w.logSeq)
			}
			if n%100 == 0 {
				w.compare(t)
			}
		}
		w.compare(t)
		w.empty(t)
	})
}

// compare compares everything.
func (w *world) compare(t *testing.T) {
	t.Helper()
	entries := 0
	for i, at := range w.workers {
		if have, want := w.walk(i); !maps.Equal(have, want) {
			t.Fatalf("worker %d has %d blocks, want %d: %v, want %v", i, len(have), len(want), have, want)
		}
		var held [event.Tiers]int
		w.index.Read(func(r prefix.Reader) { held = r.Held(at.holder) })
		if want := w.naive.Held(prefix.Holder(i)); held != want {
			t.Fatalf("worker %d holds %v, want %v", i, held, want)
		}
		for _, n := range held {
			entries += n
		}
	}
	s := w.index.Stats()
	if s.Blocks != w.naive.Len() || s.Entries != entries {
		t.Fatalf("stats say %+v, want %d blocks, %d entries", s, w.naive.Len(), entries)
	}
	w.index.Check()
}

// empty takes everything away: nothing is left behind.
func (w *world) empty(t *testing.T) {
	t.Helper()
	w.update(func(x prefix.Writer) {
		for i, at := range w.workers {
			if i%2 == 0 {
				x.Drop(at.holder)
			} else {
				x.Clear(at.holder, event.AllTiers)
			}
		}
	})
	if s := w.index.Stats(); s.Blocks != 0 || s.Entries != 0 || s.Pages != 0 || s.Unheld != 0 {
		t.Fatalf("after everything was taken away there is %+v", s)
	}
	w.index.Check()
}

// An answer is true for the moment that it says, whatever is written meanwhile.
func TestConcurrent(t *testing.T) {
	worlds(t, func(t *testing.T, w *world, changes int) {
		questions := make([][]uint64, 24)
		for i := range questions {
			questions[i] = w.question()
		}
		var mu sync.Mutex
		truth := map[uint64][]answer{} // by log sequence, then by question
		note := func(logSeq uint64) {
			answers := make([]answer, len(questions))
			for i, locals := range questions {
				answers[i] = w.want(locals)
			}
			mu.Lock()
			truth[logSeq] = answers
			mu.Unlock()
		}
		note(w.logSeq)
		var readers sync.WaitGroup
		var stop atomic.Bool
		for r := range 3 {
			readers.Go(func() {
				var q prefix.Query
				last := uint64(0)
				for n := r; !stop.Load(); n++ {
					i := n % len(questions)
					got, logSeq := have(w.index, &q, questions[i])
					mu.Lock()
					want := truth[logSeq]
					mu.Unlock()
					if logSeq < last || want == nil || !equal(got, want[i]) {
						t.Errorf("question %d: answer %v at %d, want %v", i, got, logSeq, want)
						return
					}
					last = logSeq
				}
			})
		}
		for range min(changes, 400) {
			// The model goes first, so that what is true is known before
			// anybody can see it. It needs to know nothing of holders.
			var todo []change
			for range 1 + w.rng.IntN(3) {
				c := w.change()
				c.naive()
				todo = append(todo, c)
			}
			note(w.logSeq + 1)
			w.update(func(x prefix.Writer) {
				for _, c := range todo {
					c.index(x)
				}
			})
			for w.rng.IntN(3) == 0 {
				w.index.Sweep()
			}
		}
		stop.Store(true)
		readers.Wait()
		w.compare(t)
	})
}
