package api

import (
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event/mpack"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// What a prompt is given as: the names of the members.
const (
	tokenIDs    = "token_ids"
	blockHashes = "block_hashes"
)

// work is what answering a call takes. It is used again for later calls, so that
// in the long run nothing is allocated.
type work struct {
	content string // tokenIDs or blockHashes
	body    []byte
	json    scanner
	packed  packed
	params  params
	outer   prompt   // what is said for all prompts; the only one unless batch
	prompts []prompt // of a batch
	batch   bool
	tokens  []uint32
	hashes  []uint64
	locals  []uint64
	seqs    []uint64 // log sequences that prompts ask for
	query   indexer.Query
	asked   question // of the last prompt
	spans   []span
	after   []int32          // of each holding, the next one of its instance, or -1
	places  map[string]int32 // of instances in spans; empty but while they are made
	reply   []byte
	names   map[string]string // of models and groups
}

func newWork() *work { return &work{names: map[string]string{}, places: map[string]int32{}} }

// Bounds of what is kept for later calls.
const (
	keepBytes = 4 << 20
	keepNames = 64
)

// work returns a work for a call. The caller gives it back with done.
func (s *Server) work(content string) *work {
	w, _ := s.pool.Get().(*work)
	if w == nil {
		w = newWork()
	}
	w.content = content
	return w
}

// done gives a work back. Nothing that it holds may be used any more.
func (s *Server) done(w *work) {
	if cap(w.body)+4*cap(w.tokens)+8*cap(w.hashes)+8*cap(w.locals)+8*cap(w.seqs)+cap(w.reply) > keepBytes {
		return
	}
	w.reset()
	if len(w.names) > keepNames {
		clear(w.names)
	}
	s.pool.Put(w)
}

// reset forgets a call.
func (w *work) reset() {
	clear(w.prompts)
	w.outer, w.prompts, w.batch = prompt{}, w.prompts[:0], false
	w.json, w.packed, w.params = scanner{}, packed{}, params{buf: w.params.buf[:0]}
	w.tokens, w.hashes, w.seqs, w.reply = w.tokens[:0], w.hashes[:0], w.seqs[:0], w.reply[:0]
}

// name returns b as a string, the same one for each call.
func (w *work) name(b []byte) string {
	if name, ok := w.names[string(b)]; ok {
		return name
	}
	name := string(b)
	w.names[name] = name
	return name
}

// -- reading a call -----------------------------------------------------------

// firstRead is how much room a body is given before anything of it has come.
const firstRead = 128 << 10

// readBody reads the body of a request, of at most limit bytes.
func (w *work) readBody(r *http.Request, limit int64) error {
	if r.ContentLength > limit {
		return errTooLarge
	}
	whole := r.ContentLength // -1: the end tells
	if whole < 0 {
		whole = limit + 1
	}
	b := w.body[:0]
	for int64(len(b)) < whole {
		if len(b) == cap(b) {
			// Room grows with what has come, not with what is announced.
			room := min(whole, max(firstRead, 2*int64(cap(b))))
			b = append(make([]byte, 0, room), b...)
		}
		n, err := r.Body.Read(b[len(b):min(int64(cap(b)), whole)])
		b = b[:len(b)+n]
		if err == io.EOF && (r.ContentLength < 0 || int64(len(b)) == whole) {
			break
		}
		if err != nil {
			return fmt.Errorf("%w: after %d bytes of the body: %w", errRead, len(b), err)
		}
	}
	w.body = b
	if int64(len(b)) > limit {
		return errTooLarge
	}
	return nil
}

// media is a form that a body has.
type media int

const (
	mediaJSON media = iota
	mediaPacked
	mediaBinary
)

// mediaOf returns the form that a Content-Type names. Tools send JSON under many
// names, or none.
func mediaOf(contentType string) (media, error) {
	name, _, _ := strings.Cut(contentType, ";")
	name = strings.ToLower(strings.TrimSpace(name))
	switch name {
	case "", "application/json", "text/json", "text/plain", "application/x-www-form-urlencoded":
		return mediaJSON, nil
	case "application/msgpack", "application/x-msgpack", "application/vnd.msgpack":
		return mediaPacked, nil
	case "application/octet-stream":
		return mediaBinary, nil
	}
	if strings.HasPrefix(name, "application/") && strings.HasSuffix(name, "+json") {
		return mediaJSON, nil
	}
	return 0, fmt.Errorf("%w: Content-Type is %.100q, want application/json, application/msgpack or application/octet-stream", errMedia, contentType)
}

// readCall reads what is asked. params are those of the URL, which a binary body
// has its parameters in.
func (w *work) readCall(m media, params string) error {
	switch m {
	case mediaPacked:
		w.packed.Reader = mpack.NewReader(w.body)
		return w.parse(&w.packed)
	case mediaBinary:
		w.params.buf = append(w.params.buf, params...)
		w.params.rest = w.params.buf
		return w.readBinary()
	}
	w.json.b = w.body
	return w.parse(&w.json)
}

// readBinary reads a body of little-endian integers, whose parameters are in the
// URL.
func (w *work) readBinary() error {
	if err := w.parse(&w.params); err != nil {
		return err
	}
	p := &w.outer
	size := 4
	if p.given = true; w.content == blockHashes {
		size = 8
		w.hashes = appendHashes(w.hashes, w.body)
		p.hashes = w.hashes
	} else {
		p.tokens = hash.Tokens(w.tokens, w.body)
	}
	if len(w.body)%size != 0 {
		p.fail("the body", fmt.Errorf("%d bytes, want %d for each of the %s", len(w.body), size, w.content))
	}
	return nil
}
