package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// Requests about models whose index another process holds are passed on to one
// that does: kvmesh.selection-of.<model>.<group>.<operation>, with the body as it is. The
// reply has its status in a header.
const (
	passPrefix   = "kvmesh.selection-of"
	statusHeader = "Kvmesh-Status"
)

// passed tells whether an operation needs the index.
func passed(op operation) bool {
	switch op.name {
	case "select", "select_and_reserve", "potential_loads", "overlap_scores":
		return true
	}
	return false
}

// listenPassed answers what other processes pass on.
func (x *Server) listenPassed(nc *nats.Conn) (stop func() error, err error) {
	var subs []*nats.Subscription
	stop = func() error {
		var errs []error
		for _, sub := range subs {
			errs = append(errs, sub.Unsubscribe())
		}
		return errors.Join(errs...)
	}
	for _, subject := range x.cfg.Share.Subjects(passPrefix) {
		for _, op := range x.operations() {
			if !passed(op) {
				continue
			}
			sub, err := nc.QueueSubscribe(subject+"."+op.name, serviceName, func(m *nats.Msg) {
				go x.answerPassed(m, op) // one may wait for a worker; others must not wait for it
			})
			if err != nil {
				return nil, errors.Join(fmt.Errorf("NATS: %w", err), stop())
			}
			subs = append(subs, sub)
		}
	}
	return stop, nil
}

func (x *Server) answerPassed(m *nats.Msg, op operation) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	status, reply, err := op.do(&call{ctx: ctx, body: m.Data, query: func(string) string { return "" }})
	if err != nil {
		var code string
		status, code = codeOf(err)
		reply = door.Failure{Error: err.Error(), Code: code}
	}
	answer := nats.NewMsg("")
	answer.Header.Set(statusHeader, strconv.Itoa(status))
	if answer.Data, err = json.Marshal(reply); err == nil {
		err = m.RespondMsg(answer)
	}
	if err != nil {
		x.log.Warn("what was passed on is not answered", "subject", m.Subject, "error", err)
	}
}

// perform does an operation, here or where the index is.
func (x *Server) perform(op operation, c *call) (status int, reply any, err error) {
	status, reply, err = op.do(c)
	var elsewhere *selection.ElsewhereError
	if !errors.As(err, &elsewhere) || x.nc == nil || !passed(op) {
		return status, reply, err
	}
	subject := strings.Join([]string{passPrefix, event.Escape(elsewhere.Model), event.Escape(elsewhere.Group), op.name}, ".")
	m, e := x.nc.RequestWithContext(c.ctx, subject, c.body)
	if errors.Is(e, nats.ErrNoResponders) {
		return 0, nil, fmt.Errorf("%w, and no process that does is there", err)
	}
	if e != nil {
		return 0, nil, fmt.Errorf("%w, and passing it on failed: %w", err, e)
	}
	if status, e = strconv.Atoi(m.Header.Get(statusHeader)); e != nil {
		return 0, nil, fmt.Errorf("%w, and the answer of one that does can't be read", err)
	}
	if status < 400 {
		return status, json.RawMessage(m.Data), nil
	}
	var f door.Failure
	if e := json.Unmarshal(m.Data, &f); e != nil {
		f.Error = strings.TrimSpace(string(m.Data))
	}
	return 0, nil, &passedError{status, f}
}

// passedError is an error that another process answered with.
type passedError struct {
	status int
	door.Failure
}

func (e *passedError) Error() string { return e.Failure.Error }
