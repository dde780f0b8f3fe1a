package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
	"github.com/kvmesh/kvmesh/replica/selection/serve"
)

// http selects and books over connections that are kept; what is booked is freed
// through the Go API. Client and server share the processors.
func (r *selectRun) http(ctx context.Context, s *selection.Selector) error {
	nc, err := (&natsFlags{url: r.url}).connect("bench", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	roster := selection.NewRoster(js, selection.DefaultRoster(), s, nil, nil)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: serve.New(serve.Default(), s, roster, nil, http.NotFoundHandler(), nil), ReadHeaderTimeout: time.Second}
	go server.Serve(listener)
	defer server.Close()
	for _, form := range []string{"tokens", "hashes"} {
		var requests [][]byte
		for _, tokens := range r.prompts {
			body := map[string]any{"model_name": selectPartition.Model, "token_ids": tokens}
			if form == "hashes" {
				body = map[string]any{"model_name": selectPartition.Model, "isl_tokens": len(tokens), "block_hashes": hash.AppendLocals(nil, tokens, selectBlockSize, 0, hash.Seed)}
			}
			data, err := json.Marshal(body)
			if err != nil {
				return err
			}
			requests = append(requests, requestTo("POST", "/select_and_reserve", "application/json", data))
		}
		if err := r.httpForm(ctx, s, listener.Addr().String(), form, requests); err != nil {
			return err
		}
	}
	return nil
}

func (r *selectRun) httpForm(ctx context.Context, s *selection.Selector, addr, form string, requests [][]byte) error {
	const conns = 8
	var all sync.WaitGroup
	var done atomic.Int64
	errs := make([]error, conns)
	latencies := make([][]int64, conns)
	began := time.Now()
	for c := range conns {
		all.Go(func() {
			conn, err := dialBench(addr)
			if err != nil {
				errs[c] = err
				return
			}
			defer conn.close()
			w := window{ids: make([]string, max(r.inFlight/conns, 1))}
			for n := 0; time.Since(began) < r.duration && err == nil; n++ {
				at := time.Now()
				var data []byte
				if data, err = conn.ask(requests[(n*conns+c)%len(requests)]); err != nil {
					break
				}
				latencies[c] = append(latencies[c], int64(time.Since(at)))
				done.Add(1)
				var reply struct {
					ID string `json:"selection_id"`
				}
				if err = json.Unmarshal(data, &reply); err == nil {
					err = w.add(ctx, s, reply.ID)
				}
			}
			errs[c] = errors.Join(err, w.end(ctx, s))
		})
	}
	all.Wait()
	took := time.Since(began)
	var every []int64
	for _, l := range latencies {
		every = append(every, l...)
	}
	r.f["http_"+form+"_s"] = float64(done.Load()) / took.Seconds()
	r.f["http_"+form+"_p50_us"] = float64(percentile(every, 50)) / 1e3
	r.f["http_"+form+"_p99_us"] = float64(percentile(every, 99)) / 1e3
	return errors.Join(errs...)
}

// noIndex is an index of workers that hold nothing.
type noIndex struct{}

func (noIndex) Match(*indexer.Query, event.Partition, []uint64) (indexer.Answer, error) {
	return indexer.Answer{}, indexer.ErrUnknownPartition
}

func (r *selectRun) three(ctx context.Context, workers int, group string) ([]*selection.Selector, error) {
	var out []*selection.Selector
	for range 3 {
		s, err := r.replica(ctx, noIndex{}, workers, group)
		if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	for _, s := range out {
		if err := waitUntil(ctx, "three replicas know each other", func() bool { return len(s.Load().Peers()) == 3 }); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// lag measures the time from a booking until another replica counts it.
func (r *selectRun) lag(ctx context.Context) error {
	fmt.Fprintln(r.progress, "three replicas share reservations")
	replicas, err := r.three(ctx, r.workers, "lag")
	if err != nil {
		return err
	}
	n := int(r.rate * r.duration.Seconds() / 3)
	var mu sync.Mutex
	var lags []int64
	var all sync.WaitGroup
	errs := make([]error, len(replicas))
	for i, s := range replicas {
		own := s.Load()
		at := make([]atomic.Int64, n) // when each was booked, in ns
		var others []chan [2]uint64   // which booking, and the number of its operation
		for j, other := range replicas {
			if i == j {
				continue
			}
			heard := make(chan [2]uint64, n)
			all.Go(func() { // waits for each booking on the other replica
				mine := make([]int64, 0, n)
				for b := range heard {
					if other.Load().WaitFor(ctx, own.ID(), b[1]) != nil {
						return
					}
					mine = append(mine, time.Now().UnixNano()-at[b[0]].Load())
				}
				mu.Lock()
				lags = append(lags, mine...)
				mu.Unlock()
			})
			others = append(others, heard)
		}
		all.Go(func() {
			w := window{ids: make([]string, 64)}
			began := time.Now()
			defer func() {
				for _, heard := range others {
					close(heard)
				}
			}()
			for k := 0; k < n && errs[i] == nil; k++ {
				time.Sleep(time.Until(began.Add(time.Duration(float64(k) / (r.rate / 3) * 1e9))))
				at[k].Store(time.Now().UnixNano())
				res, err := s.SelectAndReserve(ctx, &selection.Request{Partition: selectPartition, Tokens: 2048})
				if err != nil {
					errs[i] = err
					return
				}
				for _, heard := range others {
					heard <- [2]uint64{uint64(k), own.Peers()[0].Seq}
				}
				errs[i] = w.add(ctx, s, res.ID)
			}
			errs[i] = errors.Join(errs[i], w.end(ctx, s))
		})
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if want := 6 * n; len(lags) != want {
		return fmt.Errorf("%d bookings were counted elsewhere, want %d", len(lags), want)
	}
	r.f["lag_p50_ms"], r.f["lag_p99_ms"] = float64(percentile(lags, 50))/1e6, float64(percentile(lags, 99))/1e6
	r.f["lag_bookings"] = float64(3 * n)
	return r.idle(ctx, replicas...)
}

// join measures how long a replica that starts needs to have all reservations.
func (r *selectRun) join(ctx context.Context) error {
	fmt.Fprintln(r.progress, "a replica joins")
	replicas, err := r.three(ctx, r.workers, "join")
	if err != nil {
		return err
	}
	ids := make([][]string, len(replicas))
	for n := range r.joined {
		i := n % len(replicas)
		res, err := replicas[i].SelectAndReserve(ctx, &selection.Request{Partition: selectPartition, Tokens: 2048})
		if err != nil {
			return err
		}
		ids[i] = append(ids[i], res.ID)
	}
	began := time.Now()
	joiner, err := r.replica(ctx, noIndex{}, r.workers, "join")
	if err != nil {
		return err
	}
	took := time.Since(began)
	r.f["join_ms"] = float64(took.Microseconds()) / 1e3
	sum, _, _ := joiner.Load().Total()
	r.f["join_reservations"] = float64(sum.Requests)
	if sum.Requests != int64(r.joined) {
		return fmt.Errorf("a replica that has joined knows %d reservations, want %d", sum.Requests, r.joined)
	}
	for i := range ids { // each freed elsewhere
		for _, id := range ids[i] {
			if err := replicas[(i+1)%len(replicas)].Free(ctx, id); err != nil {
				return err
			}
		}
	}
	return r.idle(ctx, append(replicas, joiner)...)
}

// imbalance compares how evenly sessions are spread by three replicas and by one.
func (r *selectRun) imbalance(ctx context.Context) error {
	fmt.Fprintln(r.progress, "sessions come and go")
	one, err := r.replica(ctx, noIndex{}, r.imbalanceWorkers, "one")
	if err != nil {
		return err
	}
	three, err := r.three(ctx, r.imbalanceWorkers, "three")
	if err != nil {
		return err
	}
	for name, replicas := range map[string][]*selection.Selector{"imbalance_1": {one}, "imbalance_3": three} {
		if r.f[name], err = r.spread(ctx, replicas); err != nil {
			return err
		}
	}
	r.f["imbalance_ratio"] = r.f["imbalance_3"] / r.f["imbalance_1"]
	return r.idle(ctx, append(three, one)...)
}

// spread keeps sessions open, closes and opens them at the rate, and returns the
// mean of the largest over the mean of active blocks.
func (r *selectRun) spread(ctx context.Context, replicas []*selection.Selector) (float64, error) {
	rng := rand.New(rand.NewPCG(3, 4))
	active := map[event.Source]float64{} // what is booked, whatever a replica thinks
	type session struct {
		id     string
		worker event.Source
		blocks float64
	}
	open := func() (session, error) {
		tokens := uint32(256 + rng.IntN(4096))
		res, err := replicas[rng.IntN(len(replicas))].SelectAndReserve(ctx, &selection.Request{Partition: selectPartition, Tokens: tokens})
		if err == nil {
			active[res.Source] += float64(res.Blocks)
		}
		return session{res.ID, res.Source, float64(res.Blocks)}, err
	}
	var sessions []session
	began := time.Now()
	for n := range r.sessions {
		time.Sleep(time.Until(began.Add(time.Duration(float64(n) / (4 * r.rate) * 1e9))))
		s, err := open()
		if err != nil {
			return 0, err
		}
		sessions = append(sessions, s)
	}
	sum, looks := 0.0, 0.0
	began = time.Now()
	for n := 0; time.Since(began) < r.duration; n++ {
		time.Sleep(time.Until(began.Add(time.Duration(float64(n) / r.rate * 1e9))))
		i := rng.IntN(len(sessions))
		old := sessions[i]
		if err := replicas[rng.IntN(len(replicas))].Free(ctx, old.id); err != nil {
			return 0, err
		}
		active[old.worker] -= old.blocks
		var err error
		if sessions[i], err = open(); err != nil {
			return 0, err
		}
		if n%64 == 0 {
			most, total := 0.0, 0.0
			for _, blocks := range active {
				most, total = max(most, blocks), total+blocks
			}
			sum += most / (total / float64(r.imbalanceWorkers))
			looks++
		}
	}
	for _, s := range sessions {
		if err := replicas[rng.IntN(len(replicas))].Free(ctx, s.id); err != nil && !errors.Is(err, load.ErrUnknown) {
			return 0, err
		}
	}
	return sum / looks, nil
}
