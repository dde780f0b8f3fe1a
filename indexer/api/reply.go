package api

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// span is the ranks of one instance in an answer: holdings from to end, and how
// far the best of them gets with each tier, in blocks.
type span struct {
	from, end int
	best      [event.Tiers]uint32
}

// appendAnswer appends an answer as JSON to the reply, with the top instances that
// hold most, or all if top is 0. All numbers but the log sequence are tokens:
//
//	{"scores": {instance: {rank: device}}, "frequencies": [],
//	 "instances": {instance: {"longest_matched", "gpu", "dp": {rank: device}, "cpu", "disk"}}, "log_seq"}
func (w *work) appendAnswer(a *indexer.Answer, top uint64) {
	w.span(a.Holdings)
	if top > 0 && top < uint64(len(w.spans)) {
		w.cut(int(top))
	}
	b := append(w.reply, `{"scores":{`...)
	for i := range w.spans {
		sp := &w.spans[i]
		b = appendName(b, i, a.Holdings[sp.from].Instance)
		b = appendRanks(b, a, sp)
	}
	b = append(b, `},"frequencies":[],"instances":{`...)
	for i := range w.spans {
		sp := &w.spans[i]
		b = appendName(b, i, a.Holdings[sp.from].Instance)
		b = append(b, `{"longest_matched":`...)
		b = appendTokens(b, a, sp.best[event.External])
		b = append(b, `,"gpu":`...)
		b = appendTokens(b, a, sp.best[event.Device])
		b = append(b, `,"dp":`...)
		b = appendRanks(b, a, sp)
		b = append(b, `,"cpu":`...)
		b = appendTokens(b, a, sp.best[event.Host])
		b = append(b, `,"disk":`...)
		b = appendTokens(b, a, sp.best[event.External])
		b = append(b, '}')
	}
	b = append(b, `},"log_seq":`...)
	b = strconv.AppendUint(b, a.LogSeq, 10)
	w.reply = append(b, '}')
}

// span sorts holdings by instance and rank, and finds the ranks of each instance.
func (w *work) span(holdings []indexer.Holding) {
	slices.SortFunc(holdings, func(a, b indexer.Holding) int {
		return cmp.Or(cmp.Compare(a.Instance, b.Instance), cmp.Compare(a.Rank, b.Rank))
	})
	w.spans = w.spans[:0]
	for i := range holdings {
		h := &holdings[i]
		if i == 0 || h.Instance != holdings[i-1].Instance {
			w.spans = append(w.spans, span{from: i})
		}
		sp := &w.spans[len(w.spans)-1]
		sp.end = i + 1
		for t, end := range h.Ends {
			sp.best[t] = max(sp.best[t], end)
		}
	}
}

// cut keeps the instances that hold most: in all tiers, and of those that hold
// the same, in the faster tiers.
func (w *work) cut(top int) {
	slices.SortStableFunc(w.spans, func(a, b span) int {
		return cmp.Or(cmp.Compare(b.best[event.External], a.best[event.External]),
			cmp.Compare(b.best[event.Device], a.best[event.Device]),
			cmp.Compare(b.best[event.Host], a.best[event.Host]))
	})
	w.spans = w.spans[:top]
}

func appendTokens(b []byte, a *indexer.Answer, blocks uint32) []byte {
	return strconv.AppendUint(b, uint64(blocks)*uint64(a.BlockSize), 10)
}

// appendRanks appends what each rank of an instance has in the device tier.
func appendRanks(b []byte, a *indexer.Answer, sp *span) []byte {
	b = append(b, '{')
	first := true
	for i := sp.from; i < sp.end; i++ {
		h := &a.Holdings[i]
		if h.Ends[event.Device] == 0 {
			continue
		}
		if !first {
			b = append(b, ',')
		}
		first = false
		b = append(b, '"')
		b = strconv.AppendUint(b, uint64(h.Rank), 10)
		b = append(b, '"', ':')
		b = appendTokens(b, a, h.Ends[event.Device])
	}
	return append(b, '}')
}

// appendName appends the name of the i-th member of an object.
func appendName(b []byte, i int, name string) []byte {
	if i > 0 {
		b = append(b, ',')
	}
	return append(appendString(b, name), ':')
}

// appendString appends a string as encoding/json writes it.
func appendString(b []byte, text string) []byte {
	for i := range len(text) {
		if c := text[i]; c < ' ' || c >= utf8.RuneSelf || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			data, _ := json.Marshal(text) // a string has no error
			return append(b, data...)
		}
	}
	b = append(b, '"')
	b = append(b, text...)
	return append(b, '"')
}

// appendFailure appends the body of every error.
func appendFailure(b []byte, err error, code string) []byte {
	b = appendString(append(b, `{"error":`...), err.Error())
	b = appendString(append(b, `,"code":`...), code)
	return append(b, '}')
}
