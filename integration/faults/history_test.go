package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/model"
)

// history is all that was ever in the log, stream by stream.
type history struct {
	log    event.Log
	shards []*shard
}

// shard is all that was ever in one stream of the log, whatever was purged since.
type shard struct {
	stream   string
	mu       sync.Mutex
	messages []message
	seq      uint64
	missed   uint64            // records that were purged before they were read
	purged   []uint64          // up to where the log was purged, each time
	anew     map[string]uint64 // the purge after which a source was written anew, by subject
}

type message struct {
	seq     uint64
	subject string
	data    []byte
}

// record writes the history until stop is called.
func record(t *testing.T, url string, log event.Log) (*history, func()) {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond), nats.RetryOnFailedConnect(true), nats.ReconnectBufSize(-1))
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	h := &history{log: log}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range log.Shards {
		s := &shard{stream: log.Name(i)}
		h.shards = append(h.shards, s)
		wg.Go(func() {
			for ctx.Err() == nil {
				s.read(ctx, js)
				select {
				case <-time.After(20 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		})
	}
	return h, sync.OnceFunc(func() { cancel(); wg.Wait(); nc.Close() })
}

func (h *shard) read(ctx context.Context, js jetstream.JetStream) error {
	opening, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	consumer, err := js.CreateConsumer(opening, h.stream, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: h.seq + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: 5 * time.Second,
	})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(jetstream.PullHeartbeat(500*time.Millisecond), jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		return err
	}
	defer messages.Stop()
	stop := context.AfterFunc(ctx, messages.Stop)
	defer stop()
	for delivered := uint64(1); ; delivered++ {
		msg, err := messages.Next()
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		if meta.Sequence.Consumer != delivered {
			return errors.New("a message is missing")
		}
		h.mu.Lock()
		h.missed += meta.Sequence.Stream - h.seq - 1
		h.seq = meta.Sequence.Stream
		h.messages = append(h.messages, message{h.seq, msg.Subject(), bytes.Clone(msg.Data())})
		h.mu.Unlock()
	}
}

// reached returns the log sequence up to which the stream was read.
func (h *shard) reached() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.seq
}

// answer is an answer that says of itself for which position it is true.
type answer struct {
	of     string
	prompt int
	at     event.Position
	rows   map[string]model.Row
}

// asker asks an indexer, again and again.
type asker struct {
	name    string
	url     string
	prompts []model.Prompt
	client  *http.Client

	mu      sync.Mutex
	answers []answer
	refused int
}

func (a *asker) run(ctx context.Context) {
	ticker := time.NewTicker(15 * time.Millisecond)
	defer ticker.Stop()
	for i := 0; ctx.Err() == nil; i++ {
		prompt := i % len(a.prompts)
		got, err := a.ask(ctx, prompt)
		a.mu.Lock()
		if err == nil {
			a.answers = append(a.answers, got)
		} else {
			a.refused++
		}
		a.mu.Unlock()
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

func (a *asker) ask(ctx context.Context, prompt int) (answer, error) {
	q := a.prompts[prompt]
	body, err := json.Marshal(map[string]any{"model_name": "m", "token_ids": q.Tokens, "lora_name": q.LoRA, "cache_salt": q.Salt})
	if err != nil {
		return answer{}, err
	}
	var reply struct {
		event.PositionJSON
		Instances map[string]struct {
			Longest int            `json:"longest_matched"`
			GPU     int            `json:"gpu"`
			CPU     int            `json:"cpu"`
			Disk    int            `json:"disk"`
			DP      map[uint32]int `json:"dp"`
		} `json:"instances"`
	}
	if err := call(ctx, a.client, http.MethodPost, a.url+"/query", body, &reply); err != nil {
		return answer{}, err
	}
	out := answer{of: a.name, prompt: prompt, at: reply.Position(), rows: map[string]model.Row{}}
	for name, r := range reply.Instances {
		out.rows[name] = model.Row{GPU: r.GPU, CPU: r.CPU, Disk: r.Disk, Longest: r.Longest, DP: r.DP}
	}
	return out, nil
}

// call makes a request and reads the reply. A status other than 2xx is an error.
func call(ctx context.Context, client *http.Client, method, url string, body []byte, into any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode/100 != 2 {
		return errors.New(string(data))
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(data, into)
}

// judge compares every answer with what the history says at the position that the
// answer claims.
func (h *history) judge(t *testing.T, prompts []model.Prompt, answers []answer) {
	t.Helper()
	var states []map[uint64]model.State // of each shard, by log sequence
	seqs := 0
	for i, s := range h.shards {
		claimed := map[uint64]bool{}
		for _, a := range answers {
			claimed[a.at.Seq(i)] = true
		}
		states = append(states, s.states(t, h.reader(), claimed))
		seqs += len(claimed)
	}
	wrong := 0
	for _, a := range answers {
		state := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
		for i := range h.shards { // each source is in one
			maps.Copy(state.Held, states[i][a.at.Seq(i)].Held)
		}
		if want := state.Answer(prompts[a.prompt].Locals); !reflect.DeepEqual(a.rows, want) {
			if wrong++; wrong < 5 {
				t.Errorf("%s: prompt %d at %v: answer %v, want %v", a.of, a.prompt, a.at, a.rows, want)
			}
		}
	}
	t.Logf("%d answers at %d log sequences of %d streams, %d wrong", len(answers), seqs, len(h.shards), wrong)
}

// reader returns a reader that has read nothing.
func (h *history) reader() *feed.Reader {
	r := feed.NewReader()
	r.Log = h.log
	return r
}

// states returns what the sources of a shard held at the claimed log sequences, and
// checks the rules of all records.
func (h *shard) states(t *testing.T, log *feed.Reader, claimed map[uint64]bool) map[uint64]model.State {
	t.Helper()
	if h.missed > 0 {
		t.Errorf("%s: %d records were purged before the test had read them: it can't say much", h.stream, h.missed)
	}
	out, next := map[uint64]model.State{}, 0
	apply := func(to uint64) {
		for ; next < len(h.messages) && h.messages[next].seq <= to; next++ {
			m := h.messages[next]
			if err := log.Apply(m.seq, m.subject, m.data); err != nil && !h.excused(m, err) {
				t.Errorf("the log breaks its rules: %v", err)
			}
		}
	}
	for _, seq := range slices.Sorted(maps.Keys(claimed)) {
		apply(seq)
		out[seq] = stateOf(log)
	}
	apply(math.MaxUint64)
	return out
}

// excused tells whether a record may break a rule: in a log that was purged a
// bridge writes the state anew, once, with all that it had not written before.
func (h *shard) excused(m message, err error) bool {
	purge := uint64(0)
	for _, p := range h.purged {
		if p < m.seq {
			purge = p
		}
	}
	if purge == 0 || h.anew[m.subject] == purge || !strings.Contains(err.Error(), "a checkpoint of") {
		return false
	}
	if h.anew == nil {
		h.anew = map[string]uint64{}
	}
	h.anew[m.subject] = purge
	return true
}

// stateOf returns what a reader of the log holds.
func stateOf(log *feed.Reader) model.State {
	st := model.State{BlockSize: blockSize, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	for _, s := range log.Sources() {
		held := map[model.Tier]map[uint64]bool{}
		for t, seqs := range s.Resident() {
			held[model.Tier(t)] = seqs
		}
		st.Held[model.Rank{Instance: s.Name.Instance, Rank: s.Name.Rank}] = held
	}
	return st
}

// losses tells what the history says about losses.
func (h *history) losses() string {
	log := h.reader()
	for _, s := range h.shards {
		s.mu.Lock()
		for _, m := range s.messages {
			log.Apply(m.seq, m.subject, m.data)
		}
		s.mu.Unlock()
	}
	var out strings.Builder
	for _, s := range log.Sources() {
		fmt.Fprintf(&out, "%s: resets %v, gaps %v, %d batches lost before the last checkpoint\n", s.Name.Instance, s.Resets, s.Gaps, s.LostBefore)
	}
	return out.String()
}
