// Package openapi has the description of the HTTP API, in OpenAPI 3.1.
package openapi

import (
	_ "embed"
	"net/http"
)

//go:embed openapi.json
var document string

// Document returns the description, as JSON.
func Document() []byte { return []byte(document) }

// Serve answers with the description.
func Serve(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Access-Control-Allow-Origin", "*") // tools that show it run in browsers; it is no secret
	w.Write([]byte(document))
}
