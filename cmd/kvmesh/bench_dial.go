package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/bridge/engine"
	"github.com/kvmesh/kvmesh/bridge/residency"
	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/prefix"
	"github.com/kvmesh/kvmesh/integration/engines"
)

// benchDialCommand is the replica that kvmesh does without: one that dials every
// worker itself, and decodes and indexes what it hears. It repairs nothing and
// writes no log, so it is the least that such a replica costs.
func benchDialCommand() *cobra.Command {
	var from, addr string
	cmd := &cobra.Command{
		Use:    "dial",
		Short:  "Index what mock engines publish by dialling each, for other benchmarks",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return dialAll(cmd.Context(), from, addr)
		},
	}
	cmd.Flags().StringVar(&from, "workers", "http://127.0.0.1:9000", "URL of the mock engines")
	cmd.Flags().StringVar(&addr, "http", "127.0.0.1:9100", "address to serve what it holds on, below /digests")
	return cmd
}

// dialledWorker is one worker that is read.
type dialledWorker struct {
	name    engines.Described
	source  event.Source
	index   *prefix.Index
	holder  prefix.Holder
	clears  event.TierMask
	decoder *engine.Decoder
	dec     event.Decoder

	mu      sync.Mutex // guards all below
	batch   engine.Batch
	state   *residency.State
	ops     residency.Ops
	record  []byte
	batches uint64
	digests event.Digests // of the index
	err     error
}

func dialAll(ctx context.Context, from, addr string) error {
	var workers []engines.Described
	if err := getJSON(ctx, http.DefaultClient, from+"/workers", &workers); err != nil {
		return err
	}
	media, err := engine.NewMedia(nil)
	if err != nil {
		return err
	}
	index := prefix.New()
	var all []*dialledWorker
	var tasks sync.WaitGroup
	defer tasks.Wait()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for _, w := range workers {
		profile, _ := engine.ProfileOf(w.Engine)
		d := &dialledWorker{name: w, source: event.Source{Model: "bench", Group: "default", Instance: w.Instance, Rank: w.Rank}, index: index,
			clears: event.AllTiers, decoder: engine.NewDecoder(profile, media)}
		if profile.ClearsOnlyDevice {
			d.clears = event.Device.Mask()
		}
		d.state = residency.New(residency.Config{BlockSize: w.BlockSize, Clears: d.clears, Limits: residency.DefaultLimits()})
		index.Update(0, func(x prefix.Writer) {
			d.holder = x.Add(&d.source)
			x.Show(d.holder, true)
		})
		sub, err := zmtp.NewSub("tcp", strings.TrimPrefix(w.Endpoint, "tcp://"), false, []byte(w.Topic), zmtp.Default(), d)
		if err != nil {
			return err
		}
		all = append(all, d)
		tasks.Go(func() { sub.Run(ctx) })
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /digests", func(w http.ResponseWriter, _ *http.Request) { heldByDialled(w, all) })
	web := &http.Server{Addr: addr, Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	tasks.Go(func() { <-ctx.Done(); web.Close() })
	if err := web.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// heldByDialled answers as mock engines do.
func heldByDialled(w http.ResponseWriter, all []*dialledWorker) {
	out := engines.Truth{Settled: true}
	for _, d := range all {
		d.mu.Lock()
		if d.err != nil {
			out.Settled = false
		}
		out.Workers = append(out.Workers, engines.Held{Instance: d.name.Instance, Rank: d.name.Rank, Next: d.batches, Digests: d.digests})
		d.mu.Unlock()
	}
	json.NewEncoder(w).Encode(out)
}

// Connected implements zmtp.Handler.
func (d *dialledWorker) Connected(string) {}

// Disconnected implements zmtp.Handler.
func (d *dialledWorker) Disconnected(error) {}

// Refused implements zmtp.Handler.
func (d *dialledWorker) Refused(string) {}

// Message implements zmtp.Handler.
func (d *dialledWorker) Message(frames [][]byte) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.batches++
	if err := d.apply(frames); err != nil {
		d.err = err
	}
}

func (d *dialledWorker) apply(frames [][]byte) error {
	if len(frames) != 3 {
		return fmt.Errorf("a message of %d frames", len(frames))
	}
	if err := d.decoder.Decode(frames[2], &d.batch); err != nil {
		return err
	}
	d.ops.Reset()
	for i := range d.batch.Events {
		d.state.Apply(&d.batch.Events[i], &d.ops)
	}
	d.record = event.AppendRecord(d.record[:0], event.Header{}, d.ops.Len(), d.ops.Buf)
	if err := d.dec.Reset(d.record); err != nil {
		return err
	}
	d.index.Update(0, func(x prefix.Writer) {
		for d.dec.Next() {
			op := &d.dec.Op
			switch op.Kind {
			case event.OpStored:
				d.digests[op.Tier].Add(x.Store(d.holder, op.Tier, &op.Run))
			case event.OpRemoved:
				d.digests[op.Tier].Sub(x.Remove(d.holder, op.Tier, op.Seqs))
			case event.OpCleared:
				x.Clear(d.holder, op.Tiers)
				for t := range event.Tier(event.Tiers) {
					if op.Tiers.Has(t) {
						d.digests[t] = event.Digest{}
					}
				}
			}
		}
	})
	return d.dec.Err()
}

// getJSON reads a reply.
func getJSON(ctx context.Context, c *http.Client, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}
