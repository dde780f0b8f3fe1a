package selection_test

import (
	"context"
	"fmt"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// noIndex is an index that knows of no blocks. A router takes an
// *indexer.Indexer.
type noIndex struct{}

func (noIndex) Match(*indexer.Query, event.Partition, []uint64) (indexer.Answer, error) {
	return indexer.Answer{}, indexer.ErrUnknownPartition
}

// A router selects, sends the request to the worker, and frees the reservation
// when the answer is complete.
func Example() {
	ctx := context.Background()
	shared, err := load.New(nil, load.Default(), load.Options{}) // nil: no other replicas
	if err != nil {
		panic(err)
	}
	s, err := selection.New(noIndex{}, shared, selection.Default(), selection.Options{})
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"a", "b"} {
		s.Describe(selection.Worker{
			Instance: name, Model: "m", Group: "default", Endpoint: "http://" + name, BlockSize: 16, Ranks: 1,
			EventEndpoints: map[uint32]string{0: "tcp://" + name + ":5557"},
		})
	}
	r := &selection.Request{Partition: event.Partition{Model: "m", Group: "default"}, Tokens: 1000}
	first, err := s.SelectAndReserve(ctx, r)
	if err != nil {
		panic(err)
	}
	second, err := s.SelectAndReserve(ctx, r)
	if err != nil {
		panic(err)
	}
	fmt.Println("the same worker twice:", first.Source == second.Source)
	for _, id := range []string{first.ID, second.ID} {
		if err := s.Free(ctx, id); err != nil {
			panic(err)
		}
	}
	sum, _, _ := shared.Total()
	fmt.Println("requests left:", sum.Requests)
	// Output:
	// the same worker twice: false
	// requests left: 0
}

// fewest costs a worker what it has to do, and looks at no cache.
type fewest struct{}

func (fewest) Score(c *selection.Choice, costs []float64) {
	for i := range c.Candidates {
		if c.May(i) {
			costs[i] = float64(c.Load(i).Requests)
		}
	}
}

// last picks the last of the cheapest.
type last struct{}

func (last) Pick(c *selection.Choice, costs []float64) int {
	best := -1
	for i := range costs {
		if c.May(i) && (best < 0 || costs[i] <= costs[best]) {
			best = i
		}
	}
	return best
}

// Own Scorers and Pickers take the place of the built-in ones.
func Example_scorerAndPicker() {
	shared, err := load.New(nil, load.Default(), load.Options{})
	if err != nil {
		panic(err)
	}
	s, err := selection.New(noIndex{}, shared, selection.Default(), selection.Options{Scorer: fewest{}, Picker: last{}})
	if err != nil {
		panic(err)
	}
	for _, name := range []string{"a", "b", "c"} {
		s.Registered(event.Worker{Source: event.Source{Model: "m", Group: "g", Instance: name}, Endpoint: "tcp://" + name + ":1", BlockSize: 16})
	}
	for range 4 {
		r, err := s.SelectAndReserve(context.Background(), &selection.Request{Partition: event.Partition{Model: "m", Group: "g"}, Tokens: 16})
		if err != nil {
			panic(err)
		}
		fmt.Print(r.Source.Instance, " ")
	}
	// Output: c b a c
}
