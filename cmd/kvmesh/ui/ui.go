// Package ui is the dashboard: pages that are embedded in the binary, and what
// they need beside the API: the past of the index, the other replicas, and the
// records of one source as they come.
//
// The pages hold no data and are served to everyone; what they read is guarded by
// the token of the API. They load nothing from elsewhere and no script that is not
// a file of their own.
package ui

import (
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

//go:embed static
var static embed.FS

// policy lets the pages load their own files, talk to their own server, and
// nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Config is how a UI works.
type Config struct {
	// ID names this replica to people.
	ID string
	// Token is what the API wants; empty: nothing.
	Token string
	// Interval is how often the index is looked at for charts, and Samples how
	// many looks are kept.
	Interval time.Duration
	Samples  int
	// Tails is how many sources may be followed at a time.
	Tails int
	// Gather is how long replicas have to answer.
	Gather time.Duration
	// Log is where the records are.
	Log event.Log
}

// Default returns the configuration that fits most fleets: an hour of charts.
func Default(id string) Config {
	return Config{ID: id, Interval: 2 * time.Second, Samples: 1800, Tails: 16, Gather: 400 * time.Millisecond, Log: event.DefaultLog()}
}

// UI is the dashboard of one replica.
type UI struct {
	cfg   Config
	index *indexer.Indexer
	nc    *nats.Conn
	js    jetstream.JetStream
	log   *slog.Logger
	mux   *http.ServeMux
	past  *history
	tails atomic.Int64

	ended context.Context // done when tails have to end
	end   context.CancelFunc
}

// New returns a UI of an index. Run keeps its charts and answers other replicas.
func New(cfg Config, index *indexer.Indexer, nc *nats.Conn, js jetstream.JetStream, logger *slog.Logger) *UI {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	u := &UI{cfg: cfg, index: index, nc: nc, js: js, log: logger, mux: http.NewServeMux(), past: newHistory(cfg.Samples)}
	u.ended, u.end = context.WithCancel(context.Background())
	files, err := fs.Sub(static, "static")
	if err != nil {
		panic(err) // the directory is embedded under this name
	}
	pages := http.StripPrefix("/ui/", http.FileServerFS(files))
	u.mux.Handle("GET /ui/", pages)
	u.mux.Handle("GET /ui/data/history", u.guard(u.serveHistory))
	u.mux.Handle("GET /ui/data/replicas", u.guard(u.serveReplicas))
	u.mux.Handle("GET /ui/data/tail", u.guard(u.serveTail))
	u.mux.Handle("GET /ui", http.RedirectHandler("/ui/", http.StatusMovedPermanently))
	return u
}

// Close ends the requests that would go on for ever, so that the HTTP server can
// stop.
func (u *UI) Close() { u.end() }

// ServeHTTP implements http.Handler for /ui and what is below.
func (u *UI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-cache")
	u.mux.ServeHTTP(w, r)
}

// guard lets those through who have the token.
func (u *UI) guard(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if u.cfg.Token != "" && (!ok || subtle.ConstantTimeCompare([]byte(token), []byte(u.cfg.Token)) != 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			fail(w, http.StatusUnauthorized, "unauthorized", "a bearer token is needed, or it is the wrong one")
			return
		}
		next(w, r)
	})
}

func reply(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(body) // an error is the client's: it is gone
}

func fail(w http.ResponseWriter, status int, code, text string) {
	reply(w, status, map[string]string{"error": text, "code": code})
}

// Run looks at the index now and then, and answers other replicas, until ctx
// ends.
func (u *UI) Run(ctx context.Context) error {
	defer u.end()
	stop := context.AfterFunc(ctx, u.end)
	defer stop()
	sub, err := u.nc.Subscribe(replicaSubject, u.answerReplica)
	if err != nil {
		return err
	}
	defer sub.Unsubscribe()
	tick := time.NewTicker(u.cfg.Interval)
	defer tick.Stop()
	for {
		u.past.add(u.look())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}
