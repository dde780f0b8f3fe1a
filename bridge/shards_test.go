package bridge_test

import (
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// A bridge whose log is split otherwise than the one that is there writes nothing,
// makes nothing, and says what to do.
func TestALogThatIsSplitOtherwise(t *testing.T) {
	for _, c := range []struct{ there, own int }{{1, 3}, {3, 1}, {3, 4}} {
		r := newRig(t)
		r.log.Log.Shards = c.there
		a := r.engine("a")
		r.bridge().serve(a)
		a.publish(prompt(1, 0, 2))
		r.synced(a)

		b := r.engine("b")
		other := r.bridge(func(cfg *bridge.Config) { cfg.ID, cfg.Log.Shards = "other", c.own })
		other.Set(b.worker)
		r.await("the bridge says what is wrong", func() bool {
			st := r.status(b)
			return st.State == event.StateFailed && strings.Contains(st.LastError, "--log-shards is")
		})
		other.kill()
		list := r.js.StreamNames(r.ctx)
		for name := range list.Name() {
			if name != r.streamOf(a) {
				t.Errorf("%d there, %d wanted: stream %s was made", c.there, c.own, name)
			}
		}
		if err := list.Err(); err != nil {
			t.Fatal(err)
		}
		a.publish(prompt(2, 0, 2))
		r.synced(a)
	}
}
