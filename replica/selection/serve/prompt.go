package serve

import (
	"encoding/json"
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// scope is what most requests have in common.
type scope struct {
	ModelName    *string  `json:"model_name"`
	RoutingGroup *string  `json:"routing_group"`
	Override     *weights `json:"router_config_override"`

	LoraName  *string  `json:"lora_name"`
	CacheSalt *string  `json:"cache_salt"`
	Eagle     *bool    `json:"is_eagle"`
	Tokens    *uint32  `json:"isl_tokens"`
	MM        *mmInfo  `json:"mm_routing_info"`
	BlockMM   []*mmOne `json:"block_mm_infos"`
}

// mmInfo is a prompt with other than text in it.
type mmInfo struct {
	Tokens  []uint32 `json:"routing_token_ids"`
	BlockMM []*mmOne `json:"block_mm_infos"`
}

// mmOne is what other than text a block has.
type mmOne struct {
	Objects []struct {
		Hash uint64 `json:"mm_hash"`
	} `json:"mm_objects"`
}

func (s *scope) partition() event.Partition {
	return event.Partition{Model: or(s.ModelName, defaultName), Group: or(s.RoutingGroup, defaultName)}
}

// defaultName is the model and the routing group of those who name none.
const defaultName = "default"

func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// weights are the weights that a request brings.
type weights struct {
	OverlapScoreCredit  *float64 `json:"overlap_score_credit"`
	OverlapScoreWeight  *float64 `json:"overlap_score_weight"`
	CreditDecay         *float64 `json:"overlap_score_credit_decay"`
	HostWeight          *float64 `json:"host_cache_hit_weight"`
	DiskWeight          *float64 `json:"disk_cache_hit_weight"`
	PrefillLoadScale    *float64 `json:"prefill_load_scale"`
	ActiveRequestWeight *float64 `json:"decode_active_request_weight"`
	SessionCredit       *float64 `json:"session_credit"`
	RouterTemperature   *float64 `json:"router_temperature"`
	TrackPrefillTokens  *bool    `json:"track_prefill_tokens"`
}

// over returns weights with those of the request in their places. The error wraps
// selection.ErrRequest.
func (w *weights) over(p selection.Params) (*selection.Params, error) {
	if w == nil {
		return nil, nil
	}
	if v := w.OverlapScoreWeight; v != nil {
		// An older name: it scaled the prefill, and 0 turned overlaps off.
		if *v == 0 {
			p.DeviceCredit, p.HostCredit, p.DiskCredit = 0, 0, 0
		} else {
			p.PrefillScale = *v
		}
	}
	for _, f := range []struct {
		from *float64
		to   *float64
	}{
		{w.OverlapScoreCredit, &p.DeviceCredit}, {w.CreditDecay, &p.CreditDecay}, {w.HostWeight, &p.HostCredit}, {w.DiskWeight, &p.DiskCredit},
		{w.PrefillLoadScale, &p.PrefillScale}, {w.ActiveRequestWeight, &p.RequestWeight}, {w.SessionCredit, &p.SessionCredit},
		{w.RouterTemperature, &p.Temperature},
	} {
		if f.from != nil {
			*f.to = *f.from
		}
	}
	p.TrackPrefill = or(w.TrackPrefillTokens, p.TrackPrefill)
	return &p, p.Validate()
}

// prompt is what a request says of its prompt.
type prompt struct {
	locals []uint64 // of its whole blocks
	tokens uint32   // its length
	given  bool
}

// read works out the prompt of a request: token ids, hashes, or a prompt with
// images. buf is memory for the hashes. Errors wrap selection.ErrRequest.
func (s *scope) read(a *arrays, buf []uint64, blockSize uint32, eagle bool) (p prompt, err error) {
	if s.Eagle != nil {
		eagle = *s.Eagle
	}
	over := 0
	if eagle {
		over = 1
	}
	tokens, mm := a.tokens, s.BlockMM
	has := a.has.tokens
	if s.MM != nil {
		if has {
			return p, fmt.Errorf("%w: give token_ids or mm_routing_info, not both", selection.ErrRequest)
		}
		tokens, mm, has = s.MM.Tokens, s.MM.BlockMM, true
	}
	switch {
	case has && a.has.hashes:
		return p, fmt.Errorf("%w: give token_ids or block_hashes, not both", selection.ErrRequest)
	case has:
		seed := hash.SeedOf(or(s.LoraName, ""), or(s.CacheSalt, ""))
		if len(mm) == 0 {
			p.locals = hash.AppendLocals(buf[:0], tokens, int(blockSize), over, seed)
		} else {
			p.locals = withMM(buf[:0], tokens, int(blockSize), over, seed, mm)
		}
		p.tokens, p.given = uint32(len(tokens)), true
	case a.has.hashes:
		if s.CacheSalt != nil {
			return p, fmt.Errorf("%w: cache_salt has no meaning here: the block hashes are made with it", selection.ErrRequest)
		}
		p.locals, p.given = a.hashes, true
		p.tokens = uint32(len(a.hashes)) * blockSize
	case a.has.sequences:
		p.tokens, p.given = uint32(len(a.sequences))*blockSize, true
	}
	if s.Tokens != nil && !has {
		if n := uint64(*s.Tokens); blockSize > 0 && n/uint64(blockSize) < uint64(len(p.locals)) {
			return p, fmt.Errorf("%w: isl_tokens is %d, fewer than the %d blocks have", selection.ErrRequest, n, len(p.locals))
		}
		p.tokens, p.given = *s.Tokens, true
	}
	if p.tokens > load.MaxTokens {
		return p, fmt.Errorf("%w: a prompt of %d tokens; at most %d are possible", selection.ErrRequest, p.tokens, load.MaxTokens)
	}
	return p, nil
}

// need is read for requests that must have a prompt.
func (s *scope) need(a *arrays, buf []uint64, blockSize uint32, eagle bool) (prompt, error) {
	p, err := s.read(a, buf, blockSize, eagle)
	if err == nil && !p.given {
		err = fmt.Errorf("%w: the prompt is missing: want token_ids, or block_hashes with isl_tokens", selection.ErrRequest)
	}
	return p, err
}

// withMM hashes a prompt whose blocks may have images in them.
func withMM(dst []uint64, tokens []uint32, blockSize, over int, seed uint64, mm []*mmOne) []uint64 {
	for i, at := 0, 0; blockSize > 0 && at+blockSize+over <= len(tokens); i, at = i+1, at+blockSize {
		var hashes []uint64
		if i < len(mm) && mm[i] != nil {
			for _, o := range mm[i].Objects {
				hashes = append(hashes, o.Hash)
			}
		}
		dst = append(dst, hash.Local(tokens[at:at+blockSize+over], seed, hashes))
	}
	return dst
}

// decode reads what is left of a body when the long members are out.
func (a *arrays) decode(body []byte, into any) error {
	if err := a.split(body); err != nil {
		return err
	}
	return decode(a.rest, into)
}

// decode reads a body. An empty one is an empty object.
func decode(body []byte, into any) error {
	if len(body) == 0 {
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("%w: %w", selection.ErrRequest, err)
	}
	return nil
}
