package residency_test

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// TestContradictions feeds a State an engine's nonsense: few names, behind each
// other in any order, with any content. Whatever the State makes of it, it comes
// to an end, and its operations, its digest and a checkpoint agree. Restoring
// comes to an end too; that a State restored from such operations may differ is what the
// digests in the log are for.
func TestContradictions(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 0))
		r := &run{t: t, rng: rng, reader: reader{}, owned: rng.IntN(2) == 0}
		r.state, r.restored = r.fresh(), r.fresh()
		for i := range 60 {
			e := nonsense(rng)
			var out residency.Ops
			r.state.Apply(&e, &out)
			err := ops(out.Buf, out.Len(), func(op *event.Op) error {
				if err := r.restored.Restore(op); err != nil && !errors.Is(err, residency.ErrForeign) {
					return err
				}
				return r.reader.apply(op)
			})
			if err != nil {
				t.Fatalf("seed %d, event %d: %v", seed, i, err)
			}
			restart := rng.IntN(40) == 0
			if restart {
				r.state.Restart()
			}
			if restart || rng.IntN(20) == 0 {
				if err := r.checkpoint(); err != nil {
					t.Fatalf("seed %d, event %d: %v", seed, i, err)
				}
			}
			have := event.Digests{}
			for tier, seqs := range r.reader {
				for seq := range seqs {
					have[tier].Add(1, event.Mix(seq, event.Salt(tier)))
				}
			}
			if r.state.Digests() != have {
				t.Fatalf("seed %d, event %d: digests %v, operations %v", seed, i, r.state.Digests(), have)
			}
		}
	}
}

// nonsense returns a store or a removal of blocks of six names.
func nonsense(rng *rand.Rand) engine.Event {
	names := rng.Perm(6)[:1+rng.IntN(3)]
	e := engine.Event{Kind: engine.Stored, BlockSize: blockSize, Tier: event.Tier(rng.IntN(2))}
	switch rng.IntN(16) {
	case 0, 1, 2, 3:
		e.Kind = engine.Removed
	case 4:
		e.Kind = engine.Cleared
	}
	if rng.IntN(3) == 0 {
		e.Owner = []byte("kvcr")
	}
	for _, n := range names {
		e.Hashes = append(e.Hashes, event.EngineHash{Bits: uint64(n + 1)})
		if e.Kind == engine.Stored {
			content := uint32(n) // mostly what it was
			if rng.IntN(4) == 0 {
				content = rng.Uint32N(3)
			}
			e.Tokens = append(e.Tokens, content, content, content, content)
		}
	}
	if e.Kind == engine.Stored && rng.IntN(4) > 0 {
		e.HasParent, e.Parent = true, event.EngineHash{Bits: 1 + rng.Uint64N(7)}
	}
	return e
}
