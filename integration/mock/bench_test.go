package mock

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// cpu is the processor time of the process so far.
func cpu() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkPUB measures messages of 1 KB from sockets with one subscriber each,
// as fast as they go and at 40,000 a second over all. The processor time is that
// of both ends.
func BenchmarkPUB(b *testing.B) {
	for _, impl := range []string{PUBRaw, PUBZMQ4} {
		for _, sockets := range []int{1, 64} {
			for _, rate := range []int{0, 40_000} {
				name := "max"
				if rate > 0 {
					name = fmt.Sprint(rate)
				}
				b.Run(fmt.Sprintf("%s/sockets=%d/rate=%s", impl, sockets, name), func(b *testing.B) {
					benchmarkPUB(b, impl, sockets, rate)
				})
			}
		}
	}
}

func benchmarkPUB(b *testing.B, impl string, sockets, rate int) {
	var engines []*Engine
	var read atomic.Int64
	var readers sync.WaitGroup
	for range sockets {
		e, err := NewEngine(Options{PUB: impl, Topic: "kv-events", Ring: 1})
		if err != nil {
			b.Fatal(err)
		}
		if err := e.Start(); err != nil {
			b.Fatal(err)
		}
		defer e.Stop()
		s := mustSub(b, e.Addr(), "")
		if err := e.WaitSubscribers(context.Background(), 1); err != nil {
			b.Fatal(err)
		}
		engines = append(engines, e)
		readers.Go(func() {
			for s.skip(1) == nil {
				read.Add(1)
			}
		})
		defer s.Close()
	}
	payload := make([]byte, 1000)
	b.ReportAllocs()
	start, spent, sent := time.Now(), cpu(), 0
	for b.Loop() {
		engines[sent%sockets].PublishRaw(payload, Sent)
		sent++
		if sent%64 != 0 {
			continue
		}
		for int64(sent)-read.Load() > 20_000 {
			time.Sleep(100 * time.Microsecond)
		}
		if ahead := time.Duration(sent)*time.Second/time.Duration(max(rate, 1)) - time.Since(start); rate > 0 && ahead > 0 {
			time.Sleep(ahead)
		}
	}
	for int(read.Load()) < sent {
		time.Sleep(100 * time.Microsecond)
	}
	b.ReportMetric(float64((cpu()-spent).Nanoseconds())/float64(sent), "cpu-ns/msg")
	b.ReportMetric(float64(sent)/time.Since(start).Seconds(), "msg/s")
}
