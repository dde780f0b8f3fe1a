package bridge_test

import (
	"fmt"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// ranked publishes a batch that names a rank, and applies it to that rank's model.
func ranked(a *actor, rank uint32, truth map[uint32]*model.Source, events ...model.Event) {
	a.r.t.Helper()
	payload, err := a.dialect.Encode(mock.Batch{TS: float64(a.Next()), Events: events, Rank: &rank, BlockSize: blockSize})
	if err != nil {
		a.r.t.Fatal(err)
	}
	a.raw(payload, mock.Sent)
	if truth[rank] == nil {
		truth[rank] = model.New(blockSize, model.VLLM)
	}
	for _, e := range events {
		truth[rank].Apply(e)
	}
}

// Batches over one socket may name several ranks: each is a source, and one number
// is enough to go on from, also for a bridge that starts again.
func TestRanksOverOneSocket(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) { ranksOverOneSocket(t, shards) })
	}
}

func ranksOverOneSocket(t *testing.T, shards int) {
	r := newRig(t)
	r.log.Log.Shards = shards
	r.loose = true
	a := r.engine("a")
	truth := map[uint32]*model.Source{}
	source := func(rank uint32) event.Source {
		s := a.worker.Source
		s.Rank = rank
		return s
	}
	agree := func(what string) {
		t.Helper()
		r.read(what, func() bool {
			home := r.source(a)
			if !home.Batches || home.Last != a.Next()-1 || home.Partial {
				return false
			}
			for rank, m := range truth {
				s := r.log.Source(source(rank))
				if s == nil || s.Diff(m.Resident()) != "" {
					return false
				}
			}
			return true
		})
	}
	e := r.bridge()
	e.serve(a)
	for i := range 30 {
		ranked(a, uint32(i%3), truth, prompt(i, 0, 2))
		ranked(a, uint32(i%2), truth, evict(i, "", 1))
	}
	agree("three ranks")
	if n := len(r.log.Sources()); n != 3 {
		t.Errorf("%d sources, want 3", n)
	}
	e.kill()
	for i := range 10 {
		ranked(a, uint32(i%4), truth, prompt(100+i, 0, 2), evict(i, "", 0))
	}
	e = r.bridge()
	e.serve(a)
	ranked(a, 2, truth, prompt(200, 0, 1))
	agree("four ranks, after a bridge was killed")
	wantResets(t, r.source(a), "new")

	// A rank that gets a worker of its own is that worker's from then on.
	b := r.engine("b")
	w := b.worker
	w.Source = source(1)
	e.Set(w)
	e.connected(b)
	b.publish(prompt(300, 0, 3))
	own := model.New(blockSize, model.VLLM)
	own.Apply(prompt(300, 0, 3))
	r.read("the rank's own batches", func() bool { return r.log.Source(w.Source).Diff(own.Resident()) == "" })
	// What the first socket says of it after that is said of the socket's own rank.
	e.connected(a)
	delete(truth, 1)
	ranked(a, 0, truth, prompt(400, 0, 2))
	agree("the other ranks")
}

// An engine that labels all its ranks 0 is taken at its socket's word.
func TestARankThatIsSomebodyElses(t *testing.T) {
	r := newRig(t)
	r.loose = true
	a, b := r.engine("a"), r.engine("b")
	b.worker.Source = a.worker.Source
	b.worker.Rank = 1
	e := r.bridge()
	e.serve(a, b)
	truth := map[uint32]*model.Source{}
	ranked(a, 0, truth, prompt(1, 0, 2))
	ranked(b, 0, map[uint32]*model.Source{}, prompt(2, 0, 3))
	r.read("both", func() bool {
		one, two := r.log.Source(a.worker.Source), r.log.Source(b.worker.Source)
		return one != nil && two != nil && len(one.Resident()[event.Device]) == 2 && len(two.Resident()[event.Device]) == 3
	})
}
