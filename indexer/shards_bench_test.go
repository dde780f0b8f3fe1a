package indexer

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/hub"
)

// benchWorkers is how many instances share a log.
const benchWorkers = 64

func benchSource(worker int) event.Source {
	return event.Source{Model: "org/model-8b", Group: "default", Instance: fmt.Sprint("engine-", worker)}
}

// BenchmarkShards answers who of 64 workers holds what of a prompt of 1,024 blocks,
// which 8 of them hold, with a log in so many streams.
func BenchmarkShards(b *testing.B) {
	for _, shards := range []int{1, 2, 4} {
		b.Run(fmt.Sprint(shards), func(b *testing.B) {
			cfg := Default()
			cfg.Log.Shards = shards
			x, err := New(nil, nil, cfg, Options{})
			if err != nil {
				b.Fatal(err)
			}
			const length, prompts, holders = 1024, 64, 8
			locals := make([][]uint64, prompts)
			for i := range locals {
				locals[i] = make([]uint64, length)
				for j := range locals[i] {
					locals[i][j] = event.Mix(uint64(i)<<32|uint64(j), 0)
				}
			}
			seqs := make([]uint64, shards)
			for worker := range benchWorkers {
				s := benchSource(worker)
				x.Registered(event.Worker{Source: s, Endpoint: "tcp://127.0.0.1:1", BlockSize: 16})
				at := cfg.Log.Shard(s)
				for i := range locals {
					if (worker+i)%(benchWorkers/holders) != 0 {
						continue
					}
					op := event.AppendStored(nil, event.Device, "", event.Run{Root: true, Locals: locals[i]}, nil)
					seqs[at]++
					x.shards[at].apply(seqs[at], cfg.Log.Subject(s), event.AppendRecord(nil, event.Header{Incarnation: 1, Batches: true, Last: seqs[at]}, 1, op))
				}
			}
			x.CatalogRead()
			for _, s := range x.shards {
				s.now().ready.Store(true)
				s.now().whole.Store(true)
			}
			var q Query
			name := benchSource(0).Partition()
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				a, err := x.Match(&q, name, locals[i%prompts])
				if err != nil || len(a.Holdings) != holders {
					b.Fatal(err, len(a.Holdings))
				}
			}
		})
	}
}

// BenchmarkRead reads a log of 200,000 records of 8 blocks that is in so many
// streams; the NATS server is in this process.
func BenchmarkRead(b *testing.B) {
	const records, blocks = 200_000, 8
	for _, shards := range []int{1, 2, 4} {
		b.Run(fmt.Sprint(shards), func(b *testing.B) {
			server := hub.New(b.TempDir(), 0)
			if err := server.Start(); err != nil {
				b.Fatal(err)
			}
			defer server.Stop()
			nc, js, err := hub.Connect(server)
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			cfg := Default()
			cfg.Log.Shards, cfg.Compact = shards, false
			fillBench(b, js, cfg.Log, records, blocks)
			for b.Loop() {
				x, err := New(nc, js, cfg, Options{})
				if err != nil {
					b.Fatal(err)
				}
				for worker := range benchWorkers {
					x.Registered(event.Worker{Source: benchSource(worker), Endpoint: "tcp://127.0.0.1:1", BlockSize: 16})
				}
				x.CatalogRead()
				ctx, cancel := context.WithCancel(b.Context())
				done := make(chan error)
				go func() { done <- x.Run(ctx) }()
				for x.Ready() != nil {
					time.Sleep(time.Millisecond)
				}
				cancel()
				if err := <-done; err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.N)*records/b.Elapsed().Seconds(), "records/s")
		})
	}
}

// fillBench writes a log.
func fillBench(b *testing.B, js jetstream.JetStream, log event.Log, records, blocks int) {
	for i := range log.Shards {
		if _, err := js.CreateStream(b.Context(), log.Config(i, 1)); err != nil {
			b.Fatal(err)
		}
	}
	locals := make([]uint64, blocks)
	for i := range records {
		for j := range locals {
			locals[j] = event.Mix(uint64(i)<<8|uint64(j), 1)
		}
		n := uint64(i / benchWorkers)
		h := event.Header{Incarnation: 1, Batches: true, First: n, Last: n}
		op := event.AppendStored(nil, event.Device, "", event.Run{Root: true, Locals: locals}, nil)
		_, err := js.PublishMsgAsync(&nats.Msg{Subject: log.Subject(benchSource(i % benchWorkers)), Data: event.AppendRecord(nil, h, 1, op)}, jetstream.WithStallWait(time.Minute))
		if err != nil {
			b.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
}
