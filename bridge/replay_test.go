package bridge_test

import (
	"fmt"
	"net"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// A replay socket that is slow, forgetful or wrong some of the time costs requests,
// and no batches.
func TestRepairsThatTakeLonger(t *testing.T) {
	const missing = 20
	var all []uint64
	for seq := range uint64(missing) {
		all = append(all, seq+1)
	}
	for name, change := range map[string]func(*mock.Replay){
		"silent at first":           func(r *mock.Replay) { r.Silent = 2 },
		"drops some":                func(r *mock.Replay) { r.Lossy, r.Skip = 2, []uint64{3, 4, 9} },
		"drops others each time":    func(r *mock.Replay) { r.Lossy, r.Skip = 1, []uint64{1, 2, 20} },
		"drops all but the end":     func(r *mock.Replay) { r.Lossy, r.Skip = 2, all },
		"no end":                    func(r *mock.Replay) { r.NoEnd = true },
		"no end, drops some":        func(r *mock.Replay) { r.NoEnd, r.Lossy, r.Skip = true, 2, []uint64{5, 20} },
		"ends early":                func(r *mock.Replay) { r.Limit = 3 },
		"one at a time":             func(r *mock.Replay) { r.Limit = 1 },
		"begins early":              func(r *mock.Replay) { r.Early = 100 },
		"everything twice":          func(r *mock.Replay) { r.Twice = true },
		"slow":                      func(r *mock.Replay) { r.Delay = 100 * time.Millisecond },
		"slow and one at a time":    func(r *mock.Replay) { r.Delay, r.Limit = 5*time.Millisecond, 1 },
		"four frames, drops some":   func(r *mock.Replay) { r.Topic, r.Lossy, r.Skip = true, 2, []uint64{7} },
		"twice, early, drops, open": func(r *mock.Replay) { r.Twice, r.Early, r.NoEnd, r.Lossy, r.Skip = true, 5, true, 1, []uint64{8} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a := r.engine("a")
			r.bridge(func(c *bridge.Config) { c.RepairTimeout, c.RepairAttempts = time.Second, 20 }).serve(a)
			a.publish(prompt(1, 0, 1))
			r.synced(a)
			a.SetReplay(change)
			for i := range missing {
				a.deliver(mock.Lost, prompt(1, i+1, 1))
			}
			a.publish(prompt(1, missing+1, 1))
			a.publish(evict(1, "", 5))
			r.synced(a)
			wantGaps(t, r.source(a))
			wantResets(t, r.source(a), "new")
		})
	}
}

// A replay that brings a thousand batches a request, whatever is asked for, as a
// socket does that drops what its queue has no room for.
func TestALongReplayInPieces(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.Replay.Limit = 1000; o.Replay.NoEnd = true })
	for i := range 4500 {
		a.deliver(mock.Lost, prompt(i%50, 0, 1), evict(i%50, "", 0))
	}
	e := r.bridge(func(c *bridge.Config) { c.RepairTimeout, c.RepairAttempts = time.Second, 20 })
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.loose = true // comparing after each record takes too long here
	r.read("everything", func() bool { return r.source(a).Last == 4500 })
	wantGaps(t, r.source(a))
	good, bad := a.Requests()
	if n := len(good); n > 30 || bad > 0 {
		t.Errorf("%d requests, %d of them bad", n, bad)
	}
}

// broken serves what a broken replay socket does.
type broken struct {
	a *actor
	c *routerConn
}

func (b broken) payload(seq uint64) []byte {
	b.a.r.mu.Lock()
	defer b.a.r.mu.Unlock()
	return b.a.lives[0].batches[seq].payload
}

// serve answers as a sound socket does, from the given number on.
func (b broken) serve(from uint64) {
	for seq := from; seq < b.a.Next(); seq++ {
		if b.c.batch(seq, b.payload(seq)) != nil {
			return
		}
	}
	b.c.end()
	b.c.hold()
}

// A replay socket that breaks the protocol, or lies, and does so every time but
// the third: the third brings what is missing. One that does so always costs what
// is missing, and nothing else.
func TestBrokenReplaySockets(t *testing.T) {
	for name, script := range map[string]func(broken, uint64){
		"closes after the request": func(b broken, _ uint64) {},
		"resets": func(b broken, from uint64) {
			b.c.Write([]byte{1, 0, 1, 8, 0, 0})
			b.c.Conn.(*net.TCPConn).SetLinger(0)
		},
		"one frame": func(b broken, _ uint64) { b.c.send(number(0)); b.c.hold() },
		"two short": func(b broken, from uint64) { b.c.send(nil, number(from)[1:]); b.c.hold() },
		"seq of 7":  func(b broken, from uint64) { b.c.send(nil, number(from)[:7], b.payload(from)); b.c.hold() },
		"seq of 9":  func(b broken, from uint64) { b.c.send(nil, append(number(from), 0), b.payload(from)); b.c.hold() },
		"swapped":   func(b broken, from uint64) { b.c.send(nil, b.payload(from), number(from)); b.c.hold() },
		"too many":  func(b broken, from uint64) { b.c.send(make([][]byte, 100)...); b.c.hold() },
		"a huge frame": func(b broken, _ uint64) {
			b.c.Write([]byte{2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			b.c.hold()
		},
		"half a frame":  func(b broken, _ uint64) { b.c.Write([]byte{3, 0, 0, 0, 0, 0, 0, 0, 90, 1, 2}); b.c.hold() },
		"a bad command": func(b broken, _ uint64) { b.c.Write([]byte{4, 3, 200, 'P', 'I'}); b.c.hold() },
		"only commands": func(b broken, _ uint64) {
			for range 1000 {
				if _, err := b.c.Write([]byte("\x04\x07\x04PING\x00\x00")); err != nil {
					return
				}
				time.Sleep(time.Millisecond)
			}
		},
		"old batches, again and again": func(b broken, _ uint64) {
			for range 10_000 {
				if b.c.batch(0, b.payload(0)) != nil {
					return
				}
			}
		},
		"far ahead": func(b broken, _ uint64) {
			for seq := uint64(1 << 40); seq < 1<<40+1000; seq++ {
				if b.c.batch(seq, b.payload(0)) != nil {
					return
				}
			}
			b.c.end()
			b.c.hold()
		},
		"only the end":         func(b broken, _ uint64) { b.c.end(); b.c.hold() },
		"the end first":        func(b broken, from uint64) { b.c.end(); b.serve(from) },
		"nothing":              func(b broken, _ uint64) { b.c.hold() },
		"backwards, from zero": func(b broken, from uint64) { b.c.batch(0, b.payload(0)); b.c.end(); b.c.hold() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, always := range []bool{false, true} {
				r := newRig(t)
				a := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" })
				var asked atomic.Int64
				var broke atomic.Bool
				sock := newRouter(t, func(c *routerConn) {
					from, err := c.request()
					if err != nil {
						return
					}
					b := broken{a, c}
					if n := asked.Add(1); !broke.Load() || !always && n%3 == 0 {
						b.serve(from)
					} else {
						script(b, from)
					}
				})
				a.worker.ReplayEndpoint = sock.endpoint()
				e := r.bridge(func(c *bridge.Config) {
					c.RepairTimeout, c.RepairAttempts, c.ZMTP.MaxFrame = 500*time.Millisecond, 9, 1<<20
				})
				e.serve(a)
				a.publishLocked(mock.Sent, prompt(1, 0, 1))
				r.synced(a)
				r.await("the replay after connecting is over", func() bool { return r.status(a).State == event.StateActive && asked.Load() > 0 })
				asked.Store(0)
				broke.Store(true)
				lost := a.publishLocked(mock.Lost, prompt(1, 1, 1))
				if always {
					a.mayLose(lost)
				}
				a.publishLocked(mock.Sent, prompt(2, 0, 1))
				r.synced(a)
				if always {
					if s := r.source(a); len(s.Gaps) != 1 {
						t.Errorf("gaps on record: %+v", s.Gaps)
					}
				} else {
					wantGaps(t, r.source(a))
				}
				wantResets(t, r.source(a), "new")
			}
		})
	}
}

// What stands where a replay socket should be may be no such thing.
func TestNoReplaySocket(t *testing.T) {
	for name, script := range map[string]func(*routerConn){
		"accepts and closes": func(*routerConn) {},
		"silent":             func(c *routerConn) { c.hold() },
		"a web server":       func(c *routerConn) { c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")); c.hold() },
		"a publisher":        func(c *routerConn) { c.greet("PUB"); c.hold() },
		"half a greeting":    func(c *routerConn) { c.Write([]byte{0xff, 0, 0, 0}); c.hold() },
		"noise":              func(c *routerConn) { c.Write(slices.Repeat([]byte{0x81, 7}, 10_000)); c.hold() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			a, good := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" }), r.engine("good")
			a.worker.ReplayEndpoint = newRouter(t, script).endpoint()
			e := r.bridge(func(c *bridge.Config) {
				c.ZMTP.HandshakeTimeout, c.RepairTimeout, c.RepairCooldown = 200*time.Millisecond, 200*time.Millisecond, time.Hour
			})
			e.serve(a, good)
			a.publish(prompt(1, 0, 1))
			a.mayLose(a.deliver(mock.Lost, prompt(1, 1, 1)))
			a.publish(prompt(2, 0, 1))
			good.publish(prompt(1, 0, 1))
			good.deliver(mock.Lost, prompt(1, 1, 1))
			good.publish(prompt(1, 2, 1))
			r.synced(a, good)
			wantGaps(t, r.source(good))
			wantGaps(t, r.source(a), feed.Gap{From: 1, To: 1, Reason: event.ReasonUnreachable})
			// For as long as the endpoint rests, gaps are taken as they come.
			before := e.count("kvmesh.bridge.replay.requests")
			for i := range 5 {
				a.mayLose(a.deliver(mock.Lost, prompt(3, i, 1)))
				a.publish(prompt(4, i, 1))
			}
			r.synced(a)
			if n := e.count("kvmesh.bridge.replay.requests") - before; n != 0 {
				t.Errorf("%d requests to an endpoint at rest", n)
			}
			r.await("the error is told", func() bool { return r.status(a).LastError != "" })
		})
	}
}

// A replay that brings other content than what is known is another engine's: the
// overlap after a reconnection shows it, and nothing else would.
func TestAReplayThatLies(t *testing.T) {
	r := newRig(t)
	a := r.engine("a", func(o *mock.Options) { o.ReplayEndpoint = "" })
	sock := newRouter(t, func(c *routerConn) {
		from, err := c.request()
		if err != nil {
			return
		}
		broken{a, c}.serve(from)
	})
	a.worker.ReplayEndpoint = sock.endpoint()
	e := r.bridge()
	e.serve(a)
	for i := range 5 {
		a.publishLocked(mock.Sent, prompt(1, i, 1))
	}
	r.synced(a)
	// A batch that was applied comes back in a replay as another one: as no one
	// asked for it, it is not looked at.
	r.mu.Lock()
	a.lives[0].batches[2].payload = []byte("nonsense")
	r.mu.Unlock()
	a.publishLocked(mock.Lost, prompt(2, 0, 1))
	a.publishLocked(mock.Sent, prompt(2, 1, 1))
	r.synced(a)
	wantResets(t, r.source(a), "new")
}

// No more than so many requests are open at a time, and one a worker.
func TestRequestsAreBounded(t *testing.T) {
	const engines, bound = 12, 3
	r := newRig(t)
	var open, most, perWorker atomic.Int64
	var actors []*actor
	for i := range engines {
		a := r.engine(fmt.Sprintf("e%d", i), func(o *mock.Options) { o.ReplayEndpoint = "" })
		var mine atomic.Int64
		a.worker.ReplayEndpoint = newRouter(t, func(c *routerConn) {
			from, err := c.request()
			if err != nil {
				return
			}
			if mine.Add(1) > 1 {
				perWorker.Add(1)
			}
			n := open.Add(1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			time.Sleep(20 * time.Millisecond)
			open.Add(-1)
			mine.Add(-1)
			broken{a, c}.serve(from)
		}).endpoint()
		a.publishLocked(mock.Lost, prompt(i, 0, 2))
		actors = append(actors, a)
	}
	e := r.bridge(func(c *bridge.Config) { c.Repairs = bound })
	e.serve(actors...)
	for i, a := range actors {
		a.publishLocked(mock.Sent, prompt(100+i, 0, 2))
	}
	r.synced(actors...)
	if most.Load() > bound || perWorker.Load() > 0 {
		t.Errorf("%d requests at a time, %d times two to one engine", most.Load(), perWorker.Load())
	}
}

// A repair holds what comes live, up to a bound, and then the bridge stops reading.
func TestTheWindowIsBounded(t *testing.T) {
	r := newRig(t)
	a := r.engine("a")
	e := r.bridge(func(c *bridge.Config) { c.MaxHeld, c.RepairTimeout = 1<<20, patience })
	e.serve(a)
	a.publish(prompt(1, 0, 1))
	r.synced(a)
	a.SetReplay(func(re *mock.Replay) { re.Silent = -1 })
	a.deliver(mock.Lost, prompt(2, 0, 1))
	// 50 KB each other one, 20 MB in all: more than the bounds and the sockets hold.
	const n = 400
	r.loose = true
	padded := prompt(3, 0, 1)
	padded.Wire.Also = []model.Field{{Name: "padding", Value: make([]byte, 50<<10)}}
	for range n {
		a.publish(padded)
		a.publish(evict(3, "", 0))
	}
	r.await("the bridge stops reading", func() bool { return a.Backlog() > 0 && stable(a.Backlog) })
	a.SetReplay(func(re *mock.Replay) { re.Silent = 0 })
	a.Stop() // and with it the request that is not answered
	a.start()
	e.connected(a)
	r.read("everything", func() bool { return r.source(a).Last == 2*n+1 })
	wantGaps(t, r.source(a))
}

// stable tells whether a number stays the same for a while.
func stable(f func() int) bool {
	before := f()
	time.Sleep(100 * time.Millisecond)
	return f() == before
}
