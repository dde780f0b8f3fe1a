package selection

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
)

// Worker is what a router has to know of an instance. What is not known is the
// zero value.
type Worker struct {
	Instance, Model, Group string
	// IntegerID says that the instance id is an integer in JSON.
	IntegerID bool
	// Endpoint is where requests are sent to; the Selector hands it on.
	Endpoint string
	// BlockSize is in tokens.
	BlockSize uint32
	// StartRank and Ranks are its data-parallel ranks: Ranks of them from
	// StartRank on.
	StartRank, Ranks uint32
	// EventEndpoints are the engine's PUB sockets by rank, and ReplayEndpoints
	// its ROUTER sockets; ReplayEndpoint is that of the ranks that have none
	// there.
	EventEndpoints, ReplayEndpoints map[uint32]string
	ReplayEndpoint                  string
	// Engine, Topic, Labels and TTL are as in event.Worker.
	Engine, Topic string
	Labels        map[string]string
	TTL           time.Duration
	// MaxBatchedTokens and TotalBlocks are the engine's limits.
	MaxBatchedTokens, TotalBlocks uint64
	StableRoutingID               string
	// Eagle says that the engine keys its cache by bigrams.
	Eagle bool
	// Taints are what requests can require or prefer.
	Taints []string
	// TopologyDomains say where it is, such as zone: eu-1. Each is a taint
	// too: dynamo.topology/zone=eu-1.
	TopologyDomains map[string]string
	// TransferDomain, TransferEnforcement (required or preferred) and
	// TransferWeight are kept for clients that ask.
	TransferDomain, TransferEnforcement string
	TransferWeight                      *float64
	// HintType is the kind of worker that hints about better stocked sources
	// are exchanged with; empty: it takes no hints. HintEndpoints are the
	// control endpoints by which others fetch blocks from its ranks.
	HintType      string
	HintEndpoints map[uint32]string
	// Draining takes it out of all choices, and leaves what is active there.
	Draining bool
}

// TopologyTaint returns the taint of a topology domain.
func TopologyTaint(domain, value string) string { return "dynamo.topology/" + domain + "=" + value }

func (w *Worker) hasTaint(taint string) bool {
	if slices.Contains(w.Taints, taint) {
		return true
	}
	for domain, value := range w.TopologyDomains {
		if TopologyTaint(domain, value) == taint {
			return true
		}
	}
	return false
}

// Partition returns where the worker belongs.
func (w *Worker) Partition() event.Partition {
	return event.Partition{Model: w.Model, Group: w.Group}
}

// maxRanks is how many ranks an instance may have.
const maxRanks = 4096

// Validate tells what is wrong with a worker, as far as it is known: what is
// missing keeps it from being chosen, but is not wrong. Errors wrap
// event.ErrWorker.
func (w *Worker) Validate() error {
	for _, f := range []struct{ name, value string }{{"worker_id", w.Instance}, {"model_name", w.Model}, {"routing_group", w.Group}} {
		if f.value == "" || len(f.value) > event.MaxName {
			return fmt.Errorf("%w: %s has %d bytes, want 1 to %d", event.ErrWorker, f.name, len(f.value), event.MaxName)
		}
	}
	switch {
	case w.BlockSize > event.MaxBlockSize:
		return fmt.Errorf("%w: block_size is %d, want at most %d", event.ErrWorker, w.BlockSize, event.MaxBlockSize)
	case w.Ranks > maxRanks:
		return fmt.Errorf("%w: data_parallel_size is %d, want at most %d", event.ErrWorker, w.Ranks, maxRanks)
	case uint64(w.StartRank)+uint64(w.Ranks) > event.MaxRank:
		return fmt.Errorf("%w: ranks from %d on, %d of them: a rank is at most %d", event.ErrWorker, w.StartRank, w.Ranks, event.MaxRank)
	case w.TransferEnforcement != "" && w.TransferEnforcement != "required" && w.TransferEnforcement != "preferred":
		return fmt.Errorf("%w: kv_transfer_enforcement is %q, want required or preferred", event.ErrWorker, w.TransferEnforcement)
	case w.TransferWeight != nil && (math.IsNaN(*w.TransferWeight) || *w.TransferWeight < 0):
		return fmt.Errorf("%w: kv_transfer_preferred_weight is %v, want at least 0", event.ErrWorker, *w.TransferWeight)
	}
	for _, r := range w.Registrations() {
		if r.BlockSize == 0 {
			r.BlockSize = 1 // it may come later
		}
		if err := r.Validate(); err != nil {
			return err
		}
	}
	return nil
}

// Registrations returns the sources that the worker's endpoints feed.
func (w *Worker) Registrations() []event.Worker {
	var out []event.Worker
	for _, rank := range w.ranks() {
		if endpoint := w.EventEndpoints[rank]; endpoint != "" {
			replay, ok := w.ReplayEndpoints[rank]
			if !ok {
				replay = w.ReplayEndpoint
			}
			out = append(out, event.Worker{
				Source:   event.Source{Model: w.Model, Group: w.Group, Instance: w.Instance, Rank: rank},
				Endpoint: endpoint, ReplayEndpoint: replay, BlockSize: w.BlockSize, IntegerID: w.IntegerID,
				Engine: w.Engine, Topic: w.Topic, Labels: w.Labels, TTL: w.TTL,
			})
		}
	}
	return out
}

func (w *Worker) ranks() []uint32 {
	out := make([]uint32, w.Ranks)
	for i := range out {
		out[i] = w.StartRank + uint32(i)
	}
	return out
}

// Lifecycle is whether a worker can be chosen.
type Lifecycle string

// The lifecycles of a worker.
const (
	Incomplete    Lifecycle = "incomplete"
	Schedulable   Lifecycle = "schedulable"
	Draining      Lifecycle = "draining"
	Unschedulable Lifecycle = "unschedulable"
)

// missing tells what keeps a worker that was described from being chosen.
// registered has its ranks that are in the catalog; catalog tells whether there
// is one.
func (w *Worker) missing(registered map[uint32]event.Worker, catalog bool) []string {
	var out []string
	if w.Endpoint == "" {
		out = append(out, "endpoint is required")
	}
	if w.BlockSize == 0 {
		out = append(out, "block_size must be greater than 0")
	}
	if w.Ranks == 0 {
		out = append(out, "data_parallel_size must be greater than 0")
	}
	for _, rank := range w.ranks() {
		_, ok := registered[rank]
		switch {
		case ok:
		case w.EventEndpoints[rank] == "":
			out = append(out, "kv_events endpoint is required for dp_rank "+strconv.FormatUint(uint64(rank), 10))
		case catalog && w.BlockSize > 0:
			out = append(out, "dp_rank "+strconv.FormatUint(uint64(rank), 10)+" is not registered any more")
		}
	}
	return out
}

// Candidate is a worker rank that can be chosen.
type Candidate struct {
	Source event.Source
	Worker *Worker

	slot     load.Slot
	capacity float64 // max_num_batched_tokens
}

// pool is the candidates of a partition. It never changes; a new one takes its
// place.
type pool struct {
	blockSize  uint32
	eagle      bool
	candidates []Candidate
	at         map[event.Source]int32
	hints      bool // some take hints
}
