package engines

import (
	"errors"
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// ErrFault: there is no such fault, or it lacks a number.
var ErrFault = errors.New("engines: bad fault")

// Fault is something that goes wrong with a worker.
type Fault struct {
	Kind     string
	Count    int           // 0: 1
	Duration time.Duration // of a stall
}

// Kinds of faults.
const (
	Drop      = "drop"      // the next Count batches reach no subscriber; the replay has them
	Lose      = "lose"      // the next Count batches reach nobody, ever
	Overflow  = "overflow"  // as Lose, and the replay forgets all that was before
	Duplicate = "duplicate" // the last Count batches are sent again
	Stall     = "stall"     // nothing is published for Duration, then all of it
	Silent    = "silent"    // the next Count replay requests get no answer
	Restart   = "restart"   // the process ends, with all that runs, and begins anew
	Clear     = "clear"     // the cache is emptied, as soon as nothing runs
)

// Faults returns every kind of fault.
func Faults() []string {
	return []string{Drop, Lose, Overflow, Duplicate, Stall, Silent, Restart, Clear}
}

// faultState is the faults that a worker has yet to suffer.
type faultState struct {
	drop, lose int
	stalled    bool
	timer      *time.Timer
	held       [][]model.Event
}

// delivery returns what is to become of the next batch.
func (f *faultState) delivery() mock.Delivery {
	switch {
	case f.lose > 0:
		f.lose--
		return mock.Gone
	case f.drop > 0:
		f.drop--
		return mock.Lost
	}
	return mock.Sent
}

// end forgets all faults.
func (f *faultState) end() {
	if f.timer != nil {
		f.timer.Stop()
	}
	*f = faultState{}
}

// Fail makes a fault happen. It fails with ErrFault, cache.ErrBusy, or what the
// system says of a restart.
func (w *Worker) Fail(f Fault) error {
	n := max(f.Count, 1)
	switch f.Kind {
	case Restart:
		return w.Restart()
	case Clear:
		return w.Clear()
	case Silent:
		w.Engine.SetReplay(func(r *mock.Replay) { r.Silent = n })
		return nil
	case Duplicate:
		return w.duplicate(n)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	switch f.Kind {
	case Drop:
		w.faults.drop += n
	case Lose:
		w.faults.lose += n
	case Overflow:
		w.faults.lose += n
		w.Engine.ForgetRing()
	case Stall:
		if f.Duration <= 0 {
			return fmt.Errorf("%w: a stall needs a duration", ErrFault)
		}
		w.stall(f.Duration)
	default:
		return fmt.Errorf("%w: %q is none of %v", ErrFault, f.Kind, Faults())
	}
	return nil
}

// duplicate sends the last batches again.
func (w *Worker) duplicate(n int) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	next := w.Engine.Next()
	for seq := next - min(next, uint64(n)); seq < next; seq++ {
		err := w.Engine.Resend(seq)
		if err != nil && !errors.Is(err, mock.ErrNotKept) && !errors.Is(err, mock.ErrStopped) {
			return err
		}
	}
	return nil
}

// stall holds batches back for a while. w.mu is held.
func (w *Worker) stall(d time.Duration) {
	f := &w.faults
	f.stalled = true
	if f.timer != nil {
		f.timer.Stop()
	}
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.faults.timer != t {
			return
		}
		held := w.faults.held
		w.faults.stalled, w.faults.held, w.faults.timer = false, nil, nil
		for _, events := range held {
			w.publish(events)
		}
	})
	f.timer = t
}

// Restart ends the process of the engine and begins another one: the cache is
// empty, numbers begin at 0, and requests that run fail with ErrRestarted. The
// host tier is kept if it is somebody else's memory.
func (w *Worker) Restart() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return mock.ErrStopped
	}
	close(w.life)
	w.life = make(chan struct{})
	w.faults.end()
	w.freed = make(chan struct{}) // whoever waited for room has seen the life end
	w.done.Restarts++
	if w.alarm != nil {
		w.alarm.Stop()
	}
	w.Engine.Stop()
	w.Engine.NewLife()
	w.cache.Restart(time.Now())
	// Somebody may have taken the port for a moment.
	err := w.Engine.Start()
	for tries := 0; err != nil && tries < 100; tries++ {
		time.Sleep(10 * time.Millisecond)
		err = w.Engine.Start()
	}
	if err != nil {
		w.stopped = true
		if w.err == nil {
			w.err = fmt.Errorf("%s rank %d does not start again: %w", w.Instance, w.Rank, err)
		}
	}
	return err
}
