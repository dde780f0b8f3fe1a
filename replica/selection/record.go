package selection

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// ID is a worker's id: a string or an integer in JSON.
type ID struct {
	Text    string
	Integer bool
}

// UnmarshalJSON implements json.Unmarshaler.
func (id *ID) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		id.Integer = false
		return json.Unmarshal(b, &id.Text)
	}
	if _, err := strconv.ParseUint(string(b), 10, 64); err != nil {
		if _, err := strconv.ParseInt(string(b), 10, 64); err != nil {
			return fmt.Errorf("worker_id: want a string or an integer of 64 bits, got %.40s", b)
		}
	}
	id.Text, id.Integer = string(b), true
	return nil
}

// MarshalJSON implements json.Marshaler.
func (id ID) MarshalJSON() ([]byte, error) {
	if id.Integer {
		return []byte(id.Text), nil
	}
	return json.Marshal(id.Text)
}

// Record is a worker in JSON, as clients send it, as the roster keeps it, and as
// it is answered with.
type Record struct {
	WorkerID             ID                `json:"worker_id"`
	ModelName            string            `json:"model_name"`
	RoutingGroup         string            `json:"routing_group"`
	Endpoint             *string           `json:"endpoint"`
	KVEventsEndpoint     *string           `json:"kv_events_endpoint"`
	KVEventsEndpoints    map[string]string `json:"kv_events_endpoints,omitempty"`
	ReplayEndpoint       *string           `json:"replay_endpoint"`
	BlockSize            *uint32           `json:"block_size"`
	StartRank            *uint32           `json:"data_parallel_start_rank"`
	Size                 *uint32           `json:"data_parallel_size"`
	MaxBatchedTokens     *uint64           `json:"max_num_batched_tokens"`
	TotalBlocks          *uint64           `json:"total_kv_blocks"`
	StableRoutingID      *string           `json:"stable_routing_id"`
	Eagle                *bool             `json:"is_eagle"`
	Taints               []string          `json:"taints"`
	TopologyDomains      map[string]string `json:"topology_domains"`
	TransferDomain       *string           `json:"kv_transfer_domain"`
	TransferEnforcement  *string           `json:"kv_transfer_enforcement"`
	TransferWeight       *float64          `json:"kv_transfer_preferred_weight"`
	HintWorkerType       *string           `json:"router_hint_worker_type,omitempty"`
	HintControlEndpoints map[string]string `json:"router_hint_source_control_endpoints,omitempty"`

	// What other services do not have.
	ReplayEndpoints map[string]string `json:"replay_endpoints,omitempty"`
	Engine          *string           `json:"engine,omitempty"`
	Topic           *string           `json:"topic,omitempty"`
	Labels          map[string]string `json:"labels,omitempty"`
	TTL             *int64            `json:"ttl_seconds,omitempty"`
	Draining        bool              `json:"draining,omitempty"`

	// Only in answers.
	Lifecycle Lifecycle `json:"lifecycle,omitempty"`
	Reasons   []string  `json:"not_schedulable_reasons,omitempty"`
}

// defaultName is the model and the routing group of those who name none.
const defaultName = "default"

// ParseRecord reads a worker. Errors wrap ErrRequest or event.ErrWorker.
func ParseRecord(data []byte) (Record, error) {
	r := Record{ModelName: defaultName, RoutingGroup: defaultName}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	_, err := r.Worker()
	return r, err
}

// Patch returns the record with what the fields of a JSON object say in the place
// of what it said. Its id, model and group stay.
func (r Record) Patch(data []byte) (Record, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(data, &fields); err != nil {
		return r, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	for _, name := range []string{"worker_id", "model_name", "routing_group", "lifecycle", "not_schedulable_reasons"} {
		delete(fields, name)
	}
	// A map is replaced, not added to.
	for name, at := range map[string]*map[string]string{
		"kv_events_endpoints": &r.KVEventsEndpoints, "topology_domains": &r.TopologyDomains,
		"router_hint_source_control_endpoints": &r.HintControlEndpoints, "labels": &r.Labels, "replay_endpoints": &r.ReplayEndpoints,
	} {
		if v, ok := fields[name]; ok && string(v) != "null" {
			*at = nil
		} else {
			*at = maps.Clone(*at)
		}
	}
	r.Taints = slices.Clone(r.Taints)
	data, err := json.Marshal(fields)
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	if err != nil {
		return r, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	_, err = r.Worker()
	return r, err
}

func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// some returns a pointer to a value that is not the zero value.
func some[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

// Worker returns the worker that the record describes. Errors wrap
// event.ErrWorker.
func (r *Record) Worker() (Worker, error) {
	w := Worker{
		Instance: r.WorkerID.Text, IntegerID: r.WorkerID.Integer, Model: r.ModelName, Group: r.RoutingGroup,
		Endpoint: or(r.Endpoint, ""), BlockSize: or(r.BlockSize, 0), StartRank: or(r.StartRank, 0), Ranks: or(r.Size, 1),
		ReplayEndpoint: or(r.ReplayEndpoint, ""), MaxBatchedTokens: or(r.MaxBatchedTokens, 0), TotalBlocks: or(r.TotalBlocks, 0),
		StableRoutingID: or(r.StableRoutingID, ""), Eagle: or(r.Eagle, false), Taints: r.Taints, TopologyDomains: r.TopologyDomains,
		TransferDomain: or(r.TransferDomain, ""), TransferEnforcement: or(r.TransferEnforcement, ""), TransferWeight: r.TransferWeight,
		HintType: or(r.HintWorkerType, ""), Engine: or(r.Engine, ""), Topic: or(r.Topic, ""), Labels: r.Labels, Draining: r.Draining,
	}
	if ttl := or(r.TTL, 0); ttl >= 0 && ttl <= int64(event.MaxTTL/time.Second) {
		w.TTL = time.Duration(ttl) * time.Second
	} else {
		return w, fmt.Errorf("%w: ttl_seconds is %d, want %d to %d, or 0 for no end", event.ErrWorker, ttl, event.MinTTL/time.Second, event.MaxTTL/time.Second)
	}
	var err error
	if w.EventEndpoints, err = byRank("kv_events_endpoints", r.KVEventsEndpoints); err != nil {
		return w, err
	}
	if w.ReplayEndpoints, err = byRank("replay_endpoints", r.ReplayEndpoints); err != nil {
		return w, err
	}
	if w.HintEndpoints, err = byRank("router_hint_source_control_endpoints", r.HintControlEndpoints); err != nil {
		return w, err
	}
	if len(w.EventEndpoints) == 0 && w.Ranks == 1 && or(r.KVEventsEndpoint, "") != "" {
		w.EventEndpoints[w.StartRank] = *r.KVEventsEndpoint
	}
	return w, w.Validate()
}

func byRank(name string, m map[string]string) (map[uint32]string, error) {
	out := make(map[uint32]string, len(m))
	for text, endpoint := range m {
		rank, err := strconv.ParseUint(text, 10, 32)
		if err != nil || rank > event.MaxRank {
			return out, fmt.Errorf("%w: %s: rank %q, want an integer from 0 to %d", event.ErrWorker, name, text, event.MaxRank)
		}
		out[uint32(rank)] = endpoint
	}
	return out, nil
}

// RecordOf returns the record of a worker that is known, and whether it can be
// chosen.
func RecordOf(st *Status) Record {
	w := &st.Worker
	text := func(m map[uint32]string) map[string]string {
		out := make(map[string]string, len(m))
		for rank, endpoint := range m {
			out[strconv.FormatUint(uint64(rank), 10)] = endpoint
		}
		return out
	}
	r := Record{
		WorkerID: ID{w.Instance, w.IntegerID}, ModelName: w.Model, RoutingGroup: w.Group, Endpoint: some(w.Endpoint),
		KVEventsEndpoints: text(w.EventEndpoints), ReplayEndpoint: some(w.ReplayEndpoint), ReplayEndpoints: text(w.ReplayEndpoints), BlockSize: some(w.BlockSize),
		StartRank: &w.StartRank, Size: &w.Ranks, MaxBatchedTokens: some(w.MaxBatchedTokens), TotalBlocks: some(w.TotalBlocks),
		StableRoutingID: some(w.StableRoutingID), Eagle: some(w.Eagle), Taints: w.Taints, TopologyDomains: w.TopologyDomains,
		TransferDomain: some(w.TransferDomain), TransferEnforcement: some(w.TransferEnforcement), TransferWeight: w.TransferWeight,
		HintWorkerType: some(w.HintType), HintControlEndpoints: text(w.HintEndpoints), Engine: some(w.Engine), Topic: some(w.Topic),
		Labels: w.Labels, TTL: some(int64(w.TTL / time.Second)), Draining: w.Draining, Lifecycle: st.Lifecycle, Reasons: st.Reasons,
	}
	if endpoint := w.EventEndpoints[w.StartRank]; endpoint != "" && w.Ranks == 1 {
		r.KVEventsEndpoint = &endpoint
	}
	if r.Taints == nil {
		r.Taints = []string{}
	}
	if r.TopologyDomains == nil {
		r.TopologyDomains = map[string]string{}
	}
	return r
}
