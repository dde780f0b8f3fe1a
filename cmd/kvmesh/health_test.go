package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
)

func TestHealthOfServer(t *testing.T) {
	url := startServe(t, "--http-token", "secret")
	for _, args := range [][]string{{"health", "--server", url}, {"health", "--server", url, "--ready"}} {
		if _, err := command(t, args...); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	}
	if _, err := command(t, "health", "--server", "http://"+freeAddr(t)); err == nil {
		t.Error("nobody is there, and that is well")
	}
}

// An indexer without NATS is alive, but not ready, and says why.
func TestHealthOfWhatIsNotReady(t *testing.T) {
	addr := freeAddr(t)
	begin(t, "indexer", "--nats", "nats://"+freeAddr(t), "--http", addr)
	eventually(t, "the indexer is alive", func() bool {
		_, err := command(t, "health", "--server", "http://"+addr)
		return err == nil
	})
	_, err := command(t, "health", "--server", "http://"+addr, "--ready")
	mustContain(t, errText(t, err), "503", "not ready")
}

func TestHealthOfBridge(t *testing.T) {
	addr := freeAddr(t)
	begin(t, "bridge", "--nats", startNATS(t), "--http", addr)
	eventually(t, "the bridge is alive", func() bool {
		_, err := command(t, "health", "--server", "http://"+addr)
		return err == nil
	})
}

func TestHealthReportsReasons(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusServiceUnavailable)
		w.Write([]byte(`{"ready":false,"reasons":["the log is away","the catalog too"]}`))
	}))
	defer s.Close()
	_, err := command(t, "health", "--server", s.URL, "--ready")
	mustContain(t, errText(t, err), "503", "the log is away; the catalog too")
}

func TestHealthOfNATS(t *testing.T) {
	if _, err := command(t, "health", "--nats", startNATS(t)); err != nil {
		t.Error(err)
	}
	_, err := command(t, "health", "--nats", "nats://user:hush@"+freeAddr(t))
	if text := errText(t, err); strings.Contains(text, "hush") {
		t.Errorf("the password is in the error: %s", text)
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	defer func() { s.Shutdown(); s.WaitForShutdown() }()
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	if _, err := command(t, "health", "--nats", s.ClientURL()); err == nil {
		t.Error("a server without JetStream is well")
	}
}

func TestMockAdvertises(t *testing.T) {
	out, _ := begin(t, "mock", "--port", "0", "--advertise", "engines.example")
	eventually(t, "the mock engine says where it is", func() bool { return strings.Contains(out.String(), "\n") })
	want := regexp.MustCompile(`^mock-0:0=tcp://engines\.example:\d+,replay=tcp://engines\.example:\d+\n$`)
	if !want.MatchString(out.String()) {
		t.Errorf("mock engines are at %q", out)
	}
}

// `make images` and docker-compose.yml have to name the same images, and the NATS
// server of the one has to be that of go.mod.
func TestComposeNamesTheImagesThatAreBuilt(t *testing.T) {
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	version := regexp.MustCompile(`nats-server/v2 v(\S+)`).FindSubmatch(mod)
	if version == nil {
		t.Fatal("no nats-server in go.mod")
	}
	compose, err := os.ReadFile("../../docker-compose.yml")
	if err != nil {
		t.Fatal(err)
	}
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	mustContain(t, string(compose), "${KVMESH_NATS_IMAGE:-nats:"+string(version[1])+"-alpine}", "${KVMESH_IMAGE:-kvmesh:latest}")
	mustContain(t, string(makefile), "-alpine\n", "KVMESH_IMAGE ?= kvmesh:latest")
}
