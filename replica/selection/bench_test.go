package selection

import (
	"context"
	"fmt"
	"testing"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// BenchmarkSelectAndReserve: 1,024 workers that all hold some of a prompt of 128
// blocks, without the index's own time.
func BenchmarkSelectAndReserve(b *testing.B) {
	const workers = 1024
	index := fixed{}
	s := fleet(b, workers, &index, Default(), Options{})
	p, _ := s.Partition(part)
	for i := range p.Candidates {
		index.add(&p.Candidates[i].Source, [event.Tiers]uint32{uint32(i % 128), uint32(i % 128), 128, 128})
	}
	locals := prompt(128)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		r, err := s.SelectAndReserve(context.Background(), &Request{Partition: part, ID: fmt.Sprint(n), Locals: locals})
		if err != nil {
			b.Fatal(err)
		}
		if n%2 == 1 {
			_ = s.Free(context.Background(), r.ID)
		}
	}
}

// fixed is an Index with one answer.
type fixed struct{ answer indexer.Answer }

func (f *fixed) add(s *event.Source, ends [event.Tiers]uint32) {
	f.answer.BlockSize = blockSize
	f.answer.Holdings = append(f.answer.Holdings, indexer.Holding{Source: s, Ends: ends})
}

func (f *fixed) Match(*indexer.Query, event.Partition, []uint64) (indexer.Answer, error) {
	return f.answer, nil
}
