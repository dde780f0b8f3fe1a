package event_test

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// A run that was extended is the same bytes as one that was written at once.
func TestExtendStored(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	for range 2000 {
		run := event.Run{Root: rng.IntN(2) == 0, Parent: rng.Uint64(), Base: rng.Uint32N(1000), Group: event.Group{Index: rng.Int64N(300), Set: rng.IntN(2) == 0}}
		if run.Root {
			run.Parent = 0
		}
		split := 1 + rng.IntN(3)
		engine := make([]event.EngineHash, 2+rng.IntN(60))
		for i := range engine {
			engine[i].Bits = rng.Uint64()
		}
		for range split * len(engine) {
			run.Locals = append(run.Locals, rng.Uint64())
		}
		before := bytes.Repeat([]byte{7}, rng.IntN(100))
		want := event.AppendStored(bytes.Clone(before), event.Host, "kvcr", run, engine)
		n := 1 + rng.IntN(len(engine)-1)
		all := run.Locals
		run.Locals = all[:split*n]
		got := event.AppendStored(bytes.Clone(before), event.Host, "kvcr", run, engine[:n])
		for ok := true; n < len(engine); {
			m := min(len(engine), n+1+rng.IntN(5))
			if got, ok = event.ExtendStored(got, len(before), all[split*n:split*m], engine[n:m]); !ok {
				t.Fatal("not extended")
			}
			n = m
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%x\nwant %x", got, want)
		}
	}
}

// Names that are no integers are not packed, and a run of them is left as it is.
func TestExtendStoredOfNames(t *testing.T) {
	run := event.Run{Root: true, Locals: []uint64{1}}
	named, number := []event.EngineHash{{Name: []byte("a")}}, []event.EngineHash{{Bits: 1}}
	for _, c := range [][2][]event.EngineHash{{named, number}, {number, named}, {named, named}, {nil, number}} {
		b := event.AppendStored(nil, event.Device, "", run, c[0])
		got, ok := event.ExtendStored(bytes.Clone(b), 0, []uint64{2}, c[1])
		if ok || !bytes.Equal(got, b) {
			t.Errorf("%v extended by %v: %v, %x", c[0], c[1], ok, got)
		}
	}
}
