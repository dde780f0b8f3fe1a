package main

import (
	"log/slog"
	"net/http"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/cmd/kvmesh/ui"
	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api/openapi"
)

// pages puts what people and their tools look at in front of the API.
func pages(front http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/openapi.json" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
			openapi.Serve(w, r)
			return
		}
		front.ServeHTTP(w, r)
	})
}

// dashboard puts the dashboard in front of what a server serves. It has to be run.
func (n *node) dashboard(web *http.Server, index *indexer.Indexer, nc *nats.Conn, js jetstream.JetStream, log *slog.Logger) *ui.UI {
	cfg := ui.Default(n.id)
	cfg.Token, cfg.Log = n.http.token, n.index.Log
	board, api := ui.New(cfg, index, nc, js, log), web.Handler
	web.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if rest, ok := strings.CutPrefix(r.URL.Path, "/ui"); ok && (rest == "" || rest[0] == '/') {
			board.ServeHTTP(w, r)
			return
		}
		api.ServeHTTP(w, r)
	})
	web.RegisterOnShutdown(board.Close)
	return board
}
