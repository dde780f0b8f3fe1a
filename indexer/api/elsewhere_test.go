package api_test

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// other is a partition that the ones who serve partition don't.
var other = event.Partition{Model: "other", Group: "g"}

func shareOf(p event.Partition) event.Share { return event.Share{{Partition: p}} }

// seen waits until a server has read the log and knows a worker.
func (w *world) seen(s event.Source, seq uint64) {
	w.t.Helper()
	w.until("what was written is read", func() bool {
		_, err := w.index.BlockSize(s.Partition())
		return err == nil && w.index.Position().LogSeq >= seq
	})
}

// TestElsewhere has two indexers serve one partition each: both answer for both,
// in every form, and answers are the model's.
func TestElsewhere(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 0))
	here := newWorld(t, options{share: shareOf(partition)})
	there := here.beside(options{share: shareOf(other)})
	prompts := [][]uint32{prompt(1, 12), prompt(2, 12), prompt(3, 3)}
	here.fleet(rng, prompts, 100)
	s := event.Source{Model: other.Model, Group: other.Group, Instance: "solo \"x\"", Rank: 3}
	here.register(s)
	seq := here.store(s, event.Device, locals(prompts[0]), 0, 5)
	for _, w := range []*world{here, there} {
		w.seen(s, seq)
		w.seen(at("w0", 0), seq)
	}
	for _, tokens := range prompts {
		want := here.truth[partition].Answer(locals(tokens))
		for _, w := range []*world{here, there} {
			for _, a := range asks(t, tokens, map[string]any{"min_log_seq": seq}) {
				var got answer
				if r := w.asked(a); r.status != http.StatusOK || json.Unmarshal(r.body, &got) != nil {
					t.Fatalf("%s, %v: %v", a.name, w.index.Share().Strings(), r)
				}
				if rows := w.rows(&got); !reflect.DeepEqual(rows, want) || got.LogSeq < seq {
					t.Errorf("%s, %v: %v at %d, want %v at %d or later", a.name, w.index.Share().Strings(), rows, got.LogSeq, want, seq)
				}
			}
		}
	}
	// Prompts of several partitions in one call, and one of nobody's.
	var batch struct{ Answers []answer }
	for _, w := range []*world{here, there} {
		w.post("/query", map[string]any{"token_ids": nil, "queries": []map[string]any{
			{"model_name": other.Model, "routing_group": other.Group, "token_ids": prompts[0]},
			{"model_name": partition.Model, "token_ids": prompts[0], "top": 1},
			{"model_name": "nobody's", "token_ids": prompts[0]},
		}}, http.StatusOK, &batch)
		if got, want := w.rows(&batch.Answers[0]), here.truth[other].Answer(locals(prompts[0])); !reflect.DeepEqual(got, want) || len(want) != 1 {
			t.Errorf("%v: %v, want %v", w.index.Share().Strings(), got, want)
		}
		if n := len(batch.Answers[1].Instances); n != 1 {
			t.Errorf("%v: top 1 are %d instances", w.index.Share().Strings(), n)
		}
		if batch.Answers[2].Code != "unknown_partition" {
			t.Errorf("%v: %+v for a partition without workers", w.index.Share().Strings(), batch.Answers[2])
		}
	}
	elsewhereLocal(t, here, there, s)
}

// elsewhereLocal checks what says nothing of what is served elsewhere, and marks
// it.
func elsewhereLocal(t *testing.T, here, there *world, s event.Source) {
	t.Helper()
	var ready struct {
		Ready  bool
		Serves []string
	}
	here.get("/ready", http.StatusOK, &ready)
	if want := []string{partition.String()}; !ready.Ready || !slices.Equal(ready.Serves, want) {
		t.Errorf("/ready says %+v, want %v", ready, want)
	}
	for _, path := range []string{"/ready", "/dump", "/digest", "/workers"} {
		if got := here.get(path, http.StatusOK, nil).header.Get("Kvmesh-Serves"); got != partition.String() {
			t.Errorf("%s: the header says %q", path, got)
		}
	}
	var dump map[string]json.RawMessage
	var digest struct{ Partitions map[string]json.RawMessage }
	here.get("/dump", http.StatusOK, &dump)
	here.get("/digest", http.StatusOK, &digest)
	for _, p := range []map[string]json.RawMessage{dump, digest.Partitions} {
		if _, own := p[partition.String()]; !own || len(p) != 1 {
			t.Errorf("partitions %v, want its own only", p)
		}
	}
	var workers []struct {
		InstanceID string `json:"instance_id"`
		Elsewhere  bool
		Listeners  map[string]struct{ Blocks map[string]int }
	}
	for _, w := range []*world{here, there} {
		workers = nil
		w.get("/workers", http.StatusOK, &workers)
		if len(workers) != 7 {
			t.Errorf("%v: %d workers, want 7", w.index.Share().Strings(), len(workers))
		}
		for _, v := range workers {
			if solo := v.InstanceID == s.Instance; v.Elsewhere != (solo == (w == here)) {
				t.Errorf("%v: worker %q: elsewhere is %v", w.index.Share().Strings(), v.InstanceID, v.Elsewhere)
			} else if solo && w == there && v.Listeners["3"].Blocks["device"] != 5 {
				t.Errorf("worker %q has %v, want 5 blocks", v.InstanceID, v.Listeners)
			}
		}
	}
	if reply, err := here.nc.Request("$SRV.INFO.kvmesh", nil, patience); err != nil {
		t.Error(err)
	} else {
		var info micro.Info
		if err := json.Unmarshal(reply.Data, &info); err != nil {
			t.Fatal(err)
		}
		own, subjects := partition, []string{}
		if info.Metadata["serves"] == other.String() {
			own = other
		} else if info.Metadata["serves"] != own.String() {
			t.Errorf("metadata %v", info.Metadata)
		}
		for _, e := range info.Endpoints {
			subjects = append(subjects, e.Subject)
		}
		if want := "kvmesh.query." + event.Escape(own.Model) + "." + event.Escape(own.Group); len(subjects) != 3 || !slices.Contains(subjects, want) {
			t.Errorf("subjects %v, want three of which one is %s", subjects, want)
		}
	}
}

// A partition that no indexer serves is an error of its own at once, and one that
// is not answered for ends in time. min_log_seq and what is wrong there are passed
// through.
func TestElsewhereFails(t *testing.T) {
	quick := func(c *api.Config) {
		c.ForwardTimeout, c.WaitTimeout = 300*time.Millisecond, 100*time.Millisecond
	}
	w := newWorld(t, options{share: shareOf(other), config: quick})
	w.register(at("w0", 0))
	seq := w.store(at("w0", 0), event.Device, locals(prompt(1, 2)), 0, 2)
	w.seen(at("w0", 0), seq)
	query := func() reply {
		data, _ := json.Marshal(map[string]any{"model_name": partition.Model, "token_ids": prompt(1, 2)})
		return w.do("POST", "/query", typeJSON, data)
	}
	w.refused("nobody serves it", query(), http.StatusServiceUnavailable, "no_indexer")
	alone := w.beside(options{share: shareOf(other), alone: true})
	alone.seen(at("w0", 0), seq)
	alone.refused("nothing is passed on", alone.do("POST", "/query", typeJSON, []byte(`{"model_name":"m/7b","token_ids":[1,2,3,4]}`)), http.StatusServiceUnavailable, "no_indexer")

	subject := "kvmesh.match." + event.Escape(partition.Model) + "." + event.Escape(partition.Group)
	mute, err := w.nc.QueueSubscribe(subject, "kvmesh", func(*nats.Msg) {})
	if err != nil {
		t.Fatal(err)
	}
	w.refused("who serves it is mute", query(), http.StatusGatewayTimeout, "no_answer")
	if err := mute.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	odd, err := w.nc.QueueSubscribe(subject, "kvmesh", func(m *nats.Msg) { m.Respond([]byte{0x93, 1, 2}) })
	if err != nil {
		t.Fatal(err)
	}
	w.refused("who serves it says nonsense", query(), http.StatusServiceUnavailable, "unavailable")
	if err := odd.Unsubscribe(); err != nil {
		t.Fatal(err)
	}

	there := w.beside(options{config: quick}) // serves everything
	there.seen(at("w0", 0), seq)
	var got answer
	w.want(query(), http.StatusOK, &got)
	if want := w.truth[partition].Answer(locals(prompt(1, 2))); !reflect.DeepEqual(w.rows(&got), want) {
		t.Errorf("%+v, want %v", got, want)
	}
	data, _ := json.Marshal(map[string]any{"model_name": partition.Model, "token_ids": prompt(1, 2), "min_log_seq": seq + 1})
	w.refused("a log sequence that does not come", w.do("POST", "/query", typeJSON, data), http.StatusServiceUnavailable, "behind")
	for _, body := range [][]byte{nil, {0x93}, {0x93, 2, 0, 0xc4, 0}, {0x93, 1, 0, 0xc4, 1, 0}, {0x91, 1}} {
		r, err := w.nc.Request(subject, body, patience)
		if err != nil {
			t.Fatal(err)
		}
		if code := r.Header.Get(micro.ErrorCodeHeader); code != "400" {
			t.Errorf("request %x: %q %s", body, code, r.Data)
		}
	}
}

// What asks for a partition that is served elsewhere and is not ready is answered
// when it is.
func TestElsewhereNotReady(t *testing.T) {
	w := newWorld(t, options{share: shareOf(other), config: func(c *api.Config) { c.ForwardTimeout = patience }})
	w.register(at("w0", 0))
	seq := w.store(at("w0", 0), event.Device, locals(prompt(1, 2)), 0, 2)
	w.seen(at("w0", 0), seq)
	there := w.beside(options{share: shareOf(partition), unread: true})
	e := api.NewElsewhere(w.nc, w.index, api.Config{ForwardTimeout: 200 * time.Millisecond})
	if _, err := e.Match(new(indexer.Query), partition, locals(prompt(1, 2))); !errors.Is(err, indexer.ErrNotReady) {
		t.Errorf("who serves it is not ready: %v", err)
	}
	answered := make(chan error)
	var got indexer.Answer
	go func() {
		var err error
		got, err = api.NewElsewhere(w.nc, w.index, api.Config{ForwardTimeout: patience}).Match(new(indexer.Query), partition, locals(prompt(1, 2)))
		answered <- err
	}()
	there.index.Registered(event.Worker{Source: at("w0", 0), Endpoint: "tcp://127.0.0.1:1", BlockSize: blockSize})
	there.index.CatalogRead()
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	if len(got.Holdings) != 1 || *got.Holdings[0].Source != at("w0", 0) || got.Holdings[0].Longest() != 2 || got.BlockSize != blockSize || got.LogSeq < seq {
		t.Errorf("%+v", got)
	}
	// What it serves itself it asks nobody for.
	if _, err := e.Match(new(indexer.Query), other, nil); !errors.Is(err, indexer.ErrUnknownPartition) {
		t.Errorf("its own partition, without workers: %v", err)
	}
}
