package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/measure"
)

// replayWatch counts connections to replay sockets.
type replayWatch struct {
	ports map[int]bool
	mu    sync.Mutex
	looks int
	open  int // sum over looks
	most  int
}

// dialled counts connections to ports.
func dialled(ports map[int]bool) (int, error) { return measure.Dialled(ports) }

func (w *replayWatch) look() error {
	n, err := dialled(w.ports)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks++
	w.open += n
	w.most = max(w.most, n)
	return err
}

// settled waits until this process's index holds what the caches hold.
func (r *fleetRun) settled(ctx context.Context) error {
	return until(ctx, "all events are visible", func() (bool, error) {
		truth, err := r.truth(ctx)
		if err != nil || !truth.Settled {
			return false, err
		}
		return r.differing(truth, r.own()) == 0, nil
	})
}

func (r *fleetRun) truth(ctx context.Context) (engines.Truth, error) {
	var t engines.Truth
	err := getJSON(ctx, http.DefaultClient, r.driver.mock+"/digests", &t)
	return t, err
}

// own returns what this process's index holds.
func (r *fleetRun) own() map[event.Source]event.Digests {
	out := map[event.Source]event.Digests{}
	sources, _ := r.index.Sources()
	for i := range sources {
		out[sources[i].Source] = sources[i].Digests
	}
	return out
}

// differing returns how many workers an index does not know rightly.
func (r *fleetRun) differing(truth engines.Truth, have map[event.Source]event.Digests) int {
	n := 0
	for _, w := range truth.Workers {
		if have[event.Source{Model: r.partition.Model, Group: r.partition.Group, Instance: w.Instance, Rank: w.Rank}] != w.Digests {
			n++
		}
	}
	return n
}

// beside begins what happens while requests are measured, and returns a function
// that waits for its end.
func (r *fleetRun) beside(ctx context.Context) (wait func() error) {
	watched, stop := context.WithCancel(ctx)
	var tasks sync.WaitGroup
	var first error
	begin := func(f func() error) {
		tasks.Go(func() {
			if err := f(); err != nil {
				r.mu.Lock()
				defer r.mu.Unlock()
				if first == nil {
					first = err
				}
			}
		})
	}
	finished := make(chan struct{})
	begin(func() error {
		defer close(finished)
		return r.watch(watched)
	})
	if r.b.profiled > 0 {
		for _, p := range []*process{r.bridge, r.nats, r.indexers[0]} {
			begin(func() error { return r.split(ctx, p) })
		}
	}
	if r.b.late > 0 {
		begin(func() error {
			pause := time.NewTimer(r.b.late)
			defer pause.Stop()
			select {
			case <-pause.C:
				return r.joinLate(ctx)
			case <-finished: // the requests are out before that
				return r.joinLate(ctx)
			}
		})
	}
	return func() error {
		stop()
		tasks.Wait()
		return first
	}
}

// watch looks at everything four times a second.
func (r *fleetRun) watch(ctx context.Context) error {
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		for _, p := range []*process{r.bridge, r.nats, r.mock, r.indexers[0]} {
			if _, err := p.look(); err != nil {
				return err
			}
		}
		if err := r.replay.look(); err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// cpuRules say what processor time is spent on.
func cpuRules() []measure.Rule {
	return []measure.Rule{
		{Category: "gc", Functions: []string{"runtime.gcBgMarkWorker", "runtime.bgsweep", "runtime.bgscavenge", "runtime.gcAssist"}},
		{Category: "zmq", Functions: []string{"kvmesh/bridge/zmtp."}},
		{Category: "decode", Functions: []string{"kvmesh/bridge/engine."}},
		{Category: "normalise", Functions: []string{"kvmesh/bridge/residency.", "kvmesh/indexer/hash."}},
		{Category: "index", Functions: []string{"kvmesh/indexer/prefix.", "kvmesh/indexer.(*Indexer)", "kvmesh/indexer/event."}},
		{Category: "query", Functions: []string{"kvmesh/indexer/api."}},
		{Category: "log", Functions: []string{"nats-io/", "kvmesh/bridge.(*lane)", "kvmesh/bridge.(*publication)"}},
		{Category: "order", Functions: []string{"kvmesh/bridge."}},
		{Category: "http", Functions: []string{"net/http."}},
		{Category: "scheduler", Functions: []string{"runtime."}},
	}
}

// split notes what share of a process's time goes where.
func (r *fleetRun) split(ctx context.Context, p *process) error {
	data, err := p.profile(ctx, r.b.profiled)
	if err == nil {
		err = r.keep(p.key()+".cpu.prof", data)
	}
	var profile *measure.Profile
	if err == nil {
		profile, err = measure.Parse(data)
	}
	if err != nil {
		return fmt.Errorf("profile of %s: %w", p.role, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for category, share := range profile.Split(cpuRules()) {
		if category == "" {
			category = "other"
		}
		r.f["share_"+p.key()+"_"+category] = share
	}
	return nil
}

// keep keeps a profile, if that is wanted.
func (r *fleetRun) keep(name string, data []byte) error {
	if r.b.profiles == "" {
		return nil
	}
	return os.WriteFile(filepath.Join(r.b.profiles, name), data, 0o644)
}

// keepMemory keeps profiles of the memory of the service's processes.
func (r *fleetRun) keepMemory(ctx context.Context) error {
	if r.b.profiles == "" {
		return nil
	}
	for _, p := range []*process{r.bridge, r.nats, r.indexers[0]} {
		data, err := p.profile(ctx, 0)
		if err == nil {
			err = r.keep(p.key()+".heap.prof", data)
		}
		if err != nil {
			return fmt.Errorf("memory of %s: %w", p.role, err)
		}
	}
	return nil
}

// key is the role in the name of a figure.
func (p *process) key() string {
	switch p.role {
	case "NATS":
		return "log"
	case "dialling replica":
		return "dial"
	case "mock engines":
		return "engines"
	}
	return p.role
}

// account turns what was measured into figures.
func (r *fleetRun) account(ctx context.Context, sums requestSums, before engines.Totals) error {
	if sums.failed > 0 {
		return fmt.Errorf("%d of %d requests failed, such as: %w", sums.failed, sums.requests+sums.failed, sums.lastErr)
	}
	n := float64(sums.requests)
	f := r.f
	f["requests"], f["failed"] = n, float64(sums.failed)
	f["requests_s"] = n / f["seconds"]
	f["hit_predicted"] = float64(sums.predicted) / float64(sums.prompt)
	f["hit_engine"] = float64(sums.cached) / float64(sums.prompt)
	f["hit_difference"] = f["hit_predicted"] - f["hit_engine"]
	f["prompt_tokens"] = float64(sums.prompt) / n
	var after engines.Totals
	if err := getJSON(ctx, http.DefaultClient, r.driver.mock+"/totals", &after); err != nil {
		return err
	}
	f["batches_per_request"] = float64(after.Batches-before.Batches) / n
	f["events_per_request"] = float64(after.Events-before.Events) / n
	f["pub_dropped"] = float64(after.Dropped)

	perRequest := func(all []*process) (float64, error) {
		sum := 0.0
		for _, p := range all {
			spent, err := p.spent()
			if err != nil {
				return 0, err
			}
			sum += spent.Seconds() * 1e3 / n
		}
		return sum / float64(max(1, len(all))), nil
	}
	for _, p := range []struct {
		name string
		all  []*process
	}{
		{"ingest_cpu_ms_per_request", []*process{r.bridge}}, {"log_cpu_ms_per_request", []*process{r.nats}},
		{"indexer_cpu_ms_per_request", r.indexers}, {"dial_cpu_ms_per_request", r.dialers}, {"engines_cpu_ms_per_request", []*process{r.mock}},
	} {
		if len(p.all) == 0 {
			continue
		}
		var err error
		if f[p.name], err = perRequest(p.all); err != nil {
			return err
		}
	}
	r.compare()
	lags, missing := r.seen.take()
	f["lag_p50_ms"] = float64(percentile(lags, 50)) / 1e6
	f["lag_p99_ms"] = float64(percentile(lags, 99)) / 1e6
	f["lag_max_ms"] = float64(percentile(lags, 100)) / 1e6
	f["lag_samples"], f["lag_missing"] = float64(len(lags)), float64(missing)
	return nil
}

// compare says what replicas cost that dial, and that read the log.
func (r *fleetRun) compare() {
	f, n := r.f, float64(len(r.dialers))
	if n == 0 {
		return
	}
	f["replicas"] = n
	f["replica_cpu_ratio"] = f["indexer_cpu_ms_per_request"] / f["dial_cpu_ms_per_request"]
	f["all_dial_cpu_ms_per_request"] = n * f["dial_cpu_ms_per_request"]
	f["all_log_cpu_ms_per_request"] = f["ingest_cpu_ms_per_request"] + f["log_cpu_ms_per_request"] + n*f["indexer_cpu_ms_per_request"]
	f["all_dial_connections"] = n * float64(r.b.workers)
	f["all_log_connections"] = float64(r.b.workers)
}

// machine says how large the processes were.
func (r *fleetRun) machine(ctx context.Context) error {
	now, err := r.bridge.look()
	if err != nil {
		return err
	}
	f := r.f
	b := r.bridge.most
	f["os_threads"] = float64(b.Threads)
	f["rss_mb"] = float64(b.RSS) / 1e6
	f["sockets"] = float64(b.Sockets)
	f["fds"] = float64(now.FDs)
	f["indexer_os_threads"] = float64(r.indexers[0].most.Threads)
	f["indexer_rss_mb"] = float64(r.indexers[0].most.RSS) / 1e6
	f["log_rss_mb"] = float64(r.nats.most.RSS) / 1e6
	f["engines_rss_mb"] = float64(r.mock.most.RSS) / 1e6
	if err := r.replay.look(); err != nil {
		return err
	}
	r.replay.mu.Lock()
	defer r.replay.mu.Unlock()
	open, err := dialled(r.replay.ports)
	if err != nil {
		return err
	}
	f["replay_sockets"] = float64(open)
	f["replay_sockets_max"] = float64(r.replay.most)
	f["replay_sockets_mean"] = float64(r.replay.open) / float64(r.replay.looks)
	blocks := uint64(0)
	for _, d := range r.own() {
		for t := range d {
			blocks += d[t].Count
		}
	}
	f["resident_blocks"] = float64(blocks)
	taken, err := r.bridge.metric(ctx, "kvmesh_bridge_blocks_memory_bytes")
	if err != nil {
		return err
	}
	f["blocks_mb"], f["rss_beyond_mb"] = taken/1e6, f["rss_mb"]-taken/1e6
	f["block_bytes"] = taken / float64(max(1, blocks))
	// What is there beyond the blocks: with every engine connected, and none held.
	f["rss_beyond_idle_bytes_per_block"] = (f["rss_mb"] - f["rss_idle_mb"]) * 1e6 / float64(max(1, blocks))
	maps.DeleteFunc(f, func(_ string, v float64) bool { return v != v })
	return nil
}
