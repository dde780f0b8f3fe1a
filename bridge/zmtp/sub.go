package zmtp

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"
)

// Handler is told what happens to a subscription. All calls come from the
// goroutine of Run, one at a time.
type Handler interface {
	// Connected: the handshake with peer is done and the subscription is sent.
	Connected(peer string)
	// Message: one message. The frames are valid until it returns. It may
	// block: nothing is read meanwhile, and no PING of the peer is answered.
	Message(frames [][]byte)
	// Disconnected: the connection ended, once for each Connected; or, while
	// there is none, an attempt to connect, to listen or to shake hands failed.
	Disconnected(err error)
	// Refused: while one publisher is connected, another one connected to our
	// bound address and was turned away. It may be the same one, restarted,
	// before the end of its old connection has been read.
	Refused(peer string)
}

// Sub is one SUB socket with one endpoint, which it keeps connected.
type Sub struct {
	network, address string
	bind             bool
	topic            []byte
	opts             Options
	h                Handler
	log              *slog.Logger

	msg Message
}

// NewSub returns a subscription to everything under topic. It dials address,
// network being "tcp" or "unix", or listens there if bind is set, for a
// publisher that connects to us. Nothing happens before Run.
func NewSub(network, address string, bind bool, topic []byte, opts Options, h Handler) (*Sub, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if err := checkNetwork(network); err != nil {
		return nil, err
	}
	if h == nil {
		return nil, errors.New("zmtp: no Handler")
	}
	log := opts.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Sub{
		network: network, address: address, bind: bind, topic: bytes.Clone(topic),
		opts: opts, h: h, log: log,
	}, nil
}

// Run keeps the subscription up until ctx ends, and returns the error of ctx
// when the handler has returned and no goroutine, connection or listener is
// left. A connection that ends, and an endpoint that isn't there, are tried
// again with growing waits. Call it once.
func (s *Sub) Run(ctx context.Context) error {
	attempt := s.dialOnce
	if s.bind {
		attempt = s.listenOnce
	}
	wait := backoff{min: s.opts.BackoffMin, max: s.opts.BackoffMax}
	for ctx.Err() == nil {
		lived := attempt(ctx)
		pause(ctx, wait.step(lived))
	}
	return ctx.Err()
}

// dialOnce dials, and reads until the connection ends. It returns how long the
// connection lived.
func (s *Sub) dialOnce(ctx context.Context) time.Duration {
	c, err := dial(ctx, s.network, s.address, SUB, &s.opts)
	if err != nil {
		if ctx.Err() == nil {
			s.h.Disconnected(err)
		}
		return 0
	}
	start := time.Now()
	s.serve(ctx, c, func() {})
	return time.Since(start)
}

// serve subscribes and reads until the connection ends. others is called in
// between, at the start and whenever the connection was interrupted.
func (s *Sub) serve(ctx context.Context, c *Conn, others func()) {
	stop := onDone(ctx, func() { c.Close() })
	defer stop()
	defer c.Close()
	if err := c.Subscribe(s.topic); err != nil {
		if ctx.Err() == nil {
			s.h.Disconnected(err)
		}
		return
	}
	s.h.Connected(c.Peer())
	others()
	for {
		err := c.Recv(&s.msg)
		switch {
		case err == nil:
			s.h.Message(s.msg.Frames)
		case err == errInterrupted:
			others()
		case ctx.Err() != nil:
			s.h.Disconnected(ctx.Err())
			return
		default:
			s.h.Disconnected(err)
			return
		}
	}
}

// backoff is the wait between two attempts.
type backoff struct {
	min, max, next time.Duration
}

// step returns the wait after an attempt that came to a connection which lived
// so long, 0 if it came to none.
func (b *backoff) step(lived time.Duration) time.Duration {
	d := b.next
	if d == 0 || lived > b.max {
		d = b.min
	}
	b.next = min(2*d, b.max)
	return d/2 + rand.N(d/2+1)
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
