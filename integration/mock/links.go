package mock

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

// ErrEndpoint: an endpoint is neither tcp://host:port nor ipc://path.
var ErrEndpoint = errors.New("mock: bad endpoint")

const (
	handshakeLimit = 5 * time.Second
	redialAfter    = 100 * time.Millisecond
)

// links is the connections of one socket: those that a listener accepts, or one
// that is dialled again whenever it ends. Closing it leaves no goroutine behind,
// whatever the peers do: serve ends soon after its connection is closed.
type links struct {
	serve    func(context.Context, net.Conn) // ctx is done when the links are closed
	endpoint string
	listener net.Listener // nil if the socket dials

	ctx  context.Context // done when the links are closed
	end  context.CancelFunc
	work sync.WaitGroup

	mu    sync.Mutex // guards conns and, with ctx, that none is added after close
	conns map[net.Conn]struct{}
}

func newLinks(endpoint string, serve func(context.Context, net.Conn)) *links {
	l := &links{serve: serve, endpoint: endpoint, conns: map[net.Conn]struct{}{}}
	l.ctx, l.end = context.WithCancel(context.Background())
	return l
}

// bind listens at endpoint and serves each connection in a goroutine of its own.
func bind(endpoint string, serve func(context.Context, net.Conn)) (*links, error) {
	ln, actual, err := listen(endpoint)
	if err != nil {
		return nil, err
	}
	l := newLinks(actual, serve)
	l.listener = ln
	l.work.Go(l.accept)
	return l, nil
}

// connect dials endpoint until it answers, serves the connection, and begins
// again.
func connect(endpoint string, serve func(context.Context, net.Conn)) (*links, error) {
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, err
	}
	l := newLinks(endpoint, serve)
	l.work.Go(func() {
		var d net.Dialer
		for l.ctx.Err() == nil {
			if c, err := d.DialContext(l.ctx, network, addr); err == nil {
				l.run(c)
			}
			l.sleep(redialAfter)
		}
	})
	return l, nil
}

func (l *links) accept() {
	for {
		c, err := l.listener.Accept()
		switch {
		case err == nil:
			l.work.Go(func() { l.run(c) })
		case l.ctx.Err() != nil:
			return
		default: // out of file descriptors, most likely
			l.sleep(10 * time.Millisecond)
		}
	}
}

// run serves a connection to its end.
func (l *links) run(c net.Conn) {
	defer c.Close()
	l.mu.Lock()
	if l.ctx.Err() != nil {
		l.mu.Unlock()
		return
	}
	l.conns[c] = struct{}{}
	l.mu.Unlock()
	l.serve(l.ctx, c)
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

// sleep waits, unless the links are closed.
func (l *links) sleep(d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-l.ctx.Done():
	}
}

// close ends every connection and returns when nothing runs any more.
func (l *links) close() {
	l.mu.Lock()
	l.end()
	for c := range l.conns {
		c.Close()
	}
	l.mu.Unlock()
	if l.listener != nil {
		l.listener.Close()
	}
	l.work.Wait()
}

// split takes an endpoint apart into what package net calls network and address.
func split(endpoint string) (network, addr string, err error) {
	scheme, rest, ok := strings.Cut(endpoint, "://")
	switch {
	case ok && scheme == "ipc" && rest != "":
		return "unix", rest, nil
	case ok && scheme == "tcp":
		host, port, err := net.SplitHostPort(rest)
		if err != nil || port == "" {
			return "", "", fmt.Errorf("%w: %q", ErrEndpoint, endpoint)
		}
		if host == "*" {
			host = ""
		}
		return "tcp", net.JoinHostPort(host, port), nil
	}
	return "", "", fmt.Errorf("%w: %q", ErrEndpoint, endpoint)
}

// listen listens at an endpoint and returns it with the port it got.
func listen(endpoint string) (net.Listener, string, error) {
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, "", err
	}
	if network == "unix" {
		if info, err := os.Lstat(addr); err == nil && info.Mode().Type() == fs.ModeSocket {
			os.Remove(addr) // left by a process that was killed
		}
		ln, err := net.Listen(network, addr)
		return ln, endpoint, err
	}
	host, port, _ := net.SplitHostPort(addr)
	if port != "0" {
		ln, err := net.Listen(network, addr)
		return ln, endpoint, err
	}
	ln, err := listenAnywhere(host)
	if err != nil {
		return nil, "", err
	}
	_, port, _ = net.SplitHostPort(ln.Addr().String())
	return ln, "tcp://" + net.JoinHostPort(host, port), nil
}

// listenAnywhere listens at a free port below those that the kernel gives to
// outgoing connections: a stopped engine finds its port free when it starts
// again, and who dials it meanwhile does not meet itself.
func listenAnywhere(host string) (net.Listener, error) {
	const first, last = 20_000, 32_000
	for range 200 {
		addr := net.JoinHostPort(host, fmt.Sprint(first+rand.IntN(last-first)))
		if ln, err := net.Listen("tcp", addr); err == nil {
			return ln, nil
		}
	}
	return net.Listen("tcp", net.JoinHostPort(host, "0"))
}
