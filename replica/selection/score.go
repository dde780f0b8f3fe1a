package selection

import (
	"math"
	"math/rand/v2"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
)

// Overlap is what a worker rank holds of a prompt, in blocks: in device memory
// from the beginning, and what each next tier adds to that.
type Overlap struct{ Device, Host, Disk uint32 }

// Longest returns how far all tiers reach.
func (o Overlap) Longest() uint32 { return o.Device + o.Host + o.Disk }

func overlapOf(ends *[event.Tiers]uint32) Overlap {
	return Overlap{ends[event.Device], ends[event.Host] - ends[event.Device], ends[event.External] - ends[event.Host]}
}

// Choice is what a worker is to be chosen from. It is valid while a Scorer or a
// Picker runs; they must not keep it, nor call the Selector or the load.
type Choice struct {
	// Request is what asks, and Params its weights.
	Request *Request
	Params  *Params
	// BlockSize is in tokens, Tokens and Blocks are the prompt's length.
	BlockSize, Tokens, Blocks uint32
	// Candidates are all worker ranks of the partition. Eligible tells which
	// may be chosen; nil: all. Overlaps has what each holds.
	Candidates []Candidate
	Eligible   []bool
	Overlaps   []Overlap
	// Session is the candidate that served the session last; -1: none.
	Session int

	loads []load.Load
}

// May tells whether candidate i may be chosen.
func (c *Choice) May(i int) bool { return c.Eligible == nil || c.Eligible[i] }

// Load returns what is active on candidate i.
func (c *Choice) Load(i int) load.Load { return c.loads[c.Candidates[i].slot] }

// Scorer gives candidates their costs.
type Scorer interface {
	// Score sets costs[i] to what it would cost to serve the request with
	// candidate i, for each that may be chosen: less is better. It is called
	// by any number of goroutines at once, and while it runs no booking is
	// made, so it should take microseconds.
	Score(c *Choice, costs []float64)
}

// Picker chooses a candidate by its cost.
type Picker interface {
	// Pick returns a candidate that may be chosen, or -1. It is called as
	// Score is.
	Pick(c *Choice, costs []float64) int
}

// CostScorer is the built-in Scorer: what is to be prefilled, less what the cache
// saves, and what is decoded, in blocks.
//
//	prefill = (tokens being prefilled + the prompt's) / block size
//	saved   = DeviceCredit x device blocks + HostCredit x host blocks + DiskCredit x disk blocks
//	cost    = PrefillScale x max(0, prefill - saved) + active blocks + the prompt's blocks + RequestWeight x active requests
//
// multiplied by exp(-tanh(sum of the weights of the preferred taints that the
// worker has)).
type CostScorer struct{}

// Score implements Scorer.
func (CostScorer) Score(c *Choice, costs []float64) {
	p := c.Params
	perBlock := 1 / float64(c.BlockSize)
	own := float64(c.Blocks)
	prompt := float64(c.Tokens) * perBlock
	least := 0.0
	if p.CreditDecay > 0 {
		least = c.leastPrefill()
	}
	for i := range c.Candidates {
		if c.Eligible != nil && !c.Eligible[i] {
			continue
		}
		l, o := &c.loads[c.Candidates[i].slot], &c.Overlaps[i]
		prefill, device := prompt, p.DeviceCredit
		if p.TrackPrefill {
			prefill += float64(l.Prefill) * perBlock
		}
		if p.CreditDecay > 0 && c.Tokens > 0 {
			device /= 1 + p.CreditDecay*max(0, float64(l.Prefill)-least)/float64(c.Tokens)
		}
		prefill -= device*float64(o.Device) + p.HostCredit*float64(o.Host) + p.DiskCredit*float64(o.Disk)
		cost := float64(l.Blocks)*(1.0/load.Unit) + own + p.RequestWeight*float64(l.Requests)
		if prefill > 0 {
			cost += p.PrefillScale * prefill
		}
		if i == c.Session {
			cost -= p.SessionCredit * own
		}
		costs[i] = cost
	}
	if len(c.Request.Preferred) > 0 {
		c.prefer(costs)
	}
}

// leastPrefill returns the fewest tokens that a candidate has to prefill.
func (c *Choice) leastPrefill() float64 {
	least := int64(math.MaxInt64)
	for i := range c.Candidates {
		if c.May(i) {
			least = min(least, c.loads[c.Candidates[i].slot].Prefill)
		}
	}
	return float64(least)
}

// prefer makes candidates with preferred taints cheaper, and with taints that
// are preferred by less than nothing dearer.
func (c *Choice) prefer(costs []float64) {
	for i := range c.Candidates {
		if !c.May(i) {
			continue
		}
		sum := 0.0
		for taint, weight := range c.Request.Preferred {
			if c.Candidates[i].Worker.hasTaint(taint) {
				sum += weight
			}
		}
		factor := math.Exp(-math.Tanh(sum))
		if costs[i] < 0 { // more than its whole cost was taken off for the session
			factor = 1 / factor
		}
		costs[i] *= factor
	}
}

// CostPicker is the built-in Picker: at temperature 0 one of those with the least
// cost, each with the same probability; above, any, the less likely the more it
// costs.
type CostPicker struct {
	// Float64 returns random numbers in [0, 1) to any number of goroutines;
	// nil: those of math/rand/v2.
	Float64 func() float64
}

func (p CostPicker) random() float64 {
	if p.Float64 != nil {
		return p.Float64()
	}
	return rand.Float64()
}

// Pick implements Picker.
func (p CostPicker) Pick(c *Choice, costs []float64) int {
	if c.Params.Temperature > 0 {
		return p.draw(c, costs)
	}
	least, ties := math.Inf(1), 0
	for i, cost := range costs {
		switch {
		case c.Eligible != nil && !c.Eligible[i]:
		case cost < least:
			least, ties = cost, 1
		case cost == least:
			ties++
		}
	}
	skip := 0
	if ties > 1 {
		skip = min(int(p.random()*float64(ties)), ties-1)
	}
	for i, cost := range costs {
		if cost != least || c.Eligible != nil && !c.Eligible[i] {
			continue
		}
		if skip == 0 {
			return i
		}
		skip--
	}
	return -1
}

// draw draws by exp(-cost/Temperature), costs scaled to 0..1.
func (p CostPicker) draw(c *Choice, costs []float64) int {
	low, high := math.Inf(1), math.Inf(-1)
	for i, cost := range costs {
		if c.May(i) {
			low, high = min(low, cost), max(high, cost)
		}
	}
	weight := func(cost float64) float64 {
		if high <= low {
			return 1
		}
		// Divided one after the other: their product may be 0.
		return math.Exp((low - cost) / (high - low) / c.Params.Temperature)
	}
	sum := 0.0
	for i, cost := range costs {
		if c.May(i) {
			sum += weight(cost)
		}
	}
	at, last := p.random()*sum, -1
	for i, cost := range costs {
		if !c.May(i) {
			continue
		}
		w := weight(cost)
		if w > 0 {
			last = i
		}
		if at -= w; at < 0 {
			break
		}
	}
	return last
}
