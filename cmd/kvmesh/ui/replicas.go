package ui

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// replicaSubject is where dashboards ask all replicas how they are. Each answers
// with a replicaView.
const replicaSubject = "kvmesh.ui.replica"

// replicaView is one replica of the index.
type replicaView struct {
	ID     string `json:"id"`
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"`
	event.PositionJSON
	Lag        uint64                `json:"lag"`
	Sources    int                   `json:"sources"`
	Diverged   int                   `json:"diverged"`
	Partitions map[string]tierCounts `json:"partitions"`
	Serves     []string              `json:"serves,omitempty"` // nothing: everything
	This       bool                  `json:"this"`
}

// tierCounts has a digest for each tier, as text: JSON numbers of 64 bits don't
// survive every reader.
type tierCounts map[string]tierDigest

type tierDigest struct {
	Count uint64 `json:"count"`
	Sum   string `json:"sum"`
}

// view returns what this replica answers.
func (u *UI) view() replicaView {
	v := replicaView{ID: u.cfg.ID, Ready: true, Lag: u.index.Lag(), Serves: u.index.Share().Strings(), Partitions: map[string]tierCounts{}}
	if err := u.index.Ready(); err != nil {
		v.Ready, v.Reason = false, err.Error()
	}
	sources, at := u.index.Sources()
	v.PositionJSON = at.JSON()
	sums := map[event.Partition]*event.Digests{}
	for i := range sources {
		info := &sources[i]
		if info.Diverged {
			v.Diverged++
		}
		if !info.Answered && !info.Diverged {
			continue
		}
		v.Sources++
		p := info.Source.Partition()
		if sums[p] == nil {
			sums[p] = &event.Digests{}
		}
		for t, d := range info.Digests {
			sums[p][t].Add(d.Count, d.Sum)
		}
	}
	for p, sum := range sums {
		counts := tierCounts{}
		for t, d := range sum {
			counts[event.Tier(t).String()] = tierDigest{d.Count, fmt.Sprintf("%016x", d.Sum)}
		}
		v.Partitions[p.String()] = counts
	}
	return v
}

func (u *UI) answerReplica(m *nats.Msg) {
	data, err := json.Marshal(u.view())
	if err == nil {
		err = m.Respond(data)
	}
	if err != nil {
		u.log.Debug("another replica's dashboard not answered", "error", err)
	}
}

type replicasView struct {
	Replicas []replicaView `json:"replicas"`
	// Compared are the positions at which at least two replicas answered: only
	// digests at one position can be compared.
	Compared []comparedAt `json:"compared"`
	Equal    bool         `json:"equal"` // all that could be compared are equal
}

// comparedAt is a position, as JSON a log sequence or an array of those.
type comparedAt struct{ event.Position }

func (c comparedAt) MarshalJSON() ([]byte, error) {
	if len(c.LogSeqs) > 0 {
		return json.Marshal(c.LogSeqs)
	}
	return json.Marshal(c.LogSeq)
}

func (u *UI) serveReplicas(w http.ResponseWriter, r *http.Request) {
	out := replicasView{Replicas: []replicaView{}, Compared: []comparedAt{}, Equal: true}
	inbox := u.nc.NewInbox()
	sub, err := u.nc.SubscribeSync(inbox)
	if err == nil {
		defer sub.Unsubscribe()
		err = u.nc.PublishRequest(replicaSubject, inbox, nil)
	}
	deadline := time.Now().Add(u.cfg.Gather)
	for err == nil && time.Now().Before(deadline) && r.Context().Err() == nil {
		m, next := sub.NextMsg(time.Until(deadline))
		if next != nil {
			break
		}
		var v replicaView
		if len(m.Data) > 0 && json.Unmarshal(m.Data, &v) == nil {
			v.This = v.ID == u.cfg.ID
			out.Replicas = append(out.Replicas, v)
		}
	}
	if !slices.ContainsFunc(out.Replicas, func(v replicaView) bool { return v.This }) {
		v := u.view() // NATS is away
		v.This = true
		out.Replicas = append(out.Replicas, v)
	}
	slices.SortFunc(out.Replicas, func(a, b replicaView) int { return cmp.Compare(a.ID, b.ID) })
	out.compare()
	reply(w, http.StatusOK, out)
}

// compare compares the replicas that answered at one position, in what both
// serve.
func (v *replicasView) compare() {
	for i := range v.Replicas {
		a := &v.Replicas[i]
		for j := range v.Replicas[:i] {
			b := &v.Replicas[j]
			at := comparedAt{a.Position()}
			if !at.Equal(b.Position()) {
				continue
			}
			if !slices.ContainsFunc(v.Compared, func(c comparedAt) bool { return c.Equal(at.Position) }) {
				v.Compared = append(v.Compared, at)
			}
			v.Equal = v.Equal && a.covered(b) && b.covered(a)
		}
	}
	slices.SortFunc(v.Compared, func(a, b comparedAt) int {
		return cmp.Or(cmp.Compare(a.LogSeq, b.LogSeq), slices.Compare(a.LogSeqs, b.LogSeqs))
	})
}

// covered tells whether what a replica has of the other's share is just so there.
func (v *replicaView) covered(by *replicaView) bool {
	share, err := event.ParseShare(by.Serves)
	if err != nil {
		return false
	}
	for name, counts := range v.Partitions {
		if !share.Names(name) {
			continue
		}
		if !maps.Equal(counts, by.Partitions[name]) {
			return false
		}
	}
	return true
}
