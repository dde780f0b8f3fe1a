package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// spawned is kvmesh as a process of its own.
type spawned struct {
	cmd  *exec.Cmd
	out  *output
	logs *output
	done chan struct{} // closed when it has ended
	err  error         // how; after done
	url  string        // of its HTTP server, as far as it has one
}

// spawnKvmesh starts kvmesh with more environment variables. It is killed when the test
// ends, if it still runs then.
func spawnKvmesh(t *testing.T, env []string, args ...string) *spawned {
	t.Helper()
	p := &spawned{cmd: exec.Command(os.Args[0], args...), out: &output{}, logs: &output{}, done: make(chan struct{})}
	p.cmd.Env = append(append(os.Environ(), "KVMESH_TEST_AS_COMMAND=1"), env...)
	p.cmd.Stdout, p.cmd.Stderr = p.out, p.logs
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("kvmesh %s:\n%s", strings.Join(args, " "), endOf(p.logs.String(), 8000))
		}
	})
	return p
}

// endOf returns the end of a text.
func endOf(text string, most int) string { return text[max(0, len(text)-most):] }

// kill ends the process with SIGKILL.
func (p *spawned) kill() {
	p.cmd.Process.Kill()
	<-p.done
}

// stop ends the process with SIGTERM and fails unless it ends well.
func (p *spawned) stop(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := p.wait(t); err != nil {
		t.Fatalf("ended with %v", err)
	}
}

// wait waits until the process has ended by itself, and returns how.
func (p *spawned) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-p.done:
		return p.err
	case <-time.After(patience):
		t.Fatal("the process does not end")
		return nil
	}
}

var servingHTTP = regexp.MustCompile(`msg="serving HTTP" addr=(\S+)`)

// serving waits until the process serves HTTP.
func (p *spawned) serving(t *testing.T) {
	t.Helper()
	eventually(t, "HTTP is served", func() bool {
		select {
		case <-p.done:
			t.Fatalf("ended with %v:\n%s", p.err, p.logs)
		default:
		}
		m := servingHTTP.FindStringSubmatch(p.logs.String())
		if m != nil {
			p.url = "http://" + m[1]
		}
		return m != nil
	})
}

// ready waits until the process says that its answers are true.
func (p *spawned) ready(t *testing.T) {
	t.Helper()
	p.serving(t)
	eventually(t, "it is ready", func() bool {
		status, _, err := ask(http.MethodGet, p.url+"/ready", nil)
		return err == nil && status == http.StatusOK
	})
}

// spawnServe starts kvmesh serve on a free port and waits until it is ready.
func spawnServe(t *testing.T, dir string, args ...string) *spawned {
	t.Helper()
	p := spawnKvmesh(t, nil, append([]string{"serve", "--data-dir", dir, "--http", "127.0.0.1:0"}, args...)...)
	p.ready(t)
	return p
}

// ask makes a request, with body as JSON unless it is nil.
func ask(method, url string, body any) (status int, reply []byte, err error) {
	var reader io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return 0, nil, err
		}
		reader = strings.NewReader(string(data))
	}
	req, err := http.NewRequest(method, url, reader)
	if err != nil {
		return 0, nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	reply, err = io.ReadAll(resp.Body)
	return resp.StatusCode, reply, err
}

// mustAsk is ask for a request that succeeds.
func mustAsk(t *testing.T, method, url string, body any) []byte {
	t.Helper()
	status, reply, err := ask(method, url, body)
	if err == nil && status >= 300 {
		err = fmt.Errorf("status %d: %s", status, reply)
	}
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return reply
}
