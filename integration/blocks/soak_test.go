package blocks_test

import (
	"flag"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/integration/blocks"
)

var soakTime = flag.Duration("soak", 30*time.Second, "how long TestSoak goes on")

// Blocks come and go for long, and the index neither grows nor loses count.
func TestSoak(t *testing.T) {
	s := blocks.NewSoak(1, 16, 2000)
	for s.Fleet.Entries() < 16*2000 {
		s.Step()
	}
	var sizes []int
	for end := time.Now().Add(*soakTime); time.Now().Before(end); {
		// A round is work, not time: the same on any machine.
		for range 2000 {
			s.Step()
		}
		if err := s.Check(); err != nil {
			t.Fatalf("after %d blocks: %v", s.Blocks, err)
		}
		sizes = append(sizes, s.Index.Stats().Bytes*100/max(1, s.Fleet.Len()))
	}
	// What a block takes does not grow: the second half of the time against
	// the first.
	half := len(sizes) / 2
	if a, b := most(sizes[:half]), most(sizes[half:]); half > 0 && b > a*5/4 {
		t.Errorf("a block takes %.2f bytes at the most, before it was %.2f", float64(b)/100, float64(a)/100)
	}
}

func most(values []int) int {
	n := 0
	for _, v := range values {
		n = max(n, v)
	}
	return n
}
