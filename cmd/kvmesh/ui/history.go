package ui

import (
	"net/http"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// sample is the index at one time.
type sample struct {
	Time int64 `json:"t"` // Unix, ms
	event.PositionJSON
	Lag     uint64              `json:"lag"`
	Sources int                 `json:"sources"`
	Batches uint64              `json:"batches"` // engine numbers summed up; grows by what was applied
	Gaps    uint64              `json:"gaps"`
	Blocks  [event.Tiers]uint64 `json:"blocks"` // by tier
}

// history keeps the last samples.
type history struct {
	mu      sync.Mutex
	samples []sample
	most    int
}

func newHistory(most int) *history { return &history{most: most} }

func (h *history) add(s sample) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.samples) >= h.most {
		h.samples = append(h.samples[:0], h.samples[len(h.samples)-h.most+1:]...)
	}
	h.samples = append(h.samples, s)
}

// since returns the samples behind a time in Unix ms.
func (h *history) since(t int64) []sample {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := []sample{}
	for _, s := range h.samples {
		if s.Time > t {
			out = append(out, s)
		}
	}
	return out
}

// look takes a sample.
func (u *UI) look() sample {
	s := sample{Time: time.Now().UnixMilli(), Lag: u.index.Lag()}
	sources, at := u.index.Sources()
	s.PositionJSON = at.JSON()
	for i := range sources {
		info := &sources[i]
		if !info.Answered && !info.Diverged {
			continue
		}
		s.Sources++
		s.Gaps += info.Gaps
		if info.EngineSeq != nil {
			s.Batches += *info.EngineSeq + 1
		}
		for t, d := range info.Digests {
			s.Blocks[t] += d.Count
		}
	}
	return s
}

type historyView struct {
	Tiers    [event.Tiers]string `json:"tiers"`
	Interval int64               `json:"interval_ms"`
	Samples  []sample            `json:"samples"`
}

func (u *UI) serveHistory(w http.ResponseWriter, r *http.Request) {
	var after int64
	if text := r.URL.Query().Get("after"); text != "" {
		for _, c := range text {
			if c < '0' || c > '9' || after > 1<<50 {
				fail(w, http.StatusBadRequest, "bad_request", "after: want a time in Unix milliseconds")
				return
			}
			after = after*10 + int64(c-'0')
		}
	}
	v := historyView{Interval: u.cfg.Interval.Milliseconds(), Samples: u.past.since(after)}
	for t := range v.Tiers {
		v.Tiers[t] = event.Tier(t).String()
	}
	reply(w, http.StatusOK, v)
}
