package faults

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is how long a test waits for what has to happen.
const patience = 60 * time.Second

// process is a program that is started, killed and started again.
type process struct {
	t    *testing.T
	name string
	path string
	args []string
	env  []string
	log  string // file

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
}

func newProcess(t *testing.T, dir, name, path string, env []string, args ...string) *process {
	p := &process{t: t, name: name, path: path, args: args, env: env, log: filepath.Join(dir, name+".log")}
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			data, _ := os.ReadFile(p.log)
			t.Logf("%s:\n%s", name, data[max(0, len(data)-6000):])
		}
	})
	return p
}

// start starts the process if it does not run.
func (p *process) start() {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		return
	}
	out, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.t.Fatal(err)
	}
	defer out.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Env = append(append(os.Environ(), clockFile+"="+p.clock()), p.env...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		cmd.Wait()
		close(done)
	}()
	p.cmd, p.done = cmd, done
}

// signal sends the process a signal.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd != nil {
		p.cmd.Process.Signal(s)
	}
}

// kill ends the process as a crash would.
func (p *process) kill() { p.end(syscall.SIGKILL) }

// stop ends the process as an operator would.
func (p *process) stop() { p.end(syscall.SIGTERM) }

func (p *process) end(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return
	}
	p.cmd.Process.Signal(s)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.t.Errorf("%s does not end", p.name)
		p.cmd.Process.Kill()
		<-p.done
	}
	p.cmd = nil
}

// ports are handed out once each, from below those that the kernel gives to
// outgoing connections: who starts again finds its own free.
type ports struct {
	mu   sync.Mutex
	next int
}

// free is for all tests of the process: none gets the port of another.
var free ports

func (p *ports) take(t *testing.T) int {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for range 5000 {
		if p.next == 0 {
			p.next = 10_000 + os.Getpid()%8000
		}
		p.next++
		ln, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", p.next))
		if err == nil {
			ln.Close()
			return p.next
		}
	}
	t.Fatal("no port is free")
	return 0
}

// natsNodes makes n NATS servers, a cluster if there are several.
func natsNodes(t *testing.T, dir string, n int, change func(*natsConfig)) (nodes []*process, addrs []string) {
	t.Helper()
	built, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	var configs []natsConfig
	var routes []string
	for i := range n {
		c := natsConfig{Name: fmt.Sprint("n", i), Port: free.take(t), Dir: filepath.Join(dir, fmt.Sprint("nats", i)), MaxStore: 4 << 30}
		if n > 1 {
			c.Cluster = free.take(t)
			routes = append(routes, fmt.Sprint("nats://127.0.0.1:", c.Cluster))
		}
		if change != nil {
			change(&c)
		}
		configs = append(configs, c)
		addrs = append(addrs, fmt.Sprint("127.0.0.1:", c.Port))
	}
	for i := range configs {
		configs[i].Routes = routes
		data, err := json.Marshal(configs[i])
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, newProcess(t, dir, configs[i].Name, filepath.Join(built, "nats"), []string{asNATS + "=" + string(data)}))
	}
	return nodes, addrs
}

// await waits until cond holds.
func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func urls(addrs []string) string { return "nats://" + strings.Join(addrs, ",nats://") }
