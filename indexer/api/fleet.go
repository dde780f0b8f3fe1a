package api

import (
	"encoding/json"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Fleet is what bridges tell of their listeners.
type Fleet struct {
	log *slog.Logger

	mu      sync.Mutex
	bridges map[string]*bridgeView
}

type bridgeView struct {
	heard     time.Time
	listeners map[string]event.ListenerStatus
}

// NewFleet returns a Fleet that nobody has told anything yet.
func NewFleet(logger *slog.Logger) *Fleet {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Fleet{log: logger, bridges: map[string]*bridgeView{}}
}

// Follow listens to the bridges until stop is called.
func (f *Fleet) Follow(nc *nats.Conn) (stop func(), err error) {
	sub, err := nc.Subscribe(event.StatusSubjects, f.take)
	if err != nil {
		return nil, err
	}
	if err := nc.Publish(event.StatusRequestSubject, nil); err != nil {
		f.log.Debug("bridges not asked for their status", "error", err)
	}
	return func() { sub.Unsubscribe() }, nil
}

func (f *Fleet) take(msg *nats.Msg) {
	var st event.Status
	if err := json.Unmarshal(msg.Data, &st); err != nil {
		f.log.Warn("status of a bridge can't be read", "subject", msg.Subject, "error", err)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.bridges[st.Bridge]
	if b == nil {
		b = &bridgeView{listeners: map[string]event.ListenerStatus{}}
		f.bridges[st.Bridge] = b
	}
	b.heard = time.Now()
	for _, l := range st.Listeners {
		if l.Gone {
			delete(b.listeners, l.Source)
		} else {
			b.listeners[l.Source] = l
		}
	}
}

// Listener returns what is known of the listener of a source, and its bridge.
func (f *Fleet) Listener(s event.Source) (bridge string, st event.ListenerStatus, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var heard time.Time
	for id, b := range f.bridges {
		if time.Since(b.heard) > event.StatusExpiry {
			delete(f.bridges, id)
			continue
		}
		if l, there := b.listeners[s.Key()]; there && b.heard.After(heard) {
			bridge, st, ok, heard = id, l, true, b.heard
		}
	}
	return bridge, st, ok
}
