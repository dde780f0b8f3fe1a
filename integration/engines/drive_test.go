package engines

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// TestDrive runs a fleet by itself, with faults that cost no batch. Whoever
// follows it and heeds restarts knows what it holds.
func TestDrive(t *testing.T) {
	f := start(t, Options{Engines: 3, Cache: cache.Options{Device: 2000, Host: 1000}})
	var readers []*reader
	for _, w := range f.Workers {
		readers = append(readers, follow(t, f, w))
	}
	g, err := workload.New(workload.Default())
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan uint64)
	go func() { ended <- f.Drive(ctx, g, Load{Rate: 2000, Sessions: 20}) }()
	tormented := make(chan struct{})
	go func() {
		f.Torment(ctx, []Plan{
			{Fault: Fault{Kind: Stall, Duration: time.Millisecond}, Every: 2 * time.Millisecond},
			{Fault: Fault{Kind: Clear}, Every: time.Millisecond, Among: 2},
		}, 1)
		close(tormented)
	}()
	eventually(t, "requests", func() bool { s := f.Totals(); return s.Requests > 200 && s.CachedDevice > 0 })
	stop()
	if failed := <-ended; failed > 0 {
		t.Errorf("%d requests failed", failed)
	}
	<-tormented
	eventually(t, "stalls", f.Settled)
	for i, w := range f.Workers {
		eventually(t, "batches", func() bool { return uint64(len(readers[i].seen())) == w.Engine.Next() })
		if got, want := readers[i].digests(), w.Digests(); got != want {
			t.Errorf("%s: announced %v, held %v", w.Instance, got, want)
		}
	}
}

func TestParsePlan(t *testing.T) {
	for text, want := range map[string]Plan{
		"drop=1s":          {Fault: Fault{Kind: Drop}, Every: time.Second},
		"lose:3=50ms":      {Fault: Fault{Kind: Lose, Count: 3}, Every: 50 * time.Millisecond},
		"stall:200ms=1m":   {Fault: Fault{Kind: Stall, Duration: 200 * time.Millisecond}, Every: time.Minute},
		"overflow:100=10s": {Fault: Fault{Kind: Overflow, Count: 100}, Every: 10 * time.Second},
	} {
		if got, err := ParsePlan(text); err != nil || got != want {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "drop", "drop=", "drop=-1s", "rust=1s", "drop:0=1s", "drop:x=1s", "stall=1s", "stall:3=1s"} {
		if _, err := ParsePlan(text); !errors.Is(err, ErrFault) {
			t.Errorf("%q: error is %v, want ErrFault", text, err)
		}
	}
}
