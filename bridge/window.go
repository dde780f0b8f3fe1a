package bridge

import (
	"bytes"
	"container/heap"
	"time"
)

// window holds batches of one engine that can't be applied yet, because
// others before them are missing. It is the place where live messages and
// replayed ones meet, so it is where their order is made.
type window struct {
	batches heldBatches
	has     map[uint64]bool
	bytes   int
	timed   bool // batches have the time of their arrival
}

// heldBatch is a batch with its number. The payload is the window's own.
type heldBatch struct {
	seq     uint64
	conn    uint64 // number of the connection it came over; 0 for a replayed one
	payload []byte
	at      time.Time // when it came; zero unless timed
}

// Len returns how many batches are held.
func (w *window) Len() int { return len(w.batches) }

// First returns the lowest number that is held.
func (w *window) First() uint64 { return w.batches[0].seq }

// Add takes a batch in, and copies its payload. Of a number that is held
// already it keeps what it has.
func (w *window) Add(seq, conn uint64, payload []byte) {
	if w.has[seq] {
		return
	}
	if w.has == nil {
		w.has = map[uint64]bool{}
	}
	w.has[seq] = true
	w.bytes += len(payload)
	b := heldBatch{seq: seq, conn: conn, payload: append([]byte(nil), payload...)}
	if w.timed {
		b.at = time.Now()
	}
	heap.Push(&w.batches, b)
}

// Pop takes out the batch with the lowest number.
func (w *window) Pop() heldBatch {
	b := heap.Pop(&w.batches).(heldBatch)
	delete(w.has, b.seq)
	w.bytes -= len(b.payload)
	return b
}

// Get returns the payload of a batch that is held.
func (w *window) Get(seq uint64) ([]byte, bool) {
	if !w.has[seq] {
		return nil, false
	}
	for i := range w.batches {
		if w.batches[i].seq == seq {
			return w.batches[i].payload, true
		}
	}
	return nil, false
}

// Other tells whether a batch is held that came otherwise than over a connection,
// and is another one than the payload.
func (w *window) Other(seq, conn uint64, payload []byte) bool {
	if !w.has[seq] {
		return false
	}
	for i := range w.batches {
		if b := &w.batches[i]; b.seq == seq {
			return b.conn != conn && !bytes.Equal(b.payload, payload)
		}
	}
	return false
}

// Last returns the highest number that is held.
func (w *window) Last() uint64 {
	last := uint64(0)
	for i := range w.batches {
		last = max(last, w.batches[i].seq)
	}
	return last
}

// DropBefore drops the batches that came over a connection before the given
// one, and replayed ones.
func (w *window) DropBefore(conn uint64) {
	kept := w.batches[:0]
	for _, b := range w.batches {
		if b.conn >= conn {
			kept = append(kept, b)
			continue
		}
		delete(w.has, b.seq)
		w.bytes -= len(b.payload)
	}
	clear(w.batches[len(kept):])
	w.batches = kept
	heap.Init(&w.batches)
}

// heldBatches is a heap by number.
type heldBatches []heldBatch

func (h heldBatches) Len() int           { return len(h) }
func (h heldBatches) Less(i, j int) bool { return h[i].seq < h[j].seq }
func (h heldBatches) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *heldBatches) Push(x any)        { *h = append(*h, x.(heldBatch)) }
func (h *heldBatches) Pop() any {
	old := *h
	b := old[len(old)-1]
	old[len(old)-1] = heldBatch{}
	*h = old[:len(old)-1]
	return b
}
