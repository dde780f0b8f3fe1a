// Package check looks at a deployment from the outside, and says what is wrong
// with it and what to do about that. It changes nothing.
package check

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// Level says how bad a Finding is.
type Level string

// The levels. Fail: the deployment does not do what it is to do. Warn: it does,
// but something will be missed, or is not as it should be.
const (
	OK   Level = "ok"
	Warn Level = "warn"
	Fail Level = "FAIL"
)

// Finding is one thing that was looked at.
type Finding struct {
	Level   Level  `json:"level"`
	Area    string `json:"area"`    // nats, log, clock, bridges, engines, ports, server
	Subject string `json:"subject"` // what was looked at
	Text    string `json:"text"`
	Fix     string `json:"fix,omitempty"` // what to do about it
}

// Options say what to look at.
type Options struct {
	// NATS is the URL of the NATS servers; empty: they are not looked at, and
	// neither is what is known through them.
	NATS string
	// Connect is what to connect with, and Domain the JetStream domain, empty
	// for that of the servers.
	Connect []nats.Option
	Domain  string
	// Replicas is how many NATS servers are to keep the log.
	Replicas int
	// Shards is in how many streams the log is to be; 0: in as many as it is.
	Shards int
	// Server is the URL of an indexer; empty: none.
	Server, Token string
	// Workers are looked at beside those of the catalog.
	Workers []event.Worker
	// Ranks is how many data-parallel ranks the engines will have; the ports
	// are looked at for as many as are registered, if that is more.
	Ranks int
	// Timeout bounds each attempt to reach something.
	Timeout time.Duration
	// Logger takes what clients log; nil: nobody.
	Logger *slog.Logger
}

// checker gathers findings.
type checker struct {
	Options
	found []Finding
}

func (c *checker) add(level Level, area, subject, fix, format string, args ...any) {
	c.found = append(c.found, Finding{Level: level, Area: area, Subject: subject, Text: fmt.Sprintf(format, args...), Fix: fix})
}

// Run looks at everything that o names. It ends early with ctx.
func Run(ctx context.Context, o Options) []Finding {
	if o.Timeout <= 0 {
		o.Timeout = 3 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	c := &checker{Options: o}
	workers := o.Workers
	if o.NATS != "" {
		workers = append(workers, c.throughNATS(ctx)...)
	}
	workers = unique(workers)
	c.ports(workers)
	c.engines(ctx, workers)
	if o.Server != "" {
		c.server(ctx)
	}
	return c.found
}

// throughNATS looks at NATS and what is known through it, and returns the workers
// of the catalog.
func (c *checker) throughNATS(ctx context.Context) []event.Worker {
	nc, ok := c.connect()
	if !ok {
		return nil
	}
	defer nc.Close()
	c.connection(nc)
	js, err := jetstream.New(nc)
	if c.Domain != "" {
		js, err = jetstream.NewWithDomain(nc, c.Domain)
	}
	if err != nil {
		c.add(Fail, "nats", c.redacted(), "", "%v", err)
		return nil
	}
	if !c.account(ctx, nc, js) {
		return nil
	}
	c.log(ctx, js)
	c.bridges(ctx, nc)
	return c.catalog(ctx, js)
}

func unique(workers []event.Worker) []event.Worker {
	seen := map[event.Source]bool{}
	var out []event.Worker
	for _, w := range workers {
		if !seen[w.Source] {
			seen[w.Source] = true
			out = append(out, w)
		}
	}
	return out
}

// Worst returns the level of the worst finding.
func Worst(found []Finding) Level {
	worst := OK
	for _, f := range found {
		if f.Level == Fail || f.Level == Warn && worst == OK {
			worst = f.Level
		}
	}
	return worst
}

// Print writes findings for people.
func Print(w io.Writer, found []Finding) error {
	for _, f := range found {
		if _, err := fmt.Fprintf(w, "%-5s %-8s %s: %s\n", f.Level, f.Area, f.Subject, f.Text); err != nil {
			return err
		}
		if f.Fix != "" {
			fmt.Fprintf(w, "%15s→ %s\n", "", f.Fix)
		}
	}
	return nil
}

// connect makes a connection that is not kept up.
func (c *checker) connect() (*nats.Conn, bool) {
	nc, err := nats.Connect(c.NATS, append(slices.Clone(c.Connect), nats.Name("kvmesh check"), nats.Timeout(c.Timeout), nats.NoReconnect(), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
	if err != nil {
		c.add(Fail, "nats", c.redacted(), connectFix(err), "%v", err)
		return nil, false
	}
	return nc, true
}
