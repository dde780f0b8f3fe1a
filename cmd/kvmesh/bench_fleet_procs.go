package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/integration/engines"
	"github.com/kvmesh/kvmesh/integration/measure"
)

// process is a kvmesh in a process of its own.
type process struct {
	role  string
	cmd   *exec.Cmd
	ended chan struct{}
	err   error // how it ended
	logs  tail

	http  string // address of its HTTP
	pprof string // and of its profiles; empty: none

	mu     sync.Mutex
	most   measure.Process // the most of everything
	marked time.Duration   // processor time at mark
}

// spawn starts this binary with other arguments.
func spawn(role string, args ...string) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{role: role, cmd: exec.Command(exe, args...), ended: make(chan struct{})}
	p.cmd.Stderr = &p.logs
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // not to outlive a benchmark that is killed
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("%s: %w", role, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	return p, nil
}

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if most := 4096; len(t.buf) > most {
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-most:]...)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf))
}

// stop ends the process, by force if it takes its time.
func (p *process) stop() {
	p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(20 * time.Second):
		p.cmd.Process.Kill()
		<-p.ended
	}
}

// alive waits until the process answers on a path of its HTTP.
func (p *process) alive(ctx context.Context, path string) error {
	return until(ctx, p.role+" answers", func() (bool, error) {
		select {
		case <-p.ended:
			return false, fmt.Errorf("%s ended: %v: %s", p.role, p.err, p.logs.String())
		default:
		}
		resp, err := http.Get("http://" + p.http + path)
		if err != nil {
			return false, nil
		}
		defer resp.Body.Close()
		io.Copy(io.Discard, resp.Body)
		return resp.StatusCode == http.StatusOK, nil
	})
}

// look looks at the process and keeps the most of what it sees.
func (p *process) look() (measure.Process, error) {
	now, err := measure.Of(p.cmd.Process.Pid)
	if err != nil {
		return now, fmt.Errorf("%s: %w: %s", p.role, err, p.logs.String())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	m := &p.most
	m.Threads, m.RSS = max(m.Threads, now.Threads), max(m.RSS, now.RSS)
	m.FDs, m.Sockets = max(m.FDs, now.FDs), max(m.Sockets, now.Sockets)
	return now, nil
}

// mark begins the measuring of processor time, and of the most of everything.
func (p *process) mark() error {
	p.mu.Lock()
	p.most = measure.Process{}
	p.mu.Unlock()
	now, err := p.look()
	p.marked = now.CPU
	return err
}

// spent returns the processor time since mark.
func (p *process) spent() (time.Duration, error) {
	now, err := p.look()
	return now.CPU - p.marked, err
}

// profile returns a profile of the process, of its CPU for so long or, if that is
// 0, of its memory.
func (p *process) profile(ctx context.Context, d time.Duration) ([]byte, error) {
	at := url.URL{Scheme: "http", Host: p.pprof, Path: "/debug/pprof/profile", RawQuery: "seconds=" + strconv.Itoa(int(d.Seconds()))}
	if d == 0 {
		at.Path, at.RawQuery = "/debug/pprof/heap", "gc=1"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// metric returns the value of one of the process's metrics that has no labels but
// those of its scope.
func (p *process) metric(ctx context.Context, name string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+p.http+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if f := strings.Fields(lines.Text()); len(f) == 2 && (f[0] == name || strings.HasPrefix(f[0], name+"{")) {
			return strconv.ParseFloat(f[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no metric %s: %s", p.role, name, resp.Status)
}

// until waits until f says so, for at most two minutes.
func until(ctx context.Context, what string, f func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for {
		ok, err := f()
		if ok || err != nil {
			return err
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		}
	}
}

// freePorts returns addresses on the loopback that nobody listens on now.
func freePorts(n int) ([]string, error) {
	var out []string
	for range n {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer ln.Close() // when all are found, so that they differ
		out = append(out, ln.Addr().String())
	}
	return out, nil
}

// portsOf returns the ports of endpoints.
func portsOf(workers []engines.Described, endpoint func(*engines.Described) string) (map[int]bool, error) {
	out := map[int]bool{}
	for i := range workers {
		u, err := url.Parse(endpoint(&workers[i]))
		if err != nil {
			return nil, err
		}
		port, err := strconv.Atoi(u.Port())
		if err != nil {
			return nil, errors.New("a worker without a port: " + endpoint(&workers[i]))
		}
		out[port] = true
	}
	return out, nil
}
