package residency_test

import (
	"testing"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// BenchmarkStored64x16 decodes a batch with a store of 64 blocks of 16 tokens,
// hashes the blocks, and turns the store into operations of the log, as a bridge
// does for every batch. The State holds 16,384 other blocks; when as many have
// been added they go again, which is not counted.
func BenchmarkStored64x16(b *testing.B) {
	const perBatch, resident, batches = 64, 16384, 512
	var stores, removes [batches][]byte
	tokens := make([]int64, perBatch*16)
	for n := range batches {
		hashes := make([]model.Hash, perBatch)
		for i := range hashes {
			hashes[i] = model.Int(event.Mix(uint64(n*perBatch+i), 1) | 1<<63)
		}
		for i := range tokens {
			tokens[i] = int64(event.Mix(uint64(n*len(tokens)+i), 2) % 128000)
		}
		var err error
		if stores[n], err = mock.VLLMMap.Encode(mock.Batch{TS: 1.5, BlockSize: 16, Events: []model.Event{{Hashes: hashes, Tokens: tokens}}}); err != nil {
			b.Fatal(err)
		}
		if removes[n], err = mock.VLLMMap.Encode(mock.Batch{TS: 1.5, Events: []model.Event{{Op: model.Remove, Hashes: hashes}}}); err != nil {
			b.Fatal(err)
		}
	}
	media, _ := engine.NewMedia(nil)
	profile, _ := engine.ProfileOf("vllm")
	dec := engine.NewDecoder(profile, media)
	state := residency.New(residency.Config{BlockSize: 16, Clears: event.Device.Mask(), Limits: residency.DefaultLimits()})
	var batch engine.Batch
	var out residency.Ops
	apply := func(payload []byte) {
		out.Reset()
		if err := dec.Decode(payload, &batch); err != nil {
			b.Fatal(err)
		}
		for i := range batch.Events {
			if reason, _ := state.Apply(&batch.Events[i], &out); reason != "" {
				b.Fatal(reason)
			}
		}
	}
	for n := range resident / perBatch {
		apply(stores[n])
	}
	b.SetBytes(int64(len(stores[0])))
	b.ReportAllocs()
	const half = resident / perBatch
	for n := 0; b.Loop(); n++ {
		if n%half == 0 && n > 0 { // stopping the timer empties the caches, so it is done seldom
			b.StopTimer()
			for i := range half {
				apply(removes[half+i])
			}
			b.StartTimer()
		}
		apply(stores[half+n%half])
	}
}
