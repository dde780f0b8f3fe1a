package indexer

import (
	"fmt"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// BenchmarkShare applies records of 64 blocks that are new each time, and removes
// them, as what is kept and as what another indexer serves.
func BenchmarkShare(b *testing.B) {
	for _, c := range []struct {
		name  string
		share event.Share
	}{
		{"kept", nil},
		{"passed", event.Share{{Partition: event.Partition{Model: "other"}, All: true}}},
	} {
		b.Run(c.name, func(b *testing.B) {
			cfg := Default()
			cfg.Share = c.share
			x, err := New(nil, nil, cfg, Options{})
			if err != nil {
				b.Fatal(err)
			}
			source := event.Source{Model: "org/model-8b", Group: "default", Instance: "engine-12"}
			header := event.Header{Incarnation: 1, Batches: true}
			var records [][]byte
			for i := range uint64(256) {
				locals := make([]uint64, 64)
				names := make([]event.EngineHash, 64)
				for j := range locals {
					locals[j] = event.Mix(i<<8|uint64(j), 0)
					names[j].Bits = locals[j]
				}
				records = append(records, event.AppendRecord(nil, header, 1, event.AppendStored(nil, event.Device, "", event.Run{Root: true, Locals: locals}, names)))
				seqs := hash.AppendSequence(nil, locals)
				records = append(records, event.AppendRecord(nil, header, 1, event.AppendRemoved(nil, event.Device, "", seqs, event.Group{}, names)))
			}
			subject, seq := event.DefaultLog().Subject(source), uint64(0)
			b.ReportAllocs()
			for b.Loop() {
				seq++
				x.shards[0].apply(seq, subject, records[seq%uint64(len(records))])
			}
			if n := len(x.shards[0].sources); n != 1 {
				b.Fatal(fmt.Sprint(n, " sources"))
			}
		})
	}
}
