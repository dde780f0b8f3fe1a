package mock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/integration/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// impls is every implementation of the PUB.
var impls = []string{PUBRaw, PUBZMQ4}

// engine returns a started engine.
func engine(t testing.TB, o Options) *Engine {
	t.Helper()
	e, err := NewEngine(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	return e
}

// subscribed returns a SUB of everything that the engine knows of.
func subscribed(t testing.TB, e *Engine) *sub {
	t.Helper()
	n := e.Subscribers()
	s := mustSub(t, e.Addr(), "")
	wait(t, e, n+1)
	return s
}

func wait(t testing.TB, e *Engine, subscribers int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := e.WaitSubscribers(ctx, subscribers); err != nil {
		t.Fatal(err)
	}
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func TestPublish(t *testing.T) {
	for _, impl := range impls {
		for _, endpoint := range []string{"", "ipc://" + t.TempDir() + "/" + impl} {
			e := engine(t, Options{PUB: impl, Topic: "kv", Endpoint: endpoint, Rank: 3, BlockSize: 4})
			a, b := subscribed(t, e), subscribed(t, e)
			store := model.Event{Hashes: ints(1), Tokens: []int64{1, 2, 3, 4}}
			seq, err := e.Publish(store, model.Event{Op: model.Clear})
			if err != nil || seq != 0 {
				t.Fatalf("number %d, error %v", seq, err)
			}
			want, _ := VLLMMap.Encode(Batch{TS: 1_700_000_000 + 1.0/(1<<20), Events: []model.Event{store, {Op: model.Clear}}, Rank: new(uint32(3)), BlockSize: 4})
			if e.PublishRaw([]byte("x"), Sent) != 1 || e.Next() != 2 {
				t.Error("numbers do not follow")
			}
			for _, s := range []*sub{a, b} {
				for i, payload := range []string{string(want), "x"} {
					if topic, seq, p := s.mustNext(t); topic != "kv" || seq != uint64(i) || p != payload {
						t.Errorf("%s: message %q %d %x, want number %d, %x", impl, topic, seq, p, i, payload)
					}
				}
			}
			if _, err := e.Publish(model.Event{Op: model.Raw, Wire: model.Wire{Value: func() {}}}); err == nil || e.Next() != 2 {
				t.Errorf("an event that nothing can say: error %v, next number %d", err, e.Next())
			}
			e.Stop()
			a.mustEnd(t)
			b.mustEnd(t)
		}
	}
}

func TestTopics(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, Topic: "kv@a"})
		match, other := mustSub(t, e.Addr(), "kv@"), mustSub(t, e.Addr(), "kv@b")
		wait(t, e, 2)
		e.PublishRaw([]byte("1"), Sent)
		e.PublishFrames([]byte("kv@b"), []byte("2"))
		e.PublishFrames([]byte("kv"), []byte("3"))
		if _, _, p := match.mustNext(t); p != "1" {
			t.Errorf("%s: payload %q", impl, p)
		}
		for _, s := range []*sub{match, other} {
			if m, err := s.next(); err != nil || string(bytes.Join(m, nil)) != "kv@b2" {
				t.Errorf("%s: message %q, error %v", impl, m, err)
			}
		}
		// Subscriptions add up, and end one by one.
		match.Write(appendFrame(appendFrame(nil, 0, []byte("\x01kv@")), 0, []byte("\x00kv@")))
		match.Write(appendFrame(appendFrame(nil, 0, []byte("\x00nothing")), 0, []byte("\x01kv@a")))
		match.Write(appendFrame(nil, 0, []byte("\x00kv@a")))
		other.Write(appendFrame(nil, 0, []byte("\x00kv@b")))
		wait1 := func(n int) func() bool { return func() bool { return e.Subscribers() == n } }
		eventually(t, "one subscriber", wait1(1))
		e.PublishRaw([]byte("4"), Sent)
		if _, _, p := match.mustNext(t); p != "4" {
			t.Errorf("%s: payload %q", impl, p)
		}
		match.Write(appendFrame(nil, 0, []byte("\x00kv@")))
		eventually(t, "no subscriber", wait1(0))
		e.Stop()
		match.mustEnd(t)
		other.mustEnd(t)
	}
}

func TestCommandsOfNewerPeers(t *testing.T) {
	e := engine(t, Options{Topic: "kv"})
	s := mustSub(t, e.Addr(), "other")
	wait(t, e, 1)
	s.Write(appendCommand(nil, "PING", []byte("\x00\x01context")))
	flags, body, err := readFrame(s.r)
	if name, data := command(body); err != nil || flags != flagCommand || name != "PONG" || string(data) != "context" {
		t.Errorf("answer %x %q, error %v", flags, body, err)
	}
	s.Write(appendCommand(appendCommand(appendCommand(nil, "PING", nil), "FUTURE", []byte("x")), "CANCEL", []byte("other")))
	eventually(t, "no subscriber", func() bool { return e.Subscribers() == 0 })
	s.Write(appendCommand(nil, "SUBSCRIBE", []byte("k")))
	wait(t, e, 1)
	e.PublishRaw([]byte("x"), Sent)
	if flags, _, err := readFrame(s.r); err != nil || flags != flagCommand { // the PONG of the empty PING
		t.Errorf("frame %x, error %v", flags, err)
	}
	if topic, _, p := s.mustNext(t); topic != "kv" || p != "x" {
		t.Errorf("message %q %q", topic, p)
	}
}

func TestConnect(t *testing.T) {
	for _, impl := range impls {
		ln, endpoint, err := listen("tcp://127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		e := engine(t, Options{PUB: impl, Endpoint: endpoint, Connect: true})
		for i := range uint64(3) { // it dials again when a connection ends
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			s := newSub(c)
			if err := s.shake(""); err != nil {
				t.Fatal(err)
			}
			wait(t, e, 1)
			e.PublishRaw([]byte("x"), Sent)
			if _, seq, _ := s.mustNext(t); seq != i {
				t.Errorf("number %d, want %d", seq, i)
			}
			s.Close()
			eventually(t, "the subscriber is gone", func() bool { return e.Subscribers() == 0 })
		}
		if e.Addr() != endpoint {
			t.Errorf("Addr %q, want %q", e.Addr(), endpoint)
		}
		ln.Close()
		e.Stop()
	}
}

func TestStopAndStart(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, ReplayEndpoint: "tcp://127.0.0.1:0"})
		if err := e.Start(); !errors.Is(err, ErrRunning) {
			t.Errorf("second Start: %v", err)
		}
		addr, replay := e.Addr(), e.ReplayAddr()
		s := subscribed(t, e)
		e.PublishRaw([]byte("a"), Sent)
		if _, seq, _ := s.mustNext(t); seq != 0 {
			t.Errorf("number %d", seq)
		}
		e.Stop()
		s.mustEnd(t)
		e.Stop()
		if seq := e.PublishRaw([]byte("b"), Sent); seq != 1 || e.Subscribers() != 0 {
			t.Errorf("number %d, %d subscribers while stopped", seq, e.Subscribers())
		}
		if err := e.PublishFrames([]byte("x")); !errors.Is(err, ErrStopped) {
			t.Errorf("PublishFrames: %v", err)
		}
		if err := e.Resend(0); !errors.Is(err, ErrStopped) {
			t.Errorf("Resend: %v", err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		if e.Addr() != addr || e.ReplayAddr() != replay {
			t.Errorf("addresses changed from %s, %s to %s, %s", addr, replay, e.Addr(), e.ReplayAddr())
		}
		s = subscribed(t, e)
		if got := mustDealer(t, e).ask(t, 0); got != "0=a 1=b end" {
			t.Errorf("replay %q", got)
		}
		e.PublishRaw([]byte("c"), Sent)
		if _, seq, p := s.mustNext(t); seq != 2 || p != "c" {
			t.Errorf("message %d %q", seq, p)
		}
		e.Stop()
	}
}

func TestRestart(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	seen := map[string]bool{}
	for life := range 4 {
		if life == 3 { // the same without a socket in between
			e.NewLife()
		} else if life > 0 {
			if err := e.Restart(); err != nil {
				t.Fatal(err)
			}
		}
		s := subscribed(t, e)
		for i := range uint64(5000) { // longer than the gap between lives
			if seq, err := e.Publish(); err != nil || seq != i {
				t.Fatalf("number %d, error %v", seq, err)
			}
		}
		for range 5000 {
			_, _, p := s.mustNext(t)
			if seen[p] {
				t.Fatal("the same bytes twice")
			}
			seen[p] = true
		}
		if got := len(mustDealer(t, e).answer(t, 0)); got != 5001 {
			t.Errorf("replay of %d batches", got-1)
		}
		s.Close()
		eventually(t, "nobody", func() bool { return e.Subscribers() == 0 })
	}
}

func TestDeliveries(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	s := subscribed(t, e)
	for i, d := range []Delivery{Sent, Lost, Gone, Unkept, Sent} {
		if seq := e.PublishRaw(fmt.Append(nil, i), d); seq != uint64(i) {
			t.Errorf("number %d, want %d", seq, i)
		}
	}
	e.Skip(2)
	e.PublishRaw([]byte("7"), Sent)
	e.Seek(1<<64 - 1)
	e.PublishRaw([]byte("max"), Sent)
	e.PublishRaw([]byte("0"), Sent) // numbers wrap
	for _, seq := range []uint64{0, 1, 3, 7} {
		if err := e.Resend(seq); err != nil {
			t.Errorf("Resend(%d): %v", seq, err)
		}
	}
	for _, seq := range []uint64{2, 5} {
		if err := e.Resend(seq); !errors.Is(err, ErrNotKept) {
			t.Errorf("Resend(%d): %v", seq, err)
		}
	}
	if _, err := e.PublishAs(Lost); err != nil {
		t.Error(err)
	}
	e.PublishFrames([]byte("end"))
	var got []string
	for {
		m, err := s.next()
		if err != nil {
			t.Fatal(err)
		}
		if len(m) == 1 {
			break
		}
		got = append(got, fmt.Sprintf("%d=%s", binary.BigEndian.Uint64(m[1]), m[2]))
	}
	want := "0=0 3=3 4=4 7=7 18446744073709551615=max 0=0 0=0 1=1 3=3 7=7"
	if strings.Join(got, " ") != want {
		t.Errorf("live %v, want %v", got, want)
	}
	e.SetReplay(func(r *Replay) { r.Limit = 5 })
	if got := mustDealer(t, e).ask(t, 0); got != "0=0 1=1 4=4 7=7 18446744073709551615=max end" {
		t.Errorf("replay %q", got)
	}
}

// TestHighWaterMark stalls one of two subscribers: it loses what its queue does
// not hold, in order and counted, and the other nothing.
func TestHighWaterMark(t *testing.T) {
	for _, impl := range impls {
		const hwm, size = 10, 60_000
		e := engine(t, Options{PUB: impl, HWM: hwm})
		stalled, reading := subscribed(t, e), subscribed(t, e)
		payload := make([]byte, size)
		var sent, read uint64
		for ; e.Dropped() == 0 || sent%100 != 0; sent++ {
			e.PublishRaw(payload, Sent)
			if _, seq, _ := reading.mustNext(t); seq != read {
				t.Fatalf("%s: the other subscriber got %d after %d", impl, seq, read)
			}
			read++
			if e.Backlog() > hwm {
				t.Fatalf("%s: %d messages wait", impl, e.Backlog())
			}
			if sent > 100_000 {
				t.Fatalf("%s: nothing dropped", impl)
			}
		}
		var got []uint64
		for uint64(len(got)) < sent-e.Dropped() {
			_, seq, p := stalled.mustNext(t)
			if len(p) != size || len(got) > 0 && seq <= got[len(got)-1] {
				t.Fatalf("%s: message %d of %d bytes after %v", impl, seq, len(p), got)
			}
			got = append(got, seq)
		}
		if got[hwm-1] != hwm-1 {
			t.Errorf("%s: dropped before the queue was full: %v", impl, got)
		}
		e.PublishRaw([]byte("x"), Sent)
		if _, seq, _ := stalled.mustNext(t); seq != sent {
			t.Errorf("%s: after the stall number %d, want %d", impl, seq, sent)
		}
		e.Stop()
	}
}

// TestSubscribersThatGoWrong ends connections of which one direction works on.
func TestSubscribersThatGoWrong(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, HWM: 10, Endpoint: "ipc://" + t.TempDir() + "/pub"})
		none := func() bool { return e.Subscribers() == 0 }
		deaf := subscribed(t, e)
		deaf.Conn.(*net.UnixConn).CloseRead()
		e.PublishRaw([]byte("x"), Sent)
		eventually(t, "the deaf one is gone", none)

		stalled := subscribed(t, e)
		for e.Dropped() == 0 { // its connection is full, and its writer waits
			e.PublishRaw(make([]byte, 60_000), Sent)
		}
		stalled.Write(bytes.Repeat([]byte{0xff}, 9)) // a frame longer than any
		eventually(t, "the stalled one is gone", none)
		e.Stop()
	}
}

func TestNothingIsServedAfterTheEnd(t *testing.T) {
	l := newLinks("", func(context.Context, net.Conn) { t.Error("served") })
	l.close()
	ours, theirs := net.Pipe()
	l.run(ours) // accepted while the links closed
	if _, err := theirs.Write([]byte("x")); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("the connection lives on: %v", err)
	}
}

func TestRing(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0", Ring: 3})
	d := mustDealer(t, e)
	if got := d.ask(t, 0); got != "end" {
		t.Errorf("replay of nothing: %q", got)
	}
	for i := range 8 {
		e.PublishRaw(fmt.Append(nil, i), Sent)
		var want []string
		for j := max(0, i-2); j <= i; j++ {
			want = append(want, fmt.Sprintf("%d=%d", j, j))
		}
		if got := d.ask(t, 0); got != strings.Join(append(want, "end"), " ") {
			t.Errorf("replay %q, want %v", got, want)
		}
		if got := d.ask(t, uint64(i)); got != fmt.Sprintf("%d=%d end", i, i) {
			t.Errorf("replay of the newest: %q", got)
		}
		if got := d.ask(t, uint64(i)+1); got != "end" {
			t.Errorf("replay of the future: %q", got)
		}
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"dialect": {Dialect: "x"}, "PUB": {PUB: "x"}, "block size": {BlockSize: -1}, "HWM": {HWM: -1}, "ring": {Ring: -1},
	} {
		if _, err := NewEngine(o); err == nil {
			t.Errorf("bad %s: no error", name)
		}
	}
	for _, endpoint := range []string{"127.0.0.1:5557", "tcp://127.0.0.1", "tcp://127.0.0.1:", "ipc://", "udp://127.0.0.1:1", "://"} {
		for _, o := range []Options{{Endpoint: endpoint}, {Endpoint: endpoint, Connect: true}, {ReplayEndpoint: endpoint}} {
			e, err := NewEngine(o)
			if err != nil {
				t.Fatal(err)
			}
			if err := e.Start(); !errors.Is(err, ErrEndpoint) {
				t.Errorf("%+v: %v", o, err)
			}
		}
	}
	one := engine(t, Options{Endpoint: "tcp://*:0", ReplayEndpoint: "tcp://127.0.0.1:0"})
	for _, o := range []Options{{Endpoint: one.ReplayAddr()}, {ReplayEndpoint: one.ReplayAddr()}} {
		e, err := NewEngine(o)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err == nil {
			t.Errorf("%+v: a taken port is free", o)
		}
		if _, err := e.Publish(); err != nil {
			t.Errorf("an engine that could not start: %v", err)
		}
	}
	path := "ipc://" + t.TempDir() + "/stale"
	ln, _, err := listen(path)
	if err != nil {
		t.Fatal(err)
	}
	ln.(interface{ SetUnlinkOnClose(bool) }).SetUnlinkOnClose(false)
	ln.Close()
	engine(t, Options{Endpoint: path}) // what a killed engine leaves is no obstacle
}

// TestChurn publishes from several goroutines while subscribers come and go and
// the engine stops and starts.
func TestChurn(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, ReplayEndpoint: "tcp://127.0.0.1:0", HWM: 50, Ring: 100})
		ctx, cancel := context.WithCancel(context.Background())
		var work sync.WaitGroup
		for range 3 {
			work.Go(func() {
				for ctx.Err() == nil {
					e.Publish(model.Event{Hashes: ints(1), Tokens: make([]int64, 16)})
					e.Resend(e.Next() - 1)
					time.Sleep(50 * time.Microsecond)
				}
			})
		}
		for range 3 {
			work.Go(func() {
				for ctx.Err() == nil {
					if s, err := dialSub(e.Addr(), ""); err == nil {
						s.SetDeadline(time.Now().Add(time.Second))
						s.skip(20)
						s.Close()
					}
					if d, err := dialDealer(e.ReplayAddr()); err == nil {
						d.SetDeadline(time.Now().Add(time.Second))
						d.request(0)
						d.next()
						d.Close()
					}
				}
			})
		}
		for range 10 {
			wait(t, e, 1)
			if err := e.Restart(); err != nil {
				t.Error(err)
			}
		}
		eventually(t, "a replay request", func() bool {
			good, _ := e.Requests()
			return len(good) > 0
		})
		cancel()
		e.Stop()
		work.Wait()
	}
}
