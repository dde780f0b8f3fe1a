package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// selectBench measures the selection of workers, and the load that replicas
// share.
type selectBench struct {
	workers, blocks  int
	duration         time.Duration
	inFlight         int
	joined           int
	rate             float64
	sessions         int
	imbalanceWorkers int
	json             string
	profile          profiler
}

// Of the prompts that are selected for.
const (
	selectBlockSize = 16
	selectFamilies  = 64
)

var selectPartition = event.Partition{Model: "m", Group: "default"}

func selectSource(i int) event.Source {
	return event.Source{Model: selectPartition.Model, Group: selectPartition.Group, Instance: "w" + strconv.Itoa(i)}
}

func benchSelectCommand() *cobra.Command {
	b := &selectBench{}
	cmd := &cobra.Command{
		Use:   "select",
		Short: "Measure the selection of workers, and the load that replicas share",
		Long: `All in one process, over an embedded NATS server. First one replica, whose index has read from
the log what its workers hold of 64 prompts (one of them is held by all), selects and books as
fast as it can, through the Go API and over HTTP with connections that are kept. The choices of
a part of it are compared with a naive model of the cost. Then three replicas share
reservations: the time from booking until each other replica counts it, the time that a fourth
one needs to have all of them, and how evenly three replicas spread sessions compared with one.
In the end nothing may be left on any of them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f, err := b.run(cmd.Context(), cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			return f.print(cmd.OutOrStdout(), b.json)
		},
	}
	cmd.Flags().IntVar(&b.workers, "workers", 1024, "workers")
	cmd.Flags().IntVar(&b.blocks, "blocks", 128, "blocks of a prompt")
	cmd.Flags().DurationVar(&b.duration, "duration", 5*time.Second, "how long each rate, and the lag, is measured")
	cmd.Flags().IntVar(&b.inFlight, "in-flight", 4096, "reservations that are active while rates are measured")
	cmd.Flags().IntVar(&b.joined, "join", 10000, "reservations that a replica that joins has to learn of")
	cmd.Flags().Float64Var(&b.rate, "rate", 2000, "reservations a second, over three replicas, while the lag is measured")
	cmd.Flags().IntVar(&b.sessions, "sessions", 8192, "sessions that are open while imbalance is measured")
	cmd.Flags().IntVar(&b.imbalanceWorkers, "imbalance-workers", 64, "workers while imbalance is measured")
	b.profile.add(cmd.Flags())
	cmd.Flags().StringVar(&b.json, "json", "", "file to write the figures to, as JSON")
	return cmd
}

// selectRun is a run of it.
type selectRun struct {
	*selectBench
	url      string
	progress io.Writer
	f        figures
	prompts  [selectFamilies][]uint32
	rng      *rand.Rand
	tasks    sync.WaitGroup
}

func (b *selectBench) run(ctx context.Context, progress io.Writer) (figures, error) {
	dir, err := os.MkdirTemp("", "kvmesh-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	addr, err := unusedAddr()
	if err != nil {
		return nil, err
	}
	server, err := (&natsFlags{listen: addr}).embed(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	defer func() {
		server.Shutdown()
		server.WaitForShutdown()
	}()
	r := &selectRun{selectBench: b, url: server.ClientURL(), progress: progress, f: figures{}, rng: rand.New(rand.NewPCG(1, 2))}
	for i := range r.prompts {
		for range b.blocks * selectBlockSize {
			r.prompts[i] = append(r.prompts[i], r.rng.Uint32N(50000))
		}
	}
	ctx, stop := context.WithCancel(ctx)
	for _, part := range []func(context.Context) error{r.rates, r.lag, r.join, r.imbalance} {
		if err = part(ctx); err != nil {
			break
		}
	}
	stop()
	r.tasks.Wait()
	return r.f, err
}

// unusedAddr returns an address that nobody listens on now.
func unusedAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// replica starts a replica that selects among workers by an index.
func (r *selectRun) replica(ctx context.Context, index selection.Index, workers int, group string) (*selection.Selector, error) {
	nc, err := (&natsFlags{url: r.url}).connect("bench", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	cfg := load.Default()
	cfg.Group = group
	shared, err := load.New(load.OverNATS(nc), cfg, load.Options{})
	if err != nil {
		return nil, err
	}
	s, err := selection.New(index, shared, selection.Default(), selection.Options{})
	if err != nil {
		return nil, err
	}
	for i := range workers {
		s.Registered(event.Worker{Source: selectSource(i), Endpoint: "tcp://127.0.0.1:1", BlockSize: selectBlockSize})
	}
	s.CatalogRead()
	r.tasks.Go(func() {
		defer nc.Close()
		_ = shared.Run(ctx) // it ends with ctx
	})
	return s, waitUntil(ctx, "the replica has joined", func() bool { return shared.Ready() == nil })
}

// waitUntil waits until something is so, and not for ever.
func waitUntil(ctx context.Context, what string, so func() bool) error {
	for end := time.Now().Add(time.Minute); !so(); time.Sleep(200 * time.Microsecond) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if time.Now().After(end) {
			return errors.New("not after a minute: " + what)
		}
	}
	return nil
}

// idle checks that nothing is left on any replica.
func (r *selectRun) idle(ctx context.Context, replicas ...*selection.Selector) error {
	for _, s := range replicas {
		err := waitUntil(ctx, "nothing is active", func() bool {
			sum, n, _ := s.Load().Total()
			return sum == load.Load{} && n == 0
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// -- rates --------------------------------------------------------------------

// fill writes to the log what the workers hold, and has an index read it.
func (r *selectRun) fill(ctx context.Context) (*indexer.Indexer, error) {
	nc, err := (&natsFlags{url: r.url}).connect("bench", nil, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	if _, err := js.CreateStream(ctx, event.DefaultLog().Config(0, 1)); err != nil {
		return nil, err
	}
	locals := make([][]uint64, selectFamilies)
	for i, tokens := range r.prompts {
		locals[i] = hash.AppendLocals(nil, tokens, selectBlockSize, 0, hash.Seed)
	}
	published := uint64(0)
	for w := range r.workers {
		s := selectSource(w)
		var ops [][]byte
		for j := range 9 {
			family := 0 // held by all
			if j > 0 {
				family = (w + 7*j) % selectFamilies
			}
			depth := 1 + r.rng.IntN(r.blocks)
			ops = append(ops, event.AppendStored(nil, event.Tier(r.rng.IntN(2)), "", event.Run{Root: true, Locals: locals[family][:depth]}, nil))
		}
		data := event.AppendRecord(nil, event.Header{Incarnation: 1, Batches: true}, len(ops), ops...)
		if _, err := js.PublishAsync(event.DefaultLog().Subject(s), data); err != nil {
			return nil, err
		}
		published++
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	cfg := indexer.Default()
	cfg.Compact = false
	index, err := indexer.New(nc, js, cfg, indexer.Options{})
	if err != nil {
		return nil, err
	}
	for i := range r.workers {
		index.Registered(event.Worker{Source: selectSource(i), Endpoint: "tcp://127.0.0.1:1", BlockSize: selectBlockSize})
	}
	index.CatalogRead()
	r.tasks.Go(func() {
		defer nc.Close()
		_ = index.Run(ctx) // it ends with ctx
	})
	return index, waitUntil(ctx, "the index has read the log", func() bool { return index.Ready() == nil && index.Position().LogSeq >= published })
}

// rates measures how fast one replica selects and books.
func (r *selectRun) rates(ctx context.Context) error {
	fmt.Fprintln(r.progress, "filling an index")
	index, err := r.fill(ctx)
	if err != nil {
		return err
	}
	s, err := r.replica(ctx, index, r.workers, "rates")
	if err != nil {
		return err
	}
	if err := r.compare(ctx, s); err != nil {
		return err
	}
	fmt.Fprintln(r.progress, "selecting through the Go API")
	if err := r.profile.start(); err != nil {
		return err
	}
	if err := r.goAPI(ctx, s); err != nil {
		return err
	}
	if err := r.profile.stop(); err != nil {
		return err
	}
	fmt.Fprintln(r.progress, "selecting over HTTP")
	if err := r.http(ctx, s); err != nil {
		return err
	}
	return r.idle(ctx, s)
}

// compare compares choices with the least cost of a naive model.
func (r *selectRun) compare(ctx context.Context, s *selection.Selector) error {
	const choices = 300
	wrong := 0
	var ids []string
	for i := range choices {
		locals := hash.AppendLocals(nil, r.prompts[i%selectFamilies], selectBlockSize, 0, hash.Seed)
		p, overlaps, _, err := s.Overlaps(selectPartition, locals)
		if err != nil {
			return err
		}
		least := math.Inf(1)
		for j, l := range s.Loads(nil, p.Candidates) {
			o := overlaps[j]
			prefill := float64(l.Prefill)/selectBlockSize + float64(len(locals)) - float64(o.Device) - 0.75*float64(o.Host) - 0.25*float64(o.Disk)
			least = min(least, max(0, prefill)+float64(l.Blocks)/load.Unit+float64(len(locals)))
		}
		got, err := s.SelectAndReserve(ctx, &selection.Request{Partition: selectPartition, Locals: locals})
		if err != nil {
			return err
		}
		if math.Abs(got.Cost-least) > 1e-6 {
			wrong++
		}
		ids = append(ids, got.ID)
	}
	for _, id := range ids {
		if err := s.Free(ctx, id); err != nil {
			return err
		}
	}
	r.f["choices_compared"], r.f["choices_wrong"] = choices, float64(wrong)
	if wrong > 0 {
		return fmt.Errorf("%d of %d choices were not those with the least cost", wrong, choices)
	}
	return nil
}

// window keeps reservations active, and frees the oldest when there are too many.
type window struct {
	ids  []string
	next int
}

func (w *window) add(ctx context.Context, s *selection.Selector, id string) error {
	old := w.ids[w.next]
	w.ids[w.next] = id
	w.next = (w.next + 1) % len(w.ids)
	if old == "" {
		return nil
	}
	return s.Free(ctx, old)
}

func (w *window) end(ctx context.Context, s *selection.Selector) error {
	for _, id := range w.ids {
		if id != "" {
			if err := s.Free(ctx, id); err != nil {
				return err
			}
		}
	}
	return nil
}

// goAPI selects and books from two goroutines, hashing of tokens included.
func (r *selectRun) goAPI(ctx context.Context, s *selection.Selector) error {
	const callers = 2
	var done atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, callers)
	latencies := make([][]int64, callers)
	began, cpu := time.Now(), cpuTime()
	for c := range callers {
		all.Go(func() {
			w := window{ids: make([]string, max(r.inFlight/callers, 1))}
			var locals []uint64
			for n := 0; time.Since(began) < r.duration && errs[c] == nil; n++ {
				at := time.Now()
				locals = hash.AppendLocals(locals[:0], r.prompts[(n*callers+c)%selectFamilies], selectBlockSize, 0, hash.Seed)
				res, err := s.SelectAndReserve(ctx, &selection.Request{Partition: selectPartition, Locals: locals})
				if err == nil {
					latencies[c] = append(latencies[c], int64(time.Since(at)))
					err = w.add(ctx, s, res.ID)
				}
				errs[c] = err
				done.Add(1)
			}
			errs[c] = errors.Join(errs[c], w.end(ctx, s))
		})
	}
	all.Wait()
	took := time.Since(began)
	var every []int64
	for _, l := range latencies {
		every = append(every, l...)
	}
	r.f["select_reserve_s"] = float64(done.Load()) / took.Seconds()
	r.f["select_reserve_cpu_us"] = float64((cpuTime() - cpu).Nanoseconds()) / 1e3 / float64(done.Load())
	r.f["select_reserve_p50_us"] = float64(percentile(every, 50)) / 1e3
	r.f["select_reserve_p99_us"] = float64(percentile(every, 99)) / 1e3
	return errors.Join(errs...)
}
