package cache

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/integration/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var epoch = time.Unix(1_700_000_000, 0)

// pair is a Cache, the naive one beside it, and a reader of the events.
type pair struct {
	t      *testing.T
	o      Options
	c      *Cache
	n      *naive
	reader *model.Source
	seqs   map[model.Hash]uint64 // of the blocks by their names
}

func newPair(t *testing.T, o Options) *pair {
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	profile := model.VLLM
	if o.ClearHost {
		profile = model.SGLang
	}
	return &pair{t: t, o: c.o, c: c, n: newNaive(c.o), reader: model.New(c.o.BlockSize, profile), seqs: map[model.Hash]uint64{}}
}

// check compares what was said and what is held.
func (p *pair) check(what string) {
	p.t.Helper()
	events := p.c.Events()
	var said []line
	for _, e := range events {
		p.reader.Apply(e)
		said = append(said, p.linesOf(e)...)
	}
	want := p.n.lines
	p.n.lines = nil
	// What comes to the host and goes again between two looks is not said, and
	// removals come first.
	if !reflect.DeepEqual(deviceLines(said), deviceLines(want)) {
		p.t.Fatalf("%s: device events\n%v, want\n%v", what, deviceLines(said), deviceLines(want))
	}
	if got, want := hostChange(said), hostChange(want); !reflect.DeepEqual(got, want) {
		p.t.Fatalf("%s: host changed by\n%v, want\n%v", what, got, want)
	}
	device, host := p.c.Resident()
	held := p.reader.Resident()
	p.same(what+": device", device, held[model.Device])
	p.same(what+": host", host, held[model.Host])
}

func (p *pair) same(what string, have []uint64, announced map[uint64]bool) {
	p.t.Helper()
	if len(have) != len(announced) {
		p.t.Fatalf("%s: holds %d blocks, announced are %d", what, len(have), len(announced))
	}
	for _, seq := range have {
		if !announced[seq] {
			p.t.Fatalf("%s: block %d is held and not announced", what, seq)
		}
	}
}

// linesOf takes an event apart into blocks.
func (p *pair) linesOf(e model.Event) []line {
	p.t.Helper()
	if e.Op == model.Clear {
		return []line{{op: model.Clear}}
	}
	var out []line
	parent := e.Parent
	for i, h := range e.Hashes {
		l := line{op: e.Op, host: e.Medium != ""}
		if e.Op == model.Store && !l.host {
			if len(e.Tokens) != len(e.Hashes)*p.o.BlockSize {
				p.t.Fatalf("%d tokens for %d blocks", len(e.Tokens), len(e.Hashes))
			}
			l.first = uint32(e.Tokens[i*p.o.BlockSize])
			l.parent = p.seqs[parent]
			parent = h
			p.learn(h)
		}
		seq, ok := p.seqs[h]
		if !ok {
			p.t.Fatalf("an event names a block nobody stored: %v", e)
		}
		l.seq = seq
		out = append(out, l)
	}
	return out
}

// learn finds out which block has a name.
func (p *pair) learn(h model.Hash) {
	device, _ := p.c.Resident()
	for _, seq := range device {
		p.seqs[p.c.name(seq)] = seq
	}
	if _, ok := p.seqs[h]; ok {
		return
	}
	for _, l := range p.n.lines { // stored and evicted since the last look
		p.seqs[p.c.name(l.seq)] = l.seq
	}
}

func deviceLines(lines []line) []line {
	return slices.DeleteFunc(slices.Clone(lines), func(l line) bool { return l.host })
}

// hostChange sums up what lines do to the host.
func hostChange(lines []line) map[uint64]int {
	out := map[uint64]int{}
	for _, l := range lines {
		if !l.host {
			continue
		}
		if l.op == model.Store {
			out[l.seq]++
		} else {
			out[l.seq]--
		}
		if out[l.seq] == 0 {
			delete(out, l.seq)
		}
	}
	return out
}

type running struct {
	r *Request
	n *naiveRequest
}

// TestAgainstNaive runs random requests over caches small enough that everything
// is evicted again and again.
func TestAgainstNaive(t *testing.T) {
	var sum totals
	t.Run("seeds", func(t *testing.T) { manySeeds(t, &sum) })
	if sum.device.Load() < 10_000 || sum.host.Load() < 2000 || sum.full.Load() < 1000 {
		t.Errorf("tame walks: %d and %d tokens hit, full %d times", sum.device.Load(), sum.host.Load(), sum.full.Load())
	}
}

// totals are what many walks did.
type totals struct{ device, host, full atomic.Int64 }

func manySeeds(t *testing.T, sum *totals) {
	for seed := range uint64(120) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 7))
			o := Options{
				BlockSize: 1 + rng.IntN(4), Device: 4 + rng.IntN(40), Host: rng.IntN(40), Transfer: time.Duration(rng.IntN(30)) * time.Millisecond,
				WriteThrough: rng.IntN(2) == 0, ClearHost: rng.IntN(2) == 0, GroupRemoved: rng.IntN(2) == 0, Seed: seed,
			}
			walk(newPair(t, o), rng, 400, sum)
		})
	}
}

func walk(p *pair, rng *rand.Rand, steps int, sum *totals) {
	t := p.t
	var live []running
	now := epoch
	var prompts []Prompt
	for step := range steps {
		now = now.Add(time.Duration(rng.IntN(20)) * time.Millisecond)
		what := fmt.Sprintf("step %d of %+v", step, p.o)
		switch k := rng.IntN(100); {
		case k < 45:
			prompt := nextPrompt(rng, &prompts, p.o)
			r, err := p.c.Start(now, prompt)
			n, naiveErr := p.n.start(now, prompt)
			if !errors.Is(err, naiveErr) || (err == nil) != (naiveErr == nil) {
				t.Fatalf("%s: start: %v, want %v", what, err, naiveErr)
			}
			if err != nil {
				sum.full.Add(1)
				break
			}
			if r.HitDevice != n.hits[0] || r.HitHost != n.hits[1] || !r.Ready.Equal(n.ready) {
				t.Fatalf("%s: hits %d and %d, ready %v, want %v, %v", what, r.HitDevice, r.HitHost, r.Ready, n.hits, n.ready)
			}
			sum.device.Add(int64(r.HitDevice))
			sum.host.Add(int64(r.HitHost))
			live = append(live, running{r, n})
		case k < 65 && len(live) > 0:
			x := live[rng.IntN(len(live))]
			tokens := someTokens(rng, 1+rng.IntN(2*p.o.BlockSize))
			err, naiveErr := p.c.Append(now, x.r, tokens), p.n.append(now, x.n, tokens)
			if !errors.Is(err, naiveErr) || (err == nil) != (naiveErr == nil) {
				t.Fatalf("%s: append: %v, want %v", what, err, naiveErr)
			}
			if err == nil {
				prompts = append(prompts, x.n.prompt)
			}
		case k < 97 && len(live) > 0:
			i := rng.IntN(len(live))
			p.c.Finish(now, live[i].r)
			p.n.finish(now, live[i].n)
			live = slices.Delete(live, i, i+1)
		case k >= 97:
			if err, want := p.c.Clear(now), p.n.clear(now); !errors.Is(err, want) || (err == nil) != (want == nil) {
				t.Fatalf("%s: clear: %v, want %v", what, err, want)
			}
		default:
			p.c.Tick(now)
			p.n.tick(now)
		}
		if rng.IntN(4) > 0 {
			p.check(what)
		}
	}
	p.check("end")
}

// nextPrompt returns a new prompt, or one that begins as another did.
func nextPrompt(rng *rand.Rand, prompts *[]Prompt, o Options) Prompt {
	var p Prompt
	if rng.IntN(6) == 0 {
		p.LoRA = "adapter"
	}
	if len(*prompts) > 0 && rng.IntN(5) > 0 {
		p = (*prompts)[rng.IntN(len(*prompts))]
		p.Tokens = slices.Clone(p.Tokens[:rng.IntN(len(p.Tokens)+1)])
	}
	if rng.IntN(3) > 0 {
		p.Tokens = append(p.Tokens, someTokens(rng, rng.IntN(1+o.BlockSize*o.Device/3))...)
	}
	*prompts = append(*prompts, p)
	if len(*prompts) > 20 {
		*prompts = (*prompts)[1:]
	}
	return p
}

func someTokens(rng *rand.Rand, n int) []uint32 {
	out := make([]uint32, n)
	for i := range out {
		out[i] = rng.Uint32N(1000)
	}
	return out
}
