package bridge

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// GapPolicy says what becomes of a source's state when engine batches are lost
// for good.
type GapPolicy string

// The gap policies.
const (
	// KeepOnGap keeps the state and marks the source uncertain.
	KeepOnGap GapPolicy = "keep"
	// ResetOnGap gives the state up: the source is empty until the engine
	// stores anew.
	ResetOnGap GapPolicy = "reset"
)

// Config is how a Bridge works. Default has the values that fit most fleets.
type Config struct {
	// ID names the bridge to people and to other bridges. It must be unique.
	ID string
	// Log is where records go, and Replicas how many NATS servers keep it,
	// should the Bridge have to make it.
	Log      event.Log
	Replicas int
	// OnGap says what to do about batches that are lost for good.
	OnGap GapPolicy
	// Media maps the engines' names of media to tiers.
	Media *engine.Media
	// ZMTP bounds and times the connections to engines.
	ZMTP zmtp.Options
	// Residency bounds what is remembered of each source beyond its blocks.
	Residency residency.Limits

	// MaxHeld is how many bytes of batches that can't be applied yet, because
	// others before them are missing, are held for one worker.
	MaxHeld int
	// MaxBacklog is how many bytes of operations that JetStream has not
	// acknowledged yet are held for one source. A bridge whose bounds are
	// reached stops reading that engine.
	MaxBacklog int

	// MaxSlots is how many workers with cache owners are read at a time. What a
	// cache owner's memory holds is known for longer than engines run.
	MaxSlots int

	// Repairs is how many replay requests are open at a time, over all
	// workers.
	Repairs int
	// RepairTimeout is how long a replay may stay silent before it counts as
	// ended.
	RepairTimeout time.Duration
	// RepairInterval is the least time between two replay requests to one
	// engine, unless the first one brought something and more is missing.
	RepairInterval time.Duration
	// RepairAttempts is how often a batch is asked for before it is a gap.
	RepairAttempts int
	// RepairCooldown is for how long an engine whose replay endpoint did not
	// answer is not asked again.
	RepairCooldown time.Duration
	// ProbeInterval is how long an engine may be silent before it is asked
	// for batches that got lost at the end. It doubles with every answer that
	// brings nothing, up to 16 times this value.
	ProbeInterval time.Duration

	// PublishTimeout bounds one attempt to publish a record.
	PublishTimeout time.Duration
	// StopTimeout bounds how long a Bridge that stops tries to write what it
	// has not written yet.
	StopTimeout time.Duration
	// CheckpointBytes is how much of the log a source's records may take
	// before the source writes a checkpoint; it waits for longer if the
	// checkpoint itself is large.
	CheckpointBytes int
	// MaxMessage is the largest record, in bytes. NATS's own limit counts as
	// well.
	MaxMessage int
}

// Default returns the configuration of a bridge with the given id.
func Default(id string) Config {
	media, _ := engine.NewMedia(nil) // no overrides, no error
	return Config{
		ID:        id,
		Log:       event.DefaultLog(),
		Replicas:  1,
		OnGap:     KeepOnGap,
		Media:     media,
		ZMTP:      zmtp.Default(),
		Residency: residency.DefaultLimits(),

		MaxHeld:    32 << 20,
		MaxBacklog: 8 << 20,

		MaxSlots: 8,

		Repairs:        8,
		RepairTimeout:  2 * time.Second,
		RepairInterval: time.Second,
		RepairAttempts: 3,
		RepairCooldown: 30 * time.Second,
		ProbeInterval:  15 * time.Second,

		PublishTimeout:  time.Second,
		StopTimeout:     10 * time.Second,
		CheckpointBytes: 1 << 20,
		MaxMessage:      512 << 10,
	}
}

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(c.ID != "", "bridge: ID is empty")
	if err := c.Log.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("bridge: Log: %w", err))
	}
	check(c.OnGap == KeepOnGap || c.OnGap == ResetOnGap, "bridge: OnGap is %q, want %q or %q", c.OnGap, KeepOnGap, ResetOnGap)
	check(c.MaxSlots >= 0, "bridge: MaxSlots is %d, want 0 or more", c.MaxSlots)
	check(c.Media != nil, "bridge: Media is nil")
	check(c.MaxHeld >= c.ZMTP.MaxMessage/64, "bridge: MaxHeld is %d bytes, too little for messages of up to %d", c.MaxHeld, c.ZMTP.MaxMessage)
	check(c.MaxBacklog >= c.MaxMessage, "bridge: MaxBacklog is %d bytes, less than the %d of MaxMessage", c.MaxBacklog, c.MaxMessage)
	check(c.MaxMessage >= 256<<10, "bridge: MaxMessage is %d bytes, want at least %d", c.MaxMessage, 256<<10)
	for _, n := range []struct {
		name  string
		value int64
	}{
		{"Replicas", int64(c.Replicas)}, {"Repairs", int64(c.Repairs)}, {"RepairTimeout", int64(c.RepairTimeout)}, {"RepairInterval", int64(c.RepairInterval)},
		{"RepairAttempts", int64(c.RepairAttempts)}, {"RepairCooldown", int64(c.RepairCooldown)}, {"ProbeInterval", int64(c.ProbeInterval)},
		{"PublishTimeout", int64(c.PublishTimeout)}, {"StopTimeout", int64(c.StopTimeout)}, {"CheckpointBytes", int64(c.CheckpointBytes)},
		{"Residency.Known", int64(c.Residency.Known)}, {"Residency.Parked", int64(c.Residency.Parked)},
	} {
		check(n.value > 0, "bridge: %s is %d, want more than 0", n.name, n.value)
	}
	if err := c.ZMTP.Validate(); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
