package mock

import (
	"context"
	"encoding/binary"
	"net"
	"slices"
	"time"

	"github.com/go-zeromq/zmq4"
)

// Replay is how an engine answers replay requests. The zero value answers as
// SGLang and older vLLM do: everything from the number asked for up to the newest
// batch, in frames ["", seq, payload], and then the end marker.
type Replay struct {
	Topic  bool          // frames are ["", topic, seq, payload], as vLLM writes them since 0.26
	Holes  []uint64      // numbers that no request ever gets
	Lossy  int           // how many more requests miss the numbers in Skip
	Skip   []uint64      // see Lossy
	NoEnd  bool          // leave the end marker out
	Silent int           // how many more requests get no answer at all; negative: all
	Delay  time.Duration // before each answer
	Limit  int           // most batches in an answer; 0: no limit
	Early  uint64        // how many numbers before the one asked for an answer begins
	Twice  bool          // send every batch two times
}

// Request is a replay request that an engine has seen.
type Request struct {
	At   time.Time
	From uint64 // the first number asked for
}

// maxRequests is how many requests an engine remembers.
const maxRequests = 10_000

// endOfReplay is the sequence number of the end marker.
const endOfReplay = ^uint64(0)

// kept is a batch in the ring.
type kept struct {
	seq     uint64
	payload []byte
	hidden  bool // replays leave it out
}

// ring keeps the last batches of an engine, in the order of publishing.
type ring struct {
	size int
	old  int // index of the oldest once the ring is full
	buf  []kept
}

func (r *ring) add(k kept) {
	if len(r.buf) < r.size {
		r.buf = append(r.buf, k)
	} else if r.size > 0 {
		r.buf[r.old] = k
		r.old = (r.old + 1) % r.size
	}
}

func (r *ring) clear() { r.buf, r.old = nil, 0 }

// all yields the batches from the oldest on.
func (r *ring) all(yield func(kept) bool) {
	for i := range r.buf {
		if !yield(r.buf[(r.old+i)%len(r.buf)]) {
			return
		}
	}
}

// serveReplay answers the requests of one connection. Each connection is served
// by itself, so that a client that does not read holds up nobody else.
func (e *Engine) serveReplay(ctx context.Context, c net.Conn) {
	z, g, err := openZMQ4(c, zmq4.Router, true)
	if err != nil {
		return
	}
	for {
		m, err := z.RecvMsg()
		if err != nil {
			return
		}
		if m.Type != zmq4.UsrMsg {
			continue
		}
		if len(m.Frames) != 2 || len(m.Frames[0]) != 0 || len(m.Frames[1]) != 8 {
			e.badRequest()
			continue
		}
		r, batches := e.request(binary.BigEndian.Uint64(m.Frames[1]))
		if !pause(ctx, r.Delay) || e.answer(z, r, batches) != nil || g.flush() != nil {
			return
		}
	}
}

// answer sends batches and the end marker.
func (e *Engine) answer(z *zmq4.Conn, r Replay, batches []kept) error {
	e.mu.Lock()
	own := e.topic
	e.mu.Unlock()
	send := func(topic []byte, seq uint64, payload []byte) error {
		frames := [][]byte{nil, binary.BigEndian.AppendUint64(nil, seq), payload}
		if r.Topic {
			frames = slices.Insert(frames, 1, topic)
		}
		return z.SendMsg(zmq4.NewMsgFrom(frames...))
	}
	times := 1
	if r.Twice {
		times = 2
	}
	for _, b := range batches {
		for range times {
			if err := send(own, b.seq, b.payload); err != nil {
				return err
			}
		}
	}
	if r.NoEnd {
		return nil
	}
	return send(nil, endOfReplay, nil)
}

// request notes a request and returns what to answer.
func (e *Engine) request(from uint64) (Replay, []kept) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests = append(e.requests, Request{time.Now(), from})
	if extra := len(e.requests) - maxRequests; extra > 0 {
		e.requests = slices.Delete(e.requests, 0, extra)
	}
	r := &e.replay
	if r.Silent != 0 {
		if r.Silent > 0 {
			r.Silent--
		}
		return Replay{NoEnd: true}, nil
	}
	missing := r.Holes
	if r.Lossy > 0 {
		r.Lossy--
		missing = slices.Concat(r.Holes, r.Skip)
	}
	from -= min(from, r.Early)
	var out []kept
	for b := range e.ring.all {
		if r.Limit > 0 && len(out) == r.Limit {
			break
		}
		if b.seq >= from && !b.hidden && !slices.Contains(missing, b.seq) {
			out = append(out, b)
		}
	}
	return *r, out
}

// pause waits; false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
