// Package load is the active load of workers as all replicas of one service see
// it: reservations, selections that wait to be booked, and sessions.
//
// Booking is local. What a replica does it tells the others over core NATS, each
// message numbered. A replica that misses a number asks the sender for its whole
// state, so whatever the network loses, delays, repeats or reorders, the views
// become equal again.
//
// A reservation is its owner's: the replica that booked it. Others that complete
// or free it make a mark, which counts everywhere at once, and the owner confirms
// a free by dropping the reservation. So nothing depends on the order in which
// messages of different replicas arrive.
package load

import (
	"errors"
	"fmt"
	"time"
)

// Config is how the replicas of a group share their load. Replicas of one group
// have the same durations.
type Config struct {
	// Group names the replicas that share: those of one name.
	Group string
	// ID names this replica among all that ever were; empty: a random one. A
	// replica that starts again is another one.
	ID string
	// Expiry is how long a reservation that nothing happens to lasts.
	Expiry time.Duration
	// PendingExpiry is how long a selection waits to be booked, and
	// MaxPending how many of one replica may wait.
	PendingExpiry time.Duration
	MaxPending    int
	// SessionExpiry is how long a session that is not used is remembered, and
	// MaxSessions how many are.
	SessionExpiry time.Duration
	MaxSessions   int
	// MaxReservations is how many reservations one replica may own.
	MaxReservations int
	// Beat is how often a replica says that it is there, and how far it is.
	Beat time.Duration
	// DeadAfter is the silence after which a replica counts as dead, and
	// DeadExpiry how long its reservations last from then on, at most.
	DeadAfter, DeadExpiry time.Duration
	// Settle is how long an operation on an id that is not known waits for
	// it: the message that tells of it may be on its way.
	Settle time.Duration
	// EarlyExpiry is how long a free of an unknown id is remembered.
	EarlyExpiry time.Duration
	// JoinWindow is how long a replica that starts waits for others to answer.
	JoinWindow time.Duration
	// Patience is how long a missing message may be late before its sender
	// is asked for its state, and AskInterval how long an answer is waited for.
	Patience, AskInterval time.Duration
}

// Default returns the configuration that fits most services.
func Default() Config {
	return Config{
		Group:           "default",
		Expiry:          300 * time.Second,
		PendingExpiry:   120 * time.Second,
		MaxPending:      1 << 16,
		SessionExpiry:   30 * time.Minute,
		MaxSessions:     1 << 20,
		MaxReservations: 1 << 20,
		Beat:            time.Second,
		DeadAfter:       5 * time.Second,
		DeadExpiry:      60 * time.Second,
		Settle:          100 * time.Millisecond,
		EarlyExpiry:     30 * time.Second,
		JoinWindow:      250 * time.Millisecond,
		Patience:        20 * time.Millisecond,
		AskInterval:     250 * time.Millisecond,
	}
}

// Validate tells what is wrong with a configuration.
func (c *Config) Validate() error {
	if c.Group == "" {
		return errors.New("load: Group is empty")
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"Expiry", c.Expiry}, {"PendingExpiry", c.PendingExpiry}, {"SessionExpiry", c.SessionExpiry}, {"Beat", c.Beat},
		{"DeadAfter", c.DeadAfter}, {"DeadExpiry", c.DeadExpiry}, {"EarlyExpiry", c.EarlyExpiry}, {"AskInterval", c.AskInterval},
	} {
		if d.value <= 0 {
			return fmt.Errorf("load: %s is %v, want more than 0", d.name, d.value)
		}
	}
	if c.DeadAfter < 2*c.Beat {
		return fmt.Errorf("load: DeadAfter is %v, want at least twice Beat, which is %v", c.DeadAfter, c.Beat)
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"MaxPending", c.MaxPending}, {"MaxSessions", c.MaxSessions}, {"MaxReservations", c.MaxReservations}} {
		if n.value < 1 {
			return fmt.Errorf("load: %s is %d, want at least 1", n.name, n.value)
		}
	}
	return nil
}

// Errors of this package. All others wrap one of them.
var (
	// ErrExists: there is a reservation of that id.
	ErrExists = errors.New("exists already")
	// ErrFreed: the id was freed a moment ago, before it was booked.
	ErrFreed = errors.New("was freed before it was booked")
	// ErrUnknown: there is no reservation, or no selection, of that id.
	ErrUnknown = errors.New("unknown")
	// ErrFull: as many reservations as are allowed are active.
	ErrFull = errors.New("too many reservations")
	// ErrNotJoined: the load of the other replicas is not known yet.
	ErrNotJoined = errors.New("load of other replicas not known yet")
	// ErrContended: a booking lost against other replicas too often.
	ErrContended = errors.New("too many bookings at once")
	// ErrMessage: a message of a replica can't be read.
	ErrMessage = errors.New("load: malformed message")
)

// Limits of what is booked.
const (
	// MaxID is how long an id may be, in bytes.
	MaxID = 256
	// MaxBlocks is how many blocks a reservation may have.
	MaxBlocks = 1 << 24
	// MaxTokens is how many tokens a reservation may have.
	MaxTokens = 1 << 30
)
