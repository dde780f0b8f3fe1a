package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/model"
)

// deployment is all of it: NATS servers, bridges, indexers, engines, and the
// networks between them.
type deployment struct {
	t        *testing.T
	rng      *rand.Rand
	dir      string
	client   *http.Client
	prompts  []model.Prompt
	engines  []*engine
	nodes    []*process // NATS
	addrs    []string   // of the nodes
	bridges  []*process
	indexers []*process
	paths    [][]*link // of each bridge, and then of each indexer, to each node
	askers   []*asker
	log      event.Log
	history  *history

	publishing func() // stops it
	asking     func()
	recording  func()
}

// size of a deployment.
type size struct{ nodes, bridges, indexers, engines int }

func deploy(t *testing.T, seed uint64, n size, change func(*natsConfig)) *deployment {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	binary := filepath.Join(dir, "kvmesh")
	d := &deployment{t: t, rng: rand.New(rand.NewPCG(seed, 7)), dir: t.TempDir(), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(d.client.CloseIdleConnections)
	d.log = event.DefaultLog()
	d.log.Shards = []int{1, 1, 3}[seed%3]
	d.prompts = model.Prompts(model.PromptOptions{Seed: seed, BlockSize: blockSize, N: 12, Spaced: 4})
	d.nodes, d.addrs = natsNodes(t, d.dir, n.nodes, change)
	for _, p := range d.nodes {
		p.start()
	}
	for i := range n.engines {
		d.engines = append(d.engines, newEngine(t, i, seed, d.prompts))
	}
	common := func() []string {
		var path []*link
		var addrs []string
		for _, a := range d.addrs {
			l := newLink(t, a)
			path = append(path, l)
			addrs = append(addrs, l.addr())
		}
		d.paths = append(d.paths, path)
		return []string{"--nats", urls(addrs), "--replicas", fmt.Sprint(n.nodes), "--log-shards", fmt.Sprint(d.log.Shards)}
	}
	for i := range n.bridges {
		name := fmt.Sprint("b", i)
		d.bridges = append(d.bridges, newProcess(t, d.dir, name, binary, nil,
			append([]string{"bridge", "--id", name, "--lease-ttl", "2s", "--probe-interval", "300ms", "--repair-timeout", "3s"}, common()...)...))
	}
	for i := range n.indexers {
		name, addr := fmt.Sprint("x", i), fmt.Sprint("127.0.0.1:", free.take(t))
		d.indexers = append(d.indexers, newProcess(t, d.dir, name, binary, nil, append([]string{"indexer", "--id", name, "--http", addr}, common()...)...))
		d.askers = append(d.askers, &asker{name: name, url: "http://" + addr, prompts: d.prompts, client: d.client})
	}
	d.awaitCluster()
	for _, p := range append(d.bridges, d.indexers...) {
		p.start()
	}
	var stop func()
	d.history, stop = record(t, urls(d.addrs), d.log)
	d.recording = stop
	t.Cleanup(stop)
	d.register()
	d.run()
	return d
}

// run has the engines publish, and the indexers asked.
func (d *deployment) run() {
	d.publishing = keepPublishing(d.t, d.engines)
	d.t.Cleanup(d.publishing)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, a := range d.askers {
		wg.Go(func() { a.run(ctx) })
	}
	d.asking = sync.OnceFunc(func() { cancel(); wg.Wait() })
	d.t.Cleanup(d.asking)
}

// js returns a connection to NATS that no fault is on.
func (d *deployment) js() (jetstream.JetStream, func(), error) {
	nc, err := nats.Connect(urls(d.addrs), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	return js, nc.Close, err
}

// awaitCluster waits until NATS can make streams that all servers keep.
func (d *deployment) awaitCluster() {
	d.t.Helper()
	await(d.t, "NATS is up", func() bool {
		js, done, err := d.js()
		if err != nil {
			return false
		}
		defer done()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "TEST", Subjects: []string{"test"}, Replicas: len(d.nodes), Storage: jetstream.MemoryStorage})
		return err == nil
	})
}

func (d *deployment) register() {
	d.t.Helper()
	for _, e := range d.engines {
		body, err := json.Marshal(e.registration())
		if err != nil {
			d.t.Fatal(err)
		}
		await(d.t, "registration", func() bool {
			return call(d.t.Context(), d.client, http.MethodPost, d.askers[0].url+"/register", body, nil) == nil
		})
	}
}

// finish mends everything, lets it settle, and checks it all.
func (d *deployment) finish() {
	d.t.Helper()
	for _, path := range d.paths {
		for _, l := range path {
			l.mend()
		}
	}
	for _, e := range d.engines {
		e.pub.mend()
		e.replay.mend()
	}
	for _, p := range append(append(d.nodes, d.bridges...), d.indexers...) {
		p.start()
	}
	d.publishing()
	for _, a := range d.askers {
		d.settled(a)
	}
	d.asking()
	d.recorded()
	d.recording()
	var answers []answer
	refused := 0
	for _, a := range d.askers {
		answers = append(answers, a.answers...)
		refused += a.refused
	}
	d.t.Logf("%d requests got no answer", refused)
	d.history.judge(d.t, d.prompts, answers)
}

// settled waits until an indexer has all that the engines have said, and no more,
// and knows of every loss.
func (d *deployment) settled(a *asker) {
	d.t.Helper()
	why := ""
	deadline := time.Now().Add(patience)
	for {
		if why = d.differs(a); why == "" {
			return
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("%s does not settle: %s\n%s", a.name, why, d.history.losses())
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (d *deployment) differs(a *asker) string {
	ctx := context.Background()
	var workers []struct {
		Instance  string `json:"instance_id"`
		Listeners map[string]struct {
			Applied *uint64 `json:"applied_engine_seq"`
			Lost    int     `json:"lost_batches"`
			Error   string  `json:"last_error"`
			Status  string  `json:"status"`
		}
	}
	if err := call(ctx, d.client, http.MethodGet, a.url+"/workers", nil, &workers); err != nil {
		return err.Error()
	}
	var digests struct {
		Sources []struct {
			Instance string `json:"instance_id"`
			Digest   map[string]struct {
				Count uint64 `json:"count"`
				Sum   string `json:"sum"`
			} `json:"digest"`
		} `json:"sources"`
	}
	if err := call(ctx, d.client, http.MethodGet, a.url+"/digest", nil, &digests); err != nil {
		return err.Error()
	}
	var wrong []string
	for _, e := range d.engines {
		want, have := e.digests(), map[string]string{}
		for _, s := range digests.Sources {
			if s.Instance == e.source.Instance {
				for tier, v := range s.Digest {
					have[tier] = fmt.Sprint(v.Count, " ", v.Sum)
				}
			}
		}
		if !reflect.DeepEqual(have, want) {
			wrong = append(wrong, fmt.Sprintf("%s: digests %v, want %v", e.source.Instance, have, want))
		}
		found := false
		for _, w := range workers {
			if w.Instance != e.source.Instance {
				continue
			}
			l := w.Listeners["0"]
			found = l.Applied != nil && *l.Applied+1 == e.Next()
			if !found {
				wrong = append(wrong, fmt.Sprintf("%s: not at batch %d: %s, %s", w.Instance, e.Next()-1, l.Status, l.Error))
			} else if l.Lost != e.lost {
				wrong = append(wrong, fmt.Sprintf("%s: %d batches on record as lost, of %d", w.Instance, l.Lost, e.lost))
			}
		}
	}
	return strings.Join(wrong, "\n")
}

// digests returns the digests that an exact index has of the engine.
func (e *engine) digests() map[string]string {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := map[string]string{}
	resident := e.truth.Resident()
	for tier := range event.Tier(event.Tiers) {
		d := event.Digest{}
		for seq := range resident[model.Tier(tier)] {
			d.Add(1, event.Mix(seq, event.Salt(tier)))
		}
		out[tier.String()] = fmt.Sprintf("%d %016x", d.Count, d.Sum)
	}
	return out
}

// recorded waits until the history has all of the log.
func (d *deployment) recorded() {
	d.t.Helper()
	await(d.t, "the history is whole", func() bool {
		js, done, err := d.js()
		if err != nil {
			return false
		}
		defer done()
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		for shard, h := range d.history.shards {
			stream, err := js.Stream(ctx, d.log.Name(shard))
			if err != nil || h.reached() < stream.CachedInfo().State.LastSeq {
				return false
			}
		}
		return true
	})
}
