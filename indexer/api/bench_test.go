package api

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
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
