package main

import (
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/blocks"
)

func benchIndexCommand() *cobra.Command {
	var path string
	var soak time.Duration
	var prof profiler
	cmd := &cobra.Command{
		Use:   "index",
		Short: "The index alone: queries, stores, removals, memory, each also of the naive model",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := prof.start(); err != nil {
				return err
			}
			b := &indexBench{figures: figures{"mismatches": 0}, out: cmd.OutOrStdout()}
			if soak > 0 {
				if err := b.soak(soak); err != nil {
					return err
				}
			} else {
				b.run()
			}
			if err := prof.stop(); err != nil {
				return err
			}
			if err := b.figures.print(b.out, path); err != nil {
				return err
			}
			if n := b.figures["mismatches"]; n > 0 {
				return fmt.Errorf("%g answers are not the model's", n)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&path, "json", "", "file to write the figures to")
	cmd.Flags().DurationVar(&soak, "soak", 0, "churn at constant size for so long instead, and watch the memory")
	prof.add(cmd.Flags())
	return cmd
}

// indexBench measures a prefix.Index and, with the same traffic, the naive model.
type indexBench struct {
	figures figures
	out     io.Writer
	logSeq  uint64
}

func (b *indexBench) run() {
	b.hashing()
	b.sharedLoad()
	b.wide()
	b.uniqueLoad()
}

// pair notes a figure of the model beside ours.
func (b *indexBench) pair(name string, ours, naive float64) {
	b.figures[name] = ours
	b.figures["naive_"+name] = naive
}

// members adds workers to an index.
func members(x *prefix.Index, n int) []prefix.Holder {
	var out []prefix.Holder
	x.Update(0, func(w prefix.Writer) {
		for i := range n {
			h := w.Add(&event.Source{Model: "bench", Group: "default", Instance: fmt.Sprint("w", i)})
			w.Show(h, true)
			out = append(out, h)
		}
	})
	return out
}

// update applies one event.
func (b *indexBench) update(x *prefix.Index, f func(prefix.Writer)) {
	b.logSeq++
	x.Update(b.logSeq, f)
}

// perOp runs f often and returns the median of several rounds, in nanoseconds a
// call.
func perOp(f func(i int)) float64 {
	const rounds = 7
	var found []float64
	n := 1
	for len(found) < rounds {
		start := time.Now()
		for i := range n {
			f(i)
		}
		took := time.Since(start)
		if took < 40*time.Millisecond {
			n *= 2
			continue
		}
		found = append(found, float64(took.Nanoseconds())/float64(n))
	}
	return percentile(found, 50)
}

// heap returns the bytes that are in use.
func heap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

func (b *indexBench) hashing() {
	tokens := blocks.PromptTokens(1, blocks.Length)
	locals, seqs := make([]uint64, 0, blocks.Length), make([]uint64, 0, blocks.Length)
	b.figures["hash_16k_ns"] = perOp(func(int) {
		locals = hash.AppendLocals(locals[:0], tokens, blocks.BlockSize, 0, hash.Seed)
		seqs = hash.AppendSequence(seqs[:0], locals)
	})
}

// rate is blocks and the time that they took.
type rate struct {
	blocks int
	took   time.Duration
}

func (r *rate) add(blocks int, since time.Time) {
	r.blocks += blocks
	r.took += time.Since(since)
}

// perSecond returns millions of blocks a second.
func (r *rate) perSecond() float64 { return float64(r.blocks) / r.took.Seconds() / 1e6 }

// fill applies a load, and returns how fast blocks went that were new, and those
// that another worker had already.
func (b *indexBench) fill(load *blocks.Load, apply func(worker int, run *event.Run)) (unique, shared rate) {
	seen := map[*blocks.Prompt]int{}
	load.Each(func(worker int, p *blocks.Prompt, from, end int) {
		at := &shared
		if seen[p] < end {
			seen[p] = end
			at = &unique
		}
		run := p.Run(from, end)
		start := time.Now()
		apply(worker, &run)
		at.add(end-from, start)
	})
	return unique, shared
}

// entries is how many (worker, block) pairs a load is.
const entries = blocks.Workers * blocks.PerWorker * blocks.Length

// sharedLoad measures with the load in which 8 workers hold each prompt.
func (b *indexBench) sharedLoad() {
	load := blocks.NewLoad(blocks.Share)
	before := heap()
	x := prefix.New()
	holders := members(x, blocks.Workers)
	_, shared := b.fill(load, func(worker int, run *event.Run) {
		b.update(x, func(w prefix.Writer) { w.Store(holders[worker], event.Device, run) })
	})
	for x.Sweep() {
		continue
	}
	b.figures["heap_shared8_b"] = (heap() - before) / entries
	before = heap()
	naive := blocks.NewNaive()
	_, slow := b.fill(load, func(worker int, run *event.Run) { naive.Store(prefix.Holder(worker), event.Device, run) })
	b.figures["naive_heap_shared8_b"] = (heap() - before) / entries
	b.pair("store_shared_mblk_s", shared.perSecond(), slow.perSecond())
	b.queries(x, naive, load)
	b.busy(x, holders, load)
}

// queries measures queries for prompts that 8 of 64 workers hold, and that
// nobody does.
func (b *indexBench) queries(x *prefix.Index, naive *blocks.Naive, load *blocks.Load) {
	var q prefix.Query
	for i := range load.Prompts {
		b.compare(x, &q, naive, load.Prompts[i].Locals)
	}
	full := func(i int) { x.Match(&q, load.Prompts[i%len(load.Prompts)].Locals) }
	b.pair("query_1024_ns", perOp(full), perOp(func(i int) { naive.Match(load.Prompts[i%len(load.Prompts)].Locals) }))
	b.figures["query_allocs"] = testing.AllocsPerRun(1000, func() { full(3) })
	var novel [][]uint64
	for n := range len(load.Prompts) {
		novel = append(novel, blocks.NewPrompt(uint64(1<<20+n), 16).Locals)
	}
	b.pair("query_miss_ns", perOp(func(i int) { x.Match(&q, novel[i%len(novel)]) }), perOp(func(i int) { naive.Match(novel[i%len(novel)]) }))
}

// compare counts an answer that is not the model's.
func (b *indexBench) compare(x *prefix.Index, q *prefix.Query, naive *blocks.Naive, locals []uint64) {
	matches, _ := x.Match(q, locals)
	have := map[prefix.Holder][event.Tiers]uint32{}
	for _, m := range matches {
		have[m.Holder] = m.Ends
	}
	if len(have) != len(matches) || !maps.Equal(have, naive.Match(locals)) {
		b.figures["mismatches"]++
	}
	b.figures["compared"]++
}

// wide measures a query for a prompt whose head 1,024 workers hold, and the rest
// 8 of them.
func (b *indexBench) wide() {
	const workers, head = 1024, 100
	x, naive := prefix.New(), blocks.NewNaive()
	p := blocks.NewPrompt(7, blocks.Length)
	for i, h := range members(x, workers) {
		end := head
		if i%(workers/8) == 0 {
			end = blocks.Length
		}
		for from := 0; from < end; from += blocks.Piece {
			run := p.Run(from, min(end, from+blocks.Piece))
			b.update(x, func(w prefix.Writer) { w.Store(h, event.Device, &run) })
			naive.Store(h, event.Device, &run)
		}
	}
	var q prefix.Query
	b.compare(x, &q, naive, p.Locals)
	b.pair("query_wide_ns", perOp(func(int) { x.Match(&q, p.Locals) }), perOp(func(int) { naive.Match(p.Locals) }))
}

// clear measures how long it takes until a worker has nothing and its memory is
// given back, and the longest query meanwhile.
func (b *indexBench) clear(x *prefix.Index, holders []prefix.Holder, load *blocks.Load) {
	var took, longest []float64
	for range 9 {
		stop, done := make(chan struct{}), make(chan time.Duration)
		go func() {
			var q prefix.Query
			worst := time.Duration(0)
			for i := 0; ; i++ {
				select {
				case <-stop:
					done <- worst
					return
				default:
				}
				start := time.Now()
				x.Match(&q, load.Prompts[i%len(load.Prompts)].Locals)
				worst = max(worst, time.Since(start))
			}
		}()
		time.Sleep(time.Millisecond)
		const worker = blocks.Workers - 1
		start := time.Now()
		b.update(x, func(w prefix.Writer) {
			w.Drop(holders[worker])
			holders[worker] = w.Add(&event.Source{Instance: "again"})
			w.Show(holders[worker], true)
		})
		for x.Sweep() {
			continue
		}
		took = append(took, float64(time.Since(start).Nanoseconds())/1e6)
		close(stop)
		longest = append(longest, float64((<-done).Nanoseconds())/1e3)
		for i := range blocks.PerWorker {
			run := load.Prompt(worker, i).Run(0, blocks.Length)
			b.update(x, func(w prefix.Writer) { w.Store(holders[worker], event.Device, &run) })
		}
	}
	b.figures["clear_ms"] = percentile(took, 50)
	b.figures["clear_query_max_us"] = percentile(longest, 50)
}

// busy measures queries while nothing is written, and while blocks come and go at
// half of the rate at which they could.
func (b *indexBench) busy(x *prefix.Index, holders []prefix.Holder, load *blocks.Load) {
	const ring, pieces = 1024, blocks.Length / blocks.Piece
	var fresh []blocks.Prompt
	for n := range ring {
		fresh = append(fresh, blocks.NewPrompt(uint64(1<<24+n), blocks.Length))
	}
	n := 0
	churn := func() { // a piece is stored, and an older one removed
		p, from := &fresh[n/pieces%ring], n%pieces*blocks.Piece
		old := (n + ring*pieces*3/4) % (ring * pieces) // stored a quarter of the ring ago
		gone := &fresh[old/pieces]
		h := holders[n/pieces%ring%len(holders)]
		run := p.Run(from, from+blocks.Piece)
		b.update(x, func(w prefix.Writer) {
			w.Store(h, event.Device, &run)
			at := old % pieces * blocks.Piece
			w.Remove(holders[old/pieces%len(holders)], event.Device, gone.Seqs[at:at+blocks.Piece])
		})
		n++
	}
	start := time.Now()
	for time.Since(start) < time.Second {
		churn()
	}
	each := time.Since(start) / time.Duration(n) // at the most
	idle := b.latency(x, load, 2*time.Second)
	var stop atomic.Bool
	var writer sync.WaitGroup
	applied, began := 0, time.Now()
	writer.Go(func() {
		for !stop.Load() {
			if due := int(time.Since(began) / (2 * each)); applied >= due {
				time.Sleep(50 * time.Microsecond)
			} else {
				churn()
				applied++
			}
		}
	})
	busy := b.latency(x, load, 2*time.Second)
	stop.Store(true)
	writer.Wait()
	b.figures["query_p99_idle_ns"], b.figures["query_p99_busy_ns"] = idle, busy
	b.figures["busy_mblk_s"] = float64(2*blocks.Piece*applied) / time.Since(began).Seconds() / 1e6
	b.figures["busy_max_mblk_s"] = 2 * blocks.Piece / each.Seconds() / 1e6
}

// latency returns the 99th percentile of queries made one after the other.
func (b *indexBench) latency(x *prefix.Index, load *blocks.Load, d time.Duration) float64 {
	var q prefix.Query
	took := make([]int64, 0, 1<<22)
	for start := time.Now(); time.Since(start) < d && len(took) < cap(took); {
		before := time.Now()
		x.Match(&q, load.Prompts[len(took)%len(load.Prompts)].Locals)
		took = append(took, time.Since(before).Nanoseconds())
	}
	return float64(percentile(took, 99))
}

// uniqueLoad measures with the load in which every block has one holder.
func (b *indexBench) uniqueLoad() {
	load := blocks.NewLoad(1)
	before := heap()
	x := prefix.New()
	holders := members(x, blocks.Workers)
	stored, _ := b.fill(load, func(worker int, run *event.Run) {
		b.update(x, func(w prefix.Writer) { w.Store(holders[worker], event.Device, run) })
	})
	for x.Sweep() {
		continue
	}
	b.figures["heap_unique_b"] = (heap() - before) / entries
	before = heap()
	naive := blocks.NewNaive()
	slow, _ := b.fill(load, func(worker int, run *event.Run) { naive.Store(prefix.Holder(worker), event.Device, run) })
	b.figures["naive_heap_unique_b"] = (heap() - before) / entries
	b.pair("store_unique_mblk_s", stored.perSecond(), slow.perSecond())
	var q prefix.Query
	for i := range load.Prompts {
		b.compare(x, &q, naive, load.Prompts[i].Locals)
	}
	b.clear(x, holders, load)
	var ours, theirs rate
	load.Each(func(worker int, p *blocks.Prompt, from, end int) {
		from, end = blocks.Length-end, blocks.Length-from // the ends go first, as engines evict
		seqs := slices.Clone(p.Seqs[from:end])
		slices.Reverse(seqs)
		start := time.Now()
		b.update(x, func(w prefix.Writer) { w.Remove(holders[worker], event.Device, seqs) })
		ours.add(len(seqs), start)
		start = time.Now()
		naive.Remove(prefix.Holder(worker), event.Device, seqs)
		theirs.add(len(seqs), start)
	})
	start := time.Now()
	s := x.Stats() // to completion: what is still to be swept counts
	ours.add(0, start)
	b.pair("remove_unique_mblk_s", ours.perSecond(), theirs.perSecond())
	if s.Blocks != 0 || s.Entries != 0 || naive.Len() != 0 {
		b.figures["mismatches"]++
	}
}
