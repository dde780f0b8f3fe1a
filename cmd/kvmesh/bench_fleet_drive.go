package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/trace"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// picker picks workers for requests. Any number of goroutines may use it.
type picker interface {
	// Pick returns the worker for the next request of a session, given by the
	// local hashes of its prompt, and how many of those blocks it should hold.
	Pick(session uint64, locals []uint64) (source event.Source, held int, err error)
	// Done says that a session makes no more requests.
	Done(session uint64)
}

// overlapPicker picks the worker with the least to compute, counting each session
// that a worker has as so many blocks.
type overlapPicker struct {
	index     *indexer.Indexer
	partition event.Partition
	perLoad   int
	queries   sync.Pool

	mu       sync.Mutex
	at       map[event.Source]int // in workers
	workers  []event.Source
	load     []int          // sessions of each worker
	sessions map[uint64]int // worker of each session
	next     int            // where the search for the least load begins
}

func newOverlapPicker(x *indexer.Indexer, p event.Partition, workers []event.Source) *overlapPicker {
	o := &overlapPicker{index: x, partition: p, perLoad: 64, at: map[event.Source]int{}, workers: workers, load: make([]int, len(workers)), sessions: map[uint64]int{}}
	o.queries.New = func() any { return new(indexer.Query) }
	for i, s := range workers {
		o.at[s] = i
	}
	return o
}

// Pick implements picker.
func (o *overlapPicker) Pick(session uint64, locals []uint64) (event.Source, int, error) {
	q := o.queries.Get().(*indexer.Query)
	defer o.queries.Put(q)
	answer, err := o.index.Match(q, o.partition, locals)
	if err != nil {
		return event.Source{}, 0, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	own, had := o.sessions[session]
	if had {
		o.load[own]--
	}
	best, held := o.idlest(), 0
	cost := len(locals) + o.perLoad*o.load[best]
	for i := range answer.Holdings {
		h := &answer.Holdings[i]
		w, ok := o.at[*h.Source]
		if !ok {
			continue
		}
		n := int(h.Longest())
		c := len(locals) - n + o.perLoad*o.load[w]
		if c < cost || c == cost && had && w == own || w == best {
			best, held, cost = w, n, c
		}
	}
	o.load[best]++
	o.sessions[session] = best
	return o.workers[best], held, nil
}

// idlest returns a worker with the least sessions, another one each time. o.mu is
// held.
func (o *overlapPicker) idlest() int {
	best := o.next
	for i := range o.load {
		if w := (o.next + i) % len(o.load); o.load[w] < o.load[best] {
			best = w
		}
	}
	o.next = (best + 1) % len(o.load)
	return best
}

// Done implements picker.
func (o *overlapPicker) Done(session uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.sessions[session]; ok {
		o.load[w]--
		delete(o.sessions, session)
	}
}

// source returns turns until there are no more.
type turnSource interface {
	// next returns a turn, and a function to be called when it has been answered;
	// false if there are no more turns.
	next() (turn workload.Turn, done func(), ok bool)
}

// openSessions is a number of sessions that are open at a time, each of which
// makes a request in its turn. A session that ends makes room for a new one.
type openSessions struct {
	g     *workload.Generator
	queue chan *workload.Session
	count atomic.Uint64
	ended func(session uint64)
}

func newOpenSessions(g *workload.Generator, n int, ended func(uint64)) *openSessions {
	o := &openSessions{g: g, queue: make(chan *workload.Session, n), ended: ended}
	for range n {
		o.queue <- g.Session(o.count.Add(1))
	}
	return o
}

func (o *openSessions) next() (workload.Turn, func(), bool) {
	s := <-o.queue
	turn, ok := s.Next()
	for !ok {
		o.ended(s.Number())
		s = o.g.Session(o.count.Add(1))
		turn, ok = s.Next()
	}
	return turn, func() { o.queue <- s }, true
}

// tracedRequests is the requests of a trace, each a session of its own.
type tracedRequests struct {
	requests []trace.Request
	at       atomic.Int64
	ended    func(session uint64)
}

func (t *tracedRequests) next() (workload.Turn, func(), bool) {
	i := int(t.at.Add(1) - 1)
	if i >= len(t.requests) {
		return workload.Turn{}, nil, false
	}
	turn := workload.FromTrace(&t.requests[i], uint64(i))
	return turn, func() { t.ended(uint64(i)) }, true
}

// driver sends requests to mock engines and notes what becomes of them.
type driver struct {
	client    *http.Client
	mock      string // URL of the engines
	turns     turnSource
	pick      picker
	model     event.Partition
	blockSize int
	seen      *seen

	mu   sync.Mutex
	sums requestSums
}

// requestSums are over requests that were answered.
type requestSums struct {
	requests, failed          int
	prompt, predicted, cached int64 // tokens
	lastErr                   error
}

// run sends so many requests, some of them at a time and, if rate is not 0, no
// more than so many a second, and returns what became of them when all have been
// answered.
func (d *driver) run(ctx context.Context, requests, atOnce int, rate float64) requestSums {
	d.mu.Lock()
	d.sums = requestSums{}
	d.mu.Unlock()
	var begun atomic.Int64
	var tasks sync.WaitGroup
	began := time.Now()
	for range atOnce {
		tasks.Go(func() {
			for n := begun.Add(1); n <= int64(requests) && ctx.Err() == nil; n = begun.Add(1) {
				if rate > 0 {
					time.Sleep(time.Until(began.Add(time.Duration(float64(n) / rate * float64(time.Second)))))
				}
				turn, done, ok := d.turns.next()
				if !ok {
					return
				}
				err := d.request(ctx, turn)
				done()
				if err != nil {
					d.mu.Lock()
					d.sums.failed++
					d.sums.lastErr = err
					d.mu.Unlock()
				}
			}
		})
	}
	tasks.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.sums
}

func (d *driver) request(ctx context.Context, turn workload.Turn) error {
	tokens := workload.Tokens(turn.Prompt)
	locals := hash.AppendLocals(nil, tokens, d.blockSize, 0, hash.SeedOf("", ""))
	source, held, err := d.pick.Pick(turn.Session, locals)
	if err != nil {
		return err
	}
	in := engines.Generate{MaxTokens: turn.Output.Tokens, Seed: turn.Output.Seed, Segments: make([][2]uint64, 0, len(turn.Prompt))}
	for _, s := range turn.Prompt {
		in.Segments = append(in.Segments, [2]uint64{s.Seed, uint64(s.Tokens)})
	}
	var out engines.Generated
	path := fmt.Sprintf("%s/workers/%s/%d/generate", d.mock, source.Instance, source.Rank)
	if err := postJSON(ctx, d.client, path, in, &out); err != nil {
		return err
	}
	d.seen.published(source, out.Next, out.Published)
	// An engine computes at least the last token.
	most := max(0, len(tokens)-1) / d.blockSize
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sums.requests++
	d.sums.prompt += int64(len(tokens))
	d.sums.predicted += int64(min(held, most) * d.blockSize)
	d.sums.cached += int64(out.Cached)
	return nil
}

func postJSON(ctx context.Context, c *http.Client, url string, in, out any) error {
	data, err := json.Marshal(in)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(data))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1024))
		return fmt.Errorf("%s: %s: %s", url, resp.Status, bytes.TrimSpace(text))
	}
	return json.NewDecoder(resp.Body).Decode(out)
}

// seen measures how long it takes from the publishing of a batch until queries
// see it: of the last batch of each request.
type seen struct {
	mu      sync.Mutex
	sources map[event.Source]*seenSource
	lags    []int64 // ns
}

type seenSource struct {
	applied []stamp // when batches up to a number were seen; the last few
	waiting []stamp // batches that were published and not seen yet
}

type stamp struct {
	batch uint64
	at    int64 // ns since 1970
}

func newSeen() *seen { return &seen{sources: map[event.Source]*seenSource{}} }

func (s *seen) source(name event.Source) *seenSource {
	at := s.sources[name]
	if at == nil {
		at = &seenSource{}
		s.sources[name] = at
	}
	return at
}

// applied is called when queries see what a record says.
func (s *seen) applied(name event.Source, h event.Header, _ uint64) {
	if !h.Batches {
		return
	}
	now := time.Now().UnixNano()
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.source(name)
	const keep = 256
	if at.applied = append(at.applied, stamp{h.Last, now}); len(at.applied) > keep {
		at.applied = append(at.applied[:0], at.applied[keep/2:]...)
	}
	rest := at.waiting[:0]
	for _, w := range at.waiting {
		if w.batch <= h.Last {
			s.lags = append(s.lags, now-w.at)
		} else {
			rest = append(rest, w)
		}
	}
	at.waiting = rest
}

// published says when the batch before next was published.
func (s *seen) published(name event.Source, next uint64, at int64) {
	if next == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.source(name)
	for _, a := range src.applied {
		if a.batch >= next-1 {
			s.lags = append(s.lags, max(0, a.at-at))
			return
		}
	}
	src.waiting = append(src.waiting, stamp{next - 1, at})
}

// take returns the lags so far, in ns, and how many batches have not been seen.
func (s *seen) take() (lags []int64, missing int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, src := range s.sources {
		missing += len(src.waiting)
	}
	lags, s.lags = s.lags, nil
	return lags, missing
}
