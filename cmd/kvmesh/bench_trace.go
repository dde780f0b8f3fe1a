package main

import (
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/blocks"
	"github.com/kvmesh/kvmesh/integration/trace"
)

// traceBench is how a trace is replayed.
type traceBench struct {
	trace, route      string
	workers, size     int
	duplicate, repeat int
	naive             bool
}

func benchTraceCommand() *cobra.Command {
	var t traceBench
	var path string
	var prof profiler
	cmd := &cobra.Command{
		Use:   "trace",
		Short: "The index under a request trace: queries, and what simulated workers store and evict",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := t.run(&prof)
			if err != nil {
				return err
			}
			if err := f.print(cmd.OutOrStdout(), path); err != nil {
				return err
			}
			if n := f["mismatches"]; n > 0 {
				return fmt.Errorf("%g answers or blocks are not the model's", n)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&t.trace, "trace", "", "file with the requests, in the format of Mooncake's traces")
	flags.StringVar(&t.route, "route", "match", "where requests go: match (most blocks matched) or rr (round robin)")
	flags.IntVar(&t.workers, "workers", 128, "simulated workers")
	flags.IntVar(&t.size, "worker-blocks", 16384, "blocks that a worker keeps")
	flags.IntVar(&t.duplicate, "duplicate", 1, "disjoint copies of the trace, interleaved")
	flags.IntVar(&t.repeat, "repeat", 3, "replay so often into an empty index, and report the median")
	flags.BoolVar(&t.naive, "naive", true, "replay into the naive model, too")
	flags.StringVar(&path, "json", "", "file to write the figures to")
	_ = cmd.MarkFlagRequired("trace")
	prof.add(flags)
	return cmd
}

func (t *traceBench) run(prof *profiler) (figures, error) {
	prompts, err := t.prompts()
	if err != nil {
		return nil, err
	}
	fleet := blocks.NewFleet(t.workers, t.size)
	ops := blocks.Replay(fleet, prompts, t.route == "rr")
	total := 0
	for i := range ops {
		total += ops[i].Blocks()
	}
	f := figures{"mismatches": 0, "requests": float64(len(ops)), "block_ops": float64(total)}
	var took []float64
	if err := prof.start(); err != nil {
		return nil, err
	}
	for range t.repeat {
		x := prefix.New()
		holders := members(x, t.workers)
		start := time.Now()
		f["mismatches"] += float64(replay(x, holders, ops))
		for x.Sweep() {
			continue
		}
		took = append(took, time.Since(start).Seconds())
		st := x.Stats()
		if st.Blocks != fleet.Len() || st.Entries != fleet.Entries() {
			f["mismatches"]++
		}
		f["mismatches"] += float64(fleet.Differences(x, holders))
		f["index_mb"] = float64(st.Bytes) / 1e6
	}
	if err := prof.stop(); err != nil {
		return nil, err
	}
	seconds := percentile(took, 50)
	f["block_ops_s"] = float64(total) / seconds
	f["ops_s"] = float64(len(ops)) / seconds
	if t.naive {
		model := blocks.NewNaive()
		start := time.Now()
		for i := range ops {
			model.Match(ops[i].Prompt.Locals)
			ops[i].Apply(model, prefix.Holder(ops[i].Worker))
		}
		f["naive_block_ops_s"] = float64(total) / time.Since(start).Seconds()
	}
	return f, nil
}

// replay asks and applies everything, and returns how many answers were wrong.
func replay(x *prefix.Index, holders []prefix.Holder, ops []blocks.Op) (wrong int) {
	var q prefix.Query
	for i := range ops {
		o := &ops[i]
		matches, _ := x.Match(&q, o.Prompt.Locals)
		got := 0
		for j := range matches {
			if matches[j].Holder == holders[o.Worker] {
				got = int(matches[j].Longest())
			}
		}
		if got != o.Want {
			wrong++
		}
		x.Update(uint64(i+1), func(w prefix.Writer) { o.Apply(w, holders[o.Worker]) })
	}
	return wrong
}

func (t *traceBench) prompts() ([]blocks.Prompt, error) {
	if t.route != "match" && t.route != "rr" {
		return nil, fmt.Errorf("--route is %q, want match or rr", t.route)
	}
	file, err := os.Open(t.trace)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	requests, err := trace.Read(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", t.trace, err)
	}
	ids := trace.IDs(requests)
	var prompts []blocks.Prompt
	for i := range requests {
		for copy := range t.duplicate {
			r := requests[i].Shifted(uint64(copy) * ids)
			if locals := r.AppendLocals(nil, blocks.BlockSize); len(locals) > 0 && len(locals) <= t.size {
				prompts = append(prompts, blocks.Hashed(locals))
			}
		}
	}
	return prompts, nil
}
