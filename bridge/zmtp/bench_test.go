package zmtp

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"testing"

	"github.com/go-zeromq/zmq4"
)

// blast returns a script of a publisher that writes messages with a payload of
// the given size as fast as it can, 64 KB or one message at a time.
func blast(minor byte, size int) script {
	msg := appendMessage(nil, []byte("kv-events"), binary.BigEndian.AppendUint64(nil, 7), make([]byte, size))
	chunk := repeat(msg, max(1, 64<<10/len(msg)))
	return func(c net.Conn) {
		if shake(c, minor, "PUB") != nil {
			return
		}
		if _, _, err := readFrame(c); err != nil {
			return
		}
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	}
}

func benchmarkRecv(b *testing.B, size int) {
	s := newServer(b, blast(1, size))
	c := dialPeer(b, s, Default())
	if err := c.Subscribe([]byte("kv")); err != nil {
		b.Fatal(err)
	}
	var m Message
	recv := func() {
		if err := c.Recv(&m); err != nil {
			b.Fatal(err)
		}
		if len(m.Frames) != 3 || len(m.Frames[2]) != size {
			b.Fatal("wrong message")
		}
	}
	for range 1000 {
		recv()
	}
	b.ReportAllocs()
	b.SetBytes(int64(size))
	for b.Loop() {
		recv()
	}
}

func BenchmarkRecv1KB(b *testing.B)  { benchmarkRecv(b, 1<<10) }
func BenchmarkRecv8KB(b *testing.B)  { benchmarkRecv(b, 8<<10) }
func BenchmarkRecv64KB(b *testing.B) { benchmarkRecv(b, 64<<10) }

// BenchmarkGoZeroMQ is the same with the SUB of go-zeromq, to compare with.
func BenchmarkGoZeroMQ(b *testing.B) {
	for _, size := range []int{1 << 10, 8 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("%dKB", size>>10), func(b *testing.B) {
			s := newServer(b, blast(0, size))
			sub := zmq4.NewSub(context.Background())
			defer sub.Close()
			if err := sub.Dial("tcp://" + s.addr); err != nil {
				b.Fatal(err)
			}
			if err := sub.SetOption(zmq4.OptionSubscribe, "kv"); err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			b.SetBytes(int64(size))
			for b.Loop() {
				m, err := sub.Recv()
				if err != nil || len(m.Frames) != 3 || len(m.Frames[2]) != size {
					b.Fatal("wrong message: ", err)
				}
			}
		})
	}
}

// BenchmarkIdle measures what a subscription that hears nothing costs in heap
// and stacks, beyond a bare TCP connection to the same peer.
func BenchmarkIdle(b *testing.B) {
	const n = 1024
	s := newServer(b, afterShake(nil, func(c net.Conn) { c.Read(make([]byte, 1)) }))
	bare := inUse(b, func() {
		for range n {
			c, err := net.Dial("tcp", s.addr)
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { c.Close() })
			c.Write(append(greeting(1), append(ready("SUB"), message("\x01kv")...)...))
		}
		eventually(b, "all connected", func() bool { return s.accepted.Load() == n })
	})
	for b.Loop() {
		var h recorder
		subs := inUse(b, func() {
			for range n {
				run(b, "tcp", s.addr, false, Default(), &h)
			}
			eventually(b, "all connected", h.is(func(r *recorder) bool { return len(r.connected) == n }))
		})
		b.ReportMetric((subs-bare)/n, "B/conn")
	}
}

// inUse returns how many bytes of heap and stacks f leaves in use.
func inUse(b *testing.B, f func()) float64 {
	measure := func() float64 {
		var m runtime.MemStats
		for range 3 { // stacks shrink by a half each time
			runtime.GC()
		}
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc + m.StackInuse)
	}
	before := measure()
	f()
	return measure() - before
}
