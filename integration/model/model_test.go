package model

import (
	"reflect"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/hash"
)

// A script tells engines' events to a partition of block size 4 and asks it.
type script struct {
	t *testing.T
	p *Partition
}

func newScript(t *testing.T) script { return script{t, NewPartition(4)} }

// tell applies events of an instance, rank 0, of no profile.
func (s script) tell(instance string, events ...Event) {
	s.t.Helper()
	s.tellRank(instance, 0, "", events...)
}

func (s script) tellRank(instance string, rank uint32, p Profile, events ...Event) {
	s.t.Helper()
	for _, e := range events {
		s.p.Source(instance, rank, p).Apply(e)
	}
}

type rows map[string]Row

// ask compares the answer to a plain prompt.
func (s script) ask(tokens []int64, want rows) {
	s.t.Helper()
	s.askLocals(hash.AppendLocals(nil, u32(tokens), 4, 0, hash.Seed), want)
}

func (s script) askUnder(tokens []int64, lora, salt string, want rows) {
	s.t.Helper()
	s.askLocals(hash.AppendLocals(nil, u32(tokens), 4, 0, hash.SeedOf(lora, salt)), want)
}

func (s script) askLocals(locals []uint64, want rows) {
	s.t.Helper()
	if got := rows(s.p.Answer(locals)); !reflect.DeepEqual(got, want) {
		s.t.Errorf("answer %v, want %v", got, want)
	}
}

// row is the row of an instance with rank 0 only: the ends of the device tier
// and the tiers that go on from there.
func row(ends ...int) Row {
	for len(ends) < 3 {
		ends = append(ends, ends[len(ends)-1])
	}
	r := Row{GPU: ends[0], CPU: ends[1], Disk: ends[2], Longest: ends[2], DP: map[uint32]int{}}
	if ends[0] > 0 {
		r.DP[0] = ends[0]
	}
	return r
}

func u32(tokens []int64) []uint32 {
	var out []uint32
	for _, x := range tokens {
		out = append(out, uint32(x))
	}
	return out
}

// span is the tokens from a to b.
func span(a, b int64) []int64 {
	var out []int64
	for ; a <= b; a++ {
		out = append(out, a)
	}
	return out
}

func h(v any) Hash {
	switch v := v.(type) {
	case int:
		return Int(uint64(v))
	case []byte:
		return Bytes(v)
	case string:
		return Text(v)
	}
	return Hash{}
}

func list(v ...any) []Hash {
	var out []Hash
	for _, x := range v {
		out = append(out, h(x))
	}
	return out
}

type mod func(*Event)

func store(tokens []int64, hashes []Hash, mods ...mod) Event {
	e := Event{Tokens: tokens, Hashes: hashes}
	for _, m := range mods {
		m(&e)
	}
	return e
}

func remove(hashes []Hash, mods ...mod) Event {
	e := store(nil, hashes, mods...)
	e.Op = Remove
	return e
}

var clearAll = Event{Op: Clear}

func under(parent any) mod     { return func(e *Event) { e.Parent = h(parent) } }
func in(medium string) mod     { return func(e *Event) { e.Medium = medium } }
func size(n int) mod           { return func(e *Event) { e.BlockSize = &n } }
func inGroup(n int) mod        { return func(e *Event) { e.Group = &n } }
func kind(k string) mod        { return func(e *Event) { e.Kind = &k } }
func lora(l string) mod        { return func(e *Event) { e.LoRA = l } }
func salt(s string) mod        { return func(e *Event) { e.Salt = s } }
func locality(l string) mod    { return func(e *Event) { e.Locality = l } }
func remaining(n ...int) mod   { return func(e *Event) { e.Remaining = n } }
func pairs(e *Event)           { e.Pairs = true }
func media(mm ...[]uint64) mod { return func(e *Event) { e.MM = mm } }

func TestPrefixes(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 12), list(1, 2, 3)))
	s.ask(span(1, 12), rows{"a": row(12)})
	s.ask(span(1, 11), rows{"a": row(8)})
	s.ask(append(span(1, 8), 7, 7, 7, 7), rows{"a": row(8)})
	s.ask(span(5, 12), rows{})
	s.ask(span(1, 3), rows{})
	s.ask(nil, rows{})
	s.tell("a", remove(list(2))) // out of the middle
	s.ask(span(1, 12), rows{"a": row(4)})
	s.tell("b", store(span(1, 8), list(1, 2)), store(span(9, 12), list(3), under(2)))
	s.ask(span(1, 12), rows{"a": row(4), "b": row(12)})
	s.tell("a", store(span(5, 8), list(2), under(1))) // and back
	s.ask(span(1, 12), rows{"a": row(12), "b": row(12)})
	s.p.Drop("a", 1)
	s.ask(span(1, 4), rows{"a": row(4), "b": row(4)})
	s.p.Drop("a", 0)
	s.p.DropInstance("b")
	s.ask(span(1, 12), rows{})
}

func TestCopies(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 8), list(1, 2)), store(span(1, 4), list(1)), remove(list(1)))
	s.ask(span(1, 8), rows{"a": row(8)})
	s.tell("a", remove(list(1)))
	s.ask(span(1, 8), rows{})
	s.tell("a", remove(list(1, 1, 99))) // a removal of nothing leaves no debt
	s.tell("a", store(span(1, 4), list(1)), store(span(90, 93), list(99)))
	s.ask(span(1, 8), rows{"a": row(8)})
	s.ask(span(90, 93), rows{"a": row(4)})
	s.tell("a", store(span(5, 8), list(2), under(1)), store(span(5, 8), list(2), under(1)), remove(list(2, 2)))
	s.ask(span(1, 8), rows{"a": row(8)})
	s.tell("a", remove(list(2)))
	s.ask(span(1, 8), rows{"a": row(4)})
	s.tell("a", store(nil, list(1, 1), in("CPU")), remove(list(1)), remove(list(1), in("CPU")))
	s.ask(span(1, 8), rows{"a": row(0, 4)})
}

func TestRemainingCopyCountsWin(t *testing.T) {
	s := newScript(t)
	twice := []Event{store(span(1, 4), list(1)), store(span(1, 4), list(1))}
	s.tell("a", append(twice, remove(list(1), remaining(1)))...)
	s.ask(span(1, 4), rows{"a": row(4)})
	s.tell("a", remove(list(1), remaining(0)))
	s.ask(span(1, 4), rows{})
	s.tell("a", append(twice, remove(list(1), remaining(0)))...)
	s.ask(span(1, 4), rows{})
	s.tell("a", remove(list(1), remaining(2))) // nothing is there: nothing is left
	s.ask(span(1, 4), rows{})
	s.tell("a", store(span(1, 8), list(1, 2)), remove(list(1, 2), remaining(1, 0)))
	s.ask(span(1, 8), rows{"a": row(4)})
	s.tell("a", remove(list(1), remaining(3)), remove(list(1)), remove(list(1)))
	s.ask(span(1, 8), rows{"a": row(4)})
}

func TestUnknownParents(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(9, 12), list(3), under(2)))
	s.ask(span(1, 12), rows{})
	s.ask(span(9, 12), rows{})
	s.tell("a", store(span(1, 8), list(1, 2)))
	s.ask(span(1, 12), rows{"a": row(12)})

	// Copies and removals count while a block waits.
	s.tell("a", store(span(29, 32), list(13), under(12)), store(span(33, 40), list(14, 15), under(13)),
		store(span(60, 63), list(17), under(12)), store(span(29, 32), list(13), under(12)), remove(list(17)))
	s.tell("a", store(span(21, 28), list(11, 12)))
	s.ask(span(21, 40), rows{"a": row(20)})
	s.ask(append(span(21, 28), span(60, 63)...), rows{"a": row(8)})
	s.tell("a", remove(list(13)))
	s.ask(span(21, 40), rows{"a": row(20)})
	s.tell("a", remove(list(13)))
	s.ask(span(21, 40), rows{"a": row(8)})

	// A block that waits and loses its last copy is forgotten, with what it
	// says of its descendants.
	s.tell("a", store(span(5, 8), list(22), under(21)), store(span(9, 12), list(23), under(22)), remove(list(22)))
	s.tell("a", store(span(1, 4), list(21)), store(nil, list(22), in("CPU")))
	s.ask(span(1, 12), rows{"a": row(12)})
	s.tell("a", remove(list(1, 2, 3)))
	s.ask(span(1, 12), rows{"a": row(4)})

	s.tell("b", store(span(1, 4), list(1), under(1)), store(span(1, 4), list(2), under(3)), store(span(1, 4), list(3), under(2)))
	s.ask(span(1, 4), rows{"a": row(4)}) // circles begin nowhere
}

func TestStoresWithoutTokens(t *testing.T) {
	s := newScript(t)
	none := []int64{}
	s.tell("a", store(span(1, 12), list(1, 2, 3)), remove(list(1, 2, 3)), store(none, list(1, 2), size(0), in("CPU")))
	s.ask(span(1, 12), rows{"a": row(0, 8)})
	s.tell("a", store(nil, list(3, 4), in("CPU"))) // 4 is unknown: all or none
	s.ask(span(1, 12), rows{"a": row(0, 8)})
	s.tell("a", store(span(20, 23), list(6), under(5)), store(none, list(6), in("CPU"))) // so is what waits
	s.tell("a", store(span(1, 4), list(5)), remove(list(6)))
	s.ask(append(span(1, 4), span(20, 23)...), rows{"a": row(4)})
	s.tell("a", store(nil, list(3), in("DISK")))
	s.ask(span(1, 12), rows{"a": row(4, 8, 12)})
	s.tell("a", store(nil, nil, in("CPU")))
	s.ask(span(1, 12), rows{"a": row(4, 8, 12)})
}

func TestContentChanges(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 12), list(1, 2, 3)), store(nil, list(2), in("CPU")))
	s.tell("a", store(span(50, 53), list(1))) // the second copy says what the name means
	s.ask(span(1, 12), rows{})
	s.ask(append(span(50, 53), span(5, 12)...), rows{"a": row(12)})
	s.tell("a", store(span(5, 8), list(2), under(99))) // now 2 waits, and 3 with it
	s.ask(append(span(50, 53), span(5, 12)...), rows{"a": row(4)})
	s.tell("a", remove(list(2, 2)))
	s.tell("a", store(span(1, 4), list(99)))
	s.ask(span(1, 12), rows{"a": row(4, 8)}) // a copy in the host tier kept it
}

func TestTokensThatDoNotFill(t *testing.T) {
	for name, e := range map[string]Event{
		"short":          store(span(1, 7), list(1, 2)),
		"long":           store(span(1, 9), list(1, 2)),
		"sparse":         store(span(1, 12), list(1)),
		"no hashes":      store(span(1, 4), nil),
		"hash twice":     store(span(1, 8), list(1, 1)),
		"own parent":     store(span(1, 8), list(1, 2), under(2)),
		"size 0":         store(span(1, 4), list(1), size(0)),
		"size -4":        store(span(1, 4), list(1), size(-4)),
		"half a block":   store(span(1, 2), list(1), size(2)),
		"odd blocks":     store(span(1, 6), list(1), size(6)),
		"huge size":      store(span(1, 1), list(1, 2, 3, 4), size(1<<62), pairs),
		"negative token": store([]int64{1, 2, 3, -4}, list(1)),
		"wide token":     store([]int64{1, 2, 3, 1 << 32}, list(1)),
		"pairs short":    store(span(1, 8), list(1, 2), pairs),
		"no event":       {Op: Raw, Hashes: list(1), Tokens: span(1, 4)},
	} {
		src := New(4, "")
		src.Apply(e)
		if got := src.Resident(); len(got) > 0 || src.Knows(Int(1)) {
			t.Errorf("%s: holds %v", name, got)
		}
	}
	s := newScript(t)
	s.tell("a", store([]int64{0, 1<<32 - 1, 0, 7}, list(1)))
	s.ask([]int64{0, 1<<32 - 1, 0, 7}, rows{"a": row(4)})
	s.tell("a", store(span(1, 8), list(1, 2)), store(span(5, 8), list(2), under(2)), store(span(1, 8), list(1, 1)))
	s.ask(span(1, 8), rows{"a": row(8)}) // a bad store takes nothing away
}

func TestEngineBlocksOfSeveralIndexBlocks(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 8), list(1, 2)), store(span(1, 8), list(70), size(8), in("CPU")),
		store(span(9, 16), list(71), under(70), size(8), in("CPU")), store(span(17, 28), list(72), under(71), size(12), in("CPU")))
	s.ask(span(1, 28), rows{"a": row(8, 28)})
	s.ask(span(1, 6), rows{"a": row(4)})
	s.tell("a", remove(list(71), in("CPU"))) // goes as a whole
	s.ask(span(1, 28), rows{"a": row(8)})
	s.tell("a", store(nil, list(71), in("CPU")), remove(list(1, 2)))
	s.ask(span(1, 28), rows{"a": row(0, 28)})
	s.tell("a", store(span(5, 8), list(2), under(1)), remove(list(70), in("CPU")), store(nil, list(1), in("CPU")))
	s.ask(span(1, 28), rows{"a": row(0, 4)}) // tiers do not go back
}

func TestGroups(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 12), list(1), inGroup(0), kind("mamba")),
		store(span(1, 12), list(1, 2, 3), inGroup(1), kind("full_attention")))
	s.ask(span(1, 12), rows{"a": row(12)})
	s.tell("a", remove(list(1), inGroup(0)), remove(list(1)), store(span(13, 16), list(4), under(3), inGroup(1)))
	s.ask(span(1, 16), rows{"a": row(16)}) // not the group that holds it
	s.tell("a", remove(list(2), inGroup(1)))
	s.ask(span(1, 16), rows{"a": row(4)})
	s.tell("a", store(span(30, 33), list(130), inGroup(2), kind("chunked_local_attention")),
		store(span(34, 37), list(131), inGroup(3), kind("mla_attention")),
		store(span(38, 41), list(132), inGroup(4), kind("sink_full_attention")),
		store(span(42, 45), list(133), kind("sliding_window")),
		store(span(46, 49), list(134), inGroup(5)),
		store(span(50, 53), list(135), kind("")))
	s.ask(span(30, 33), rows{})
	s.ask(span(34, 37), rows{"a": row(4)})
	s.ask(span(38, 41), rows{"a": row(4)})
	s.ask(span(42, 45), rows{})
	s.ask(span(46, 49), rows{}) // nothing was learned of it
	s.ask(span(50, 53), rows{})
	s.tell("b", store(span(1, 4), list(1), inGroup(0)), store(span(1, 4), list(1))) // group 0 is main until a store says otherwise
	s.tell("b", remove(list(1)))
	s.ask(span(1, 4), rows{"a": row(4), "b": row(4)})
	s.tell("b", remove(list(1), inGroup(0), kind("mamba"))) // a removal teaches nothing
	s.ask(span(1, 4), rows{"a": row(4)})
	s.tell("c", store(nil, nil, inGroup(7), kind("full_attention")), store(span(1, 4), list(1), inGroup(7)))
	s.ask(span(1, 4), rows{"a": row(4), "c": row(4)}) // an event that stores nothing still teaches
	s.p.Source("c", 0, "").Reset()
	s.tell("c", store(span(1, 4), list(1), inGroup(7)))
	s.ask(span(1, 4), rows{"a": row(4)})
}

func TestMediaAndLocality(t *testing.T) {
	for medium, want := range map[string]rows{
		"": {"a": row(4)}, "GPU": {"a": row(4)}, "gpu": {"a": row(4)}, "DEVICE": {"a": row(4)},
		"CPU": {"a": row(0, 4)}, "cpu": {"a": row(0, 4)}, "CPU_PINNED": {"a": row(0, 4)}, "Cpu_Tier1": {"a": row(0, 4)},
		"CPU_TIER2": {"a": row(0, 0, 4)}, "disk": {"a": row(0, 0, 4)}, "NVME": {"a": row(0, 0, 4)}, "STORAGE": {"a": row(0, 0, 4)},
		"EXTERNAL": {"a": row(0, 0, 4)}, "NETWORK": {"a": row(0, 0, 4)}, "REMOTE": {"a": row(0, 0, 4)}, "SHARED": {"a": row(0, 0, 4)},
		"QUANTUM": {}, "FS": {}, "GPU ": {},
	} {
		s := newScript(t)
		s.tell("a", store(span(1, 4), list(1), in(medium)))
		s.ask(span(1, 4), want)
		s.tell("a", remove(list(1), in(strings.ToLower(medium))))
		s.ask(span(1, 4), rows{})
	}
	s := newScript(t)
	s.tell("a", store(span(1, 4), list(1), locality("REMOTE")), store(span(5, 8), list(2), locality("local")))
	s.ask(span(1, 4), rows{})
	s.ask(span(5, 8), rows{})
	s.tell("a", store(span(1, 4), list(1), locality("LOCAL")), remove(list(1), locality("REMOTE")))
	s.ask(span(1, 4), rows{"a": row(4)})
}

func TestTiersContinueRankByRank(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 16), list(1, 2, 3, 4)), store(span(17, 24), list(5, 6), under(4), in("CPU")), store(span(25, 28), list(7), under(6), in("DISK")))
	s.tell("b", store(span(1, 8), list(1, 2), in("CPU")), store(span(29, 32), list(8), in("CPU")))
	s.tell("c", store(span(1, 16), list(1, 2, 3, 4)), remove(list(3)), store(span(9, 12), list(3), under(2), in("CPU")))
	s.tellRank("d", 0, "", store(span(1, 12), list(1, 2, 3)))
	s.tellRank("d", 1, "", store(span(1, 4), list(1)), store(span(5, 20), list(2, 3, 4, 5), under(1), in("CPU")), store(span(21, 24), list(6), under(5), in("EXTERNAL")))
	d := Row{GPU: 12, CPU: 20, Disk: 24, Longest: 24, DP: map[uint32]int{0: 12, 1: 4}}
	for range 20 { // whichever rank comes first
		s.ask(span(1, 32), rows{"a": row(16, 24, 28), "b": row(0, 8), "c": row(8, 12), "d": d})
	}
	s.tell("c", store(span(13, 16), list(4), under(3), in("CPU")))
	d = Row{GPU: 12, CPU: 16, Disk: 16, Longest: 16, DP: map[uint32]int{0: 12, 1: 4}}
	s.ask(span(1, 16), rows{"a": row(16), "b": row(0, 8), "c": row(8, 16), "d": d})
}

func TestClear(t *testing.T) {
	s := newScript(t)
	held := []Event{store(span(1, 8), list(1, 2)), store(nil, list(1), in("CPU")), store(nil, list(1), in("DISK"))}
	s.tellRank("v", 0, VLLM, held...)
	s.tellRank("v", 1, VLLM, held...)
	s.tellRank("s", 0, SGLang, held...)
	s.tell("u", held...)
	both := Row{GPU: 8, CPU: 8, Disk: 8, Longest: 8, DP: map[uint32]int{0: 8, 1: 8}}
	s.ask(span(1, 8), rows{"v": both, "s": row(8), "u": row(8)})
	s.tellRank("v", 0, VLLM, clearAll)
	s.tellRank("s", 0, SGLang, store(span(20, 23), list(5)), clearAll, store(span(30, 33), list(6)))
	s.tell("u", clearAll)
	one := Row{GPU: 8, CPU: 8, Disk: 8, Longest: 8, DP: map[uint32]int{1: 8}}
	s.ask(span(1, 8), rows{"v": one})
	s.ask(span(20, 23), rows{})
	s.ask(span(30, 33), rows{"s": row(4)})
	s.tellRank("v", 1, VLLM, clearAll, store(span(5, 8), list(2), under(1)))
	s.ask(span(1, 8), rows{"v": row(0, 4)})
}

func TestNamespaces(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 8), list(1, 11), lora("a")), store(span(1, 4), list(2), lora("b")), store(span(1, 4), list(3), salt("t1")),
		store(span(1, 12), list(4, 14, 24)), store(span(1, 4), list(5), lora("a"), salt("t1")))
	s.askUnder(span(1, 8), "a", "", rows{"a": row(8)})
	s.askUnder(span(1, 8), "b", "", rows{"a": row(4)})
	s.askUnder(span(1, 8), "", "t1", rows{"a": row(4)})
	s.askUnder(span(1, 8), "a", "t1", rows{"a": row(4)})
	s.ask(span(1, 12), rows{"a": row(12)})
	for _, ns := range [][2]string{{"c", ""}, {"t1", ""}, {"", "a"}, {"b", "t1"}} {
		s.askUnder(span(1, 8), ns[0], ns[1], rows{})
	}
}

func TestPairs(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 13), list(7, 8, 9), pairs))
	ask := func(tokens []int64, want rows) {
		t.Helper()
		s.askLocals(hash.AppendLocals(nil, u32(tokens), 4, 1, hash.Seed), want)
	}
	ask(span(1, 13), rows{"a": row(12)})
	ask(span(1, 9), rows{"a": row(8)})
	ask(append(span(1, 8), 77), rows{"a": row(4)})
	ask(append(span(1, 4), 77), rows{})
	s.tell("a", remove(list(8)), store(span(5, 9), list(8), under(7), pairs, in("CPU_PINNED")))
	ask(span(1, 13), rows{"a": row(4, 8)})
}

func TestMultimodal(t *testing.T) {
	s := newScript(t)
	x, y := uint64(81985529216486895), uint64(18364758544493064720)
	s.tell("a", store(span(1, 12), list(1, 2, 3), media(nil, []uint64{x}, []uint64{y, x})))
	ask := func(want rows, mm ...[]uint64) {
		t.Helper()
		var locals []uint64
		for i, m := range mm {
			locals = append(locals, hash.Local(u32(span(int64(4*i+1), int64(4*i+4))), hash.Seed, m))
		}
		s.askLocals(locals, want)
	}
	ask(rows{"a": row(12)}, nil, []uint64{x}, []uint64{x, y})
	ask(rows{"a": row(8)}, nil, []uint64{x}, []uint64{x})
	ask(rows{"a": row(4)}, nil, nil, nil)
	s.tell("b", store(span(1, 8), list(1), size(8), media([]uint64{x}))) // every index block of an engine block
	ask(rows{"b": row(8)}, []uint64{x}, []uint64{x})
}

func TestHashNames(t *testing.T) {
	long := []byte("aaaaaaaaaaaaaaaaaaaaaaaa\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20")
	other := []byte("bbbbbbbbbbbbbbbbbbbbbbbb\x19\x1a\x1b\x1c\x1d\x1e\x1f\x20")
	bits := 0x191a1b1c1d1e1f20
	s := newScript(t)
	s.tellRank("v", 0, VLLM, store(span(1, 4), list(bits)), store(nil, list(long), in("CPU")), store(span(5, 8), list(long[:31]), under(other)))
	s.tellRank("s", 0, SGLang, store(span(1, 4), list(bits)), store(nil, list(long), in("CPU")), store(span(5, 8), list(9), under(long)))
	s.ask(span(1, 8), rows{"v": row(8), "s": row(4)})
	s.tellRank("v", 0, VLLM, remove(list(bits)))
	s.ask(span(1, 8), rows{"v": row(0, 4), "s": row(4)})
	s.tellRank("v", 0, VLLM, remove(list(other), in("CPU")))
	s.ask(span(1, 8), rows{"s": row(4)})
	if !s.p.Source("v", 0, VLLM).Knows(Bytes(long)) || s.p.Source("s", 0, SGLang).Knows(Bytes(long)) {
		t.Error("the alias counts under the profile vllm only")
	}

	s = newScript(t)
	s.tell("a", store(span(1, 4), list("x")), store(span(5, 8), list([]byte("x")), under("x")), store(span(9, 12), list(int('x')), under([]byte("x"))), store(span(13, 16), list(0), under(int('x'))))
	s.ask(span(1, 16), rows{"a": row(16)})
	s.tell("a", remove(list([]byte("x"))))
	s.ask(span(1, 16), rows{"a": row(4)})
	if Int(1<<63) == Int(1) || h(-1) != Int(1<<64-1) || (Hash{}) == Int(0) || Bytes(nil) == Text("") || !(Hash{}).IsZero() || Int(0).IsZero() {
		t.Error("hashes compare wrong")
	}
}

func TestDigest(t *testing.T) {
	mix := func(seq uint64, tier Tier) uint64 { return seq<<8 | uint64(tier) }
	s := New(4, "")
	if got := s.Digest(mix); len(got) != 0 {
		t.Errorf("digest of nothing: %v", got)
	}
	for _, e := range []Event{store(span(1, 8), list(1, 2)), store(span(1, 8), list(1, 2)), store(span(1, 8), list(3), size(8)), store(nil, list(2), in("CPU")), store(span(9, 12), list(4), under(99))} {
		s.Apply(e)
	}
	seqs := hash.AppendSequence(nil, hash.AppendLocals(nil, u32(span(1, 8)), 4, 0, hash.Seed))
	want := map[Tier]Digest{Device: {2, seqs[0]<<8 + seqs[1]<<8}, Host: {1, seqs[1]<<8 | 1}}
	if got := s.Digest(mix); !reflect.DeepEqual(got, want) {
		t.Errorf("digest %v, want %v", got, want)
	}
}

func TestStateStays(t *testing.T) {
	s := newScript(t)
	s.tell("a", store(span(1, 4), list(1)))
	st := s.p.State()
	s.tell("a", remove(list(1)))
	locals := hash.AppendLocals(nil, u32(span(1, 4)), 4, 0, hash.Seed)
	if got := rows(st.Answer(locals)); !reflect.DeepEqual(got, rows{"a": row(4)}) {
		t.Errorf("the state changed: %v", got)
	}
	s.askLocals(locals, rows{})
}
