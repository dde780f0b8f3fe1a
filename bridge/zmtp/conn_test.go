package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// send returns a script that writes each part, and stays.
func send(parts ...[]byte) script {
	return func(c net.Conn) {
		for _, p := range parts {
			if _, err := c.Write(p); err != nil {
				return
			}
		}
		stay(c)
	}
}

// badPeer is a peer with which something must go wrong.
type badPeer struct {
	name string
	do   script
	want error
}

// badHandshakes are peers that Dial must turn down, and with what.
var badHandshakes = []badPeer{
	{"silent", stay, ErrHandshakeTimeout},
	{"http", send([]byte("HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")), ErrGreeting},
	{"one wrong byte", send([]byte{0xfe}), ErrGreeting},
	{"signature", send(greeting(0)[:9], []byte{0x7e}), ErrGreeting},
	{"greeting stops", send(greeting(0)[:11]), ErrHandshakeTimeout},
	{"greeting cut", func(c net.Conn) { c.Write(greeting(0)[:11]); cut(c) }, io.ErrUnexpectedEOF},
	{"zmtp 2.0", send(greeting(0)[:10], []byte{1, 1}), ErrVersion},
	{"curve", send(bytes.Replace(greeting(1), []byte("NULL\x00"), []byte("CURVE"), 1)), ErrMechanism},
	{"no mechanism", send(bytes.Replace(greeting(1), []byte("NULL"), make([]byte, 4), 1)), ErrMechanism},
	{"no ready", send(greeting(1)), ErrHandshakeTimeout},
	{"wrong socket", send(greeting(1), ready("SUB")), ErrSocketType},
	{"no socket", send(greeting(1), appendCommand(nil, "READY")), ErrReady},
	{"empty property name", send(greeting(1), appendCommand(nil, "READY", make([]byte, 5), ready("PUB")[8:])), ErrReady},
	{"property cut in name", send(greeting(1), appendCommand(nil, "READY", []byte("\x0bSock"))), ErrReady},
	{"property cut in length", send(greeting(1), appendCommand(nil, "READY", []byte("\x01A\x00\x00"))), ErrReady},
	{"property of 4 GB", send(greeting(1), appendCommand(nil, "READY", []byte("\x01A\xff\xff\xff\xffPUB"))), ErrReady},
	{"message for ready", send(greeting(1), message("READY")), ErrReady},
	{"ping for ready", send(greeting(1), appendCommand(nil, "PING", []byte{0, 0})), ErrReady},
	{"command without name", send(greeting(1), []byte{flagCommand, 0}), ErrCommand},
	{"name longer than command", send(greeting(1), []byte{flagCommand, 3, 3, 'R', 'E'}), ErrCommand},
	{"huge ready", send(greeting(1), []byte{flagCommand | flagLong, 0, 0, 0, 1, 0, 0, 0, 0}), ErrCommand},
	{"ready without end", func(c net.Conn) {
		c.Write(append(append(greeting(1), appendHeader(nil, flagCommand, 60_000)...), "\x05READY"...))
		for {
			if _, err := c.Write([]byte("\x01A\x00\x00\x00\x00")); err != nil {
				return
			}
			time.Sleep(10 * time.Millisecond)
		}
	}, ErrHandshakeTimeout},
	{"reserved flags", send(greeting(1), []byte{0x80, 0}), ErrFlags},
}

// cut ends a connection with FIN: what was written arrives. A close would send
// RST, because there is something unread.
func cut(c net.Conn) {
	c.(interface{ CloseWrite() error }).CloseWrite()
	stay(c)
}

func TestBadHandshakes(t *testing.T) {
	for _, tc := range badHandshakes {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, tc.do)
			c, err := Dial(context.Background(), "tcp", s.addr, SUB, quick())
			if c != nil || !errors.Is(err, tc.want) {
				t.Fatalf("got %v, want %v", err, tc.want)
			}
		})
	}
}

func TestHandshakeErrorCommand(t *testing.T) {
	s := newServer(t, send(greeting(1), appendCommand(nil, "ERROR", []byte("\x03400"))))
	_, err := Dial(context.Background(), "tcp", s.addr, SUB, quick())
	var peer *PeerError
	if !errors.As(err, &peer) || peer.Reason != "400" {
		t.Fatalf("got %v", err)
	}
}

func TestDialArguments(t *testing.T) {
	bad := quick()
	bad.MaxFrames = 0
	for name, dial := range map[string]func() error{
		"network": func() error { _, err := Dial(context.Background(), "udp", "127.0.0.1:1", SUB, quick()); return err },
		"type":    func() error { _, err := Dial(context.Background(), "tcp", "127.0.0.1:1", "PUB", quick()); return err },
		"options": func() error { _, err := Dial(context.Background(), "tcp", "127.0.0.1:1", SUB, bad); return err },
		"address": func() error { _, err := Dial(context.Background(), "tcp", "127.0.0.1", SUB, quick()); return err },
		"nobody": func() error {
			_, err := Dial(context.Background(), "unix", socketPath(t), SUB, quick())
			if !errors.Is(err, syscall.ENOENT) {
				t.Errorf("unix: got %v", err)
			}
			return err
		},
		"handler": func() error { _, err := NewSub("tcp", "127.0.0.1:1", false, nil, quick(), nil); return err },
		"sub":     func() error { _, err := NewSub("ipc", "x", false, nil, quick(), &recorder{}); return err },
	} {
		if dial() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestValidate(t *testing.T) {
	for name, change := range map[string]func(o *Options){
		"MaxFrame":          func(o *Options) { o.MaxFrame = 0 },
		"MaxMessage":        func(o *Options) { o.MaxMessage = o.MaxFrame - 1 },
		"MaxFrames":         func(o *Options) { o.MaxFrames = -1 },
		"HandshakeTimeout":  func(o *Options) { o.HandshakeTimeout = 0 },
		"WriteTimeout":      func(o *Options) { o.WriteTimeout = 0 },
		"HeartbeatInterval": func(o *Options) { o.HeartbeatInterval = -1 },
		"HeartbeatTimeout":  func(o *Options) { o.HeartbeatTimeout = 0 },
		"BackoffMin":        func(o *Options) { o.BackoffMin = 0 },
		"BackoffMax":        func(o *Options) { o.BackoffMax = o.BackoffMin - 1 },
	} {
		o := Default()
		if err := o.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

// What the peer may do wrong behind the handshake, and what Recv says.
func TestBadFrames(t *testing.T) {
	opts := quick()
	opts.MaxFrame, opts.MaxMessage, opts.MaxFrames = 1000, 1500, 5
	thousand := strings.Repeat("x", 1000)
	huge := []byte{flagLong, 0x40, 0, 0, 0, 0, 0, 0, 0}
	negative := []byte{flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	for _, tc := range []struct {
		name string
		data []byte
		then script
		want error
	}{
		{"2^62 bytes", huge, stay, ErrFrameSize},
		{"2^64-1 bytes", negative, stay, ErrFrameSize},
		{"frame one byte too large", appendHeader(nil, 0, 1001), stay, ErrFrameSize},
		{"message one byte too large", message("1", thousand, thousand[:500])[:3+9+1000+9], stay, ErrMessageSize},
		{"one frame too many", message("", "", "", "", "", ""), stay, ErrFrameCount},
		{"frames without end", repeat([]byte{flagMore, 0}, 100_000), stay, ErrFrameCount},
		{"command of 2^62 bytes", append([]byte{huge[0] | flagCommand}, huge[1:]...), stay, ErrCommand},
		{"command one byte too large", appendHeader(nil, flagCommand, maxCommand+1), stay, ErrCommand},
		{"command with more", []byte{flagCommand | flagMore, 1, 0}, stay, ErrFlags},
		{"reserved flag", []byte{0x08, 0}, stay, ErrFlags},
		{"empty command", []byte{flagCommand, 0}, stay, ErrCommand},
		{"short ping", appendCommand(nil, "PING", []byte{0}), stay, ErrCommand},
		{"short error", appendCommand(nil, "ERROR", []byte{9, 'x'}), stay, ErrCommand},
		{"end", nil, cut, io.EOF},
		{"cut in a header", []byte{flagLong, 0, 0}, cut, io.ErrUnexpectedEOF},
		{"cut in a frame", []byte{flagMore, 9, 'k', 'v'}, cut, io.ErrUnexpectedEOF},
		{"cut between frames", []byte{flagMore, 2, 'k', 'v'}, cut, io.ErrUnexpectedEOF},
		{"reset", []byte{flagMore, 9, 'k', 'v'}, reset, syscall.ECONNRESET},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, afterShake(append(message("kv", "before"), tc.data...), tc.then))
			c := dialPeer(t, s, opts)
			if err := c.Subscribe(nil); err != nil {
				t.Fatal(err)
			}
			var m Message
			err := c.Recv(&m)
			if tc.want != syscall.ECONNRESET || err == nil { // RST may overtake it
				if err != nil || len(m.Frames) != 2 {
					t.Fatalf("the good message before: %v, %v", m.Frames, err)
				}
				err = c.Recv(&m)
			}
			if !errors.Is(err, tc.want) || len(m.Frames) != 0 {
				t.Fatalf("got %v, want %v", err, tc.want)
			}
			if again := c.Recv(&m); again != err {
				t.Errorf("then %v", again)
			}
			if err := c.Subscribe(nil); !errors.Is(err, net.ErrClosed) {
				t.Errorf("connection is open: %v", err)
			}
		})
	}
}

func TestErrorCommand(t *testing.T) {
	s := newServer(t, afterShake(appendCommand(nil, "ERROR", []byte("\x04oops")), stay))
	c := dialPeer(t, s, quick())
	c.Subscribe(nil)
	var peer *PeerError
	if err := c.Recv(&Message{}); !errors.As(err, &peer) || peer.Reason != "oops" {
		t.Fatalf("got %v", err)
	}
}

// A PING is answered with its context, 16 bytes of it at most, also between
// the frames of a message, and unknown commands are ignored there.
func TestPing(t *testing.T) {
	pongs := make(chan []byte, 3)
	ping := func(context string) []byte {
		return appendCommand(nil, "PING", []byte{0, 10}, []byte(context))
	}
	unknown := appendCommand(nil, "WHATEVER", make([]byte, 1000))
	frames := message("kv", "12345678", "payload")
	data := bytes.Join([][]byte{ping("abc"), frames[:4], ping(""), unknown, frames[4:14], unknown, ping(strings.Repeat("x", 300)), frames[14:]}, nil)
	s := newServer(t, afterShake(data, func(c net.Conn) {
		for range cap(pongs) {
			_, body, err := readFrame(c)
			if err != nil {
				return
			}
			pongs <- body
		}
		stay(c)
	}))
	c := dialPeer(t, s, quick())
	c.Subscribe(nil)
	var m Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(toStrings(m.Frames), "|"); got != "kv|12345678|payload" {
		t.Errorf("message %q", got)
	}
	for _, want := range []string{"abc", "", strings.Repeat("x", 16)} {
		if got := string(<-pongs); got != "\x04PONG"+want {
			t.Errorf("got %q, want PONG with %q", got, want)
		}
	}
}

// Between the frames of a message there may be any number of commands, and
// none of them stays in memory.
func TestManyCommands(t *testing.T) {
	frames := message("kv", "12345678", "payload")
	noise := repeat(appendCommand(nil, "X", make([]byte, 50)), 10_000)
	data := bytes.Join([][]byte{noise, frames[:4], noise, frames[4:14], noise, frames[14:]}, nil)
	s := newServer(t, afterShake(data, stay))
	c := dialPeer(t, s, quick())
	c.Subscribe(nil)
	var m Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(toStrings(m.Frames), "|"); got != "kv|12345678|payload" {
		t.Errorf("message %q", got)
	}
	if n := len(c.in.buf); n > bufLoad {
		t.Errorf("buffer of %d bytes", n)
	}
}

// A peer that doesn't read its answers is given up.
func TestWriteTimeout(t *testing.T) {
	opts := quick()
	opts.WriteTimeout = 50 * time.Millisecond
	ping := repeat(appendCommand(nil, "PING", []byte{0, 0}, make([]byte, 16)), 1000)
	s := newServer(t, afterShake(nil, func(c net.Conn) {
		for {
			if _, err := c.Write(ping); err != nil {
				return
			}
		}
	}))
	c := dialPeer(t, s, opts)
	c.Subscribe(nil)
	err := c.Recv(&Message{})
	if !errors.Is(err, ErrWriteTimeout) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	if again := c.Recv(&Message{}); again != err {
		t.Errorf("then %v", again)
	}
}

// Messages of all sizes arrive whole whatever pieces they come in, and a
// message survives a deadline in its middle.
func TestPieces(t *testing.T) {
	var data []byte
	var want []string
	for i, size := range []int{0, 1, 254, 255, 256, 4000, 5000, 70_000, 3, 300_000, 1_500_000, 10, 65_536, 17} {
		payload := strings.Repeat(string(rune('a'+i)), size)
		want = append(want, payload)
		data = append(data, message("kv-events", "", payload)...)
	}
	for _, piece := range []int{1, 7, 1000, 4096, 100_000, len(data)} {
		s := newServer(t, afterShake(nil, func(c net.Conn) {
			b := data
			if piece < 1000 {
				b = b[:20_000*piece] // or it takes long
			}
			for len(b) > 0 {
				n := min(piece, len(b))
				if _, err := c.Write(b[:n]); err != nil {
					return
				}
				b = b[n:]
			}
		}))
		c := dialPeer(t, s, quick())
		c.Subscribe(nil)
		var m Message
		for i, payload := range want {
			c.SetDeadline(time.Now().Add(time.Millisecond))
			err := c.Recv(&m)
			for err == os.ErrDeadlineExceeded {
				c.SetDeadline(time.Now().Add(time.Millisecond))
				err = c.Recv(&m)
			}
			if piece < 1000 && errors.Is(err, io.ErrUnexpectedEOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(m.Frames) != 3 || string(m.Frames[0]) != "kv-events" || len(m.Frames[1]) != 0 || string(m.Frames[2]) != payload {
				t.Fatalf("pieces of %d: message %d is wrong", piece, i)
			}
			if cap(m.Frames[0]) != len(m.Frames[0]) {
				t.Fatal("append to a frame would write into the next one")
			}
		}
	}
}

// Memory follows the bytes that came, goes back when it isn't used, and no view
// of a message is ever in a buffer that isn't.
func TestBuffer(t *testing.T) {
	peer := make(chan net.Conn, 1)
	s := newServer(t, afterShake(nil, func(c net.Conn) { peer <- c; stay(c) }))
	opts := quick()
	opts.HeartbeatInterval, opts.HeartbeatTimeout = 20*time.Millisecond, 10*time.Second
	c := dialPeer(t, s, opts)
	c.Subscribe(nil)
	engine := <-peer
	var m Message
	wait := func() error {
		c.SetDeadline(time.Now().Add(50 * time.Millisecond))
		return c.Recv(&m)
	}
	recv := func() {
		t.Helper()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
	}

	engine.Write(appendHeader(nil, flagMore, 60<<20))
	if err := wait(); err != os.ErrDeadlineExceeded || len(c.in.buf) > bufMin {
		t.Fatalf("60 MB announced: %v, buffer of %d bytes", err, len(c.in.buf))
	}
	go engine.Write(make([]byte, 1<<20))
	eventually(t, "1 MB read", func() bool { wait(); return len(c.in.buffered()) > 1<<20 })
	if n := len(c.in.buf); n > 3<<20 {
		t.Fatalf("1 MB of 60 sent: buffer of %d bytes", n)
	}
	go engine.Write(append(make([]byte, 59<<20), message("last")...))
	recv()
	if len(m.Frames) != 2 || len(m.Frames[0]) != 60<<20 || string(m.Frames[1]) != "last" {
		t.Fatal("60 MB frame is wrong")
	}
	if n := len(c.in.buf); n > 61<<20 {
		t.Errorf("60 MB message: buffer of %d bytes", n)
	}

	engine.Write(message("small"))
	recv()
	if n := len(c.in.buf); n > bufLoad {
		t.Errorf("behind a large message: buffer of %d bytes", n)
	}
	if m.Frames[:2][1] != nil {
		t.Error("a frame of the large message is kept")
	}

	load := repeat(message("kv", string(make([]byte, 1000))), 1000)
	go engine.Write(load)
	for range 1000 {
		recv()
	}
	if n := len(c.in.buf); n != bufLoad {
		t.Errorf("under load: buffer of %d bytes", n)
	}
	for range 6 * shrinkEvery {
		engine.Write(message("kv", "small"))
		recv()
	}
	if n := len(c.in.buf); n != bufMin {
		t.Errorf("after many small messages: buffer of %d bytes", n)
	}
	go engine.Write(load)
	for range 1000 {
		recv()
	}
	if n := len(c.in.buf); n != bufLoad {
		t.Errorf("under load again: buffer of %d bytes", n)
	}
	eventually(t, "the buffer of an idle connection shrinks", func() bool { wait(); return len(c.in.buf) == bufMin })
}

func TestDeadline(t *testing.T) {
	// Commands without end must not keep Recv from noticing.
	noise := repeat(appendCommand(nil, "X"), 1000)
	s := newServer(t, afterShake(message("kv"), func(c net.Conn) {
		for {
			if _, err := c.Write(noise); err != nil {
				return
			}
		}
	}))
	c := dialPeer(t, s, quick())
	c.Subscribe(nil)
	var m Message
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c.SetDeadline(time.Now().Add(20 * time.Millisecond))
		if err := c.Recv(&m); err != os.ErrDeadlineExceeded {
			t.Fatalf("got %v", err)
		}
	}
	c.SetDeadline(time.Unix(1, 0))
	if err := c.Recv(&m); err != os.ErrDeadlineExceeded {
		t.Fatalf("past deadline: got %v", err)
	}

	// A later deadline must not stand in the way of an earlier one.
	s.become(afterShake(message("kv"), stay))
	c = dialPeer(t, s, quick())
	c.Subscribe(nil)
	if err := c.Recv(&m); err != nil {
		t.Fatal(err)
	}
	watchdog := time.AfterFunc(10*time.Second, func() { c.Close() })
	defer watchdog.Stop()
	c.SetDeadline(time.Now().Add(time.Hour))
	if err := c.arm(time.Now()); err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(20 * time.Millisecond))
	if err := c.Recv(&m); err != os.ErrDeadlineExceeded {
		t.Fatalf("got %v", err)
	}
}

// A 3.1 peer that is silent is asked, and closed when it stays silent; one that
// answers is kept; a 3.0 peer is never asked.
func TestHeartbeat(t *testing.T) {
	opts := quick()
	opts.HeartbeatInterval, opts.HeartbeatTimeout = 20*time.Millisecond, 100*time.Millisecond
	t.Run("no answer", func(t *testing.T) {
		s := newServer(t, afterShake(message("kv"), stay))
		c := dialPeer(t, s, opts)
		c.Subscribe(nil)
		var m Message
		if err := c.Recv(&m); err != nil {
			t.Fatal(err)
		}
		if err := c.Recv(&m); err != ErrHeartbeat {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("no answer, short deadlines", func(t *testing.T) {
		s := newServer(t, afterShake(nil, stay))
		c := dialPeer(t, s, opts)
		c.Subscribe(nil)
		eventually(t, "heartbeat", func() bool {
			c.SetDeadline(time.Now().Add(5 * time.Millisecond))
			return c.Recv(&Message{}) == ErrHeartbeat
		})
	})
	t.Run("answers", func(t *testing.T) {
		const pings = 5
		s := newServer(t, afterShake(nil, func(c net.Conn) {
			for range pings {
				_, body, err := readFrame(c)
				if err != nil || string(body) != "\x04PING\x00\x00" {
					t.Errorf("got %q, %v, want PING", body, err)
					return
				}
				c.Write(appendCommand(nil, "PONG"))
			}
			c.Write(message("alive"))
			stay(c)
		}))
		opts := opts
		opts.HeartbeatTimeout = 10 * time.Second
		c := dialPeer(t, s, opts)
		c.Subscribe(nil)
		if err := c.Recv(&Message{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("3.0", func(t *testing.T) {
		var wrote atomic.Int64
		s := newServer(t, func(c net.Conn) {
			if shake(c, 0, "XPUB") != nil {
				return
			}
			n, _ := io.Copy(io.Discard, c)
			wrote.Store(n + 1)
		})
		c := dialPeer(t, s, opts)
		c.SetDeadline(time.Now().Add(500 * time.Millisecond))
		if err := c.Recv(&Message{}); err != os.ErrDeadlineExceeded {
			t.Fatalf("got %v", err)
		}
		c.Close()
		eventually(t, "end", func() bool { return wrote.Load() > 0 })
		if n := wrote.Load() - 1; n != 0 {
			t.Errorf("a 3.0 peer was sent %d bytes", n)
		}
	})
	t.Run("late reader, asked before", func(t *testing.T) {
		// The answer to a PING came in time, but nobody read it in time.
		s := newServer(t, afterShake(nil, func(c net.Conn) {
			if _, _, err := readFrame(c); err == nil {
				c.Write(appendCommand(message("1"), "PONG"))
			}
			stay(c)
		}))
		c := dialPeer(t, s, opts)
		c.Subscribe(nil)
		for c.in.pinged.IsZero() {
			c.SetDeadline(time.Now().Add(time.Millisecond))
			if err := c.Recv(&Message{}); err != os.ErrDeadlineExceeded {
				t.Fatal(err)
			}
		}
		time.Sleep(300 * time.Millisecond)
		c.SetDeadline(time.Time{})
		if err := c.Recv(&Message{}); err != nil {
			t.Fatal(err)
		}
	})
	t.Run("late reader", func(t *testing.T) {
		// What came while nobody read counts, however long ago it was due.
		s := newServer(t, afterShake(message("1"), func(c net.Conn) { c.Write(message("2")); stay(c) }))
		c := dialPeer(t, s, opts)
		c.Subscribe(nil)
		time.Sleep(300 * time.Millisecond)
		for range 2 {
			if err := c.Recv(&Message{}); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// counting counts the writes to a connection.
type counting struct {
	net.Conn
	writes atomic.Int64
}

func (c *counting) Write(b []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(b)
}

func TestSend(t *testing.T) {
	got := make(chan []byte, 2)
	s := newServer(t, func(c net.Conn) {
		if shake(c, 1, "ROUTER") != nil {
			return
		}
		for range 5 {
			_, body, err := readFrame(c)
			if err != nil {
				return
			}
			got <- body
		}
		stay(c)
	})
	c, err := Dial(context.Background(), "tcp", s.addr, DEALER, quick())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	counted := &counting{Conn: c.nc}
	c.nc = counted
	large := strings.Repeat("x", 100_000)
	if err := c.Send([]byte(""), []byte("12345678")); err != nil {
		t.Fatal(err)
	}
	if err := c.Send([]byte(large), nil, []byte("end")); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"", "12345678", large, "", "end"} {
		if body := <-got; string(body) != want {
			t.Errorf("frame %d: %d bytes", i, len(body))
		}
	}
	if n := counted.writes.Load(); n != 2 {
		t.Errorf("%d writes for 2 messages", n)
	}
	if err := c.Subscribe(nil); err != ErrOperation {
		t.Errorf("DEALER subscribes: %v", err)
	}
	if err := c.Send(); err != ErrOperation {
		t.Errorf("no frames: %v", err)
	}
}

// The subscription has the form that the version of the peer asks for.
func TestSubscribe(t *testing.T) {
	long := strings.Repeat("t", 300)
	for _, tc := range []struct {
		minor byte
		topic string
		flags byte
		want  string
	}{
		{0, "kv", 0, "\x01kv"},
		{0, "", 0, "\x01"},
		{0, long, flagLong, "\x01" + long},
		{1, "kv", flagCommand, "\x09SUBSCRIBEkv"},
		{1, "", flagCommand, "\x09SUBSCRIBE"},
		{1, long, flagCommand | flagLong, "\x09SUBSCRIBE" + long},
		{2, "kv", flagCommand, "\x09SUBSCRIBEkv"},
	} {
		type frame struct {
			flags byte
			body  string
		}
		got := make(chan frame, 1)
		s := newServer(t, func(c net.Conn) {
			if shake(c, tc.minor, "PUB") != nil {
				return
			}
			flags, body, _ := readFrame(c)
			got <- frame{flags, string(body)}
			stay(c)
		})
		c := dialPeer(t, s, quick())
		if err := c.Send(nil); err != ErrOperation {
			t.Errorf("SUB sends: %v", err)
		}
		if err := c.Subscribe([]byte(tc.topic)); err != nil {
			t.Fatal(err)
		}
		if f := <-got; f != (frame{tc.flags, tc.want}) {
			t.Errorf("3.%d, topic of %d: got %02x %q", tc.minor, len(tc.topic), f.flags, f.body)
		}
	}
}

// stop of onDone waits for what has begun.
func TestOnDone(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	var done atomic.Bool
	began := make(chan bool)
	stop := onDone(ctx, func() {
		close(began)
		time.Sleep(50 * time.Millisecond)
		done.Store(true)
	})
	cancel()
	<-began
	stop()
	if !done.Load() {
		t.Error("still running")
	}

	ctx, cancel = context.WithCancel(context.Background())
	onDone(ctx, func() { t.Error("called after stop") })()
	cancel()
}

// Close and cancel end whatever is under way, from another goroutine, at every
// stage, and leave nothing behind.
func TestCloseAnywhere(t *testing.T) {
	const rounds = 100
	flood := repeat(message("kv", "12345678", "payload"), 1000)
	stages := map[string]script{
		"dialing":   end,
		"silent":    stay,
		"greeting":  send(greeting(1)[:20]),
		"ready":     send(greeting(1), ready("PUB")[:9]),
		"receiving": afterShake(nil, stay),
		"flooded": afterShake(nil, func(c net.Conn) {
			for {
				if _, err := c.Write(flood); err != nil {
					return
				}
			}
		}),
	}
	for name, do := range stages {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, do)
			before := countFDs(t)
			for i := range rounds {
				ctx, cancel := context.WithCancel(context.Background())
				var wg sync.WaitGroup
				wg.Go(func() {
					time.Sleep(time.Duration(i%10) * 100 * time.Microsecond)
					cancel()
				})
				opts := quick()
				opts.HandshakeTimeout = 10 * time.Second
				c, err := Dial(ctx, "tcp", s.addr, SUB, opts)
				if err != nil && name != "dialing" && !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				if err == nil {
					wg.Go(func() { <-ctx.Done(); c.Close() })
					c.Subscribe(nil)
					var m Message
					for err == nil {
						err = c.Recv(&m)
					}
					if !errors.Is(err, net.ErrClosed) {
						t.Fatal(err)
					}
				}
				wg.Wait()
			}
			s.become(do)
			eventually(t, "all descriptors closed", func() bool { return countFDs(t) <= before })
		})
	}
}
