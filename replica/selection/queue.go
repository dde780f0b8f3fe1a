package selection

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// queue is the requests of a partition that are held back because all workers
// that may serve them are busy. Those that may go to the same workers are in one
// line: its first one tries again every now and then, the others wait for their
// turn. So a request that may go to a few workers only does not hold up those
// that may go elsewhere.
type queue struct {
	mu     sync.Mutex
	lines  map[string]*line // by what limits the choice
	n      int
	tokens int64
	serial uint64
}

// line is requests that may go to the same workers, the one whose turn it is
// first.
type line []*held

// held is a request that is held back.
type held struct {
	priority uint32
	at       float64 // when it came, in s, less what it may jump
	serial   uint64
	place    int
	first    chan struct{} // has something when it is its turn
}

// retry is how often the first one of a line tries.
const retry = 2 * time.Millisecond

// Len implements heap.Interface, as the next four do.
func (l line) Len() int { return len(l) }
func (l line) Less(i, j int) bool {
	a, b := l[i], l[j]
	switch {
	case a.priority != b.priority:
		return a.priority > b.priority
	case a.at != b.at:
		return a.at < b.at
	}
	return a.serial < b.serial
}
func (l line) Swap(i, j int) {
	l[i], l[j] = l[j], l[i]
	l[i].place, l[j].place = i, j
}
func (l *line) Push(x any) {
	h := x.(*held)
	h.place = len(*l)
	*l = append(*l, h)
}
func (l *line) Pop() any {
	h := (*l)[len(*l)-1]
	*l = (*l)[:len(*l)-1]
	return h
}

// wake tells the first one that it is.
func (l line) wake() {
	if len(l) > 0 {
		select {
		case l[0].first <- struct{}{}:
		default:
		}
	}
}

// limits names the workers that a request may go to.
func (r *Request) limits() string {
	if r.Pinned == "" && r.Allowed == nil && len(r.Required) == 0 {
		return ""
	}
	rank := "*"
	if r.PinnedRank != nil {
		rank = strconv.FormatUint(uint64(*r.PinnedRank), 10)
	}
	allowed, required := slices.Sorted(slices.Values(r.Allowed)), slices.Sorted(slices.Values(r.Required))
	return strings.Join([]string{r.Pinned, rank, strings.Join(allowed, "\x00"), strings.Join(required, "\x00")}, "\x01")
}

// queue returns the queue of a partition, and makes it if there is none yet.
func (s *Selector) queue(name event.Partition) *queue {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.queues[name]
	if q == nil {
		q = &queue{lines: map[string]*line{}}
		s.queues[name] = q
	}
	return q
}

// outrun tells whether a request would overtake others that are held back.
func (s *Selector) outrun(r *Request) bool {
	if s.cfg.QueueThreshold == 0 || r.Advisory {
		return false
	}
	s.mu.Lock()
	q := s.queues[r.Partition]
	s.mu.Unlock()
	if q == nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.n > 0 && q.lines[r.limits()] != nil
}

// hold waits for a worker that is not busy.
func (s *Selector) hold(ctx context.Context, r *Request, book bool, out *Result) error {
	if s.cfg.MaxQueue == 0 {
		return fmt.Errorf("%w", ErrOverloaded)
	}
	q, limits := s.queue(r.Partition), r.limits()
	h, err := q.join(r, limits, s.cfg.MaxQueue)
	if err != nil {
		return err
	}
	defer q.leave(h, r, limits)
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

func (q *queue) join(r *Request, limits string, most int) (*held, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.n >= most {
		return nil, fmt.Errorf("%w: %d requests of %d tokens wait", ErrQueueFull, q.n, q.tokens)
	}
	q.serial++
	h := &held{priority: r.Priority, at: float64(time.Now().UnixNano())/1e9 - r.Jump, serial: q.serial, first: make(chan struct{}, 1)}
	l := q.lines[limits]
	if l == nil {
		l = &line{}
		q.lines[limits] = l
	}
	heap.Push(l, h)
	q.n++
	q.tokens += int64(r.Tokens)
	l.wake()
	return h, nil
}

func (q *queue) leave(h *held, r *Request, limits string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[limits]
	heap.Remove(l, h.place)
	q.n--
	q.tokens -= int64(r.Tokens)
	if l.Len() == 0 {
		delete(q.lines, limits)
		return
	}
	l.wake()
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
	return q.n, q.tokens
}
