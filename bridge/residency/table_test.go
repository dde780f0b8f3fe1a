package residency

import (
	"math/rand/v2"
	"testing"
)

func TestTableIsAMap(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 0))
		keys := 1 + rng.Uint64N(3000)
		spread := uint64(1) << rng.IntN(50)
		var tab table
		want := map[uint64]uint32{}
		for range 20000 {
			key := rng.Uint64N(keys) * spread
			switch x := rng.IntN(10); {
			case x < 5:
				p := tab.ref(key)
				if *p != want[key] {
					t.Fatalf("seed %d: ref(%d) is %d, want %d", seed, key, *p, want[key])
				}
				*p = 1 + rng.Uint32()>>1
				want[key] = *p
			case x < 8:
				tab.del(key)
				delete(want, key)
			default:
				if got := tab.get(key); got != want[key] {
					t.Fatalf("seed %d: get(%d) is %d, want %d", seed, key, got, want[key])
				}
			}
			if tab.n != len(want) {
				t.Fatalf("seed %d: %d entries, want %d", seed, tab.n, len(want))
			}
		}
		for key := range want {
			tab.del(key)
		}
		if tab.n != 0 || len(tab.slots) > tableMin {
			t.Fatalf("seed %d: %d entries and %d slots after all were deleted", seed, tab.n, len(tab.slots))
		}
	}
}
