package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// An indexer may hold the partitions of some models only. Queries for others it
// passes on, over the micro service, to one that holds them, which answers as if
// it had been asked itself.

// remoteError is the error of an indexer that a query was passed on to.
type remoteError struct {
	status     int
	code, text string
}

func (e *remoteError) Error() string { return e.text }

// errNobody: no indexer that runs holds a partition.
var errNobody = errors.New("no indexer that runs holds this model")

// forward has another indexer answer for a prompt, and appends its answer to the
// reply.
func (s *Server) forward(ctx context.Context, deadline time.Time, w *work, p *prompt, name event.Partition) error {
	nc := s.nc.Load()
	if nc == nil {
		return fmt.Errorf("model=%s: %w", name.Model, errNobody)
	}
	body, err := p.encode(w.content)
	if err != nil {
		return err
	}
	if int64(len(body)) > nc.MaxPayload() {
		return fmt.Errorf("%w to be passed on to the indexer that holds model %s: %d bytes, NATS takes %d", errTooLarge, name.Model, len(body), nc.MaxPayload())
	}
	subject := querySubject
	if w.content == blockHashes {
		subject = hashSubject
	}
	// Who answers may wait until the deadline, and its answer takes a while.
	ctx, cancel := context.WithDeadline(ctx, deadline.Add(time.Second))
	defer cancel()
	reply, err := nc.RequestWithContext(ctx, subject+"."+event.Escape(name.Model)+"."+event.Escape(name.Group), body)
	switch {
	case errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("model=%s: %w", name.Model, errNobody)
	case err != nil:
		return fmt.Errorf("passed on to the indexer that holds model %s: %w", name.Model, err)
	}
	if code := reply.Header.Get(micro.ErrorCodeHeader); code != "" {
		return readRemote(code, reply)
	}
	w.reply = append(w.reply, reply.Data...)
	return nil
}

// readRemote reads the error of another indexer.
func readRemote(code string, reply *nats.Msg) error {
	e := &remoteError{status: http.StatusServiceUnavailable, code: "unavailable", text: reply.Header.Get(micro.ErrorHeader)}
	if status, err := strconv.Atoi(code); err == nil && status >= 400 && status < 600 {
		e.status = status
	}
	var body struct{ Error, Code string }
	if json.Unmarshal(reply.Data, &body) == nil && body.Code != "" {
		e.code, e.text = body.Code, body.Error
	}
	return e
}

// encode writes a prompt as the body of a request of its own.
func (p *prompt) encode(content string) ([]byte, error) {
	m := map[string]any{}
	if content == tokenIDs {
		m[tokenIDs] = p.tokens
		if p.tokens == nil {
			m[tokenIDs] = []uint32{}
		}
	} else {
		m[blockHashes] = p.hashes
		if p.hashes == nil {
			m[blockHashes] = []uint64{}
		}
	}
	for name, v := range map[string][]byte{"lora_name": p.lora, "cache_salt": p.salt} {
		if len(v) > 0 {
			m[name] = string(v)
		}
	}
	for name, v := range map[string]uint64{"min_log_seq": p.minLogSeq, "top": p.top} {
		if v > 0 {
			m[name] = v
		}
	}
	return json.Marshal(m)
}
