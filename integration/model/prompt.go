package model

import (
	"math/rand/v2"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/hash"
)

// Vocab is how many token ids prompts are made of.
const Vocab = 151_936

// Prompt is what a client may ask about and an engine may hold.
type Prompt struct {
	Tokens []uint32
	LoRA   string
	Salt   string
	Pairs  bool     // engines name its blocks by bigrams
	Locals []uint64 // local hashes of its whole blocks
	seqs   []uint64
}

// NewPrompt returns the prompt of the tokens, which it keeps. blockSize is that
// of the index, in tokens.
func NewPrompt(tokens []uint32, blockSize int, lora, salt string, pairs bool) Prompt {
	p := Prompt{Tokens: tokens, LoRA: lora, Salt: salt, Pairs: pairs}
	p.Locals = hash.AppendLocals(nil, tokens, blockSize, p.over(), hash.SeedOf(lora, salt))
	p.seqs = hash.AppendSequence(nil, p.Locals)
	return p
}

// over is how many tokens a block reaches into the next one.
func (p Prompt) over() int {
	if p.Pairs {
		return 1
	}
	return 0
}

// PromptOptions say what Prompts makes.
type PromptOptions struct {
	Seed      uint64
	BlockSize int  // tokens
	N         int  // plain prompts
	Spaced    int  // copies of them under an adapter or a cache salt, in turns
	Pairs     bool // for engines that name blocks by bigrams
}

// Prompts returns prompts that share beginnings, as conversations do, and at
// least one. Engines of one test share the prompts. Equal options make equal
// prompts.
func Prompts(o PromptOptions) []Prompt {
	rng := rand.New(rand.NewPCG(o.Seed, 1))
	blocks := func(least, most int) int { return o.BlockSize * (least + rng.IntN(most-least+1)) }
	var roots [3][]uint32
	for i := range roots {
		roots[i] = appendTokens(nil, rng, blocks(2, 6))
	}
	var out []Prompt
	for range max(1, o.N) {
		start := roots[rng.IntN(len(roots))]
		if len(out) > 0 && rng.Float64() < 0.4 {
			start = out[rng.IntN(len(out))].Tokens
			start = start[:blocks(1, len(start)/o.BlockSize)]
		}
		tokens := appendTokens(slices.Clone(start), rng, blocks(2, 10))
		if o.Pairs { // the last block reaches one token further
			tokens = appendTokens(tokens, rng, 1)
		}
		out = append(out, NewPrompt(tokens, o.BlockSize, "", "", o.Pairs))
	}
	for i := range o.Spaced {
		tokens := out[rng.IntN(max(1, o.N))].Tokens
		name := string(rune('a' + i/2%2))
		if i%2 == 0 {
			out = append(out, NewPrompt(tokens, o.BlockSize, "", "tenant-"+name, o.Pairs))
		} else {
			out = append(out, NewPrompt(tokens, o.BlockSize, "adapter-"+name, "", o.Pairs))
		}
	}
	return out
}

func appendTokens(dst []uint32, rng *rand.Rand, n int) []uint32 {
	for range n {
		dst = append(dst, uint32(rng.IntN(Vocab)))
	}
	return dst
}

// Mix spreads the bits of x (splitmix64).
func Mix(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27) * 0x94D049BB133111EB
	return x ^ x>>31
}
