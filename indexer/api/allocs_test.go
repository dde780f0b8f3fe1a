//go:build !race

package api_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// sink takes a reply and keeps nothing of it.
type sink struct {
	header http.Header
	status int
	n      int
}

func (s *sink) Header() http.Header             { return s.header }
func (s *sink) WriteHeader(status int)          { s.status = status }
func (s *sink) Write(b []byte) (n int, _ error) { s.n += len(b); return len(b), nil }

// body is a request's body that can be read again.
type body struct{ bytes.Reader }

func (*body) Close() error { return nil }

// TestQueriesAllocateNothing counts what a query of each form allocates behind
// net/http, its ServeMux included. The race detector has pools forget on purpose,
// so this is not for it.
func TestQueriesAllocateNothing(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 1024)
	for i := range 8 {
		w.register(at(string(rune('a'+i)), 0))
		w.store(at(string(rune('a'+i)), 0), event.Device, locals(tokens), 0, 1024)
	}
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq })
	for _, a := range asks(t, tokens, nil) {
		if a.overNATS {
			continue
		}
		r := httptest.NewRequest("POST", a.path, nil)
		r.Header.Set("Content-Type", a.contentType)
		r.ContentLength = int64(len(a.body))
		content := &body{}
		r.Body = content
		out := &sink{header: http.Header{}}
		n := testing.AllocsPerRun(100, func() {
			content.Reset(a.body)
			w.handler.ServeHTTP(out, r)
		})
		if out.status != http.StatusOK || out.n == 0 {
			t.Errorf("%s: status %d, %d bytes", a.name, out.status, out.n)
		}
		t.Logf("%s: %v", a.name, n)
		if n > 1 { // a pool may be emptied at any time
			t.Errorf("%s: %v allocations", a.name, n)
		}
	}
}
