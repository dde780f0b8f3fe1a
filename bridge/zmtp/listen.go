package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	// handshakes is how many peers may shake hands at once on one listener, so
	// that one who says nothing keeps no publisher out.
	handshakes = 4
	// lostPause is how long a peer that was turned away, or was none, keeps its
	// place, so that many of them cost little.
	lostPause = 10 * time.Millisecond
)

// acceptor is one life of a listener. Its goroutines hand what happens to the
// goroutine of Run.
type acceptor struct {
	s      *Sub
	ln     net.Listener
	cancel context.CancelFunc
	wg     sync.WaitGroup

	busy    atomic.Bool   // there is a publisher, handed over or being read from
	slots   chan struct{} // one taken by each handshake
	peers   chan *Conn    // at most one: the sender has set busy
	notes   chan note
	broke   chan error           // the listener
	current atomic.Pointer[Conn] // being read from by the goroutine of Run
}

// note is something to tell the handler.
type note struct {
	refused string // a peer, if err is nil
	err     error
}

// listenOnce listens, and reads from one publisher after the other until the
// listener breaks or ctx ends. It returns how long the listener lived.
func (s *Sub) listenOnce(ctx context.Context) time.Duration {
	ln, err := listen(ctx, s.network, s.address)
	if err != nil {
		if ctx.Err() == nil {
			s.h.Disconnected(fmt.Errorf("zmtp: %w", err))
		}
		return 0
	}
	start := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	a := &acceptor{
		s: s, ln: ln, cancel: cancel,
		slots: make(chan struct{}, handshakes),
		peers: make(chan *Conn, 1),
		notes: make(chan note, 16),
		broke: make(chan error, 1),
	}
	a.wg.Go(func() { a.accept(ctx) })
	defer a.stop()
	for {
		select {
		case <-ctx.Done():
			return 0
		case n := <-a.notes:
			a.tell(n)
		case err := <-a.broke:
			s.h.Disconnected(fmt.Errorf("zmtp: %w", err))
			return time.Since(start)
		case c := <-a.peers:
			a.current.Store(c)
			s.serve(ctx, c, a.tellRefused)
			a.current.Store(nil)
			a.busy.Store(false)
		}
	}
}

// stop ends all goroutines of the acceptor.
func (a *acceptor) stop() {
	a.cancel()
	a.ln.Close()
	a.wg.Wait()
	select {
	case c := <-a.peers:
		c.Close()
	default:
	}
}

// accept accepts peers until the listener breaks or is closed.
func (a *acceptor) accept(ctx context.Context) {
	for {
		nc, err := a.ln.Accept()
		if err != nil {
			a.ln.Close()
			a.broke <- err
			return
		}
		if a.busy.Load() {
			a.refuse(nc)
			pause(ctx, lostPause)
			continue
		}
		select {
		case a.slots <- struct{}{}:
			a.wg.Go(func() { a.handshake(ctx, nc) })
		case <-ctx.Done():
			nc.Close()
		}
	}
}

// handshake makes a peer the publisher, if it is the first to be one.
func (a *acceptor) handshake(ctx context.Context, nc net.Conn) {
	defer func() { <-a.slots }()
	timed, cancel := context.WithTimeoutCause(ctx, a.s.opts.HandshakeTimeout, ErrHandshakeTimeout)
	defer cancel()
	c, err := open(timed, nc, a.s.address, SUB, &a.s.opts)
	switch {
	case ctx.Err() != nil:
		nc.Close()
	case err != nil:
		a.post(note{err: err})
		pause(ctx, lostPause)
	case a.busy.CompareAndSwap(false, true):
		a.peers <- c
	default:
		a.refuse(nc)
	}
}

// refuse turns a peer away.
func (a *acceptor) refuse(nc net.Conn) {
	nc.Close()
	a.post(note{refused: a.name(nc)})
}

// name returns what to call a peer.
func (a *acceptor) name(nc net.Conn) string {
	if a.s.network == "unix" {
		return a.s.address // clients of unix sockets have no address
	}
	return nc.RemoteAddr().String()
}

// post leaves a note for the goroutine of Run, which may be reading.
func (a *acceptor) post(n note) {
	select {
	case a.notes <- n:
	default:
		a.s.log.Debug("zmtp: not reported", "address", a.s.address, "refused", n.refused, "err", n.err)
	}
	if c := a.current.Load(); c != nil {
		c.interrupt()
	}
}

// tell passes one note on.
func (a *acceptor) tell(n note) {
	if n.err != nil {
		a.s.h.Disconnected(n.err)
		return
	}
	a.s.h.Refused(n.refused)
}

// tellRefused passes on who was turned away so far. Handshakes that failed
// beside the publisher's are not worth a Disconnected, which would be taken for
// the publisher's.
func (a *acceptor) tellRefused() {
	for {
		select {
		case n := <-a.notes:
			if n.err == nil {
				a.tell(n)
			}
		default:
			return
		}
	}
}

// listen listens on address. A socket file in the way is removed if nobody
// listens on it any more.
func listen(ctx context.Context, network, address string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	ln, err := lc.Listen(ctx, network, address)
	if err == nil || network != "unix" || !errors.Is(err, syscall.EADDRINUSE) || !stale(ctx, address) {
		return ln, err
	}
	if err := os.Remove(address); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return lc.Listen(ctx, network, address)
}

// stale tells whether path is a unix socket that nobody listens on.
func stale(ctx context.Context, path string) bool {
	if info, err := os.Lstat(path); err != nil || info.Mode()&fs.ModeSocket == 0 {
		return false
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		nc.Close()
	}
	return errors.Is(err, syscall.ECONNREFUSED)
}
