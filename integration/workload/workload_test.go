package workload

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/integration/trace"
)

func turns(s *Session) []Turn {
	var out []Turn
	for t, ok := s.Next(); ok; t, ok = s.Next() {
		out = append(out, t)
	}
	return out
}

func generator(t *testing.T, change func(*Options)) *Generator {
	t.Helper()
	o := Default()
	change(&o)
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// Within a branch every prompt begins with the prompt before it and its answer; a
// sub-agent's first prompt begins with what the session had said.
func TestSessionsGrow(t *testing.T) {
	g := generator(t, func(o *Options) { o.Branch = 0.3 })
	branched, longest, all := 0, 0, 0
	for n := range uint64(300) {
		context := map[int][]Segment{} // of each branch, so far
		for _, turn := range turns(g.Session(n)) {
			all++
			before := context[turn.Branch]
			if turn.Branch > 0 && (before == nil || !starts(turn.Prompt, before)) {
				branched++
				before = context[0]
			}
			if !starts(turn.Prompt, before) {
				t.Fatalf("session %d, branch %d: a prompt does not go on from the one before", n, turn.Branch)
			}
			context[turn.Branch] = append(slices.Clone(turn.Prompt), turn.Output)
			if got := Length(turn.Prompt) + turn.Output.Tokens; got > g.o.Context {
				t.Fatalf("session %d: %d tokens, want at most %d", n, got, g.o.Context)
			}
			longest = max(longest, Length(turn.Prompt))
		}
		if context[0] == nil {
			t.Fatalf("session %d has no turn", n)
		}
	}
	if branched < 300 || longest < g.o.Context/2 || all < 300*4 {
		t.Errorf("%d sub-agents, longest prompt %d, %d turns: too tame", branched, longest, all)
	}
}

func starts(prompt, with []Segment) bool {
	return len(prompt) >= len(with) && slices.Equal(prompt[:len(with)], with)
}

func TestSessionsAreSeeded(t *testing.T) {
	g, again := generator(t, func(*Options) {}), generator(t, func(*Options) {})
	other := generator(t, func(o *Options) { o.Seed = 2 })
	systems := map[Segment]int{}
	differ := 0
	for n := range uint64(400) {
		a, b := turns(g.Session(n)), turns(again.Session(n))
		if !reflect.DeepEqual(a, b) {
			t.Fatalf("session %d is another one the second time", n)
		}
		if !reflect.DeepEqual(a, turns(other.Session(n))) {
			differ++
		}
		systems[a[0].Prompt[0]]++
	}
	if differ != 400 {
		t.Errorf("%d of 400 sessions differ under another seed", differ)
	}
	if len(systems) < 10 || systems[g.system[0]] < 40 {
		t.Errorf("%d system prompts are in use, the first one %d times", len(systems), systems[g.system[0]])
	}
}

// The shares in which lengths fall show the heavy tail: the mean is far above the
// median.
func TestTurnsHaveAHeavyTail(t *testing.T) {
	g := generator(t, func(o *Options) { o.Branch, o.Context = 0, 1<<30 })
	var n []int
	sum := 0
	for i := range uint64(2000) {
		n = append(n, len(turns(g.Session(i))))
		sum += n[i]
	}
	slices.Sort(n)
	if median, mean := n[1000], float64(sum)/2000; median < 6 || median > 10 || mean < 1.2*float64(median) || n[1999] < 5*median {
		t.Errorf("median %d turns, mean %.1f, most %d", median, mean, n[1999])
	}
}

func TestOptions(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no system prompts": func(o *Options) { o.SystemPrompts = 0 },
		"negative skew":     func(o *Options) { o.Skew = -1 },
		"unlikely":          func(o *Options) { o.Branch = 1.5 },
		"one branch":        func(o *Options) { o.Branches = 1 },
		"no turns":          func(o *Options) { o.Turns.Min = 0 },
		"no context":        func(o *Options) { o.Context = 0 },
		"crossed":           func(o *Options) { o.Tool.Max = 3 },
		"negative":          func(o *Options) { o.User.Min = -1 },
		"sigma":             func(o *Options) { o.Output.Sigma = -1 },
	} {
		o := Default()
		change(&o)
		if _, err := New(o); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// A trace's request has the same tokens here and in package trace.
func TestFromTrace(t *testing.T) {
	requests, err := trace.Read(strings.NewReader(`{"timestamp": 1, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 9]}`))
	if err != nil {
		t.Fatal(err)
	}
	turn := FromTrace(&requests[0], 3)
	if !slices.Equal(Tokens(turn.Prompt), requests[0].AppendTokens(nil, Vocab)) {
		t.Error("other tokens than the trace's")
	}
	if turn.Output.Tokens != 7 || turn.Output == FromTrace(&requests[0], 4).Output {
		t.Errorf("output %+v", turn.Output)
	}
}
