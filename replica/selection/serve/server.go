// Package serve is the front doors of a Selector: HTTP, with the paths and the
// JSON that clients of Dynamo's selection service know, and a NATS micro service.
package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"

	"go.opentelemetry.io/otel/trace"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// Hinter knows the engine's own names of blocks. *selection.Hinter is one.
type Hinter interface {
	// EngineHashes returns the engine's names of the first blocks of a prompt,
	// given by its local hashes, that a source holds: from the first block
	// on, without a hole.
	EngineHashes(ctx context.Context, s event.Source, locals []uint64) ([]event.EngineHash, error)
}

// Config is how a Server works.
type Config struct {
	// Token is what clients have to send as a bearer token; empty: nobody has
	// to. /ready needs none.
	Token string
	// MaxBody is the largest body, in bytes.
	MaxBody int64
	// Share is the partitions whose index this process holds. Requests about
	// others are passed on, once Listen has been called.
	Share event.Share
	// Tracer makes spans of requests over NATS, below that which their headers
	// name; nil: nothing is traced.
	Tracer trace.TracerProvider
}

// Default returns the configuration that fits most services.
func Default() Config { return Config{MaxBody: 8 << 20} }

// Server answers for a Selector. It is an http.Handler.
type Server struct {
	cfg      Config
	selector *selection.Selector
	roster   *selection.Roster
	hinter   Hinter
	index    http.Handler
	log      *slog.Logger
	tracer   trace.Tracer // nil: nothing is traced
	mux      *http.ServeMux
	arrays   arraysPool
	nc       *nats.Conn // of Listen; nil: not yet
	json     []string
	own      map[string]bool // first parts of the paths of mux
}

// New returns a Server. index answers all that is not for a Selector, and what it
// says at GET /workers and GET /ready is part of the answers there; hinter may be
// nil.
func New(cfg Config, s *selection.Selector, roster *selection.Roster, hinter Hinter, index http.Handler, logger *slog.Logger) *Server {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	x := &Server{cfg: cfg, selector: s, roster: roster, hinter: hinter, index: index, log: logger, tracer: door.Tracer(cfg.Tracer, "github.com/kvmesh/kvmesh/replica/selection/serve"), mux: http.NewServeMux(), json: []string{"application/json"}, own: map[string]bool{"workers": true, "ready": true}}
	for _, op := range x.operations() {
		x.handle(op)
	}
	x.mux.Handle("GET /workers", door.Guard(x.cfg.Token, http.HandlerFunc(x.workers)))
	x.mux.HandleFunc("GET /ready", x.ready)
	return x
}

// call is one request.
type call struct {
	ctx   context.Context
	id    string // in the path
	body  []byte
	query func(name string) string
}

// operation is what can be asked for, over HTTP and over NATS.
type operation struct {
	name    string // last token of the NATS subject, but for an id
	pattern string // method and path; {id} is call.id
	do      func(c *call) (status int, reply any, err error)
}

func (x *Server) operations() []operation {
	return []operation{
		{"upsert_worker", "POST /workers", x.upsertWorker},
		{"patch_worker", "PATCH /workers/{id}", x.patchWorker},
		{"delete_worker", "DELETE /workers/{id}", x.deleteWorker},
		{"select", "POST /select", x.selectOnly},
		{"select_and_reserve", "POST /select_and_reserve", x.selectAndReserve},
		{"reserve", "POST /reservations", x.reserve},
		{"prefill_complete", "POST /reservations/{id}/prefill_complete", x.prefillComplete},
		{"output_block", "POST /reservations/{id}/output_block", x.outputBlock},
		{"free", "DELETE /reservations/{id}", x.free},
		{"loads", "GET /loads", x.loads},
		{"potential_loads", "POST /potential_loads", x.potentialLoads},
		{"overlap_scores", "POST /overlap_scores", x.overlapScores},
	}
}

// ServeHTTP implements http.Handler.
func (x *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !x.own[firstOf(r.URL.Path)] { // queries of the index have no time to look for other handlers
		x.index.ServeHTTP(w, r)
		return
	}
	if _, pattern := x.mux.Handler(r); pattern != "" {
		x.mux.ServeHTTP(w, r)
		return
	}
	if allowed := door.Methods(x.mux, r); len(allowed) > 0 {
		methods := strings.Join(allowed, ", ")
		w.Header().Set("Allow", methods)
		x.fail(w, r, http.StatusMethodNotAllowed, "method", fmt.Errorf("%s takes %s, not %s", r.URL.Path, methods, r.Method))
		return
	}
	x.index.ServeHTTP(w, r)
}

// firstOf returns the first part of a path.
func firstOf(path string) string {
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return first
}

func (x *Server) handle(op operation) {
	_, path, _ := strings.Cut(op.pattern, " ")
	x.own[firstOf(path)] = true
	x.mux.Handle(op.pattern, door.Guard(x.cfg.Token, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := x.arrays.get()
		defer x.arrays.put(a)
		body, err := readBody(a.body[:0], http.MaxBytesReader(w, r.Body, x.cfg.MaxBody), r.ContentLength, x.cfg.MaxBody)
		a.body = body
		if err != nil {
			w.Header().Set("Connection", "close") // what is not read would be taken for the next request
			x.refuse(w, r, err)
			return
		}
		status, reply, err := x.perform(op, &call{ctx: r.Context(), id: r.PathValue("id"), body: body, query: func(name string) string { return r.URL.Query().Get(name) }})
		if err != nil {
			x.refuse(w, r, err)
			return
		}
		x.reply(w, status, reply)
	})))
}

// readBody appends a body to dst.
func readBody(dst []byte, from io.Reader, length, most int64) ([]byte, error) {
	if length > most {
		return dst, errTooLarge
	}
	if length > 0 && int64(cap(dst)) < length+1 {
		dst = make([]byte, 0, length+1)
	}
	buf := bytes.NewBuffer(dst)
	_, err := buf.ReadFrom(from)
	return buf.Bytes(), err
}

func (x *Server) reply(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		x.log.Error("reply can't be written as JSON", "error", err)
		status, data = http.StatusInternalServerError, door.Failure{Error: "reply can't be written as JSON", Code: "internal"}.JSON()
	}
	w.Header()["Content-Type"] = x.json
	w.WriteHeader(status)
	w.Write(append(data, '\n')) // an error is the client's: it is gone
}

func (x *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, code := codeOf(err)
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	x.fail(w, r, status, code, err)
}

func (x *Server) fail(w http.ResponseWriter, r *http.Request, status int, code string, err error) {
	if status >= 500 {
		x.log.Debug("request failed", "method", r.Method, "path", r.URL.Path, "status", status, "error", err)
	}
	x.reply(w, status, door.Failure{Error: err.Error(), Code: code})
}

var errTooLarge = errors.New("the body is too large")

// codeOf returns the status of an error, and the code by which programs tell it.
func codeOf(err error) (status int, code string) {
	var tooLarge *http.MaxBytesError
	var passed *passedError
	var elsewhere *selection.ElsewhereError
	switch {
	case errors.As(err, &passed):
		return passed.status, passed.Code
	case errors.As(err, &elsewhere):
		return http.StatusServiceUnavailable, "elsewhere"
	case errors.As(err, &tooLarge), errors.Is(err, errTooLarge):
		return http.StatusRequestEntityTooLarge, "too_large"
	case errors.Is(err, selection.ErrRequest), errors.Is(err, load.ErrMessage), errors.Is(err, io.ErrUnexpectedEOF):
		return http.StatusBadRequest, "bad_request"
	case errors.Is(err, event.ErrWorker):
		return http.StatusBadRequest, "bad_worker"
	case errors.Is(err, selection.ErrUnknownWorker):
		return http.StatusNotFound, "unknown_worker"
	case errors.Is(err, load.ErrUnknown):
		return http.StatusNotFound, "unknown_reservation"
	case errors.Is(err, indexer.ErrUnknownPartition):
		return http.StatusNotFound, "unknown_partition"
	case errors.Is(err, event.ErrConflict):
		return http.StatusConflict, "conflict"
	case errors.Is(err, load.ErrExists):
		return http.StatusConflict, "exists"
	case errors.Is(err, load.ErrFreed):
		return http.StatusConflict, "freed"
	case errors.Is(err, load.ErrContended):
		return http.StatusConflict, "contended"
	case errors.Is(err, load.ErrFull):
		return http.StatusTooManyRequests, "full"
	case errors.Is(err, selection.ErrOverloaded):
		return http.StatusTooManyRequests, "overloaded"
	case errors.Is(err, selection.ErrQueueFull):
		return http.StatusServiceUnavailable, "queue_full"
	case errors.Is(err, selection.ErrNoWorkers):
		return http.StatusServiceUnavailable, "no_workers"
	case errors.Is(err, indexer.ErrNotReady), errors.Is(err, load.ErrNotJoined):
		return http.StatusServiceUnavailable, "not_ready"
	}
	return http.StatusServiceUnavailable, "unavailable"
}

// capture keeps what a handler answers.
type capture struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (c *capture) Header() http.Header         { return c.header }
func (c *capture) WriteHeader(status int)      { c.status = status }
func (c *capture) Write(b []byte) (int, error) { return c.body.Write(b) }

// ask asks the index's server what a request asks.
func (x *Server) ask(r *http.Request) *capture {
	c := &capture{header: http.Header{}, status: http.StatusOK}
	x.index.ServeHTTP(c, r)
	return c
}

// pass answers with what was captured.
func (c *capture) pass(w http.ResponseWriter) {
	for name, values := range c.header {
		w.Header()[name] = values
	}
	w.WriteHeader(c.status)
	w.Write(c.body.Bytes())
}

// workers answers with the index's view of each worker and the Selector's, as one
// object. What both have is the index's.
func (x *Server) workers(w http.ResponseWriter, r *http.Request) {
	seen := x.ask(r)
	var views []map[string]json.RawMessage
	if seen.status != http.StatusOK || json.Unmarshal(seen.body.Bytes(), &views) != nil {
		seen.pass(w)
		return
	}
	type name struct{ model, group, id string }
	at := map[name]map[string]json.RawMessage{}
	for _, v := range views {
		var n struct {
			Model string       `json:"model_name"`
			Group string       `json:"routing_group"`
			ID    selection.ID `json:"instance_id"`
		}
		data, err := json.Marshal(v)
		if err == nil && json.Unmarshal(data, &n) == nil {
			at[name{n.Model, n.Group, n.ID.Text}] = v
		}
	}
	q := r.URL.Query()
	model, group := q.Get("model_name"), q.Get("routing_group")
	for _, st := range x.selector.Workers() {
		if model != "" && st.Worker.Model != model || group != "" && st.Worker.Group != group {
			continue
		}
		record := selection.RecordOf(&st)
		data, err := json.Marshal(record)
		var fields map[string]json.RawMessage
		if err != nil || json.Unmarshal(data, &fields) != nil {
			continue // a record is always an object
		}
		v := at[name{st.Worker.Model, st.Worker.Group, st.Worker.Instance}]
		if v == nil { // it has no endpoint that a bridge could read
			id, status := fields["worker_id"], json.RawMessage(`"pending"`)
			v = map[string]json.RawMessage{"instance_id": id, "status": status, "source": json.RawMessage(`"zmq"`), "endpoints": json.RawMessage(`{}`), "listeners": json.RawMessage(`{}`)}
			views = append(views, v)
		}
		for k, value := range fields {
			if _, there := v[k]; !there {
				v[k] = value
			}
		}
	}
	if views == nil {
		views = []map[string]json.RawMessage{}
	}
	x.reply(w, http.StatusOK, views)
}

// ready answers with the index's readiness and the Selector's. With
// ?schedulable=1 a service without a worker that can be chosen is not ready
// either, and the workers are in the answer.
func (x *Server) ready(w http.ResponseWriter, r *http.Request) {
	seen := x.ask(r)
	var v map[string]any
	if json.Unmarshal(seen.body.Bytes(), &v) != nil {
		seen.pass(w)
		return
	}
	reasons, _ := v["reasons"].([]any)
	for _, err := range []error{x.selector.Load().Ready(), x.roster.Ready()} {
		if err != nil {
			reasons = append(reasons, err.Error())
		}
	}
	n := x.selector.Schedulable()
	v["schedulable_workers"] = n
	want, _ := strconv.ParseBool(r.URL.Query().Get("schedulable"))
	if want && n == 0 {
		reasons = append(reasons, "no worker can be chosen")
	}
	if reasons == nil {
		reasons = []any{}
	}
	status := http.StatusOK
	if len(reasons) > 0 || seen.status != http.StatusOK {
		status = http.StatusServiceUnavailable
	}
	if want {
		records := []selection.Record{}
		for _, st := range x.selector.Workers() {
			records = append(records, selection.RecordOf(&st))
		}
		v["workers"] = records
	}
	v["ready"], v["reasons"] = status == http.StatusOK, reasons
	x.reply(w, status, v)
}
