package ui

import (
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Replicas are compared in what both serve, at one log sequence.
func TestReplicasCompare(t *testing.T) {
	counts := func(n uint64) tierCounts { return tierCounts{"device": {Count: n, Sum: "00"}} }
	view := func(seq uint64, serves []string, partitions map[string]tierCounts) replicaView {
		return replicaView{PositionJSON: event.Position{LogSeq: seq}.JSON(), Serves: serves, Partitions: partitions}
	}
	ab := map[string]tierCounts{"a:g": counts(1), "b:g": counts(2)}
	for name, c := range map[string]struct {
		replicas []replicaView
		compared int
		equal    bool
	}{
		"the same":                         {[]replicaView{view(5, nil, ab), view(5, nil, ab)}, 1, true},
		"other log sequences":              {[]replicaView{view(5, nil, ab), view(6, nil, nil)}, 0, true},
		"one lacks a partition":            {[]replicaView{view(5, nil, ab), view(5, nil, map[string]tierCounts{"a:g": counts(1)})}, 1, false},
		"one does not serve it":            {[]replicaView{view(5, nil, ab), view(5, []string{"a:*"}, map[string]tierCounts{"a:g": counts(1)})}, 1, true},
		"one serves it and has it not":     {[]replicaView{view(5, nil, ab), view(5, []string{"a:*", "b:g"}, map[string]tierCounts{"a:g": counts(1)})}, 1, false},
		"one has more of what both serve":  {[]replicaView{view(5, []string{"a:*"}, nil), view(5, nil, ab)}, 1, false},
		"nothing in common":                {[]replicaView{view(5, []string{"a:g"}, map[string]tierCounts{"a:g": counts(1)}), view(5, []string{"b:g"}, map[string]tierCounts{"b:g": counts(9)})}, 1, true},
		"the third differs from the first": {[]replicaView{view(5, []string{"a:g"}, map[string]tierCounts{"a:g": counts(7)}), view(5, []string{"b:g"}, map[string]tierCounts{"b:g": counts(2)}), view(5, nil, ab)}, 1, false},
		"a share that can't be read":       {[]replicaView{view(5, nil, ab), view(5, []string{":"}, ab)}, 1, false},
	} {
		v := replicasView{Replicas: c.replicas, Equal: true}
		v.compare()
		if len(v.Compared) != c.compared || v.Equal != c.equal {
			t.Errorf("%s: compared at %v, equal %v; want %d and %v", name, v.Compared, v.Equal, c.compared, c.equal)
		}
	}
}
