package load

import (
	"fmt"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// Messages between replicas are msgpack arrays: version, kind, id of the sender,
// and then, by kind:
//
//	ops    first, n, array of n operations: numbers first to first+n-1 of the sender
//	beat   seq, count, sum, joins: the sender's last number, digest, and whether it wants to hear of others
//	ask    nothing: the sender wants the receiver's state
//	state  about, seq, telling, chunk, chunks, array of operations: all that replica about owns at its number seq
//
// An operation is an array too:
//
//	add     [1, stamp, key, worker, waits, done, prefill, blocks, tokens, outputs, decay, session, ms left]
//	free    [2, stamp, key]
//	change  [3, stamp, key, done, outputs, decay]
//	mark    [4, owner, stamp, key, done, freed, outputs, decay, ms left]
//	session [5, id, worker, stamp, writer, ms left]
//
// Times are what is left, so that clocks need not agree.
const wireVersion = 1

const (
	kindOps = 1 + iota
	kindBeat
	kindAsk
	kindState
)

const (
	opAdd = 1 + iota
	opFree
	opChange
	opMark
	opSession
)

// Most bytes of operations in a message, and of messages that wait to be sent.
const (
	maxMessage   = 128 << 10
	maxOperation = 4 << 10 // of one operation and the head of a message, more than they can have
	maxOutbox    = 64 << 20
)

// outbox is operations that have been numbered and not been published.
type outbox struct {
	full  []batch
	last  batch
	bytes int
}

// batch is operations with consecutive numbers.
type batch struct {
	first uint64
	n     int
	ops   []byte
}

// op numbers an operation, and returns where to append it. sent has to be called
// with the result.
func (s *Shared) op() []byte {
	s.self.seq++
	if s.out.last.n == 0 {
		s.out.last.first = s.self.seq
	}
	return s.out.last.ops
}

func (s *Shared) sent(b []byte) {
	o := &s.out
	if s.transport == nil {
		o.last = batch{ops: b[:0]}
		return
	}
	o.bytes += len(b) - len(o.last.ops)
	o.last.ops = b
	o.last.n++
	if o.bytes > maxOutbox { // NATS takes nothing: others will ask for the state
		*o = outbox{}
		s.metrics.unsent.Add(s.metrics.ctx, 1)
	} else if len(b) >= s.most() {
		o.full = append(o.full, o.last)
		o.last = batch{}
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// most returns how many bytes of operations a message should have at most. One
// may have an operation more.
func (s *Shared) most() int {
	if t, ok := s.transport.(interface{ MaxMessage() int }); ok {
		if n := t.MaxMessage(); n > 0 {
			return min(maxMessage, max(n-maxOperation, 1))
		}
	}
	return maxMessage
}

func (s *Shared) tellAdd(r *reservation) {
	b := s.op()
	r.stamp = s.self.seq
	r.slot = s.hold(r.Worker) // for its key
	s.sent(appendAdd(b, r, s.workers[r.slot].key, time.Now()))
	s.release(r.slot)
}

func (s *Shared) tellFree(r *reservation) {
	s.sent(mpack.AppendStr(mpack.AppendUint(mpack.AppendUint(mpack.AppendArray(s.op(), 3), opFree), r.stamp), r.key))
}

func (s *Shared) tellChange(r *reservation) {
	b := mpack.AppendStr(mpack.AppendUint(mpack.AppendUint(mpack.AppendArray(s.op(), 6), opChange), r.stamp), r.key)
	s.sent(mpack.AppendUint(mpack.AppendUint(mpack.AppendBool(b, r.done), uint64(r.outputs)), uint64(r.decay)))
}

func (s *Shared) tellMark(r *reservation) { s.tellKey(markKey{r.owner.id, r.key, r.stamp}) }

func (s *Shared) tellKey(key markKey) {
	s.sent(appendMark(s.op(), key, s.self.marks[key], time.Now()))
}

func (s *Shared) tellSession(id string, e *session) { s.sent(appendSession(s.op(), id, e, time.Now())) }

// left returns a duration until t, in ms, and at least 0.
func left(t, now time.Time) uint64 { return uint64(max(t.Sub(now).Milliseconds(), 0)) }

func appendAdd(b []byte, r *reservation, worker string, now time.Time) []byte {
	b = mpack.AppendArray(b, 13)
	b = mpack.AppendUint(b, opAdd)
	b = mpack.AppendUint(b, r.stamp)
	b = mpack.AppendStr(b, r.key)
	b = mpack.AppendStr(b, worker)
	b = mpack.AppendBool(b, r.waits)
	b = mpack.AppendBool(b, r.done)
	for _, v := range [...]uint32{r.PrefillTokens, r.Blocks, r.Tokens, r.outputs, uint32(r.decay)} {
		b = mpack.AppendUint(b, uint64(v))
	}
	b = mpack.AppendStr(b, r.Session)
	return mpack.AppendUint(b, left(r.deadline, now))
}

func appendMark(b []byte, key markKey, m *mark, now time.Time) []byte {
	b = mpack.AppendArray(b, 9)
	b = mpack.AppendUint(b, opMark)
	b = mpack.AppendStr(b, key.owner)
	b = mpack.AppendUint(b, key.stamp)
	b = mpack.AppendStr(b, key.id)
	b = mpack.AppendBool(b, m.done)
	b = mpack.AppendBool(b, m.freed)
	b = mpack.AppendUint(b, uint64(m.outputs))
	b = mpack.AppendUint(b, uint64(m.decay))
	return mpack.AppendUint(b, left(m.deadline, now))
}

func appendSession(b []byte, id string, e *session, now time.Time) []byte {
	b = mpack.AppendArray(b, 6)
	b = mpack.AppendUint(b, opSession)
	b = mpack.AppendStr(b, id)
	b = mpack.AppendStr(b, e.worker.Key())
	b = mpack.AppendUint(b, e.stamp)
	b = mpack.AppendStr(b, e.writer)
	return mpack.AppendUint(b, left(e.deadline, now))
}

func appendHead(b []byte, fields, kind int, from string) []byte {
	b = mpack.AppendArray(b, 3+fields)
	b = mpack.AppendUint(b, wireVersion)
	b = mpack.AppendUint(b, uint64(kind))
	return mpack.AppendStr(b, from)
}

// operation is one that was read. Its worker is still a key.
type operation struct {
	kind    int
	r       reservation
	worker  string
	key     markKey
	m       mark
	id      string
	session session
}

// readOp reads an operation. It is not valid if the reader has an error.
func readOp(r *mpack.Reader, o *operation, now time.Time) {
	n := r.Array()
	*o = operation{kind: int(r.Uint())}
	read := 0
	switch o.kind {
	case opAdd:
		v := &o.r
		v.stamp, v.key, o.worker = r.Uint(), string(r.Str()), string(r.Str())
		v.waits, v.done = r.Bool(), r.Bool()
		v.PrefillTokens, v.Blocks, v.Tokens, v.outputs, v.decay = r.Uint32(), r.Uint32(), r.Uint32(), r.Uint32(), readDecay(r)
		v.Session = string(r.Str())
		v.deadline = now.Add(readLeft(r))
		v.ID = v.key
		if v.waits && v.key != "" {
			v.ID = v.key[len(pendingPrefix):]
		}
		if v.Blocks > MaxBlocks || v.outputs > MaxBlocks || v.PrefillTokens > MaxTokens || v.Tokens > MaxTokens {
			r.Fail(ErrMessage)
		}
		read = 13
	case opFree:
		o.r.stamp, o.r.key = r.Uint(), string(r.Str())
		read = 3
	case opChange:
		v := &o.r
		v.stamp, v.key, v.done, v.outputs, v.decay = r.Uint(), string(r.Str()), r.Bool(), r.Uint32(), readDecay(r)
		read = 6
	case opMark:
		o.key.owner, o.key.stamp, o.key.id = string(r.Str()), r.Uint(), string(r.Str())
		o.m.done, o.m.freed, o.m.outputs, o.m.decay = r.Bool(), r.Bool(), r.Uint32(), readDecay(r)
		o.m.deadline = now.Add(readLeft(r))
		if o.m.outputs > MaxBlocks {
			r.Fail(ErrMessage)
		}
		read = 9
	case opSession:
		o.id, o.worker = string(r.Str()), string(r.Str())
		o.session.stamp, o.session.writer = r.Uint(), string(r.Str())
		o.session.deadline = now.Add(readLeft(r))
		read = 6
	default: // of a later version: it means nothing here
		read = min(n, 1)
	}
	for ; read < n; read++ {
		r.Skip()
	}
	if read > n {
		r.Fail(ErrMessage)
	}
}

// readOps reads an array of operations.
func readOps(r *mpack.Reader) ([]operation, error) {
	now := time.Now()
	n := r.Array()
	out := make([]operation, 0, min(n, r.Len()/32)) // most have more bytes than that
	for i := range n {
		out = append(out, operation{})
		readOp(r, &out[i], now)
		if err := r.Err(); err != nil {
			return nil, fmt.Errorf("%w: operation %d: %w", ErrMessage, i, err)
		}
	}
	return out, nil
}

func readDecay(r *mpack.Reader) uint16 {
	v := r.Uint()
	if v > Unit {
		r.Fail(ErrMessage)
	}
	return uint16(v)
}

// readLeft reads a time that is left, of a day at most.
func readLeft(r *mpack.Reader) time.Duration {
	return time.Duration(min(r.Uint(), 24*3600*1000)) * time.Millisecond
}
