package zmtp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// The faults of go-zeromq/zmq4 v0.17.0 as a SUB that made this package
// necessary, one test for each, to show that it has none of them.

// 1. Nine bytes end the process: the announced length is allocated.
func TestFault01LengthFromTheWire(t *testing.T) {
	for _, header := range [][]byte{
		appendHeader(nil, 0, 60<<20),        // allowed, and never sent
		appendHeader(nil, flagMore, 60<<20), //
		appendHeader(nil, 0, 1<<30),
		appendHeader(nil, 0, 60<<30),
		appendHeader(nil, 0, 9e18),
		{flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff},
		appendHeader(nil, flagCommand, 1<<30),
	} {
		s := newServer(t, afterShake(header, cut))
		c := dialPeer(t, s, quick())
		c.Subscribe(nil)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := c.Recv(&Message{})
		runtime.ReadMemStats(&after)
		if err == nil {
			t.Errorf("%x: no error", header)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
			t.Errorf("%x: %d bytes allocated", header, n)
		}
	}
}

// afterFault runs a subscription against a good publisher that turns bad for
// at least three connections and then good again.
func afterFault(t *testing.T, bad script) *recorder {
	t.Helper()
	s := newServer(t, publisher(1, "kv", "before"))
	var h recorder
	stop := run(t, "tcp", s.addr, false, quick(), &h)
	eventually(t, "messages before", h.got("kv", "before"))
	n := s.accepted.Load()
	s.become(bad)
	eventually(t, "three bad connections", func() bool { return s.accepted.Load() >= n+3 })
	s.become(publisher(1, "kv", "after"))
	eventually(t, "messages after", h.got("kv", "after"))
	stop()
	return &h
}

// 2. No reconnect after a cut inside a frame.
func TestFault02CutInsideFrame(t *testing.T) {
	h := afterFault(t, afterShake([]byte{flagMore, 9, 'k'}, cut))
	if !h.lost(is(io.ErrUnexpectedEOF))() {
		t.Errorf("errors %v", h.errs())
	}
}

// timedOut is a connection whose peer stopped acknowledging: what a read says
// when TCP keepalive gives up. The error calls itself a timeout.
type timedOut struct{ net.Conn }

func (timedOut) Read([]byte) (int, error) {
	return 0, &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ETIMEDOUT)}
}

// 3. No reconnect after ETIMEDOUT, which is taken for a deadline.
func TestFault03KeepaliveExpires(t *testing.T) {
	s := newServer(t, publisher(1, "kv"))
	var h recorder
	sub, err := NewSub("tcp", s.addr, false, nil, quick(), &h)
	if err != nil {
		t.Fatal(err)
	}
	c := dialPeer(t, s, quick())
	c.nc, c.socket = timedOut{c.nc}, nil
	sub.serve(context.Background(), c, func() {})
	if !h.lost(is(syscall.ETIMEDOUT))() {
		t.Errorf("errors %v", h.errs())
	}
	runSub(t, sub)
	eventually(t, "messages", h.got("kv"))
}

// 4. No reconnect after a handshake that fails.
func TestFault04HandshakeFailsOnReconnect(t *testing.T) {
	for _, bad := range []script{
		send([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")),
		func(c net.Conn) { c.Write(greeting(1)[:11]) },
		send(greeting(1), ready("ROUTER")),
	} {
		if h := afterFault(t, bad); len(h.disconnected) < 4 {
			t.Errorf("only %d errors for the end of a connection and three attempts", len(h.disconnected))
		}
	}
}

// 5. A peer that accepts and closes is dialled 6,600 times a second, each
// leaving a descriptor behind.
func TestFault05AcceptAndClose(t *testing.T) {
	s := newServer(t, end)
	fds, goroutines := countFDs(t), runtime.NumGoroutine()
	opts := quick()
	opts.BackoffMax = opts.BackoffMin // the most that options can ask for
	var h recorder
	stop := run(t, "tcp", s.addr, false, opts, &h)
	eventually(t, "many dials", h.is(func(r *recorder) bool { return len(r.disconnected) >= 200 }))
	if n := countFDs(t); n > fds+10 {
		t.Errorf("descriptors: %d, then %d", fds, n)
	}
	if n := runtime.NumGoroutine(); n > goroutines+10 {
		t.Errorf("goroutines: %d, then %d", goroutines, n)
	}
	stop()
}

// 6. A peer that resets behind the handshake ends in a deadlock, one that
// closes behind the subscription in thousands of goroutines.
func TestFault06EndBehindHandshake(t *testing.T) {
	goroutines := runtime.NumGoroutine()
	afterFault(t, func(c net.Conn) {
		shake(c, 1, "PUB")
		reset(c)
	})
	afterFault(t, afterShake(nil, end))
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines+6 }) // the servers
}

// 7. Dial stays blocked on a silent peer after ctx has ended.
func TestFault07SilentPeer(t *testing.T) {
	s := newServer(t, stay)
	opts := quick()
	opts.HandshakeTimeout = time.Hour
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for s.accepted.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	if _, err := Dial(ctx, "tcp", s.addr, SUB, opts); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	ctx, cancel = context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, "tcp", s.addr, SUB, opts); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

// 8. After ten attempts nothing is tried any more, and nobody is told.
func TestFault08GivesUp(t *testing.T) {
	addr := freeAddr(t)
	var h recorder
	run(t, "tcp", addr, false, quick(), &h)
	eventually(t, "told of 30 attempts", h.is(func(r *recorder) bool { return len(r.disconnected) >= 30 }))
	serveAt(t, "tcp", addr, publisher(1, "kv"))
	eventually(t, "messages", h.got("kv"))
}

// 9. Errors and commands come out as messages.
func TestFault09CommandsAsMessages(t *testing.T) {
	ping := appendCommand(nil, "PING", []byte{0, 0})
	data := append(append(repeat(ping, 10), message("kv", "1")...), repeat(ping, 10)...)
	s := newServer(t, afterShake(data, cut))
	var odd atomic.Int64
	h := recorder{onMessage: func(frames [][]byte) {
		if strings.Join(toStrings(frames), "|") != "kv|1" {
			odd.Add(1)
		}
	}}
	stop := run(t, "tcp", s.addr, false, quick(), &h)
	eventually(t, "five connections", h.is(func(r *recorder) bool { return len(r.connected) >= 5 }))
	stop()
	if odd.Load() > 0 || h.messages > len(h.connected) {
		t.Errorf("%d messages from %d connections, %d odd ones", h.messages, len(h.connected), odd.Load())
	}
}

// 10. No PONG, no PING, only ZMTP 3.0. TestLibzmqHeartbeat has a publisher that
// insists on them.
func TestFault10NoHeartbeat(t *testing.T) {
	seen := make(chan string, 10)
	s := newServer(t, func(c net.Conn) {
		g := make([]byte, greetingLen)
		c.Write(greeting(1))
		io.ReadFull(c, g)
		seen <- fmt.Sprintf("ZMTP %d.%d", g[10], g[11])
		c.Write(ready("PUB"))
		c.Write(appendCommand(nil, "PING", []byte{0, 0}, []byte("context")))
		for {
			_, body, err := readFrame(c)
			if err != nil {
				return
			}
			seen <- string(body)
		}
	})
	opts := quick()
	opts.HeartbeatInterval, opts.HeartbeatTimeout = 20*time.Millisecond, time.Hour
	var h recorder
	run(t, "tcp", s.addr, false, opts, &h)
	for _, want := range []string{"ZMTP 3.1", string(ready("SUB")[2:]), "\x09SUBSCRIBEkv", "\x04PONGcontext", "\x04PING\x00\x00"} {
		if got := <-seen; got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// 11. Of two endpoints only the last one is dialled again, twice.
func TestFault11TwoEndpoints(t *testing.T) {
	a, b := newServer(t, publisher(1, "kv", "a")), newServer(t, publisher(1, "kv", "b"))
	var ha, hb recorder
	run(t, "tcp", a.addr, false, quick(), &ha)
	run(t, "tcp", b.addr, false, quick(), &hb)
	eventually(t, "messages", func() bool { return ha.got("kv", "a")() && hb.got("kv", "b")() })
	for i := range 3 {
		again := fmt.Sprint("a", i)
		a.become(publisher(1, "kv", again))
		eventually(t, "messages after a restart", ha.got("kv", again))
	}
	if n := b.accepted.Load(); n != 1 {
		t.Errorf("the other endpoint was dialled %d times", n)
	}
}

// 12. Goroutines are left after Close or cancel while data is flowing.
func TestFault12LeakUnderLoad(t *testing.T) {
	flood := repeat(message("kv", "12345678", "payload"), 10_000)
	s := newServer(t, afterShake(nil, func(c net.Conn) {
		for {
			if _, err := c.Write(flood); err != nil {
				return
			}
		}
	}))
	goroutines := runtime.NumGoroutine()
	for range 100 {
		c := dialPeer(t, s, quick())
		c.Subscribe(nil)
		c.Recv(&Message{})
		c.Close() // and nobody reads on
	}
	for range 20 {
		var h recorder
		stop := run(t, "tcp", s.addr, false, quick(), &h)
		eventually(t, "messages", h.is(func(r *recorder) bool { return r.messages > 0 }))
		stop()
	}
	eventually(t, "goroutines end", func() bool { return runtime.NumGoroutine() <= goroutines })
}

// 13. A message goes out in two writes a frame, and one peer that reads nothing
// blocks all. TestSend counts writes.
func TestFault13StalledPeer(t *testing.T) {
	s := newServer(t, func(c net.Conn) {
		if shake(c, 1, "ROUTER") == nil {
			time.Sleep(time.Second)
		}
	})
	opts := quick()
	opts.WriteTimeout = 50 * time.Millisecond
	c, err := Dial(context.Background(), "tcp", s.addr, DEALER, opts)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	large := make([]byte, 1<<20)
	for err == nil {
		err = c.Send(nil, large)
	}
	if !errors.Is(err, ErrWriteTimeout) {
		t.Errorf("got %v", err)
	}
	if err := c.Recv(&Message{}); !errors.Is(err, net.ErrClosed) {
		t.Errorf("half a message is on the wire, and Recv goes on: %v", err)
	}
}

// 14. Reconnect and Close are said to race. This is for the race detector.
func TestFault14Races(t *testing.T) {
	s := newServer(t, publisher(1, "kv"))
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 25 {
				var h recorder
				stop := run(t, "tcp", s.addr, false, quick(), &h)
				eventually(t, "messages", h.is(func(r *recorder) bool { return r.messages > 0 }))
				s.become(publisher(1, "kv"))
				stop()
			}
		})
	}
	wg.Wait()

	c := dialPeer(t, s, quick())
	for range 4 {
		wg.Go(func() {
			for range 25 {
				c.Subscribe([]byte("kv"))
			}
			c.Close()
		})
	}
	var m Message
	for c.Recv(&m) == nil {
	}
	wg.Wait()
}
