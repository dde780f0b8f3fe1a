package replica

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Change is a new value of a key of a bucket, or that it has none any more.
type Change struct {
	Key      string
	Value    []byte
	Revision uint64
	Gone     bool
}

// Follower is told what is in a bucket, from one goroutine. After Begin comes what
// there is, a key at a time, then Whole, then every change. It begins again
// whenever something was wrong, or the bucket is another one of the same name.
type Follower interface {
	// Begin: created tells one bucket from another of the same name.
	Begin(kv jetstream.KeyValue, created time.Time)
	Changed(c Change)
	Whole()
}

// Follow tells f of a key-value bucket, which is made if it is not there, until
// ctx ends.
func Follow(ctx context.Context, js jetstream.JetStream, cfg jetstream.KeyValueConfig, f Follower, logger *slog.Logger) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	if cfg.LimitMarkerTTL == 0 {
		cfg.LimitMarkerTTL = time.Hour
	}
	b := &bucket{js: js, config: cfg, log: logger}
	b.follow(ctx, told{f})
}

// told makes a follower of a Follower.
type told struct{ Follower }

func (t told) begin(kv jetstream.KeyValue, created time.Time) { t.Begin(kv, created) }
func (t told) each(c change)                                  { t.Changed(Change{c.key, c.value, c.revision, c.gone}) }
func (t told) whole()                                         { t.Whole() }
