package api

import (
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// -- /workers -----------------------------------------------------------------

type workerView struct {
	InstanceID   instanceID               `json:"instance_id"`
	Source       string                   `json:"source"`
	Status       string                   `json:"status"`
	ModelName    string                   `json:"model_name"`
	RoutingGroup string                   `json:"routing_group"`
	BlockSize    uint32                   `json:"block_size"`
	Endpoints    map[string]string        `json:"endpoints"`
	Listeners    map[string]*listenerView `json:"listeners"`
	Labels       map[string]string        `json:"labels,omitempty"`
	Elsewhere    bool                     `json:"elsewhere,omitempty"`
}

type listenerView struct {
	Endpoint         string            `json:"endpoint"`
	ReplayEndpoint   string            `json:"replay_endpoint,omitempty"`
	Topic            string            `json:"topic,omitempty"`
	Engine           string            `json:"engine,omitempty"`
	CacheOwner       *ownerView        `json:"cache_owner,omitempty"`
	Status           string            `json:"status"`
	LastError        string            `json:"last_error,omitempty"`
	Bridge           string            `json:"bridge"`
	Incarnation      *uint64           `json:"incarnation"`
	EngineSeq        *uint64           `json:"engine_seq"`
	AppliedEngineSeq *uint64           `json:"applied_engine_seq"`
	LogSeq           uint64            `json:"log_seq"`
	Blocks           map[string]uint64 `json:"blocks"`
	Uncertain        bool              `json:"uncertain"`
	Gaps             uint64            `json:"gaps"`
	LostBatches      uint64            `json:"lost_batches"`
	Dropped          map[string]uint64 `json:"dropped"`
}

// ownerView is the cache owner of a worker.
type ownerView struct {
	ID     string     `json:"id"`
	State  string     `json:"state"`
	Bridge string     `json:"bridge,omitempty"`
	Since  *time.Time `json:"since,omitempty"`
}

// owner returns the cache owner of a worker. What is on record as attached to a bridge
// that nothing is heard of is not.
func (s *Server) owner(w *event.Worker, bridge string) *ownerView {
	if w.CacheOwner == "" {
		return nil
	}
	v := &ownerView{ID: w.CacheOwner, State: "detached"}
	if at, ok := s.registry.Attachment(w.CacheOwner); ok && at.Source == w.Source {
		v.Since = &at.Since
		if at.Bridge != "" && at.Bridge == bridge {
			v.State, v.Bridge = "attached", bridge
		}
	}
	return v
}

func (s *Server) workers(r *http.Request) (int, any, error) {
	q := r.URL.Query()
	model, group := q.Get("model_name"), q.Get("routing_group")
	known := map[event.Source]indexer.SourceInfo{}
	sources, _ := s.index.Sources()
	for _, info := range sources {
		known[info.Source] = info
	}
	byInstance := map[event.Source]*workerView{}
	out := []*workerView{}
	workers := s.index.Workers()
	slices.SortFunc(workers, func(a, b event.Worker) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group), cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Rank, b.Rank))
	})
	for _, w := range workers {
		if model != "" && w.Model != model || group != "" && w.Group != group {
			continue
		}
		id := w.Source
		id.Rank = 0
		v := byInstance[id]
		if v == nil {
			v = &workerView{
				InstanceID: instanceID{w.Instance, w.IntegerID}, Source: "zmq", ModelName: w.Model, RoutingGroup: w.Group, BlockSize: w.BlockSize,
				Endpoints: map[string]string{}, Listeners: map[string]*listenerView{}, Labels: w.Labels,
				Elsewhere: !s.index.Serves(w.Partition()),
			}
			byInstance[id] = v
			out = append(out, v)
		}
		rank := strconv.FormatUint(uint64(w.Rank), 10)
		info, ok := known[w.Source]
		l := s.listener(&w, info, ok)
		v.Endpoints[rank], v.Listeners[rank] = w.Endpoint, l
		v.Status = worse(v.Status, l.Status)
	}
	return http.StatusOK, out, nil
}

// Listeners returns how many listeners of registered workers are in which state.
func (s *Server) Listeners() map[string]int {
	out := map[string]int{event.StatePending: 0, event.StateActive: 0, event.StateCatchingUp: 0, event.StateFailed: 0}
	for _, w := range s.index.Workers() {
		state := event.StatePending // nobody reads it
		if _, st, ok := s.fleet.Listener(w.Source); ok {
			state = st.State
		}
		out[state]++
	}
	return out
}

// worse returns the state that an operator should see of two.
func worse(a, b string) string {
	for _, st := range []string{event.StateFailed, event.StatePending, event.StateCatchingUp} {
		if a == st || b == st {
			return st
		}
	}
	return b
}

func (s *Server) listener(w *event.Worker, info indexer.SourceInfo, known bool) *listenerView {
	l := &listenerView{
		Endpoint: w.Endpoint, ReplayEndpoint: w.ReplayEndpoint, Topic: w.Topic, Engine: w.Engine,
		Status: event.StatePending, Blocks: blocks(&info.Digests), Dropped: map[string]uint64{},
	}
	bridge, st, ok := s.fleet.Listener(w.Source)
	if ok {
		l.Bridge, l.Status, l.LastError, l.EngineSeq, l.Uncertain = bridge, st.State, st.LastError, st.EngineSeq, st.Uncertain
		if st.Dropped != nil {
			l.Dropped = st.Dropped
		}
	} else {
		l.LastError = "no bridge reads this worker"
	}
	l.CacheOwner = s.owner(w, bridge)
	if known {
		l.Incarnation, l.AppliedEngineSeq, l.LogSeq = &info.Incarnation, info.EngineSeq, info.LogSeq
		l.Gaps, l.LostBatches = info.Gaps, info.Lost
		l.Uncertain = l.Uncertain || info.Gaps > 0 || info.Diverged
	}
	return l
}

func blocks(d *event.Digests) map[string]uint64 {
	out := make(map[string]uint64, event.Tiers)
	for t := range d {
		out[event.Tier(t).String()] = d[t].Count
	}
	return out
}

// -- /digest ------------------------------------------------------------------

type digestView struct {
	event.PositionJSON
	Sources    []sourceDigest                   `json:"sources"`
	Partitions map[string]map[string]tierDigest `json:"partitions"`
	Serves     []string                         `json:"serves,omitempty"`
}

type sourceDigest struct {
	InstanceID   string                `json:"instance_id"`
	ModelName    string                `json:"model_name"`
	RoutingGroup string                `json:"routing_group"`
	Rank         uint32                `json:"dp_rank"`
	LogSeq       uint64                `json:"log_seq"`
	Diverged     bool                  `json:"diverged"`
	Digest       map[string]tierDigest `json:"digest"`
}

// tierDigest is the digest of a tier. The sum is hexadecimal text: JSON numbers
// of 64 bits don't survive every reader.
type tierDigest struct {
	Count uint64 `json:"count"`
	Sum   string `json:"sum"`
}

func (s *Server) digest(*http.Request) (int, any, error) {
	sources, at := s.index.Sources()
	slices.SortFunc(sources, func(a, b indexer.SourceInfo) int { return cmp.Compare(a.Source.Key(), b.Source.Key()) })
	out := digestView{PositionJSON: at.JSON(), Sources: []sourceDigest{}, Partitions: map[string]map[string]tierDigest{}, Serves: s.index.Share().Strings()}
	sums := map[event.Partition]*event.Digests{}
	for _, info := range sources {
		if !info.Answered && !info.Diverged {
			continue
		}
		out.Sources = append(out.Sources, sourceDigest{
			InstanceID: info.Source.Instance, ModelName: info.Source.Model, RoutingGroup: info.Source.Group, Rank: info.Source.Rank,
			LogSeq: info.LogSeq, Diverged: info.Diverged, Digest: tiers(&info.Digests),
		})
		sum := sums[info.Source.Partition()]
		if sum == nil {
			sum = &event.Digests{}
			sums[info.Source.Partition()] = sum
		}
		for t, d := range info.Digests {
			sum[t].Add(d.Count, d.Sum)
		}
	}
	for p, sum := range sums {
		out.Partitions[p.String()] = tiers(sum)
	}
	return http.StatusOK, out, nil
}

func tiers(d *event.Digests) map[string]tierDigest {
	out := make(map[string]tierDigest, event.Tiers)
	for t := range d {
		out[event.Tier(t).String()] = tierDigest{Count: d[t].Count, Sum: fmt.Sprintf("%016x", d[t].Sum)}
	}
	return out
}

// -- /dump --------------------------------------------------------------------

type dumpView struct {
	BlockSize uint32 `json:"block_size"`
	event.PositionJSON
	Events []routerEvent `json:"events"`
}

// routerEvent is a block event in the form in which Dynamo's routers exchange
// them.
type routerEvent struct {
	WorkerID    string     `json:"worker_id"`
	StorageTier string     `json:"storage_tier"`
	Event       eventInner `json:"event"`
}

type eventInner struct {
	EventID uint64    `json:"event_id"`
	Data    eventData `json:"data"`
	Rank    uint32    `json:"dp_rank"`
}

type eventData struct {
	Stored storedData `json:"stored"`
}

type storedData struct {
	ParentHash    *uint64      `json:"parent_hash"`
	StartPosition uint32       `json:"start_position"`
	Blocks        []blockEntry `json:"blocks"`
}

type blockEntry struct {
	BlockHash  uint64 `json:"block_hash"`
	TokensHash uint64 `json:"tokens_hash"`
}

// dumpTiers names the tiers as Dynamo does.
var dumpTiers = [event.Tiers]string{"device", "host_pinned", "disk", "external"}

func (s *Server) dump(*http.Request) (int, any, error) {
	if err := s.index.Ready(); err != nil {
		return 0, nil, err // what partitions there are may not be known yet
	}
	out := map[string]dumpView{}
	for _, p := range s.index.Partitions() {
		sources, size, at, err := s.index.Dump(p)
		if err != nil {
			return 0, nil, unknown(p, err)
		}
		slices.SortFunc(sources, func(a, b indexer.Dumped) int { return cmp.Compare(a.Source.Key(), b.Source.Key()) })
		v := dumpView{BlockSize: size, PositionJSON: at.JSON(), Events: []routerEvent{}}
		for t := range event.Tier(event.Tiers) {
			for i := range sources {
				v.Events = appendRuns(v.Events, &sources[i], t)
			}
		}
		out[p.String()] = v
	}
	return http.StatusOK, out, nil
}

// appendRuns appends what a source holds in a tier, each chain of blocks as one
// event, and a parent before its children.
func appendRuns(events []routerEvent, d *indexer.Dumped, t event.Tier) []routerEvent {
	var blocks []indexer.DumpedBlock
	for _, b := range d.Blocks {
		if b.Tiers.Has(t) {
			blocks = append(blocks, b)
		}
	}
	slices.SortFunc(blocks, func(a, b indexer.DumpedBlock) int {
		return cmp.Or(cmp.Compare(a.Base, b.Base), cmp.Compare(a.Seq, b.Seq))
	})
	open := map[uint64]int{} // sequence hash of a run's last block → the run
	for _, b := range blocks {
		entry := blockEntry{BlockHash: b.Seq, TokensHash: b.Local}
		if i, ok := open[b.Parent]; ok && b.Base > 0 {
			delete(open, b.Parent)
			open[b.Seq] = i
			stored := &events[i].Event.Data.Stored
			stored.Blocks = append(stored.Blocks, entry)
			continue
		}
		e := routerEvent{WorkerID: d.Source.Instance, StorageTier: dumpTiers[t]}
		e.Event = eventInner{EventID: uint64(len(events)), Rank: d.Source.Rank}
		e.Event.Data.Stored = storedData{StartPosition: b.Base, Blocks: []blockEntry{entry}}
		if b.Base > 0 {
			parent := b.Parent
			e.Event.Data.Stored.ParentHash = &parent
		}
		open[b.Seq] = len(events)
		events = append(events, e)
	}
	return events
}

// -- the rest -----------------------------------------------------------------

type readyView struct {
	Ready   bool     `json:"ready"`
	Reasons []string `json:"reasons"`
	event.PositionJSON
	Lag    uint64   `json:"lag"`
	Serves []string `json:"serves,omitempty"`
}

func (s *Server) health(*http.Request) (int, any, error) {
	return http.StatusOK, status{"ok"}, nil
}

func (s *Server) ready(*http.Request) (int, any, error) {
	v := readyView{Ready: true, Reasons: []string{}, PositionJSON: s.index.Position().JSON(), Lag: s.index.Lag(), Serves: s.index.Share().Strings()}
	if err := s.index.Ready(); err != nil {
		v.Ready = false
		v.Reasons = append(v.Reasons, err.Error())
		return http.StatusServiceUnavailable, v, nil
	}
	return http.StatusOK, v, nil
}

func (s *Server) peers(*http.Request) (int, any, error) {
	if list := s.listPeers.Load(); list != nil {
		return http.StatusOK, (*list)(), nil
	}
	return http.StatusOK, []string{}, nil
}

// ShowPeers has /peers answer with what list returns: the processes of the
// deployment, in JSON.
func (s *Server) ShowPeers(list func() any) { s.listPeers.Store(&list) }
