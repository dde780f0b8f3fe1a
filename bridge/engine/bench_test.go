package engine

import (
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
	"github.com/vmihailenco/msgpack/v5"
)

// stored64x16 returns payloads of one store each, 64 blocks of 16 tokens below
// 128,000. There are many, because a branch predictor learns a single one by
// heart and then reports half the time.
func stored64x16(form string) [][]byte {
	const blocks, size = 64, 16
	rng := rand.New(rand.NewPCG(1, 2))
	hash := func(b []byte) []byte {
		if form != "bytes" {
			return mpack.AppendUint(b, rng.Uint64())
		}
		b = mpack.AppendBinHead(b, 32)
		for range 32 {
			b = append(b, byte(rng.Uint32()))
		}
		return b
	}
	out := make([][]byte, 256)
	for i := range out {
		b := mpack.AppendFloat64(mpack.AppendArray(nil, 3), 1700000000.5)
		b = mpack.AppendArray(b, 1)
		keyed := func(name string) {}
		if form == "array" {
			b = mpack.AppendStr(mpack.AppendArray(b, 12), "BlockStored")
		} else {
			keyed = func(name string) { b = mpack.AppendStr(b, name) }
			b = append(b, 0x80|11)
			b = mpack.AppendStr(mpack.AppendStr(b, "type"), "BlockStored")
		}
		keyed("block_hashes")
		b = mpack.AppendArray(b, blocks)
		for range blocks {
			b = hash(b)
		}
		keyed("parent_block_hash")
		b = hash(b)
		keyed("token_ids")
		b = mpack.AppendArray(b, blocks*size)
		for range blocks * size {
			b = mpack.AppendUint(b, uint64(rng.Uint32N(128000)))
		}
		keyed("block_size")
		b = mpack.AppendUint(b, size)
		keyed("lora_id")
		b = mpack.AppendNil(b)
		keyed("medium")
		b = mpack.AppendStr(b, "GPU")
		keyed("lora_name")
		b = mpack.AppendNil(b)
		keyed("extra_keys")
		b = mpack.AppendArray(b, blocks)
		for range blocks {
			b = mpack.AppendNil(b)
		}
		keyed("group_idx")
		b = mpack.AppendUint(b, 0)
		keyed("kv_cache_spec_kind")
		b = mpack.AppendStr(b, "full_attention")
		if form == "array" {
			b = mpack.AppendNil(b)
		}
		out[i] = mpack.AppendUint(b, 0)
	}
	return out
}

// BenchmarkDecodeStored64x16 compares Decode with decoding the same payloads
// into any. Compare within one run.
func BenchmarkDecodeStored64x16(b *testing.B) {
	for _, form := range []string{"array", "map", "bytes"} {
		payloads := stored64x16(form)
		bytes := 0
		for _, p := range payloads {
			bytes += len(p)
		}
		b.Run("form="+form+"/to=events", func(b *testing.B) {
			d, batch := NewDecoder(Profile{}, media(b, nil)), new(Batch)
			for _, p := range payloads { // grows the batch
				if err := d.Decode(p, batch); err != nil {
					b.Fatal(err)
				}
			}
			b.SetBytes(int64(bytes / len(payloads)))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if err := d.Decode(payloads[i%len(payloads)], batch); err != nil || len(batch.Events) != 1 {
					b.Fatal(err, batch.Dropped)
				}
			}
		})
		b.Run("form="+form+"/to=any", func(b *testing.B) {
			b.SetBytes(int64(bytes / len(payloads)))
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				var v any
				if err := msgpack.Unmarshal(payloads[i%len(payloads)], &v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDecodeRemoved is what an engine under memory pressure sends: a
// batch of many removals of one block each.
func BenchmarkDecodeRemoved(b *testing.B) {
	const events = 256
	payload := mpack.AppendArray(mpack.AppendFloat64(mpack.AppendArray(nil, 3), 1), events)
	for i := range events {
		payload = append(payload, 0x84)
		payload = mpack.AppendStr(mpack.AppendStr(payload, "type"), "BlockRemoved")
		payload = mpack.AppendArray(mpack.AppendStr(payload, "block_hashes"), 1)
		payload = mpack.AppendUint(payload, 0x9e3779b97f4a7c15*uint64(i+1))
		payload = mpack.AppendStr(mpack.AppendStr(payload, "medium"), "GPU")
		payload = mpack.AppendUint(mpack.AppendStr(payload, "group_idx"), 0)
	}
	payload = mpack.AppendUint(payload, 0)
	d, batch := NewDecoder(Profile{}, media(b, nil)), new(Batch)
	if err := d.Decode(payload, batch); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Decode(payload, batch); err != nil || len(batch.Events) != events {
			b.Fatal(err, batch.Dropped)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/events, "ns/event")
}

func media(tb testing.TB, overrides map[string]string) *Media {
	tb.Helper()
	m, err := NewMedia(overrides)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}
