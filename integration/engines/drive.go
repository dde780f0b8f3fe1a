package engines

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/workload"
)

// Load is sessions that a fleet runs by itself, each on a worker of its own.
type Load struct {
	Rate     float64 // requests a second over the fleet
	Sessions int     // that are open at a time
}

// Drive runs sessions until ctx ends. It waits for what runs, and returns how
// many requests failed, those that ctx or a fault ended left out.
func (f *Fleet) Drive(ctx context.Context, g *workload.Generator, load Load) (failed uint64) {
	if load.Rate <= 0 || load.Sessions <= 0 {
		<-ctx.Done()
		return 0
	}
	turns := make(chan *workload.Session)
	back := make(chan *workload.Session, load.Sessions)
	var mu sync.Mutex
	var tasks sync.WaitGroup
	next := uint64(0)
	for range load.Sessions {
		back <- g.Session(next)
		next++
	}
	for range min(load.Sessions, 256) {
		tasks.Go(func() {
			for s := range turns {
				turn, ok := s.Next()
				if !ok {
					mu.Lock()
					s = g.Session(next)
					next++
					mu.Unlock()
					turn, _ = s.Next()
				}
				err := f.run(ctx, turn)
				if err != nil && ctx.Err() == nil && !errors.Is(err, ErrRestarted) {
					mu.Lock()
					failed++
					mu.Unlock()
				}
				back <- s
			}
		})
	}
	pace(ctx, load.Rate, func() bool {
		select {
		case s := <-back:
			turns <- s
			return true
		default: // all are busy
			return false
		}
	})
	close(turns)
	tasks.Wait()
	return failed
}

// run runs a turn on the worker of its session.
func (f *Fleet) run(ctx context.Context, turn workload.Turn) error {
	rng := rand.New(rand.NewPCG(turn.Session, 1))
	_, err := f.Workers[rng.IntN(len(f.Workers))].Generate(ctx, Job{
		Prompt: cache.Prompt{Tokens: workload.Tokens(turn.Prompt)}, Output: turn.Output.Append(nil),
	})
	return err
}

// pace calls f so many times a second until ctx ends. What f refuses is not made
// up for.
func pace(ctx context.Context, rate float64, f func() bool) {
	tick := time.NewTicker(max(time.Millisecond, time.Duration(float64(time.Second)/rate)))
	defer tick.Stop()
	began, done := time.Now(), 0
	for {
		select {
		case now := <-tick.C:
			due := int(now.Sub(began).Seconds() * rate)
			for ; done < due && ctx.Err() == nil; done++ {
				if !f() {
					done = due
					break
				}
			}
		case <-ctx.Done():
			return
		}
	}
}

// Plan is a fault that befalls one worker after the other, at random.
type Plan struct {
	Fault Fault
	Every time.Duration
	Among int // how many workers it may befall, the first ones; 0: all
}

// ParsePlan reads kind[:count]=interval, or stall:duration=interval.
func ParsePlan(text string) (Plan, error) {
	bad := func(why string) (Plan, error) {
		return Plan{}, fmt.Errorf("%w: %q: %s; want kind[:count]=interval, such as drop:3=500ms or stall:1s=10s", ErrFault, text, why)
	}
	what, every, ok := strings.Cut(text, "=")
	if !ok {
		return bad("no interval")
	}
	var p Plan
	var err error
	if p.Every, err = time.ParseDuration(every); err != nil || p.Every <= 0 {
		return bad("bad interval")
	}
	kind, number, more := strings.Cut(what, ":")
	p.Fault.Kind = kind
	known := false
	for _, k := range Faults() {
		known = known || k == kind
	}
	switch {
	case !known:
		return bad("no such fault, there are " + strings.Join(Faults(), ", "))
	case kind == Stall:
		if p.Fault.Duration, err = time.ParseDuration(number); err != nil || p.Fault.Duration <= 0 {
			return bad("a stall needs a duration")
		}
	case more:
		if p.Fault.Count, err = strconv.Atoi(number); err != nil || p.Fault.Count < 1 {
			return bad("bad count")
		}
	}
	return p, nil
}

// Torment makes the faults of plans happen until ctx ends. The same seed picks the
// same workers. Faults that can not happen just then are left out.
func (f *Fleet) Torment(ctx context.Context, plans []Plan, seed uint64) {
	var tasks sync.WaitGroup
	for i, p := range plans {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		among := len(f.Workers)
		if p.Among > 0 {
			among = min(among, p.Among)
		}
		tasks.Go(func() {
			tick := time.NewTicker(p.Every)
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
					f.Workers[rng.IntN(among)].Fail(p.Fault)
				case <-ctx.Done():
					return
				}
			}
		})
	}
	tasks.Wait()
}
