package blocks

import (
	"math/bits"
	"math/rand/v2"
)

func trailing(set uint64) int { return bits.TrailingZeros64(set) }

// Sessions makes prompts as conversations do: some begin with one of a few long
// heads, each goes on with what it was, and all end at some time.
type Sessions struct {
	rng   *rand.Rand
	heads []Prompt
	open  []Prompt
}

// NewSessions returns n conversations.
func NewSessions(seed uint64, n int) *Sessions {
	s := &Sessions{rng: rand.New(rand.NewPCG(seed, 1)), open: make([]Prompt, n)}
	for range 8 {
		s.heads = append(s.heads, Hashed(s.novel(nil, 20+s.rng.IntN(200))))
	}
	return s
}

func (s *Sessions) novel(locals []uint64, n int) []uint64 {
	locals = locals[:len(locals):len(locals)]
	for range n {
		locals = append(locals, s.rng.Uint64())
	}
	return locals
}

// Next returns the next prompt.
func (s *Sessions) Next() Prompt {
	p := &s.open[s.rng.IntN(len(s.open))]
	switch {
	case len(p.Locals) == 0 || len(p.Locals) > 1500 || s.rng.IntN(20) == 0:
		*p = Hashed(s.novel(s.heads[s.rng.IntN(len(s.heads))].Locals, 1+s.rng.IntN(100)))
	default:
		*p = Hashed(s.novel(p.Locals, 1+s.rng.IntN(60)))
	}
	return *p
}
