package main

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// documentedPermissions returns what docs/security.md says that a role needs.
func documentedPermissions(t *testing.T, role string) *server.Permissions {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repository, "docs/security.md"))
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| ` + role + `[^|]*\| ([^|]*) \| ([^|]*) \|$`).FindSubmatch(text)
	if row == nil {
		t.Fatalf("docs/security.md has no permissions for %s", role)
	}
	subjects := func(cell []byte) *server.SubjectPermission {
		p := &server.SubjectPermission{}
		for _, m := range regexp.MustCompile("`([^`]+)`").FindAllSubmatch(cell, -1) {
			p.Allow = append(p.Allow, string(m[1]))
		}
		return p
	}
	return &server.Permissions{Publish: subjects(row[1]), Subscribe: subjects(row[2])}
}

// With the permissions that docs/security.md names, and no others, everything
// works; and a router may not write the log.
func TestDocumentedPermissionsAreEnough(t *testing.T) {
	var users []*server.User
	for _, role := range []string{"bridge", "indexer", "router"} {
		users = append(users, &server.User{Username: role, Password: "secret", Permissions: documentedPermissions(t, role)})
	}
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true, Users: users})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	as := func(role string) string { return "nats://" + role + ":secret@" + s.Addr().String() }
	addr := freeAddr(t)
	url := "http://" + addr
	begin(t, "bridge", "--nats", as("bridge"), "--log-level", "warn")
	begin(t, "indexer", "--nats", as("indexer"), "--http", addr, "--log-level", "warn")
	eventually(t, "the indexer is ready", func() bool {
		_, err := command(t, "health", "--server", url, "--ready")
		return err == nil
	})
	boardEngine(t, url)
	router, err := nats.Connect(as("router"), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	defer router.Close()
	eventually(t, "a router finds the prompt over NATS", func() bool {
		m, err := router.Request("kvmesh.query.m.default", []byte(`{"token_ids":[1,2,3,4,5,6,7,8]}`), time.Second)
		if err != nil {
			return false
		}
		var a struct {
			Instances map[string]struct{ GPU int }
		}
		return json.Unmarshal(m.Data, &a) == nil && a.Instances["w0"].GPU == 8
	})
	eventually(t, "the bridge shows", func() bool {
		out, err := command(t, "workers", "--server", url)
		return err == nil && strings.Contains(out, `"status": "active"`)
	})
	// Not refused by the stream, nor by anything but the permissions.
	if _, err := router.Request("kv.m.default.w0.0", []byte("x"), 300*time.Millisecond); err == nil {
		t.Error("a router may write the log")
	}
	if err := router.LastError(); err == nil || !strings.Contains(err.Error(), "ermissions") {
		t.Errorf("writing the log: %v", err)
	}
}

// What is said to be safe by default is: nothing but the loopback is bound, tokens
// of prompts are neither in the log nor in what is logged, metrics name no worker.
func TestSecurityDefaults(t *testing.T) {
	cmd, _, err := root().Find([]string{"serve"})
	if err != nil {
		t.Fatal(err)
	}
	if addr := cmd.Flags().Lookup("http").DefValue; !strings.HasPrefix(addr, "127.0.0.1:") {
		t.Errorf("HTTP is served on %q", addr)
	}
	if listen := cmd.Flags().Lookup("nats-listen").DefValue; listen != "" {
		t.Errorf("NATS listens on %q", listen)
	}
	url := startServe(t)
	boardEngine(t, url)
	eventually(t, "there are blocks", func() bool {
		out, err := command(t, "digest", "--server", url)
		return err == nil && strings.Contains(out, `"w0"`)
	})
	resp, err := http.Get(url + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "w0") {
		t.Error("a worker's name is in the metrics")
	}
}
