package mock

import (
	"bufio"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/go-zeromq/zmq4/security/null"
)

// Of package zmq4 this package uses the protocol only, one connection at a time.
// Its sockets can not be closed without leaking goroutines (the writer of a PUB
// never ends), one silent peer keeps all later ones from being accepted, a frame
// length from the wire is allocated unseen, and a READY command cut short is a
// panic in a goroutine of the library.

// openZMQ4 shakes hands as a socket of type t.
func openZMQ4(conn net.Conn, t zmq4.SocketType, accepted bool) (z *zmq4.Conn, g *guard, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: %v", errNotZMTP, r)
		}
	}()
	g = &guard{Conn: conn, r: bufio.NewReader(conn), w: bufio.NewWriterSize(conn, 64<<10), left: 64}
	conn.SetDeadline(time.Now().Add(handshakeLimit))
	defer conn.SetDeadline(time.Time{})
	z, err = zmq4.Open(g, null.Security(), t, nil, accepted, nil)
	g.mu.Lock()
	g.corked = true
	g.mu.Unlock()
	return z, g, err
}

// guard stands between zmq4 and a connection. It ends the connection on messages
// that are too long, and buffers both ways: zmq4 makes two system calls a frame.
type guard struct {
	net.Conn
	r       *bufio.Reader
	left    int // bytes until the next frame; at first those of the greeting
	message int // bytes of the frames so far of a message, and some for each

	mu     sync.Mutex // guards below: zmq4 answers a PING from where it reads
	w      *bufio.Writer
	corked bool // writes wait for flush
}

// Read reads within a frame.
func (g *guard) Read(p []byte) (int, error) {
	const overhead = 64 // that a frame costs in memory, however short it is
	if g.left == 0 {
		flags, head, body, err := frameHead(g.r)
		if err != nil {
			return 0, err
		}
		g.left = head + body
		if g.message += body + overhead; g.message > maxInbound {
			return 0, errTooLong
		}
		if flags&flagMore == 0 {
			g.message = 0
		}
	}
	n, err := g.r.Read(p[:min(len(p), g.left)])
	g.left -= n
	return n, err
}

// Write keeps bytes for flush once the handshake is done.
func (g *guard) Write(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n, err := g.w.Write(p)
	if err == nil && !g.corked {
		err = g.w.Flush()
	}
	return n, err
}

func (g *guard) flush() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.w.Flush()
}

// zmq4Peer is a subscriber to which zmq4 speaks.
type zmq4Peer struct {
	conn *zmq4.Conn
	g    *guard
}

func openZMQ4Pub(conn net.Conn, accepted bool) (peer, error) {
	z, g, err := openZMQ4(conn, zmq4.Pub, accepted)
	if err != nil {
		return nil, err
	}
	return zmq4Peer{z, g}, nil
}

// subscription implements peer.
func (p zmq4Peer) subscription() (topic string, on bool, err error) {
	for {
		m, err := p.conn.RecvMsg()
		if err != nil {
			return "", false, err
		}
		if f := m.Frames; m.Type == zmq4.UsrMsg && len(f) == 1 && len(f[0]) > 0 && f[0][0] <= 1 {
			return string(f[0][1:]), f[0][0] == 1, nil
		}
	}
}

// send implements peer.
func (p zmq4Peer) send(msgs []message) error {
	for _, m := range msgs {
		if err := p.conn.SendMsg(zmq4.NewMsgFrom(m...)); err != nil {
			return err
		}
	}
	return p.g.flush()
}
