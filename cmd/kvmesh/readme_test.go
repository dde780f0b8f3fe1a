package main

import (
	"encoding/json"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// python returns a Python that has pyzmq and msgpack.
func python(t *testing.T) string {
	t.Helper()
	for _, p := range []string{"/usr/bin/python3", "python3"} {
		if exec.Command(p, "-c", "import zmq, msgpack").Run() == nil {
			return p
		}
	}
	t.Skip("no Python with pyzmq and msgpack here")
	return ""
}

// TestReadmeExample does what README.md tells its reader to try, with other
// ports: kvmesh serve, the curl calls, the publisher in Python. The reply has to
// be the one that is printed there.
func TestReadmeExample(t *testing.T) {
	t.Parallel()
	interpreter := python(t)
	data, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	readme := string(data)
	part := func(what, pattern string) string {
		t.Helper()
		m := regexp.MustCompile(pattern).FindStringSubmatch(readme)
		if m == nil {
			t.Fatalf("README.md has no %s", what)
		}
		return m[1]
	}
	registration := part("registration", `curl -s localhost:8090/register -d '(.*)'`)
	publisher := part("publisher", `(?s)cat > publish.py <<'EOF'\n(.*?\n)EOF\n`)
	query := part("query", `curl -s localhost:8090/query -d '(.*)'`)
	reply := part("reply", `\n    (\{"scores".*\})\n`)
	const port = ":5557"
	if !strings.Contains(registration, port) || !strings.Contains(publisher, port) {
		t.Fatal("worker and publisher have other ports in README.md now")
	}
	_, free, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	registration = strings.ReplaceAll(registration, port, ":"+free)
	script := filepath.Join(t.TempDir(), "publish.py")
	if err := os.WriteFile(script, []byte(strings.ReplaceAll(publisher, port, ":"+free)), 0o600); err != nil {
		t.Fatal(err)
	}

	p := spawnServe(t, t.TempDir())
	mustAsk(t, http.MethodPost, p.url+"/register", json.RawMessage(registration))
	if out, err := exec.Command(interpreter, script).CombinedOutput(); err != nil {
		t.Fatalf("publisher: %v\n%s", err, out)
	}
	var have, want any
	if err := json.Unmarshal([]byte(reply), &want); err != nil {
		t.Fatalf("the reply in README.md: %v", err)
	}
	eventually(t, "the reply of README.md: "+reply, func() bool {
		if err := json.Unmarshal(mustAsk(t, http.MethodPost, p.url+"/query", json.RawMessage(query)), &have); err != nil {
			t.Fatal(err)
		}
		return reflect.DeepEqual(have, want)
	})
}
