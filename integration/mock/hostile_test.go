package mock

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// hostile is what peers say that are none, up to where they fall silent.
func hostile() map[string][]byte {
	sub, dealer := greeting(0, "SUB"), greeting(0, "DEALER")
	frame := func(flags byte, size uint64) []byte {
		return binary.BigEndian.AppendUint64([]byte{flags | flagLong}, size)
	}
	version := func(major byte) []byte {
		g := bytes.Clone(sub)
		g[10] = major
		return g
	}
	plain := bytes.Clone(sub)
	copy(plain[12:], "PLAIN")
	parts := func(n int, body []byte) []byte {
		return bytes.Repeat(appendFrame(nil, flagMore, body), n)
	}
	return map[string][]byte{
		"nothing":             nil,
		"half a greeting":     sub[:32],
		"a greeting only":     sub[:64],
		"HTTP":                []byte("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something that goes on for a while\r\n\r\n"),
		"ZMTP 2":              version(2),
		"PLAIN security":      plain,
		"no READY":            appendFrame(sub[:64:64], 0, []byte("\x01")),
		"another command":     appendCommand(sub[:64:64], "ERROR", []byte("\x02no")),
		"an empty command":    appendFrame(sub[:64:64], flagCommand, nil),
		"a command cut short": appendFrame(sub[:64:64], flagCommand, []byte("\x20READY")),
		"a property cut short": appendCommand(sub[:64:64], "READY",
			[]byte("\x0bSocket-Type")),
		"a property name cut short": appendCommand(sub[:64:64], "READY", []byte("\x0bSo")),
		"a long property":           appendCommand(sub[:64:64], "READY", []byte("\x0bSocket-Type\xff\xff\xff\xffSUB")),
		"no socket type":            appendCommand(sub[:64:64], "READY", nil),
		"a PUSH":                    greeting(0, "PUSH"),
		"a huge frame, SUB":         append(bytes.Clone(sub), frame(0, 1<<62)...),
		"a huge frame, DEALER":      append(bytes.Clone(dealer), frame(0, 1<<62)...),
		"a huge READY":              append(bytes.Clone(sub[:64]), frame(flagCommand, 1<<40)...),
		"a negative frame":          append(bytes.Clone(dealer), frame(flagMore, 1<<63)...),
		"a long frame, DEALER":      append(bytes.Clone(dealer), frame(0, maxInbound+1)...),
		"parts without end, DEALER": append(bytes.Clone(dealer), parts(4096, nil)...),
		"parts without end, SUB":    append(bytes.Clone(sub), parts(4096, []byte("\x01x"))...),
		"odd commands, SUB":         appendCommand(appendFrame(bytes.Clone(sub), flagCommand, []byte("\xff")), "PING", []byte{0}),
		"odd commands, DEALER":      appendCommand(appendFrame(bytes.Clone(dealer), flagCommand, []byte("\xff")), "PING", []byte{0}),
	}
}

// TestHostilePeers lets every hostile peer talk to both sockets of an engine and
// stay connected: real peers are served, and the engine stops.
func TestHostilePeers(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, ReplayEndpoint: "tcp://127.0.0.1:0"})
		for name, data := range hostile() {
			for _, addr := range []string{e.Addr(), e.ReplayAddr()} {
				_, host, _ := split(addr)
				c, err := net.Dial("tcp", host)
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				defer c.Close()
				c.Write(data)
			}
		}
		s := mustSub(t, e.Addr(), "")
		ctx, cancel := context.WithCancel(t.Context())
		var publishing sync.WaitGroup
		publishing.Go(func() { // some of the hostile subscribe too: nobody can tell when this one has
			for ctx.Err() == nil {
				e.PublishRaw([]byte("x"), Sent)
				time.Sleep(time.Millisecond)
			}
		})
		_, first, _ := s.mustNext(t)
		for i := range uint64(3) {
			if _, got, _ := s.mustNext(t); got != first+1+i {
				t.Errorf("number %d, want %d", got, first+1+i)
			}
		}
		cancel()
		publishing.Wait()
		if got := mustDealer(t, e).ask(t, e.Next()-1); got != fmt.Sprintf("%d=x end", e.Next()-1) {
			t.Errorf("replay %q", got)
		}
		e.Stop()
	}
}

// TestPeersThatMustEnd checks that connections end which nothing good can come of.
func TestPeersThatMustEnd(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, ReplayEndpoint: "tcp://127.0.0.1:0"})
		said := hostile()
		for _, c := range []struct{ addr, peer string }{
			{e.Addr(), "HTTP"}, {e.Addr(), "ZMTP 2"}, {e.Addr(), "PLAIN security"}, {e.Addr(), "no READY"}, {e.Addr(), "another command"},
			{e.Addr(), "an empty command"}, {e.Addr(), "a command cut short"}, {e.Addr(), "a property cut short"}, {e.Addr(), "a property name cut short"},
			{e.Addr(), "a long property"}, {e.Addr(), "no socket type"}, {e.Addr(), "a PUSH"}, {e.Addr(), "a huge frame, SUB"}, {e.Addr(), "a huge READY"},
			{e.ReplayAddr(), "a property cut short"}, {e.ReplayAddr(), "a property name cut short"}, {e.ReplayAddr(), "a PUSH"},
			{e.ReplayAddr(), "a huge frame, DEALER"}, {e.ReplayAddr(), "a negative frame"}, {e.ReplayAddr(), "a long frame, DEALER"},
			{e.ReplayAddr(), "parts without end, DEALER"},
		} {
			_, host, _ := split(c.addr)
			conn, err := net.Dial("tcp", host)
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(30 * time.Second))
			conn.Write(said[c.peer])
			if _, err := io.Copy(io.Discard, conn); err != nil && err.(net.Error).Timeout() {
				t.Errorf("%s, %s: still connected", impl, c.peer)
			}
			conn.Close()
		}
		greedy := mustSub(t, e.Addr(), "")
		for i := range 2000 {
			greedy.Write(appendFrame(nil, 0, binary.BigEndian.AppendUint32([]byte{1}, uint32(i))))
		}
		greedy.mustEnd(t)
		e.Stop()
	}
}

// script is a connection that says what it is given and hears nothing.
type script struct {
	net.Conn
	io.Reader
}

func (s script) Read(p []byte) (int, error)     { return s.Reader.Read(p) }
func (script) Write(p []byte) (int, error)      { return len(p), nil }
func (script) SetDeadline(time.Time) error      { return nil }
func (script) SetReadDeadline(time.Time) error  { return nil }
func (script) SetWriteDeadline(time.Time) error { return nil }
func (script) Close() error                     { return nil }

// FuzzPeer feeds bytes to every kind of socket as if a peer had sent them.
func FuzzPeer(f *testing.F) {
	for _, b := range hostile() {
		if len(b) < 1000 {
			f.Add(b)
		}
	}
	f.Add(appendFrame(greeting(0, "SUB"), 0, []byte("\x01kv")))
	f.Add(appendCommand(greeting(1, "SUB"), "SUBSCRIBE", []byte("kv")))
	f.Add(appendFrame(appendFrame(greeting(1, "DEALER"), flagMore, nil), 0, make([]byte, 8)))
	e, err := NewEngine(Options{})
	if err != nil {
		f.Fatal(err)
	}
	e.PublishRaw([]byte("x"), Sent)
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, open := range []func(net.Conn, bool) (peer, error){openRaw, openZMQ4Pub} {
			p, err := open(script{Reader: bytes.NewReader(b)}, true)
			for err == nil {
				_, _, err = p.subscription()
			}
		}
		e.serveReplay(t.Context(), script{Reader: bytes.NewReader(b)})
	})
}
