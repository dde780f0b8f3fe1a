package prefix_test

import (
	"fmt"
	"runtime"
	"syscall"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/blocks"
)

// loop runs f as a benchmark does, and reports the processor time of a call too:
// on a machine that does other things it is the steadier of the two.
func loop(b *testing.B, f func(i int)) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.ReportAllocs()
	i := 0
	before := threadTime()
	for b.Loop() {
		f(i)
		i++
	}
	b.ReportMetric(float64(threadTime()-before)/float64(i), "cpu-ns/op")
}

func threadTime() int64 {
	const thread = 1 // RUSAGE_THREAD
	var u syscall.Rusage
	if err := syscall.Getrusage(thread, &u); err != nil {
		return 0
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

// wideIndex has a prompt whose first 100 blocks 1,024 workers hold, and the rest
// 8 of them.
func wideIndex() (*prefix.Index, blocks.Prompt) {
	x := prefix.New()
	p := blocks.NewPrompt(7, blocks.Length)
	x.Update(1, func(w prefix.Writer) {
		for i := range 1024 {
			h := w.Add(&event.Source{Instance: fmt.Sprint("w", i)})
			w.Show(h, true)
			run := p.Run(0, 100)
			if i%128 == 0 {
				run = p.Run(0, blocks.Length)
			}
			w.Store(h, event.Device, &run)
		}
	})
	return x, p
}

func BenchmarkMatchWide(b *testing.B) {
	x, p := wideIndex()
	var q prefix.Query
	loop(b, func(int) { x.Match(&q, p.Locals) })
}

// sharedIndex has the synthetic load in which 8 of 64 workers hold each prompt.
func sharedIndex() (*prefix.Index, *blocks.Load) {
	load := blocks.NewLoad(blocks.Share)
	x := prefix.New()
	var holders []prefix.Holder
	x.Update(1, func(w prefix.Writer) {
		for i := range blocks.Workers {
			h := w.Add(&event.Source{Instance: fmt.Sprint("w", i)})
			w.Show(h, true)
			holders = append(holders, h)
		}
	})
	load.Each(func(worker int, p *blocks.Prompt, from, end int) {
		x.Update(1, func(w prefix.Writer) {
			run := p.Run(from, end)
			w.Store(holders[worker], event.Device, &run)
		})
	})
	return x, load
}

func BenchmarkMatch1024(b *testing.B) {
	x, load := sharedIndex()
	var q prefix.Query
	loop(b, func(i int) { x.Match(&q, load.Prompts[i%len(load.Prompts)].Locals) })
}

func BenchmarkMatchMiss(b *testing.B) {
	x, _ := sharedIndex()
	var q prefix.Query
	novel := blocks.NewPrompt(1<<20, blocks.Length).Locals
	loop(b, func(i int) { x.Match(&q, novel[i%blocks.Length:]) })
}

func BenchmarkStoreRemoveUnique(b *testing.B) {
	x := prefix.New()
	var h prefix.Holder
	x.Update(1, func(w prefix.Writer) { h = w.Add(&event.Source{}) })
	const ring = 1024
	var prompts []blocks.Prompt
	for n := range uint64(ring) {
		prompts = append(prompts, blocks.NewPrompt(n, blocks.Length))
	}
	loop(b, func(n int) {
		p, old := &prompts[n%ring], &prompts[(n+ring/2)%ring]
		for from := 0; from < blocks.Length; from += blocks.Piece {
			run := p.Run(from, from+blocks.Piece)
			x.Update(1, func(w prefix.Writer) { w.Store(h, event.Device, &run) })
			x.Update(1, func(w prefix.Writer) { w.Remove(h, event.Device, old.Seqs[from:from+blocks.Piece]) })
		}
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/blocks.Length, "ns/block")
}

func BenchmarkFillUnique(b *testing.B) {
	load := blocks.NewLoad(1)
	loop(b, func(int) {
		x := prefix.New()
		var holders []prefix.Holder
		x.Update(1, func(w prefix.Writer) {
			for range blocks.Workers {
				holders = append(holders, w.Add(&event.Source{}))
			}
		})
		load.Each(func(worker int, p *blocks.Prompt, from, end int) {
			x.Update(1, func(w prefix.Writer) {
				run := p.Run(from, end)
				w.Store(holders[worker], event.Device, &run)
			})
		})
	})
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/(blocks.Workers*blocks.PerWorker*blocks.Length), "ns/block")
}
