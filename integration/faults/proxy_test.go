package faults

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// link is a TCP proxy: a stretch of network that can be cut, and frozen.
type link struct {
	target string
	ln     net.Listener
	wg     sync.WaitGroup

	mu     sync.Mutex
	cut    bool
	frozen chan struct{} // closed while it is not; else what waits for that
	conns  map[net.Conn]struct{}
	closed bool
}

func newLink(t *testing.T, target string) *link {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &link{target: target, ln: ln, conns: map[net.Conn]struct{}{}, frozen: make(chan struct{})}
	close(l.frozen)
	l.wg.Go(l.accept)
	t.Cleanup(l.close)
	return l
}

func (l *link) addr() string { return l.ln.Addr().String() }

func (l *link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

func (l *link) add(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cut || l.closed {
		c.Close()
		return false
	}
	l.conns[c] = struct{}{}
	return true
}

func (l *link) serve(c net.Conn) {
	if !l.add(c) {
		return
	}
	defer l.drop(c)
	up, err := net.DialTimeout("tcp", l.target, time.Second)
	if err != nil || !l.add(up) {
		return
	}
	defer l.drop(up)
	done := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{c, up}, {up, c}} {
		l.wg.Go(func() {
			io.Copy(way[1], thawed{l, way[0]})
			way[0].Close()
			way[1].Close()
			done <- struct{}{}
		})
	}
	<-done
	<-done
}

func (l *link) drop(c net.Conn) {
	c.Close()
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

// thawed reads while the link is not frozen.
type thawed struct {
	l *link
	net.Conn
}

func (t thawed) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.l.mu.Lock()
	frozen := t.l.frozen
	t.l.mu.Unlock()
	<-frozen
	return n, err
}

// sever ends all connections, and lets none through until mend.
func (l *link) sever() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = true
	for c := range l.conns {
		c.Close()
	}
}

// freeze keeps all connections up, and lets nothing through until mend.
func (l *link) freeze() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.frozen:
		l.frozen = make(chan struct{})
	default:
	}
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut = false
	select {
	case <-l.frozen:
	default:
		close(l.frozen)
	}
}

func (l *link) close() {
	l.ln.Close()
	l.mend()
	l.mu.Lock()
	l.closed = true
	for c := range l.conns {
		c.Close()
	}
	l.mu.Unlock()
	l.wg.Wait()
}
