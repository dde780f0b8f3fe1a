package blocks

import (
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Target is what traffic is applied to: a prefix.Writer or a Naive.
type Target interface {
	Store(h prefix.Holder, tier event.Tier, run *event.Run) (added, sum uint64)
	Remove(h prefix.Holder, tier event.Tier, seqs []uint64) (removed, sum uint64)
}

// The synthetic load: Workers times PerWorker prompts of Length blocks, stored in
// pieces of Piece blocks. With shared prompts Share workers hold each.
const (
	Workers   = 64
	PerWorker = 16
	Length    = 1024
	Piece     = 64
	Share     = 8
	BlockSize = 16
	vocab     = 128000
)

// Prompt is the blocks of one prompt.
type Prompt struct {
	Locals, Seqs []uint64
}

// PromptTokens returns the tokens of the prompt of a number.
func PromptTokens(number uint64, blocks int) []uint32 {
	tokens := make([]uint32, blocks*BlockSize)
	for i := range tokens {
		tokens[i] = uint32(model.Mix(number<<32|uint64(i)) % vocab)
	}
	return tokens
}

// NewPrompt returns the prompt of a number.
func NewPrompt(number uint64, blocks int) Prompt {
	return Hashed(hash.AppendLocals(nil, PromptTokens(number, blocks), BlockSize, 0, hash.Seed))
}

// Hashed returns the prompt that has these local hashes.
func Hashed(locals []uint64) Prompt {
	return Prompt{locals, hash.AppendSequence(make([]uint64, 0, len(locals)), locals)}
}

// Run returns the blocks from one position up to another as a run.
func (p *Prompt) Run(from, end int) event.Run {
	r := event.Run{Root: from == 0, Base: uint32(from), Locals: p.Locals[from:end]}
	if from > 0 {
		r.Parent = p.Seqs[from-1]
	}
	return r
}

// Load is the synthetic load in the order in which it comes: event e of every
// worker, then event e+1.
type Load struct {
	Prompts []Prompt
	Share   int // workers that hold a prompt
}

// NewLoad returns a load in which each prompt is held by share workers.
func NewLoad(share int) *Load {
	l := &Load{Share: share}
	for n := range Workers * PerWorker / share {
		l.Prompts = append(l.Prompts, NewPrompt(uint64(n), Length))
	}
	return l
}

// Prompt returns the i-th prompt of a worker.
func (l *Load) Prompt(worker, i int) *Prompt { return &l.Prompts[worker/l.Share*PerWorker+i] }

// Each calls f with every event.
func (l *Load) Each(f func(worker int, p *Prompt, from, end int)) {
	const pieces = Length / Piece
	for e := range PerWorker * pieces {
		for w := range Workers {
			from := e % pieces * Piece
			f(w, l.Prompt(w, e/pieces), from, from+Piece)
		}
	}
}
