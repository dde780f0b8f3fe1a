package api

import (
	"cmp"
	"encoding/json"
	"slices"
	"strconv"
	"unicode/utf8"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api/door"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// span is what an instance holds: a chain of holdings, one for each of its ranks,
// and how far the best of them gets with each tier, in blocks.
type span struct {
	first, last int32 // indexes of holdings; work.after links them
	best        [event.Tiers]uint32
}

// appendAnswer appends an answer as JSON to the reply, with the top instances that
// hold most, or all if top is 0. All numbers but log sequences are tokens:
//
//	{"scores": {instance: {rank: device}}, "frequencies": [],
//	 "instances": {instance: {"longest_matched", "gpu", "dp": {rank: device}, "cpu", "disk"}}, "log_seq" or "log_seqs"}
func (w *work) appendAnswer(a *indexer.Answer, top uint64) {
	w.group(a.Holdings)
	if top > 0 && top < uint64(len(w.spans)) {
		w.cut(a.Holdings, int(top))
	}
	b := append(w.reply, `{"scores":{`...)
	for i := range w.spans {
		sp := &w.spans[i]
		b = appendName(b, i, a.Holdings[sp.first].Instance)
		b = w.appendRanks(b, a, sp)
	}
	b = append(b, `},"frequencies":[],"instances":{`...)
	for i := range w.spans {
		sp := &w.spans[i]
		b = appendName(b, i, a.Holdings[sp.first].Instance)
		b = append(b, `{"longest_matched":`...)
		b = appendTokens(b, a, sp.best[event.External])
		b = append(b, `,"gpu":`...)
		b = appendTokens(b, a, sp.best[event.Device])
		b = append(b, `,"dp":`...)
		b = w.appendRanks(b, a, sp)
		b = append(b, `,"cpu":`...)
		b = appendTokens(b, a, sp.best[event.Host])
		b = append(b, `,"disk":`...)
		b = appendTokens(b, a, sp.best[event.External])
		b = append(b, '}')
	}
	w.reply = append(a.AppendJSON(append(b, "},"...)), '}')
}

// group finds the ranks of each instance. It keeps the order that instances come
// in: sorting them would take most of the time of an answer with a thousand.
func (w *work) group(holdings []indexer.Holding) {
	w.spans, w.after = w.spans[:0], w.after[:0]
	for i := range holdings {
		h := &holdings[i]
		at, known := w.places[h.Instance]
		if !known {
			at = int32(len(w.spans))
			w.places[h.Instance] = at
			w.spans = append(w.spans, span{first: int32(i), last: int32(i)})
		}
		sp := &w.spans[at]
		w.after = append(w.after, -1)
		if known {
			w.after[sp.last] = int32(i)
			sp.last = int32(i)
		}
		for t, end := range h.Ends {
			sp.best[t] = max(sp.best[t], end)
		}
	}
	for _, sp := range w.spans {
		delete(w.places, holdings[sp.first].Instance)
	}
}

// cut keeps the instances that hold most, the best first.
func (w *work) cut(holdings []indexer.Holding, top int) {
	// Most first: in all tiers, and of those that hold the same, in the faster
	// tiers. The name makes the choice the same everywhere.
	order := func(a, b span) int {
		for _, t := range [...]event.Tier{event.External, event.Device, event.Host, event.Disk} {
			if a.best[t] != b.best[t] {
				return cmp.Compare(b.best[t], a.best[t])
			}
		}
		return cmp.Compare(holdings[a.first].Instance, holdings[b.first].Instance)
	}
	slices.SortFunc(w.spans[:top], order)
	for _, sp := range w.spans[top:] {
		if order(sp, w.spans[top-1]) > 0 {
			continue
		}
		at, _ := slices.BinarySearchFunc(w.spans[:top], sp, order)
		copy(w.spans[at+1:top], w.spans[at:top-1])
		w.spans[at] = sp
	}
	w.spans = w.spans[:top]
}

func appendTokens(b []byte, a *indexer.Answer, blocks uint32) []byte {
	return strconv.AppendUint(b, uint64(blocks)*uint64(a.BlockSize), 10)
}

// appendRanks appends what each rank of an instance has in the device tier.
func (w *work) appendRanks(b []byte, a *indexer.Answer, sp *span) []byte {
	b = append(b, '{')
	first := true
	for i := sp.first; i >= 0; i = w.after[i] {
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
	return append(b, door.Failure{Error: err.Error(), Code: code}.JSON()...)
}
