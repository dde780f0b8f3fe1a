package residency_test

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

var (
	seeds = flag.Int("seeds", 300, "how many random runs")
	first = flag.Uint64("seed", 1, "the first of them")
)

const blockSize = 4

// run is one source under random traffic: the State, what a reader of its
// operations holds, and a State restored from them.
type run struct {
	t       *testing.T
	rng     *rand.Rand
	dialect mock.Dialect
	traffic *model.Traffic
	media   *engine.Media
	profile engine.Profile
	lossy   bool          // the State misses some batches
	owned   bool          // the worker has a cache owner
	truth   *model.Source // what the batches that it has mean

	state    *residency.State
	out      residency.Ops // of the State, not taken yet
	reader   reader
	restored *residency.State
	seq      int
}

// reader holds what the operations say, in the plainest form.
type reader map[event.Tier]map[uint64]bool

func (r reader) apply(op *event.Op) error {
	store := func(t event.Tier, run *event.Run) {
		if r[t] == nil {
			r[t] = map[uint64]bool{}
		}
		seq := run.Parent
		for i, local := range run.Locals {
			if seq = hash.Next(seq, local); i == 0 && run.Root {
				seq = local
			}
			r[t][seq] = true
		}
	}
	switch op.Kind {
	case event.OpStored:
		store(op.Tier, &op.Run)
	case event.OpRemoved:
		for _, seq := range op.Seqs {
			if !r[op.Tier][seq] {
				return fmt.Errorf("removal of %x, which is not there", seq)
			}
			delete(r[op.Tier], seq)
		}
	case event.OpCleared:
		for t := range r {
			if op.Tiers.Has(t) {
				clear(r[t])
			}
		}
	case event.OpCheckpoint:
		for i := range op.Runs {
			store(op.Tier, &op.Runs[i])
		}
	}
	return nil
}

// ops calls f with each of count operations.
func ops(ops []byte, count int, f func(*event.Op) error) error {
	var d event.Decoder
	if err := d.Reset(event.AppendRecord(nil, event.Header{}, count, ops)); err != nil {
		return err
	}
	for d.Next() {
		if err := f(&d.Op); err != nil {
			return err
		}
	}
	return d.Err()
}

func (r *run) batch() error {
	events := r.traffic.Batch()
	if r.lossy && r.rng.IntN(12) == 0 {
		return nil
	}
	for _, e := range events {
		r.truth.Apply(e)
	}
	payload, err := r.dialect.Encode(mock.Batch{TS: float64(r.seq), Events: events, BlockSize: blockSize})
	if err != nil {
		return err
	}
	r.seq++
	var b engine.Batch
	if err := engine.NewDecoder(r.profile, r.media).Decode(payload, &b); err != nil {
		return err
	}
	r.out.Join = r.rng.IntN(8) > 0
	for i := range b.Events {
		r.state.Apply(&b.Events[i], &r.out)
	}
	if r.rng.IntN(2) == 0 {
		return nil
	}
	return r.take(r.rng.IntN(r.out.Len() + 1))
}

// take gives the first n operations to whoever reads them.
func (r *run) take(n int) error {
	if n == 0 {
		return nil
	}
	err := ops(r.out.Buf[:r.out.Ends[n-1]], n, func(op *event.Op) error {
		return errors.Join(r.reader.apply(op), r.restored.Restore(op))
	})
	r.out.Shift(n)
	return err
}

// check compares the three with the model.
func (r *run) check() error {
	if err := r.take(r.out.Len()); err != nil {
		return err
	}
	want := event.Digests{}
	for tier, seqs := range r.truth.Resident() {
		t := event.Tier(tier)
		for seq := range seqs {
			want[t].Add(1, event.Mix(seq, event.Salt(t)))
			if !r.reader[t][seq] {
				return fmt.Errorf("%v block %x is missing", t, seq)
			}
		}
		if len(r.reader[t]) != len(seqs) {
			return fmt.Errorf("%d %v blocks, want %d", len(r.reader[t]), t, len(seqs))
		}
	}
	if got := r.state.Digests(); got != want {
		return fmt.Errorf("digests %v, want %v", got, want)
	}
	if got := r.restored.Digests(); got != want {
		return fmt.Errorf("digests after restoring %v, want %v", got, want)
	}
	return nil
}

// restart begins a new life of the engine. What the cache owner keeps is known to
// the others by a checkpoint.
func (r *run) restart() error {
	if err := r.take(r.out.Len()); err != nil {
		return err
	}
	r.traffic.Restart()
	r.truth.Restart()
	if kept := r.state.Restart(); !kept && len(r.truth.Resident()) > 0 {
		return errors.New("nothing is kept")
	}
	return r.checkpoint()
}

// checkpoint replaces the reader's blocks and the restored State by what a
// checkpoint says, and now and then goes on with the restored State.
func (r *run) checkpoint() error {
	if err := r.take(r.out.Len()); err != nil {
		return err
	}
	limit := 200 << r.rng.IntN(10)
	fresh := r.fresh()
	held := reader{}
	var tail residency.Ops
	tail.Add(func(b []byte) []byte { return event.AppendGaps(b, 1, 2) })
	chunks := r.state.Checkpoint(limit, &tail)
	gaps, digest := 0, event.Digests{}
	for i, c := range chunks {
		if i < len(chunks)-1 && len(c.Ops) > 2*limit+1000 {
			return fmt.Errorf("chunk %d has %d bytes, limit %d", i, len(c.Ops), limit)
		}
		err := ops(c.Ops, c.Count, func(op *event.Op) error {
			switch op.Kind {
			case event.OpCheckpoint:
				if op.Chunk != i || op.Chunks != len(chunks) {
					return fmt.Errorf("chunk %d of %d says that it is %d of %d", i, len(chunks), op.Chunk, op.Chunks)
				}
			case event.OpGaps:
				gaps++
			case event.OpDigest:
				digest = op.Digests
			}
			return errors.Join(held.apply(op), fresh.Restore(op))
		})
		if err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
	}
	if gaps != 1 || digest != r.state.Digests() {
		return fmt.Errorf("checkpoint ends with %d gaps and digest %v, want %v", gaps, digest, r.state.Digests())
	}
	r.reader, r.restored = held, fresh
	if r.rng.IntN(2) == 0 {
		r.state, r.restored = fresh, r.state
	}
	return nil
}

func (r *run) fresh() *residency.State {
	clears := event.AllTiers
	if r.profile.ClearsOnlyDevice {
		clears = event.Device.Mask()
	}
	return residency.New(residency.Config{BlockSize: blockSize, Clears: clears, CacheOwner: r.owned, Limits: residency.DefaultLimits()})
}

func newRun(t *testing.T, seed uint64) *run {
	rng := rand.New(rand.NewPCG(seed, 0))
	dialects := mock.Dialects()
	r := &run{t: t, rng: rng, dialect: dialects[rng.IntN(len(dialects))], reader: reader{}}
	profile := []model.Profile{"", model.VLLM, model.SGLang}[rng.IntN(3)]
	r.profile, _ = engine.ProfileOf(string(profile))
	r.media, _ = engine.NewMedia(nil)
	features := r.dialect.Features() | model.Feature(rng.Uint32())&^(1<<16-1)
	if rng.IntN(3) == 0 {
		features = r.dialect.Features() | model.Everything&^(1<<16-1)
	}
	prompts := model.Prompts(model.PromptOptions{Seed: seed, BlockSize: blockSize, N: 4 + rng.IntN(20), Spaced: 4, Pairs: rng.IntN(6) == 0})
	r.owned = rng.IntN(2) == 0
	r.traffic = model.NewTraffic(model.TrafficOptions{Seed: seed, BlockSize: blockSize, Profile: profile, CacheOwner: r.owned, Events: 1 + rng.IntN(6), Features: features}, prompts)
	r.state, r.restored = r.fresh(), r.fresh()
	r.truth, r.lossy = model.New(blockSize, profile), rng.IntN(3) == 0
	r.truth.CacheOwner = r.owned
	return r
}

// TestAgainstTheModel runs random traffic of every dialect through decoder and
// State. What the State's operations add up to, what its digests say, what a
// State restored from the operations holds, and what checkpoints say has to be
// what the naive model says, all the time.
func TestAgainstTheModel(t *testing.T) {
	for seed := *first; seed < *first+uint64(*seeds); seed++ {
		r := newRun(t, seed)
		const batches = 120
		for i := range batches {
			err := r.batch()
			switch {
			case err != nil:
			case r.rng.IntN(25) == 0:
				err = r.checkpoint()
			case r.rng.IntN(40) == 0:
				err = r.restart()
			}
			if err == nil && (i == batches-1 || r.rng.IntN(3) == 0) { // it takes all that the State has written
				err = r.check()
			}
			if err != nil {
				t.Fatalf("batch %d of %s traffic: %v\nrepeat with: go test ./bridge/residency -run TestAgainstTheModel -seed %d -seeds 1", i, r.dialect, err, seed)
			}
		}
	}
}
