package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if os.Getenv("KVMESH_TEST_AS_COMMAND") != "" { // a test has started its own binary as kvmesh
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m,
		// The client's idle connections end by themselves.
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"),
		// A NATS server that is shut down while a stream is being made leaves its store behind.
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server.(*fileStore).flushStreamStateLoop"),
		goleak.IgnoreTopFunction("github.com/nats-io/nats-server/v2/server/ats.Register.func1"))
}

// patience is how long a test waits for something that does come about.
const patience = 60 * time.Second

// output is what a command writes. It may be read while the command runs.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// command runs a command line to its end and returns what it wrote to its
// standard output.
func command(t *testing.T, args ...string) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	out := &output{}
	cmd := root()
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(&output{})
	err := cmd.ExecuteContext(ctx)
	return out.String(), err
}

// begin runs a command line until the test or stop ends it.
func begin(t *testing.T, args ...string) (out *output, stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	out = &output{}
	logs := &output{}
	done := make(chan error, 1)
	cmd := root()
	cmd.SetArgs(args)
	cmd.SetOut(out)
	cmd.SetErr(logs)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil && ctx.Err() == nil {
			t.Errorf("kvmesh %s: %v", strings.Join(args, " "), err)
		}
		if t.Failed() {
			t.Logf("kvmesh %s:\n%s", strings.Join(args, " "), logs)
		}
	})
	t.Cleanup(stop)
	return out, stop
}

// eventually waits until ok says so.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// freeAddr returns an address that nobody listens on now.
func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// startNATS starts a NATS server with JetStream and returns its URL.
func startNATS(t *testing.T) string {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	return s.ClientURL()
}

// startServe runs `kvmesh serve` with what args add, and returns its URL when it
// is ready.
func startServe(t *testing.T, args ...string) string {
	t.Helper()
	addr := freeAddr(t)
	begin(t, append([]string{"serve", "--data-dir", t.TempDir(), "--http", addr, "--log-level", "warn"}, args...)...)
	url := "http://" + addr
	eventually(t, "kvmesh serve is ready", func() bool {
		resp, err := http.Get(url + "/ready")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	return url
}

// mustContain fails unless text has all parts.
func mustContain(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !strings.Contains(text, p) {
			t.Errorf("%q is not in\n%.2000s", p, text)
		}
	}
}

// errText returns the text of an error, which has to be one.
func errText(t *testing.T, err error) string {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	return fmt.Sprint(err)
}
