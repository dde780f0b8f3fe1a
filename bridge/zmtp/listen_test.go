package zmtp

import (
	"context"
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

// connect follows a script on a connection to address, as soon as someone
// listens there. It returns when the script is done.
func connect(t testing.TB, network, addr string, do script) {
	var c net.Conn
	eventually(t, "somebody listens on "+addr, func() (ok bool) {
		var err error
		c, err = net.Dial(network, addr)
		return err == nil
	})
	defer c.Close()
	do(c)
}

// A bound subscription reads from one publisher after the other, and turns a
// second one away while the first is there.
func TestBind(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			addr := freeAddr(t)
			if network == "unix" {
				addr = socketPath(t)
			}
			var h recorder
			stop := run(t, network, addr, true, quick(), &h)
			var wg sync.WaitGroup
			defer wg.Wait()
			defer stop()
			for i, text := range []string{"first", "second", "third"} {
				leave := make(chan bool)
				wg.Go(func() {
					connect(t, network, addr, func(c net.Conn) {
						go func() { <-leave; c.Close() }()
						publisher(1, text)(c)
					})
				})
				eventually(t, text+" is read", h.got(text))
				for n := range 3 {
					connect(t, network, addr, publisher(1, "intruder"))
					eventually(t, "intruder reported", h.is(func(r *recorder) bool { return len(r.refused) == 3*i+n+1 }))
				}
				close(leave)
				eventually(t, text+" is gone", h.is(func(r *recorder) bool { return len(r.disconnected) == i+1 }))
			}
			h.mu.Lock()
			defer h.mu.Unlock()
			if len(h.connected) != 3 || h.last[0] != "third" {
				t.Errorf("connected %v, last %v", h.connected, h.last)
			}
			for _, peer := range append(h.connected, h.refused...) {
				if network == "unix" && peer != addr || network == "tcp" && !strings.HasPrefix(peer, "127.0.0.1:") {
					t.Errorf("peer is called %q", peer)
				}
			}
		})
	}
}

// An intruder is reported also while the publisher says nothing.
func TestBindRefusedInSilence(t *testing.T) {
	addr := freeAddr(t)
	var h recorder
	stop := run(t, "tcp", addr, true, quick(), &h)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	wg.Go(func() { connect(t, "tcp", addr, afterShake(message("kv"), stay)) })
	eventually(t, "first is read", h.got("kv"))
	for n := range 20 {
		connect(t, "tcp", addr, stay)
		eventually(t, "intruder reported", h.is(func(r *recorder) bool { return len(r.refused) == n+1 }))
	}
	if errs := h.errs(); errs != "[]" {
		t.Errorf("publisher lost: %v", errs)
	}
}

// Peers that are no publisher don't keep one out.
func TestBindHostilePeers(t *testing.T) {
	for _, tc := range badHandshakes {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			addr := freeAddr(t)
			var h recorder
			opts := quick()
			opts.HandshakeTimeout = 10 * time.Second
			if tc.want == ErrHandshakeTimeout {
				opts.HandshakeTimeout = 100 * time.Millisecond
			}
			stop := run(t, "tcp", addr, true, opts, &h)
			var wg sync.WaitGroup
			defer wg.Wait()
			defer stop()
			const peers = 10
			var dialled atomic.Int64
			for range peers {
				wg.Go(func() {
					connect(t, "tcp", addr, func(c net.Conn) { dialled.Add(1); tc.do(c) })
				})
			}
			eventually(t, "told why", h.lost(is(tc.want)))
			wg.Go(func() { connect(t, "tcp", addr, publisher(0, "kv", "payload")) })
			eventually(t, "proper publisher read from", h.got("kv", "payload"))
			eventually(t, "all have dialled", func() bool { return dialled.Load() == peers })
		})
	}
}

// Nor do they while they are still being waited for.
func TestBindSilentPeers(t *testing.T) {
	const silent = 3
	addr := freeAddr(t)
	opts := quick()
	opts.HandshakeTimeout = time.Hour
	var h recorder
	stop := run(t, "tcp", addr, true, opts, &h)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	var greeted atomic.Int64
	for range silent {
		wg.Go(func() {
			connect(t, "tcp", addr, func(c net.Conn) {
				io.ReadFull(c, make([]byte, greetingLen))
				greeted.Add(1)
				stay(c)
			})
		})
	}
	eventually(t, "all silent peers are greeted", func() bool { return greeted.Load() == silent })
	wg.Go(func() { connect(t, "tcp", addr, publisher(1, "kv")) })
	eventually(t, "publisher read from", h.got("kv"))
}

// Who was turned away before the publisher is read from is reported, too.
func TestServeReportsOthers(t *testing.T) {
	s := newServer(t, afterShake(nil, cut))
	var h recorder
	sub, err := NewSub("tcp", s.addr, true, nil, quick(), &h)
	if err != nil {
		t.Fatal(err)
	}
	a := &acceptor{s: sub, notes: make(chan note, 2)}
	a.post(note{err: ErrGreeting}) // beside it, not of it
	a.post(note{refused: "early"})
	sub.serve(context.Background(), dialPeer(t, s, quick()), a.tellRefused)
	if len(h.refused) != 1 || len(h.connected) != 1 || len(h.disconnected) != 1 {
		t.Errorf("refused %v, connected %v, disconnected %v", h.refused, h.connected, h.disconnected)
	}
}

// stop waits for all goroutines, and closes a publisher that was handed over and
// never read from.
func TestStop(t *testing.T) {
	s := newServer(t, publisher(1, "kv"))
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := dialPeer(t, s, quick())
	ctx, cancel := context.WithCancel(context.Background())
	a := &acceptor{ln: ln, cancel: cancel, peers: make(chan *Conn, 1)}
	a.wg.Go(func() {
		<-ctx.Done()
		time.Sleep(50 * time.Millisecond)
		a.peers <- c
	})
	a.stop()
	if !c.closed.Load() {
		t.Error("connection is open")
	}
}

// An address in use is tried again until it is free.
func TestBindAddressInUse(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			addr := "127.0.0.1:0"
			if network == "unix" {
				addr = socketPath(t)
			}
			ln, err := net.Listen(network, addr)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			addr = ln.Addr().String()
			var h recorder
			stop := run(t, network, addr, true, quick(), &h)
			eventually(t, "several attempts", h.is(func(r *recorder) bool { return len(r.disconnected) > 3 }))
			if !h.lost(is(syscall.EADDRINUSE))() {
				t.Errorf("errors %v", h.errs())
			}
			if network == "unix" {
				if _, err := os.Stat(addr); err != nil {
					t.Errorf("socket of another process was removed: %v", err)
				}
			}
			ln.Close()
			var wg sync.WaitGroup
			defer wg.Wait()
			defer stop()
			wg.Go(func() { connect(t, network, addr, publisher(1, "kv")) })
			eventually(t, "publisher read from", h.got("kv"))
		})
	}
}

// Of a unix socket the file goes at the end, a stale one is replaced, and one
// that is no socket is left alone.
func TestBindSocketFile(t *testing.T) {
	path := socketPath(t)
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	ln.(*net.UnixListener).SetUnlinkOnClose(false)
	ln.Close()
	if _, err := os.Stat(path); err != nil {
		t.Fatal("no stale socket: ", err)
	}
	var h recorder
	stop := run(t, "unix", path, true, quick(), &h)
	var wg sync.WaitGroup
	wg.Go(func() { connect(t, "unix", path, publisher(1, "kv")) })
	eventually(t, "publisher read from", h.got("kv"))
	stop()
	wg.Wait()
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("socket file is left: %v", err)
	}

	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	var h2 recorder
	stop = run(t, "unix", path, true, quick(), &h2)
	eventually(t, "several attempts", h2.is(func(r *recorder) bool { return len(r.disconnected) > 3 }))
	stop()
	if b, _ := os.ReadFile(path); string(b) != "precious" {
		t.Error("file was removed")
	}
}

// Run ends at every stage of a listener, with a blocked handler too, and leaves
// nothing behind.
func TestRunEndsAnywhere(t *testing.T) {
	const rounds = 50
	addr := freeAddr(t)
	silent := newServer(t, stay)
	busy := newServer(t, publisher(1, "kv"))
	for name, tc := range map[string]struct {
		addr   string
		bind   bool
		peers  []script // of peers that connect
		blocks bool
	}{
		"nobody there":     {addr: addr},
		"silent":           {addr: silent.addr},
		"reading":          {addr: busy.addr},
		"blocked":          {addr: busy.addr, blocks: true},
		"listening":        {addr: addr, bind: true},
		"bound, silent":    {addr: addr, bind: true, peers: []script{stay}},
		"bound, reading":   {addr: addr, bind: true, peers: []script{publisher(1, "kv")}},
		"bound, blocked":   {addr: addr, bind: true, peers: []script{publisher(1, "kv")}, blocks: true},
		"bound, two peers": {addr: addr, bind: true, peers: []script{publisher(1, "kv"), publisher(1, "kv")}},
	} {
		t.Run(name, func(t *testing.T) {
			fds := countFDs(t)
			for i := range rounds {
				ctx, cancel := context.WithCancel(context.Background())
				var h recorder
				if tc.blocks {
					h.onMessage = func([][]byte) { <-ctx.Done() }
				}
				s, err := NewSub("tcp", tc.addr, tc.bind, nil, quick(), &h)
				if err != nil {
					t.Fatal(err)
				}
				var wg sync.WaitGroup
				for _, do := range tc.peers {
					wg.Go(func() {
						for ctx.Err() == nil {
							if c, err := net.Dial("tcp", tc.addr); err == nil {
								do(c)
								c.Close()
							}
						}
					})
				}
				wg.Go(func() {
					time.Sleep(time.Duration(i%10) * 300 * time.Microsecond)
					cancel()
				})
				if err := s.Run(ctx); err != context.Canceled {
					t.Fatalf("Run returned %v", err)
				}
				wg.Wait()
				if n := countFDs(t); tc.bind && n > fds {
					t.Fatalf("descriptors: %d, then %d", fds, n)
				}
				if open := len(h.connected); open > 1 || open == 1 && len(h.disconnected) == 0 {
					t.Fatalf("connected %v, disconnected %v", h.connected, h.disconnected)
				}
			}
			eventually(t, "all descriptors closed", func() bool { return countFDs(t) <= fds })
		})
	}
}
