package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// scope is what all queries have in common.
type scope struct {
	ModelName    string  `json:"model_name"`
	Model        string  `json:"model"`
	RoutingGroup *string `json:"routing_group"`
	LoraName     *string `json:"lora_name"`
	MinLogSeq    uint64  `json:"min_log_seq"`
}

func (q *scope) partition() (event.Partition, error) {
	model := q.ModelName
	if model == "" {
		model = q.Model
	}
	if model == "" {
		return event.Partition{}, fmt.Errorf("%w: model_name is missing or empty", errRequest)
	}
	return event.Partition{Model: model, Group: or(q.RoutingGroup, defaultGroup)}, nil
}

// tokenQuery is the body of /query.
type tokenQuery struct {
	scope
	TokenIDs  *tokenIDs `json:"token_ids"`
	CacheSalt *string   `json:"cache_salt"`
}

// hashQuery is the body of /query_by_hash.
type hashQuery struct {
	scope
	BlockHashes *blockHashes    `json:"block_hashes"`
	CacheSalt   json.RawMessage `json:"cache_salt"`
}

func (s *Server) query(r *http.Request) (int, any, error) {
	var q tokenQuery
	if err := decodeBody(r.Body, &q); err != nil {
		return 0, nil, err
	}
	return s.answerTokens(r.Context(), &q)
}

func (s *Server) answerTokens(ctx context.Context, q *tokenQuery) (int, any, error) {
	p, err := q.partition()
	if err != nil {
		return 0, nil, err
	}
	if q.TokenIDs == nil {
		return 0, nil, fmt.Errorf("%w: token_ids is missing", errRequest)
	}
	size, err := s.index.BlockSize(p)
	if err != nil {
		return 0, nil, unknown(p, err)
	}
	seed := hash.SeedOf(or(q.LoraName, ""), or(q.CacheSalt, ""))
	locals := hash.AppendLocals(nil, *q.TokenIDs, int(size), 0, seed)
	return s.answer(ctx, p, locals, q.MinLogSeq)
}

func (s *Server) queryByHash(r *http.Request) (int, any, error) {
	var q hashQuery
	if err := decodeBody(r.Body, &q); err != nil {
		return 0, nil, err
	}
	return s.answerHashes(r.Context(), &q)
}

func (s *Server) answerHashes(ctx context.Context, q *hashQuery) (int, any, error) {
	p, err := q.partition()
	if err != nil {
		return 0, nil, err
	}
	if q.BlockHashes == nil {
		return 0, nil, fmt.Errorf("%w: block_hashes is missing", errRequest)
	}
	if len(q.CacheSalt) > 0 && string(q.CacheSalt) != "null" {
		return 0, nil, fmt.Errorf("%w: cache_salt has no meaning here: the block hashes are made with it", errRequest)
	}
	return s.answer(ctx, p, *q.BlockHashes, q.MinLogSeq)
}

func unknown(p event.Partition, err error) error {
	return fmt.Errorf("no workers for model=%s routing_group=%s: %w", p.Model, p.Group, err)
}

// scores is the answer to a query. All numbers but the log sequence are tokens.
type scores struct {
	// Scores has the device tier of each rank, Instances all tiers.
	Scores      map[string]map[string]uint64 `json:"scores"`
	Frequencies []int                        `json:"frequencies"`
	Instances   map[string]*instanceScore    `json:"instances"`
	LogSeq      uint64                       `json:"log_seq"`
}

// instanceScore is how far an instance holds a prompt. The tiers continue each
// other, and each number is the best of the instance's ranks.
type instanceScore struct {
	LongestMatched uint64            `json:"longest_matched"`
	GPU            uint64            `json:"gpu"`
	DP             map[string]uint64 `json:"dp"`
	CPU            uint64            `json:"cpu"`
	Disk           uint64            `json:"disk"`
}

func (s *Server) answer(ctx context.Context, p event.Partition, locals []uint64, minLogSeq uint64) (int, any, error) {
	if minLogSeq > 0 {
		ctx, cancel := context.WithTimeout(ctx, s.cfg.WaitTimeout)
		defer cancel()
		if err := s.index.WaitFor(ctx, minLogSeq); err != nil {
			return 0, nil, err
		}
	}
	a, err := s.index.Match(p, locals)
	if err != nil {
		return 0, nil, unknown(p, err)
	}
	return http.StatusOK, newScores(&a), nil
}

func newScores(a *indexer.Answer) *scores {
	out := &scores{
		Scores:      map[string]map[string]uint64{},
		Frequencies: []int{},
		Instances:   map[string]*instanceScore{},
		LogSeq:      a.LogSeq,
	}
	for i := range a.Holdings {
		h := &a.Holdings[i]
		tokens := func(t event.Tier) uint64 { return uint64(h.Ends[t]) * uint64(a.BlockSize) }
		in := out.Instances[h.Instance]
		if in == nil {
			in = &instanceScore{DP: map[string]uint64{}}
			out.Instances[h.Instance] = in
			out.Scores[h.Instance] = in.DP
		}
		if gpu := tokens(event.Device); gpu > 0 {
			in.DP[strconv.FormatUint(uint64(h.Rank), 10)] = gpu
			in.GPU = max(in.GPU, gpu)
		}
		in.CPU = max(in.CPU, tokens(event.Host))
		in.Disk = max(in.Disk, tokens(event.External))
		in.LongestMatched = max(in.LongestMatched, tokens(event.External))
	}
	return out
}
