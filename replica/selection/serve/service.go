package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// The NATS micro service.
const (
	serviceName   = "kvmesh-selection"
	subjectPrefix = "kvmesh.selection."
	// requestTimeout is how long a request over NATS may take.
	requestTimeout = time.Minute
)

// Listen answers over NATS until stop is called: requests to
// kvmesh.selection.<operation>, with the id escaped as one more token where the
// path has one, have the bodies of the HTTP requests and get the same replies. A
// filter, which HTTP has in the query, is in the body. One of all that listen
// answers each request. Errors come with the headers of the micro protocol: the
// code is the HTTP status, the description the reason. A version that is no
// semantic one is shown as 0.0.0. It is called before the Server serves HTTP.
func (x *Server) Listen(nc *nats.Conn, version string) (stop func() error, err error) {
	config := micro.Config{
		Name:        serviceName,
		Version:     strings.TrimPrefix(version, "v"),
		Description: "Which worker should serve a request, and what is active where.",
		QueueGroup:  serviceName,
	}
	service, err := micro.AddService(nc, config)
	if errors.Is(err, micro.ErrConfigValidation) {
		config.Version = "0.0.0"
		service, err = micro.AddService(nc, config)
	}
	if err != nil {
		return nil, fmt.Errorf("NATS service: %w", err)
	}
	for _, op := range x.operations() {
		subject := subjectPrefix + op.name
		if strings.Contains(op.pattern, "{id}") {
			subject += ".*"
		}
		handler := micro.HandlerFunc(func(r micro.Request) {
			go x.serveNATS(r, op) // one may wait for a worker; others must not wait for it
		})
		if err := service.AddEndpoint(strings.ReplaceAll(op.name, "_", "-"), handler, micro.WithEndpointSubject(subject)); err != nil {
			return nil, errors.Join(fmt.Errorf("NATS service: %w", err), service.Stop())
		}
	}
	unlisten, err := x.listenPassed(nc)
	if err != nil {
		return nil, errors.Join(err, service.Stop())
	}
	x.nc = nc
	return func() error { return errors.Join(unlisten(), service.Stop()) }, nil
}

func (x *Server) serveNATS(r micro.Request, op operation) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	ctx, ended := door.TraceNATS(ctx, x.tracer, r, subjectPrefix+op.name, subjectPrefix+op.name)
	c := &call{ctx: ctx, body: r.Data(), query: func(name string) string { return member(r.Data(), name) }}
	var reply any
	var err error
	if token, ok := strings.CutPrefix(r.Subject(), subjectPrefix+op.name+"."); ok {
		c.id, err = event.Unescape(token)
		err = badID(err)
	}
	if err == nil {
		_, reply, err = x.perform(op, c)
	}
	ended(err)
	if err != nil {
		status, code := codeOf(err)
		err = r.Error(strconv.Itoa(status), http.StatusText(status)+": "+oneLine(err.Error()), door.Failure{Error: err.Error(), Code: code}.JSON())
	} else {
		err = r.RespondJSON(reply)
	}
	if err != nil {
		x.log.Debug("NATS request not answered", "subject", r.Subject(), "error", err)
	}
}

func badID(err error) error {
	if err != nil {
		return fmt.Errorf("%w: %w", selection.ErrRequest, err)
	}
	return nil
}

// oneLine makes text fit for a header.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// member returns a member of a body that is text.
func member(body []byte, name string) string {
	var fields map[string]json.RawMessage
	var text string
	if len(body) == 0 || json.Unmarshal(body, &fields) != nil || json.Unmarshal(fields[name], &text) != nil {
		return ""
	}
	return text
}
