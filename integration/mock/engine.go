package mock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/kvmesh/kvmesh/integration/model"
)

// Errors of engines.
var (
	// ErrRunning: the engine has been started already.
	ErrRunning = errors.New("mock: the engine runs")
	// ErrStopped: the engine has no sockets to send on.
	ErrStopped = errors.New("mock: the engine is stopped")
	// ErrNotKept: the batch is not, or no longer, in the ring.
	ErrNotKept = errors.New("mock: the batch is not in the ring")
)

// Implementations of a PUB socket.
const (
	PUBRaw  = "raw"  // of this package: cheap, answers heartbeats
	PUBZMQ4 = "zmq4" // github.com/go-zeromq/zmq4: somebody else's reading of the protocol
)

// Options say what an Engine is. The zero value is a vLLM that writes map events
// and keeps no replay socket.
type Options struct {
	Dialect   Dialect // of Publish; empty: VLLMMap
	Rank      uint32  // data-parallel rank in the batches of Publish
	BlockSize int     // tokens a hash, of stores that do not say; 0: 16
	Topic     string  // first frame of every message

	// Endpoint of the PUB, tcp://host:port or ipc://path. Empty means any port of
	// the loopback, port 0 any free one; the engine keeps it over stops.
	Endpoint string
	Connect  bool   // the PUB dials Endpoint, where a subscriber listens
	PUB      string // PUBRaw or PUBZMQ4; empty: PUBRaw
	HWM      int    // most messages that wait for a subscriber; 0: 100,000

	ReplayEndpoint string // of the replay ROUTER; empty: none
	Ring           int    // batches kept for it; 0: 10,000
	Replay         Replay // how it answers
}

// validate fills in what is empty and fails on what can not be.
func (o *Options) validate() error {
	if o.Dialect == "" {
		o.Dialect = VLLMMap
	}
	if o.BlockSize == 0 {
		o.BlockSize = 16
	}
	if o.Endpoint == "" {
		o.Endpoint = "tcp://127.0.0.1:0"
	}
	if o.PUB == "" {
		o.PUB = PUBRaw
	}
	if o.HWM == 0 {
		o.HWM = 100_000
	}
	if o.Ring == 0 {
		o.Ring = 10_000
	}
	if o.PUB != PUBRaw && o.PUB != PUBZMQ4 {
		return fmt.Errorf("mock: PUB is %q, want %q or %q", o.PUB, PUBRaw, PUBZMQ4)
	}
	if o.BlockSize < 0 || o.HWM < 0 || o.Ring < 0 {
		return fmt.Errorf("mock: negative block size %d, high-water mark %d or ring %d", o.BlockSize, o.HWM, o.Ring)
	}
	_, err := o.Dialect.layout()
	return err
}

// Delivery says what becomes of a batch besides its sequence number.
type Delivery uint8

// Deliveries.
const (
	Sent   Delivery = iota // published and kept in the ring
	Lost                   // in the ring only: the subscriber misses it
	Gone                   // neither: lost for good
	Unkept                 // published, but no replay has it
)

// Engine is a fake engine: a PUB socket, and maybe a replay ROUTER. Its methods
// may be called from any goroutine; batches go out in the order of their numbers.
type Engine struct {
	o     Options
	topic []byte
	pub   *pub

	life sync.Mutex // held by Start and Stop, so that they follow one another

	mu       sync.Mutex // guards all below
	running  bool
	endpoint string
	router   *links // nil without replay socket, or stopped
	replayAt string
	lives    uint64
	next     uint64 // sequence number
	ring     ring
	replay   Replay
	requests []Request
	bad      int
}

// NewEngine returns an Engine that is not started yet.
func NewEngine(o Options) (*Engine, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	open := openRaw
	if o.PUB == PUBZMQ4 {
		open = openZMQ4Pub
	}
	return &Engine{o: o, topic: []byte(o.Topic), pub: newPub(open, o.HWM), endpoint: o.Endpoint, replayAt: o.ReplayEndpoint, lives: 1,
		ring: ring{size: o.Ring}, replay: o.Replay}, nil
}

// Start opens the sockets. It fails with ErrRunning, ErrEndpoint, or what the
// system says.
func (e *Engine) Start() error {
	e.life.Lock()
	defer e.life.Unlock()
	e.mu.Lock()
	running, endpoint, replayAt := e.running, e.endpoint, e.replayAt
	e.mu.Unlock()
	if running {
		return ErrRunning
	}
	if err := e.pub.start(endpoint, e.o.Connect); err != nil {
		return err
	}
	var router *links
	if replayAt != "" {
		var err error
		if router, err = bind(replayAt, e.serveReplay); err != nil {
			e.pub.stop()
			return err
		}
		replayAt = router.endpoint
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running, e.router = true, router
	e.endpoint, e.replayAt = e.pub.links.endpoint, replayAt
	return nil
}

// Stop closes the sockets and waits until nothing of them runs. What was not yet
// written to a subscriber is lost. The ring and the numbers stay.
func (e *Engine) Stop() {
	e.life.Lock()
	defer e.life.Unlock()
	e.mu.Lock()
	running, router := e.running, e.router
	e.running, e.router = false, nil
	e.mu.Unlock()
	if !running {
		return
	}
	e.pub.stop()
	if router != nil {
		router.close()
	}
}

// Restart is Stop, NewLife and Start.
func (e *Engine) Restart() error {
	e.Stop()
	e.NewLife()
	return e.Start()
}

// NewLife makes the engine a new process: the ring is empty and numbers begin at
// 0. Timestamps differ between lives, so that no two lives publish the same bytes.
func (e *Engine) NewLife() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lives++
	e.next = 0
	e.ring.clear()
}

// Addr returns the endpoint of the PUB, with the port it got when the engine
// first started.
func (e *Engine) Addr() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.endpoint
}

// ReplayAddr returns the endpoint of the replay socket, empty if there is none.
func (e *Engine) ReplayAddr() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.replayAt
}

// Next returns the sequence number that the next batch will have.
func (e *Engine) Next() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.next
}

// encode returns the payload of the batch with the number seq. A quarter of a
// second passes with each batch, and the bits below tell lives apart. e.mu is held.
func (e *Engine) encode(seq uint64, events []model.Event) ([]byte, error) {
	const start = 1_700_000_000
	ts := start + 0.25*float64(seq) + float64(e.lives%(1<<18))/(1<<20)
	return e.o.Dialect.Encode(Batch{TS: ts, Events: events, Rank: &e.o.Rank, BlockSize: e.o.BlockSize})
}

// Publish publishes a batch of events and returns its number. It fails if the
// dialect cannot say them; no number is used up then.
func (e *Engine) Publish(events ...model.Event) (uint64, error) {
	return e.PublishAs(Sent, events...)
}

// PublishAs is Publish with a delivery.
func (e *Engine) PublishAs(d Delivery, events ...model.Event) (uint64, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	payload, err := e.encode(e.next, events)
	if err != nil {
		return 0, err
	}
	return e.send(payload, d), nil
}

// PublishRaw publishes a payload, which nobody may change afterwards, and
// returns its number.
func (e *Engine) PublishRaw(payload []byte, d Delivery) uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.send(payload, d)
}

// send gives a payload the next number. e.mu is held.
func (e *Engine) send(payload []byte, d Delivery) uint64 {
	seq := e.next
	e.next++
	if d != Gone {
		e.ring.add(kept{seq: seq, payload: payload, hidden: d == Unkept})
	}
	if e.running && (d == Sent || d == Unkept) {
		e.pub.publish(e.message(seq, payload))
	}
	return seq
}

func (e *Engine) message(seq uint64, payload []byte) message {
	return message{e.topic, binary.BigEndian.AppendUint64(nil, seq), payload}
}

// PublishFrames sends frames as they are, at least one, under no number. It
// fails with ErrStopped.
func (e *Engine) PublishFrames(frames ...[]byte) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.running {
		return ErrStopped
	}
	if len(frames) > 0 {
		e.pub.publish(frames)
	}
	return nil
}

// Skip uses up n numbers.
func (e *Engine) Skip(n uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next += n
}

// Seek gives the next batch this number.
func (e *Engine) Seek(seq uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.next = seq
}

// ForgetRing empties the ring, as if more batches than it keeps had been published.
func (e *Engine) ForgetRing() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ring.clear()
}

// Resend publishes a batch of the ring once more under its number. It fails with
// ErrNotKept and ErrStopped.
func (e *Engine) Resend(seq uint64) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.running {
		return ErrStopped
	}
	for b := range e.ring.all {
		if b.seq == seq {
			e.pub.publish(e.message(seq, b.payload))
			return nil
		}
	}
	return fmt.Errorf("%w: %d", ErrNotKept, seq)
}

// SetTopic changes the topic of what is published from now on, and of what is replayed.
func (e *Engine) SetTopic(topic string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.topic = []byte(topic)
}

// SetReplay changes how the engine answers replay requests from now on.
func (e *Engine) SetReplay(change func(*Replay)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(&e.replay)
}

// Requests returns the replay requests so far, of which it remembers the last
// 10,000, and how many were malformed: those get no answer.
func (e *Engine) Requests() (good []Request, bad int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.requests), e.bad
}

func (e *Engine) badRequest() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bad++
}

// Subscribers returns how many peers have subscribed to anything.
func (e *Engine) Subscribers() int {
	n, _ := e.pub.subscribers()
	return n
}

// WaitSubscribers waits until at least n peers have subscribed, so that what is
// published from then on reaches them. It fails when ctx ends.
func (e *Engine) WaitSubscribers(ctx context.Context, n int) error {
	for {
		have, changed := e.pub.subscribers()
		if have >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d of %d subscribers: %w", have, n, ctx.Err())
		}
	}
}

// Backlog returns how many messages wait for the subscriber that is furthest
// behind.
func (e *Engine) Backlog() int { return e.pub.backlog() }

// Dropped returns how many messages were dropped because a subscriber's queue
// was full.
func (e *Engine) Dropped() uint64 { return e.pub.drops() }
