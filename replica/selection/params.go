// Package selection picks the worker rank that a request should go to: of those
// that may serve it, the one with the least work left to do, given what each has
// of the prompt in its cache and what is active on it already.
//
// A Selector is the whole of it as a library: it follows the catalog of workers,
// asks the index who holds what, reads and books the shared load. Own Scorers and
// Pickers take the place of the built-in cost function and choice.
package selection

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Params weigh what a selection looks at. All costs are in blocks. Zero values
// are values: start from DefaultParams.
type Params struct {
	// DeviceCredit, HostCredit and DiskCredit are what a block that a worker
	// holds in the tier saves, in blocks to prefill: 0 to 1. Disk stands for
	// external storage too.
	DeviceCredit, HostCredit, DiskCredit float64
	// CreditDecay takes from DeviceCredit where more is being prefilled than
	// at the least busy worker: the credit is divided by 1 + CreditDecay x
	// (what is more) / (this prompt).
	CreditDecay float64
	// PrefillScale is what a block to prefill costs, in blocks of decoding.
	PrefillScale float64
	// RequestWeight is what an active request costs, whatever its size.
	RequestWeight float64
	// SessionCredit is what the worker that served the session last is
	// spared, as a part of the prompt.
	SessionCredit float64
	// Temperature 0 takes the least cost. Above, workers are drawn with
	// probability exp(-cost/Temperature), the costs scaled to 0..1.
	Temperature float64
	// TrackPrefill counts prompts that are being prefilled as load.
	TrackPrefill bool
}

// DefaultParams returns the weights that Dynamo's router has by default, and a
// session credit of one prompt.
func DefaultParams() Params {
	return Params{DeviceCredit: 1, HostCredit: 0.75, DiskCredit: 0.25, PrefillScale: 1, SessionCredit: 1, TrackPrefill: true}
}

// MaxWeight is the most that a weight may be, so that every cost is a finite number.
const MaxWeight = 1e12

// Validate tells what is wrong with weights. The error wraps ErrRequest.
func (p *Params) Validate() error {
	for _, f := range []struct {
		name      string
		value, to float64
	}{
		{"overlap_score_credit", p.DeviceCredit, 1}, {"host_cache_hit_weight", p.HostCredit, 1}, {"disk_cache_hit_weight", p.DiskCredit, 1},
		{"overlap_score_credit_decay", p.CreditDecay, MaxWeight}, {"prefill_load_scale", p.PrefillScale, MaxWeight},
		{"decode_active_request_weight", p.RequestWeight, MaxWeight}, {"session_credit", p.SessionCredit, MaxWeight},
		{"router_temperature", p.Temperature, MaxWeight},
	} {
		if !(f.value >= 0 && f.value <= f.to) { // not a number is wrong too
			if f.to == 1 {
				return fmt.Errorf("%w: %s is %v, want 0 to 1", ErrRequest, f.name, f.value)
			}
			return fmt.Errorf("%w: %s is %v, want 0 to %v", ErrRequest, f.name, f.value, f.to)
		}
	}
	return nil
}

// Config is how a Selector works.
type Config struct {
	Params Params
	// QueueThreshold holds requests back while every worker that may serve
	// them has more than this part of its max_num_batched_tokens to prefill;
	// 0: never.
	QueueThreshold float64
	// MaxQueue is how many requests of a partition may be held back, and
	// QueueTimeout for how long.
	MaxQueue     int
	QueueTimeout time.Duration
}

// Default returns the configuration that fits most services.
func Default() Config {
	return Config{Params: DefaultParams(), MaxQueue: 4096, QueueTimeout: 30 * time.Second}
}

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	if err := c.Params.Validate(); err != nil {
		return err
	}
	switch {
	case !(c.QueueThreshold >= 0):
		return fmt.Errorf("selection: QueueThreshold is %v, want at least 0", c.QueueThreshold)
	case c.MaxQueue < 0:
		return fmt.Errorf("selection: MaxQueue is %d, want at least 0", c.MaxQueue)
	case c.QueueThreshold > 0 && c.QueueTimeout <= 0:
		return fmt.Errorf("selection: QueueTimeout is %v with a QueueThreshold of %v, want more than 0", c.QueueTimeout, c.QueueThreshold)
	}
	return nil
}

// defaultBatchedTokens is the max_num_batched_tokens of workers that do not say.
const defaultBatchedTokens = 10_000_000

// Errors of this package, beside those of packages indexer and load.
var (
	// ErrRequest: a request asks for what can't be.
	ErrRequest = errors.New("bad request")
	// ErrUnknownWorker: there is no such worker.
	ErrUnknownWorker = errors.New("unknown worker")
	// ErrNoWorkers: no worker may serve the request now.
	ErrNoWorkers = errors.New("no worker can serve this request")
	// ErrOverloaded: every worker that may serve the request is busy, and
	// was so for as long as the request could wait.
	ErrOverloaded = errors.New("all workers that can serve this request are overloaded")
	// ErrQueueFull: too many requests are held back.
	ErrQueueFull = errors.New("the queue is full")
)

// ElsewhereError says that the index of a partition is one that this process does
// not hold: who would choose without it would choose badly.
type ElsewhereError struct{ event.Partition }

// Error implements error.
func (e *ElsewhereError) Error() string {
	return fmt.Sprintf("the index of model=%s routing_group=%s is not held by this process", e.Model, e.Group)
}
