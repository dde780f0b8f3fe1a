package load

import (
	"context"
	"strconv"
	"testing"
)

// filled returns a Shared with n reservations, and what it tells of them.
func filled(b *testing.B, n int) (*Shared, *recorder) {
	b.Helper()
	out := &recorder{}
	s, err := New(out, testConfig(), Options{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range n {
		if err := s.Reserve(Booking{ID: "reservation-" + strconv.Itoa(i), Worker: worker(i % 1024), PrefillTokens: 1000, Blocks: 128}); err != nil {
			b.Fatal(err)
		}
	}
	s.flush()
	out.sent = nil
	return s, out
}

// BenchmarkState: bookings wait while a state of 10,000 reservations is taken down.
func BenchmarkState(b *testing.B) {
	s, _ := filled(b, 10000)
	for b.Loop() {
		s.mu.Lock()
		s.state(s.self)
		s.mu.Unlock()
	}
}

// BenchmarkRestore: and while one is taken in.
func BenchmarkRestore(b *testing.B) {
	s, out := filled(b, 10000)
	s.answer("x")
	for b.Loop() {
		other, err := New(out, testConfig(), Options{})
		if err != nil {
			b.Fatal(err)
		}
		for _, data := range out.sent {
			other.take(data)
		}
		if sum, _, _ := other.Total(); sum.Requests != 10000 {
			b.Fatalf("%d reservations", sum.Requests)
		}
	}
}

// BenchmarkReserve: booking and freeing, told to the others.
func BenchmarkReserve(b *testing.B) {
	s, out := filled(b, 0)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		id := strconv.Itoa(i)
		if err := s.Reserve(Booking{ID: id, Worker: worker(3), PrefillTokens: 1000, Blocks: 128}); err != nil {
			b.Fatal(err)
		}
		if err := s.Free(context.Background(), id); err != nil {
			b.Fatal(err)
		}
		if i%100 == 0 {
			s.flush()
			out.sent = out.sent[:0]
		}
	}
}
