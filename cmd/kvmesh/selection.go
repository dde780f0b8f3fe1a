package main

import (
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvmesh/kvmesh/cmd/kvmesh/telemetry"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
	"github.com/kvmesh/kvmesh/replica/selection/serve"
)

// selectionFlags are how workers are selected.
type selectionFlags struct {
	load        load.Config
	selection   selection.Config
	consistency string
}

// Names of --consistency.
const (
	eventual = "eventual"
	strict   = "strict"
)

func (f *selectionFlags) add(flags *pflag.FlagSet) {
	f.load, f.selection = load.Default(), selection.Default()
	l, s, p := &f.load, &f.selection, &f.selection.Params
	flags.StringVar(&f.consistency, "consistency", eventual, "how reservations are booked: eventual (here, and told to the other replicas) or strict (each a compare-and-set in NATS)")
	flags.StringVar(&l.Group, "load-group", l.Group, "replicas of one group share their load")
	flags.DurationVar(&l.Expiry, "reservation-expiry", l.Expiry, "how long a reservation lasts that nothing happens to")
	flags.DurationVar(&l.PendingExpiry, "selection-cache-ttl", l.PendingExpiry, "how long a selection waits to be booked")
	flags.IntVar(&l.MaxPending, "selection-cache-max-entries", l.MaxPending, "selections of this replica that may wait to be booked")
	flags.DurationVar(&l.SessionExpiry, "session-expiry", l.SessionExpiry, "how long a session that is not used keeps its worker")
	flags.DurationVar(&l.DeadExpiry, "dead-replica-expiry", l.DeadExpiry, "how long the reservations of a replica last when it is gone")
	flags.Float64Var(&p.DeviceCredit, "overlap-score-credit", p.DeviceCredit, "what a block in device memory saves, in blocks of prefill: 0 to 1")
	flags.Float64Var(&p.HostCredit, "host-cache-hit-weight", p.HostCredit, "what a block in host memory saves: 0 to 1")
	flags.Float64Var(&p.DiskCredit, "disk-cache-hit-weight", p.DiskCredit, "what a block on disk or further away saves: 0 to 1")
	flags.Float64Var(&p.CreditDecay, "overlap-score-credit-decay", p.CreditDecay, "how fast the credit for device memory falls with the prefill that waits at a worker; 0: not at all")
	flags.Float64Var(&p.PrefillScale, "prefill-load-scale", p.PrefillScale, "what a block of prefill costs, in blocks of decoding")
	flags.Float64Var(&p.RequestWeight, "decode-active-request-weight", p.RequestWeight, "what an active request costs, in blocks of decoding")
	flags.Float64Var(&p.SessionCredit, "session-credit", p.SessionCredit, "what the worker of the session is spared, in prompts")
	flags.Float64Var(&p.Temperature, "router-temperature", p.Temperature, "0: the least cost; more: the more random")
	flags.BoolVar(&p.TrackPrefill, "track-prefill-tokens", p.TrackPrefill, "count prompts that are being prefilled as load")
	flags.Float64Var(&s.QueueThreshold, "queue-threshold", s.QueueThreshold, "hold requests back while all workers prefill more than this part of their max_num_batched_tokens; 0: never")
	flags.IntVar(&s.MaxQueue, "max-queue", s.MaxQueue, "requests that may be held back")
	flags.DurationVar(&s.QueueTimeout, "queue-timeout", s.QueueTimeout, "for how long a request may be held back")
}

func (f *selectionFlags) validate() error {
	if f.consistency != eventual && f.consistency != strict {
		return fmt.Errorf("--consistency is %q: want %s or %s", f.consistency, eventual, strict)
	}
	if err := f.load.Validate(); err != nil {
		return err
	}
	return f.selection.Validate()
}

// nuidPrefix is how long the random part of a nuid is.
const nuidPrefix = 12

// chooser is what selects workers in a process.
type chooser struct {
	load     *load.Shared
	selector *selection.Selector
	roster   *selection.Roster
}

func (f *selectionFlags) new(nc *nats.Conn, js jetstream.JetStream, index selection.Index, id string, replicas int, log *slog.Logger, tel *telemetry.Telemetry) (*chooser, error) {
	c := &chooser{}
	var err error
	shared := f.load
	shared.ID = id + "-" + nuid.Next()[:nuidPrefix] // a process that starts again is another replica
	if c.load, err = load.New(load.OverNATS(nc), shared, load.Options{Logger: log, Meter: tel.Meter}); err != nil {
		return nil, err
	}
	options := selection.Options{Logger: log, Meter: tel.Meter, Tracer: tel.Tracer}
	if f.consistency == strict {
		options.Strict = load.NewStrict(c.load, js, "KVMESH_BOOKINGS", replicas, log)
	}
	c.selector, err = selection.New(index, c.load, f.selection, options)
	return c, err
}

// describe makes selections go by the descriptions of workers.
func (c *chooser) describe(js jetstream.JetStream, catalog *replica.Catalog, replicas int, log *slog.Logger) {
	cfg := selection.DefaultRoster()
	cfg.Replicas = replicas
	c.roster = selection.NewRoster(js, cfg, c.selector, catalog, log)
}

// hintTimeout is how long an answer waits for the names of the blocks in its hint.
const hintTimeout = 200 * time.Millisecond

// door puts the selection's paths in front of the index's, and answers over NATS.
func (c *chooser) door(nc *nats.Conn, token string, share event.Share, tracer trace.TracerProvider, index http.Handler, log *slog.Logger) (http.Handler, error) {
	cfg := serve.Default()
	cfg.Token, cfg.Share, cfg.Tracer = token, share, tracer
	door := serve.New(cfg, c.selector, c.roster, selection.NewHinter(nc, hintTimeout), index, log)
	_, err := door.Listen(nc, version())
	return door, err
}
