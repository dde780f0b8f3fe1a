package zmtp

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"
)

// Recv waits for the next message and fills m with views of its frames, valid
// until the next Recv. Commands of the peer are answered on the way. After
// os.ErrDeadlineExceeded (see SetDeadline) it may be called again and nothing
// is lost; after any other error the connection is closed and every later call
// returns the same error. io.EOF is the end of the connection between two
// messages, io.ErrUnexpectedEOF inside one.
func (c *Conn) Recv(m *Message) error {
	clear(m.Frames) // or they would pin a buffer that was replaced
	m.Frames = m.Frames[:0]
	if c.in.err != nil {
		return c.in.err
	}
	if err := c.message(); err != nil {
		if err != os.ErrDeadlineExceeded && err != errInterrupted {
			c.in.err = err
			c.Close()
		}
		return err
	}
	for _, at := range c.in.parts {
		m.Frames = append(m.Frames, c.in.view(at))
	}
	return nil
}

// SetDeadline bounds every following Recv: past t it returns
// os.ErrDeadlineExceeded instead of waiting, also when the peer keeps sending
// commands. The zero time removes the bound. Call it from the goroutine of
// Recv.
func (c *Conn) SetDeadline(t time.Time) {
	c.in.deadline = t
	c.in.armed = time.Time{}
}

// interrupt makes Recv, now or next, return errInterrupted. It may be called
// from any goroutine.
func (c *Conn) interrupt() {
	c.in.wake.Store(true)
	c.nc.SetReadDeadline(longAgo)
}

// longAgo as a deadline ends a read at once.
var longAgo = time.Unix(1, 0)

// message reads frames until a message is complete.
func (c *Conn) message() error {
	in := &c.in
	if c.closed.Load() {
		return fmt.Errorf("zmtp: read: %w", net.ErrClosed)
	}
	if in.whole {
		in.whole, in.parts, in.size = false, in.parts[:0], 0
	}
	for {
		flags, at, err := c.frame()
		if err != nil {
			return err
		}
		if flags&flagCommand != 0 {
			// libzmq sends them between the frames of a message, too.
			name, content, err := splitCommand(in.view(at))
			if err != nil {
				return err
			}
			if err := c.command(string(name), content); err != nil {
				return err
			}
			continue
		}
		in.parts = append(in.parts, at)
		in.size += at.len
		if flags&flagMore == 0 {
			in.whole = true
			return nil
		}
	}
}

// frame waits until a whole frame is in the buffer, moves behind it, and
// returns where its body is.
func (c *Conn) frame() (flags byte, at span, err error) {
	in := &c.in
	for {
		b := in.buffered()
		h, ok, err := parseHeader(b)
		if err != nil {
			return 0, span{}, err
		}
		missing := 1
		if ok {
			if err := c.admit(h); err != nil {
				return 0, span{}, err
			}
			whole := h.len + int(h.size)
			if whole <= len(b) {
				at := span{in.r + h.len, int(h.size)}
				in.r += whole
				return h.flags, at, nil
			}
			missing = whole - len(b)
		}
		if err := c.fill(missing); err != nil {
			return 0, span{}, err
		}
	}
}

// admit checks what a header announces against the limits.
func (c *Conn) admit(h header) error {
	switch {
	case h.flags&flagCommand != 0:
		if h.size > maxCommand {
			return fmt.Errorf("%w: %d bytes, limit %d", ErrCommand, h.size, maxCommand)
		}
	case h.size > uint64(c.opts.MaxFrame):
		return fmt.Errorf("%w: %d bytes, limit %d", ErrFrameSize, h.size, c.opts.MaxFrame)
	case int(h.size) > c.opts.MaxMessage-c.in.size:
		return fmt.Errorf("%w: %d bytes and more, limit %d", ErrMessageSize, h.size+uint64(c.in.size), c.opts.MaxMessage)
	case len(c.in.parts) == c.opts.MaxFrames:
		return fmt.Errorf("%w: limit %d", ErrFrameCount, c.opts.MaxFrames)
	}
	return nil
}

// command handles one command behind the handshake. Unknown ones are ignored,
// as the protocol asks for.
func (c *Conn) command(name string, content []byte) error {
	switch name {
	case "PING":
		// Two bytes say how long the peer keeps a silent connection; it will
		// ask again before that.
		if len(content) < 2 {
			return fmt.Errorf("%w: PING of %d bytes", ErrCommand, len(content))
		}
		back := content[2:]
		return c.sendCommand("PONG", back[:min(len(back), maxPing)])
	case "ERROR":
		reason, err := errorReason(content)
		if err != nil {
			return err
		}
		return &PeerError{Reason: reason}
	}
	return nil
}

// fill reads from the peer once, at best the missing bytes and more. It returns
// with an error when the deadline passes, when a PING stays without answer,
// when interrupt was called, or when the connection breaks.
func (c *Conn) fill(missing int) error {
	in := &c.in
	for {
		now := time.Now()
		if !in.deadline.IsZero() && !now.Before(in.deadline) {
			return os.ErrDeadlineExceeded
		}
		// The deadline of the socket stays as it is until it passes, because
		// setting it costs more than reading a small message.
		if !now.Before(in.armed) {
			if err := c.arm(now); err != nil {
				return fmt.Errorf("zmtp: %w", err)
			}
		}
		if in.wake.Swap(false) { // after arm, which may have undone interrupt
			return errInterrupted
		}

		n, err := c.read(missing)
		switch {
		case n > 0:
			in.arrived(n)
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			in.armed = time.Time{}
			if err := c.idle(); err != nil {
				return err
			}
		case err == io.EOF:
			if len(in.buffered()) > 0 || len(in.parts) > 0 {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("zmtp: read: %w", err)
		case err != nil:
			return fmt.Errorf("zmtp: %w", err)
		}
	}
}

// read reads from the peer once.
func (c *Conn) read(missing int) (int, error) {
	if c.socket != nil {
		return c.socket.fill(missing)
	}
	return c.nc.Read(c.in.room(missing))
}

// arm sets the deadline of the socket to the next moment at which there is
// something to do.
func (c *Conn) arm(now time.Time) error {
	in := &c.in
	t := c.idleAt()
	if !t.IsZero() && !t.After(now) {
		t = now.Add(time.Millisecond) // a look at what has come is still due
	}
	if t.IsZero() || (!in.deadline.IsZero() && in.deadline.Before(t)) {
		t = in.deadline
	}
	in.armed = t
	if t.IsZero() {
		in.armed = now.Add(1000 * time.Hour)
	}
	return c.nc.SetReadDeadline(t)
}

// idleAt returns when the silence of the peer has lasted too long: for a PING,
// or for the answer to it. Zero: never.
func (c *Conn) idleAt() time.Time {
	in := &c.in
	switch {
	case c.opts.HeartbeatInterval == 0 || in.heard.IsZero():
		return time.Time{}
	case in.pinged.IsZero():
		return in.heard.Add(c.opts.HeartbeatInterval)
	case c.minor >= 1:
		return in.pinged.Add(c.opts.HeartbeatTimeout)
	}
	return time.Time{} // a 3.0 peer need not answer, so it wasn't asked
}

// idle acts on the silence of the peer, if it is time.
func (c *Conn) idle() error {
	in := &c.in
	now, at := time.Now(), c.idleAt()
	if at.IsZero() || now.Before(at) {
		return nil
	}
	if !in.pinged.IsZero() {
		return ErrHeartbeat
	}
	in.pinged = now
	in.rest()
	if c.minor == 0 {
		return nil
	}
	return c.sendCommand("PING", []byte{0, 0}) // 0: no promise to ask again
}
