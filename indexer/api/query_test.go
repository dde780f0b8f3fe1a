package api_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

const (
	typeJSON    = "application/json"
	typeMsgpack = "application/msgpack"
	typeOctets  = "application/octet-stream"
)

func octets[T uint32 | uint64](values []T) []byte {
	b, err := binary.Append([]byte{}, binary.LittleEndian, values)
	if err != nil {
		panic(err)
	}
	return b
}

// pack encodes as MessagePack with an encoder that is not ours.
func pack(t *testing.T, v any) []byte {
	t.Helper()
	b, err := msgpack.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// ask is one way to ask for a prompt.
type ask struct {
	name, path, contentType string
	body                    []byte
	overNATS                bool
}

// asks returns all ways to ask for the tokens, with further fields.
func asks(t *testing.T, tokens []uint32, more map[string]any) []ask {
	t.Helper()
	tokens = append([]uint32{}, tokens...) // not null
	mine := append([]uint64{}, locals(tokens)...)
	scope := map[string]any{"model_name": partition.Model, "routing_group": partition.Group}
	params := url.Values{"model_name": {partition.Model}}
	for k, v := range more {
		scope[k] = v
		params.Set(k, fmt.Sprint(v))
	}
	with := func(name string, v any) map[string]any {
		out := maps.Clone(scope)
		out[name] = v
		return out
	}
	signed, texts, mixed := []int64{}, []string{}, []any{}
	for i, h := range mine {
		signed = append(signed, int64(h))
		texts = append(texts, strconv.FormatUint(h, 10))
		mixed = append(mixed, []any{h, int64(h), strconv.FormatInt(int64(h), 10)}[i%3])
	}
	asJSON := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	const query, byHash = "/query", "/query_by_hash"
	out := []ask{
		{"json", query, typeJSON, asJSON(with("token_ids", tokens)), false},
		{"json of curl", query, "application/x-www-form-urlencoded", asJSON(with("token_ids", tokens)), false},
		{"json of nobody", query, "", asJSON(with("token_ids", tokens)), false},
		{"json with charset", query, "Application/JSON; charset=utf-8", asJSON(with("token_ids", tokens)), false},
		{"msgpack", query, typeMsgpack, pack(t, with("token_ids", tokens)), false},
		{"msgpack binary", query, "application/x-msgpack", pack(t, with("token_ids", octets(tokens))), false},
		{"octets", query + "?" + params.Encode(), typeOctets, octets(tokens), false},
		{"unsigned", byHash, typeJSON, asJSON(with("block_hashes", mine)), false},
		{"signed", byHash, typeJSON, asJSON(with("block_hashes", signed)), false},
		{"texts", byHash, typeJSON, asJSON(with("block_hashes", texts)), false},
		{"mixed", byHash, typeJSON, asJSON(with("block_hashes", mixed)), false},
		{"msgpack hashes", byHash, typeMsgpack, pack(t, with("block_hashes", mine)), false},
		{"msgpack signed", byHash, typeMsgpack, pack(t, with("block_hashes", signed)), false},
		{"msgpack mixed", byHash, typeMsgpack, pack(t, with("block_hashes", mixed)), false},
		{"msgpack binary hashes", byHash, typeMsgpack, pack(t, with("block_hashes", octets(mine))), false},
		{"octets of hashes", byHash + "?" + params.Encode(), typeOctets, octets(mine), false},
		{"nats json", "kvmesh.query.", typeJSON, asJSON(with("token_ids", tokens)), true},
		{"nats msgpack", "kvmesh.query.", typeMsgpack, pack(t, with("token_ids", tokens)), true},
		{"nats hashes", "kvmesh.query_by_hash.", "", asJSON(with("block_hashes", mine)), true},
	}
	return out
}

// asked returns the reply to an ask.
func (w *world) asked(a ask) reply {
	w.t.Helper()
	if !a.overNATS {
		return w.do("POST", a.path, a.contentType, a.body)
	}
	m := nats.NewMsg(a.path + event.Escape(partition.Model) + "." + event.Escape(partition.Group))
	m.Data = a.body
	if a.contentType != "" {
		m.Header.Set("Content-Type", a.contentType)
	}
	r, err := w.nc.RequestMsg(m, patience)
	if err != nil {
		w.t.Fatal(err)
	}
	status := http.StatusOK
	if code := r.Header.Get("Nats-Service-Error-Code"); code != "" {
		if status, err = strconv.Atoi(code); err != nil || r.Header.Get("Nats-Service-Error") == "" {
			w.t.Fatalf("error headers %v", r.Header)
		}
	}
	return reply{status: status, header: http.Header(r.Header), body: r.Data}
}

// fleet registers workers of several ranks, and has them store and remove parts of
// prompts in all tiers at random.
func (w *world) fleet(rng *rand.Rand, prompts [][]uint32, operations int) {
	w.t.Helper()
	var sources []event.Source
	for i := range 12 {
		sources = append(sources, at(fmt.Sprintf("w%d", i/2), uint32(i%2*7)))
		w.register(sources[i])
	}
	for range operations {
		s := sources[rng.IntN(len(sources))]
		l := locals(prompts[rng.IntN(len(prompts))])
		from := rng.IntN(len(l))
		end := from + 1 + rng.IntN(len(l)-from)
		tier := event.Tier(rng.IntN(event.Tiers))
		if rng.IntN(3) > 0 {
			w.store(s, tier, l, 0, end)
		} else {
			w.remove(s, tier, l, from, end)
		}
	}
}

// TestQueriesInEveryForm asks in every form, over HTTP and NATS, and compares with
// the model.
func TestQueriesInEveryForm(t *testing.T) {
	w := newWorld(t, options{})
	rng := rand.New(rand.NewPCG(1, 1))
	var prompts [][]uint32
	for i := range 6 {
		p := prompt(uint64(i), 12)
		if i%2 == 1 {
			copy(p, prompts[i-1][:5*blockSize])
		}
		prompts = append(prompts, p)
	}
	w.fleet(rng, prompts, 150)
	matched := 0
	for i, p := range append(prompts, prompt(99, 3), prompts[0][:7*blockSize+3], prompts[1][:blockSize-1], nil) {
		want := w.truth[partition].Answer(locals(p))
		matched += len(want)
		for _, a := range asks(t, p, map[string]any{"min_log_seq": w.lastSeq}) {
			var got answer
			w.want(w.asked(a), http.StatusOK, &got)
			if rows := w.rows(&got); !reflect.DeepEqual(rows, want) || got.LogSeq != w.lastSeq {
				t.Errorf("prompt %d as %s: %v at %d, want %v at %d", i, a.name, rows, got.LogSeq, want, w.lastSeq)
			}
		}
	}
	if matched < 20 {
		t.Fatalf("%d matches: the test tests nothing", matched)
	}
}

// TestNamespaces: a prompt is another one under an adapter or a salt, and in
// another partition.
func TestNamespaces(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 4)
	other := event.Source{Model: partition.Model, Group: "batch", Instance: "w1"}
	w.register(at("w0", 0))
	w.register(other)
	spaces := [][2]string{{"", ""}, {"adapter", ""}, {"", "tenant é\n"}, {"adapter", "tenant é\n"}}
	of := func(s [2]string) []uint64 {
		return hash.AppendLocals(nil, tokens, blockSize, 0, hash.SeedOf(s[0], s[1]))
	}
	for i, s := range spaces {
		w.store(at("w0", 0), event.Device, of(s), 0, i+1)
	}
	w.store(other, event.Device, of(spaces[0]), 0, 4)
	for i, s := range spaces {
		body := map[string]any{"model_name": partition.Model, "token_ids": tokens, "min_log_seq": w.lastSeq}
		params := url.Values{"model_name": {partition.Model}, "min_log_seq": {strconv.FormatUint(w.lastSeq, 10)}}
		for name, v := range map[string]string{"lora_name": s[0], "cache_salt": s[1]} {
			if v != "" || i == 0 { // an empty name is none
				body[name] = v
				params.Set(name, v)
			}
		}
		for _, r := range []reply{w.post("/query", body, 200, nil), w.do("POST", "/query", typeMsgpack, pack(t, body)), w.do("POST", "/query?"+params.Encode(), typeOctets, octets(tokens))} {
			var got answer
			w.want(r, 200, &got)
			if n := got.Instances["w0"].GPU; n != (i+1)*blockSize {
				t.Errorf("namespace %q: %d tokens, want %d", s, n, (i+1)*blockSize)
			}
		}
	}
	var got answer
	w.post("/query", map[string]any{"model": partition.Model, "routing_group": "batch", "token_ids": tokens}, 200, &got)
	if len(got.Instances) != 1 || got.Instances["w1"].GPU != 4*blockSize {
		t.Errorf("in the other group: %+v", got)
	}
}

// TestTop asks for the best instances only.
func TestTop(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 8)
	l := locals(tokens)
	// From the best: all of it on the device, all of it mostly in memory twice,
	// less of it, and least, in two ranks.
	for _, h := range []struct {
		s    event.Source
		ends [event.Tiers]int
	}{
		{at("d", 0), [event.Tiers]int{8}}, {at("b", 0), [event.Tiers]int{2, 8}}, {at("a", 0), [event.Tiers]int{2, 7, 8}},
		{at("e", 0), [event.Tiers]int{5}}, {at("c", 0), [event.Tiers]int{1}}, {at("c", 1), [event.Tiers]int{3}},
	} {
		w.register(h.s)
		from := 0
		for tier, end := range h.ends {
			if end > from {
				w.store(h.s, event.Tier(tier), l, from, end)
				from = end
			}
		}
	}
	want := w.truth[partition].Answer(l)
	order := []string{"d", "b", "a", "e", "c"}
	for top := range 8 {
		keep := order
		if top > 0 {
			keep = order[:min(top, len(order))]
		}
		for _, a := range asks(t, tokens, map[string]any{"top": top, "min_log_seq": w.lastSeq}) {
			var got answer
			w.want(w.asked(a), 200, &got)
			rows := w.rows(&got)
			if names := slices.Sorted(maps.Keys(rows)); !slices.Equal(names, slices.Sorted(slices.Values(keep))) {
				t.Fatalf("top %d as %s: %v, want %v", top, a.name, names, keep)
			}
			for name, row := range rows {
				if !reflect.DeepEqual(row, want[name]) {
					t.Errorf("top %d as %s: %s has %v, want %v", top, a.name, name, row, want[name])
				}
			}
		}
	}
}

// TestBatches asks for several prompts in one call.
func TestBatches(t *testing.T) {
	w := newWorld(t, options{})
	rng := rand.New(rand.NewPCG(5, 6))
	prompts := [][]uint32{prompt(1, 9), prompt(2, 9), prompt(3, 9)}
	w.fleet(rng, prompts, 60)
	entries := []map[string]any{
		{"token_ids": prompts[0]},
		{"token_ids": prompts[1], "top": 1},
		{"token_ids": prompts[2], "lora_name": "unheard of"},
		{"token_ids": prompts[0], "model_name": "nobody's"},
		{"token_ids": "x"},
		{},
		{"token_ids": prompts[1], "queries": []int{1}, "unknown": map[string]any{"a": 1}},
		{"token_ids": prompts[2], "min_log_seq": w.lastSeq},
		{"token_ids": []uint32{}},
	}
	codes := []string{"", "", "", "unknown_partition", "bad_request", "bad_request", "", "", ""}
	body := map[string]any{"model_name": partition.Model, "min_log_seq": w.lastSeq, "queries": entries}
	data, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]reply{
		"json": w.do("POST", "/query", typeJSON, data), "msgpack": w.do("POST", "/query", typeMsgpack, pack(t, body)),
		"nats": w.asked(ask{path: "kvmesh.query.", body: data, overNATS: true}),
	} {
		var got struct{ Answers []answer }
		w.want(r, 200, &got)
		if len(got.Answers) != len(entries) {
			t.Fatalf("%s: %d answers to %d prompts", name, len(got.Answers), len(entries))
		}
		for i, a := range got.Answers {
			code := codes[i]
			if name == "nats" && i == 3 {
				code = "" // the subject says which model
			}
			if a.Code != code || (a.Error == "") != (code == "") {
				t.Errorf("%s: prompt %d: %+v, want code %q", name, i, a, code)
			}
			if code != "" {
				continue
			}
			tokens, _ := entries[i]["token_ids"].([]uint32)
			want := w.truth[partition].Answer(locals(tokens))
			if i == 2 {
				want = map[string]model.Row{}
			}
			rows := w.rows(&a)
			if i == 1 && len(want) > 1 {
				for name := range want {
					if _, ok := rows[name]; !ok {
						delete(want, name)
					}
				}
				if len(rows) != 1 {
					t.Errorf("%s: top 1 of prompt %d: %v", name, i, rows)
				}
			}
			if !reflect.DeepEqual(rows, want) {
				t.Errorf("%s: prompt %d: %v, want %v", name, i, rows, want)
			}
		}
	}
	var got struct{ Answers []answer }
	many := make([]map[string]any, 1024)
	for i := range many {
		many[i] = map[string]any{"block_hashes": locals(prompts[i%3])}
	}
	w.post("/query_by_hash", map[string]any{"model_name": partition.Model, "queries": many}, 200, &got)
	for i := range got.Answers {
		if want := w.truth[partition].Answer(locals(prompts[i%3])); !reflect.DeepEqual(w.rows(&got.Answers[i]), want) {
			t.Fatalf("answer %d of 1,024: %+v, want %v", i, got.Answers[i], want)
		}
	}
	w.refused("1,025 prompts", w.post("/query_by_hash", map[string]any{"model_name": partition.Model, "queries": append(many, many[0])}, 400, nil), 400, "bad_request")
	w.post("/query", map[string]any{"queries": []int{}}, 200, &got)
	if len(got.Answers) != 0 {
		t.Errorf("answers to no prompts: %+v", got)
	}
}

// TestReplyLimit: a reply has an end, and says so for each prompt.
func TestReplyLimit(t *testing.T) {
	w := newWorld(t, options{config: func(c *api.Config) { c.MaxReply = 1000 }})
	tokens := prompt(1, 1)
	w.register(at("w0", 0))
	w.store(at("w0", 0), event.Device, locals(tokens), 0, 1)
	var got struct{ Answers []answer }
	many := make([]map[string]any, 50)
	for i := range many {
		many[i] = map[string]any{"token_ids": tokens, "min_log_seq": w.lastSeq}
	}
	w.post("/query", map[string]any{"model_name": partition.Model, "queries": many}, 200, &got)
	answered := 0
	for i, a := range got.Answers {
		if a.Code == "" && a.Instances["w0"].GPU == blockSize && answered == i {
			answered++
		} else if a.Code != "too_large" || a.Error == "" {
			t.Errorf("answer %d: %+v", i, a)
		}
	}
	if len(got.Answers) != 50 || answered < 3 || answered > 15 {
		t.Errorf("%d of %d answered within 1,000 bytes", answered, len(got.Answers))
	}
}

// TestLargeReplyOverNATS: what NATS can't carry is refused, not lost.
func TestLargeReplyOverNATS(t *testing.T) {
	w := newWorld(t, options{room: 64 << 10})
	w.register(at("w0", 0))
	w.store(at("w0", 0), event.Device, locals(prompt(1, 1)), 0, 1)
	w.until("applied", func() bool { return w.index.Position().LogSeq >= w.lastSeq }) // else replies are short
	entry := `{"block_hashes":[` + strconv.FormatUint(locals(prompt(1, 1))[0], 10) + `]},`
	ask := ask{path: "kvmesh.query_by_hash.", overNATS: true, body: []byte(`{"queries":[` + strings.Repeat(entry, 1000) + `{}]}`)}
	w.refused("a batch", withType(w.asked(ask)), 413, "too_large")
	ask.body = []byte(`{"queries":[` + strings.Repeat(entry, 100) + `{}]}`)
	w.want(w.asked(ask), 200, nil)
}

// TestMinLogSeq waits for the log, and not for ever.
func TestMinLogSeq(t *testing.T) {
	w := newWorld(t, options{config: func(c *api.Config) { c.WaitTimeout = 50 * time.Millisecond }})
	patient := newWorld(t, options{})
	tokens := prompt(1, 2)
	for _, w := range []*world{w, patient} {
		w.register(at("w0", 0))
		w.store(at("w0", 0), event.Device, locals(tokens), 0, 1)
	}
	for _, a := range asks(t, tokens, map[string]any{"min_log_seq": w.lastSeq + 1}) {
		w.refused(a.name, withType(w.asked(a)), 503, "behind")
	}
	var batch struct{ Answers []answer }
	w.post("/query", map[string]any{"model_name": partition.Model, "queries": []map[string]any{{"token_ids": tokens, "min_log_seq": w.lastSeq + 1}, {"token_ids": tokens, "min_log_seq": w.lastSeq}}}, 200, &batch)
	if batch.Answers[0].Code != "behind" || batch.Answers[1].Instances["w0"].GPU != blockSize {
		t.Errorf("batch of one that is behind and one that is not: %+v", batch)
	}
	// Those who wait are answered by what comes.
	var tasks sync.WaitGroup
	for _, a := range asks(t, tokens, map[string]any{"min_log_seq": patient.lastSeq + 1}) {
		tasks.Go(func() {
			var got answer
			if r := patient.asked(a); r.status != 200 || json.Unmarshal(r.body, &got) != nil || got.Instances["w0"].GPU != 2*blockSize {
				t.Errorf("%s, waiting: %v", a.name, r)
			}
		})
	}
	patient.store(at("w0", 0), event.Device, locals(tokens), 1, 2)
	tasks.Wait()
}

// TestManyWaitOverNATS: more requests wait than are answered at a time, and those
// that don't wait come through in the end.
func TestManyWaitOverNATS(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 1)
	w.register(at("w0", 0))
	w.store(at("w0", 0), event.Device, locals(tokens), 0, 1)
	data, err := json.Marshal(map[string]any{"token_ids": tokens, "min_log_seq": w.lastSeq + 1})
	if err != nil {
		t.Fatal(err)
	}
	var tasks sync.WaitGroup
	for range 600 {
		tasks.Go(func() {
			var got answer
			if r := w.asked(ask{path: "kvmesh.query.", body: data, overNATS: true}); r.status != 200 || json.Unmarshal(r.body, &got) != nil || got.Instances["w0"].GPU != blockSize {
				t.Errorf("%v", r)
			}
		})
	}
	w.store(at("w0", 0), event.Host, locals(tokens), 0, 1)
	tasks.Wait()
}

// withType gives a reply over NATS the type that one over HTTP has.
func withType(r reply) reply {
	r.header = r.header.Clone()
	r.header.Set("Content-Type", typeJSON)
	return r
}

// TestAnswersUnderWrites asks from several sides while the log grows: each answer
// is the model's at the log sequence that it names.
func TestAnswersUnderWrites(t *testing.T) {
	w := newWorld(t, options{})
	tokens := prompt(1, 30)
	l := locals(tokens)
	sources := []event.Source{at("w0", 0), at("w0", 1), at("w1", 0)}
	for _, s := range sources {
		w.register(s)
	}
	var mu sync.Mutex
	w.store(sources[0], event.Device, l, 0, 30)
	first := w.lastSeq
	truth := map[uint64]map[string]model.Row{first: w.truth[partition].Answer(l)}
	stop := make(chan struct{})
	type seen struct {
		seq  uint64
		rows map[string]model.Row
	}
	var asked []seen
	var tasks sync.WaitGroup
	all := asks(t, tokens, map[string]any{"min_log_seq": first})
	for i := range 4 {
		tasks.Go(func() {
			for n := i; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				var got answer
				if r := w.asked(all[n%len(all)]); r.status != 200 || json.Unmarshal(r.body, &got) != nil {
					t.Errorf("%s: %v", all[n%len(all)].name, r)
					return
				}
				rows := w.rows(&got)
				mu.Lock()
				asked = append(asked, seen{got.LogSeq, rows})
				mu.Unlock()
			}
		})
	}
	rng := rand.New(rand.NewPCG(8, 9))
	for range 400 {
		s, tier := sources[rng.IntN(3)], event.Tier(rng.IntN(event.Tiers))
		from := rng.IntN(30)
		end := from + 1 + rng.IntN(30-from)
		if rng.IntN(2) == 0 {
			w.store(s, tier, l, 0, end)
		} else {
			w.remove(s, tier, l, from, end)
		}
		truth[w.lastSeq] = w.truth[partition].Answer(l)
	}
	close(stop)
	tasks.Wait()
	if len(asked) < 50 {
		t.Logf("only %d answers", len(asked))
	}
	for _, a := range asked {
		if want, ok := truth[a.seq]; !ok || !reflect.DeepEqual(a.rows, want) {
			t.Fatalf("at %d: %v, want %v", a.seq, a.rows, want)
		}
	}
}
