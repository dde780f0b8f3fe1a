package main

import (
	"context"
	"strconv"
	"sync"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// selectionPicker has the selection pick, as a router does: a session has a
// reservation from each request until its next one, which takes its place.
type selectionPicker struct {
	ctx       context.Context
	selector  *selection.Selector
	partition event.Partition

	mu   sync.Mutex
	held map[uint64]string // reservation of each session
}

// newSelection returns a selector over an index, with shared load of its own.
func newSelection(ctx context.Context, tasks *sync.WaitGroup, nc *nats.Conn, index *indexer.Indexer) (*selection.Selector, error) {
	shared, err := load.New(load.OverNATS(nc), load.Default(), load.Options{})
	if err != nil {
		return nil, err
	}
	selector, err := selection.New(index, shared, selection.Default(), selection.Options{})
	if err != nil {
		return nil, err
	}
	tasks.Go(func() { shared.Run(ctx) })
	return selector, until(ctx, "the load is shared", func() (bool, error) { return shared.Ready() == nil, nil })
}

// Pick implements picker.
func (p *selectionPicker) Pick(session uint64, locals []uint64) (event.Source, int, error) {
	p.free(session)
	res, err := p.selector.SelectAndReserve(p.ctx, &selection.Request{Partition: p.partition, Locals: locals, Session: strconv.FormatUint(session, 10)})
	if err != nil {
		return event.Source{}, 0, err
	}
	p.mu.Lock()
	p.held[session] = res.ID
	p.mu.Unlock()
	return res.Source, int(res.Overlap.Longest()), p.selector.Load().PrefillComplete(p.ctx, res.ID)
}

func (p *selectionPicker) free(session uint64) {
	p.mu.Lock()
	id, ok := p.held[session]
	delete(p.held, session)
	p.mu.Unlock()
	if ok {
		p.selector.Free(p.ctx, id) // one that has expired is free
	}
}

// Done implements picker.
func (p *selectionPicker) Done(session uint64) { p.free(session) }
