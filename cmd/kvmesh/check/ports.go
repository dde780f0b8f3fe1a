package check

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// use is one socket of an engine.
type use struct {
	source event.Source
	what   string // PUB or replay
}

func (u use) String() string {
	return fmt.Sprintf("the %s socket of %s rank %d", u.what, u.source.Instance, u.source.Rank)
}

// ports looks for addresses that two sockets of engines have, or would have with
// more data-parallel ranks: engines add the rank to both of their ports, so that a
// replay port right behind the PUB port is the PUB port of rank 1.
func (c *checker) ports(workers []event.Worker) {
	taken := map[string][]use{}
	for _, w := range workers {
		note := func(endpoint, what string) {
			if e, err := event.ParseEndpoint(endpoint); err == nil && !e.Bind {
				at := e.Network + " " + e.Address
				taken[at] = append(taken[at], use{w.Source, what})
			}
		}
		note(w.Endpoint, "PUB")
		note(w.ReplayEndpoint, "replay")
	}
	clash := false
	for _, at := range slices.Sorted(maps.Keys(taken)) {
		uses := taken[at]
		for i := 1; i < len(uses); i++ {
			clash = true
			c.add(Fail, "ports", at, "give every rank ports of its own, and replay ports at least as many behind the PUB ports as there are ranks",
				"%v is also %v", uses[0], uses[i])
		}
	}
	if !clash && len(taken) > 0 {
		c.add(OK, "ports", "all", "", "%d sockets, no two at one address", len(taken))
		c.growth(workers)
	}
}

// growth looks at the ports that the ranks of an instance would have.
func (c *checker) growth(workers []event.Worker) {
	first := map[event.Source]event.Worker{} // by the source of rank 0: the lowest rank
	most := map[event.Source]int{}
	for _, w := range workers {
		id := w.Source
		id.Rank = 0
		if f, ok := first[id]; !ok || w.Rank < f.Rank {
			first[id] = w
		}
		most[id] = max(most[id], int(w.Rank)+1)
	}
	order := slices.SortedFunc(maps.Keys(first), func(a, b event.Source) int { return cmp.Compare(a.Key(), b.Key()) })
	for _, id := range order {
		w := first[id]
		pub, replay := portOf(w.Endpoint), portOf(w.ReplayEndpoint)
		if pub == 0 || replay == 0 {
			continue
		}
		apart := max(replay-pub, pub-replay)
		ranks := max(c.Ranks, most[id])
		fix := fmt.Sprintf("move one of them by at least the number of ranks: endpoint tcp://*:%d, replay_endpoint tcp://*:%d", pub, pub+100)
		switch {
		case apart < ranks:
			c.add(Fail, "ports", id.Instance, fix, "PUB port %d and replay port %d are %d apart: with %d ranks they collide", pub, replay, apart, ranks)
		case apart < 2:
			c.add(Warn, "ports", id.Instance, fix, "PUB port %d and replay port %d are %d apart: they collide as soon as there are 2 data-parallel ranks", pub, replay, apart)
		}
	}
}

// portOf returns the port of an endpoint, 0 if it has none.
func portOf(endpoint string) int {
	e, err := event.ParseEndpoint(endpoint)
	if err != nil || e.Network != "tcp" {
		return 0
	}
	_, port, err := net.SplitHostPort(e.Address)
	if err != nil {
		return 0
	}
	n, _ := strconv.Atoi(port)
	return n
}
