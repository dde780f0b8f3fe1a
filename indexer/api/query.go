package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// query returns the handler of /query or /query_by_hash.
func (s *Server) query(content string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		k := s.work(content)
		defer s.done(k)
		if err := s.ask(k, r); err != nil {
			s.refuse(w, r, err)
			return
		}
		s.send(w, http.StatusOK, k.reply)
	})
}

// ask reads what a request asks, and makes the reply.
func (s *Server) ask(w *work, r *http.Request) error {
	m, err := mediaOf(r.Header.Get("Content-Type"))
	if err != nil {
		return err
	}
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return fmt.Errorf("%w: Content-Encoding is %.100q, want none", errMedia, encoding)
	}
	if err := w.readBody(r, s.cfg.MaxQuery); err != nil {
		return err
	}
	if err := w.readCall(m, r.URL.RawQuery); err != nil {
		return err
	}
	return s.answer(r.Context(), w)
}

// answer makes the reply to a call that has been read. Of a batch, each prompt has
// an answer or an error.
func (s *Server) answer(ctx context.Context, w *work) error {
	if w.outer.err != nil {
		return w.outer.err
	}
	deadline := time.Now().Add(s.cfg.WaitTimeout)
	if !w.batch {
		err := s.answerPrompt(ctx, deadline, w, &w.outer)
		w.reply = append(w.reply, '\n')
		return err
	}
	w.reply = append(w.reply, `{"answers":[`...)
	for i := range w.prompts {
		if i > 0 {
			w.reply = append(w.reply, ',')
		}
		p := &w.prompts[i]
		p.inherit(&w.outer)
		err := errReply
		if len(w.reply) < s.cfg.MaxReply {
			err = s.answerPrompt(ctx, deadline, w, p)
		}
		if err != nil {
			_, code := codeOf(err)
			w.reply = appendFailure(w.reply, err, code)
		}
	}
	w.reply = append(w.reply, "]}\n"...)
	return nil
}

// reach waits until answers are true for a position.
func (s *Server) reach(ctx context.Context, deadline time.Time, p event.Position) error {
	reached, err := s.index.Reached(p)
	if err != nil || reached { // most ask for none, and pay for no timer
		return err
	}
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	return s.index.WaitFor(ctx, p)
}

// match appends the answer for one prompt to the reply, or nothing if there is an
// error.
func (s *Server) match(ctx context.Context, deadline time.Time, w *work, p *prompt) error {
	if p.err != nil {
		return p.err
	}
	if len(p.model) == 0 {
		return fmt.Errorf("%w: model_name is missing or empty", errRequest)
	}
	if !p.given {
		return fmt.Errorf("%w: %s is missing", errRequest, w.content)
	}
	name := event.Partition{Model: w.name(p.model), Group: defaultGroup}
	if p.group != nil {
		name.Group = w.name(p.group)
	}
	w.asked.name = name
	size, err := s.index.BlockSize(name)
	if err != nil {
		return unknown(name, err)
	}
	elsewhere := !s.index.Serves(name)
	if elsewhere {
		_, err = s.index.Reached(p.min) // whether it can be one
	} else {
		err = s.reach(ctx, deadline, p.min)
	}
	if err != nil {
		return err
	}
	locals := p.hashes
	if w.content == tokenIDs {
		w.locals = hash.AppendLocals(w.locals[:0], p.tokens, int(size), 0, hash.SeedOf(string(p.lora), string(p.salt)))
		locals = w.locals
	}
	// The only use of the index's query: what it returns belongs to w until the
	// next one.
	var a indexer.Answer
	if elsewhere && s.others != nil {
		asking, cancel := context.WithDeadline(ctx, deadline.Add(s.cfg.ForwardTimeout)) // also of many prompts
		defer cancel()
		a, err = s.others.ask(asking, name, locals, p.min)
	} else {
		a, err = s.index.Match(&w.query, name, locals)
	}
	if err != nil {
		return unknown(name, err)
	}
	w.asked.blocks, w.asked.at, w.asked.answered = len(locals), a.Position, true
	w.appendAnswer(&a, p.top)
	return nil
}

// unknown names the partition in an error that says that it is unknown, or
// elsewhere.
func unknown(p event.Partition, err error) error {
	switch {
	case errors.Is(err, indexer.ErrUnknownPartition):
		return fmt.Errorf("no workers for model=%s routing_group=%s (GET /workers lists all): %w", p.Model, p.Group, err)
	case errors.Is(err, indexer.ErrElsewhere):
		return fmt.Errorf("model=%s routing_group=%s: %w", p.Model, p.Group, err)
	}
	return err
}
