package bridge_test

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// router is a replay socket that does what a test says.
type router struct {
	ln     net.Listener
	script func(*routerConn)
	work   sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]bool
	count int
}

// routerConn is one connection to a router.
type routerConn struct {
	net.Conn
	n int // it is the n-th, from 0 on
}

// newRouter listens, and has script serve each connection from its first byte on.
func newRouter(t testing.TB, script func(*routerConn)) *router {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &router{ln: ln, script: script, conns: map[net.Conn]bool{}}
	r.work.Go(r.accept)
	t.Cleanup(r.close)
	return r
}

func (r *router) endpoint() string { return "tcp://" + r.ln.Addr().String() }

func (r *router) accept() {
	for {
		c, err := r.ln.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		n := r.count
		r.count++
		r.conns[c] = true
		r.mu.Unlock()
		r.work.Go(func() {
			defer c.Close()
			r.script(&routerConn{c, n})
		})
	}
}

// connections returns how many there have been.
func (r *router) connections() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.count
}

func (r *router) close() {
	r.ln.Close()
	r.mu.Lock()
	for c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.work.Wait()
}

// greet shakes hands as a socket of the given type.
func (c *routerConn) greet(socket string) error {
	c.SetDeadline(time.Now().Add(patience))
	hello := make([]byte, 64)
	hello[0], hello[9], hello[10], hello[11] = 0xff, 0x7f, 3, 1
	copy(hello[12:], "NULL")
	ready := append([]byte("\x05READY\x0bSocket-Type"), 0, 0, 0, byte(len(socket)))
	ready = append(ready, socket...)
	hello = append(append(hello, 4, byte(len(ready))), ready...)
	if _, err := c.Write(hello); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 64)); err != nil {
		return err
	}
	_, _, err := c.frame() // READY
	return err
}

func (c *routerConn) frame() (flags byte, body []byte, err error) {
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head[:2]); err != nil {
		return 0, nil, err
	}
	size := uint64(head[1])
	if head[0]&2 != 0 {
		if _, err := io.ReadFull(c, head[2:]); err != nil {
			return 0, nil, err
		}
		size = binary.BigEndian.Uint64(head[1:])
	}
	if size > 1<<20 {
		return 0, nil, errors.New("too long")
	}
	body = make([]byte, size)
	_, err = io.ReadFull(c, body)
	return head[0], body, err
}

// request shakes hands and reads the number that is asked for.
func (c *routerConn) request() (uint64, error) {
	if err := c.greet("ROUTER"); err != nil {
		return 0, err
	}
	return c.again()
}

// again reads another request.
func (c *routerConn) again() (uint64, error) {
	for {
		flags, body, err := c.frame()
		if err != nil {
			return 0, err
		}
		if flags&4 == 0 && flags&1 == 0 && len(body) == 8 {
			return binary.BigEndian.Uint64(body), nil
		}
	}
}

// send sends frames as one message.
func (c *routerConn) send(frames ...[]byte) error {
	var out []byte
	for i, f := range frames {
		flags := byte(2)
		if i < len(frames)-1 {
			flags |= 1
		}
		out = binary.BigEndian.AppendUint64(append(out, flags), uint64(len(f)))
		out = append(out, f...)
	}
	_, err := c.Write(out)
	return err
}

// batch sends a batch as most engines do; the end marker if payload is nil.
func (c *routerConn) batch(seq uint64, payload []byte) error {
	return c.send(nil, number(seq), payload)
}

func (c *routerConn) end() error { return c.batch(1<<64-1, nil) }

// hold keeps the connection until the peer closes it.
func (c *routerConn) hold() { io.Copy(io.Discard, c) }

func number(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }
