package zmtp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"
)

// hostile are peers that a subscription must survive. want is an error that
// Disconnected has to be told, any if nil.
var hostile = []badPeer{
	{"closes at once", end, nil},
	{"resets at once", reset, nil},
	{"resets behind the handshake", func(c net.Conn) {
		if shake(c, 1, "PUB") == nil {
			reset(c)
		}
	}, nil},
	{"closes behind the handshake", func(c net.Conn) { shake(c, 1, "PUB") }, nil},
	{"closes behind the subscription", afterShake(nil, cut), io.EOF},
	{"frame of 2^62 bytes", afterShake([]byte{flagLong, 0x40, 0, 0, 0, 0, 0, 0, 0}, stay), ErrFrameSize},
	{"cut in a frame, FIN", afterShake([]byte{flagMore, 9, 'k', 'v'}, cut), io.ErrUnexpectedEOF},
	{"cut in a frame, RST", afterShake([]byte{flagMore, 9, 'k', 'v'}, reset), syscall.ECONNRESET},
	{"garbage behind the handshake", afterShake(bytes.Repeat([]byte{0xa5}, 1000), stay), ErrFlags},
	{"10,000 tiny commands", afterShake(repeat(appendCommand(nil, "X"), 10_000), cut), io.EOF},
	{"10,000 pings", afterShake(repeat(appendCommand(nil, "PING", make([]byte, 100)), 10_000), cut), io.EOF},
	{"10,000 empty messages", afterShake(repeat(message(""), 10_000), cut), io.EOF},
	{"answers no heartbeat", afterShake(nil, stay), ErrHeartbeat},
	{"command of 2^63 bytes", afterShake([]byte{flagCommand | flagLong, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 5, 'P', 'U'}, stay), ErrCommand},
	{"error command", afterShake(appendCommand(nil, "ERROR", []byte("\x02no")), stay), nil},
}

// Each hostile peer is given up and dialled again, without hurry; when a proper
// publisher takes its place, it is found and read from.
func TestHostilePeers(t *testing.T) {
	for _, tc := range append(hostile, badHandshakes...) {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, tc.do)
			opts := quick()
			opts.HandshakeTimeout = 100 * time.Millisecond
			if tc.want == ErrHeartbeat {
				opts.HeartbeatInterval, opts.HeartbeatTimeout = 50*time.Millisecond, 50*time.Millisecond
			}
			var h recorder
			run(t, "tcp", s.addr, false, opts, &h)
			eventually(t, "told why", h.lost(func(err error) bool {
				return tc.want == nil || errors.Is(err, tc.want)
			}))
			eventually(t, "dialled again", func() bool { return s.accepted.Load() >= 3 })
			s.become(publisher(1, "kv-events", "12345678", "payload"))
			eventually(t, "proper publisher read from", h.got("kv-events", "12345678", "payload"))
		})
	}
}

// The waits between dials grow to their maximum with a peer that accepts and
// closes, whether or not it says anything before.
func TestBackoffGrows(t *testing.T) {
	for name, do := range map[string]script{
		"closes at once": end,
		"one message":    afterShake(message("kv"), cut),
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, do)
			opts := quick()
			opts.BackoffMin, opts.BackoffMax = time.Millisecond, time.Hour
			var h recorder
			run(t, "tcp", s.addr, false, opts, &h)
			// The tenth wait is at least half a second long, all before it
			// together at most one.
			eventually(t, "ten dials", func() bool { return s.accepted.Load() >= 10 })
			time.Sleep(200 * time.Millisecond)
			if n := s.accepted.Load(); n > 11 {
				t.Errorf("%d dials", n)
			}
		})
	}
}

func TestBackoff(t *testing.T) {
	b := backoff{min: 100 * time.Millisecond, max: 5 * time.Second}
	full := b.min
	for i := range 100 {
		if d := b.step(b.max); d < full/2 || d > full {
			t.Fatalf("wait %d is %v, not %v shortened by up to a half", i, d, full)
		}
		full = min(2*full, b.max)
	}
	if d := b.step(b.max + 1); d > b.min {
		t.Errorf("after a long life: %v", d)
	}
}

// A reason that a peer gives is passed on.
func TestErrorReason(t *testing.T) {
	s := newServer(t, send(greeting(1), appendCommand(nil, "ERROR", []byte("\x09forbidden"))))
	var h recorder
	run(t, "tcp", s.addr, false, quick(), &h)
	eventually(t, "told why", h.lost(func(err error) bool {
		return strings.Contains(err.Error(), `"forbidden"`)
	}))
}
