package zmtp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	// What go-zeromq leaves behind when it is closed is not ours.
	goleak.VerifyTestMain(m,
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*qreader).listen"),
		goleak.IgnoreAnyFunction("github.com/go-zeromq/zmq4.(*pubMWriter).run"))
}

// quick returns options that make the tests short.
func quick() Options {
	o := Default()
	o.HandshakeTimeout = 500 * time.Millisecond
	o.WriteTimeout = time.Second
	o.HeartbeatInterval = 0
	o.BackoffMin, o.BackoffMax = 2*time.Millisecond, 50*time.Millisecond
	return o
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// countFDs returns how many file descriptors the process has.
func countFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc/self/fd: ", err)
	}
	return len(entries)
}

// taken are the ports that freeAddr has returned.
var taken sync.Map

// freeAddr returns a TCP address that nobody listens on, never the same twice,
// below the range that outgoing connections take their ports from.
func freeAddr(t testing.TB) string {
	t.Helper()
	for range 1000 {
		addr := fmt.Sprint("127.0.0.1:", 20_000+rand.N(12_000))
		if _, used := taken.LoadOrStore(addr, true); used {
			continue
		}
		if ln, err := net.Listen("tcp", addr); err == nil {
			ln.Close()
			return addr
		}
	}
	t.Fatal("no free port")
	return ""
}

// A script is what one side does with one connection.
type script func(c net.Conn)

// server follows a script on each connection that it accepts.
type server struct {
	t        testing.TB
	network  string
	addr     string
	ln       net.Listener
	accepted atomic.Int64
	wg       sync.WaitGroup

	mu    sync.Mutex
	do    script
	conns map[net.Conn]bool
}

func newServer(t testing.TB, do script) *server {
	t.Helper()
	return serveAt(t, "tcp", "127.0.0.1:0", do)
}

func serveAt(t testing.TB, network, addr string, do script) *server {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, network: network, addr: ln.Addr().String(), ln: ln, do: do, conns: map[net.Conn]bool{}}
	s.wg.Go(s.accept)
	t.Cleanup(s.close)
	return s
}

func (s *server) accept() {
	for {
		c, err := s.ln.Accept()
		if err != nil {
			return
		}
		s.accepted.Add(1)
		s.mu.Lock()
		do := s.do
		s.conns[c] = true
		s.mu.Unlock()
		s.wg.Go(func() {
			defer c.Close()
			do(c)
		})
	}
}

// become changes the script, and cuts what follows the old one.
func (s *server) become(do script) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.do = do
	for c := range s.conns {
		c.Close()
	}
	clear(s.conns)
}

func (s *server) close() {
	s.ln.Close()
	s.become(nil)
	s.wg.Wait()
}

// greeting is one of a peer with NULL security.
func greeting(minor byte) []byte {
	b := appendGreeting(nil)
	b[11] = minor
	return b
}

func ready(socketType string) []byte { return appendReady(nil, SocketType(socketType)) }

// shake is the peer's half of a good handshake.
func shake(c net.Conn, minor byte, socketType string) error {
	if _, err := c.Write(greeting(minor)); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, greetingLen)); err != nil {
		return err
	}
	if _, err := c.Write(ready(socketType)); err != nil {
		return err
	}
	_, _, err := readFrame(c)
	return err
}

// readFrame reads one frame slowly.
func readFrame(c io.Reader) (flags byte, body []byte, err error) {
	var b []byte
	for {
		h, ok, err := parseHeader(b)
		if err != nil {
			return 0, nil, err
		}
		if ok {
			body := make([]byte, h.size)
			_, err := io.ReadFull(c, body)
			return h.flags, body, err
		}
		b = append(b, 0)
		if _, err := io.ReadFull(c, b[len(b)-1:]); err != nil {
			return 0, nil, err
		}
	}
}

// publisher is a good PUB: it answers PING, and sends messages from the moment
// on that it is subscribed to, slowly and for ever.
func publisher(minor byte, frames ...string) script {
	return func(c net.Conn) {
		if shake(c, minor, "PUB") != nil {
			return
		}
		if _, _, err := readFrame(c); err != nil {
			return
		}
		var wg sync.WaitGroup
		defer wg.Wait()
		defer c.Close()
		wg.Go(func() {
			for {
				_, body, err := readFrame(c)
				if err != nil {
					return
				}
				if name, content, _ := splitCommand(body); string(name) == "PING" {
					c.Write(appendCommand(nil, "PONG", content[2:]))
				}
			}
		})
		msg := message(frames...)
		for {
			if _, err := c.Write(msg); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
}

// message encodes one.
func message(frames ...string) []byte {
	var b [][]byte
	for _, f := range frames {
		b = append(b, []byte(f))
	}
	return appendMessage(nil, b...)
}

// stay keeps a connection until the other side closes it.
func stay(c net.Conn) { io.Copy(io.Discard, c) }

// afterShake returns a script that shakes hands as a PUB, takes the
// subscription, writes b, and goes on with next.
func afterShake(b []byte, next script) script {
	return func(c net.Conn) {
		if shake(c, 1, "PUB") != nil {
			return
		}
		if _, _, err := readFrame(c); err != nil {
			return
		}
		if _, err := c.Write(b); err == nil {
			next(c)
		}
	}
}

func end(net.Conn) {}

// reset closes with RST instead of FIN.
func reset(c net.Conn) { c.(*net.TCPConn).SetLinger(0) }

// recorder is a Handler that remembers.
type recorder struct {
	mu           sync.Mutex
	connected    []string
	messages     int
	last         []string // frames
	disconnected []error
	refused      []string
	onMessage    func(frames [][]byte) // called without the lock
}

func (r *recorder) Connected(peer string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.connected = append(r.connected, peer)
}

func (r *recorder) Message(frames [][]byte) {
	if r.onMessage != nil {
		r.onMessage(frames)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.messages++
	r.last = toStrings(frames)
}

func (r *recorder) Disconnected(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.disconnected = append(r.disconnected, err)
}

func (r *recorder) Refused(peer string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refused = append(r.refused, peer)
}

// is returns a condition on what was recorded.
func (r *recorder) is(cond func(r *recorder) bool) func() bool {
	return func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return cond(r)
	}
}

// got is the condition that the last message has these frames.
func (r *recorder) got(frames ...string) func() bool {
	return r.is(func(r *recorder) bool { return fmt.Sprint(r.last) == fmt.Sprint(frames) })
}

// lost is the condition that there was such an error.
func (r *recorder) lost(want func(error) bool) func() bool {
	return r.is(func(r *recorder) bool {
		for _, err := range r.disconnected {
			if want(err) {
				return true
			}
		}
		return false
	})
}

func (r *recorder) errs() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return fmt.Sprint(r.disconnected)
}

func is(want error) func(error) bool {
	return func(err error) bool { return errors.Is(err, want) }
}

func toStrings(frames [][]byte) []string {
	var s []string
	for _, f := range frames {
		s = append(s, string(f))
	}
	return s
}

// run runs a subscription until the test ends or stop is called, and checks
// that it ends as it should.
func run(t testing.TB, network, addr string, bind bool, opts Options, h Handler) (stop func()) {
	t.Helper()
	s, err := NewSub(network, addr, bind, []byte("kv"), opts, h)
	if err != nil {
		t.Fatal(err)
	}
	return runSub(t, s)
}

func runSub(t testing.TB, s *Sub) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != context.Canceled {
				t.Errorf("Run returned %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("Run does not end")
		}
	})
	t.Cleanup(stop)
	return stop
}

// dialPeer dials as SUB. Nothing is waited for longer than 20 s, unless the test
// sets another deadline.
func dialPeer(t testing.TB, s *server, opts Options) *Conn {
	t.Helper()
	c, err := Dial(context.Background(), s.network, s.addr, SUB, opts)
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(20 * time.Second))
	t.Cleanup(func() { c.Close() })
	return c
}

// socketPath returns a path short enough for a unix socket.
func socketPath(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "zmtp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "s")
}

// repeat returns n copies of b.
func repeat(b []byte, n int) []byte { return bytes.Repeat(b, n) }
