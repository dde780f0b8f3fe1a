package event_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/hub"
)

// logs are a log in one stream, and split ones.
func logs() []event.Log {
	one := event.DefaultLog()
	return []event.Log{one, {Stream: one.Stream, Shards: 2}, {Stream: one.Stream, Shards: 4}, {Stream: one.Stream, Shards: event.MaxShards}}
}

func TestSubjectsTellNamesApart(t *testing.T) {
	names := []string{"api.b", "api_b", "api/b", "api b", "api-b", "7", "8", "api%2Eb", "api=2Eb", "", "=", "*", ">", "a*", "ü", "\x00", "org/Model-7B v2.1 (fp8)", strings.Repeat("x", event.MaxName)}
	for _, l := range logs() {
		tokens := 5
		if l.Shards > 1 {
			tokens = 7
		}
		seen := map[string]event.Source{}
		for _, model := range names {
			for _, instance := range names {
				s := event.Source{Model: model, Group: "default", Instance: instance, Rank: 3}
				subject := l.Subject(s)
				if other, ok := seen[subject]; ok {
					t.Fatalf("%+v and %+v share %q", s, other, subject)
				}
				seen[subject] = s
				if strings.Count(subject, ".") != tokens-1 || strings.ContainsAny(subject, " *>\t\x00%") {
					t.Errorf("%+v: subject %q is not %d plain tokens", s, subject, tokens)
				}
				if got, err := l.Parse(subject); err != nil || got != s {
					t.Errorf("%q: got %+v, error %v", subject, got, err)
				}
				if prefix := strings.TrimSuffix(l.Config(l.Shard(s), 1).Subjects[0], ">"); !strings.HasPrefix(subject, prefix) {
					t.Errorf("%q is not in the stream of its shard, %q", subject, prefix)
				}
				for _, other := range logs() {
					if got, err := other.Parse(subject); other != l && !errors.Is(err, event.ErrSubject) {
						t.Errorf("%q in a log of %d: got %+v, error %v", subject, other.Shards, got, err)
					}
				}
			}
		}
	}
}

func TestSubjectsOfNobody(t *testing.T) {
	split := event.Log{Stream: "KV", Shards: 4}
	at := split.Shard(event.Source{Model: "a", Group: "b", Instance: "c", Rank: 1})
	for _, s := range []string{"", "kv", "kv.a.b.c", "kv.a.b.c.d", "kv.a.b.c.1.2", "kw.a.b.c.1", "kv.a.b.c.-1", "kv.a.b.c.01", "kv.a.b.c.4294967296", "kv.a.b..1", "kv.a.b.=4.1", "kv.a.b.=zz.1", "kv.a.b.=61.1", "kv.a.b.c d.1", "kv.a.b.=2e.1"} {
		if got, err := event.DefaultLog().Parse(s); !errors.Is(err, event.ErrSubject) {
			t.Errorf("%q: got %+v, error %v, want ErrSubject", s, got, err)
		}
		if rest, ok := strings.CutPrefix(s, "kv"); ok {
			if got, err := split.Parse(fmt.Sprintf("kv.4.%d%s", at, rest)); !errors.Is(err, event.ErrSubject) {
				t.Errorf("%q in shard %d: got %+v, error %v, want ErrSubject", s, at, got, err)
			}
		}
	}
	for _, s := range []string{"kv.a.b.c.1", "kv.4", "kv.4.0", fmt.Sprintf("kv.4.%d.a.b.c.1", (at+1)%4), fmt.Sprintf("kv.04.%d.a.b.c.1", at), fmt.Sprintf("kv.4.0%d.a.b.c.1", at), "kv.4.4.a.b.c.1", "kv.4..a.b.c.1"} {
		if got, err := split.Parse(s); !errors.Is(err, event.ErrSubject) {
			t.Errorf("%q: got %+v, error %v, want ErrSubject", s, got, err)
		}
	}
}

// Which shard has a source is written into subjects, so it must never be another
// one. All ranks of an instance are in one, and instances spread.
func TestShardsOfSources(t *testing.T) {
	l := event.Log{Stream: "KV", Shards: 4}
	for instance, want := range map[string]int{"w0": 2, "w1": 2, "w2": 1, "api.b": 0, "ü": 1} {
		if got := l.Shard(event.Source{Model: "org/m", Group: "default", Instance: instance}); got != want {
			t.Errorf("%s is in shard %d, want %d", instance, got, want)
		}
	}
	for _, l := range logs() {
		count := make([]int, l.Shards)
		const each = 200
		for i := range each * l.Shards {
			s := event.Source{Model: "m", Group: "default", Instance: fmt.Sprint("w", i)}
			shard := l.Shard(s)
			for s.Rank = range uint32(9) {
				if got := l.Shard(s); got != shard {
					t.Fatalf("rank %d of %s is in shard %d, rank 0 in %d", s.Rank, s.Instance, got, shard)
				}
			}
			count[shard]++
		}
		for shard, n := range count {
			if n < each/2 || n > each*2 {
				t.Errorf("shard %d of %d has %d instances, want about %d", shard, l.Shards, n, each)
			}
		}
	}
}

func TestLogIsValid(t *testing.T) {
	for _, l := range logs() {
		if err := l.Validate(); err != nil {
			t.Errorf("%+v: %v", l, err)
		}
	}
	for _, l := range []event.Log{{}, {Shards: 1}, {Stream: "KV"}, {Stream: "KV", Shards: -1}, {Stream: "KV", Shards: event.MaxShards + 1}} {
		if l.Validate() == nil {
			t.Errorf("%+v is valid", l)
		}
	}
}

// Whoever opens a log that is split otherwise is told so, and makes nothing.
func TestLogsAreNotMixed(t *testing.T) {
	for _, there := range logs()[:3] {
		t.Run(fmt.Sprint(there.Shards, " there"), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			nats := hub.New(t.TempDir(), 0)
			if err := nats.Start(); err != nil {
				t.Fatal(err)
			}
			defer nats.Stop()
			nc, js, err := hub.Connect(nats)
			if err != nil {
				t.Fatal(err)
			}
			defer nc.Close()
			names := func() (out []string) {
				list := js.StreamNames(ctx)
				for name := range list.Name() {
					out = append(out, name)
				}
				if err := list.Err(); err != nil {
					t.Fatal(err)
				}
				return out
			}
			last := there.Shards - 1 // one of them is enough
			for range 2 {
				stream, err := there.Open(ctx, js, last, 1)
				if err != nil {
					t.Fatal(err)
				}
				if name := stream.CachedInfo().Config.Name; name != there.Name(last) {
					t.Errorf("stream %s, want %s", name, there.Name(last))
				}
			}
			for _, other := range logs() {
				if other == there {
					continue
				}
				_, err := other.Open(ctx, js, 0, 1)
				if !errors.Is(err, event.ErrLog) || !strings.Contains(err.Error(), "--log-shards") || !strings.Contains(err.Error(), there.Name(last)) {
					t.Errorf("opened as one of %d: %v", other.Shards, err)
				}
			}
			if got := names(); len(got) != 1 {
				t.Errorf("streams %v", got)
			}
			// A stream with the name of one, and other subjects, is none.
			if err := js.DeleteStream(ctx, there.Name(last)); err != nil {
				t.Fatal(err)
			}
			if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: there.Name(0), Subjects: []string{"something"}}); err != nil {
				t.Fatal(err)
			}
			if _, err := there.Open(ctx, js, 0, 1); !errors.Is(err, event.ErrLog) {
				t.Errorf("opened with other subjects: %v", err)
			}
		})
	}
}

func TestNamesOfStreams(t *testing.T) {
	for _, l := range logs() {
		for shard := range l.Shards {
			if got, n, ok := event.LogOf(l.Name(shard)); got != l || n != shard || !ok {
				t.Errorf("%s: shard %d of %v, %v", l.Name(shard), n, got, ok)
			}
		}
	}
	for _, name := range []string{"", "KV-", "KV-1-0", "KV-2", "KV-2-2", "KV-2--1", "KV-2-01", "KV-02-0", "KV-65-0", "KV-2-0-0", "KV-+2-0", "kv", "KV_0"} {
		if l, shard, ok := event.LogOf(name); ok {
			t.Errorf("%s: shard %d of %v", name, shard, l)
		}
	}
}
