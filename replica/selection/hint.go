package selection

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
)

// Hinter asks bridges for the engines' own names of blocks: the index knows blocks
// by hashes of their tokens, which engines do not.
type Hinter struct {
	nc      *nats.Conn
	timeout time.Duration
}

// NewHinter returns a Hinter. A bridge that does not answer within the timeout is
// not waited for.
func NewHinter(nc *nats.Conn, timeout time.Duration) *Hinter { return &Hinter{nc, timeout} }

// EngineHashes returns the engine's names of the first blocks of a prompt, given
// by its local hashes, that a source holds: from the first block on, up to the
// first that it does not hold.
func (h *Hinter) EngineHashes(ctx context.Context, s event.Source, locals []uint64) ([]event.EngineHash, error) {
	ctx, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	seqs := hash.AppendSequence(make([]uint64, 0, len(locals)), locals)
	reply, err := h.nc.RequestWithContext(ctx, event.NamesSubject(s.Key()), event.NamesRequest(seqs))
	if err != nil {
		return nil, fmt.Errorf("names of the blocks of %s, rank %d: %w", s.Instance, s.Rank, err)
	}
	return event.ParseNames(reply.Data)
}
