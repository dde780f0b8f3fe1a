package replica

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func workersOf(n int, labels func(i int) map[string]string) []event.Worker {
	var out []event.Worker
	for i := range n {
		w := event.Worker{Source: event.Source{Model: "m", Group: "g", Instance: fmt.Sprint("w", i)}}
		if labels != nil {
			w.Labels = labels(i)
		}
		out = append(out, w)
	}
	return out
}

func count(got map[event.Source]string) map[string]int {
	out := map[string]int{}
	for _, id := range got {
		out[id]++
	}
	return out
}

func moved(before, after map[event.Source]string) (n int) {
	for s, id := range after {
		if before[s] != id {
			n++
		}
	}
	return n
}

// However bridges come and go, the spread is even, the order in which things are
// listed does not matter, and no more moves than evenness asks for.
func TestAssignIsEvenAndMovesLittle(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	workers := workersOf(1000, nil)
	owner := map[event.Source]string{}
	bridges := []candidate{}
	for round := range 60 {
		before := len(bridges)
		if len(bridges) == 0 || len(bridges) < 12 && rng.IntN(2) == 0 {
			bridges = append(bridges, candidate{id: fmt.Sprint("b", round)})
		} else {
			at := rng.IntN(len(bridges))
			bridges = slices.Delete(bridges, at, at+1)
		}
		got := assign(workers, bridges, owner)
		shuffled := slices.Clone(workers)
		rng.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		order := slices.Clone(bridges)
		rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
		if !maps.Equal(got, assign(shuffled, order, owner)) {
			t.Fatal("the order of workers or bridges matters")
		}
		if len(bridges) == 0 {
			continue
		}
		if len(got) != len(workers) {
			t.Fatalf("%d of %d assigned", len(got), len(workers))
		}
		n := count(got)
		for _, b := range bridges {
			if low := len(workers) / len(bridges); n[b.id] < low || n[b.id] > low+1 {
				t.Fatalf("%s has %d of %d among %d bridges", b.id, n[b.id], len(workers), len(bridges))
			}
		}
		// What has to move: the share of a bridge that came or went, and one
		// more for each of the others where it does not divide.
		most := len(workers)/max(before, len(bridges)) + len(bridges) + 1
		if before > 0 && moved(owner, got) > most {
			t.Fatalf("from %d to %d bridges %d of %d moved, want at most %d", before, len(bridges), moved(owner, got), len(workers), most)
		}
		if again := assign(workers, bridges, got); !maps.Equal(got, again) {
			t.Fatal("what is as it should be is changed")
		}
		owner = got
	}
}

func TestAssignGoesByLabels(t *testing.T) {
	workers := workersOf(90, func(i int) map[string]string {
		return map[string]string{"node": string(rune('a' + i%3)), "rack": fmt.Sprint(i % 2)}
	})
	a1 := candidate{id: "a1", claim: map[string]string{"node": "a"}}
	a2 := candidate{id: "a2", claim: map[string]string{"node": "a"}}
	b := candidate{id: "b", claim: map[string]string{"node": "b"}}
	any := candidate{id: "any"}
	check := func(bridges []candidate, want map[string]map[string]int) {
		t.Helper()
		got := assign(workers, bridges, nil)
		have := map[string]map[string]int{}
		for _, w := range workers {
			node := w.Labels["node"]
			if have[node] == nil {
				have[node] = map[string]int{}
			}
			have[node][got[w.Source]]++
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			t.Errorf("%v, want %v", have, want)
		}
	}
	check([]candidate{a1, a2, b, any}, map[string]map[string]int{"a": {"a1": 15, "a2": 15}, "b": {"b": 30}, "c": {"any": 30}})
	check([]candidate{a1, b, any}, map[string]map[string]int{"a": {"a1": 30}, "b": {"b": 30}, "c": {"any": 30}})
	check([]candidate{b, any}, map[string]map[string]int{"a": {"any": 30}, "b": {"b": 30}, "c": {"any": 30}})
	check([]candidate{a1, b}, map[string]map[string]int{"a": {"a1": 30}, "b": {"b": 30}, "c": {"a1": 15, "b": 15}})
	check([]candidate{b}, map[string]map[string]int{"a": {"b": 30}, "b": {"b": 30}, "c": {"b": 30}})
	narrow := candidate{id: "narrow", claim: map[string]string{"node": "a", "rack": "1"}}
	check([]candidate{narrow, any}, map[string]map[string]int{"a": {"any": 15, "narrow": 15}, "b": {"any": 30}, "c": {"any": 30}})
}

// Sources of different teams that share a bridge don't all end up with it.
func TestAssignLevelsOverTeams(t *testing.T) {
	workers := workersOf(7, func(i int) map[string]string { return map[string]string{"pool": fmt.Sprint(i % 7)} })
	var bridges []candidate
	for i := range 3 {
		bridges = append(bridges, candidate{id: fmt.Sprint("b", i)})
	}
	n := count(assign(workers, bridges, nil))
	for _, b := range bridges {
		if n[b.id] < 2 || n[b.id] > 3 {
			t.Errorf("%v", n)
		}
	}
}

func BenchmarkAssign(b *testing.B) {
	workers := workersOf(1024, nil)
	bridges := []candidate{{id: "a"}, {id: "b"}, {id: "c"}, {id: "d"}}
	owner := assign(workers, bridges, nil)
	for b.Loop() {
		assign(workers, bridges, owner)
	}
}
