package faults

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Wall clocks that jump are those of single processes: nothing on this machine may
// notice. The binaries are built with a package time that adds, to what the wall
// clock says, what a file says. Clocks that only count on are as they are.

// clockFile is the environment variable that names the file: seconds, as text.
const clockFile = "KVMESH_FAULTS_CLOCK"

// clockReader is what is added to package os, which has files and is in every
// program.
const clockReader = `package os

import (
	"strconv"
	"time"
)

func init() {
	name := Getenv("` + clockFile + `")
	if name == "" {
		return
	}
	go func() {
		for ; ; time.Sleep(10 * time.Millisecond) {
			if text, err := ReadFile(name); err == nil {
				if seconds, err := strconv.ParseInt(string(text), 10, 64); err == nil {
					time.FaultJump.Store(seconds)
				}
			}
		}
	}()
}
`

// clockOverlay writes, into dir, what go build -overlay takes to build programs
// whose clocks jump. It returns the file's name.
func clockOverlay(dir string) (string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	src := filepath.Join(strings.TrimSpace(string(root)), "src")
	at := filepath.Join(src, "time", "time.go")
	text, err := os.ReadFile(at)
	if err != nil {
		return "", err
	}
	const reads = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(text), reads) != 1 {
		return "", errors.New("package time of this Go reads the clock in another way: change reads")
	}
	changed := strings.Replace(string(text), reads, reads+"\tsec += FaultJump.Load()\n", 1)
	changed = strings.Replace(changed, "import (\n", "import (\n\t\"sync/atomic\"\n", 1) + "\nvar FaultJump atomic.Int64\n"
	replace := map[string]string{}
	for name, text := range map[string]string{at: changed, filepath.Join(src, "os", "faultclock.go"): clockReader} {
		file := filepath.Join(dir, filepath.Base(name))
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return "", err
		}
		replace[name] = file
	}
	overlay, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	file := filepath.Join(dir, "overlay.json")
	return file, os.WriteFile(file, overlay, 0o600)
}

// jump has the wall clock of the process, which may be running or not, say so
// much more than it is.
func (p *process) jump(seconds int) {
	file := p.clock()
	// Renamed, so that nobody reads half of it.
	if err := os.WriteFile(file+".new", fmt.Append(nil, seconds), 0o600); err != nil {
		p.t.Error(err)
		return
	}
	if err := os.Rename(file+".new", file); err != nil {
		p.t.Error(err)
	}
}

func (p *process) clock() string { return strings.TrimSuffix(p.log, ".log") + ".clock" }

// TestClockJumps sees a process's clock jump, both ways: the fault is one.
func TestClockJumps(t *testing.T) {
	t.Parallel()
	d := deploy(t, 8, size{nodes: 1, bridges: 1, indexers: 1, engines: 1}, nil)
	d.ready(d.askers[0])
	says := func() time.Duration {
		resp, err := d.client.Get(d.askers[0].url + "/health")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		date, err := http.ParseTime(resp.Header.Get("Date"))
		if err != nil {
			t.Fatal(err)
		}
		return time.Until(date)
	}
	for _, seconds := range []int{3600, -3600, 0} {
		d.indexers[0].jump(seconds)
		await(t, "the clock has jumped", func() bool { return (says() - time.Duration(seconds)*time.Second).Abs() < time.Minute })
	}
	d.finish()
}
