package selection

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
)

// Request is what a worker is selected for.
type Request struct {
	event.Partition
	// ID names the selection, and the reservation that it becomes; empty: a
	// new name, if it is booked.
	ID string
	// Locals are the local hashes of the prompt's whole blocks, and Tokens is
	// its length; 0: what the blocks hold.
	Locals []uint64
	Tokens uint32
	// Params are the weights of this request; nil: those of the Selector.
	Params *Params
	// Allowed are the instances that may be chosen; nil: all.
	Allowed []string
	// Pinned is the only instance that may be chosen; empty: none is. Its
	// rank, unless PinnedRank is nil.
	Pinned     string
	PinnedRank *uint32
	// Required are taints that the worker must have, Preferred those that it
	// had better have, with weights.
	Required  []string
	Preferred map[string]float64
	// Session is whose request it is; empty: nobody's.
	Session string
	// Priority puts a request that is held back before those with less, and
	// Jump before those of its priority that came so many seconds earlier.
	Priority uint32
	Jump     float64
	// Advisory asks for the choice without waiting for a worker that is not
	// busy.
	Advisory bool
}

// Result is a choice.
type Result struct {
	ID     string
	Source event.Source
	Worker *Worker
	// BlockSize is in tokens; Blocks and Tokens are the prompt's length.
	BlockSize, Blocks, Tokens uint32
	// Overlap is what the worker holds, and PrefillTokens what it has to
	// compute.
	Overlap       Overlap
	PrefillTokens uint32
	// Load is what was active there before.
	Load load.Load
	// Cost is what the Scorer said.
	Cost float64
	// Position is what the overlaps are true for.
	event.Position
	// Better is another worker that holds more, which the chosen one can
	// fetch from; nil: none, or it takes no hints.
	Better *Better
}

// Better is a worker that holds more of a prompt than the chosen one.
type Better struct {
	Source   event.Source
	Endpoint string // its control endpoint
	Blocks   uint32 // that it holds, from the beginning
}

// PotentialBlocks returns how many blocks the worker has in use with this
// request, rounded up.
func (r *Result) PotentialBlocks() uint64 {
	return uint64(math.Ceil(float64(r.Load.Blocks)/load.Unit)) + uint64(r.Blocks)
}

// buffer is the memory of a selection.
type buffer struct {
	query    indexer.Query
	overlaps []Overlap
	eligible []bool
	costs    []float64
	choice   Choice
	pick     load.Pick // s.choose on this buffer, made once

	pool    *pool
	request *Request
	result  *Result
	// Where index sources are in the pool, by their address, which stays the
	// same for a source. Looked at again if the pool is another one.
	places map[*event.Source]int32
	of     *pool
}

// Select chooses a worker and books nothing. Errors wrap ErrRequest, ErrNoWorkers,
// ErrOverloaded, ErrQueueFull, or those of the index.
func (s *Selector) Select(ctx context.Context, r *Request) (Result, error) {
	return s.run(ctx, r, false)
}

// SelectAndReserve chooses a worker and books the request there. Errors are those
// of Select, and those of load.Shared.Reserve.
func (s *Selector) SelectAndReserve(ctx context.Context, r *Request) (Result, error) {
	return s.run(ctx, r, true)
}

func (s *Selector) run(ctx context.Context, r *Request, book bool) (Result, error) {
	if s.tracer != nil {
		return s.runTraced(ctx, r, book)
	}
	out, _, err := s.runPlain(ctx, r, book)
	return out, err
}

// runPlain is run without a span. held tells whether the request was held back.
func (s *Selector) runPlain(ctx context.Context, r *Request, book bool) (out Result, held bool, err error) {
	err = errBusy
	if !s.outrun(r) {
		err = s.once(ctx, r, book, &out)
	}
	if errors.Is(err, errBusy) {
		held = true
		err = s.hold(ctx, r, book, &out)
	}
	s.metrics.selected(err)
	return out, held, err
}

// errBusy: every worker that may serve the request is busy now.
var errBusy = fmt.Errorf("%w now", ErrOverloaded)

// once selects once, and does not wait.
func (s *Selector) once(ctx context.Context, r *Request, book bool, out *Result) error {
	if err := s.load.Ready(); err != nil {
		return err
	}
	p, err := s.pool(r.Partition)
	if err != nil {
		return err
	}
	if s.serves != nil && !s.serves(r.Partition) {
		return &ElsewhereError{r.Partition}
	}
	if len(p.candidates) == 0 {
		return fmt.Errorf("%w: none of model=%s routing_group=%s can be chosen", ErrNoWorkers, r.Model, r.Group)
	}
	b := s.buffers.Get().(*buffer)
	defer s.put(b)
	if err := s.prepare(b, p, r, out); err != nil {
		return err
	}
	if !book {
		s.load.View(func(loads []load.Load) { err = s.choose(b, loads) })
	} else {
		booking := load.Booking{ID: r.ID, PrefillTokens: 0, Session: r.Session}
		if booking.ID == "" {
			booking.ID = NewID()
		}
		out.ID = booking.ID
		if s.strict != nil {
			err = s.strict.ReserveBy(ctx, &booking, b.pick)
		} else {
			err = s.load.ReserveBy(&booking, b.pick)
		}
		err = s.booked(booking, err)
	}
	if err != nil {
		return err
	}
	if p.hints {
		out.Better = b.better(out)
	}
	return nil
}

func (s *Selector) put(b *buffer) {
	b.pool, b.request, b.result = nil, nil, nil
	b.choice = Choice{}
	s.buffers.Put(b)
}

// prepare works out all that does not depend on the load.
func (s *Selector) prepare(b *buffer, p *pool, r *Request, out *Result) error {
	n := len(p.candidates)
	if cap(b.overlaps) < n {
		b.overlaps, b.costs, b.eligible = make([]Overlap, n), make([]float64, n), make([]bool, n)
	}
	b.overlaps, b.costs = b.overlaps[:n], b.costs[:n]
	clear(b.overlaps)
	params := r.Params
	if params == nil {
		params = &s.cfg.Params
	}
	for taint, weight := range r.Preferred {
		if !(weight >= -MaxWeight && weight <= MaxWeight) { // not a number is wrong too
			return fmt.Errorf("%w: the weight of the preferred taint %q is %v, want %v to %v", ErrRequest, taint, weight, -MaxWeight, MaxWeight)
		}
	}
	out.ID, out.BlockSize, out.Tokens = r.ID, p.blockSize, r.Tokens
	if err := s.overlaps(b, p, r, out); err != nil {
		return err
	}
	if out.Tokens == 0 {
		out.Tokens = uint32(len(r.Locals)) * out.BlockSize
	}
	out.Blocks = max(uint32((uint64(out.Tokens)+uint64(out.BlockSize)-1)/uint64(out.BlockSize)), uint32(len(r.Locals)))
	b.pool, b.request, b.result = p, r, out
	b.choice = Choice{
		Request: r, Params: params, BlockSize: out.BlockSize, Tokens: out.Tokens, Blocks: out.Blocks,
		Candidates: p.candidates, Overlaps: b.overlaps, Session: -1,
	}
	if r.Session != "" {
		if w, ok := s.load.Session(r.Session); ok {
			if i, ok := p.at[w]; ok {
				b.choice.Session = int(i)
			}
		}
	}
	if b.pick == nil {
		b.pick = func(loads []load.Load, booking *load.Booking) error {
			if err := s.choose(b, loads); err != nil {
				return err
			}
			res := b.result
			booking.Worker, booking.Blocks, booking.Tokens = res.Source, res.Blocks, res.Tokens
			if b.choice.Params.TrackPrefill {
				booking.PrefillTokens = res.PrefillTokens
			}
			return nil
		}
	}
	return b.limit()
}

// overlaps asks the index who holds what. Workers that it does not know hold
// nothing.
func (s *Selector) overlaps(b *buffer, p *pool, r *Request, out *Result) error {
	if len(r.Locals) == 0 {
		return nil
	}
	a, err := s.index.Match(&b.query, r.Partition, r.Locals)
	if errors.Is(err, indexer.ErrUnknownPartition) {
		return nil
	}
	if err != nil {
		return err
	}
	out.Position = event.Position{LogSeq: a.LogSeq, LogSeqs: slices.Clone(a.LogSeqs)}
	if a.BlockSize != 0 {
		out.BlockSize = a.BlockSize
	}
	if b.of != p || len(b.places) > 4*len(p.candidates)+64 {
		b.of, b.places = p, make(map[*event.Source]int32, len(p.candidates))
	}
	for i := range a.Holdings {
		h := &a.Holdings[i]
		at, ok := b.places[h.Source]
		if !ok || at >= 0 && p.candidates[at].Source != *h.Source {
			at = -1
			if j, known := p.at[*h.Source]; known {
				at = j
			}
			b.places[h.Source] = at
		}
		if at >= 0 {
			b.overlaps[at] = overlapOf(&h.Ends)
		}
	}
	return nil
}

// limit works out which candidates may be chosen.
func (b *buffer) limit() error {
	r, p := b.request, b.pool
	if r.Pinned == "" && r.Allowed == nil && len(r.Required) == 0 {
		return nil
	}
	eligible := b.eligible[:len(p.candidates)]
	some, there := false, false
	var allowed map[string]bool
	if len(r.Allowed) > 8 {
		allowed = make(map[string]bool, len(r.Allowed))
		for _, id := range r.Allowed {
			allowed[id] = true
		}
	}
	for i := range p.candidates {
		c := &p.candidates[i]
		pinned := r.Pinned == "" || c.Source.Instance == r.Pinned && (r.PinnedRank == nil || *r.PinnedRank == c.Source.Rank)
		there = there || pinned
		eligible[i] = pinned && r.allows(c, allowed) && c.has(r.Required)
		some = some || eligible[i]
	}
	switch {
	case some:
		b.choice.Eligible = eligible
		return nil
	case !there:
		return fmt.Errorf("%w: pinned worker %s can't be chosen", ErrNoWorkers, r.Pinned)
	case r.Pinned != "" && r.Allowed != nil:
		return fmt.Errorf("%w: pinned worker %s is not among the allowed ones, or lacks a required taint", ErrRequest, r.Pinned)
	}
	return fmt.Errorf("%w: none that is allowed has the taints %q", ErrNoWorkers, r.Required)
}

func (r *Request) allows(c *Candidate, allowed map[string]bool) bool {
	if r.Allowed == nil || allowed[c.Source.Instance] {
		return true
	}
	if allowed == nil {
		for _, id := range r.Allowed {
			if id == c.Source.Instance {
				return true
			}
		}
	}
	return false
}

func (c *Candidate) has(taints []string) bool {
	for _, t := range taints {
		if !c.Worker.hasTaint(t) {
			return false
		}
	}
	return true
}

// choose scores and picks, while no load changes.
func (s *Selector) choose(b *buffer, loads []load.Load) error {
	c := &b.choice
	c.loads = loads
	if s.cfg.QueueThreshold > 0 && !b.request.Advisory {
		before := c.Eligible
		if !s.spare(b) {
			c.Eligible = before
			return errBusy
		}
		defer func() { c.Eligible = before }()
	}
	s.scorer.Score(c, b.costs)
	i := s.picker.Pick(c, b.costs)
	if i < 0 || i >= len(c.Candidates) || !c.May(i) {
		return fmt.Errorf("%w: none was picked", ErrNoWorkers)
	}
	chosen, out := &c.Candidates[i], b.result
	out.Source, out.Worker, out.Overlap, out.Load, out.Cost = chosen.Source, chosen.Worker, c.Overlaps[i], c.Load(i), b.costs[i]
	out.PrefillTokens = out.Tokens - min(out.Tokens, uint32(c.Params.saved(out.Overlap)*float64(out.BlockSize)))
	return nil
}

// saved returns how many blocks of prefill an overlap saves.
func (p *Params) saved(o Overlap) float64 {
	return p.DeviceCredit*float64(o.Device) + p.HostCredit*float64(o.Host) + p.DiskCredit*float64(o.Disk)
}

// spare takes the busy candidates out of the choice. It tells whether any is
// left.
func (s *Selector) spare(b *buffer) bool {
	c := &b.choice
	busy, left := false, false
	for i := range c.Candidates {
		if !c.May(i) {
			continue
		}
		if float64(c.Load(i).Prefill) > s.cfg.QueueThreshold*c.Candidates[i].capacity {
			busy = true
		} else {
			left = true
		}
	}
	if !busy || !left {
		return left
	}
	eligible := make([]bool, len(c.Candidates))
	for i := range eligible {
		eligible[i] = c.May(i) && float64(c.Load(i).Prefill) <= s.cfg.QueueThreshold*c.Candidates[i].capacity
	}
	c.Eligible = eligible
	return true
}

// better returns the candidate that holds the most of the prompt, if the chosen
// one can fetch from it and holds less.
func (b *buffer) better(out *Result) *Better {
	if out.Worker.HintType == "" {
		return nil
	}
	best, most := -1, out.Overlap.Longest()
	for i := range b.pool.candidates {
		c := &b.pool.candidates[i]
		if n := b.overlaps[i].Longest(); n > most && c.Source != out.Source && c.Worker.HintType == out.Worker.HintType && c.Worker.HintEndpoints[c.Source.Rank] != "" {
			best, most = i, n
		}
	}
	if best < 0 {
		return nil
	}
	c := &b.pool.candidates[best]
	return &Better{Source: c.Source, Endpoint: c.Worker.HintEndpoints[c.Source.Rank], Blocks: most}
}

// Overlaps returns what each worker rank of a partition that can be chosen holds
// of a prompt, those that hold nothing too, and the position that it is true
// for.
func (s *Selector) Overlaps(name event.Partition, locals []uint64) (Partition, []Overlap, event.Position, error) {
	p, err := s.pool(name)
	if err != nil {
		return Partition{}, nil, event.Position{}, err
	}
	if s.serves != nil && !s.serves(name) {
		return Partition{}, nil, event.Position{}, &ElsewhereError{name}
	}
	b := s.buffers.Get().(*buffer)
	defer s.put(b)
	out := Result{BlockSize: p.blockSize}
	own := b.overlaps
	b.overlaps = make([]Overlap, len(p.candidates))
	err = s.overlaps(b, p, &Request{Partition: name, Locals: locals}, &out)
	overlaps := b.overlaps
	b.overlaps = own
	return Partition{out.BlockSize, p.eagle, p.candidates}, overlaps, out.Position, err
}

// Params returns the weights of requests that bring none.
func (s *Selector) Params() Params { return s.cfg.Params }

// Saved returns what an overlap saves, in blocks of prefill.
func (p *Params) Saved(o Overlap) float64 { return p.saved(o) }
