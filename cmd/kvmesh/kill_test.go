package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"reflect"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/feed"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// killer is a test that kills kvmesh serve while engines publish.
type killer struct {
	t       *testing.T
	rng     *rand.Rand
	dir     string
	nats    string // address of the embedded server
	args    []string
	prompts []model.Prompt
	engines []*mock.Engine
	traffic []*model.Traffic

	answers []claim
}

// claim is an answer that says of itself for which log sequence it is true.
type claim struct {
	prompt int
	seq    uint64
	rows   map[string]model.Row
	when   string
}

const killBlock = 4 // block size, in tokens

// TestKilledAtAnyPoint kills kvmesh serve, with SIGKILL, at random points while
// engines publish, and starts it again on the same directory: whatever it answers
// before and after, also when the engines are gone, is what a naive reader of the
// log finds at the log sequence that the answer claims. In the end nothing that
// the engines have published is missing.
func TestKilledAtAnyPoint(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	if text, ok := os.LookupEnv("KVMESH_SEED"); ok {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		if t.Failed() {
			t.Logf("repeat with: KVMESH_SEED=%d go test ./cmd/kvmesh -run 'TestKilledAtAnyPoint$'", seed)
		}
	}()
	k := newKiller(t, seed)
	stop := k.publish()
	for round := range 6 {
		p := k.serve()
		k.collect(p, fmt.Sprintf("round %d", round), time.Duration(k.rng.IntN(600))*time.Millisecond)
		p.kill()
	}
	// It is killed before it can have read its log.
	for range 2 {
		p := spawnKvmesh(t, nil, k.args...)
		time.Sleep(time.Duration(k.rng.IntN(150)) * time.Millisecond)
		p.kill()
	}
	p := k.serve()
	stop()
	k.settled(p)
	k.collect(p, "settled", 0)
	p.kill()
	for _, e := range k.engines {
		e.Stop()
	}
	p = k.serve()
	k.collect(p, "engines gone", 0)
	k.same(p)
	k.judge()
	p.stop(t)
	p = k.serve()
	k.same(p)
	p.stop(t)
}

func newKiller(t *testing.T, seed uint64) *killer {
	k := &killer{t: t, rng: rand.New(rand.NewPCG(seed, 0)), dir: t.TempDir(), nats: freeAddr(t)}
	k.prompts = model.Prompts(model.PromptOptions{Seed: seed, BlockSize: killBlock, N: 12, Spaced: 4})
	k.args = []string{"serve", "--data-dir", k.dir, "--http", "127.0.0.1:0", "--nats-listen", k.nats, "--model", "m", "--block-size", strconv.Itoa(killBlock),
		"--engine", "vllm", "--probe-interval", "200ms"}
	for i := range 4 {
		e, err := mock.NewEngine(mock.Options{Rank: uint32(i % 2), BlockSize: killBlock, ReplayEndpoint: "tcp://127.0.0.1:0", Ring: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if err := e.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Stop)
		k.engines = append(k.engines, e)
		k.args = append(k.args, "--worker", fmt.Sprintf("w%d:%d=%s,replay=%s", i/2, i%2, e.Addr(), e.ReplayAddr()))
		k.traffic = append(k.traffic, model.NewTraffic(model.TrafficOptions{Seed: seed + uint64(i), BlockSize: killBlock, Profile: model.VLLM,
			Features: model.Everything &^ model.Bad}, k.prompts))
	}
	return k
}

// publish has all engines publish until stop is called.
func (k *killer) publish() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i, e := range k.engines {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := e.Publish(k.traffic[i].Batch()...); err != nil {
					k.t.Error(err)
					return
				}
				select {
				case <-time.After(4 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		})
	}
	return func() {
		cancel()
		wg.Wait()
	}
}

func (k *killer) serve() *spawned {
	k.t.Helper()
	p := spawnKvmesh(k.t, nil, k.args...)
	p.ready(k.t)
	eventually(k.t, "the workers are registered", func() bool {
		var workers []any
		return json.Unmarshal(mustAsk(k.t, http.MethodGet, p.url+"/workers", nil), &workers) == nil && len(workers) == 2
	})
	return p
}

// collect asks about all prompts, again and again for a while.
func (k *killer) collect(p *spawned, when string, d time.Duration) {
	k.t.Helper()
	for end := time.Now().Add(d); ; {
		for i := range k.prompts {
			k.answers = append(k.answers, k.query(p, i, when))
		}
		if time.Now().After(end) {
			return
		}
	}
}

func (k *killer) query(p *spawned, prompt int, when string) claim {
	k.t.Helper()
	q := k.prompts[prompt]
	data := mustAsk(k.t, http.MethodPost, p.url+"/query", map[string]any{"model_name": "m", "token_ids": q.Tokens, "lora_name": q.LoRA, "cache_salt": q.Salt})
	var reply struct {
		LogSeq    uint64 `json:"log_seq"`
		Instances map[string]struct {
			Longest int            `json:"longest_matched"`
			GPU     int            `json:"gpu"`
			CPU     int            `json:"cpu"`
			Disk    int            `json:"disk"`
			DP      map[uint32]int `json:"dp"`
		} `json:"instances"`
	}
	if err := json.Unmarshal(data, &reply); err != nil {
		k.t.Fatal(err)
	}
	c := claim{prompt: prompt, seq: reply.LogSeq, rows: map[string]model.Row{}, when: when}
	for name, r := range reply.Instances {
		c.rows[name] = model.Row{GPU: r.GPU, CPU: r.CPU, Disk: r.Disk, Longest: r.Longest, DP: r.DP}
	}
	return c
}

// settled waits until the last batch of every engine is in the index.
func (k *killer) settled(p *spawned) {
	k.t.Helper()
	eventually(k.t, "all that was published is in the index", func() bool {
		var workers []struct {
			Instance  string `json:"instance_id"`
			Listeners map[string]struct {
				Applied *uint64 `json:"applied_engine_seq"`
			}
		}
		if err := json.Unmarshal(mustAsk(k.t, http.MethodGet, p.url+"/workers", nil), &workers); err != nil {
			k.t.Fatal(err)
		}
		applied := map[string]uint64{}
		for _, w := range workers {
			for rank, l := range w.Listeners {
				if l.Applied != nil {
					applied[w.Instance+":"+rank] = *l.Applied + 1
				}
			}
		}
		for i, e := range k.engines {
			if applied[fmt.Sprintf("w%d:%d", i/2, i%2)] != e.Next() {
				return false
			}
		}
		return true
	})
	k.same(p)
}

// same compares what the index holds with what the engines have said.
func (k *killer) same(p *spawned) {
	k.t.Helper()
	have := digestsOf(k.t, p.url)
	for i, tr := range k.traffic {
		want := event.Digests{}
		for tier, seqs := range tr.Truth().Resident() {
			for seq := range seqs {
				want[tier].Add(1, event.Mix(seq, event.Salt(event.Tier(tier))))
			}
		}
		name := fmt.Sprintf("w%d:%d", i/2, i%2)
		if have[name] != want {
			k.t.Errorf("%s: digests %v, want %v", name, have[name], want)
		}
	}
}

// judge reads the log, record by record, and compares every answer with what it
// says at the sequence that the answer claims.
func (k *killer) judge() {
	nc, err := nats.Connect("nats://" + k.nats)
	if err != nil {
		k.t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		k.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream, err := js.Stream(ctx, event.DefaultLog().Name(0))
	if err != nil {
		k.t.Fatal(err)
	}
	if first := stream.CachedInfo().State.FirstSeq; first != 1 {
		k.t.Fatalf("the log begins at %d: there is nothing to compare the first answers with", first)
	}
	slices.SortStableFunc(k.answers, func(a, b claim) int { return cmp.Compare(a.seq, b.seq) })
	log := feed.NewReader()
	wrong, seqs := 0, map[uint64]bool{}
	var state model.State
	for _, c := range k.answers {
		if !seqs[c.seq] {
			for log.Seq(0) < c.seq {
				msg, err := stream.GetMsg(ctx, log.Seq(0)+1)
				if err != nil {
					k.t.Fatalf("record %d: %v", log.Seq(0)+1, err)
				}
				if err := log.Apply(msg.Sequence, msg.Subject, msg.Data); err != nil {
					k.t.Fatal(err)
				}
			}
			seqs[c.seq], state = true, stateOf(log)
		}
		if want := state.Answer(k.prompts[c.prompt].Locals); !reflect.DeepEqual(c.rows, want) {
			if wrong++; wrong < 5 {
				k.t.Errorf("%s: prompt %d at log seq %d: answer %v, want %v", c.when, c.prompt, c.seq, c.rows, want)
			}
		}
	}
	k.t.Logf("%d answers at %d log sequences of %d, %d wrong", len(k.answers), len(seqs), stream.CachedInfo().State.LastSeq, wrong)
}

// stateOf returns what a reader of the log holds.
func stateOf(log *feed.Reader) model.State {
	st := model.State{BlockSize: killBlock, Held: map[model.Rank]map[model.Tier]map[uint64]bool{}}
	for _, s := range log.Sources() {
		held := map[model.Tier]map[uint64]bool{}
		for t, seqs := range s.Resident() {
			held[model.Tier(t)] = seqs
		}
		st.Held[model.Rank{Instance: s.Name.Instance, Rank: s.Name.Rank}] = held
	}
	return st
}
