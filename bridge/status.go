package bridge

import (
	"encoding/json"
	"maps"
	"reflect"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// statusInterval is how often changes of status are published.
const statusInterval = 500 * time.Millisecond

// statusChunk is how many listeners one message tells of.
const statusChunk = 500

// status returns what there is to say of a listener.
func (l *listener) status() event.ListenerStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := event.ListenerStatus{
		Source:    l.worker.Key(),
		State:     event.StatePending,
		LastError: l.engineErr,
		Uncertain: l.account.gaps > 0,
	}
	switch {
	case l.connected && (l.verify || l.hole() || l.opening):
		st.State = event.StateCatchingUp
	case l.connected:
		st.State = event.StateActive
	}
	if l.logErr != "" {
		st.LastError = l.logErr
	}
	if l.next > 0 {
		last := l.next - 1
		st.EngineSeq = &last
	}
	if len(l.account.dropped) > 0 {
		st.Dropped = maps.Clone(l.account.dropped)
	}
	return st
}

// publishStatus tells who listens how the listeners are: all of them, or those
// whose status has changed.
func (b *Bridge) publishStatus(full bool) {
	now := map[string]event.ListenerStatus{}
	b.mu.Lock()
	slots := make([]*slot, 0, len(b.slots))
	for _, s := range b.slots {
		slots = append(slots, s)
	}
	b.mu.Unlock()
	for _, s := range slots {
		s.mu.Lock()
		l, err, wanted := s.listener, s.err, s.role == writing
		s.mu.Unlock()
		switch {
		case l != nil && l.inStandby(): // its writer tells of it
		case l != nil:
			now[s.source.Key()] = l.status()
		case wanted && err != nil:
			now[s.source.Key()] = event.ListenerStatus{Source: s.source.Key(), State: event.StateFailed, LastError: err.Error()}
		case wanted:
			now[s.source.Key()] = event.ListenerStatus{Source: s.source.Key(), State: event.StatePending}
		}
	}
	b.statusMu.Lock()
	defer b.statusMu.Unlock()
	if time.Since(b.statusFull) > 20*statusInterval {
		full = true // whoever missed something has it now
	}
	var tell []event.ListenerStatus
	for key, st := range now {
		if full || !reflect.DeepEqual(st, b.statusTold[key]) {
			tell = append(tell, st)
		}
	}
	for key := range b.statusTold {
		if _, ok := now[key]; !ok {
			tell = append(tell, event.ListenerStatus{Source: key, State: event.StatePending, Gone: true})
		}
	}
	b.statusTold = now
	if full {
		b.statusFull = time.Now()
	}
	for len(tell) > 0 || full {
		n := min(len(tell), statusChunk)
		b.tell(event.Status{Bridge: b.cfg.ID, Time: time.Now(), Listeners: tell[:n]})
		tell, full = tell[n:], false
	}
}

func (b *Bridge) tell(st event.Status) {
	data, err := json.Marshal(st)
	if err == nil {
		err = b.nc.Publish(event.StatusSubject(b.cfg.ID), data)
	}
	if err != nil {
		b.log.Debug("status not published", "error", err)
	}
}
