package main

import (
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/integration/blocks"
)

// soak lets blocks come and go at constant size, and watches the memory.
func (b *indexBench) soak(d time.Duration) error {
	const workers, size = 64, 16384
	s := blocks.NewSoak(1, workers, size)
	for s.Fleet.Entries() < workers*size {
		s.Step()
	}
	begin, before := time.Now(), s.Blocks
	var perBlock []float64
	for time.Since(begin) < d {
		bytes := s.Run(min(10*time.Second, d/10))
		if err := s.Check(); err != nil {
			return fmt.Errorf("after %d blocks: %w", s.Blocks, err)
		}
		perBlock = append(perBlock, float64(bytes)/float64(s.Fleet.Len()))
		fmt.Fprintf(b.out, "%8v  %5d M blocks stored and removed  %d resident  %.1f B a block\n",
			time.Since(begin).Round(time.Second), s.Blocks/1e6, s.Fleet.Len(), perBlock[len(perBlock)-1])
	}
	b.figures["soak_s"] = time.Since(begin).Seconds()
	b.figures["soak_mblk"] = float64(s.Blocks-before) / 1e6
	b.figures["soak_b_first"] = perBlock[0]
	b.figures["soak_b_last"] = perBlock[len(perBlock)-1]
	b.figures["soak_b_max"] = percentile(perBlock, 100)
	return nil
}
