package event

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// plainOp is an operation with its engine hashes spelled out, to compare with.
type plainOp struct {
	Op
	Engine     []EngineHash
	RunEngines [][]EngineHash
}

func readAll(t *testing.T, d *Decoder) []plainOp {
	t.Helper()
	var out []plainOp
	for d.Next() {
		p := plainOp{Op: d.Op, Engine: d.Op.Engine.AppendTo(nil)}
		for i := range d.Op.Runs {
			p.RunEngines = append(p.RunEngines, d.Op.Runs[i].Engine.AppendTo(nil))
		}
		p.Op.Runs = append([]Run(nil), d.Op.Runs...)
		for i := range p.Op.Runs {
			p.Op.Runs[i].Engine = EngineHashes{}
			p.Op.Runs[i].Locals = slices.Clone(p.Op.Runs[i].Locals)
		}
		p.Locals, p.Seqs, p.Counts = slices.Clone(p.Locals), slices.Clone(p.Seqs), slices.Clone(p.Counts)
		p.Op.Engine = EngineHashes{}
		out = append(out, p)
	}
	if err := d.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func randomHashes(rng *rand.Rand, n int) []uint64 {
	if n == 0 {
		return nil
	}
	out := make([]uint64, n)
	for i := range out {
		out[i] = rng.Uint64() >> rng.IntN(64)
	}
	return out
}

func randomEngine(rng *rand.Rand, n int) []EngineHash {
	if n == 0 {
		return nil
	}
	out := make([]EngineHash, n)
	mixed := rng.IntN(3) == 0
	for i := range out {
		out[i].Bits = rng.Uint64() >> rng.IntN(64)
		if mixed && rng.IntN(2) == 0 {
			name := make([]byte, rng.IntN(40))
			for j := range name {
				name[j] = byte(rng.Uint32())
			}
			out[i] = EngineHash{Name: name, Text: rng.IntN(2) == 0}
		}
	}
	return out
}

func randomGroup(rng *rand.Rand) Group {
	if rng.IntN(2) == 0 {
		return Group{}
	}
	return Group{Index: rng.Int64N(5) - 1, Set: true}
}

func randomRun(rng *rand.Rand) (Run, []EngineHash) {
	n, k := rng.IntN(20), 1+rng.IntN(3)
	run := Run{Base: rng.Uint32() >> rng.IntN(32), Locals: randomHashes(rng, n*k), Group: randomGroup(rng)}
	if rng.IntN(2) == 0 {
		run.Root = true
	} else {
		run.Parent = rng.Uint64()
	}
	if rng.IntN(4) == 0 {
		run.ParentName, run.HasParentName = randomEngine(rng, 1)[0], true
	}
	return run, randomEngine(rng, n)
}

// randomOp returns an operation as bytes and as what it should be read as.
func randomOp(rng *rand.Rand, kind OpKind) ([]byte, plainOp) {
	op := plainOp{Op: Op{Kind: kind}}
	tier, owner := Tier(rng.IntN(Tiers)), []string{"", "", "slot-7"}[rng.IntN(3)]
	switch kind {
	case OpStored, OpKnown:
		op.Run, op.Engine = randomRun(rng)
		if kind == OpKnown {
			return AppendKnown(nil, op.Run, op.Engine), op
		}
		op.Tier, op.Owner = tier, owner
		return AppendStored(nil, tier, owner, op.Run, op.Engine), op
	case OpRemoved:
		op.Tier, op.Owner, op.Group = tier, owner, randomGroup(rng)
		op.Seqs, op.Engine = randomHashes(rng, rng.IntN(40)), randomEngine(rng, rng.IntN(9))
		return AppendRemoved(nil, tier, owner, op.Seqs, op.Group, op.Engine), op
	case OpCleared:
		op.Tiers, op.Owner = TierMask(rng.IntN(16)), owner
		return AppendCleared(nil, op.Tiers, owner), op
	case OpReset:
		op.Reason = ReasonRestart
		return AppendReset(nil, op.Reason), op
	case OpGap:
		op.From, op.To, op.Reason = 5, 5+rng.Uint64N(1<<40), ReasonAbsent
		return AppendGap(nil, op.From, op.To, op.Reason), op
	case OpDigest:
		for i := range rng.IntN(Tiers + 1) {
			op.Digests[i] = Digest{Count: rng.Uint64N(1 << 20), Sum: rng.Uint64()}
		}
		return AppendDigest(nil, &op.Digests), op
	case OpCheckpoint:
		op.Tier, op.Owner, op.Chunks = tier, owner, 1+rng.IntN(5)
		op.Chunk = rng.IntN(op.Chunks)
		n := rng.IntN(4)
		b := AppendCheckpoint(nil, op.Chunk, op.Chunks, tier, owner, n)
		for range n {
			run, engine := randomRun(rng)
			b = AppendRun(b, run, engine)
			op.Runs = append(op.Runs, run)
			op.RunEngines = append(op.RunEngines, engine)
		}
		return b, op
	case OpRetired:
		return AppendRetired(nil), op
	case OpCopies:
		op.Tier, op.Owner, op.Group = tier, owner, randomGroup(rng)
		op.Engine = randomEngine(rng, 1+rng.IntN(9))
		op.Counts = randomHashes(rng, len(op.Engine))
		return AppendCopies(nil, tier, owner, op.Group, op.Engine, op.Counts), op
	case OpParked:
		op.Tier, op.Owner, op.Group = tier, owner, randomGroup(rng)
		op.ParentName, op.HasParentName = randomEngine(rng, 1)[0], true
		op.Engine = randomEngine(rng, 1+rng.IntN(9))
		op.Locals = randomHashes(rng, len(op.Engine)*(1+rng.IntN(3)))
		return AppendParked(nil, tier, owner, op.Group, op.ParentName, op.Locals, op.Engine), op
	case OpGroup:
		op.Group, op.Main = Group{Index: rng.Int64N(9) - 4, Set: true}, rng.IntN(2) == 0
		return AppendGroupKind(nil, op.Group.Index, op.Main), op
	case OpPublisher:
		op.Publisher = []byte{0, 1, 2, 3}
		return AppendPublisher(nil, op.Publisher), op
	case OpGaps:
		op.From, op.To = rng.Uint64N(9), rng.Uint64()
		return AppendGaps(nil, op.From, op.To), op
	case OpHome:
		op.Home = rng.Uint32()
		return AppendHome(nil, op.Home), op
	}
	panic("no such kind")
}

func randomRecord(rng *rand.Rand) ([]byte, Header, []plainOp) {
	h := Header{Incarnation: rng.Uint64(), TS: rng.Float64() * 2e9, Fingerprint: rng.Uint64(), Partial: rng.IntN(4) == 0}
	if rng.IntN(4) > 0 {
		h.Batches, h.First = true, rng.Uint64()>>rng.IntN(64)
		h.Last = h.First + uint64(rng.IntN(10)) - 1
	}
	var ops []byte
	var want []plainOp
	for range rng.IntN(12) {
		b, op := randomOp(rng, OpKind(1+rng.IntN(int(OpHome))))
		ops = append(ops, b...)
		want = append(want, op)
	}
	record := AppendRecord([]byte("x"), h, len(want), ops)[1:]
	if len(record) > len(ops)+HeaderRoom {
		panic(fmt.Sprintf("the header takes %d bytes, more than HeaderRoom", len(record)-len(ops)))
	}
	return record, h, want
}

func TestRecordsComeBack(t *testing.T) {
	var d Decoder
	for seed := range uint64(3000) {
		record, h, want := randomRecord(rand.New(rand.NewPCG(seed, 1)))
		if err := d.Reset(record); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if d.Header != h {
			t.Fatalf("seed %d: header %+v, want %+v", seed, d.Header, h)
		}
		got := readAll(t, &d)
		if len(got) != len(want) {
			t.Fatalf("seed %d: %d operations, want %d", seed, len(got), len(want))
		}
		for i := range want {
			if !reflect.DeepEqual(normal(got[i]), normal(want[i])) {
				t.Fatalf("seed %d, operation %d:\ngot  %+v\nwant %+v", seed, i, got[i], want[i])
			}
		}
	}
}

// normal makes empty and absent lists equal: the record has no difference.
func normal(p plainOp) plainOp {
	if len(p.Locals) == 0 {
		p.Locals = nil
	}
	if len(p.Seqs) == 0 {
		p.Seqs = nil
	}
	if len(p.Counts) == 0 {
		p.Counts = nil
	}
	if len(p.Op.Runs) == 0 {
		p.Op.Runs, p.RunEngines = nil, nil
	}
	for i := range p.Op.Runs {
		if len(p.Op.Runs[i].Locals) == 0 {
			p.Op.Runs[i].Locals = nil
		}
	}
	return p
}

func TestDamagedRecordsAreErrors(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	var d Decoder
	for range 200 {
		record, _, want := randomRecord(rng)
		for cut := range record {
			ops := 0
			err := d.Reset(record[:cut])
			for err == nil && d.Next() {
				ops++
			}
			if err == nil {
				err = d.Err()
			}
			if !errors.Is(err, ErrRecord) || ops > len(want) {
				t.Fatalf("%d of %d bytes: %d operations, error %v", cut, len(record), ops, err)
			}
		}
	}
}

func TestLaterVersions(t *testing.T) {
	op, _ := randomOp(rand.New(rand.NewPCG(1, 1)), OpReset)
	longer := append([]byte(nil), op...)
	longer[0]++ // one element more
	longer = mpack.AppendStr(longer, "an addition")
	unknown := mpack.AppendStr(append(mpack.AppendArray(nil, 2), 99), "a kind of the future")
	for _, kind := range []uint64{256 + uint64(OpReset), 1<<32 + uint64(OpRetired), math.MaxUint64} { // whose last byte is that of a known one
		unknown = mpack.AppendStr(mpack.AppendUint(append(unknown, 0x92), kind), "")
	}
	record := AppendRecord(nil, Header{Incarnation: 1}, 6, append(append(append([]byte(nil), longer...), unknown...), op...))
	record[0]++
	record = mpack.AppendNil(record)
	var d Decoder
	if err := d.Reset(record); err != nil {
		t.Fatal(err)
	}
	if got := readAll(t, &d); len(got) != 2 || got[0].Reason != ReasonRestart || got[1].Reason != ReasonRestart {
		t.Errorf("got %+v, want two resets", got)
	}
	record[1] = 2
	if err := d.Reset(record); !errors.Is(err, ErrVersion) {
		t.Errorf("version 2: error %v, want ErrVersion", err)
	}
}

func TestOperationsThatContradictThemselves(t *testing.T) {
	three := []EngineHash{{Bits: 1}, {Bits: 2}, {Bits: 3}}
	for name, op := range map[string][]byte{
		"three engine blocks for four index blocks": AppendStored(nil, Device, "", Run{Root: true, Locals: []uint64{1, 2, 3, 4}}, three),
		"more engine blocks than index blocks":      AppendKnown(nil, Run{Root: true, Locals: []uint64{1}}, three),
		"a tier that does not exist":                AppendRemoved(nil, Tiers, "", nil, Group{}, nil),
		"chunk 2 of 2":                              AppendCheckpoint(nil, 2, 2, Device, "", 0),
		"a gap that ends before it begins":          AppendGap(nil, 5, 4, ReasonAbsent),
		"two counts for three hashes":               AppendCopies(nil, Host, "", Group{}, three, []uint64{1, 2}),
	} {
		var d Decoder
		if err := d.Reset(AppendRecord(nil, Header{}, 1, op)); err != nil {
			t.Fatal(err)
		}
		if d.Next() || !errors.Is(d.Err(), ErrRecord) {
			t.Errorf("%s: error %v, want ErrRecord", name, d.Err())
		}
	}
}

func TestReadingAllocatesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 3))
	locals, engine := randomHashes(rng, 64), make([]EngineHash, 64)
	for i := range engine {
		engine[i].Bits = rng.Uint64()
	}
	ops := AppendStored(nil, Device, "slot-1", Run{Root: true, Locals: locals}, engine)
	ops = AppendRemoved(ops, Host, "slot-1", locals[:9], Group{}, engine[:9])
	ops = AppendDigest(ops, &Digests{{1, math.MaxUint64}})
	record := AppendRecord(nil, Header{Incarnation: 1, Batches: true}, 3, ops)
	var d Decoder
	read := func() {
		if err := d.Reset(record); err != nil {
			t.Fatal(err)
		}
		for d.Next() {
		}
	}
	read()
	if n := testing.AllocsPerRun(100, read); n != 0 {
		t.Errorf("%v allocations a record", n)
	}
}

func FuzzRecord(f *testing.F) {
	for seed := range uint64(60) {
		record, _, _ := randomRecord(rand.New(rand.NewPCG(seed, 2)))
		f.Add(record)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var d Decoder
		if d.Reset(b) != nil {
			return
		}
		var names []EngineHash
		for d.Next() {
			names = d.Op.Engine.AppendTo(names[:0])
			if len(names) != d.Op.Engine.Len() || len(d.Op.Locals) > len(b)/8 || len(d.Op.Seqs) > len(b)/8 {
				t.Fatalf("more than the record can hold: %+v", d.Op)
			}
		}
	})
}

func BenchmarkDecodeStored64(b *testing.B) {
	rng := rand.New(rand.NewPCG(3, 3))
	engine := make([]EngineHash, 64)
	ops := AppendStored(nil, Device, "", Run{Parent: 1, Locals: randomHashes(rng, 64)}, engine)
	record := AppendRecord(nil, Header{Incarnation: 1, Batches: true}, 1, ops)
	var d Decoder
	b.SetBytes(int64(len(record)))
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Reset(record); err != nil {
			b.Fatal(err)
		}
		for d.Next() {
		}
	}
}
