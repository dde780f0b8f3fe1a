package event

import (
	"encoding/json"
	"testing"
)

func TestPositions(t *testing.T) {
	one, three := PositionOf([]uint64{7}), PositionOf([]uint64{7, 0, 9})
	for _, c := range []struct {
		p    Position
		json string
		of   map[int]bool // numbers of shards → it is a position of such a log
	}{
		{Position{}, `{"log_seq":0}`, map[int]bool{1: true, 3: true}},
		{one, `{"log_seq":7}`, map[int]bool{1: true, 2: false, 3: false}},
		{three, `{"log_seqs":[7,0,9]}`, map[int]bool{1: false, 2: false, 3: true, 4: false}},
		{Position{LogSeq: 7, LogSeqs: []uint64{7, 0, 9}}, `{"log_seqs":[7,0,9]}`, map[int]bool{1: false, 3: false}},
	} {
		if got := string(append(c.p.AppendJSON([]byte{'{'}), '}')); got != c.json {
			t.Errorf("%v: %s, want %s", c.p, got, c.json)
		}
		data, err := json.Marshal(c.p.JSON())
		if err != nil || string(data) != c.json {
			t.Errorf("%v: %s, %v, want %s", c.p, data, err, c.json)
		}
		var back PositionJSON
		if err := json.Unmarshal(data, &back); err != nil || string(back.Position().AppendJSON(nil)) != string(c.p.AppendJSON(nil)) {
			t.Errorf("%s: %v, %v", data, back.Position(), err)
		}
		for shards, want := range c.of {
			if err := c.p.Of(shards); (err == nil) != want {
				t.Errorf("%v of %d shards: %v", c.p, shards, err)
			}
		}
	}
	for shard, want := range []uint64{7, 0, 9, 0} {
		if got := three.Seq(shard); got != want {
			t.Errorf("shard %d of %v: %d, want %d", shard, three, got, want)
		}
	}
	if one.Seq(0) != 7 || !one.Equal(Position{LogSeq: 7}) || one.Equal(three) || three.Equal(PositionOf([]uint64{7, 0, 8})) || !three.Equal(PositionOf([]uint64{7, 0, 9})) {
		t.Error("one, and three")
	}
}
