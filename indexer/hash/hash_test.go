package hash

import (
	"slices"
	"testing"
)

// The published vectors, block size 4.
var vectors = []struct {
	tokens     []uint32
	local, seq uint64
}{
	{[]uint32{1, 2, 3, 4}, 14643705804678351452, 14643705804678351452},
	{[]uint32{5, 6, 7, 8}, 16777012769546811212, 4945711292740353085},
	{[]uint32{9, 10, 11, 12}, 483935686894639516, 12583592247330656132},
}

func TestVectors(t *testing.T) {
	var prompt []uint32
	var locals, seqs []uint64
	for _, v := range vectors {
		if got := Local(v.tokens, Seed, nil); got != v.local {
			t.Errorf("Local(%v) = %d, want %d", v.tokens, got, v.local)
		}
		prompt = append(prompt, v.tokens...)
		locals = append(locals, v.local)
		seqs = append(seqs, v.seq)
	}
	for tail := range 4 { // a partial block changes nothing
		got := AppendLocals(nil, append(prompt, make([]uint32, tail)...), 4, 0, Seed)
		if !slices.Equal(got, locals) {
			t.Errorf("AppendLocals with %d tokens of tail = %v, want %v", tail, got, locals)
		}
	}
	if got := AppendSequence(nil, locals); !slices.Equal(got, seqs) {
		t.Errorf("AppendSequence = %v, want %v", got, seqs)
	}
}

func TestNamespacesDiffer(t *testing.T) {
	seeds := map[uint64]string{}
	for _, ns := range [][2]string{{"", ""}, {"a", ""}, {"b", ""}, {"", "a"}, {"", "b"}, {"a", "b"}, {"b", "a"}, {"a", "a"}} {
		s := SeedOf(ns[0], ns[1])
		if other, ok := seeds[s]; ok {
			t.Errorf("lora %q salt %q has the seed of %s", ns[0], ns[1], other)
		}
		seeds[s] = ns[0] + "/" + ns[1]
	}
	if SeedOf("", "") != Seed {
		t.Errorf("SeedOf without names = %d, want %d", SeedOf("", ""), Seed)
	}
}

func TestMultimodalOrderDoesNotMatter(t *testing.T) {
	tokens := []uint32{9, 10, 11, 12}
	mm := []uint64{18364758544493064720, 81985529216486895}
	a := Local(tokens, Seed, mm)
	b := Local(tokens, Seed, []uint64{mm[1], mm[0]})
	if a != b || a == Local(tokens, Seed, nil) || a == Local(tokens, Seed, mm[:1]) {
		t.Errorf("multimodal hashes: %d, %d swapped", a, b)
	}
	if mm[0] != 18364758544493064720 {
		t.Error("Local sorted its argument in place")
	}
}

func TestBigramWindows(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	want := []uint64{Local(tokens[0:5], Seed, nil), Local(tokens[4:9], Seed, nil)}
	if got := AppendLocals(nil, tokens, 4, 1, Seed); !slices.Equal(got, want) {
		t.Errorf("windows of 5 at stride 4 = %v, want %v", got, want)
	}
	if got := AppendLocals(nil, tokens[:8], 4, 1, Seed); len(got) != 1 {
		t.Errorf("8 tokens hold %d bigram blocks of 4, want 1", len(got))
	}
}

func BenchmarkPrompt16k(b *testing.B) {
	tokens := make([]uint32, 16384)
	for i := range tokens {
		tokens[i] = uint32(i * 7919)
	}
	locals, seqs := make([]uint64, 0, 1024), make([]uint64, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		locals = AppendLocals(locals[:0], tokens, 16, 0, Seed)
		seqs = AppendSequence(seqs[:0], locals)
	}
}
