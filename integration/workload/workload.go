// Package workload makes the requests of agents: sessions that begin with one of
// a few system prompts, grow turn by turn as tools answer, now and then branch
// into sub-agents that go on from what the session knows, and are of very
// different lengths. The same seed makes the same sessions.
//
// A prompt is a list of segments: what one party said at once, or one block of a
// trace. A segment is a seed and a length, from which its tokens follow, so that
// prompts of many thousands of tokens travel in a few bytes.
package workload

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/kvmesh/kvmesh/integration/model"
)

// Vocab is how many token ids prompts are made of.
const Vocab = 151_936

// Segment is a run of tokens: the first Tokens ones that Seed makes.
type Segment struct {
	Seed   uint64
	Tokens int
}

// Append appends the tokens of the segment to dst.
func (s Segment) Append(dst []uint32) []uint32 {
	dst = slices.Grow(dst, s.Tokens)
	for i := range s.Tokens {
		dst = append(dst, uint32(model.Mix(s.Seed+uint64(i))%Vocab))
	}
	return dst
}

// Tokens returns the tokens of segments in a row.
func Tokens(segments []Segment) []uint32 {
	out := make([]uint32, 0, Length(segments))
	for _, s := range segments {
		out = s.Append(out)
	}
	return out
}

// Length returns how many tokens segments have.
func Length(segments []Segment) int {
	n := 0
	for _, s := range segments {
		n += s.Tokens
	}
	return n
}

// Turn is one request.
type Turn struct {
	Session uint64    // number of the session
	Branch  int       // 0: the session's own; others are sub-agents
	Prompt  []Segment // all of the context so far
	Output  Segment   // what the engine is to answer
}

// Lengths is a heavy-tailed distribution of numbers of tokens or turns: a
// log-normal one.
type Lengths struct {
	Median int     // half of the values are less
	Sigma  float64 // of the logarithm; 0: every value is the median
	Min    int
	Max    int
}

func (l Lengths) draw(rng *rand.Rand) int {
	v := float64(l.Median) * math.Exp(l.Sigma*rng.NormFloat64())
	return int(min(max(v, float64(l.Min)), float64(l.Max)))
}

func (l Lengths) validate(name string) error {
	if l.Min < 0 || l.Median < l.Min || l.Max < l.Median || l.Sigma < 0 {
		return fmt.Errorf("workload: %s is %+v, want 0 <= Min <= Median <= Max, and Sigma not negative", name, l)
	}
	return nil
}

// Options say what sessions are like. Default has the values of an agent that
// codes.
type Options struct {
	Seed uint64

	// SystemPrompts is how many system prompts there are; which one a session has
	// is drawn with weights 1/rank^Skew. System is how long they are: the
	// instructions and the descriptions of tools.
	SystemPrompts int
	Skew          float64
	System        Lengths

	User   Lengths // what a session begins with after the system prompt
	Output Lengths // what the engine answers in a turn
	Tool   Lengths // what a tool returns before the next turn
	Turns  Lengths // turns of a session, without those of its sub-agents

	// Branch is how likely a turn is followed by sub-agents: 2 to Branches of them,
	// each of which begins with all that the session knows and a task of its
	// own, and takes SubTurns turns, the sub-agents by turns. What they answered last
	// then comes back to the session, as the result of a tool.
	Branch   float64
	Branches int
	SubTurns Lengths

	// Context is where a session ends at the latest, in tokens.
	Context int
}

// Default returns the options of sessions of 8 turns in the middle, with system
// prompts of 2,048 tokens and contexts of up to 16,384.
func Default() Options {
	return Options{
		Seed:          1,
		SystemPrompts: 32,
		Skew:          1,
		System:        Lengths{Median: 2048, Sigma: 0.5, Min: 256, Max: 6144},
		User:          Lengths{Median: 160, Sigma: 1, Min: 8, Max: 4096},
		Output:        Lengths{Median: 96, Sigma: 0.9, Min: 4, Max: 1024},
		Tool:          Lengths{Median: 224, Sigma: 1.3, Min: 8, Max: 6144},
		Turns:         Lengths{Median: 8, Sigma: 0.9, Min: 1, Max: 80},
		Branch:        0.04,
		Branches:      4,
		SubTurns:      Lengths{Median: 3, Sigma: 0.6, Min: 1, Max: 12},
		Context:       16384,
	}
}

// Validate tells what is wrong with options.
func (o *Options) Validate() error {
	for _, l := range []struct {
		name string
		l    Lengths
	}{{"System", o.System}, {"User", o.User}, {"Output", o.Output}, {"Tool", o.Tool}, {"Turns", o.Turns}, {"SubTurns", o.SubTurns}} {
		if err := l.l.validate(l.name); err != nil {
			return err
		}
	}
	switch {
	case o.SystemPrompts < 1 || o.Skew < 0:
		return fmt.Errorf("workload: SystemPrompts is %d, Skew %v, want at least 1 and 0", o.SystemPrompts, o.Skew)
	case o.Branch < 0 || o.Branch > 1 || o.Branch > 0 && o.Branches < 2:
		return fmt.Errorf("workload: Branch is %v, Branches %d, want 0 to 1 and at least 2", o.Branch, o.Branches)
	case o.Context < 1 || o.Turns.Min < 1:
		return fmt.Errorf("workload: Context is %d, Turns.Min %d, want at least 1", o.Context, o.Turns.Min)
	}
	return nil
}

// Generator makes sessions. Any number of goroutines may use it.
type Generator struct {
	o      Options
	system []Segment
	weight []float64 // cumulative
}

// New returns a Generator.
func New(o Options) (*Generator, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	g := &Generator{o: o}
	rng := rand.New(rand.NewPCG(o.Seed, 0x5e551045))
	sum := 0.0
	for i := range o.SystemPrompts {
		sum += math.Pow(float64(i+1), -o.Skew)
		g.system = append(g.system, Segment{Seed: rng.Uint64(), Tokens: o.System.draw(rng)})
		g.weight = append(g.weight, sum)
	}
	return g, nil
}

// Session returns the session with a number.
func (g *Generator) Session(number uint64) *Session {
	rng := rand.New(rand.NewPCG(g.o.Seed, model.Mix(number)))
	at, _ := slices.BinarySearch(g.weight, rng.Float64()*g.weight[len(g.weight)-1])
	s := &Session{o: &g.o, rng: rng, number: number, left: g.o.Turns.draw(rng)}
	s.main.context = []Segment{g.system[min(at, len(g.system)-1)], s.say(g.o.User)}
	return s
}

// Session is the requests of one session, one after the other. It is not for
// concurrent use.
type Session struct {
	o      *Options
	rng    *rand.Rand
	number uint64
	left   int // turns
	main   branch
	subs   []*branch // that have turns left, the next one first
	back   []Segment // what sub-agents have answered
	ended  bool
}

// branch is a context that grows.
type branch struct {
	number  int
	context []Segment
	left    int // turns, of a sub-agent
}

// say returns a new segment.
func (s *Session) say(l Lengths) Segment {
	return Segment{Seed: s.rng.Uint64(), Tokens: l.draw(s.rng)}
}

// Number returns the number of the session.
func (s *Session) Number() uint64 { return s.number }

// Next returns the next turn, false when the session has ended.
func (s *Session) Next() (Turn, bool) {
	if len(s.subs) > 0 {
		return s.subTurn(), true
	}
	if len(s.back) > 0 {
		s.main.context = append(s.main.context, s.back...)
		s.back = nil
	}
	if s.ended || s.left == 0 || Length(s.main.context)+s.o.Output.Max > s.o.Context {
		s.ended = true
		return Turn{}, false
	}
	s.left--
	t := s.turn(&s.main)
	if s.left > 0 && s.rng.Float64() < s.o.Branch {
		s.fork()
	} else {
		s.main.context = append(s.main.context, s.say(s.o.Tool))
	}
	return t, true
}

// turn makes a turn of a branch, and lets its answer be part of the context.
func (s *Session) turn(b *branch) Turn {
	out := s.say(s.o.Output)
	t := Turn{Session: s.number, Branch: b.number, Prompt: slices.Clone(b.context), Output: out}
	b.context = append(b.context, out)
	return t
}

// fork begins sub-agents.
func (s *Session) fork() {
	for i := range 2 + s.rng.IntN(s.o.Branches-1) {
		b := &branch{number: i + 1, left: s.o.SubTurns.draw(s.rng), context: append(slices.Clone(s.main.context), s.say(s.o.User))}
		if b.left > 0 && Length(b.context)+s.o.Output.Max <= s.o.Context {
			s.subs = append(s.subs, b)
		}
	}
}

// subTurn makes the turn of the sub-agent whose turn it is.
func (s *Session) subTurn() Turn {
	b := s.subs[0]
	s.subs = s.subs[1:]
	b.left--
	t := s.turn(b)
	answer := b.context[len(b.context)-1]
	b.context = append(b.context, s.say(s.o.Tool))
	if b.left > 0 && Length(b.context)+s.o.Output.Max <= s.o.Context {
		s.subs = append(s.subs, b)
	} else {
		s.back = append(s.back, answer)
	}
	return t
}
