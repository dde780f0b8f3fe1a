package measure

import (
	"bytes"
	"errors"
	"hash/crc64"
	"net"
	"os"
	"runtime/pprof"
	"slices"
	"testing"
	"time"
)

func TestOf(t *testing.T) {
	before, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if before.Threads < 1 || before.RSS < 1<<20 || before.FDs < 3 {
		t.Errorf("this process is %+v", before)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	spend(300 * time.Millisecond)
	after, err := Of(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if after.Sockets <= before.Sockets || after.CPU-before.CPU < 200*time.Millisecond {
		t.Errorf("%+v, then a socket more and 300 ms later %+v", before, after)
	}
	if _, err := Of(1 << 30); err == nil {
		t.Error("a process that is not there is no error")
	}
}

func TestDialled(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	port := ln.Addr().(*net.TCPAddr).Port
	count := func(ports map[int]bool) int {
		n, err := Dialled(ports)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	if n := count(map[int]bool{port: true}); n != 0 {
		t.Errorf("%d connections, and nobody has dialled", n)
	}
	for range 3 {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	if n := count(map[int]bool{port: true}); n != 3 {
		t.Errorf("%d connections, want 3", n)
	}
	if n := count(map[int]bool{}); n != 0 {
		t.Errorf("%d connections to no port", n)
	}
}

// spend uses so much processor time, at a place of its own.
//
//go:noinline
func spend(d time.Duration) (sum uint64) {
	table := crc64.MakeTable(crc64.ISO)
	data := make([]byte, 1<<16)
	before, err := Of(os.Getpid())
	for err == nil {
		for range 200 {
			sum += crc64.Checksum(data, table)
		}
		var now Process
		if now, err = Of(os.Getpid()); now.CPU-before.CPU >= d {
			break
		}
	}
	return sum
}

func TestProfile(t *testing.T) {
	var buf bytes.Buffer
	if err := pprof.StartCPUProfile(&buf); err != nil {
		t.Fatal(err)
	}
	spend(500 * time.Millisecond)
	pprof.StopCPUProfile()
	p, err := Parse(buf.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	got := p.Split([]Rule{{"sums", []string{"crc64."}}, {"outer", []string{"measure.spend", "measure.Of"}}})
	if got["sums"] < 0.05 || got["sums"] < got["outer"] { // the race detector's own time has no stack
		t.Errorf("shares %v, want most of the time in the sums", got)
	}
	total := 0.0
	for _, share := range got {
		total += share
	}
	if total < 0.999 || total > 1.001 {
		t.Errorf("shares add up to %v", total)
	}
	// Without a rule for them the sums are their caller's.
	if again := p.Split([]Rule{{"outer", []string{"measure.spend", "measure.Of"}}}); again["outer"] < 0.999*(got["sums"]+got["outer"]) || again["sums"] != 0 {
		t.Errorf("without the inner rule: %v", again)
	}
	raw := buf.Bytes()
	for _, bad := range [][]byte{[]byte("text"), raw[:len(raw)/2], {0x12, 0xff, 0xff}, {0x12, 0x7f, 0}, {0x0b}} {
		if _, err := Parse(bad); !errors.Is(err, ErrProfile) {
			t.Errorf("%.10x: error is %v, want ErrProfile", bad, err)
		}
	}
	if _, err := Parse(nil); err != nil || !slices.Equal(raw, buf.Bytes()) {
		t.Errorf("an empty profile: %v", err)
	}
}
