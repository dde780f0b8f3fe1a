package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"

	"github.com/kvmesh/kvmesh/integration/mock"
)

// guarded is a NATS server that does not let everybody in: what it is started
// with, and the flags of those it lets in, and of some it does not.
type guarded struct {
	change  func(o *server.Options)
	in, out []string
}

// guards returns one server a form of authentication.
func guards(t *testing.T) map[string]guarded {
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	nkeyFile := func(name string) (path, public string) {
		kp, err := nkeys.CreateUser()
		if err != nil {
			t.Fatal(err)
		}
		seed, err := kp.Seed()
		if err != nil {
			t.Fatal(err)
		}
		public, err = kp.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return write(name, seed), public
	}
	known, public := nkeyFile("user.nk")
	stranger, _ := nkeyFile("stranger.nk")
	ca := newAuthority(t)
	caFile := write("ca.pem", ca.pem)
	serverCert := ca.issue(t, "127.0.0.1")
	certPEM, keyPEM := ca.issuePEM(t, "client")
	certFile, keyFile := write("client.pem", certPEM), write("client.key", keyPEM)
	out := map[string]guarded{
		"user and password": {
			change: func(o *server.Options) { o.Users = []*server.User{{Username: "kvmesh", Password: "open sesame"}} },
			in:     []string{"--nats-user", "kvmesh", "--nats-password", "open sesame"},
			out:    []string{"--nats-user", "kvmesh", "--nats-password", "no idea"},
		},
		"token": {
			change: func(o *server.Options) { o.Authorization = "open sesame" },
			in:     []string{"--nats-token", "open sesame"},
			out:    []string{"--nats-token", "no idea"},
		},
		"nkey": {
			change: func(o *server.Options) { o.Nkeys = []*server.NkeyUser{{Nkey: public}} },
			in:     []string{"--nats-nkey", known},
			out:    []string{"--nats-nkey", stranger},
		},
		"TLS": {
			change: func(o *server.Options) {
				o.TLS, o.TLSTimeout, o.TLSConfig = true, 5, &tls.Config{Certificates: []tls.Certificate{serverCert}}
			},
			in: []string{"--nats-ca", caFile},
		},
		"TLS on both sides": {
			change: func(o *server.Options) {
				o.TLS, o.TLSTimeout, o.TLSVerify = true, 5, true
				o.TLSConfig = &tls.Config{Certificates: []tls.Certificate{serverCert}, ClientCAs: ca.pool, ClientAuth: tls.RequireAndVerifyClientCert}
			},
			in:  []string{"--nats-ca", caFile, "--nats-cert", certFile, "--nats-key", keyFile},
			out: []string{"--nats-ca", caFile},
		},
	}
	creds, strangerCreds, change := operated(t)
	out["credentials"] = guarded{change: change, in: []string{"--nats-creds", write("user.creds", creds)}, out: []string{"--nats-creds", write("stranger.creds", strangerCreds)}}
	return out
}

// operated returns a server that an operator runs, with an account that has
// JetStream: the credentials of a user of it, and of a user of nobody's.
func operated(t *testing.T) (creds, stranger []byte, change func(o *server.Options)) {
	key := func(create func() (nkeys.KeyPair, error)) (nkeys.KeyPair, string) {
		kp, err := create()
		if err != nil {
			t.Fatal(err)
		}
		public, err := kp.PublicKey()
		if err != nil {
			t.Fatal(err)
		}
		return kp, public
	}
	operator, operatorPublic := key(nkeys.CreateOperator)
	account, accountPublic := key(nkeys.CreateAccount)
	_, systemPublic := key(nkeys.CreateAccount)
	other, _ := key(nkeys.CreateAccount)
	encode := func(claims interface {
		Encode(nkeys.KeyPair) (string, error)
	}, by nkeys.KeyPair) string {
		text, err := claims.Encode(by)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	user := func(by nkeys.KeyPair) []byte {
		kp, public := key(nkeys.CreateUser)
		seed, err := kp.Seed()
		if err != nil {
			t.Fatal(err)
		}
		data, err := jwt.FormatUserConfig(encode(jwt.NewUserClaims(public), by), seed)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	claims := jwt.NewAccountClaims(accountPublic)
	claims.Limits.JetStreamLimits = jwt.JetStreamLimits{DiskStorage: -1, MemoryStorage: -1, Streams: -1, Consumer: -1}
	resolver := &server.MemAccResolver{}
	for public, text := range map[string]string{accountPublic: encode(claims, operator), systemPublic: encode(jwt.NewAccountClaims(systemPublic), operator)} {
		if err := resolver.Store(public, text); err != nil {
			t.Fatal(err)
		}
	}
	trusted := jwt.NewOperatorClaims(operatorPublic)
	return user(account), user(other), func(o *server.Options) {
		o.TrustedOperators = []*jwt.OperatorClaims{trusted}
		o.AccountResolver = resolver
		o.SystemAccount = systemPublic
	}
}

func TestNATSLetsIn(t *testing.T) {
	for name, g := range guards(t) {
		t.Run(name, func(t *testing.T) {
			o := &server.Options{ServerName: "guarded", Host: "127.0.0.1", Port: -1, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true}
			g.change(o)
			url := startGuarded(t, o).ClientURL()
			meshWorks(t, append([]string{"--nats", url}, g.in...))
			if _, err := command(t, append([]string{"health", "--nats", url}, g.in...)...); err != nil {
				t.Error(err)
			}
			for _, flags := range [][]string{nil, g.out} {
				if _, err := command(t, append([]string{"health", "--nats", url}, flags...)...); err == nil {
					t.Errorf("with %q, it is let in", flags)
				}
			}
		})
	}
}

func startGuarded(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	s, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	if !s.ReadyForConnections(patience) {
		t.Fatal("NATS does not start")
	}
	return s
}

// meshWorks runs bridge and indexer with the flags, and looks whether what an
// engine says arrives.
func meshWorks(t *testing.T, flags []string) {
	t.Helper()
	e, err := mock.NewEngine(mock.Options{ReplayEndpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Start(); err != nil {
		t.Fatal(err)
	}
	defer e.Stop()
	addr := freeAddr(t)
	_, stop := begin(t, append([]string{"serve", "--http", addr, "--log-level", "warn", "--model", "m", "--worker", "w0=" + e.Addr() + ",replay=" + e.ReplayAddr()}, flags...)...)
	defer stop()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := e.WaitSubscribers(ctx, 1); err != nil {
		t.Fatal(err)
	}
	load := mock.NewWorkload(mock.WorkloadOptions{})
	if _, err := e.Publish(load.Next()...); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the index has the engine's blocks", func() bool {
		status, body, err := ask(http.MethodPost, "http://"+addr+"/query", map[string]any{"model_name": "m", "token_ids": load.Prompts(1)[0].Tokens})
		return err == nil && status == http.StatusOK && len(body) > 0 && bytes.Contains(body, []byte(`"w0"`))
	})
}

// TestJetStreamDomain runs bridge and indexer on a leaf node that has no
// JetStream: the log is in the hub's domain.
func TestJetStreamDomain(t *testing.T) {
	hub := startGuarded(t, &server.Options{ServerName: "hub", Host: "127.0.0.1", Port: -1, JetStream: true, JetStreamDomain: "hub", StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
		LeafNode: server.LeafNodeOpts{Host: "127.0.0.1", Port: -1}})
	at, err := url.Parse("nats-leaf://" + net.JoinHostPort("127.0.0.1", portOf(t, hub)))
	if err != nil {
		t.Fatal(err)
	}
	leaf := startGuarded(t, &server.Options{ServerName: "leaf", Host: "127.0.0.1", Port: -1, NoSigs: true, NoLog: true,
		LeafNode: server.LeafNodeOpts{Remotes: []*server.RemoteLeafOpts{{URLs: []*url.URL{at}}}}})
	eventually(t, "the leaf node is connected", func() bool { return leaf.NumLeafNodes() == 1 })
	meshWorks(t, []string{"--nats", leaf.ClientURL(), "--nats-domain", "hub"})
}

func portOf(t *testing.T, s *server.Server) string {
	t.Helper()
	info, err := s.Varz(nil)
	if err != nil {
		t.Fatal(err)
	}
	return big.NewInt(int64(info.LeafNode.Port)).String()
}

func TestNATSFlagsThatContradict(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--nats-user", "a", "--nats-token", "b"}, "want one"},
		{[]string{"--nats-password", "a"}, "without --nats-user"},
		{[]string{"--nats-cert", "a"}, "go together"},
		{[]string{"--nats-creds", "/does/not/exist"}, "--nats-creds: "},
		{[]string{"--nats-nkey", os.DevNull}, "--nats-nkey: "},
	} {
		_, err := command(t, append([]string{"health", "--nats", "nats://127.0.0.1:1"}, c.args...)...)
		mustContain(t, errText(t, err), c.want)
	}
	_, err := command(t, "serve", "--data-dir", t.TempDir(), "--http", "127.0.0.1:0", "--nats-token", "a")
	mustContain(t, errText(t, err), "--nats")
}

// authority issues certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	pool *x509.CertPool
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{cert: cert, key: key, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pool: x509.NewCertPool()}
	a.pool.AddCert(cert)
	return a
}

func (a *authority) issuePEM(t *testing.T, name string) (certPEM, keyPEM []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	if ip := net.ParseIP(name); ip != nil {
		template.IPAddresses = []net.IP{ip}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}

func (a *authority) issue(t *testing.T, name string) tls.Certificate {
	t.Helper()
	pair, err := tls.X509KeyPair(a.issuePEM(t, name))
	if err != nil {
		t.Fatal(err)
	}
	return pair
}
