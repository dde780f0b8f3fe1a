package bridge_test

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// threads returns how many OS threads this process has.
func threads(t *testing.T) int {
	t.Helper()
	data, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip("no /proc")
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "Threads:"); ok {
			n, err := strconv.Atoi(strings.TrimSpace(rest))
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no Threads in /proc/self/status")
	return 0
}

// openFiles returns how many file descriptors this process has open.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc")
	}
	return len(entries)
}

// goroutines returns how many goroutines have a bridge's code on their stacks.
func goroutines() int {
	buf := make([]byte, 1<<20)
	for {
		if n := runtime.Stack(buf, true); n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	n := 0
	for one := range strings.SplitSeq(string(buf), "\n\n") {
		if strings.Contains(one, "kvmesh/bridge.(") || strings.Contains(one, "kvmesh/bridge/zmtp.") {
			n++
		}
	}
	return n
}

// A thousand sources in one process cost goroutines and sockets, which are given
// back, and hardly any threads.
func TestAThousandSources(t *testing.T) {
	const sources, engines = 1024, 128 // which each are read as several workers
	r := newRig(t)
	files := openFiles(t)
	e := r.bridge()
	r.loose = true
	fleet, err := mock.NewFleet(mock.FleetOptions{Engines: engines, Replay: true, Batches: engines, Workload: mock.WorkloadOptions{Capacity: 64}})
	if err == nil {
		err = fleet.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	var workers []event.Worker
	for i := range sources {
		m := fleet.Members[i%engines]
		workers = append(workers, event.Worker{
			Source:   event.Source{Model: "m", Group: "default", Instance: fmt.Sprint(i)},
			Endpoint: m.Addr(), ReplayEndpoint: m.ReplayAddr(), BlockSize: 16,
		})
		e.Set(workers[i])
	}
	publish := func(upTo int) {
		fleet.Pace(0, upTo)
		if err := fleet.Run(r.ctx); err != nil {
			t.Fatal(err)
		}
	}
	applied := func(last uint64) func() bool {
		return func() bool {
			for _, w := range workers {
				if s := r.log.Source(w.Source); s == nil || !s.Batches || s.Last != last || s.Partial {
					return false
				}
			}
			return true
		}
	}
	publish(2 * engines)
	r.read("all sources are in the log", applied(1))
	if n := threads(t); n > 40 {
		t.Errorf("%d threads", n)
	}
	// A quarter goes and comes back while the others go on.
	for _, w := range workers[:sources/4] {
		e.Remove(w.Source)
	}
	publish(3 * engines)
	for _, w := range workers[:sources/4] {
		e.Set(w)
	}
	r.read("all sources are in the log again", applied(2))
	if n := threads(t); n > 40 {
		t.Errorf("%d threads after some were registered again", n)
	}
	for _, s := range r.log.Sources() {
		if len(s.Gaps) > 0 {
			t.Errorf("%s: gaps %v", s.Name.Instance, s.Gaps)
		}
	}
	e.stop()
	fleet.Stop()
	r.await("goroutines and files are given back", func() bool { return goroutines() == 0 && openFiles(t) <= files+32 })
}

// Workers come and go faster than they can be read.
func TestChurn(t *testing.T) {
	r := newRig(t)
	e := r.bridge()
	var actors []*actor
	for i := range 8 {
		a := r.engine(fmt.Sprint(i))
		a.publish(prompt(i, 0, 3))
		actors = append(actors, a)
	}
	for i := range 400 {
		a := actors[i%len(actors)]
		switch i % 5 {
		case 0, 2:
			e.Set(a.worker)
		case 1:
			a.worker.Labels = map[string]string{"n": fmt.Sprint(i)}
			e.Set(a.worker)
		case 3:
			e.Remove(a.worker.Source)
		case 4:
			a.publish(prompt(i, 0, 1))
		}
	}
	for _, a := range actors {
		e.Set(a.worker)
	}
	for i, a := range actors {
		e.connected(a)
		a.publish(prompt(1000+i, 0, 1))
	}
	r.synced(actors...)
	for _, a := range actors {
		e.Remove(a.worker.Source)
	}
	for _, a := range actors {
		if err := e.AwaitGone(r.ctx, a.worker.Source); err != nil {
			t.Fatal(err)
		}
	}
	r.await("the engines have no subscribers", func() bool {
		n := 0
		for _, a := range actors {
			n += a.Subscribers()
		}
		return n == 0
	})
	e.stop()
	r.await("no goroutines are left", func() bool { return goroutines() == 0 })
}

// What is wrong with one engine touches no other one, and is counted.
func TestHostileEnginesBesideGoodOnes(t *testing.T) {
	r := newRig(t)
	good := []*actor{r.engine("good-0"), r.engine("good-1")}
	e := r.bridge(func(c *bridge.Config) { c.ZMTP.MaxFrame, c.ZMTP.MaxMessage, c.ZMTP.MaxFrames = 1<<20, 2<<20, 16 })
	e.serve(good...)

	type fault struct {
		reason string
		send   func(a *actor)
	}
	frames := func(f ...[]byte) func(*actor) {
		return func(a *actor) {
			if err := a.PublishFrames(f...); err != nil {
				t.Fatal(err)
			}
		}
	}
	payload := func(b ...byte) func(*actor) {
		return func(a *actor) { a.mayLose(a.raw(b, mock.Sent)) }
	}
	faults := []fault{
		{"frame_count", frames([]byte("t"))},
		{"frame_count", frames([]byte("t"), number(3))},
		{"frame_count", frames([]byte("t"), number(3), nil, nil)},
		{"sequence_frame", frames([]byte("t"), []byte("12345678 "), []byte{0x93})},
		{"sequence_frame", frames([]byte("t"), nil, []byte{0x93})},
		{"end_marker", frames(nil, number(1<<64-1), []byte{0x90})},
		{"undecodable", payload(0xdd, 0x7f, 0xff, 0xff, 0xff)},
		{"undecodable", payload(0xdb, 0xff, 0xff, 0xff, 0xff)},
		{"undecodable", payload(0xc1)},
		{"undecodable", payload()},
		{"undecodable", payload(append(make([]byte, 0), repeat(0x91, 100_000)...)...)},
	}
	bad := make([]*actor, len(faults))
	for i, f := range faults {
		a := r.engine(fmt.Sprintf("bad-%d", i))
		e.serve(a)
		a.publish(prompt(1, 0, 2))
		r.synced(a)
		before := e.count("kvmesh.bridge.dropped", f.reason)
		f.send(a)
		r.await(f.reason+" is counted", func() bool { return e.count("kvmesh.bridge.dropped", f.reason) == before+1 })
		a.publish(prompt(1, 2, 1))
		good[0].publish(prompt(i, 0, 1))
		good[1].deliver(mock.Lost, prompt(i, 0, 1))
		good[1].publish(prompt(i, 1, 1))
		r.await("the drop is told", func() bool { return r.status(a).Dropped[f.reason] == 1 })
		bad[i] = a
	}
	// These lose their connection, and get a new one.
	for i, send := range []func(*actor){
		frames(make([]byte, 2<<20), number(0), nil),
		frames(make([][]byte, 100)...),
	} {
		a := r.engine(fmt.Sprintf("cut-%d", i))
		e.serve(a)
		a.publish(prompt(1, 0, 2))
		r.synced(a)
		send(a)
		r.await("the error is told", func() bool { return r.status(a).LastError != "" || len(replays(a)) > 1 })
		a.publish(prompt(1, 2, 1))
		bad = append(bad, a)
		e.connected(a)
		a.publish(prompt(1, 3, 1))
	}
	// These never speak the protocol at all.
	var peers []*router
	for i, script := range []func(*routerConn){
		func(*routerConn) {},
		func(c *routerConn) { c.hold() },
		func(c *routerConn) { c.greet("REP"); c.hold() },
		func(c *routerConn) {
			c.greet("PUB")
			c.Write([]byte{2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
			c.hold()
		},
		func(c *routerConn) { c.Write(repeat('x', 1<<16)); c.hold() },
	} {
		p := newRouter(t, script)
		peers = append(peers, p)
		w := good[0].worker
		w.Instance, w.Endpoint, w.ReplayEndpoint = fmt.Sprintf("peer-%d", i), p.endpoint(), ""
		e.Set(w)
	}
	for i, p := range peers {
		r.await(fmt.Sprintf("peer %d is dialled", i), func() bool { return p.connections() > 0 })
	}
	for i := range 20 {
		good[i%2].publish(prompt(1000+i, 0, 2))
	}
	r.synced(good...)
	r.synced(bad...)
	for _, a := range good {
		wantGaps(t, r.source(a))
		wantResets(t, r.source(a), "new")
	}
}

func replays(a *actor) []mock.Request {
	good, _ := a.Requests()
	return good
}

func repeat(b byte, n int) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}
