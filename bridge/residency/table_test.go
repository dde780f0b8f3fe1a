package residency

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// mapping is what table and directory are.
type mapping interface {
	get(key uint64) uint32
	ref(key uint64) *uint32
	del(key uint64)
}

// hashing is a table that is given the hashes of keys.
type hashing struct{ table }

func (t *hashing) get(key uint64) uint32  { return t.table.get(key, hashOf(key, t.seed)) }
func (t *hashing) ref(key uint64) *uint32 { return t.table.ref(key, hashOf(key, t.seed)) }
func (t *hashing) del(key uint64)         { t.table.del(key, hashOf(key, t.seed)) }

func TestTableIsAMap(t *testing.T) {
	isMap(t, func() (mapping, func() int, func() error) {
		tab := &hashing{}
		tab.empty(0)
		return tab, func() int { return tab.n }, func() error {
			if len(tab.slots) > tableMin {
				return fmt.Errorf("%d slots", len(tab.slots))
			}
			return nil
		}
	})
}

func TestDirectoryIsAMap(t *testing.T) {
	isMap(t, func() (mapping, func() int, func() error) {
		d := &directory{}
		return d, func() int { return d.n }, func() error {
			if len(d.parts) > 1 || d.bits != 0 || d.most != 1 || len(d.parts[0].slots) > tableMin {
				return fmt.Errorf("%d parts, %d bits, %d of the most, %d slots", len(d.parts), d.bits, d.most, len(d.parts[0].slots))
			}
			return nil
		}
	})
}

// isMap compares random operations with those of a map. empty tells what is wrong
// after everything was deleted.
func isMap(t *testing.T, make func() (m mapping, n func() int, empty func() error)) {
	t.Helper()
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 0))
		keys := 1 + rng.Uint64N(6000)
		spread := uint64(1) << rng.IntN(50)
		tab, n, empty := make()
		want := map[uint64]uint32{}
		for range 40000 {
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
			if n() != len(want) {
				t.Fatalf("seed %d: %d entries, want %d", seed, n(), len(want))
			}
		}
		for key := range want {
			tab.del(key)
		}
		if err := empty(); n() != 0 || err != nil {
			t.Fatalf("seed %d: %d entries after all were deleted: %v", seed, n(), err)
		}
	}
}
