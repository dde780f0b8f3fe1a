package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// The NATS micro service. The partition is in the subject, so that a request
// goes to those who serve it; names are escaped as in the subjects of the log.
const (
	serviceName  = "kvmesh"
	querySubject = "kvmesh.query"
	hashSubject  = "kvmesh.query_by_hash"

	atOnce = 256 // requests that are answered at a time
)

// Listen answers queries over NATS until stop is called: requests to
// kvmesh.query.<model>.<group> and kvmesh.query_by_hash.<model>.<group>, of the
// partitions in the index's share, have the bodies of POST /query and POST /query_by_hash without model and group, and get
// the same replies. One of all that listen answers each request. Errors come
// with the headers of the micro protocol: the code is the HTTP status, the
// description the reason. A version that is no semantic one is shown as 0.0.0.
func (s *Server) Listen(nc *nats.Conn, version string) (stop func() error, err error) {
	config := micro.Config{
		Name:        serviceName,
		Version:     strings.TrimPrefix(version, "v"),
		Description: "Which worker holds how much of a prompt in its KV cache.",
		QueueGroup:  serviceName,
		Metadata:    map[string]string{"serves": "*"},
	}
	if s.serves != "" {
		config.Metadata["serves"] = s.serves
	}
	service, err := micro.AddService(nc, config)
	if errors.Is(err, micro.ErrConfigValidation) {
		config.Version = "0.0.0"
		service, err = micro.AddService(nc, config)
	}
	if err != nil {
		return nil, fmt.Errorf("NATS service: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	// A query may wait for a log sequence, and others must not wait for it. Who
	// comes when all slots are taken waits in the client of NATS.
	slots := make(chan struct{}, atOnce)
	for name, endpoint := range map[string]struct{ subject, content string }{
		"query":         {querySubject, tokenIDs},
		"query-by-hash": {hashSubject, blockHashes},
		"match":         {matchSubject, ""},
	} {
		handler := micro.HandlerFunc(func(r micro.Request) {
			slots <- struct{}{}
			go func() {
				defer func() { <-slots }()
				s.serveNATS(ctx, nc, r, endpoint.subject, endpoint.content)
			}()
		})
		for _, subject := range s.index.Share().Subjects(endpoint.subject) {
			if err := service.AddEndpoint(name, handler, micro.WithEndpointSubject(subject)); err != nil {
				cancel()
				return nil, errors.Join(fmt.Errorf("NATS service: %w", err), service.Stop())
			}
		}
	}
	return func() error { cancel(); return service.Stop() }, nil
}

func (s *Server) serveNATS(ctx context.Context, nc *nats.Conn, r micro.Request, prefix, content string) {
	ctx, ended := door.TraceNATS(ctx, s.tracer, r, prefix, r.Subject())
	w := s.work(content)
	defer s.done(w)
	key := strings.TrimPrefix(r.Subject(), prefix+".")
	var err error
	if prefix == matchSubject {
		err = s.matchNATS(ctx, w, r, key)
	} else {
		err = s.askNATS(ctx, w, r, key)
	}
	if err == nil && int64(len(w.reply)) > nc.MaxPayload() {
		err = errReply
	}
	ended(err)
	if err != nil {
		status, code := codeOf(err)
		err = r.Error(strconv.Itoa(status), err.Error(), appendFailure(nil, err, code))
	} else {
		if prefix != matchSubject { // what is packed may end with anything
			w.reply = bytes.TrimSuffix(w.reply, []byte{'\n'})
		}
		err = r.Respond(w.reply)
	}
	if err != nil {
		s.log.Debug("NATS request not answered", "subject", r.Subject(), "error", err)
	}
}

// askNATS reads what a request to the partition named by key asks, and makes the
// reply.
func (s *Server) askNATS(ctx context.Context, w *work, r micro.Request, key string) error {
	p, err := partitionOf(key)
	if err != nil {
		return err
	}
	m, err := mediaOf(r.Headers().Get("Content-Type"))
	if err != nil {
		return err
	}
	if m == mediaBinary {
		return fmt.Errorf("%w: application/octet-stream has its parameters in a URL, and there is none", errMedia)
	}
	if int64(len(r.Data())) > s.cfg.MaxQuery {
		return errTooLarge
	}
	w.body = append(w.body[:0], r.Data()...)
	if err := w.readCall(m, ""); err != nil {
		return err
	}
	w.outer.model, w.outer.group = []byte(p.Model), []byte(p.Group)
	for i := range w.prompts {
		w.prompts[i].model, w.prompts[i].group = nil, nil
	}
	return s.answer(ctx, w)
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
