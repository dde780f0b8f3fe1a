package bridge

import (
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// namesAsked answers a request for the names that an engine has for blocks. Only
// the bridge that writes the source answers; of others nobody hears.
func (b *Bridge) namesAsked(msg *nats.Msg) {
	key := strings.TrimPrefix(msg.Subject, event.NamesSubject(""))
	source, err := event.ParseKey(key)
	var seqs []uint64
	if err == nil {
		seqs, err = event.ParseNamesRequest(msg.Data)
	}
	if err != nil {
		b.log.Warn("request for names of blocks can't be read", "subject", msg.Subject, "error", err)
		return
	}
	for _, l := range b.listeners() {
		if l.worker.Partition() != source.Partition() || l.worker.Instance != source.Instance {
			continue
		}
		if names, ok := l.names(source, seqs); ok {
			if err := msg.Respond(event.AppendNames(nil, names)); err != nil {
				b.log.Debug("request for names of blocks not answered", "error", err)
			}
			return
		}
	}
}

// names returns the engine's names of a source's blocks, if the listener writes
// that source.
func (l *listener) names(source event.Source, seqs []uint64) ([]event.EngineHash, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lanes {
		if n.source == source {
			return n.state.Names(nil, seqs), true
		}
	}
	return nil, false
}
