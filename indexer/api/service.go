package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// The NATS micro service. The partition is in the subject, so that a request
// goes to those who serve it; names are escaped as in the subjects of the log.
const (
	serviceName  = "kvmesh"
	querySubject = "kvmesh.query"
	hashSubject  = "kvmesh.query_by_hash"
)

// Listen answers queries over NATS until stop is called: requests to
// kvmesh.query.<model>.<group> and kvmesh.query_by_hash.<model>.<group> have the
// bodies of POST /query and POST /query_by_hash without model and group, and get
// the same replies. One of all that listen answers each request. Errors come
// with the headers of the micro protocol: the code is the HTTP status, the
// description the reason. A version that is no semantic one is shown as 0.0.0.
func (s *Server) Listen(nc *nats.Conn, version string) (stop func() error, err error) {
	config := micro.Config{
		Name:        serviceName,
		Version:     strings.TrimPrefix(version, "v"),
		Description: "Which worker holds how much of a prompt in its KV cache.",
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
	for name, endpoint := range map[string]struct {
		subject string
		answer  func(context.Context, event.Partition, []byte) (any, error)
	}{
		"query":         {querySubject, s.natsQuery},
		"query-by-hash": {hashSubject, s.natsQueryByHash},
	} {
		handler := micro.HandlerFunc(func(r micro.Request) {
			// A query may wait for a log sequence; others must not wait for it.
			go s.serveNATS(r, endpoint.subject, endpoint.answer)
		})
		if err := service.AddEndpoint(name, handler, micro.WithEndpointSubject(endpoint.subject+".*.*")); err != nil {
			return nil, errors.Join(fmt.Errorf("NATS service: %w", err), service.Stop())
		}
	}
	return service.Stop, nil
}

func (s *Server) serveNATS(r micro.Request, prefix string, answer func(context.Context, event.Partition, []byte) (any, error)) {
	p, err := partitionOf(strings.TrimPrefix(r.Subject(), prefix+"."))
	var reply any
	if err == nil {
		reply, err = answer(context.Background(), p, r.Data())
	}
	if err != nil {
		status, code := codeOf(err)
		data, _ := json.Marshal(failure{Error: err.Error(), Code: code}) // two strings: no error
		err = r.Error(strconv.Itoa(status), err.Error(), data)
	} else {
		err = r.RespondJSON(reply)
	}
	if err != nil {
		s.log.Debug("NATS request not answered", "subject", r.Subject(), "error", err)
	}
}

// partitionOf reads <model>.<group>.
func partitionOf(key string) (event.Partition, error) {
	model, group, ok := strings.Cut(key, ".")
	if !ok {
		return event.Partition{}, fmt.Errorf("%w: subject ends in %q, want <model>.<group>", errRequest, key)
	}
	var p event.Partition
	var err error
	if p.Model, err = event.Unescape(model); err == nil {
		p.Group, err = event.Unescape(group)
	}
	if err != nil {
		return p, fmt.Errorf("%w: %w", errRequest, err)
	}
	return p, nil
}

func (s *Server) natsQuery(ctx context.Context, p event.Partition, body []byte) (any, error) {
	var q tokenQuery
	if err := decodeJSON(body, &q); err != nil {
		return nil, err
	}
	q.ModelName, q.RoutingGroup = p.Model, &p.Group
	_, reply, err := s.answerTokens(ctx, &q)
	return reply, err
}

func (s *Server) natsQueryByHash(ctx context.Context, p event.Partition, body []byte) (any, error) {
	var q hashQuery
	if err := decodeJSON(body, &q); err != nil {
		return nil, err
	}
	q.ModelName, q.RoutingGroup = p.Model, &p.Group
	_, reply, err := s.answerHashes(ctx, &q)
	return reply, err
}
