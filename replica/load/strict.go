package load

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Strict books so that no two replicas book on one worker without knowing of each
// other, and no id twice: each booking is a compare-and-set in a key-value bucket
// before it is confirmed. A booking waits for NATS, and fails if NATS can't be
// reached.
type Strict struct {
	shared *Shared
	js     jetstream.JetStream
	config jetstream.KeyValueConfig
	log    *slog.Logger

	mu sync.Mutex
	kv jetstream.KeyValue // nil until the bucket is there
}

// NewStrict returns a Strict that books on a Shared. The bucket is made if it is
// not there; all replicas of a group use one.
func NewStrict(s *Shared, js jetstream.JetStream, bucket string, replicas int, logger *slog.Logger) *Strict {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Strict{shared: s, js: js, log: logger, config: jetstream.KeyValueConfig{
		Bucket:      bucket,
		Description: "kvmesh: bookings of replicas that book strictly",
		Storage:     jetstream.MemoryStorage, // what is in it means nothing once all replicas are gone
		TTL:         2 * s.cfg.Expiry,
		Replicas:    replicas,
	}}
}

func (x *Strict) bucket(ctx context.Context) (jetstream.KeyValue, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.kv != nil {
		return x.kv, nil
	}
	kv, err := x.js.KeyValue(ctx, x.config.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = x.js.CreateKeyValue(ctx, x.config)
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", x.config.Bucket, err)
	}
	x.kv = kv
	return kv, nil
}

// Keys of the bucket: the last booking of a worker rank, and a reservation.
func workerKey(w event.Source) string { return "w." + w.Key() }
func bookingKey(id string) string     { return "r." + event.Escape(id) }

// claim makes an id this replica's, unless it is taken.
func (x *Strict) claim(ctx context.Context, kv jetstream.KeyValue, id string) error {
	own := []byte(x.shared.self.id)
	_, err := kv.Create(ctx, bookingKey(id), own)
	if errors.Is(err, jetstream.ErrKeyExists) {
		var e jetstream.KeyValueEntry
		if e, err = kv.Get(ctx, bookingKey(id)); err == nil && x.stale(id, e) {
			_, err = kv.Update(ctx, bookingKey(id), own, e.Revision())
		} else if err == nil || errors.Is(err, jetstream.ErrKeyNotFound) {
			err = jetstream.ErrKeyExists
		}
	}
	if errors.Is(err, jetstream.ErrKeyExists) {
		return fmt.Errorf("reservation %q %w", id, ErrExists)
	}
	if err != nil {
		return fmt.Errorf("booking %q: %w", id, err)
	}
	return nil
}

// stale tells whether the entry of an id is of a reservation that expired, or of
// a replica that is gone.
func (x *Strict) stale(id string, e jetstream.KeyValueEntry) bool {
	s := x.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.active(id) != nil {
		return false
	}
	owner := s.peers[string(e.Value())]
	return owner == nil || owner.dead || time.Since(e.Created()) > s.cfg.Expiry
}

// ReserveBy is Shared.ReserveBy, with a compare-and-set. Errors may also wrap
// ErrContended, or say why NATS could not be reached.
func (x *Strict) ReserveBy(ctx context.Context, b *Booking, pick Pick) error {
	if err := b.validate(); err != nil {
		return err
	}
	kv, err := x.bucket(ctx)
	if err != nil {
		return err
	}
	if err := x.claim(ctx, kv, b.ID); err != nil {
		return err
	}
	const tries = 64
	for range tries {
		var again bool
		if again, err = x.try(ctx, kv, b, pick); err == nil && !again {
			return nil
		}
		if err != nil {
			break
		}
	}
	if err == nil {
		err = fmt.Errorf("booking %q: %w", b.ID, ErrContended)
	}
	x.Freed(context.WithoutCancel(ctx), b.ID)
	return err
}

// Reserve is Shared.Reserve, with a compare-and-set.
func (x *Strict) Reserve(ctx context.Context, b Booking) error {
	return x.ReserveBy(ctx, &b, func([]Load, *Booking) error { return nil })
}

// try books once. It tells whether another booking came first: then it is known
// here now, and the choice has to be made anew.
func (x *Strict) try(ctx context.Context, kv jetstream.KeyValue, b *Booking, pick Pick) (again bool, err error) {
	s := x.shared
	s.mu.Lock()
	err = pick(s.sums, b)
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	revision := uint64(0)
	switch e, err := kv.Get(ctx, workerKey(b.Worker)); {
	case errors.Is(err, jetstream.ErrKeyNotFound):
	case err != nil:
		return false, fmt.Errorf("booking %q: %w", b.ID, err)
	default:
		revision = e.Revision()
		known, err := x.await(ctx, e)
		if err != nil || !known {
			return true, err
		}
	}
	s.mu.Lock()
	r, err := s.reserve(b)
	s.mu.Unlock()
	if err != nil {
		return false, err
	}
	value := []byte(s.self.id + " " + strconv.FormatUint(r.stamp, 10))
	if revision == 0 {
		_, err = kv.Create(ctx, workerKey(b.Worker), value)
	} else {
		_, err = kv.Update(ctx, workerKey(b.Worker), value, revision)
	}
	if err == nil {
		return false, nil
	}
	s.mu.Lock() // what was booked was not confirmed to anybody
	if s.self.reservations[r.key] == r {
		s.end(r)
	}
	delete(s.ended, r.key)
	s.mu.Unlock()
	if errors.Is(err, jetstream.ErrKeyExists) {
		return true, nil
	}
	return false, fmt.Errorf("booking %q: %w", b.ID, err)
}

// await waits until the booking that an entry names is known here. It tells
// whether it was known already.
func (x *Strict) await(ctx context.Context, e jetstream.KeyValueEntry) (known bool, err error) {
	id, text, ok := strings.Cut(string(e.Value()), " ")
	stamp, parse := strconv.ParseUint(text, 10, 64)
	if !ok || parse != nil {
		x.log.Warn("entry of the bookings can't be read, it will be replaced", "key", e.Key())
		return true, nil
	}
	s := x.shared
	s.mu.Lock()
	p := s.peers[id]
	known = p != nil && (p.seq >= stamp || p.dead)
	s.mu.Unlock()
	if known {
		return true, nil
	}
	// Its replica may be gone: then nobody will ever tell.
	wait, cancel := context.WithTimeout(ctx, s.cfg.DeadAfter)
	defer cancel()
	if err := s.WaitFor(wait, id, stamp); err != nil && ctx.Err() != nil {
		return false, ctx.Err()
	} else if err != nil {
		return true, nil
	}
	return false, nil
}

// Take is Shared.Take, with a compare-and-set.
func (x *Strict) Take(ctx context.Context, id string) (Booking, error) {
	b, err := x.shared.Kept(ctx, id)
	if err != nil {
		return b, err
	}
	if err := x.Reserve(ctx, b); err != nil {
		return Booking{}, err
	}
	x.shared.Discard(id)
	return b, nil
}

// Freed lets an id be booked again.
func (x *Strict) Freed(ctx context.Context, id string) {
	kv, err := x.bucket(ctx)
	if err == nil {
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		err = kv.Purge(short, bookingKey(id))
	}
	if err != nil {
		x.log.Warn("the id of a reservation that ended stays taken until it expires", "id", id, "error", err)
	}
}
