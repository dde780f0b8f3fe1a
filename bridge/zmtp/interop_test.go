package zmtp

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
)

// libzmq is a Python process with pyzmq in which tests run statements.
type libzmq struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

const pyServer = `
import json, struct, sys, zmq
env = {"zmq": zmq, "struct": struct, "ctx": zmq.Context()}
for line in sys.stdin:
    env["out"] = None
    try:
        exec(json.loads(line), env)
        print(json.dumps({"out": env["out"]}), flush=True)
    except Exception as e:
        print(json.dumps({"err": repr(e)}), flush=True)
`

func startLibzmq(t testing.TB) *libzmq {
	t.Helper()
	const python = "/usr/bin/python3"
	if err := exec.Command(python, "-c", "import zmq").Run(); err != nil {
		t.Skip("python3-zmq is not installed")
	}
	p := &libzmq{t: t, cmd: exec.Command(python, "-c", pyServer)}
	p.cmd.Stderr = os.Stderr
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewScanner(out)
	t.Cleanup(p.kill)
	return p
}

// kill ends the process as kill -9 does.
func (p *libzmq) kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// run runs statements, and returns what they assigned to out.
func (p *libzmq) run(format string, args ...any) any {
	p.t.Helper()
	line, _ := json.Marshal(fmt.Sprintf(format, args...))
	p.in.Write(append(line, '\n'))
	if !p.out.Scan() {
		p.t.Fatal("python process is gone: ", p.out.Err())
	}
	var reply struct{ Out, Err any }
	if err := json.Unmarshal(p.out.Bytes(), &reply); err != nil || reply.Err != nil {
		p.t.Fatalf("%q: %v, %v", line, err, reply.Err)
	}
	return reply.Out
}

// bind makes a socket s, bound to address, and returns the address of it. The
// address may end in a wildcard.
func (p *libzmq) bind(kind, address, options string) string {
	p.t.Helper()
	p.run("s = ctx.socket(zmq.%s); s.linger = 0", kind)
	p.run("%s", options)
	p.run("s.bind(%q)", address)
	_, addr, _ := strings.Cut(p.run("out = s.getsockopt_string(zmq.LAST_ENDPOINT)").(string), "://")
	return addr
}

const (
	anyPort   = "tcp://127.0.0.1:*"
	heartbeat = "s.setsockopt(zmq.HEARTBEAT_IVL, 300); s.setsockopt(zmq.HEARTBEAT_TIMEOUT, 300)"
)

// publishUntil publishes until the handler has seen it: the first messages find
// no subscription yet.
func (p *libzmq) publishUntil(h *recorder, frames ...string) {
	p.t.Helper()
	eventually(p.t, "libzmq's messages arrive", func() bool {
		p.run("s.send_multipart([f.encode() for f in %s])", list(frames))
		return h.got(frames...)()
	})
}

func list(frames []string) string {
	b, _ := json.Marshal(frames)
	return string(b)
}

func TestLibzmqPub(t *testing.T) {
	ipc := "ipc://" + socketPath(t)
	for _, address := range []string{anyPort, ipc} {
		t.Run(address[:3]+", we dial", func(t *testing.T) {
			p := startLibzmq(t)
			network, addr := "tcp", p.bind("PUB", address, "")
			if address == ipc {
				network = "unix"
			}
			var h recorder
			run(t, network, addr, false, quick(), &h)
			p.publishUntil(&h, "kv-events", "12345678", "payload")
			p.run(`s.send_multipart([b"other", b"x"]); s.send_multipart([b"k", b"x"]); s.send_multipart([b"", b"x"])`)
			large := strings.Repeat("x", 3_000_000)
			p.run(`s.send_multipart([b"kv", b"", b"x" * %d])`, len(large))
			eventually(t, "large message arrives", h.got("kv", "", large))
			p.run(`s.send(b"kv")`)
			eventually(t, "one frame arrives", h.got("kv"))
			if n := h.errs(); n != "[]" {
				t.Errorf("disconnected: %v", n)
			}
		})
		t.Run(address[:3]+", we bind", func(t *testing.T) {
			p := startLibzmq(t)
			network, addr := "tcp", freeAddr(t)
			if address == ipc {
				network, addr = "unix", socketPath(t)
			}
			var h recorder
			run(t, network, addr, true, quick(), &h)
			p.run(`s = ctx.socket(zmq.PUB); s.linger = 0; s.connect("%s://%s")`, strings.Replace(network, "unix", "ipc", 1), addr)
			p.publishUntil(&h, "kv-events", "12345678", "payload")
			// A second publisher is turned away again and again, the first one stays.
			p.run(`s2 = ctx.socket(zmq.PUB); s2.linger = 0; s2.connect("%s://%s")`, strings.Replace(network, "unix", "ipc", 1), addr)
			eventually(t, "second publisher is refused", h.is(func(r *recorder) bool { return len(r.refused) >= 3 }))
			p.publishUntil(&h, "kv-events", "still there")
			p.run("s.close()")
			p.run("s = s2")
			p.publishUntil(&h, "kv-events", "second")
		})
	}
}

// The subscription is asked for as libzmq understands it, and again on each new
// connection.
func TestLibzmqSubscription(t *testing.T) {
	p := startLibzmq(t)
	addr := p.bind("XPUB", anyPort, "")
	s := &server{network: "tcp", addr: addr}
	for range 3 {
		c := dialPeer(t, s, quick())
		if err := c.Subscribe([]byte("kv")); err != nil {
			t.Fatal(err)
		}
		if got := p.run("out = s.recv().decode()"); got != "\x01kv" {
			t.Errorf("subscribed: %q", got)
		}
		c.Close()
		if got := p.run("out = s.recv().decode()"); got != "\x00kv" {
			t.Errorf("unsubscribed: %q", got)
		}
	}
}

// A publisher that wants heartbeats keeps us through a silence of several of
// its timeouts.
func TestLibzmqHeartbeat(t *testing.T) {
	p := startLibzmq(t)
	addr := p.bind("PUB", anyPort, heartbeat)
	var h recorder
	run(t, "tcp", addr, false, quick(), &h)
	p.publishUntil(&h, "kv", "before")
	time.Sleep(1500 * time.Millisecond)
	p.publishUntil(&h, "kv", "after")
	if n := h.errs(); n != "[]" {
		t.Errorf("disconnected: %v", n)
	}
}

// libzmq answers our PING; one that was stopped doesn't, and is found again
// when it goes on.
func TestLibzmqAnswersPing(t *testing.T) {
	p := startLibzmq(t)
	addr := p.bind("PUB", anyPort, "")
	opts := quick()
	opts.HeartbeatInterval, opts.HeartbeatTimeout = 10*time.Millisecond, 10*time.Second
	c := dialPeer(t, &server{network: "tcp", addr: addr}, opts)
	answers, heard := 0, c.in.heard
	eventually(t, "five answers", func() bool {
		c.SetDeadline(time.Now().Add(20 * time.Millisecond))
		if err := c.Recv(&Message{}); err != os.ErrDeadlineExceeded {
			t.Fatal(err)
		}
		if c.in.heard.After(heard) {
			answers, heard = answers+1, c.in.heard
		}
		return answers >= 5
	})

	opts.HeartbeatTimeout = 300 * time.Millisecond
	var h recorder
	run(t, "tcp", addr, false, opts, &h)
	p.publishUntil(&h, "kv", "before")
	p.cmd.Process.Signal(syscall.SIGSTOP)
	eventually(t, "it is missed", h.lost(is(ErrHeartbeat)))
	p.cmd.Process.Signal(syscall.SIGCONT)
	p.publishUntil(&h, "kv", "after")
}

// A publisher that is killed and started again is dialled and subscribed to
// again, several times.
func TestLibzmqRestart(t *testing.T) {
	p := startLibzmq(t)
	addr := p.bind("PUB", "tcp://"+freeAddr(t), "")
	var h recorder
	run(t, "tcp", addr, false, quick(), &h)
	for _, life := range []string{"first", "second", "third"} {
		p.publishUntil(&h, "kv", life)
		p.kill()
		p = startLibzmq(t)
		p.bind("PUB", "tcp://"+addr, "")
	}
	p.publishUntil(&h, "kv", "last")
	if n := len(h.connected); n != 4 {
		t.Errorf("%d connections", n)
	}
}

// The replay conversation of an engine: one request, many answers of 3 or 4
// frames, an end marker.
func TestLibzmqReplay(t *testing.T) {
	const batches = 500
	for _, topic := range []string{"", `b"kv-events", `} {
		p := startLibzmq(t)
		addr := p.bind("ROUTER", anyPort, "s.set_hwm(0)")
		opts := quick()
		opts.HandshakeTimeout = 5 * time.Second
		c, err := Dial(context.Background(), "tcp", addr, DEALER, opts)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for round := range 3 {
			if err := c.Send(nil, binary.BigEndian.AppendUint64(nil, 42)); err != nil {
				t.Fatal(err)
			}
			got := p.run(`who, *rest = s.recv_multipart(); out = [f.hex() for f in rest]`)
			if s := fmt.Sprint(got); s != "[ 000000000000002a]" {
				t.Fatalf("request arrives as %s", s)
			}
			p.run(`
for i in range(%d): s.send_multipart([who, b"", %sstruct.pack(">Q", 42 + i), b"%%d" %% i])
s.send_multipart([who, b"", b"\xff" * 8, b""])`, batches, topic)
			var m Message
			for i := range batches + 1 {
				c.SetDeadline(time.Now().Add(10 * time.Second))
				if err := c.Recv(&m); err != nil {
					t.Fatal(err)
				}
				seq, payload := uint64(42+i), fmt.Sprint(i)
				if i == batches {
					seq, payload = 1<<64-1, ""
				}
				n := len(m.Frames)
				if n < 3 || len(m.Frames[0]) != 0 || binary.BigEndian.Uint64(m.Frames[n-2]) != seq || string(m.Frames[n-1]) != payload {
					t.Fatalf("round %d: answer %d is %q", round, i, m.Frames)
				}
			}
		}
		c.SetDeadline(time.Now().Add(50 * time.Millisecond))
		if err := c.Recv(&Message{}); err != os.ErrDeadlineExceeded {
			t.Errorf("nothing asked for: %v", err)
		}
	}
}

// Dial as DEALER turns a PUB down, as SUB a ROUTER.
func TestLibzmqWrongSocket(t *testing.T) {
	p := startLibzmq(t)
	for kind, typ := range map[string]SocketType{"PUB": DEALER, "ROUTER": SUB, "PULL": SUB} {
		_, err := Dial(context.Background(), "tcp", p.bind(kind, anyPort, ""), typ, quick())
		if !is(ErrSocketType)(err) {
			t.Errorf("%s dials %s: %v", typ, kind, err)
		}
	}
}

// go-zeromq speaks ZMTP 3.0.
func TestGoZeroMQ(t *testing.T) {
	pub := zmq4.NewPub(context.Background())
	defer pub.Close()
	if err := pub.Listen("tcp://127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	var h recorder
	stop := run(t, "tcp", pub.Addr().String(), false, quick(), &h)
	defer stop()
	eventually(t, "messages arrive", func() bool {
		for _, topic := range []string{"other", "kv-events"} {
			if err := pub.Send(zmq4.NewMsgFrom([]byte(topic), []byte("12345678"), []byte("payload"))); err != nil {
				t.Fatal(err)
			}
		}
		return h.got("kv-events", "12345678", "payload")()
	})
	if n := h.errs(); n != "[]" {
		t.Errorf("disconnected: %v", n)
	}
}
