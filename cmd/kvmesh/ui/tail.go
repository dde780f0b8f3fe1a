package ui

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// tailTimeout bounds each write to a client that follows a source, and tailQuiet
// is after how long a client that got nothing gets a comment, so that both sides
// know of each other.
const (
	tailTimeout = 30 * time.Second
	tailQuiet   = 15 * time.Second
)

// recordView is a record of the log for people.
type recordView struct {
	LogSeq      uint64    `json:"log_seq"`
	Time        time.Time `json:"time"` // when it was stored
	Size        int       `json:"size"` // bytes
	Incarnation uint64    `json:"incarnation"`
	First       *uint64   `json:"first"`
	Last        *uint64   `json:"last"`
	Ops         []opView  `json:"ops"`
	Error       string    `json:"error,omitempty"`
}

// opView is an operation for people: what it is, how many blocks it is about, and
// what else there is to say.
type opView struct {
	Op     string `json:"op"`
	Tier   string `json:"tier,omitempty"`
	Owner  string `json:"owner,omitempty"`
	Blocks int    `json:"blocks"`
	Base   uint32 `json:"base,omitempty"` // position of the first block in its prompt
	Text   string `json:"text,omitempty"`
}

// viewRecord decodes a record.
func viewRecord(d *event.Decoder, data []byte) recordView {
	v := recordView{Size: len(data), Ops: []opView{}}
	if err := d.Reset(data); err != nil {
		v.Error = err.Error()
		return v
	}
	h := d.Header
	v.Incarnation = h.Incarnation
	if h.Batches {
		v.First, v.Last = &h.First, &h.Last
	}
	for d.Next() {
		v.Ops = append(v.Ops, viewOp(&d.Op))
	}
	if err := d.Err(); err != nil {
		v.Error = err.Error()
	}
	return v
}

func viewOp(op *event.Op) opView {
	v := opView{Owner: op.Owner}
	tiered := func(name string, blocks int) {
		v.Op, v.Tier, v.Blocks = name, op.Tier.String(), blocks
	}
	switch op.Kind {
	case event.OpStored:
		tiered("stored", len(op.Locals))
		v.Base = op.Base
	case event.OpRemoved:
		tiered("removed", len(op.Seqs))
	case event.OpCleared:
		v.Op, v.Text = "cleared", fmt.Sprintf("tiers %04b", op.Tiers)
	case event.OpReset:
		v.Op, v.Text = "reset", op.Reason
	case event.OpGap:
		v.Op, v.Text = "gap", fmt.Sprintf("batches %d to %d: %s", op.From, op.To, op.Reason)
	case event.OpDigest:
		v.Op = "digest"
		for t, d := range op.Digests {
			v.Blocks += int(d.Count)
			if d.Count > 0 {
				v.Text += fmt.Sprintf("%s %d ", event.Tier(t), d.Count)
			}
		}
	case event.OpCheckpoint:
		tiered("checkpoint", 0)
		for i := range op.Runs {
			v.Blocks += len(op.Runs[i].Locals)
		}
		v.Text = fmt.Sprintf("chunk %d of %d", op.Chunk+1, op.Chunks)
	case event.OpRetired:
		v.Op = "retired"
	case event.OpCopies:
		tiered("copies", len(op.Counts))
	case event.OpParked:
		tiered("parked", len(op.Locals))
	case event.OpKnown:
		v.Op, v.Blocks = "known", len(op.Locals)
	case event.OpGroup:
		v.Op, v.Text = "group", fmt.Sprintf("main: %v", op.Main)
	case event.OpGaps:
		v.Op, v.Text = "gaps", fmt.Sprintf("%d gaps, %d batches", op.From, op.To)
	case event.OpPublisher:
		v.Op, v.Text = "publisher", fmt.Sprintf("%x", op.Publisher)
	case event.OpHome:
		v.Op, v.Text = "home", fmt.Sprintf("rank %d", op.Home)
	default:
		v.Op = "kind " + strconv.Itoa(int(op.Kind))
	}
	return v
}

// sourceOf reads which source a request is about.
func sourceOf(r *http.Request) (event.Source, error) {
	q := r.URL.Query()
	s := event.Source{Model: q.Get("model"), Group: q.Get("group"), Instance: q.Get("instance")}
	rank, err := strconv.ParseUint(q.Get("rank"), 10, 32)
	if err != nil {
		return s, errors.New("rank: want a number")
	}
	s.Rank = uint32(rank)
	if s.Model == "" || s.Group == "" || s.Instance == "" {
		return s, errors.New("model, group and instance are needed")
	}
	return s, nil
}

// serveTail sends the records of one source as server-sent events: the last one
// and those that come, until the client goes or the server stops.
func (u *UI) serveTail(w http.ResponseWriter, r *http.Request) {
	source, err := sourceOf(r)
	if err != nil {
		fail(w, http.StatusBadRequest, "bad_request", err.Error())
		return
	}
	if u.tails.Add(1) > int64(u.cfg.Tails) {
		u.tails.Add(-1)
		fail(w, http.StatusServiceUnavailable, "busy", fmt.Sprintf("%d sources are followed already", u.cfg.Tails))
		return
	}
	defer u.tails.Add(-1)
	consumer, err := u.js.OrderedConsumer(r.Context(), u.cfg.Log.StreamOf(source), jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{u.cfg.Log.Subject(source)},
		DeliverPolicy:  jetstream.DeliverLastPerSubjectPolicy,
	})
	if err != nil {
		fail(w, http.StatusServiceUnavailable, "unavailable", "the log can't be followed: "+err.Error())
		return
	}
	messages, err := consumer.Messages()
	if err != nil {
		fail(w, http.StatusServiceUnavailable, "unavailable", "the log can't be followed: "+err.Error())
		return
	}
	defer messages.Stop()
	come := make(chan jetstream.Msg)
	go func() {
		defer close(come)
		for {
			m, err := messages.Next()
			if err != nil {
				return
			}
			select {
			case come <- m:
			case <-r.Context().Done():
				return
			case <-u.ended.Done():
				return
			}
		}
	}()
	u.follow(w, r, come)
	messages.Stop()
	for range come { // its goroutine ends
	}
}

// follow writes records as they come.
func (u *UI) follow(w http.ResponseWriter, r *http.Request, come <-chan jetstream.Msg) {
	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	send := func(text string) bool {
		rc.SetWriteDeadline(time.Now().Add(tailTimeout)) // the server's own is for whole replies
		if _, err := w.Write([]byte(text)); err != nil {
			return false
		}
		return rc.Flush() == nil
	}
	if !send(": following\n\n") {
		return
	}
	quiet := time.NewTicker(tailQuiet)
	defer quiet.Stop()
	var d event.Decoder
	for {
		select {
		case m, ok := <-come:
			if !ok {
				return
			}
			v := viewRecord(&d, m.Data())
			if meta, err := m.Metadata(); err == nil {
				v.LogSeq, v.Time = meta.Sequence.Stream, meta.Timestamp
			}
			data, err := json.Marshal(v)
			if err != nil || !send("data: "+string(data)+"\n\n") {
				return
			}
		case <-quiet.C:
			if !send(": quiet\n\n") {
				return
			}
		case <-r.Context().Done():
			return
		case <-u.ended.Done():
			return
		}
	}
}
