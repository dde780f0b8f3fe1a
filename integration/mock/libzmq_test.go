package mock

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvmesh/kvmesh/integration/model"
)

// libzmq runs a Python script that has pyzmq as zmq, a context as ctx, and its
// arguments in argv. It is killed if it outlives the test.
type libzmq struct {
	cmd *exec.Cmd
	out *bufio.Scanner
	in  io.WriteCloser
}

const prelude = `
import sys, zmq, struct
from zmq.utils.monitor import recv_monitor_message
ctx, argv = zmq.Context(), sys.argv[1:]
def say(*words):
    print(*words, flush=True)
def show(frames):
    say(" ".join(f.hex() or "-" for f in frames))
def receive(s, n=1):
    for _ in range(n):
        if not s.poll(30000):
            say("nothing came"); sys.exit(1)
        show(s.recv_multipart())
`

func newLibzmq(t *testing.T, script string, args ...string) *libzmq {
	t.Helper()
	python := ""
	for _, p := range []string{"python3", "/usr/bin/python3"} {
		if exec.Command(p, "-c", "import zmq").Run() == nil {
			python = p
			break
		}
	}
	if python == "" {
		t.Skip("no Python with pyzmq here")
	}
	c := exec.Command(python, append([]string{"-c", prelude + script}, args...)...)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	return &libzmq{c, bufio.NewScanner(out), in}
}

// line returns the next line that the script prints.
func (l *libzmq) line(t *testing.T) string {
	t.Helper()
	if !l.out.Scan() {
		t.Fatalf("the script ended: %v", l.out.Err())
	}
	return l.out.Text()
}

func (l *libzmq) expect(t *testing.T, want ...string) {
	t.Helper()
	for _, w := range want {
		if got := l.line(t); got != w {
			t.Errorf("libzmq got %q, want %q", got, w)
		}
	}
}

const seq0 = "000000000000000"

func TestLibzmqSubscriber(t *testing.T) {
	const script = `
s = ctx.socket(zmq.SUB)
s.subscribe(argv[1].encode())
if argv[2] == "bind":
    say("tcp://127.0.0.1:%d" % s.bind_to_random_port("tcp://127.0.0.1"))
else:
    s.connect(argv[0])
receive(s, 3)
s.unsubscribe(argv[1].encode())
s.subscribe(b"other")
receive(s)
`
	for _, impl := range impls {
		for _, way := range []string{"tcp", "ipc", "bind"} {
			t.Run(impl+"/"+way, func(t *testing.T) {
				o := Options{PUB: impl, Topic: "kv-events"}
				var l *libzmq
				if way == "bind" {
					l = newLibzmq(t, script, "", "kv-", "bind")
					o.Endpoint, o.Connect = l.line(t), true
				} else if way == "ipc" {
					o.Endpoint = "ipc://" + t.TempDir() + "/pub"
				}
				e := engine(t, o)
				if l == nil {
					l = newLibzmq(t, script, e.Addr(), "kv-", "connect")
				}
				wait(t, e, 1)
				e.PublishRaw([]byte("a"), Sent)
				e.PublishFrames([]byte("other"), []byte("not yet"))
				e.PublishRaw(nil, Sent)
				e.PublishRaw(make([]byte, 300), Sent)
				l.expect(t, "6b762d6576656e7473 "+seq0+"0 61", "6b762d6576656e7473 "+seq0+"1 -", "6b762d6576656e7473 "+seq0+"2 "+strings.Repeat("00", 300))
				eventually(t, "the other subscription", func() bool {
					e.pub.mu.Lock()
					defer e.pub.mu.Unlock()
					for s := range e.pub.subs {
						return s.topics["other"] == 1 && s.topics["kv-"] == 0
					}
					return false
				})
				e.PublishRaw([]byte("b"), Sent)
				e.PublishFrames([]byte("other"), []byte("c"))
				l.expect(t, "6f74686572 63")
			})
		}
	}
}

// TestLibzmqHeartbeat has libzmq cut connections to peers that do not answer
// its PINGs.
func TestLibzmqHeartbeat(t *testing.T) {
	e := engine(t, Options{})
	l := newLibzmq(t, `
s = ctx.socket(zmq.SUB)
s.setsockopt(zmq.HEARTBEAT_IVL, 50)
s.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
m = s.get_monitor_socket(zmq.EVENT_DISCONNECTED)
s.subscribe(b"")
s.connect(argv[0])
say("cut" if m.poll(2500) else "connected")
receive(s)
`, e.Addr())
	wait(t, e, 1)
	l.expect(t, "connected")
	e.PublishRaw([]byte("x"), Sent)
	l.expect(t, "- "+seq0+"0 78")
}

func TestLibzmqReplay(t *testing.T) {
	const script = `
for kind in (zmq.DEALER, zmq.REQ):
    s = ctx.socket(kind)
    s.connect(argv[0])
    start = struct.pack(">Q", 1)
    if kind == zmq.DEALER:
        s.send(start)                       # no delimiter
        s.send_multipart([b"", start[:7]])  # short
        s.send_multipart([b"", start])
        receive(s, 3)
    else:
        s.send(start)
        receive(s)
`
	for _, topic := range []bool{false, true} {
		e := engine(t, Options{Topic: "kv", ReplayEndpoint: "tcp://127.0.0.1:0", Replay: Replay{Topic: topic}})
		for _, p := range []string{"a", "b", "c"} {
			e.PublishRaw([]byte(p), Sent)
		}
		l := newLibzmq(t, script, e.ReplayAddr())
		end := "ffffffffffffffff -"
		if topic {
			l.expect(t, "- 6b76 "+seq0+"1 62", "- 6b76 "+seq0+"2 63", "- - "+end, "6b76 "+seq0+"1 62")
		} else {
			l.expect(t, "- "+seq0+"1 62", "- "+seq0+"2 63", "- "+end, seq0+"1 62")
		}
		if good, bad := e.Requests(); len(good) != 2 || bad != 2 {
			t.Errorf("%d good requests, %d bad", len(good), bad)
		}
	}
}

// TestLibzmqReplayIsWhole asks for more than a ROUTER of libzmq holds.
func TestLibzmqReplayIsWhole(t *testing.T) {
	e := engine(t, Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	for range 12_000 {
		e.PublishRaw(make([]byte, 1000), Sent)
	}
	l := newLibzmq(t, `
s = ctx.socket(zmq.DEALER)
s.connect(argv[0])
s.send_multipart([b"", struct.pack(">Q", 0)])
seqs = []
while not seqs or seqs[-1] != 2**64 - 1:
    if not s.poll(30000):
        say("nothing came"); sys.exit(1)
    seqs.append(struct.unpack(">Q", s.recv_multipart()[-2])[0])
say(len(seqs), seqs[:-1] == list(range(2000, 12000)))
`, e.ReplayAddr())
	l.expect(t, "10001 True")
}

// TestLibzmqSeesRestarts keeps one SUB and one engine through a stop and a new
// life: libzmq dials again by itself.
func TestLibzmqSeesRestarts(t *testing.T) {
	for _, impl := range impls {
		e := engine(t, Options{PUB: impl, Dialect: SGLangArray})
		l := newLibzmq(t, `
s = ctx.socket(zmq.SUB)
s.setsockopt(zmq.RECONNECT_IVL, 20)
s.subscribe(b"")
s.connect(argv[0])
receive(s, 3)
`, e.Addr())
		var got []string
		publish := func() {
			t.Helper()
			wait(t, e, 1)
			if _, err := e.Publish(model.Event{Op: model.Clear}); err != nil {
				t.Fatal(err)
			}
			got = append(got, l.line(t))
		}
		publish()
		e.Stop()
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		publish()
		if err := e.Restart(); err != nil {
			t.Fatal(err)
		}
		publish()
		for i, seq := range []string{"0", "1", "0"} {
			if !strings.HasPrefix(got[i], "- "+seq0+seq+" 93") {
				t.Errorf("%s: message %d is %s", impl, i, got[i])
			}
		}
		if got[0] == got[2] {
			t.Errorf("%s: two lives, the same bytes", impl)
		}
		e.Stop()
	}
}
