package main

import (
	"net/http"

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
