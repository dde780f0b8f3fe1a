package main

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// The garbage collector lets the heap grow by a share of what is live. Most of what
// is live in a bridge is tables of blocks, without a pointer, which cost nothing to
// look through; so a bridge has it run when there is so much garbage, whatever it
// holds.
const (
	garbage      = 24 << 20
	leastPercent = 5
	lookInterval = time.Second
)

// boundGarbage bounds the garbage that the process has, until ctx ends, unless the
// environment says how the collector is to work.
func boundGarbage(ctx context.Context) error {
	if os.Getenv("GOGC") != "" {
		return nil
	}
	before := debug.SetGCPercent(100)
	defer debug.SetGCPercent(before)
	tick := time.NewTicker(lookInterval)
	defer tick.Stop()
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	now := 100
	for {
		metrics.Read(live)
		want := percentOf(live[0].Value.Uint64())
		if diff := want - now; diff > now/10 || -diff > now/10 { // it stops the world
			debug.SetGCPercent(want)
			now = want
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// percentOf returns the share of so many live bytes that garbage may be.
func percentOf(live uint64) int {
	return int(min(100, max(leastPercent, garbage*100/max(1, live))))
}
