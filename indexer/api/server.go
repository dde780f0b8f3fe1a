// Package api is the front doors of an index: HTTP, with the paths and the JSON
// that clients of Dynamo's indexer know, and a NATS micro service.
package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// Registry is where workers are registered.
type Registry interface {
	// Register registers a worker. Errors wrap event.ErrWorker or
	// event.ErrConflict; others mean that it is not known whether the worker
	// is registered.
	Register(ctx context.Context, w event.Worker) error
	// Unregister takes out the workers of an instance of a model: of one
	// routing group unless group is empty, of one rank unless rank is nil.
	// Errors are as for Register, and may wrap event.ErrNotRegistered.
	Unregister(ctx context.Context, instance, model, group string, rank *uint32) ([]event.Source, error)
	// Attachment returns what is on record of a cache owner; false if nothing
	// is.
	Attachment(id string) (event.Attachment, bool)
}

// Config is how a Server works.
type Config struct {
	// Token is what clients have to send as a bearer token; empty: nobody has
	// to. /health and /ready need none.
	Token string
	// MaxQuery is the largest body of a query, in bytes, and MaxBody that of
	// other requests.
	MaxQuery, MaxBody int64
	// MaxReply is the size of a reply, in bytes, from which on further prompts
	// of a batch are not answered.
	MaxReply int
	// WaitTimeout is for how long a query waits for the log sequence that it
	// asks for, and ForwardTimeout for the answer of another indexer if the
	// partition is served elsewhere.
	WaitTimeout, ForwardTimeout time.Duration
	// Tracer makes spans of queries, below that of the request's context over
	// HTTP, and below that of the request's headers over NATS; nil: nothing is
	// traced.
	Tracer trace.TracerProvider
}

// Default returns the configuration that fits most fleets.
func Default() Config {
	return Config{MaxQuery: 8 << 20, MaxBody: 1 << 20, MaxReply: 64 << 20, WaitTimeout: 5 * time.Second, ForwardTimeout: 2 * time.Second}
}

// Server answers for an index. It is an http.Handler.
type Server struct {
	cfg       Config
	index     *indexer.Indexer
	registry  Registry
	fleet     *Fleet
	log       *slog.Logger
	tracer    trace.Tracer // nil: nothing is traced
	mux       *http.ServeMux
	pool      sync.Pool  // of *work
	others    *Elsewhere // nil: partitions out of the index's share are not answered for
	serves    string     // the share; "" if it is everything
	listPeers atomic.Pointer[func() any]
	jsonType  []string // the Content-Type of replies, made once; not written to
}

// New returns a Server. metrics answers GET /metrics; nil: nothing does.
func New(cfg Config, index *indexer.Indexer, registry Registry, fleet *Fleet, metrics http.Handler, logger *slog.Logger) *Server {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	s := &Server{cfg: cfg, index: index, registry: registry, fleet: fleet, log: logger, tracer: door.Tracer(cfg.Tracer, "github.com/kvmesh/kvmesh/indexer/api"), mux: http.NewServeMux(), jsonType: []string{"application/json"}}
	s.serves = strings.Join(index.Share().Strings(), ", ")
	s.handle("POST /register", cfg.MaxBody, s.register)
	s.handle("POST /unregister", cfg.MaxBody, s.unregister)
	s.handle("GET /workers", 0, s.workers)
	s.mux.Handle("POST /query", door.Guard(cfg.Token, s.query(tokenIDs)))
	s.mux.Handle("POST /query_by_hash", door.Guard(cfg.Token, s.query(blockHashes)))
	s.handle("GET /dump", 0, s.dump)
	s.handle("GET /digest", 0, s.digest)
	s.handle("GET /peers", 0, s.peers)
	s.handle("GET /health", 0, s.health)
	s.handle("GET /ready", 0, s.ready)
	if metrics != nil {
		s.mux.Handle("GET /metrics", door.Guard(cfg.Token, metrics))
	}
	s.mux.HandleFunc("/", s.lost)
	return s
}

// Forward has queries for partitions that are not in the index's share answered
// by those who serve them. It is called before the Server serves.
func (s *Server) Forward(to *Elsewhere) { s.others = to }

// servesHeader says on what is true for a share only which share that is.
const servesHeader = "Kvmesh-Serves"

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.mux.ServeHTTP(w, r) }

// lost answers requests that no handler is for.
func (s *Server) lost(w http.ResponseWriter, r *http.Request) {
	allowed := door.Methods(s.mux, r)
	if len(allowed) == 0 {
		s.fail(w, r, http.StatusNotFound, "unknown_path", fmt.Errorf("no such path: %s; /openapi.json describes those there are, /ui/ is for people", r.URL.Path))
		return
	}
	methods := strings.Join(allowed, ", ")
	w.Header().Set("Allow", methods)
	s.fail(w, r, http.StatusMethodNotAllowed, "method", fmt.Errorf("%s takes %s, not %s", r.URL.Path, methods, r.Method))
}

// HTTPServer returns a server with limits on what a client may keep it busy
// with.
func (s *Server) HTTPServer() *http.Server {
	return &http.Server{
		Handler:           s,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      60 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// handle registers a handler that returns what to answer with, or an error.
func (s *Server) handle(pattern string, maxBody int64, f func(r *http.Request) (status int, body any, err error)) {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if maxBody > 0 && r.ContentLength > maxBody {
			s.refuse(w, r, errTooLarge)
			return
		}
		if s.serves != "" {
			w.Header().Set(servesHeader, s.serves)
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		status, body, err := f(r)
		if err != nil {
			s.refuse(w, r, err)
			return
		}
		s.reply(w, status, body)
	})
	if strings.HasSuffix(pattern, "/health") || strings.HasSuffix(pattern, "/ready") {
		s.mux.Handle(pattern, handler)
	} else {
		s.mux.Handle(pattern, door.Guard(s.cfg.Token, handler))
	}
}

// reply answers with a value as JSON.
func (s *Server) reply(w http.ResponseWriter, status int, body any) {
	data, err := json.Marshal(body)
	if err != nil {
		s.log.Error("reply can't be written as JSON", "error", err)
		status, data = http.StatusInternalServerError, appendFailure(nil, errors.New("reply can't be written as JSON"), "internal")
	}
	s.send(w, status, append(data, '\n'))
}

// send answers with JSON.
func (s *Server) send(w http.ResponseWriter, status int, data []byte) {
	h := w.Header()
	h["Content-Type"] = s.jsonType
	if len(data) > 2048 { // of less, net/http says how long it is
		h.Set("Content-Length", strconv.Itoa(len(data)))
	}
	w.WriteHeader(status)
	w.Write(data) // an error is the client's: it is gone
}

// refuse answers with an error.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, err error) {
	status, code := codeOf(err)
	if status == http.StatusRequestEntityTooLarge {
		w.Header().Set("Connection", "close") // what is not read would be taken for the next request
	}
	s.fail(w, r, status, code, err)
}

func (s *Server) fail(w http.ResponseWriter, r *http.Request, status int, code string, err error) {
	if status >= 500 {
		level := slog.LevelWarn
		if code == "not_ready" || code == "behind" {
			level = slog.LevelDebug // every query may be; /ready and the metrics tell
		}
		s.log.Log(r.Context(), level, "request failed", "method", r.Method, "path", r.URL.Path, "status", status, "error", err)
	}
	s.send(w, status, append(appendFailure(nil, err, code), '\n'))
}

// Errors of requests.
var (
	errTooLarge = errors.New("the body is too large")
	errReply    = errors.New("the reply is too large already: ask for fewer prompts, or for the top instances")
	errRequest  = errors.New("bad request")
	errMedia    = errors.New("unsupported media type")
	errRead     = errors.New("the body can't be read")
)

// codeOf returns the status of an error, and the code by which programs tell it.
func codeOf(err error) (status int, code string) {
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge), errors.Is(err, errTooLarge), errors.Is(err, errReply):
		return http.StatusRequestEntityTooLarge, "too_large"
	case errors.Is(err, errMedia):
		return http.StatusUnsupportedMediaType, "media_type"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return http.StatusRequestTimeout, "timeout"
	case errors.Is(err, errRequest), errors.Is(err, errRead), errors.Is(err, indexer.ErrPosition):
		return http.StatusBadRequest, "bad_request"
	case errors.Is(err, event.ErrWorker):
		return http.StatusBadRequest, "bad_worker"
	case errors.Is(err, event.ErrConflict):
		return http.StatusConflict, "conflict"
	case errors.Is(err, event.ErrNotRegistered):
		return http.StatusNotFound, "not_registered"
	case errors.Is(err, indexer.ErrUnknownPartition):
		return http.StatusNotFound, "unknown_partition"
	case errors.Is(err, errNoAnswer):
		return http.StatusGatewayTimeout, "no_answer"
	case errors.Is(err, indexer.ErrElsewhere):
		return http.StatusServiceUnavailable, "no_indexer"
	case errors.Is(err, indexer.ErrNotReady):
		return http.StatusServiceUnavailable, "not_ready"
	case errors.Is(err, indexer.ErrBehind):
		return http.StatusServiceUnavailable, "behind"
	}
	return http.StatusServiceUnavailable, "unavailable"
}
