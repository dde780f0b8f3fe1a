// Package faults is a network that loses, delays, repeats and reorders messages
// when a test says so.
package faults

import (
	"math/rand/v2"
	"sync"
	"time"
)

// Network carries messages, as replica/load wants it.
type Network interface {
	Publish(subject string, data []byte) error
	Subscribe(subject string, f func(data []byte)) (unsubscribe func(), err error)
}

// Transport is a Network with faults in what is published through it. It has none
// until Set or Cut.
type Transport struct {
	Network

	mu     sync.Mutex
	rng    *rand.Rand
	lose   float64
	repeat float64
	delay  time.Duration
	cut    bool
	ended  bool
	late   sync.WaitGroup
}

// Over returns a Transport over a network, with faults that are the same for the
// same seed and the same messages.
func Over(n Network, seed uint64) *Transport {
	return &Transport{Network: n, rng: rand.New(rand.NewPCG(seed, 1))}
}

// Set has messages lost and repeated with a probability, and one in three come
// late, by up to delay, so that others overtake it.
func (t *Transport) Set(lose, repeat float64, delay time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lose, t.repeat, t.delay = lose, repeat, delay
}

// Cut has nothing come through, or what comes through again.
func (t *Transport) Cut(cut bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.cut = cut
}

// End waits for what is late. Nothing comes through after it.
func (t *Transport) End() {
	t.mu.Lock()
	t.ended = true
	t.mu.Unlock()
	t.late.Wait()
}

// MaxMessage returns what the network says of the largest message; 0: nothing.
func (t *Transport) MaxMessage() int {
	if n, ok := t.Network.(interface{ MaxMessage() int }); ok {
		return n.MaxMessage()
	}
	return 0
}

// Publish publishes a message, or does not.
func (t *Transport) Publish(subject string, data []byte) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.cut || t.ended || t.rng.Float64() < t.lose {
		return nil
	}
	times := 1
	if t.rng.Float64() < t.repeat {
		times = 2
	}
	for range times {
		if t.delay == 0 || t.rng.IntN(3) > 0 {
			if err := t.Network.Publish(subject, data); err != nil {
				return err
			}
			continue
		}
		wait, late := time.Duration(t.rng.Int64N(int64(t.delay))), append([]byte(nil), data...)
		t.late.Go(func() {
			time.Sleep(wait) // the delay itself
			_ = t.Network.Publish(subject, late)
		})
	}
	return nil
}
