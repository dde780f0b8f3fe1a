package mock

import (
	"fmt"
	"testing"
	"time"
)

func TestReplay(t *testing.T) {
	e := engine(t, Options{Topic: "kv", ReplayEndpoint: "tcp://127.0.0.1:0"})
	for _, p := range []string{"a", "b", "c", "d", "e", "f"} {
		e.PublishRaw([]byte(p), Sent)
	}
	d := mustDealer(t, e)
	for _, c := range []struct {
		name   string
		replay Replay
		from   uint64
		want   []string // of one request after the other
	}{
		{"all", Replay{}, 0, []string{"0=a 1=b 2=c 3=d 4=e 5=f end"}},
		{"from", Replay{}, 4, []string{"4=e 5=f end"}},
		{"topic", Replay{Topic: true}, 4, []string{"kv/4=e kv/5=f /end"}},
		{"liveness probe", Replay{}, 1<<64 - 1, []string{"end"}},
		{"holes", Replay{Holes: []uint64{1, 3}}, 0, []string{"0=a 2=c 4=e 5=f end", "0=a 2=c 4=e 5=f end"}},
		{"lossy", Replay{Lossy: 2, Skip: []uint64{4, 5}, Holes: []uint64{3}}, 2, []string{"2=c end", "2=c end", "2=c 4=e 5=f end"}},
		{"limit", Replay{Limit: 2, Holes: []uint64{3}}, 2, []string{"2=c 4=e end"}},
		{"early", Replay{Early: 2}, 4, []string{"2=c 3=d 4=e 5=f end"}},
		{"early at the start", Replay{Early: 9}, 5, []string{"0=a 1=b 2=c 3=d 4=e 5=f end"}},
		{"twice", Replay{Twice: true, Topic: true}, 4, []string{"kv/4=e kv/4=e kv/5=f kv/5=f /end"}},
		{"delay", Replay{Delay: time.Millisecond}, 5, []string{"5=f end"}},
	} {
		e.SetReplay(func(r *Replay) { *r = c.replay })
		for i, want := range c.want {
			if got := d.ask(t, c.from); got != want {
				t.Errorf("%s, request %d: %q, want %q", c.name, i, got, want)
			}
		}
	}
}

// A connection may be used for more requests than one message may be long.
func TestManyRequests(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	d := mustDealer(t, e)
	for i := range uint64(2000) {
		e.PublishRaw(nil, Sent)
		if got := d.ask(t, i); got != fmt.Sprintf("%d= end", i) {
			t.Fatalf("request %d: %q", i, got)
		}
	}
}

func TestReplayWithoutEnd(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0", Replay: Replay{NoEnd: true}})
	e.PublishRaw([]byte("a"), Sent)
	d := mustDealer(t, e)
	d.request(0)
	if m, err := d.next(); err != nil || readable(m) != "0=a" {
		t.Errorf("%q, %v", readable(m), err)
	}
	e.SetReplay(func(r *Replay) { r.NoEnd = false })
	if got := d.ask(t, 9); got != "end" {
		t.Errorf("the next thing is %q, want the end of the second answer", got)
	}
}

func TestSilentReplay(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0", Replay: Replay{Silent: 2}})
	d := mustDealer(t, e)
	for from := range uint64(3) {
		d.request(from)
	}
	e.PublishRaw([]byte("a"), Sent)
	if m, err := d.next(); err != nil || readable(m) != "end" { // the answer to the third
		t.Errorf("%q, %v", readable(m), err)
	}
	e.SetReplay(func(r *Replay) { r.Silent = -1 })
	for range 3 {
		d.request(0)
	}
	eventually(t, "six requests", func() bool {
		good, _ := e.Requests()
		return len(good) == 6
	})
	e.SetReplay(func(r *Replay) { r.Silent = 0 })
	if got := d.ask(t, 0); got != "0=a end" {
		t.Errorf("%q", got)
	}
	good, bad := e.Requests()
	for i, want := range []uint64{0, 1, 2, 0, 0, 0, 0} {
		if len(good) != 7 || good[i].From != want || time.Since(good[i].At) > time.Minute {
			t.Errorf("requests %v", good)
		}
	}
	if bad != 0 {
		t.Errorf("%d bad requests", bad)
	}
}

func TestDelayEndsWithTheEngine(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0", Replay: Replay{Delay: time.Hour}})
	d := mustDealer(t, e)
	d.request(0)
	eventually(t, "a request", func() bool {
		good, _ := e.Requests()
		return len(good) == 1
	})
	e.Stop()
	d.mustEnd(t)
}

func TestMalformedRequestsGetNoAnswer(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	d := mustDealer(t, e)
	eight := make([]byte, 8)
	for _, m := range []message{{eight}, {nil, eight[:7]}, {nil, nil}, {nil, eight, nil}, {eight, eight}, {nil, nil, eight}} {
		var b []byte
		for i, f := range m {
			var flags byte
			if i < len(m)-1 {
				flags = flagMore
			}
			b = appendFrame(b, flags, f)
		}
		d.Write(b)
	}
	if got := d.ask(t, 3); got != "end" {
		t.Errorf("%q", got)
	}
	if good, bad := e.Requests(); len(good) != 1 || bad != 6 {
		t.Errorf("%d good requests, %d bad", len(good), bad)
	}
}

// TestReplayClientThatDoesNotRead asks for more than the sockets hold and reads
// nothing: others are served, and the engine stops.
func TestReplayClientThatDoesNotRead(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	for range 2000 {
		e.PublishRaw(make([]byte, 32<<10), Sent)
	}
	stuck := mustDealer(t, e)
	stuck.request(0)
	eventually(t, "a request", func() bool {
		good, _ := e.Requests()
		return len(good) == 1
	})
	e.SetReplay(func(r *Replay) { r.Limit = 1 })
	d := mustDealer(t, e)
	if got := len(d.answer(t, 5)); got != 2 {
		t.Errorf("answer of %d messages, want 2", got)
	}
	e.Stop()
	d.mustEnd(t)
}

func TestRequestsAreBounded(t *testing.T) {
	e, err := NewEngine(Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(maxRequests + 5) {
		e.request(i)
	}
	if good, _ := e.Requests(); len(good) != maxRequests || good[0].From != 5 {
		t.Errorf("%d requests from %d on", len(good), good[0].From)
	}
}
