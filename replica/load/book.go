package load

import (
	"context"
	"fmt"
	"math"
	"time"
)

// pendingPrefix tells the keys of selections from those of reservations: no id
// begins with it on the wire or in a request.
const pendingPrefix = "\x00"

// Reserve books on a worker rank. Errors wrap ErrExists, ErrFreed or ErrFull.
func (s *Shared) Reserve(b Booking) error {
	if err := b.validate(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, err := s.reserve(&b)
	return err
}

// Pick chooses where to book, given the loads of all slots, and fills in the
// booking: its worker, its tokens and its blocks. It must not keep the loads, and
// must not call the Shared.
type Pick func(loads []Load, b *Booking) error

// ReserveBy books where pick says, so that no other booking of this replica comes
// between. Errors are pick's, and those of Reserve.
func (s *Shared) ReserveBy(b *Booking, pick Pick) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := pick(s.sums, b); err != nil {
		return err
	}
	if err := b.validate(); err != nil {
		return err
	}
	_, err := s.reserve(b)
	return err
}

// admit tells whether a reservation may be booked.
func (s *Shared) admit(id string) error {
	switch {
	case s.active(id) != nil:
		return fmt.Errorf("reservation %q %w", id, ErrExists)
	case s.early(id):
		return fmt.Errorf("reservation %q %w", id, ErrFreed)
	case len(s.self.reservations)-s.pending >= s.cfg.MaxReservations:
		return fmt.Errorf("%w: %d are active here", ErrFull, s.cfg.MaxReservations)
	}
	return nil
}

func (s *Shared) reserve(b *Booking) (*reservation, error) {
	if err := s.admit(b.ID); err != nil {
		return nil, err
	}
	r := &reservation{Booking: *b, key: b.ID, owner: s.self, decay: Unit, deadline: time.Now().Add(s.cfg.Expiry)}
	s.tellAdd(r)
	s.put(r)
	return r, nil
}

// PrefillComplete says that the prompt of a reservation has been computed. The
// error wraps ErrUnknown.
func (s *Shared) PrefillComplete(ctx context.Context, id string) error {
	r := s.find(ctx, id)
	defer s.mu.Unlock()
	if r == nil {
		return fmt.Errorf("reservation %q is %w", id, ErrUnknown)
	}
	if r.owner == s.self {
		r.done = true
		s.tellChange(r)
	} else {
		s.mark(r).done = true
		s.tellMark(r)
	}
	s.touched(r)
	return nil
}

// OutputBlock says that a reservation has one block more. fraction, if it is in
// [0, 1), is what is left of its weight from here on: a request near its end will
// soon give its blocks back. The error wraps ErrUnknown.
func (s *Shared) OutputBlock(ctx context.Context, id string, fraction float64) error {
	decay := uint16(Unit)
	if fraction >= 0 && fraction < 1 {
		decay = uint16(math.Round(fraction * Unit))
	}
	r := s.find(ctx, id)
	defer s.mu.Unlock()
	if r == nil {
		return fmt.Errorf("reservation %q is %w", id, ErrUnknown)
	}
	if r.owner == s.self {
		r.outputs = min(r.outputs+1, MaxBlocks)
		r.decay = min(r.decay, decay)
		s.tellChange(r)
	} else {
		m := s.mark(r)
		m.outputs = min(m.outputs+1, MaxBlocks)
		m.decay = min(m.decay, decay)
		s.tellMark(r)
	}
	s.touched(r)
	return nil
}

// touched counts a reservation anew, and lets it last.
func (s *Shared) touched(r *reservation) {
	r.deadline = time.Now().Add(s.cfg.Expiry)
	s.weigh(r)
}

// Free ends a reservation, wherever it was made. If the id is not known, the error
// wraps ErrUnknown; should the reservation's beginning still be on its way, it is
// freed when it comes.
func (s *Shared) Free(ctx context.Context, id string) error {
	r := s.find(ctx, id)
	defer s.mu.Unlock()
	if r == nil {
		if s.transport != nil && id != "" && len(id) <= MaxID && !s.over(id) {
			s.markEarly(id)
		}
		return fmt.Errorf("reservation %q is %w", id, ErrUnknown)
	}
	for ; r != nil; r = s.active(id) { // one of an id, unless two replicas were asked at once
		s.end(r)
	}
	return nil
}

// end frees a reservation.
func (s *Shared) end(r *reservation) {
	if r.owner == s.self {
		s.drop(r)
		s.tellFree(r)
		return
	}
	s.mark(r).freed = true
	s.tellMark(r)
	s.weigh(r)
}

// mark returns this replica's mark on a reservation of another.
func (s *Shared) mark(r *reservation) *mark {
	key := markKey{r.owner.id, r.key, r.stamp}
	m := s.self.marks[key]
	if m == nil {
		m = &mark{decay: Unit}
		s.self.marks[key] = m
	}
	m.deadline = time.Now().Add(s.markExpiry())
	return m
}

// markExpiry is longer than what a mark is on can last, so that it never comes
// back.
func (s *Shared) markExpiry() time.Duration { return 2*s.cfg.Expiry + s.cfg.DeadExpiry }

func (s *Shared) markEarly(id string) {
	const most = 1 << 16
	if len(s.self.marks) >= most {
		s.metrics.forgotten.Add(s.metrics.ctx, 1)
		return
	}
	key := markKey{id: id}
	s.self.marks[key] = &mark{freed: true, decay: Unit, deadline: time.Now().Add(s.cfg.EarlyExpiry)}
	s.tellKey(key)
}

// -- selections that wait to be booked ------------------------------------------

// Keep remembers a selection under the booking's id until Take, on any replica,
// or until it expires. A later one of the same id takes its place. It tells
// whether there was room.
func (s *Shared) Keep(b Booking) bool {
	if b.validate() != nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := pendingPrefix + b.ID
	for r := s.active(key); r != nil; r = s.active(key) {
		s.end(r)
	}
	if s.pending >= s.cfg.MaxPending {
		s.metrics.notKept.Add(s.metrics.ctx, 1)
		return false
	}
	r := &reservation{Booking: b, key: key, owner: s.self, waits: true, decay: Unit, deadline: time.Now().Add(s.cfg.PendingExpiry)}
	s.tellAdd(r)
	s.put(r)
	return true
}

// Kept returns the selection that waits under an id. The error wraps ErrUnknown.
func (s *Shared) Kept(ctx context.Context, id string) (Booking, error) {
	r := s.find(ctx, pendingPrefix+id)
	defer s.mu.Unlock()
	if r == nil {
		return Booking{}, fmt.Errorf("no selection %q waits to be booked: it is %w, expired, or booked already", id, ErrUnknown)
	}
	return r.Booking, nil
}

// Discard forgets the selection that waits under an id, if there is one.
func (s *Shared) Discard(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := pendingPrefix + id
	for r := s.active(key); r != nil; r = s.active(key) {
		s.end(r)
	}
}

// Take books the selection that waits under an id, which waits no longer then. If
// it can't be booked it still waits. Two replicas that take one at the same
// moment may both book it. Errors wrap ErrUnknown, ErrExists, ErrFreed or
// ErrFull.
func (s *Shared) Take(ctx context.Context, id string) (Booking, error) {
	r := s.find(ctx, pendingPrefix+id)
	defer s.mu.Unlock()
	if r == nil {
		return Booking{}, fmt.Errorf("no selection %q waits to be booked: it is %w, expired, or booked already", id, ErrUnknown)
	}
	b := r.Booking
	if _, err := s.reserve(&b); err != nil {
		return Booking{}, err
	}
	for ; r != nil; r = s.active(pendingPrefix + id) {
		s.end(r)
	}
	return b, nil
}
