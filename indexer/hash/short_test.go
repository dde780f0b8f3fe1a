package hash

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/zeebo/xxh3"
)

// The written-out sizes are the library's function.
func TestShortSizes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var b [64]byte
	for range 100000 {
		for i := range 8 {
			binary.LittleEndian.PutUint64(b[8*i:], rng.Uint64()>>rng.UintN(64))
		}
		seed := rng.Uint64() >> rng.UintN(64)
		if got, want := hash64(&b, seed), xxh3.HashSeed(b[:], seed); got != want {
			t.Fatalf("hash64(%x, %d) = %d, want %d", b, seed, got, want)
		}
		lo, hi := binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])
		if got, want := hash16(lo, hi), xxh3.HashSeed(b[:16], Seed); got != want {
			t.Fatalf("hash16(%d, %d) = %d, want %d", lo, hi, got, want)
		}
	}
}

func TestTokens(t *testing.T) {
	b := []byte{0, 1, 0, 0, 0, 2, 0, 0, 0, 255, 255, 255, 255, 7}
	for at := range 5 {
		var want []uint32
		for rest := b[at:]; len(rest) >= 4; rest = rest[4:] {
			want = append(want, binary.LittleEndian.Uint32(rest))
		}
		if got := Tokens(nil, b[at:]); !slices.Equal(got, want) {
			t.Errorf("Tokens of bytes from %d on = %v, want %v", at, got, want)
		}
	}
}
