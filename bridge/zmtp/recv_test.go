package zmtp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

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

// A peer may pause behind an empty frame, when nothing is kept but where that was.
func TestPauseBehindAnEmptyFrame(t *testing.T) {
	for _, off := range []int{0, 2, 4166} {
		in := &input{buffers: NewBuffers(), parts: []span{{off: off}, {off: off}}, r: off, w: off}
		in.buf = in.buffers.get(bufLoad)
		in.rest()
		if in.buf != nil {
			t.Error("memory is held that nothing is in")
		}
		n := copy(in.room(1), "next")
		in.arrived(n)
		for _, at := range in.parts {
			if frame := in.view(at); len(frame) != 0 {
				t.Errorf("an empty frame is %q", frame)
			}
		}
		if got := string(in.buffered()); got != "next" {
			t.Errorf("got %q", got)
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
	wait()
	if c.in.buf != nil {
		t.Errorf("while nothing comes: buffer of %d bytes", len(c.in.buf))
	}
	engine.Write(message("kv", "small")[:7])
	if err := wait(); err != os.ErrDeadlineExceeded || len(c.in.buf) != bufMin {
		t.Errorf("a part of a small message: %v, buffer of %d bytes", err, len(c.in.buf))
	}
	engine.Write(message("kv", "small")[7:])
	recv()
	if got := strings.Join(toStrings(m.Frames), "|"); got != "kv|small" {
		t.Errorf("message %q", got)
	}
	go engine.Write(load)
	for range 1000 {
		recv()
	}
	if n := len(c.in.buf); n != bufLoad {
		t.Errorf("under load again: buffer of %d bytes", n)
	}
	wait()
	if c.in.buf != nil {
		t.Errorf("while nothing comes again: buffer of %d bytes", len(c.in.buf))
	}
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
