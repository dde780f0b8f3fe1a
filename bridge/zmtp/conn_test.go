package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
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
