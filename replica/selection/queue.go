package selection

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// queue is the requests of a partition that are held back because all workers
// are busy. The first one tries again every now and then; the others wait for
// their turn.
type queue struct {
	mu      sync.Mutex
	waiting heldList
	tokens  int64
	serial  uint64
}

// held is a request that is held back.
type held struct {
	priority uint32
	at       float64 // when it came, in s, less what it may jump
	serial   uint64
	place    int
	first    chan struct{} // has something when it is its turn
}

// retry is how often the first one tries.
const retry = 2 * time.Millisecond

type heldList []*held

func (l heldList) Len() int { return len(l) }
func (l heldList) Less(i, j int) bool {
	a, b := l[i], l[j]
	switch {
	case a.priority != b.priority:
		return a.priority > b.priority
	case a.at != b.at:
		return a.at < b.at
	}
	return a.serial < b.serial
}
func (l heldList) Swap(i, j int) {
	l[i], l[j] = l[j], l[i]
	l[i].place, l[j].place = i, j
}
func (l *heldList) Push(x any) {
	h := x.(*held)
	h.place = len(*l)
	*l = append(*l, h)
}
func (l *heldList) Pop() any {
	h := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return h
}

// wake tells the first one that it is.
func (q *queue) wake() {
	if len(q.waiting) > 0 {
		select {
		case q.waiting[0].first <- struct{}{}:
		default:
		}
	}
}

// hold waits for a worker that is not busy.
func (s *Selector) hold(ctx context.Context, r *Request, book bool, out *Result) error {
	if s.cfg.MaxQueue == 0 {
		return fmt.Errorf("%w", ErrOverloaded)
	}
	s.mu.Lock()
	q := s.queues[r.Partition]
	if q == nil {
		q = &queue{}
		s.queues[r.Partition] = q
	}
	s.mu.Unlock()
	h, err := q.join(r, s.cfg.MaxQueue)
	if err != nil {
		return err
	}
	defer q.leave(h, r)
	deadline := time.NewTimer(s.cfg.QueueTimeout)
	defer deadline.Stop()
	again := time.NewTicker(retry)
	defer again.Stop()
	again.Stop()
	for {
		select {
		case <-h.first:
			again.Reset(retry)
		case <-again.C:
		case <-deadline.C:
			return fmt.Errorf("%w, for %v", ErrOverloaded, s.cfg.QueueTimeout)
		case <-ctx.Done():
			return ctx.Err()
		}
		q.mu.Lock()
		first := h.place == 0
		q.mu.Unlock()
		if !first {
			again.Stop()
			continue
		}
		if err := s.once(ctx, r, book, out); !errors.Is(err, errBusy) {
			return err
		}
	}
}

func (q *queue) join(r *Request, most int) (*held, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) >= most {
		return nil, fmt.Errorf("%w: %d requests of %d tokens wait", ErrQueueFull, len(q.waiting), q.tokens)
	}
	q.serial++
	h := &held{priority: r.Priority, at: float64(time.Now().UnixNano())/1e9 - r.Jump, serial: q.serial, first: make(chan struct{}, 1)}
	heap.Push(&q.waiting, h)
	q.tokens += int64(r.Tokens)
	q.wake()
	return h, nil
}

func (q *queue) leave(h *held, r *Request) {
	q.mu.Lock()
	defer q.mu.Unlock()
	heap.Remove(&q.waiting, h.place)
	q.tokens -= int64(r.Tokens)
	q.wake()
}

// Queued returns how many requests of a partition are held back, and the tokens
// of their prompts.
func (s *Selector) Queued(name event.Partition) (requests int, tokens int64) {
	s.mu.Lock()
	q := s.queues[name]
	s.mu.Unlock()
	if q == nil {
		return 0, 0
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.waiting), q.tokens
}
