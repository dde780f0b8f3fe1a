package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// workersOf returns the registered workers of a server as "instance model".
func workersOf(t *testing.T, url string) []string {
	t.Helper()
	var workers []struct {
		Instance string `json:"instance_id"`
		Model    string `json:"model_name"`
	}
	if err := json.Unmarshal(mustAsk(t, http.MethodGet, url+"/workers", nil), &workers); err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, w := range workers {
		out = append(out, w.Instance+" "+w.Model)
	}
	return out
}

// TestServeTakesSettings starts serve with its settings on the command line, in
// the environment and in a file; the first wins over the second, and that over
// the third.
func TestServeTakesSettings(t *testing.T) {
	const worker = "w0=tcp://127.0.0.1:9"
	file := filepath.Join(t.TempDir(), "kvmesh.yaml")
	write := func(text string) {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		file string
		env  []string
		args []string
		want string
	}{
		"command line": {args: []string{"--worker", worker, "--model", "flag"}, want: "w0 flag"},
		"environment":  {env: []string{"KVMESH_WORKER=" + worker, "KVMESH_MODEL=env"}, want: "w0 env"},
		"file":         {file: "worker:\n  - " + worker + "\nmodel: file\n", want: "w0 file"},
		"file named in the environment": {file: "worker: " + worker + "\nmodel: file\n", env: []string{"KVMESH_CONFIG=" + file},
			want: "w0 file"},
		"all": {file: "model: file\nworker: x=tcp://127.0.0.1:9\n", env: []string{"KVMESH_MODEL=env", "KVMESH_WORKER=" + worker},
			args: []string{"--model", "flag"}, want: "w0 flag"},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0"}, c.args...)
			if c.file != "" {
				write(c.file)
				args = append(args, "--config", file)
			}
			p := spawnKvmesh(t, c.env, args...)
			p.ready(t)
			eventually(t, "the worker is registered", func() bool {
				have := workersOf(t, p.url)
				return len(have) == 1 && have[0] == c.want
			})
			p.stop(t)
		})
	}
}

// TestServeRefuses starts serve with what can't work: it ends at once, says what
// is wrong, and leaves nothing running.
func TestServeRefuses(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	dir := t.TempDir()
	notADir := filepath.Join(dir, "file")
	if err := os.WriteFile(notADir, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"port in use":           {[]string{"--http", taken.Addr().String()}, []string{taken.Addr().String(), "in use"}},
		"NATS port in use":      {[]string{"--nats-listen", taken.Addr().String()}, []string{taken.Addr().String(), "NATS"}},
		"data-dir is a file":    {[]string{"--data-dir", notADir}, []string{notADir}},
		"no certificate":        {[]string{"--http-tls-cert", filepath.Join(dir, "none.pem"), "--http-tls-key", filepath.Join(dir, "none.key")}, []string{"none.pem"}},
		"bad worker":            {[]string{"--worker", "w0"}, []string{"--worker", `"w0"`}},
		"bad endpoint":          {[]string{"--worker", "w0=udp://h:1"}, []string{"--worker", "udp://h:1"}},
		"unknown argument":      {[]string{"now"}, []string{"now"}},
		"unknown setting":       {[]string{"--no-such-setting"}, []string{"--no-such-setting"}},
		"unknown log level":     {[]string{"--log-level", "loud"}, []string{"--log-level", "loud"}},
		"unknown policy":        {[]string{"--on-gap", "shrug"}, []string{"shrug"}},
		"unknown medium's tier": {[]string{"--medium", "TAPE=attic"}, []string{"--medium", "attic"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := spawnKvmesh(t, nil, append([]string{"serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0"}, c.args...)...)
			if err := p.wait(t); err == nil {
				t.Error("it ended well")
			}
			mustContain(t, p.logs.String(), c.want...)
		})
	}
}

// TestServeStops ends serve while a client holds a connection: it ends soon, its
// port is free at once, and the next process on the directory has the workers and
// the blocks.
func TestServeStops(t *testing.T) {
	t.Parallel()
	e, err := mock.NewEngine(mock.Options{BlockSize: 4, ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Stop()
	if _, err := e.Publish(model.Event{Hashes: []model.Hash{model.Int(1)}, Tokens: []int64{1, 2, 3, 4}}); err != nil {
		t.Fatal(err)
	}
	dir, addr := t.TempDir(), freeAddr(t)
	start := func(args ...string) *spawned {
		p := spawnKvmesh(t, nil, append([]string{"serve", "--data-dir", dir, "--http", addr}, args...)...)
		p.ready(t)
		return p
	}
	holds := func(p *spawned) {
		t.Helper()
		eventually(t, "the block is in the index", func() bool {
			_, reply, err := ask(http.MethodPost, p.url+"/query", map[string]any{"model_name": "m", "token_ids": []int{1, 2, 3, 4}})
			return err == nil && strings.Contains(string(reply), `"longest_matched":4`)
		})
	}
	p := start("--worker", fmt.Sprintf("w0=%s,replay=%s", e.Addr(), e.ReplayAddr()), "--model", "m", "--block-size", "4")
	holds(p)
	conn, err := net.Dial("tcp", addr) // a client that never asks anything
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	p.stop(t)
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatalf("the port is not free: %v", err)
	}
	l.Close()

	e.Stop()
	p = start()
	if have := workersOf(t, p.url); len(have) != 1 || have[0] != "w0 m" {
		t.Errorf("workers after the restart: %q", have)
	}
	holds(p)

	second := spawnKvmesh(t, nil, "serve", "--data-dir", dir, "--http", "127.0.0.1:0")
	if err := second.wait(t); err == nil {
		t.Error("two processes share a directory")
	}
	mustContain(t, second.logs.String(), dir, "in use by another kvmesh")
	holds(p)
	p.kill()
	p = start()
	holds(p)
	p.stop(t)
}

// TestServeWithoutNATS starts serve while its NATS server is not there: it says
// so, without the password, answers that it is not ready, goes on trying, and
// works when NATS comes.
func TestServeWithoutNATS(t *testing.T) {
	t.Parallel()
	addr := freeAddr(t)
	p := spawnKvmesh(t, nil, "serve", "--nats", "nats://user:secret@"+addr, "--http", "127.0.0.1:0", "--worker", "w0=tcp://127.0.0.1:9", "--model", "m")
	p.serving(t)
	eventually(t, "it says that NATS is not there", func() bool { return strings.Contains(p.logs.String(), addr) })
	mustContain(t, p.logs.String(), "can't reach NATS, trying again")
	if strings.Contains(p.logs.String(), "secret") {
		t.Error("the password is in the log")
	}
	if status, reply, err := ask(http.MethodGet, p.url+"/ready", nil); err != nil || status != http.StatusServiceUnavailable {
		t.Errorf("/ready: %d %s %v", status, reply, err)
	}
	if status, _, err := ask(http.MethodGet, p.url+"/health", nil); err != nil || status != http.StatusOK {
		t.Errorf("/health: %d %v", status, err)
	}
	status, reply, err := ask(http.MethodPost, p.url+"/register", map[string]any{"instance_id": "w1", "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 16})
	if err != nil || status != http.StatusServiceUnavailable {
		t.Errorf("/register: %d %s %v", status, reply, err)
	}

	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	number := 0
	fmt.Sscan(port, &number)
	s, err := server.NewServer(&server.Options{Host: host, Port: number, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true, Username: "user", Password: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	p.ready(t)
	eventually(t, "the worker is registered", func() bool { return len(workersOf(t, p.url)) == 1 })
	p.stop(t)
}

// TestVerbs uses the client commands on a server that wants a token.
func TestVerbs(t *testing.T) {
	e, err := mock.NewEngine(mock.Options{BlockSize: 4, ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Stop()
	if _, err := e.Publish(model.Event{Hashes: []model.Hash{model.Int(1)}, Tokens: []int64{1, 2, 3, 4}}); err != nil {
		t.Fatal(err)
	}
	p := spawnServe(t, t.TempDir(), "--http-token", "open sesame")
	verb := func(args ...string) (string, error) {
		return command(t, append(args, "--server", p.url, "--token", "open sesame")...)
	}
	must := func(args ...string) string {
		t.Helper()
		out, err := verb(args...)
		if err != nil {
			t.Fatalf("%s: %v", strings.Join(args, " "), err)
		}
		return out
	}
	if _, err := command(t, "workers", "--server", p.url); !strings.Contains(errText(t, err), "token") {
		t.Errorf("without a token: %v", err)
	}
	if _, err := command(t, "workers", "--server", p.url, "--token", "wrong"); !strings.Contains(errText(t, err), "token") {
		t.Errorf("with a wrong token: %v", err)
	}
	must("register", "--worker", fmt.Sprintf("w0=%s,replay=%s", e.Addr(), e.ReplayAddr()), "--model", "m", "--block-size", "4")
	mustContain(t, must("workers", "--model", "m"), `"instance_id": "w0"`, e.Addr())
	if out := must("workers", "--model", "other"); strings.Contains(out, "w0") {
		t.Errorf("workers of another model: %s", out)
	}
	eventually(t, "the query finds the block", func() bool {
		return strings.Contains(must("query", "--model", "m", "1,2,3,4,5"), `"longest_matched": 4`)
	})
	mustContain(t, must("query", "--model", "m", "[1, 2, 3, 4]"), `"gpu": 4`)
	mustContain(t, must("dump"), `"m:default"`, `"storage_tier": "device"`)
	mustContain(t, must("digest"), `"count": 1`)
	if _, err := verb("query", "--model", "nobody's", "1,2"); !strings.Contains(errText(t, err), "nobody's") {
		t.Errorf("query of an unknown model: %v", err)
	}
	if _, err := verb("query", "--model", "m", "1,two"); err == nil {
		t.Error("a query of words is answered")
	}
	if _, err := verb("register", "--worker", "w0=tcp://127.0.0.1:9", "--model", "m", "--block-size", "4"); !strings.Contains(errText(t, err), "w0") {
		t.Errorf("a registration that contradicts: %v", err)
	}
	must("unregister", "--instance", "w0", "--model", "m")
	if out := must("workers"); strings.Contains(out, "w0") {
		t.Errorf("workers after unregister: %s", out)
	}
	if _, err := verb("unregister", "--instance", "w0", "--model", "m"); !strings.Contains(errText(t, err), "w0") {
		t.Errorf("unregistered twice: %v", err)
	}
	p.stop(t)
	if _, err := verb("workers"); !strings.Contains(errText(t, err), p.url) {
		t.Errorf("nobody there: %v", err)
	}
}

// certificate writes a certificate for the loopback that signs itself.
func certificate(t *testing.T) (certFile, keyFile string, pool *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvmesh test"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, data := range map[string][]byte{certFile: certPEM, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})} {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pool = x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return certFile, keyFile, pool
}

func TestServeTLS(t *testing.T) {
	certFile, keyFile, pool := certificate(t)
	p := spawnKvmesh(t, nil, "serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0", "--http-tls-cert", certFile, "--http-tls-key", keyFile)
	p.serving(t)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, DisableKeepAlives: true}}
	url := "https" + strings.TrimPrefix(p.url, "http")
	eventually(t, "it is ready over HTTPS", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/ready", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if status, reply, err := ask(http.MethodGet, p.url+"/health", nil); err == nil && status == http.StatusOK {
		t.Errorf("it answers without TLS: %s", reply)
	}
	p.stop(t)
}
