package event

import (
	"strconv"
	"time"
)

// Subjects beside the log, on core NATS.
const (
	// StatusSubjects is where bridges publish the status of their listeners,
	// each under its own id.
	StatusSubjects = "kvmesh.status.>"
	// StatusRequestSubject asks all bridges to publish all of it.
	StatusRequestSubject = "kvmesh.status-request"

	statusPrefix     = "kvmesh.status."
	checkpointPrefix = "kvmesh.checkpoint."
)

// StatusSubject returns where the bridge with the given id publishes.
func StatusSubject(bridge string) string { return statusPrefix + Escape(bridge) }

// CheckpointSubject returns where a checkpoint of the source with the given key
// is asked for.
func CheckpointSubject(key string) string { return checkpointPrefix + key }

// CheckpointRequest returns the body of a request for a checkpoint. A source
// whose last checkpoint is at the log sequence before, or later, need not
// write one.
func CheckpointRequest(before uint64) []byte { return strconv.AppendUint(nil, before, 10) }

// ParseCheckpointRequest is the inverse of CheckpointRequest. What is no number
// asks for a checkpoint in any case.
func ParseCheckpointRequest(b []byte) (before uint64) {
	before, err := strconv.ParseUint(string(b), 10, 64)
	if err != nil {
		return 1<<64 - 1
	}
	return before
}

// Status is what a bridge tells of its listeners, as JSON: of those whose status
// has changed, and now and then of all. A bridge that has not said anything for
// StatusExpiry is gone.
type Status struct {
	Bridge    string           `json:"bridge"`
	Time      time.Time        `json:"time"`
	Listeners []ListenerStatus `json:"listeners"`
}

// ListenerStatus is what a bridge tells of one listener.
type ListenerStatus struct {
	Source    string            `json:"source"` // Source.Key
	State     string            `json:"state"`
	LastError string            `json:"last_error,omitempty"`
	EngineSeq *uint64           `json:"engine_seq,omitempty"` // the last batch that was applied at the bridge
	Uncertain bool              `json:"uncertain,omitempty"`
	Gone      bool              `json:"gone,omitempty"` // the listener is down
	Dropped   map[string]uint64 `json:"dropped,omitempty"`
}

// StatusExpiry is after how long a silent bridge counts as gone.
const StatusExpiry = 30 * time.Second

// States of a listener.
const (
	// StatePending: not connected to the engine yet, or not any more.
	StatePending = "pending"
	// StateActive: connected, and nothing is missing.
	StateActive = "active"
	// StateCatchingUp: connected, and missing batches are asked for.
	StateCatchingUp = "catching_up"
	// StateFailed: something has to be done, see the last error.
	StateFailed = "failed"
)
