package bridge_test

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// sequenceCase is a case of engine/testdata/cases.json that is about numbers: what
// comes live, what is asked for and answered, and what has to come of it.
type sequenceCase struct {
	ID     string
	Config struct {
		Topic         string
		InitialCursor uint64 `json:"initial_cursor"`
	}
	Input []struct {
		Op     string
		Start  uint64
		Frames []string `json:"frames_hex"`
	}
	Expected struct {
		ForwardedSeqs []uint64                    `json:"forwarded_seqs"`
		Forwarded     [][]any                     `json:"forwarded"`
		Gaps          []struct{ From, To uint64 } `json:"gaps"`
		Duplicates    int64                       `json:"duplicates_dropped"`
		Rejected      int64
	}
}

func (c *sequenceCase) frames(i int) [][]byte {
	var out [][]byte
	for _, f := range c.Input[i].Frames {
		b, err := hex.DecodeString(f)
		if err != nil {
			panic(err)
		}
		out = append(out, b)
	}
	return out
}

// answerer is a replay socket that gives the answers of a case: nothing but the end
// before a request is expected.
type answerer struct {
	mu       sync.Mutex
	answer   [][][]byte // messages
	starts   []uint64   // that were asked for since
	requests int
}

func (a *answerer) serve(c *routerConn) {
	start, err := c.request()
	if err != nil {
		return
	}
	a.mu.Lock()
	answer := a.answer
	a.mu.Unlock()
	for _, frames := range answer {
		if c.send(frames...) != nil {
			break // the bridge has all that it needs, and has closed
		}
	}
	if answer == nil {
		c.end()
	}
	a.mu.Lock()
	a.requests++
	a.starts = append(a.starts, start)
	a.mu.Unlock()
	c.hold()
}

// expect has later requests answered with messages; nil is no answer at all.
func (a *answerer) expect(messages [][][]byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answer, a.starts = messages, nil
}

func (a *answerer) asked() []uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.starts)
}

// TestSequenceCases plays the cases about numbers to a whole bridge.
func TestSequenceCases(t *testing.T) {
	raw, err := os.ReadFile("engine/testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Cases []json.RawMessage }
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	played := 0
	for _, one := range file.Cases {
		var head struct{ ID string }
		if err := json.Unmarshal(one, &head); err != nil {
			t.Fatal(err)
		}
		if head.ID[0] != 'S' || head.ID == "S05" || head.ID == "S21" || head.ID == "S27" { // notes, and two publishers at one bound socket
			continue
		}
		var c sequenceCase
		if err := json.Unmarshal(one, &c); err != nil {
			t.Fatalf("%s: %v", head.ID, err)
		}
		played++
		t.Run(c.ID, func(t *testing.T) { c.play(t) })
	}
	if played < 15 {
		t.Errorf("%d cases", played)
	}
}

func (c *sequenceCase) play(t *testing.T) {
	r := newRig(t)
	r.loose = true
	socket := &answerer{}
	a := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" })
	a.worker.ReplayEndpoint = newRouter(t, socket.serve).endpoint()
	a.worker.Topic, a.worker.Engine = c.Config.Topic, ""
	e := r.bridge(func(c *bridge.Config) { c.RepairTimeout = time.Second })
	e.serve(a)
	r.await("the replay after connecting is over", func() bool { return len(socket.asked()) > 0 })
	armed := false // the answer of the next request is set: it may come before the case says so
	for i, in := range c.Input {
		switch in.Op {
		case "live":
			if err := a.PublishFrames(c.frames(i)...); err != nil {
				t.Fatal(err)
			}
		case "disconnect":
			r.await("all is read", func() bool { return a.Backlog() == 0 })
			r.read("something is in the log", func() bool { return r.source(a).Batches })
			a.Stop()
			socket.expect(c.answer(i))
			armed = true
		case "reconnect":
			a.start()
			e.connected(a)
		case "expect_replay_request":
			if !armed {
				socket.expect(c.answer(i))
			}
			armed = false
			r.await("it is asked for", func() bool {
				return slices.ContainsFunc(socket.asked(), func(s uint64) bool { return s == in.Start || s+1 == in.Start })
			})
		}
	}
	var last uint64
	resets := 1
	for _, f := range c.Expected.Forwarded {
		if f[0] == "reset" {
			resets++
		}
	}
	for i, in := range c.Input { // the last number that comes at all
		if f := c.frames(i); (in.Op == "live" || in.Op == "replay_reply") && len(f[len(f)-2]) == 8 {
			if seq := be(f[len(f)-2]); seq != 1<<64-1 && (resets == 1 || i > 2) {
				last = max(last, seq)
			}
		}
	}
	r.read("the last batch is in the log", func() bool {
		s := r.source(a)
		return s.Batches && s.Last == last && len(s.Resets) == resets
	})
	if c.Expected.Gaps != nil {
		var have, want []feed.Gap
		for _, g := range r.source(a).Gaps {
			if g.From >= c.Config.InitialCursor {
				have = append(have, feed.Gap{From: g.From, To: g.To})
			}
		}
		for _, g := range c.Expected.Gaps {
			want = append(want, feed.Gap{From: g.From, To: g.To})
		}
		if !slices.Equal(have, want) {
			t.Errorf("gaps %v, want %v", have, want)
		}
	}
	if n := e.count("kvmesh.bridge.duplicates"); n < c.Expected.Duplicates {
		t.Errorf("%d duplicates, want %d", n, c.Expected.Duplicates)
	}
	if n := e.count("kvmesh.bridge.dropped", "end_marker"); n != c.Expected.Rejected {
		t.Errorf("%d messages rejected, want %d", n, c.Expected.Rejected)
	}
}

// answer returns the replies that follow the next request from input i on.
func (c *sequenceCase) answer(i int) [][][]byte {
	for i < len(c.Input) && c.Input[i].Op != "expect_replay_request" {
		i++
	}
	out := [][][]byte{}
	for i++; i < len(c.Input) && c.Input[i].Op == "replay_reply"; i++ {
		out = append(out, c.frames(i))
	}
	return out
}

func be(b []byte) uint64 {
	var n uint64
	for _, x := range b {
		n = n<<8 | uint64(x)
	}
	return n
}
