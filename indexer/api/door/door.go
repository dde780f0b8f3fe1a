// Package door is what all front doors of the mesh have in common: the bearer token,
// the body of errors, the methods that a path takes, and spans of requests over NATS.
package door

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Failure is the body of every error: text for people, and a code for programs.
type Failure struct {
	Error string `json:"error"`
	Code  string `json:"code"`
}

// JSON returns the body as JSON.
func (f Failure) JSON() []byte {
	data, _ := json.Marshal(f) // two strings: no error
	return data
}

// Guard lets those through to next who send the bearer token. If it is empty
// nobody has to.
func Guard(token string, next http.Handler) http.Handler {
	if token == "" {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		sent, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || subtle.ConstantTimeCompare([]byte(sent), []byte(token)) != 1 {
			w.Header().Set("WWW-Authenticate", "Bearer")
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusUnauthorized)
			f := Failure{Error: "a bearer token is needed, or it is the wrong one", Code: "unauthorized"}
			w.Write(append(f.JSON(), '\n')) // an error is the client's: it is gone
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Methods returns the methods that a request's path takes, by the patterns of mux
// that have one.
func Methods(mux *http.ServeMux, r *http.Request) []string {
	var methods []string
	for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodPut, http.MethodDelete} {
		other := *r
		other.Method = method
		if _, pattern := mux.Handler(&other); strings.HasPrefix(pattern, method+" ") {
			methods = append(methods, method)
		}
	}
	return methods
}

// Tracer returns the tracer of a front door; nil: nothing is traced.
func Tracer(provider trace.TracerProvider, name string) trace.Tracer {
	if _, off := provider.(noop.TracerProvider); off || provider == nil {
		return nil
	}
	return provider.Tracer(name)
}

// TraceNATS begins the span of a request over NATS, below that which its headers
// name, unless tracer is nil. subject is its subject, without what only this
// request has in it. The function that it returns ends the span with the
// request's outcome.
func TraceNATS(ctx context.Context, tracer trace.Tracer, r micro.Request, name, subject string) (context.Context, func(error)) {
	if tracer == nil {
		return ctx, func(error) {}
	}
	ctx, span := tracer.Start(event.WithTrace(ctx, nats.Header(r.Headers())), name, trace.WithSpanKind(trace.SpanKindServer))
	if span.IsRecording() {
		span.SetAttributes(
			attribute.String("messaging.system", "nats"),
			attribute.String("messaging.operation.name", "answer"),
			attribute.String("messaging.operation.type", "process"),
			attribute.String("messaging.destination.name", subject),
			attribute.Int("messaging.message.body.size", len(r.Data())),
		)
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
