package api

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// Queries for partitions that another indexer serves. The one that is asked knows
// the block size from the catalog, hashes the prompt, and sends the local hashes
// to kvmesh.match.<model>.<group>, where an indexer listens if it serves that:
//
//	request [1, min log seq, local hashes]
//	reply   [1, log seq, block size, [instance, rank, end, end, end, end], …]
//
// as MessagePack; of a log in several streams log seq is an array, with one a shard,
// or 0 for any; hashes are a binary of little-endian u64, ends are how far one
// gets with the tiers up to each, in blocks. Errors are those of the micro
// protocol. Who answers such a request never passes it on.
const (
	matchSubject = "kvmesh.match"
	matchVersion = 1
)

var (
	errNobody   = fmt.Errorf("%w, and no indexer that serves it is there", indexer.ErrElsewhere)
	errNoAnswer = fmt.Errorf("%w, and who serves it did not answer in time", indexer.ErrElsewhere)
)

// Elsewhere answers for an index, and for what is not in its share by asking
// those who serve that. It can stand where an index is asked.
type Elsewhere struct {
	nc      *nats.Conn
	index   *indexer.Indexer
	timeout time.Duration // of one answer
	wait    time.Duration // for which the other one waits for a log sequence

	mu      sync.Mutex
	sources map[event.Source]*event.Source // each has one address, by which callers know it again
}

// NewElsewhere returns an Elsewhere with the times of a Server's configuration.
func NewElsewhere(nc *nats.Conn, index *indexer.Indexer, cfg Config) *Elsewhere {
	return &Elsewhere{nc: nc, index: index, timeout: cfg.ForwardTimeout, wait: cfg.WaitTimeout, sources: map[event.Source]*event.Source{}}
}

// Match answers who holds how much of a prompt, as indexer.Indexer.Match does. If
// the partition is served elsewhere it waits for the answer, and errors may wrap
// indexer.ErrElsewhere: nobody who serves it answers.
func (e *Elsewhere) Match(q *indexer.Query, name event.Partition, locals []uint64) (indexer.Answer, error) {
	if e.index.Serves(name) {
		return e.index.Match(q, name, locals)
	}
	if _, err := e.index.BlockSize(name); err != nil {
		return indexer.Answer{}, err
	}
	return e.ask(context.Background(), name, locals, event.Position{})
}

// Applied returns the last record of a partition that this index applied and
// that was traced; ok is false if there is none.
func (e *Elsewhere) Applied(name event.Partition) (a indexer.Applied, ok bool) {
	return e.index.Applied(name)
}

// Lag returns how many records of the log this index has not read yet.
func (e *Elsewhere) Lag() uint64 { return e.index.Lag() }

// askAgain is the wait before those who serve a partition, and are not ready, are
// asked again: another one may be.
const askAgain = 50 * time.Millisecond

// ask asks those who serve a partition. The answer is true for a position of least, or
// later.
func (e *Elsewhere) ask(ctx context.Context, name event.Partition, locals []uint64, least event.Position) (indexer.Answer, error) {
	timeout := e.timeout
	if !least.Zero() {
		timeout += e.wait
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body := mpack.AppendArray(make([]byte, 0, 32+8*len(locals)), 3)
	body = mpack.AppendUint(body, matchVersion)
	body = appendPosition(body, least)
	body = mpack.AppendBinHead(body, 8*len(locals))
	for _, l := range locals {
		body = binary.LittleEndian.AppendUint64(body, l)
	}
	request := nats.NewMsg(matchSubject + "." + event.Escape(name.Model) + "." + event.Escape(name.Group))
	request.Data = body
	event.SetTrace(ctx, request.Header)
	for {
		reply, err := e.nc.RequestMsgWithContext(ctx, request)
		switch {
		case errors.Is(err, nats.ErrNoResponders):
			return indexer.Answer{}, errNobody
		case errors.Is(err, nats.ErrMaxPayload):
			return indexer.Answer{}, fmt.Errorf("%w for NATS, over which the partition is asked about", errTooLarge)
		case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
			return indexer.Answer{}, errNoAnswer
		case err != nil:
			return indexer.Answer{}, fmt.Errorf("%s is served elsewhere: %w", name, err)
		}
		if reply.Header.Get(micro.ErrorCodeHeader) == "" {
			return e.read(name, reply.Data)
		}
		err = refusal(reply)
		if !errors.Is(err, indexer.ErrNotReady) {
			return indexer.Answer{}, err
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
			return indexer.Answer{}, err
		}
	}
}

func appendPosition(b []byte, p event.Position) []byte {
	if len(p.LogSeqs) == 0 {
		return mpack.AppendUint(b, p.LogSeq)
	}
	b = mpack.AppendArray(b, len(p.LogSeqs))
	for _, seq := range p.LogSeqs {
		b = mpack.AppendUint(b, seq)
	}
	return b
}

func readPosition(r *mpack.Reader) event.Position {
	if r.Next() != mpack.KindArray {
		return event.Position{LogSeq: r.Uint()}
	}
	n := r.Array()
	if n > event.MaxShards {
		r.Fail(mpack.ErrType)
		return event.Position{}
	}
	seqs := make([]uint64, n)
	for i := range seqs {
		seqs[i] = r.Uint()
	}
	return event.Position{LogSeqs: seqs}
}

// refusal returns the error that another indexer answered with.
func refusal(reply *nats.Msg) error {
	var f struct{ Error, Code string }
	if json.Unmarshal(reply.Data, &f) != nil || f.Error == "" {
		f.Error = reply.Header.Get(micro.ErrorHeader)
	}
	for _, err := range []error{indexer.ErrNotReady, indexer.ErrBehind, indexer.ErrPosition, indexer.ErrUnknownPartition, errTooLarge, errReply} {
		if _, code := codeOf(err); code == f.Code {
			return fmt.Errorf("%w, where the partition is served: %s", err, f.Error)
		}
	}
	return fmt.Errorf("where the partition is served: %s", f.Error)
}

var errMatchReply = errors.New("the answer of another indexer can't be read")

// read reads a reply.
func (e *Elsewhere) read(name event.Partition, data []byte) (indexer.Answer, error) {
	r := mpack.NewReader(data)
	n := r.Array()
	if version := r.Uint(); n < 3 || version != matchVersion {
		r.Fail(mpack.ErrType)
	}
	a := indexer.Answer{Position: readPosition(&r), BlockSize: r.Uint32()}
	e.mu.Lock()
	defer e.mu.Unlock()
	for range n - 3 {
		fields := r.Array()
		if fields < 2+int(event.Tiers) {
			r.Fail(mpack.ErrType)
		}
		s := event.Source{Model: name.Model, Group: name.Group, Instance: string(r.Str()), Rank: r.Uint32()}
		var h indexer.Holding
		for t := range h.Ends {
			h.Ends[t] = r.Uint32()
		}
		for range fields - 2 - int(event.Tiers) {
			r.Skip()
		}
		if r.Err() != nil {
			break
		}
		h.Source = e.source(s)
		a.Holdings = append(a.Holdings, h)
	}
	if r.Err() != nil {
		return indexer.Answer{}, fmt.Errorf("%w: %w", errMatchReply, r.Err())
	}
	return a, nil
}

// keepSources is how many sources have their address kept.
const keepSources = 1 << 16

// source returns the one copy of a source. mu is held.
func (e *Elsewhere) source(s event.Source) *event.Source {
	if known := e.sources[s]; known != nil {
		return known
	}
	if len(e.sources) >= keepSources {
		clear(e.sources)
	}
	e.sources[s] = &s
	return &s
}

// -- the other end ------------------------------------------------------------

// matchNATS answers a request of an Elsewhere for the partition named by key, from
// this index alone.
func (s *Server) matchNATS(ctx context.Context, w *work, r micro.Request, key string) error {
	name, err := partitionOf(key)
	if err != nil {
		return err
	}
	in := mpack.NewReader(r.Data())
	n := in.Array()
	if version := in.Uint(); n < 3 || version != matchVersion {
		in.Fail(mpack.ErrType)
	}
	least, hashes := readPosition(&in), in.Bin()
	if err := in.Err(); err != nil || len(hashes)%8 != 0 {
		return fmt.Errorf("%w: not what one indexer asks another", errRequest)
	}
	w.locals = appendHashes(w.locals[:0], hashes)
	if err := s.reach(ctx, time.Now().Add(s.cfg.WaitTimeout), least); err != nil {
		return err
	}
	a, err := s.index.Match(&w.query, name, w.locals)
	if err != nil {
		return unknown(name, err)
	}
	b := mpack.AppendArray(w.reply[:0], 3+len(a.Holdings))
	b = mpack.AppendUint(b, matchVersion)
	b = appendPosition(b, a.Position)
	b = mpack.AppendUint(b, uint64(a.BlockSize))
	for i := range a.Holdings {
		h := &a.Holdings[i]
		b = mpack.AppendArray(b, 2+len(h.Ends))
		b = mpack.AppendStr(b, h.Instance)
		b = mpack.AppendUint(b, uint64(h.Rank))
		for _, end := range h.Ends {
			b = mpack.AppendUint(b, uint64(end))
		}
	}
	w.reply = b
	return nil
}
