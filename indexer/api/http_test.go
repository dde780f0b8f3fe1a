package api_test

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// TestErrors makes each request that is wrong in one way.
func TestErrors(t *testing.T) {
	w := newWorld(t, options{})
	w.register(at("w0", 0))
	const good = `{"model_name":"m/7b","token_ids":[1,2,3,4]}`
	for _, c := range []struct {
		method, path, contentType, body string
		status                          int
		code                            string
	}{
		{"GET", "/nowhere", "", "", 404, "unknown_path"},
		{"POST", "/", "", "", 404, "unknown_path"},
		{"GET", "/query", "", "", 405, "method"},
		{"PUT", "/query_by_hash", "", "", 405, "method"},
		{"DELETE", "/register", "", "", 405, "method"},
		{"POST", "/dump", "", "", 405, "method"},
		{"POST", "/health", "", "", 405, "method"},

		{"POST", "/query", "", "", 400, "bad_request"},
		{"POST", "/query", "", "[1]", 400, "bad_request"},
		{"POST", "/query", "", "{", 400, "bad_request"},
		{"POST", "/query", "", good + "x", 400, "bad_request"},
		{"POST", "/query", "", `{"token_ids":[1]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"","token_ids":[1]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b"}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":null}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":"1"}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[1.0]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[1e3]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[4294967296]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[-1]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":7,"token_ids":[1]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[1],"top":-1}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","token_ids":[1],"min_log_seq":"1"}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","queries":{}}`, 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"m/7b","queries":[{}],"token_ids":[1]}`, 400, "bad_request"},
		{"POST", "/query", "", `{"a":` + strings.Repeat("[", 100_000), 400, "bad_request"},
		{"POST", "/query", "", `{"model_name":"other","token_ids":[1]}`, 404, "unknown_partition"},
		{"POST", "/query", "", `{"model_name":"m/7b","routing_group":"other","token_ids":[1]}`, 404, "unknown_partition"},
		{"POST", "/query", "multipart/form-data; boundary=x", good, 415, "media_type"},
		{"POST", "/query", "application/xml", good, 415, "media_type"},
		{"POST", "/query", "application/octet-stream", "\x01\x00\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=m/7b", "application/octet-stream", "\x01\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=m/7b&top=x", "application/octet-stream", "\x01\x00\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=m/7b&min_log_seq=", "application/octet-stream", "\x01\x00\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=m/7b&token_ids=1", "application/octet-stream", "\x01\x00\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=m/7b&queries=1", "application/octet-stream", "\x01\x00\x00\x00", 400, "bad_request"},
		{"POST", "/query?model_name=other", "application/octet-stream", "\x01\x00\x00\x00", 404, "unknown_partition"},
		{"POST", "/query", "application/msgpack", "", 400, "bad_request"},
		{"POST", "/query", "application/msgpack", "\x01", 400, "bad_request"},
		{"POST", "/query", "application/msgpack", "\xdd\x7f\xff\xff\xff", 400, "bad_request"},
		{"POST", "/query", "application/msgpack", "\x80\x80", 400, "bad_request"},
		{"POST", "/query", "application/msgpack", "\x82\xaamodel_name\xa4m/7b\xa9token_ids\xc4\x03abc", 400, "bad_request"},

		{"POST", "/query_by_hash", "", `{"model_name":"m/7b","block_hashes":[1.5]}`, 400, "bad_request"},
		{"POST", "/query_by_hash", "", `{"model_name":"m/7b","block_hashes":["x"]}`, 400, "bad_request"},
		{"POST", "/query_by_hash", "", `{"model_name":"m/7b","block_hashes":[18446744073709551616]}`, 400, "bad_request"},
		{"POST", "/query_by_hash", "", `{"model_name":"m/7b","block_hashes":[1],"cache_salt":"s"}`, 400, "bad_request"},
		{"POST", "/query_by_hash", "", `{"model_name":"m/7b","token_ids":[1]}`, 400, "bad_request"},
		{"POST", "/query_by_hash?model_name=m/7b&cache_salt=s", "application/octet-stream", "12345678", 400, "bad_request"},
		{"POST", "/query_by_hash?model_name=m/7b", "application/octet-stream", "1234", 400, "bad_request"},

		{"POST", "/register", "", "", 400, "bad_request"},
		{"POST", "/register", "", `{"instance_id":"w9"`, 400, "bad_request"},
		{"POST", "/register", "", `{"instance_id":1.5}`, 400, "bad_request"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"http://x","model_name":"m/7b","block_size":4}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"tcp://h:1","model_name":"m/7b","block_size":0}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"tcp://h:1","model_name":"m/7b"}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"tcp://h:1","model_name":"m/7b","block_size":70000}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"endpoint":"tcp://h:1","model_name":"m/7b","block_size":4}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"tcp://h:1","block_size":4}`, 400, "bad_worker"},
		{"POST", "/register", "", `{"instance_id":"w9","endpoint":"tcp://h:1","model_name":"m/7b","block_size":8}`, 409, "conflict"},
		{"POST", "/register", "", `{"instance_id":"w0","endpoint":"tcp://h:1","model_name":"m/7b","block_size":4}`, 409, "conflict"},
		{"POST", "/register", "", `{"instance_id":"w0","endpoint":"tcp://h:1","model_name":"m2","block_size":4}`, 409, "conflict"},
		{"POST", "/unregister", "", `{"model_name":"m/7b"}`, 400, "bad_request"},
		{"POST", "/unregister", "", `{"instance_id":"w9","model_name":"m/7b"}`, 404, "not_registered"},
		{"POST", "/unregister", "", `{"instance_id":"w0","model_name":"m/7b","dp_rank":3}`, 404, "not_registered"},
	} {
		r := w.do(c.method, c.path, c.contentType, []byte(c.body))
		w.refused(fmt.Sprintf("%s %s %.60q", c.method, c.path, c.body), r, c.status, c.code)
		if c.status == 405 && r.header.Get("Allow") == "" {
			t.Errorf("%s %s: no Allow", c.method, c.path)
		}
	}
	r, err := http.NewRequest("POST", w.url+"/query", strings.NewReader(good))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Encoding", "gzip")
	w.refused("gzip", w.send(r), 415, "media_type")
	w.want(w.do("POST", "/query", "", []byte(good)), 200, nil)
}

// TestNotReady: nothing is answered that might be wrong.
func TestNotReady(t *testing.T) {
	w := newWorld(t, options{unread: true})
	for _, a := range asks(t, prompt(1, 1), nil) {
		w.refused(a.name, withType(w.asked(a)), 503, "not_ready")
	}
	w.refused("dump", w.get("/dump", 503, nil), 503, "not_ready")
	var v struct {
		Ready   bool
		Reasons []string
		LogSeq  *uint64 `json:"log_seq"`
		Lag     *uint64
	}
	w.get("/ready", 503, &v)
	if v.Ready || len(v.Reasons) == 0 || v.LogSeq == nil || v.Lag == nil {
		t.Errorf("ready: %+v", v)
	}
	w.get("/health", 200, nil)
}

// TestToken: everything but /health and /ready wants the token.
func TestToken(t *testing.T) {
	const token = "s3cret"
	w := newWorld(t, options{config: func(c *api.Config) { c.Token = token }})
	w.register(at("w0", 0))
	for _, path := range []string{"GET /workers", "GET /dump", "GET /digest", "GET /peers", "GET /metrics", "POST /query", "POST /query_by_hash", "POST /register", "POST /unregister"} {
		method, path, _ := strings.Cut(path, " ")
		for _, header := range []string{"", token, "Basic " + token, "Bearer", "Bearer ", "Bearer " + token + "x", "Bearer " + token[1:]} {
			r, err := http.NewRequest(method, w.url+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if header != "" {
				r.Header.Set("Authorization", header)
			}
			got := w.send(r)
			w.refused(path+" with "+header, got, 401, "unauthorized")
			if got.header.Get("WWW-Authenticate") != "Bearer" {
				t.Errorf("%s: headers %v", path, got.header)
			}
		}
		if r := w.do(method, path, "", nil); r.status == 401 {
			t.Errorf("%s with the token: %v", path, r)
		}
	}
	w.token = ""
	w.get("/health", 200, nil)
	w.get("/ready", 200, nil)
}

// TestTLS serves HTTPS, and no plain HTTP on its port.
func TestTLS(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kvmesh"}, NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	o := options{cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir, "key.pem")}
	for path, block := range map[string]*pem.Block{o.cert: {Type: "CERTIFICATE", Bytes: der}, o.key: {Type: "EC PRIVATE KEY", Bytes: private}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w := newWorld(t, o)
	if r := w.get("/health", 400, nil); !bytes.Contains(r.body, []byte("HTTPS")) {
		t.Errorf("plain HTTP: %v", r)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(cert)
	for _, http2 := range []bool{false, true} {
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: http2}
		w.client = &http.Client{Transport: transport, Timeout: patience}
		w.url = strings.Replace(w.url, "http://", "https://", 1)
		t.Cleanup(transport.CloseIdleConnections)
		if !http2 {
			w.register(at("w0", 0))
			w.store(at("w0", 0), event.Device, locals(prompt(1, 2)), 0, 2)
		}
		for _, a := range asks(t, prompt(1, 2), map[string]any{"min_log_seq": w.lastSeq}) {
			var got answer
			w.want(w.asked(a), 200, &got)
			if got.Instances["w0"].GPU != 2*blockSize {
				t.Errorf("%s over TLS: %+v", a.name, got)
			}
		}
	}
}

// zeros is a body of so many bytes that is never in memory.
type zeros struct{ left int64 }

func (z *zeros) Read(p []byte) (int, error) {
	if z.left == 0 {
		return 0, io.EOF
	}
	n := min(int64(len(p)), z.left)
	clear(p[:n])
	z.left -= n
	return int(n), nil
}

// TestBodyLimits sends bodies of the largest size and of one byte more, with and
// without a length.
func TestBodyLimits(t *testing.T) {
	w := newWorld(t, options{})
	w.register(at("w0", 0))
	post := func(path string, size int64, chunked bool) reply {
		t.Helper()
		r, err := http.NewRequest("POST", w.url+path, &zeros{size})
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", typeOctets)
		if r.ContentLength = size; chunked {
			r.ContentLength = -1
		}
		resp, err := w.client.Do(r)
		if err != nil {
			// The server may close before all of a body has been sent that it
			// does not read. Then the reply may be lost.
			return reply{status: http.StatusRequestEntityTooLarge}
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		return reply{resp.StatusCode, resp.Header, body}
	}
	const query = "/query?model_name=m/7b"
	answered := false
	for _, chunked := range []bool{false, true} {
		w.want(post(query, 8<<20, chunked), 200, nil)
		for _, c := range []struct {
			path string
			size int64
		}{{query, 8<<20 + 1}, {query, 9 << 20}, {"/query_by_hash?model_name=m/7b", 8<<20 + 1}, {"/register", 1<<20 + 1}, {"/unregister", 2 << 20}} {
			r := post(c.path, c.size, chunked)
			if r.body != nil {
				w.refused(fmt.Sprintf("%s of %d bytes, chunked %v", c.path, c.size, chunked), r, 413, "too_large")
				answered = true
			} else if r.status != 413 {
				t.Errorf("%v", r)
			}
		}
		// A body of the largest size, of a kind that is not wanted there.
		w.refused("a large registration", post("/register", 1<<20, chunked), 400, "bad_request")
	}
	if !answered {
		t.Error("no reply arrived")
	}
	// All prompts of a batch together are held to the limit.
	entry := `{"token_ids":[` + strings.Repeat("1,", 1<<19) + `1]},`
	batch := `{"model_name":"m/7b","queries":[` + strings.Repeat(entry, 8) + `{}]}`
	r := w.do("POST", "/query", "", []byte(batch[:8<<20-10]+strings.Repeat(" ", 20)))
	w.refused("a large batch", r, 413, "too_large")
	w.get("/health", 200, nil)
}

// raw writes text to a new connection and reads the reply to it.
func (w *world) raw(text string) (*http.Response, net.Conn) {
	w.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, text); err != nil {
		w.t.Logf("write: %v", err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		w.t.Logf("read: %v", err)
		return nil, conn
	}
	return resp, conn
}

// TestHostileClients: large heads, bodies that end early, and clients that are
// slow have an end, and others are answered.
func TestHostileClients(t *testing.T) {
	w := newWorld(t, options{server: func(s *http.Server) {
		if s.ReadHeaderTimeout <= 0 || s.ReadTimeout <= 0 || s.WriteTimeout <= 0 || s.IdleTimeout <= 0 || s.MaxHeaderBytes <= 0 {
			t.Errorf("a server without limits: %+v", s)
		}
		s.ReadHeaderTimeout, s.ReadTimeout = 200*time.Millisecond, 400*time.Millisecond
	}})
	w.register(at("w0", 0))
	if resp, _ := w.raw("GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + strings.Repeat("x", 128<<10) + "\r\n\r\n"); resp != nil && resp.StatusCode != 431 {
		t.Errorf("a large header: %v", resp.Status)
	}
	if resp, _ := w.raw("GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "); resp != nil {
		t.Errorf("a head that does not end: %v", resp.Status)
	}
	for _, head := range []string{"Content-Length: 100\r\n\r\n", "Content-Length: 8000000\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n20\r\n"} {
		resp, _ := w.raw("POST /query HTTP/1.1\r\nHost: x\r\n" + head + `{"model_name":`)
		if resp == nil {
			continue // closed without a reply
		}
		body, _ := io.ReadAll(resp.Body)
		w.refused("a slow body", reply{resp.StatusCode, resp.Header, body}, 408, "timeout")
		if !resp.Close {
			t.Error("the connection of a slow body is kept")
		}
	}
	for _, head := range []string{"Content-Length: 100\r\n\r\n", "Transfer-Encoding: chunked\r\n\r\n20\r\n", "Transfer-Encoding: chunked\r\n\r\nzz\r\n"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(conn, "POST /query HTTP/1.1\r\nHost: x\r\n"+head+`{"model_name":`)
		conn.(*net.TCPConn).CloseWrite()
		conn.SetDeadline(time.Now().Add(patience))
		if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err == nil {
			body, _ := io.ReadAll(resp.Body)
			w.refused("a body that ends early", reply{resp.StatusCode, resp.Header, body}, 400, "bad_request")
		}
		conn.Close()
	}
	w.post("/query", map[string]any{"model_name": partition.Model, "token_ids": prompt(1, 1)}, 200, nil)
}

// TestKeepAlive: a request that was refused leaves the connection usable, or says
// that it is closed.
func TestKeepAlive(t *testing.T) {
	w := newWorld(t, options{})
	w.register(at("w0", 0))
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	in := bufio.NewReader(conn)
	for i := range 30 {
		path, body, status := "/query", `{"model_name":"m/7b","token_ids":[1,2,3,4]}`, 200
		switch i % 5 {
		case 1:
			body, status = `{"model_name":"m/7b","token_ids":[1.5]}`, 400
		case 2:
			path, status = "/nowhere", 404
		case 3:
			path, body, status = "/query_by_hash", `{"model_name":"m/7b","block_hashes":[1]}`, 200
		}
		contentType := typeJSON
		if i%5 == 4 {
			contentType, status = "text/html", 415
		}
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s", path, contentType, len(body), body)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		data, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != status || !json.Valid(data) || resp.Close {
			t.Fatalf("request %d: %s %s %v, want %d", i, resp.Status, data, err, status)
		}
	}
}
