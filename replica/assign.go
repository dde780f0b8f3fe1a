package replica

import (
	"cmp"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// candidate is a bridge that may read sources.
type candidate struct {
	id    string
	claim map[string]string // labels of the workers that it is for; empty: any
}

// rank of a bridge for a worker: those that were told of workers like it come
// first, then those that were told nothing, then those that were told of others.
func (c *candidate) rank(w *event.Worker) int {
	if len(c.claim) == 0 {
		return 1
	}
	for k, v := range c.claim {
		if w.Labels[k] != v {
			return 2
		}
	}
	return 0
}

// assign says which bridge is to read each source. It is a function of what all
// bridges see, so that they agree without asking each other:
//
//   - only the bridges that come first for a worker get it;
//   - among workers for whom the same bridges come first, no bridge has two more
//     than another;
//   - who has a source keeps it, unless that would break the rules above;
//   - what is to move goes where rendezvous hashing says.
//
// owner says who has a source now; it may name a bridge that is no candidate.
func assign(workers []event.Worker, bridges []candidate, owner map[event.Source]string) map[event.Source]string {
	out := make(map[event.Source]string, len(workers))
	if len(bridges) == 0 {
		return out
	}
	bridges = slices.Clone(bridges)
	slices.SortFunc(bridges, func(a, b candidate) int { return strings.Compare(a.id, b.id) })
	teams := map[string]*team{}
	for i := range workers {
		members := firsts(&workers[i], bridges)
		name := strings.Join(members, "\x00")
		if teams[name] == nil {
			teams[name] = &team{members: members}
		}
		teams[name].sources = append(teams[name].sources, workers[i].Source)
	}
	load := map[string]int{} // over all teams
	names := make([]string, 0, len(teams))
	for name := range teams {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(teams[a].members), len(teams[b].members)), strings.Compare(a, b))
	})
	for _, name := range names {
		teams[name].share(owner, load, out)
	}
	return out
}

// firsts returns the ids of the bridges that come first for a worker, in order.
func firsts(w *event.Worker, bridges []candidate) []string {
	best := 3
	var out []string
	for i := range bridges {
		r := bridges[i].rank(w)
		if r < best {
			best, out = r, out[:0]
		}
		if r == best {
			out = append(out, bridges[i].id)
		}
	}
	return out
}

// team is the bridges that come first for some sources.
type team struct {
	members []string
	sources []event.Source
}

// share spreads the team's sources over its members.
func (t *team) share(owner map[event.Source]string, load map[string]int, out map[event.Source]string) {
	kept := map[string][]event.Source{}
	var loose []event.Source
	for _, s := range t.sources {
		if id := owner[s]; slices.Contains(t.members, id) {
			kept[id] = append(kept[id], s)
		} else {
			loose = append(loose, s)
		}
	}
	quota := t.quotas(kept, load)
	for _, id := range t.members {
		sources := kept[id]
		if len(sources) <= quota[id] {
			for _, s := range sources {
				out[s] = id
			}
			quota[id] -= len(sources)
			continue
		}
		slices.SortFunc(sources, func(a, b event.Source) int {
			return cmp.Or(cmp.Compare(score(id, b), score(id, a)), strings.Compare(a.Key(), b.Key()))
		})
		n := quota[id]
		for _, s := range sources[:n] {
			out[s] = id
		}
		quota[id] = 0
		loose = append(loose, sources[n:]...)
	}
	slices.SortFunc(loose, func(a, b event.Source) int { return strings.Compare(a.Key(), b.Key()) })
	for _, s := range loose {
		best := ""
		for _, id := range t.members {
			if quota[id] > 0 && (best == "" || score(id, s) > score(best, s)) {
				best = id
			}
		}
		out[s] = best
		quota[best]--
	}
	for _, s := range t.sources {
		load[out[s]]++
	}
}

// quotas returns how many of the team's sources each member gets. Where they
// don't divide evenly, those get one more who have most of them already, and then
// those who have least of others.
func (t *team) quotas(kept map[string][]event.Source, load map[string]int) map[string]int {
	order := slices.Clone(t.members)
	slices.SortFunc(order, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(kept[b]), len(kept[a])), cmp.Compare(load[a], load[b]), strings.Compare(a, b))
	})
	quota := make(map[string]int, len(order))
	for i, id := range order {
		quota[id] = len(t.sources) / len(order)
		if i < len(t.sources)%len(order) {
			quota[id]++
		}
	}
	return quota
}

// score is the weight of a bridge for a source in rendezvous hashing.
func score(id string, s event.Source) uint64 { return hash.Bytes([]byte(id + "\x00" + s.Key())) }
