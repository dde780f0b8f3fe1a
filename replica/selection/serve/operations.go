package serve

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

type status struct {
	Status string `json:"status"`
}

// changeTimeout is how long a change of the fleet may take.
const changeTimeout = 10 * time.Second

// -- workers ------------------------------------------------------------------

func (x *Server) upsertWorker(c *call) (int, any, error) {
	record, err := selection.ParseRecord(c.body)
	if err != nil {
		return 0, nil, err
	}
	ctx, cancel := context.WithTimeout(c.ctx, changeTimeout)
	defer cancel()
	if err := x.roster.Upsert(ctx, record); err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, x.record(record.WorkerID.Text, record), nil
}

func (x *Server) patchWorker(c *call) (int, any, error) {
	ctx, cancel := context.WithTimeout(c.ctx, changeTimeout)
	defer cancel()
	var record selection.Record
	err := x.roster.Patch(ctx, c.id, func(before selection.Record) (after selection.Record, err error) {
		record, err = before.Patch(c.body)
		return record, err
	})
	if err != nil {
		return 0, nil, err
	}
	return http.StatusOK, x.record(c.id, record), nil
}

func (x *Server) deleteWorker(c *call) (int, any, error) {
	ctx, cancel := context.WithTimeout(c.ctx, changeTimeout)
	defer cancel()
	last := x.record(c.id, selection.Record{})
	if _, err := x.roster.Delete(ctx, c.id); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, last, nil
}

// record returns the record of a worker as it is now.
func (x *Server) record(id string, otherwise selection.Record) selection.Record {
	for _, st := range x.selector.Workers() {
		if st.Worker.Instance == id {
			return selection.RecordOf(&st)
		}
	}
	return otherwise
}

// -- selections ---------------------------------------------------------------

// selectRequest is the body of /select and /select_and_reserve.
type selectRequest struct {
	scope
	SelectionID    *string  `json:"selection_id"`
	ExpectedOutput *uint32  `json:"expected_output_tokens"`
	PriorityJump   *float64 `json:"priority_jump"`
	Priority       *uint32  `json:"strict_priority"`
	PlainPriority  *uint32  `json:"priority"`
	SessionID      *string  `json:"session_id"`
	Session        *struct {
		ID    string `json:"session_id"`
		Final bool   `json:"session_final"`
	} `json:"session_context"`
	Pinned *struct {
		WorkerID selection.ID `json:"worker_id"`
		Rank     *uint32      `json:"dp_rank"`
	} `json:"pinned_worker"`
	Allowed     []selection.ID `json:"allowed_worker_ids"`
	Constraints *struct {
		Required  []string           `json:"required_taints"`
		Preferred map[string]float64 `json:"preferred_taints"`
	} `json:"routing_constraints"`
	Advisory bool `json:"advisory"`
}

// overlap is what a worker holds, in tokens.
type overlap struct {
	LongestMatched uint64            `json:"longest_matched"`
	GPU            uint64            `json:"gpu"`
	DP             map[string]uint64 `json:"dp"`
	CPU            uint64            `json:"cpu"`
	Disk           uint64            `json:"disk"`
}

type workerLoad struct {
	ActivePrefillTokens  int64   `json:"active_prefill_tokens"`
	ActiveDecodeBlocks   float64 `json:"active_decode_blocks"`
	ActiveRequests       int64   `json:"active_requests"`
	PrefillTokenCapacity uint64  `json:"prefill_token_capacity,omitempty"`
	TotalBlocks          uint64  `json:"total_kv_blocks,omitempty"`
}

type hint struct {
	Endpoint    string       `json:"source_control_endpoint"`
	BlockHashes []blockName  `json:"block_hashes"`
	WorkerID    selection.ID `json:"source_worker_id"`
	Rank        uint32       `json:"source_dp_rank"`
}

// blockName is an engine's name of a block: an integer, a text, or bytes, which are
// written in hexadecimal.
type blockName event.EngineHash

// MarshalJSON implements json.Marshaler.
func (n blockName) MarshalJSON() ([]byte, error) {
	switch {
	case n.Name == nil:
		return strconv.AppendUint(nil, n.Bits, 10), nil
	case n.Text:
		return json.Marshal(string(n.Name))
	}
	return json.Marshal(hex.EncodeToString(n.Name))
}

// selectReply is the answer to /select and /select_and_reserve.
type selectReply struct {
	SelectionID     string       `json:"selection_id,omitempty"`
	ModelName       string       `json:"model_name"`
	RoutingGroup    string       `json:"routing_group"`
	WorkerID        selection.ID `json:"worker_id"`
	Rank            uint32       `json:"dp_rank"`
	Endpoint        string       `json:"endpoint"`
	BlockSize       uint32       `json:"block_size"`
	Tokens          uint32       `json:"isl_tokens"`
	TrackPrefill    bool         `json:"track_prefill_tokens"`
	Overlap         overlap      `json:"overlap"`
	PrefillTokens   uint32       `json:"effective_prefill_tokens"`
	PotentialBlocks uint64       `json:"potential_decode_blocks"`
	Cost            float64      `json:"cost"`
	Load            *workerLoad  `json:"worker_load,omitempty"`
	Hint            *hint        `json:"router_hint,omitempty"`
	event.PositionJSON
}

// request makes a selection's request of a body. a has its long members; the
// request is valid as long as they are.
func (x *Server) request(q *selectRequest, a *arrays) (*selection.Request, error) {
	name := q.partition()
	p, err := x.selector.Partition(name)
	if err != nil {
		return nil, err
	}
	prompt, err := q.need(a, nil, p.BlockSize, p.Eagle)
	if err != nil {
		return nil, err
	}
	r := &selection.Request{Partition: name, ID: or(q.SelectionID, ""), Locals: prompt.locals, Tokens: prompt.tokens, Session: or(q.SessionID, ""), Jump: or(q.PriorityJump, 0), Advisory: q.Advisory}
	if r.Priority = or(q.Priority, 0); q.Priority == nil {
		r.Priority = or(q.PlainPriority, 0)
	}
	if r.Params, err = q.Override.over(x.selector.Params()); err != nil {
		return nil, err
	}
	if q.Session != nil {
		r.Session = q.Session.ID
	}
	if q.Pinned != nil {
		if r.Pinned, r.PinnedRank = q.Pinned.WorkerID.Text, q.Pinned.Rank; r.Pinned == "" {
			return nil, fmt.Errorf("%w: pinned_worker: worker_id is missing", selection.ErrRequest)
		}
	}
	if q.Allowed != nil {
		r.Allowed = make([]string, len(q.Allowed))
		for i, id := range q.Allowed {
			r.Allowed[i] = id.Text
		}
	}
	if q.Constraints != nil {
		r.Required, r.Preferred = q.Constraints.Required, q.Constraints.Preferred
	}
	if q.SelectionID != nil && (r.ID == "" || len(r.ID) > load.MaxID) {
		return nil, fmt.Errorf("%w: selection_id has %d bytes, want 1 to %d", selection.ErrRequest, len(r.ID), load.MaxID)
	}
	if len(r.Session) > load.MaxID || math.IsNaN(r.Jump) {
		return nil, fmt.Errorf("%w: session_id has %d bytes, want at most %d", selection.ErrRequest, len(r.Session), load.MaxID)
	}
	return r, nil
}

func (x *Server) selectOnly(c *call) (int, any, error)       { return x.choose(c, false) }
func (x *Server) selectAndReserve(c *call) (int, any, error) { return x.choose(c, true) }

func (x *Server) choose(c *call, book bool) (int, any, error) {
	a := x.arrays.get()
	defer x.arrays.put(a)
	var q selectRequest
	if err := a.decode(c.body, &q); err != nil {
		return 0, nil, err
	}
	if book && q.Advisory {
		return 0, nil, fmt.Errorf("%w: advisory is for /select: it books nothing", selection.ErrRequest)
	}
	r, err := x.request(&q, a)
	if err != nil {
		return 0, nil, err
	}
	var res selection.Result
	if book {
		res, err = x.selector.SelectAndReserve(c.ctx, r)
	} else {
		res, err = x.selector.Select(c.ctx, r)
	}
	if err != nil {
		return 0, nil, err
	}
	if q.Session != nil && q.Session.Final {
		x.selector.Load().EndSession(q.Session.ID)
	}
	params := r.Params
	if params == nil {
		own := x.selector.Params()
		params = &own
	}
	if !book && r.ID != "" {
		b := load.Booking{ID: r.ID, Worker: res.Source, Blocks: res.Blocks, Tokens: res.Tokens, Session: r.Session}
		if params.TrackPrefill {
			b.PrefillTokens = res.PrefillTokens
		}
		x.selector.Load().Keep(b)
	}
	reply := newSelectReply(r, &res, params)
	if q.Advisory {
		reply.Load = &workerLoad{res.Load.Prefill, float64(res.Load.Blocks) / load.Unit, res.Load.Requests, res.Worker.MaxBatchedTokens, res.Worker.TotalBlocks}
	}
	if res.Better != nil {
		reply.Hint = x.hint(c.ctx, r, res.Better)
	}
	return http.StatusOK, reply, nil
}

func newSelectReply(r *selection.Request, res *selection.Result, p *selection.Params) *selectReply {
	tokens := func(blocks uint32) uint64 { return uint64(blocks) * uint64(res.BlockSize) }
	o := res.Overlap
	return &selectReply{
		SelectionID: res.ID, ModelName: r.Model, RoutingGroup: r.Group,
		WorkerID: selection.ID{Text: res.Source.Instance, Integer: res.Worker.IntegerID}, Rank: res.Source.Rank, Endpoint: res.Worker.Endpoint,
		BlockSize: res.BlockSize, Tokens: res.Tokens, TrackPrefill: p.TrackPrefill,
		Overlap: overlap{
			LongestMatched: tokens(o.Longest()), GPU: tokens(o.Device), CPU: tokens(o.Device + o.Host), Disk: tokens(o.Longest()),
			DP: map[string]uint64{strconv.FormatUint(uint64(res.Source.Rank), 10): tokens(o.Device)},
		},
		PrefillTokens: res.PrefillTokens, PotentialBlocks: res.PotentialBlocks(), Cost: res.Cost, PositionJSON: res.JSON(),
	}
}

// hint returns what the chosen worker needs to fetch blocks from another. Without
// the engine's names of the blocks there is none.
func (x *Server) hint(ctx context.Context, r *selection.Request, better *selection.Better) *hint {
	if x.hinter == nil {
		return nil
	}
	names, err := x.hinter.EngineHashes(ctx, better.Source, r.Locals[:min(int(better.Blocks), len(r.Locals))])
	if err != nil || len(names) == 0 {
		x.log.Debug("no hint", "source", better.Source.Key(), "error", err)
		return nil
	}
	hashes := make([]blockName, len(names))
	for i, n := range names {
		hashes[i] = blockName(n)
	}
	integer := false
	if p, err := x.selector.Partition(r.Partition); err == nil {
		for i := range p.Candidates {
			if p.Candidates[i].Source == better.Source {
				integer = p.Candidates[i].Worker.IntegerID
			}
		}
	}
	return &hint{Endpoint: better.Endpoint, BlockHashes: hashes, WorkerID: selection.ID{Text: better.Source.Instance, Integer: integer}, Rank: better.Source.Rank}
}

// -- reservations -------------------------------------------------------------

// reserveRequest is the body of /reservations.
type reserveRequest struct {
	scope
	SelectionID   string        `json:"selection_id"`
	ReservationID string        `json:"reservation_id"`
	WorkerID      *selection.ID `json:"worker_id"`
	Rank          *uint32       `json:"dp_rank"`
	PrefillTokens *uint32       `json:"effective_prefill_tokens"`
	TrackPrefill  *bool         `json:"track_prefill_tokens"`
	SessionID     *string       `json:"session_id"`
}

type reserveReply struct {
	SelectionID   string       `json:"selection_id"`
	ReservationID string       `json:"reservation_id"`
	ModelName     string       `json:"model_name"`
	RoutingGroup  string       `json:"routing_group"`
	WorkerID      selection.ID `json:"worker_id"`
	Rank          uint32       `json:"dp_rank"`
	Endpoint      string       `json:"endpoint"`
}

func (x *Server) reserve(c *call) (int, any, error) {
	a := x.arrays.get()
	defer x.arrays.put(a)
	var q reserveRequest
	if err := a.decode(c.body, &q); err != nil {
		return 0, nil, err
	}
	id := q.SelectionID
	if id == "" {
		id = q.ReservationID
	}
	if id == "" || len(id) > load.MaxID {
		return 0, nil, fmt.Errorf("%w: selection_id has %d bytes, want 1 to %d", selection.ErrRequest, len(id), load.MaxID)
	}
	name := q.partition()
	p, err := x.selector.Partition(name)
	if err != nil {
		return 0, nil, err
	}
	var b load.Booking
	if q.WorkerID == nil {
		b, err = x.selector.Replay(c.ctx, name, id)
	} else if b, err = x.explicit(&q, a, &p, id); err == nil {
		x.selector.Load().Discard(id)
		err = x.selector.Reserve(c.ctx, b)
	}
	if err != nil {
		return 0, nil, err
	}
	reply := &reserveReply{SelectionID: id, ReservationID: id, ModelName: name.Model, RoutingGroup: name.Group, WorkerID: selection.ID{Text: b.Worker.Instance}, Rank: b.Worker.Rank}
	for i := range p.Candidates {
		if cand := &p.Candidates[i]; cand.Source == b.Worker {
			reply.WorkerID.Integer, reply.Endpoint = cand.Worker.IntegerID, cand.Worker.Endpoint
		}
	}
	return http.StatusCreated, reply, nil
}

// explicit makes a booking of a request that says where.
func (x *Server) explicit(q *reserveRequest, a *arrays, p *selection.Partition, id string) (load.Booking, error) {
	prompt, err := q.need(a, nil, p.BlockSize, p.Eagle)
	if err != nil {
		return load.Booking{}, err
	}
	params, err := q.Override.over(x.selector.Params())
	if err != nil {
		return load.Booking{}, err
	}
	name := q.partition()
	b := load.Booking{
		ID: id, Worker: event.Source{Model: name.Model, Group: name.Group, Instance: q.WorkerID.Text, Rank: or(q.Rank, 0)},
		Tokens: prompt.tokens, Session: or(q.SessionID, ""),
		Blocks: uint32(max(len(prompt.locals), len(a.sequences))),
	}
	if p.BlockSize > 0 {
		b.Blocks = max(b.Blocks, (prompt.tokens+p.BlockSize-1)/p.BlockSize)
	}
	track := q.PrefillTokens != nil || params == nil && x.selector.Params().TrackPrefill || params != nil && params.TrackPrefill
	if or(q.TrackPrefill, track) {
		b.PrefillTokens = or(q.PrefillTokens, prompt.tokens)
	}
	if q.PrefillTokens != nil && *q.PrefillTokens > prompt.tokens {
		return b, fmt.Errorf("%w: effective_prefill_tokens is %d, but the prompt has %d tokens", selection.ErrRequest, *q.PrefillTokens, prompt.tokens)
	}
	return b, nil
}

func (x *Server) prefillComplete(c *call) (int, any, error) {
	if err := x.selector.Load().PrefillComplete(c.ctx, c.id); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, status{"ok"}, nil
}

func (x *Server) outputBlock(c *call) (int, any, error) {
	var q struct {
		Fraction *float64 `json:"decay_fraction"`
	}
	if err := decode(c.body, &q); err != nil {
		return 0, nil, err
	}
	fraction := or(q.Fraction, 1)
	if !(fraction >= 0 && fraction <= 1) {
		return 0, nil, fmt.Errorf("%w: decay_fraction is %v, want 0 to 1", selection.ErrRequest, fraction)
	}
	if err := x.selector.Load().OutputBlock(c.ctx, c.id, fraction); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, status{"ok"}, nil
}

func (x *Server) free(c *call) (int, any, error) {
	if err := x.selector.Free(c.ctx, c.id); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, status{"ok"}, nil
}

// -- loads --------------------------------------------------------------------

// potentialLoad is the load of a worker rank, with a request or without.
type potentialLoad struct {
	WorkerID       selection.ID `json:"worker_id"`
	Rank           uint32       `json:"dp_rank"`
	PrefillTokens  int64        `json:"potential_prefill_tokens"`
	DecodeBlocks   int64        `json:"potential_decode_blocks"`
	ActiveRequests int64        `json:"active_requests"`
}

type modelLoad struct {
	ModelName     string          `json:"model_name"`
	RoutingGroup  string          `json:"routing_group"`
	Loads         []potentialLoad `json:"loads"`
	Pending       int             `json:"pending_count"`
	PendingTokens int64           `json:"pending_isl_tokens"`
}

func loadOf(c *selection.Candidate, l load.Load) potentialLoad {
	return potentialLoad{
		WorkerID: selection.ID{Text: c.Source.Instance, Integer: c.Worker.IntegerID}, Rank: c.Source.Rank, PrefillTokens: l.Prefill,
		DecodeBlocks: int64(math.Ceil(float64(l.Blocks) / load.Unit)), ActiveRequests: l.Requests,
	}
}

func (x *Server) loads(c *call) (int, any, error) {
	out := []modelLoad{}
	for _, name := range x.selector.Partitions() {
		if model := c.query("model_name"); model != "" && model != name.Model {
			continue
		}
		if group := c.query("routing_group"); group != "" && group != name.Group {
			continue
		}
		p, err := x.selector.Partition(name)
		if err != nil {
			continue // it is gone this moment
		}
		m := modelLoad{ModelName: name.Model, RoutingGroup: name.Group, Loads: []potentialLoad{}}
		m.Pending, m.PendingTokens = x.selector.Queued(name)
		for i, l := range x.selector.Loads(nil, p.Candidates) {
			m.Loads = append(m.Loads, loadOf(&p.Candidates[i], l))
		}
		out = append(out, m)
	}
	return http.StatusOK, out, nil
}

// promptOf reads a request that is a prompt and nothing else, and what the
// workers hold of it.
func (x *Server) promptOf(c *call, a *arrays) (q scope, p selection.Partition, pr prompt, overlaps []selection.Overlap, at event.Position, err error) {
	if err = a.decode(c.body, &q); err != nil {
		return
	}
	if p, err = x.selector.Partition(q.partition()); err != nil {
		return
	}
	if pr, err = q.need(a, nil, p.BlockSize, p.Eagle); err != nil {
		return
	}
	if len(p.Candidates) == 0 {
		err = selection.ErrNoWorkers
		return
	}
	p, overlaps, at, err = x.selector.Overlaps(q.partition(), pr.locals)
	return
}

func (x *Server) potentialLoads(c *call) (int, any, error) {
	a := x.arrays.get()
	defer x.arrays.put(a)
	q, p, pr, overlaps, _, err := x.promptOf(c, a)
	if err != nil {
		return 0, nil, err
	}
	params, err := x.params(q.Override)
	if err != nil {
		return 0, nil, err
	}
	out := []potentialLoad{}
	for i, l := range x.selector.Loads(nil, p.Candidates) {
		if params.TrackPrefill {
			l.Prefill += int64(pr.tokens) - min(int64(pr.tokens), int64(params.Saved(overlaps[i])*float64(p.BlockSize)))
		}
		one := loadOf(&p.Candidates[i], l)
		one.DecodeBlocks += (int64(pr.tokens) + int64(p.BlockSize) - 1) / int64(p.BlockSize)
		out = append(out, one)
	}
	return http.StatusOK, out, nil
}

func (x *Server) params(w *weights) (selection.Params, error) {
	p, err := w.over(x.selector.Params())
	if p == nil {
		own := x.selector.Params()
		p = &own
	}
	return *p, err
}

type overlapScore struct {
	WorkerID    selection.ID `json:"worker_id"`
	Rank        uint32       `json:"dp_rank"`
	Device      uint32       `json:"device_blocks"`
	Host        uint32       `json:"host_pinned_blocks"`
	Disk        uint32       `json:"disk_blocks"`
	HostBeyond  uint32       `json:"host_pinned_extension_blocks"`
	DiskBeyond  uint32       `json:"disk_extension_blocks"`
	SharedAfter *uint32      `json:"shared_beyond_device_blocks"`
	Credit      float64      `json:"router_credit_blocks"`
}

type overlapReply struct {
	BlockSize uint32         `json:"block_size"`
	Blocks    int            `json:"num_blocks"`
	Workers   []overlapScore `json:"workers"`
	Shared    struct {
		Enabled bool       `json:"enabled"`
		Hits    uint32     `json:"total_hit_blocks"`
		Ranges  [][]uint32 `json:"ranges"`
		Error   *string    `json:"error"`
	} `json:"shared_cache"`
	event.PositionJSON
}

func (x *Server) overlapScores(c *call) (int, any, error) {
	a := x.arrays.get()
	defer x.arrays.put(a)
	q, p, pr, overlaps, at, err := x.promptOf(c, a)
	if err != nil && !errors.Is(err, selection.ErrNoWorkers) {
		return 0, nil, err
	}
	params, err := x.params(q.Override)
	if err != nil {
		return 0, nil, err
	}
	out := overlapReply{BlockSize: p.BlockSize, Blocks: len(pr.locals), Workers: []overlapScore{}, PositionJSON: at.JSON()}
	out.Shared.Ranges = [][]uint32{}
	for i, o := range overlaps {
		cand := &p.Candidates[i]
		out.Workers = append(out.Workers, overlapScore{
			WorkerID: selection.ID{Text: cand.Source.Instance, Integer: cand.Worker.IntegerID}, Rank: cand.Source.Rank,
			Device: o.Device, Host: o.Device + o.Host, Disk: o.Longest(), HostBeyond: o.Host, DiskBeyond: o.Disk, Credit: params.Saved(o),
		})
	}
	slices.SortStableFunc(out.Workers, func(a, b overlapScore) int { return int(b.Device) - int(a.Device) })
	return http.StatusOK, out, nil
}
