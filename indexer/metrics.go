package indexer

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// metrics count what an Indexer does. Gauges are functions of its state.
type metrics struct {
	ctx         context.Context
	blocks      metric.Int64Counter
	bad         metric.Int64Counter
	divergences metric.Int64Counter
	purges      metric.Int64Counter
	passed      metric.Int64Counter
	gauges      metric.Registration
}

func newMetrics(provider metric.MeterProvider, x *Indexer) (*metrics, error) {
	meter := provider.Meter("github.com/kvmesh/kvmesh/indexer")
	m := &metrics{ctx: context.Background()}
	var errs []error
	counter := func(at *metric.Int64Counter, name, unit, help string) {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		if err == nil {
			c.Add(context.Background(), 0) // there from the beginning, so that its first increase is one
		}
		*at, errs = c, append(errs, err)
	}
	gauge := func(name, unit, help string) metric.Int64ObservableGauge {
		g, err := meter.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return g
	}
	counter(&m.blocks, "kvmesh.indexer.block.operations", "{block}", "Blocks stored and removed.")
	counter(&m.bad, "kvmesh.indexer.records.bad", "{record}", "Records of the log that could not be read.")
	counter(&m.divergences, "kvmesh.indexer.divergences", "{divergence}", "Sources whose state was found to differ from their bridge's.")
	counter(&m.purges, "kvmesh.indexer.purges", "{purge}", "Purges of the beginning of the log.")
	counter(&m.passed, "kvmesh.indexer.records.passed", "{record}", "Records of partitions that are served elsewhere.")
	position := gauge("kvmesh.indexer.log.seq", "{record}", "Log sequence that answers are true for.")
	lag := gauge("kvmesh.indexer.log.lag", "{record}", "Records of the log that have not been read.")
	ready := gauge("kvmesh.indexer.ready", "", "1 if answers are true, else 0.")
	sources := gauge("kvmesh.indexer.sources", "{source}", "Sources known from the log.")
	elsewhere := gauge("kvmesh.indexer.sources_elsewhere", "{source}", "Sources known from the log whose partitions are served elsewhere.")
	uncertain := gauge("kvmesh.indexer.sources_uncertain", "{source}", "Sources with lost batches.")
	diverged := gauge("kvmesh.indexer.sources_diverged", "{source}", "Sources whose state differs from their bridge's.")
	blocks := gauge("kvmesh.indexer.blocks", "{block}", "Blocks that sources hold, by tier.")
	unique := gauge("kvmesh.indexer.blocks_unique", "{block}", "Different blocks in all indexes; those of several shards of the log count in each.")
	memory := gauge("kvmesh.indexer.memory", "By", "Memory of all indexes, about.")
	partitions := gauge("kvmesh.indexer.partitions", "{partition}", "Models and routing groups that have workers.")
	workers := gauge("kvmesh.indexer.workers", "{worker}", "Workers that are registered, with all their ranks as one.")
	operations, err := meter.Int64ObservableCounter("kvmesh.indexer.operations", metric.WithUnit("{operation}"), metric.WithDescription("Operations of records that were applied, by what they do and tier."))
	errs = append(errs, err)
	reg, err := meter.RegisterCallback(func(_ context.Context, o metric.Observer) error {
		for i, s := range x.shards {
			var at []attribute.KeyValue
			if len(x.shards) > 1 {
				at = append(at, attribute.Int("shard", i))
			}
			o.ObserveInt64(position, int64(s.Position()), metric.WithAttributes(at...))
			o.ObserveInt64(lag, int64(s.Lag()), metric.WithAttributes(at...))
		}
		up := int64(0)
		if x.Ready() == nil {
			up = 1
		}
		o.ObserveInt64(ready, up)
		c := x.census()
		o.ObserveInt64(sources, c.sources)
		o.ObserveInt64(elsewhere, c.elsewhere)
		o.ObserveInt64(uncertain, c.uncertain)
		o.ObserveInt64(diverged, c.diverged)
		o.ObserveInt64(unique, c.unique)
		o.ObserveInt64(memory, c.bytes)
		for name, n := range c.blocks {
			o.ObserveInt64(blocks, n, metric.WithAttributes(attribute.String("tier", name)))
		}
		o.ObserveInt64(partitions, c.partitions)
		o.ObserveInt64(workers, c.workers)
		for t := range event.Tier(event.Tiers) {
			for what, n := range map[string]int64{"stored": c.applied.stored[t], "removed": c.applied.removed[t], "cleared": c.applied.cleared[t]} {
				o.ObserveInt64(operations, n, metric.WithAttributes(attribute.String("operation", what), attribute.String("tier", t.String())))
			}
		}
		return nil
	}, position, lag, ready, sources, elsewhere, uncertain, diverged, blocks, unique, memory, partitions, workers, operations)
	m.gauges = reg
	return m, errors.Join(append(errs, err)...)
}

func (m *metrics) close() {
	if m.gauges != nil {
		m.gauges.Unregister()
	}
}

// census is what the gauges of blocks and sources show.
type census struct {
	sources, elsewhere, uncertain, diverged, unique, bytes int64
	partitions, workers                                    int64
	blocks                                                 map[string]int64
	applied                                                applied
}

// applied is how many operations were applied, by tier.
type applied struct{ stored, removed, cleared [event.Tiers]int64 }

func (a *applied) add(b *applied) {
	for t := range a.stored {
		a.stored[t] += b.stored[t]
		a.removed[t] += b.removed[t]
		a.cleared[t] += b.cleared[t]
	}
}

func (x *Indexer) census() census {
	c := census{blocks: map[string]int64{}}
	for t := range event.Tier(event.Tiers) {
		c.blocks[t.String()] = 0 // there from the beginning
	}
	partitions := map[event.Partition]bool{}
	for _, s := range x.shards {
		s.count(&c, partitions)
	}
	c.partitions = int64(len(partitions))
	return c
}

// count adds what a shard has. partitions are those that have workers.
func (x *shard) count(c *census, partitions map[event.Partition]bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	c.applied.add(&x.did)
	for _, s := range x.sources {
		if !s.part.served {
			c.elsewhere++
			continue
		}
		c.sources++
		if s.gaps > 0 {
			c.uncertain++
		}
		if s.diverged {
			c.diverged++
		}
		for t, d := range s.digests {
			c.blocks[event.Tier(t).String()] += int64(d.Count)
		}
	}
	for name, p := range *x.now().partitions.Load() {
		if p.open.Load() {
			partitions[name] = true
		}
		c.workers += int64(len(p.instances))
		st := p.index.Stats()
		c.unique += int64(st.Blocks)
		c.bytes += int64(st.Bytes)
	}
}
