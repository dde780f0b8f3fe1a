package api

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// benchBody returns the body of a query with n tokens.
func benchBody(n int, separator string) []byte {
	rng := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	b.WriteString(`{"model_name":"bench","token_ids":[`)
	for i := range n {
		if i > 0 {
			b.WriteString(separator)
		}
		data, _ := json.Marshal(rng.Uint32N(128_000))
		b.Write(data)
	}
	b.WriteString(`]}`)
	return []byte(b.String())
}

func BenchmarkParse16k(b *testing.B) {
	for name, separator := range map[string]string{"compact": ",", "spaced": ", ", "lines": ",\n  "} {
		b.Run(name, func(b *testing.B) {
			w := &work{content: tokenIDs, body: benchBody(16_384, separator)}
			b.SetBytes(int64(len(w.body)))
			b.ReportAllocs()
			for b.Loop() {
				w.json = scanner{}
				w.tokens = w.tokens[:0]
				if err := w.readCall(mediaJSON, ""); err != nil || len(w.outer.tokens) != 16_384 {
					b.Fatal(err, len(w.outer.tokens))
				}
			}
		})
	}
}

func BenchmarkReply(b *testing.B) {
	for _, c := range []struct{ instances, top int }{{8, 0}, {1024, 0}, {1024, 8}} {
		b.Run(fmt.Sprintf("%d/top=%d", c.instances, c.top), func(b *testing.B) {
			a := indexer.Answer{Position: event.Position{LogSeq: 1 << 30}, BlockSize: 16}
			for i := range c.instances {
				s := &event.Source{Instance: fmt.Sprintf("worker-%04d", i*7919%c.instances)}
				a.Holdings = append(a.Holdings, indexer.Holding{Source: s, Ends: [event.Tiers]uint32{1024, 1024, 1024, 1024}})
			}
			w := newWork()
			b.ReportAllocs()
			for b.Loop() {
				w.reply = w.reply[:0]
				w.appendAnswer(&a, uint64(c.top))
			}
		})
	}
}
