package bridge_test

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/bridge"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/mock"
)

// BenchmarkBatches measures the way from an engine's socket to the log: 64 engines,
// batches of about 1 KB, JetStream on disk in this process. Paced at 10,000 batches a
// second hardly any are joined; unpaced nearly all are. Besides the bridge the CPU
// time has the server's share, and what the engines need to send.
func BenchmarkBatches(b *testing.B) {
	for _, bc := range []struct {
		name string
		rate float64
	}{{"paced", 10_000}, {"unpaced", 0}} {
		b.Run(bc.name, func(b *testing.B) {
			r := newRig(b)
			fleet, err := mock.NewFleet(mock.FleetOptions{Engines: 64, Replay: true, Rate: bc.rate, Batches: b.N})
			if err == nil {
				err = fleet.Start()
			}
			if err != nil {
				b.Fatal(err)
			}
			defer fleet.Stop()
			e := r.bridge(func(c *bridge.Config) { *c = bridge.Default("bench") })
			for _, m := range fleet.Members {
				e.Set(event.Worker{Source: event.Source{Model: "m", Group: "g", Instance: m.Instance}, Endpoint: m.Addr(), ReplayEndpoint: m.ReplayAddr(), Engine: "vllm", BlockSize: 16})
				if err := m.WaitSubscribers(r.ctx, 1); err != nil {
					b.Fatal(err)
				}
			}
			if err := fleet.Prepare(b.N); err != nil {
				b.Fatal(err)
			}
			records, cpu := e.count("kvmesh.bridge.records"), cpuTime()
			b.ResetTimer()
			if err := fleet.Run(context.Background()); err != nil {
				b.Fatal(err)
			}
			r.await("all is applied", func() bool { return e.count("kvmesh.bridge.batches") == int64(b.N) })
			b.StopTimer()
			b.ReportMetric(float64((cpuTime()-cpu).Nanoseconds())/1e3/float64(b.N), "cpu-us/batch")
			b.ReportMetric(float64(e.count("kvmesh.bridge.records")-records)/float64(b.N), "records/batch")
			e.stop()
		})
	}
}

// BenchmarkRecords measures what a record costs that holds one batch: each of 64
// engines publishes one, and the next when all are in the log.
func BenchmarkRecords(b *testing.B) {
	r := newRig(b)
	fleet, err := mock.NewFleet(mock.FleetOptions{Engines: 64, Replay: true})
	if err == nil {
		err = fleet.Start()
	}
	if err != nil {
		b.Fatal(err)
	}
	defer fleet.Stop()
	e := r.bridge(func(c *bridge.Config) { *c = bridge.Default("bench") })
	for _, m := range fleet.Members {
		e.Set(event.Worker{Source: event.Source{Model: "m", Group: "g", Instance: m.Instance}, Endpoint: m.Addr(), ReplayEndpoint: m.ReplayAddr(), Engine: "vllm", BlockSize: 16})
		if err := m.WaitSubscribers(r.ctx, 1); err != nil {
			b.Fatal(err)
		}
	}
	if err := fleet.Prepare(b.N); err != nil {
		b.Fatal(err)
	}
	r.await("all have begun", func() bool { return e.count("kvmesh.bridge.records") >= 64 })
	fleet.Pace(0, 0)
	before, cpu := e.count("kvmesh.bridge.records"), cpuTime()
	b.ResetTimer()
	for sent := 0; sent < b.N; sent = int(fleet.Sent()) {
		fleet.Pace(0, min(sent+64, b.N))
		if err := fleet.Run(context.Background()); err != nil {
			b.Fatal(err)
		}
		for e.count("kvmesh.bridge.records")-before < int64(fleet.Sent()) {
			time.Sleep(time.Millisecond)
		}
	}
	b.StopTimer()
	b.ReportMetric(float64((cpuTime()-cpu).Nanoseconds())/1e3/float64(b.N), "cpu-us/batch")
	e.stop()
}

// cpuTime returns the CPU time that this process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
