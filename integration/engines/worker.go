// Package engines is a fleet of fake inference engines that serve requests: each
// rank has a block cache with all that belongs to one (package cache), publishes
// what happens in it on real sockets (package mock), answers as fast as a simple
// model of latency says, and fails on command.
//
// What a prompt finds in the cache is what an engine would report as cached
// tokens, so whoever routes requests can compare it with what was predicted.
package engines

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Errors of workers.
var (
	// ErrRestarted: the engine's process ended while the request ran.
	ErrRestarted = errors.New("engines: the engine restarted")
	// ErrUnknownWorker: the fleet has no such worker.
	ErrUnknownWorker = errors.New("engines: no such worker")
)

// Latency is how long requests take. The zero value takes no time.
type Latency struct {
	Base     time.Duration // of every request
	PerToken time.Duration // that is computed: the prompt without what is cached
	PerStep  time.Duration // of an answer's token
}

// Job is a request to an engine.
type Job struct {
	Prompt cache.Prompt
	Output []uint32 // what the engine answers
}

// Result is what became of a request. Lengths are tokens.
type Result struct {
	Prompt       int
	CachedDevice int // of the prompt
	CachedHost   int // of the prompt, behind those
	Output       int // may be less than asked for: the device is full
	// Prefill is the time up to the first token, waiting for room and transfers
	// included; Decode that of all others. Both as the model of latency has them.
	Prefill, Decode time.Duration
	// Next is the number of the engine's next batch, and Published when the last
	// one was published.
	Next      uint64
	Published time.Time
}

// Worker is one rank of a fake engine.
type Worker struct {
	Instance string
	Rank     uint32
	Topic    string
	Domain   string // of the transfer island that it is on; empty: none
	Engine   *mock.Engine

	latency Latency
	step    int // tokens of an answer in a batch of events
	options cache.Options

	mu      sync.Mutex // guards all below
	cache   *cache.Cache
	life    chan struct{} // closed when the process ends
	freed   chan struct{} // closed, and renewed, when a request ends
	alarm   *time.Timer   // at the end of the next transfer
	stopped bool
	faults  faultState
	done    Totals
	last    time.Time // when a batch was published last
	err     error     // the first one of publishing
}

// Totals count what workers did.
type Totals struct {
	Requests     uint64 `json:"requests"`
	Prompt       uint64 `json:"prompt_tokens"`
	CachedDevice uint64 `json:"cached_device_tokens"`
	CachedHost   uint64 `json:"cached_host_tokens"`
	Output       uint64 `json:"output_tokens"`
	Batches      uint64 `json:"batches"`
	Events       uint64 `json:"events"`
	Restarts     uint64 `json:"restarts"`
	Dropped      uint64 `json:"dropped"` // messages that found a full queue
}

func newWorker(instance string, engine mock.Options, o Options) (*Worker, error) {
	w := &Worker{
		Instance: instance, Rank: engine.Rank, Topic: engine.Topic, latency: o.Latency, step: o.Step, options: o.Cache,
		life: make(chan struct{}), freed: make(chan struct{}), stopped: true,
	}
	var err error
	if w.Engine, err = mock.NewEngine(engine); err != nil {
		return nil, err
	}
	w.cache, err = cache.New(w.options)
	return w, err
}

// Owned tells whether the host tier is that of a cache owner.
func (w *Worker) Owned() bool { return w.options.Owner != "" }

// SetTopic gives the worker a topic of its own. It is called before it publishes.
func (w *Worker) SetTopic(topic string) {
	w.Topic = topic
	w.Engine.SetTopic(topic)
}

func (w *Worker) start() error {
	if err := w.Engine.Start(); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = false
	return nil
}

func (w *Worker) stop() {
	w.mu.Lock()
	if !w.stopped {
		w.stopped = true
		close(w.life)
		w.life = make(chan struct{})
	}
	if w.alarm != nil {
		w.alarm.Stop()
	}
	w.faults.end()
	w.mu.Unlock()
	w.Engine.Stop()
}

// Generate runs a request. It fails when ctx ends, when the engine restarts, and
// with errors that wrap cache.ErrTooLong.
func (w *Worker) Generate(ctx context.Context, job Job) (Result, error) {
	began := time.Now()
	r, life, err := w.begin(ctx, job.Prompt)
	if err != nil {
		return Result{}, err
	}
	res := Result{Prompt: len(job.Prompt.Tokens), CachedDevice: r.HitDevice, CachedHost: r.HitHost}
	compute := w.latency.Base + time.Duration(res.Prompt-r.Hit())*w.latency.PerToken
	err = wait(ctx, life, r.Ready.Add(compute))
	if queued := r.Ready.Sub(began); queued > 0 {
		compute += queued
	}
	res.Prefill = compute
	for at := 0; err == nil && at < len(job.Output); at += w.step {
		next := job.Output[at:min(at+w.step, len(job.Output))]
		if w.latency.PerStep > 0 {
			err = wait(ctx, life, time.Now().Add(time.Duration(len(next))*w.latency.PerStep))
		}
		if err == nil && !w.advance(life, r, next) {
			break // no room: the answer ends here
		}
		res.Output += len(next)
		res.Decode += time.Duration(len(next)) * w.latency.PerStep
	}
	w.end(life, r, &res, err)
	return res, err
}

// begin gives a prompt its blocks, when there is room.
func (w *Worker) begin(ctx context.Context, p cache.Prompt) (*cache.Request, chan struct{}, error) {
	for {
		w.mu.Lock()
		if w.stopped {
			w.mu.Unlock()
			return nil, nil, ErrRestarted
		}
		r, err := w.cache.Start(time.Now(), p)
		w.flush()
		life, freed := w.life, w.freed
		w.mu.Unlock()
		if !errors.Is(err, cache.ErrFull) {
			return r, life, err
		}
		select {
		case <-freed:
		case <-life:
			return nil, nil, ErrRestarted
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("waiting for room: %w", ctx.Err())
		}
	}
}

// advance adds tokens to a request; false if there is no room, or the engine is
// another one.
func (w *Worker) advance(life chan struct{}, r *cache.Request, tokens []uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.life != life {
		return false
	}
	err := w.cache.Append(time.Now(), r, tokens)
	w.flush()
	return err == nil
}

func (w *Worker) end(life chan struct{}, r *cache.Request, res *Result, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.life != life {
		return
	}
	w.cache.Finish(time.Now(), r)
	w.flush()
	close(w.freed)
	w.freed = make(chan struct{})
	res.Next, res.Published = w.Engine.Next(), w.last
	if err == nil {
		d := &w.done
		d.Requests++
		d.Prompt += uint64(res.Prompt)
		d.CachedDevice += uint64(res.CachedDevice)
		d.CachedHost += uint64(res.CachedHost)
		d.Output += uint64(res.Output)
	}
}

// wait waits until a time, unless the engine or ctx ends first.
func wait(ctx context.Context, life chan struct{}, until time.Time) error {
	d := time.Until(until)
	if d <= 0 {
		select {
		case <-life:
			return ErrRestarted
		default:
			return ctx.Err()
		}
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-life:
		return ErrRestarted
	case <-ctx.Done():
		return ctx.Err()
	}
}

// flush publishes what has happened in the cache, and sees to what will. w.mu is
// held.
func (w *Worker) flush() {
	if events := w.cache.Events(); len(events) > 0 {
		w.publish(events)
	}
	next, ok := w.cache.Next()
	if !ok {
		return
	}
	d := max(0, time.Until(next))
	if w.alarm == nil {
		w.alarm = time.AfterFunc(d, w.ring)
	} else {
		w.alarm.Reset(d)
	}
}

// ring ends transfers.
func (w *Worker) ring() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.stopped {
		w.cache.Tick(time.Now())
		w.flush()
	}
}

// publish publishes a batch, as the faults that are due let it. w.mu is held.
func (w *Worker) publish(events []model.Event) {
	if w.faults.stalled {
		w.faults.held = append(w.faults.held, events)
		return
	}
	w.done.Batches++
	w.done.Events += uint64(len(events))
	w.last = time.Now()
	if _, err := w.Engine.PublishAs(w.faults.delivery(), events...); err != nil && w.err == nil {
		w.err = err
	}
}

// Clear empties the cache of a worker that runs nothing. The error is
// cache.ErrBusy.
func (w *Worker) Clear() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.cache.Clear(time.Now())
	w.flush()
	return err
}

// Totals returns what the worker did over all its lives.
func (w *Worker) Totals() Totals {
	w.mu.Lock()
	defer w.mu.Unlock()
	t := w.done
	t.Dropped = w.Engine.Dropped()
	return t
}

// Err returns why a batch could not be published, nil if all were.
func (w *Worker) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Settled tells whether all that has happened has been published: no block is
// on its way, and no fault holds a batch back.
func (w *Worker) Settled() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, moving := w.cache.Next()
	return !moving && !w.faults.stalled
}

// Digests returns the sums over the blocks that the cache holds, as indexers and
// bridges should have them.
func (w *Worker) Digests() event.Digests {
	w.mu.Lock()
	defer w.mu.Unlock()
	var d event.Digests
	device, host := w.cache.Resident()
	for _, seq := range device {
		d[event.Device].Add(1, event.Mix(seq, event.Salt(event.Device)))
	}
	salt := event.Salt(event.Host)
	for _, seq := range host {
		d[event.Host].Add(1, event.Mix(seq, salt))
	}
	return d
}
