package feed

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/vmihailenco/msgpack/v5"
	"go.uber.org/goleak"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	name    = event.Source{Model: "m", Group: "default", Instance: "i", Rank: 0}
	subject = event.DefaultLog().Subject(name)
)

// a, b and c are the sequence hashes of a prompt of three blocks, x of another.
var (
	a = uint64(11)
	b = hash.Next(a, 12)
	c = hash.Next(b, 13)
	x = uint64(21)
)

// sums returns the digest operation of blocks in the device tier.
func sums(seqs ...uint64) []byte {
	var d event.Digests
	for _, seq := range seqs {
		d[event.Device].Add(1, event.Mix(seq, event.Salt(event.Device)))
	}
	return event.AppendDigest(nil, &d)
}

func store(parent uint64, locals ...uint64) []byte {
	run := event.Run{Parent: parent, Root: parent == 0, Locals: locals}
	return event.AppendStored(nil, event.Device, "", run, nil)
}

func remove(seqs ...uint64) []byte {
	return event.AppendRemoved(nil, event.Device, "", seqs, event.Group{}, nil)
}

func fresh() []byte { return event.AppendReset(nil, event.ReasonNew) }

// chunk is a checkpoint of one run from the root.
func chunk(at, of int, locals ...uint64) []byte {
	return event.AppendRun(event.AppendCheckpoint(nil, at, of, event.Device, "", 1), event.Run{Root: true, Locals: locals}, nil)
}

// rec is a record about one batch.
func rec(incarnation, batch uint64, ops ...[]byte) []byte {
	return event.AppendRecord(nil, event.Header{Incarnation: incarnation, Batches: true, First: batch, Last: batch, TS: 1.5}, len(ops), ops...)
}

// begun is a record inside batch: the one before is complete.
func begun(batch uint64, ops ...[]byte) []byte {
	h := event.Header{Incarnation: 5, Batches: batch > 0, First: batch, Last: batch - 1, Partial: true}
	return event.AppendRecord(nil, h, len(ops), ops...)
}

func TestRecordsAddUp(t *testing.T) {
	for _, tc := range []struct {
		name string
		log  [][]byte
		want []uint64
	}{
		{"a chain", [][]byte{rec(5, 0, fresh(), store(0, 11, 12), sums(a, b)), rec(5, 1, store(b, 13), sums(a, b, c))}, []uint64{a, b, c}},
		{"a removal", [][]byte{rec(5, 0, fresh(), store(0, 11, 12), sums(a, b)), rec(5, 1, remove(a), sums(b))}, []uint64{b}},
		{"stored twice", [][]byte{rec(5, 0, fresh(), store(0, 11), store(0, 11), sums(a))}, []uint64{a}},
		{"cleared", [][]byte{rec(5, 0, fresh(), store(0, 11), event.AppendCleared(nil, event.Device.Mask(), ""), store(0, 21), sums(x))}, []uint64{x}},
		{"another tier cleared", [][]byte{rec(5, 0, fresh(), store(0, 11), event.AppendCleared(nil, event.Host.Mask(), ""), sums(a))}, []uint64{a}},
		{"a restart", [][]byte{rec(5, 7, fresh(), store(0, 11), sums(a)), rec(6, 0, event.AppendReset(nil, event.ReasonRestart), store(0, 21), sums(x))}, []uint64{x}},
		{"retired", [][]byte{rec(5, 0, fresh(), store(0, 11), sums(a)), rec(5, 0, event.AppendRetired(nil))}, nil},
		{"a split batch", [][]byte{begun(0, fresh(), store(0, 11)), rec(5, 0, store(a, 12), sums(a, b))}, []uint64{a, b}},
		{"a checkpoint", [][]byte{rec(5, 0, fresh(), store(0, 11, 12), sums(a, b)), rec(5, 0, chunk(0, 2, 11)), rec(5, 0, chunk(1, 2, 11, 12), sums(a, b))}, []uint64{a, b}},
		{"a checkpoint first", [][]byte{rec(5, 3, chunk(0, 1, 11), sums(a)), rec(5, 4, store(a, 12), sums(a, b))}, []uint64{a, b}},
		{"the middle of a log", [][]byte{rec(5, 3, store(c, 14), sums(1)), rec(5, 3, chunk(0, 1, 11), sums(a))}, []uint64{a}},
		{"half a checkpoint", [][]byte{rec(5, 0, fresh(), store(0, 11), sums(a)), rec(5, 0, chunk(0, 2, 21)), rec(5, 1, store(a, 12), sums(a, b)), rec(5, 1, chunk(1, 2, 21), sums(x))}, []uint64{a, b}},
		{"a batch taken back", [][]byte{rec(5, 0, fresh(), store(0, 11), sums(a)), begun(1, store(0, 21)), rec(5, 0, chunk(0, 1, 11), sums(a)), rec(5, 1, store(0, 21), sums(a, x))}, []uint64{a, x}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := NewReader()
			for i, data := range tc.log {
				if err := r.Apply(uint64(10+i), subject, data); err != nil {
					t.Fatal(err)
				}
			}
			want := map[model.Tier]map[uint64]bool{model.Device: {}}
			for _, seq := range tc.want {
				want[model.Device][seq] = true
			}
			if diff := r.Source(name).Diff(want); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestRulesAreChecked(t *testing.T) {
	good := rec(5, 3, fresh(), store(0, 11), sums(a))
	for _, tc := range []struct {
		name, want string
		log        [][]byte
	}{
		{"digest", "digest is", [][]byte{good, rec(5, 4, store(a, 12), sums(a))}},
		{"removal of nothing", "not there", [][]byte{good, rec(5, 4, remove(b))}},
		{"batch again", "which was complete", [][]byte{good, rec(5, 3, sums(a))}},
		{"batch before", "is the last one after", [][]byte{good, rec(5, 2, sums(a))}},
		{"incarnation back", "incarnation 4 after 5", [][]byte{good, rec(4, 4, sums(a))}},
		{"incarnation without reset", "without a reset", [][]byte{good, rec(6, 0, sums(a))}},
		{"batch not gone on with", "does not go on", [][]byte{good, begun(4, store(0, 21)),
			event.AppendRecord(nil, event.Header{Incarnation: 5, Batches: true, First: 4, Last: 3}, 1, sums(a, x))}},
		{"checkpoint of another state", "a checkpoint of", [][]byte{good, rec(5, 3, chunk(0, 1, 21), sums(x))}},
		{"checkpoint without digest", "0 digests", [][]byte{good, rec(5, 3, chunk(0, 1, 11))}},
		{"store in a checkpoint", "inside a checkpoint", [][]byte{good, rec(5, 3, chunk(0, 1, 11), store(a, 12), sums(a))}},
		{"checkpoint behind", "not at the beginning", [][]byte{good, rec(5, 4, store(a, 12), chunk(0, 1, 11))}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := NewReader()
			var err error
			for i, data := range tc.log {
				if err != nil {
					t.Fatalf("record %d: %v", i-1, err)
				}
				err = r.Apply(uint64(1+i), subject, data)
			}
			if !errors.Is(err, ErrRule) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestMessagesThatAreNoRecords(t *testing.T) {
	good := rec(5, 3, fresh(), store(0, 11), sums(a))
	for name, data := range map[string][]byte{
		"empty":       {},
		"huge array":  {0xdd, 0x7f, 0xff, 0xff, 0xff},
		"cut short":   good[:len(good)-1],
		"more behind": append(append([]byte{}, good...), 1),
		"version 2":   append([]byte{good[0], 2}, good[2:]...),
		"map":         {0x80},
		"bad tier":    rec(5, 4, append([]byte{0x99, 1, 9}, store(0, 11)[3:]...)),
		"short op":    rec(5, 4, []byte{0x91, 1}),
	} {
		r := NewReader()
		if err := r.Apply(1, subject, good); err != nil {
			t.Fatal(err)
		}
		if err := r.Apply(2, subject, data); !errors.Is(err, ErrRecord) {
			t.Errorf("%s: got %v, want %v", name, err, ErrRecord)
		}
	}
	if err := NewReader().Apply(1, "kv.m.default.i", good); !errors.Is(err, event.ErrSubject) {
		t.Errorf("got %v, want %v", err, event.ErrSubject)
	}
	r := NewReader()
	if err := errors.Join(r.Apply(2, subject, good), r.Apply(2, subject, good)); !errors.Is(err, ErrRule) {
		t.Errorf("the same message twice: %v", err)
	}
}

func TestElementsOfLaterVersionsAreSkipped(t *testing.T) {
	data, err := msgpack.Marshal([]any{1, 5, 3, 3, 1.5, []any{
		[]any{4, "new", "more"}, []any{99, "unknown"},
		[]any{1, 1, "owner", nil, 0, []byte{11, 0, 0, 0, 0, 0, 0, 0}, nil, nil, nil, "more"},
	}, 77, false, "more"})
	if err != nil {
		t.Fatal(err)
	}
	r := NewReader()
	if err := r.Apply(1, subject, data); err != nil {
		t.Fatal(err)
	}
	s := r.Source(name)
	if len(s.Resident()[event.Host]) != 1 || s.Fingerprint != 77 || s.Last != 3 {
		t.Errorf("got %+v", s)
	}
	var want event.Digest
	want.Add(1, event.Mix(a, event.Salt(event.Host)))
	if have := s.Digests(); !maps.Equal(have, map[event.Tier]Digest{event.Host: Digest(want)}) {
		t.Errorf("digests %v, want %v", have, want)
	}
}

func TestReadFollowsAStream(t *testing.T) {
	srv, err := server.NewServer(&server.Options{JetStream: true, StoreDir: t.TempDir(), DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	srv.Start()
	defer srv.WaitForShutdown()
	defer srv.Shutdown()
	if !srv.ReadyForConnections(30 * time.Second) {
		t.Fatal("server is not ready")
	}
	nc, err := nats.Connect("", nats.InProcessServer(srv))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r := NewReader()
	read := func() error { return r.Read(ctx, js) }
	if err := read(); err != nil || r.Seq(0) != 0 {
		t.Fatalf("no stream: %v, at %d", err, r.Seq(0))
	}
	for life := range 2 {
		_, err := js.CreateStream(ctx, event.DefaultLog().Config(0, 1))
		// The server may still be at taking away the files of the one before.
		const codeStore = 10049
		for api := (*jetstream.APIError)(nil); errors.As(err, &api) && api.ErrorCode == codeStore; time.Sleep(5 * time.Millisecond) {
			_, err = js.CreateStream(ctx, event.DefaultLog().Config(0, 1))
		}
		if err != nil {
			t.Fatal(err)
		}
		publish := func(data []byte) {
			if _, err := js.Publish(ctx, subject, data); err != nil {
				t.Fatal(err)
			}
		}
		if err := read(); err != nil || len(r.Sources()) != 0 {
			t.Fatalf("an empty stream: %v, %d sources", err, len(r.Sources()))
		}
		publish(rec(5, 0, fresh(), store(0, 11), sums(a)))
		if err := read(); err != nil {
			t.Fatal(err)
		}
		for batch := range uint64(600) {
			publish(rec(5, batch+1, sums(a)))
		}
		err = r.Until(ctx, js, func(r *Reader) bool { return r.Source(name).Last == 600 })
		if err != nil || r.Seq(0) != 601 || r.Source(name).Records != 601 {
			t.Fatalf("life %d: %v, at %d, %+v", life, err, r.Seq(0), r.Source(name))
		}
		publish(rec(5, 601, store(0, 21), sums(a)))
		if err := read(); !errors.Is(err, ErrRule) {
			t.Errorf("got %v, want %v", err, ErrRule)
		}
		if err := js.DeleteStream(ctx, "KV"); err != nil {
			t.Fatal(err)
		}
	}
}
