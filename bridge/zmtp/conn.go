package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// Conn is one connection behind its handshake. Recv and SetDeadline belong to
// one goroutine; Subscribe, Send and Close may be called from any.
type Conn struct {
	nc     net.Conn
	typ    SocketType
	opts   *Options
	peer   string
	minor  byte // of the version both sides speak
	closed atomic.Bool

	in     input // only for the goroutine of Recv
	socket *socket

	wmu sync.Mutex // one write at a time
	out []byte     // what is written; reused, guarded by wmu
}

// keepAlive notices within half a minute that the peer's host is gone, also
// where the peer answers no PING.
var keepAlive = net.KeepAliveConfig{
	Enable:   true,
	Idle:     15 * time.Second,
	Interval: 5 * time.Second,
	Count:    3,
}

// Dial connects to a peer, network being "tcp" or "unix", and shakes hands with
// it as a socket of type t. It returns as soon as ctx ends, whatever the peer
// does, with an error that wraps that of ctx; later ctx has no effect on the
// connection.
func Dial(ctx context.Context, network, address string, t SocketType, opts Options) (*Conn, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if err := checkNetwork(network); err != nil {
		return nil, err
	}
	if t != SUB && t != DEALER {
		return nil, fmt.Errorf("zmtp: unknown socket type %q", t)
	}
	return dial(ctx, network, address, t, &opts)
}

// dial is Dial with arguments that have been checked.
func dial(ctx context.Context, network, address string, t SocketType, opts *Options) (*Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, opts.HandshakeTimeout, ErrHandshakeTimeout)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive}
	nc, err := d.DialContext(ctx, network, address)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("dial %s: %w", address, ended(ctx))
		}
		return nil, fmt.Errorf("zmtp: %w", err)
	}
	return open(ctx, nc, address, t, opts)
}

func checkNetwork(network string) error {
	switch network {
	case "tcp", "unix":
		return nil
	}
	return fmt.Errorf("zmtp: network %q is neither tcp nor unix", network)
}

// open shakes hands over nc, and closes it if that fails or ctx ends. peer
// names the other side where its address doesn't.
func open(ctx context.Context, nc net.Conn, peer string, t SocketType, opts *Options) (*Conn, error) {
	if nc.RemoteAddr().Network() != "unix" {
		peer = nc.RemoteAddr().String()
	}
	c := &Conn{nc: nc, typ: t, opts: opts, peer: peer}
	c.in.buffers = opts.Buffers
	if c.in.buffers == nil {
		c.in.buffers = NewBuffers()
	}
	c.socket = newSocket(nc, &c.in)
	stop := onDone(ctx, func() { nc.Close() })
	err := c.handshake()
	stop()
	if ctx.Err() != nil {
		err = ended(ctx)
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("zmtp: handshake with %s: %w", peer, err)
	}
	return c, nil
}

// ended returns why ctx has ended: the caller's reason, or the timeout of the
// handshake.
func ended(ctx context.Context) error {
	if err := context.Cause(ctx); err == ErrHandshakeTimeout {
		return err
	}
	return ctx.Err()
}

// onDone runs f when ctx ends before stop is called. stop waits for a running
// f, so that no goroutine outlives its caller. It may be called once.
func onDone(ctx context.Context, f func()) (stop func()) {
	done := make(chan struct{})
	cancel := context.AfterFunc(ctx, func() {
		defer close(done)
		f()
	})
	return func() {
		if !cancel() {
			<-done
		}
	}
}

// handshake exchanges greetings and READY commands. Both sides do the same, so
// it doesn't matter who connected.
func (c *Conn) handshake() error {
	if err := c.write(appendGreeting(nil)); err != nil {
		return err
	}
	for len(c.in.buffered()) < greetingLen {
		if err := c.fill(greetingLen - len(c.in.buffered())); err != nil {
			return err
		}
		peerMinor, err := checkGreeting(c.in.buffered())
		if err != nil {
			return err
		}
		c.minor = min(minor, peerMinor)
	}
	c.in.r += greetingLen

	if err := c.write(appendReady(nil, c.typ)); err != nil {
		return err
	}
	flags, at, err := c.frame()
	if err != nil {
		return err
	}
	if flags&flagCommand == 0 {
		return fmt.Errorf("%w: a message instead", ErrReady)
	}
	name, content, err := splitCommand(c.in.view(at))
	if err != nil {
		return err
	}
	switch string(name) {
	case "READY":
	case "ERROR":
		return c.command("ERROR", content)
	default:
		return fmt.Errorf("%w: command %q instead", ErrReady, name)
	}
	peerType, err := readySocketType(content)
	if err != nil {
		return err
	}
	if !c.typ.accepts(peerType) {
		return fmt.Errorf("%w: %q", ErrSocketType, peerType)
	}
	c.in.heard, c.in.armed = time.Now(), time.Time{} // heartbeats begin
	return nil
}

// Peer returns the address of the other side.
func (c *Conn) Peer() string { return c.peer }

// Subscribe asks the publisher for all messages whose first frame starts with
// topic. It returns ErrOperation on a DEALER; any other error has closed the
// connection.
func (c *Conn) Subscribe(topic []byte) error {
	if c.typ != SUB {
		return ErrOperation
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	if c.minor >= 1 {
		return c.write(appendCommand(c.out[:0], "SUBSCRIBE", topic))
	}
	// In ZMTP 3.0 it is a message. libzmq 4.3.4 takes both forms from
	// everyone, older publishers only this one.
	b := appendHeader(c.out[:0], 0, 1+len(topic))
	return c.write(append(append(b, 1), topic...))
}

// Send sends one message in one write. It returns ErrOperation on a SUB or
// without frames; any other error has closed the connection.
func (c *Conn) Send(frames ...[]byte) error {
	if c.typ != DEALER || len(frames) == 0 {
		return ErrOperation
	}
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.write(appendMessage(c.out[:0], frames...))
}

// sendCommand sends one command in one write.
func (c *Conn) sendCommand(name string, content ...[]byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return c.write(appendCommand(c.out[:0], name, content...))
}

// write writes b, and keeps it for the next write unless it is large. An error
// closes the connection, because a part of b may be on the wire. Behind the
// handshake the caller holds wmu.
func (c *Conn) write(b []byte) error {
	c.out = nil
	if cap(b) <= bufMin {
		c.out = b[:0]
	}
	if c.closed.Load() {
		return fmt.Errorf("zmtp: write: %w", net.ErrClosed)
	}
	err := c.nc.SetWriteDeadline(time.Now().Add(c.opts.WriteTimeout))
	if err == nil {
		_, err = c.nc.Write(b)
	}
	if err != nil {
		c.Close()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = ErrWriteTimeout // not to be taken for the deadline of a Recv
		}
		return fmt.Errorf("zmtp: %w", err)
	}
	return nil
}

// Close closes the connection. A Recv or Send under way returns with an error
// that wraps net.ErrClosed. It may be called from any goroutine, and again.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	if err := c.nc.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("zmtp: %w", err)
	}
	return nil
}
