package main

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// TestReshardInterrupted begins where an earlier attempt ended, and has all records
// after, in the order of each source, whichever number is wanted now.
func TestReshardInterrupted(t *testing.T) {
	for _, test := range []struct {
		name   string
		aside  bool // the log in one stream
		half   bool // the one in two streams is there, and has nothing but half of a copy
		copied bool // or all
	}{
		{"not at all", false, false, false},
		{"before it made streams", true, false, false},
		{"while it copied", true, true, false},
		{"while it deleted", true, false, true},
	} {
		for _, to := range []int{1, 2, 3} {
			t.Run(fmt.Sprint(test.name, ", to ", to), func(t *testing.T) {
				l := newLooseLog(t)
				one, two := event.Log{Stream: "KV", Shards: 1}, event.Log{Stream: "KV", Shards: 2}
				l.create(one, false, nil)
				want := l.fill(one, 40)
				if test.aside {
					l.create(one, true, nil)
				}
				switch {
				case test.half:
					l.create(two, false, nil)
					l.fill(two, 7)
				case test.copied:
					l.create(two, false, map[string]string{copied: "KV"})
					l.fill(two, 40)
				}
				if test.aside {
					for shards := range 3 {
						if out, err := command(t, "check", "--nats", l.url, "--server", "", "--log-shards", fmt.Sprint(shards)); err == nil {
							t.Errorf("check of %d finds nothing:\n%s", shards, out)
						} else {
							mustContain(t, out, "put aside by kvmesh reshard")
						}
					}
				}
				if out, err := command(t, "reshard", "--nats", l.url, "--log-shards", fmt.Sprint(to)); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				l.check(event.Log{Stream: "KV", Shards: to}, want)
			})
		}
	}
}

// TestReshardOfTwoLogs has two logs that both take records. Neither may be lost.
func TestReshardOfTwoLogs(t *testing.T) {
	l := newLooseLog(t)
	two, three := event.Log{Stream: "KV", Shards: 2}, event.Log{Stream: "KV", Shards: 3}
	l.create(two, false, nil)
	l.create(three, false, map[string]string{copied: "KV"}) // as an earlier reshard has marked it
	l.fill(two, 3)
	want := l.fill(three, 40)
	for _, to := range []int{1, 2, 3} {
		if out, err := command(t, "reshard", "--nats", l.url, "--log-shards", fmt.Sprint(to)); err == nil {
			t.Errorf("to %d: %s", to, out)
		}
	}
	for shard := range two.Shards {
		if err := l.js.DeleteStream(t.Context(), two.Name(shard)); err != nil {
			t.Fatal(err)
		}
	}
	l.check(three, want)
}

// TestReshardOfCutLog has a log that has lost its beginning, which those who read the
// copy have to see too.
func TestReshardOfCutLog(t *testing.T) {
	l := newLooseLog(t)
	l.create(event.DefaultLog(), false, nil)
	l.fill(event.DefaultLog(), 40)
	stream, err := l.js.Stream(t.Context(), "KV")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(10)); err != nil {
		t.Fatal(err)
	}
	for _, to := range []int{2, 1} {
		if out, err := command(t, "reshard", "--nats", l.url, "--log-shards", fmt.Sprint(to)); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for shard := range to {
			stream, err := l.js.Stream(t.Context(), event.Log{Stream: "KV", Shards: to}.Name(shard))
			if err != nil {
				t.Fatal(err)
			}
			if first := stream.CachedInfo().State.FirstSeq; first < 2 {
				t.Errorf("shard %d of %d begins at %d, as if nothing were missing", shard, to, first)
			}
		}
	}
}

// TestReshardTwice has two at a time, with different numbers. No record may be lost.
func TestReshardTwice(t *testing.T) {
	l := newLooseLog(t)
	l.create(event.DefaultLog(), false, nil)
	want := l.fill(event.DefaultLog(), 40)
	done := make(chan error, 1)
	for range 3 {
		began := make(chan struct{})
		go func() {
			close(began)
			_, err := command(t, "reshard", "--nats", l.url, "--log-shards", "2")
			done <- err
		}()
		<-began
		_, err := command(t, "reshard", "--nats", l.url, "--log-shards", "3")
		for _, err := range []error{err, <-done} {
			if err != nil && !strings.Contains(err.Error(), "another kvmesh reshard is at work") {
				t.Error(err)
			}
		}
	}
	if out, err := command(t, "reshard", "--nats", l.url, "--log-shards", "4"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	l.check(event.Log{Stream: "KV", Shards: 4}, want)
}

func TestReshardOfNoFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "mistyped")
	out, err := command(t, "reshard", "--data-dir", dir, "--log-shards", "2")
	if err == nil {
		t.Errorf("a directory without a log: %s", out)
	}
}

// looseLog is streams of logs, with records of which only the order matters.
type looseLog struct {
	t   *testing.T
	url string
	js  jetstream.JetStream
}

func newLooseLog(t *testing.T) *looseLog {
	l := &looseLog{t: t, url: startNATS(t)}
	nc, err := nats.Connect(l.url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	if l.js, err = jetstream.New(nc); err != nil {
		t.Fatal(err)
	}
	return l
}

// create makes the streams of a log, or changes them.
func (l *looseLog) create(log event.Log, aside bool, metadata map[string]string) {
	l.t.Helper()
	for shard := range log.Shards {
		config := log.Config(shard, 1)
		config.Metadata = metadata
		if aside {
			config.Subjects = event.Aside(config.Name)
		}
		if _, err := l.js.CreateOrUpdateStream(l.t.Context(), config); err != nil {
			l.t.Fatal(err)
		}
	}
}

// fill publishes n records of several sources, and returns them by source.
func (l *looseLog) fill(log event.Log, n int) map[event.Source][]string {
	l.t.Helper()
	out := map[event.Source][]string{}
	for i := range n {
		s := event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i%8)}
		if _, err := l.js.Publish(l.t.Context(), log.Subject(s), fmt.Append(nil, i)); err != nil {
			l.t.Fatal(err)
		}
		out[s] = append(out[s], fmt.Sprint(i))
	}
	return out
}

// check looks whether there is nothing but a log with the given records.
func (l *looseLog) check(log event.Log, want map[event.Source][]string) {
	l.t.Helper()
	taking, aside, err := event.LogStreams(l.t.Context(), l.js)
	if err != nil || len(taking) != log.Shards || len(aside) > 0 {
		l.t.Fatalf("streams %v, aside %v, %v", taking, aside, err)
	}
	got := map[event.Source][]string{}
	for shard := range log.Shards {
		stream, err := log.Open(l.t.Context(), l.js, shard, 1)
		if err != nil {
			l.t.Fatal(err)
		}
		state := stream.CachedInfo().State
		for seq := state.FirstSeq; seq <= state.LastSeq; seq++ {
			msg, err := stream.GetMsg(l.t.Context(), seq)
			if err != nil {
				l.t.Fatal(err)
			}
			s, err := log.Parse(msg.Subject)
			if err != nil {
				l.t.Fatal(err)
			}
			got[s] = append(got[s], string(msg.Data))
		}
	}
	if !maps.EqualFunc(got, want, slices.Equal) {
		l.t.Errorf("records %v\nwant %v", got, want)
	}
}
