package load

import (
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// TestStrictBookingsKnowOfEachOther has three replicas choose the least loaded
// worker at once. Every choice has to know of all bookings before it on that
// worker, so no worker may get more than its share.
func TestStrictBookingsKnowOfEachOther(t *testing.T) {
	const workers, each = 4, 20
	url := natsServer(t, true)
	var replicas []*replica
	var strict []*Strict
	for range 3 {
		r := launch(t, url, testConfig())
		js, err := jetstream.New(connect(t, url))
		if err != nil {
			t.Fatal(err)
		}
		replicas, strict = append(replicas, r), append(strict, NewStrict(r.Shared, js, "BOOKINGS", 1, nil))
	}
	slots := make([][]Slot, len(replicas))
	for i, r := range replicas {
		eventually(t, "three replicas know each other", func() bool { return r.Ready() == nil && len(r.Peers()) == 3 })
		for w := range workers {
			slots[i] = append(slots[i], r.Hold(worker(w)))
		}
	}
	var all sync.WaitGroup
	for i := range replicas {
		all.Go(func() {
			for n := range each {
				b := Booking{ID: fmt.Sprint(i, "-", n), Blocks: 1}
				err := strict[i].ReserveBy(t.Context(), &b, func(loads []Load, b *Booking) error {
					best := 0
					for w := range workers {
						if loads[slots[i][w]].Blocks < loads[slots[i][best]].Blocks {
							best = w
						}
					}
					b.Worker = worker(best)
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	for _, r := range replicas {
		eventually(t, "all have all", func() bool { s, _, _ := r.Total(); return s.Requests == 3*each })
		for w := range workers {
			// A worker is chosen while it has the fewest, so it is never
			// ahead of another by more than what others chose at once.
			if l := r.Of(worker(w)); l.Requests > 3*each/workers+2 {
				t.Errorf("worker %d has %d of %d requests", w, l.Requests, 3*each)
			}
		}
	}
	for i := range replicas {
		for n := range each {
			id := fmt.Sprint(i, "-", n)
			free(t, replicas[(i+1)%3], id)
			strict[(i+1)%3].Freed(t.Context(), id)
		}
		for _, slot := range slots[i] {
			replicas[i].Release(slot)
		}
	}
	idle(t, replicas...)
}

func TestStrictBooksAnIDOnce(t *testing.T) {
	url := natsServer(t, true)
	var strict []*Strict
	var replicas []*replica
	for range 3 {
		r := launch(t, url, testConfig())
		js, err := jetstream.New(connect(t, url))
		if err != nil {
			t.Fatal(err)
		}
		replicas, strict = append(replicas, r), append(strict, NewStrict(r.Shared, js, "BOOKINGS", 1, nil))
	}
	for _, r := range replicas {
		eventually(t, "three replicas know each other", func() bool { return r.Ready() == nil && len(r.Peers()) == 3 })
	}
	for round := range 10 {
		id := fmt.Sprint("r", round)
		if round == 9 {
			id = "kept"
			replicas[0].Keep(Booking{ID: id, Worker: worker(0), Blocks: 2})
			for _, r := range replicas {
				eventually(t, "the selection is known", func() bool { _, err := r.Kept(t.Context(), id); return err == nil })
			}
		}
		errs := make([]error, len(strict))
		var all sync.WaitGroup
		for i, x := range strict {
			all.Go(func() {
				if id == "kept" {
					_, errs[i] = x.Take(t.Context(), id)
				} else {
					errs[i] = x.Reserve(t.Context(), Booking{ID: id, Worker: worker(i), Blocks: 1})
				}
			})
		}
		all.Wait()
		booked := 0
		for _, err := range errs {
			switch {
			case err == nil:
				booked++
			case !errors.Is(err, ErrExists) && !errors.Is(err, ErrUnknown):
				t.Errorf("booking %s: %v", id, err)
			}
		}
		if booked != 1 {
			t.Errorf("%s was booked %d times", id, booked)
		}
		free(t, replicas[round%3], id)
		strict[round%3].Freed(t.Context(), id)
		idle(t, replicas...)
		// and again, now that it is free
		if err := strict[0].Reserve(t.Context(), Booking{ID: id, Worker: worker(0)}); err != nil {
			t.Error(err)
		}
		free(t, replicas[0], id)
		strict[0].Freed(t.Context(), id)
	}
	idle(t, replicas...)
}
