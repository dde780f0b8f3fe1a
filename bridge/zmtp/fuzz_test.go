package zmtp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"
)

// memory is a connection whose peer has said everything, and which gives it out
// in pieces of the given size.
type memory struct {
	b     []byte
	piece int
}

func (m *memory) Read(p []byte) (int, error) {
	if len(m.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), m.piece)], m.b)
	m.b = m.b[n:]
	return n, nil
}

func (m *memory) Write(b []byte) (int, error)      { return len(b), nil }
func (m *memory) Close() error                     { return nil }
func (m *memory) LocalAddr() net.Addr              { return &net.UnixAddr{} }
func (m *memory) RemoteAddr() net.Addr             { return &net.UnixAddr{Net: "unix"} }
func (m *memory) SetDeadline(time.Time) error      { return nil }
func (m *memory) SetReadDeadline(time.Time) error  { return nil }
func (m *memory) SetWriteDeadline(time.Time) error { return nil }

// readAll returns all messages that a peer's bytes hold, and the error behind
// them.
func readAll(t *testing.T, b []byte, piece int, opts *Options) (messages []string, err error) {
	c, err := open(context.Background(), &memory{b, piece}, "fuzz", SUB, opts)
	if err != nil {
		if c != nil {
			t.Fatal("connection and error")
		}
		return nil, err
	}
	var m Message
	for {
		err := c.Recv(&m)
		if n := len(c.in.buf); n > bufLoad && n > 4*len(b) {
			t.Fatalf("buffer of %d bytes for %d", n, len(b))
		}
		if err != nil {
			if again := c.Recv(&m); again != err {
				t.Fatalf("%v, then %v", err, again)
			}
			return messages, err
		}
		size := 0
		for _, f := range m.Frames {
			size += len(f)
			if len(f) > opts.MaxFrame {
				t.Fatalf("frame of %d bytes", len(f))
			}
		}
		if len(m.Frames) == 0 || len(m.Frames) > opts.MaxFrames || size > opts.MaxMessage {
			t.Fatalf("%d frames, %d bytes", len(m.Frames), size)
		}
		messages = append(messages, strings.Join(toStrings(m.Frames), "\x00|\x00"))
	}
}

// naive decodes what follows a good handshake, by the letter of the protocol
// and with everything in memory. ok is false if there is anything wrong.
func naive(b []byte, opts *Options) (messages []string, ok bool) {
	var frames [][]byte
	size := 0
	for len(b) > 0 {
		flags := b[0]
		var n uint64
		switch {
		case flags > 7 || flags&5 == 5:
			return messages, false
		case flags&2 == 0 && len(b) >= 2:
			n, b = uint64(b[1]), b[2:]
		case flags&2 != 0 && len(b) >= 9:
			for _, d := range b[1:9] {
				n = n<<8 | uint64(d)
			}
			b = b[9:]
		default:
			return messages, false
		}
		if n > uint64(len(b)) {
			return messages, false
		}
		body := b[:n]
		b = b[n:]
		if flags&4 != 0 {
			if n == 0 || body[0] == 0 || int(body[0]) >= len(body) || n > maxCommand {
				return messages, false
			}
			name, content := string(body[1:1+body[0]]), body[1+body[0]:]
			if name == "ERROR" || name == "PING" && len(content) < 2 {
				return messages, false
			}
			continue
		}
		size += len(body)
		frames = append(frames, body)
		if len(body) > opts.MaxFrame || size > opts.MaxMessage || len(frames) > opts.MaxFrames {
			return messages, false
		}
		if flags&1 == 0 {
			messages = append(messages, string(bytes.Join(frames, []byte("\x00|\x00"))))
			frames, size = nil, 0
		}
	}
	return messages, len(frames) == 0
}

func fuzzOptions() *Options {
	o := quick()
	o.MaxFrame, o.MaxMessage, o.MaxFrames = 100_000, 150_000, 8
	return &o
}

// FuzzConn feeds a peer's bytes to a connection. Whatever they are and whatever
// pieces they come in, the result is the same, and behind a good handshake it
// is that of a naive decoder.
func FuzzConn(f *testing.F) {
	good := append(greeting(1), ready("PUB")...)
	ping := appendCommand(nil, "PING", []byte{0, 0}, make([]byte, 20))
	m := message("kv-events", "12345678", "payload")
	for _, seed := range [][]byte{
		nil,
		[]byte("HTTP/1.1 400 Bad Request\r\n\r\n"),
		greeting(0)[:11],
		append(greeting(0), ready("XPUB")...),
		append(greeting(1), appendCommand(nil, "ERROR", []byte("\x03400"))...),
		append(greeting(9), appendCommand(nil, "READY", []byte("\x01A\x00\x00\x00\x01x\x0bsocket-type\x00\x00\x00\x03PUB"))...),
		bytes.Replace(good, []byte("NULL"), []byte("GSSA"), 1),
	} {
		f.Add(seed, uint16(1))
	}
	for _, seed := range [][]byte{
		nil, m, m[:len(m)-1], message(""), message("", ""), ping,
		bytes.Join([][]byte{m[:11], ping, m[11:], ping, m}, nil),
		appendCommand(nil, "ERROR", []byte("\x04oops")),
		appendCommand(nil, "WHATEVER"),
		{flagLong, 0x40, 0, 0, 0, 0, 0, 0, 0},
		{flagLong, 0, 0, 0, 0, 0, 0, 0, 1, 'x'},
		{flagCommand, 0}, {flagCommand, 2, 9, 'x'}, {flagCommand | flagMore, 0}, {8, 0},
		repeat([]byte{flagMore, 0}, 10),
		message(string(make([]byte, 5000)), string(make([]byte, 90_000))),
		message(string(make([]byte, 90_000)), string(make([]byte, 90_000))),
		repeat(m, 1000),
	} {
		f.Add(append(good[:len(good):len(good)], seed...), uint16(7))
	}
	f.Fuzz(func(t *testing.T, b []byte, piece uint16) {
		opts := fuzzOptions()
		whole, err := readAll(t, b, len(b)+1, opts)
		pieces, perr := readAll(t, b, int(piece)+1, opts)
		if strings.Join(whole, "\n") != strings.Join(pieces, "\n") || err.Error() != perr.Error() {
			t.Fatalf("at once %d messages, %v; in pieces %d, %v", len(whole), err, len(pieces), perr)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			t.Fatal(err)
		}
		if rest, ok := bytes.CutPrefix(b, good); ok {
			want, clean := naive(rest, opts)
			if strings.Join(whole, "\n") != strings.Join(want, "\n") || clean != errors.Is(err, io.EOF) {
				t.Fatalf("got %d messages, %v; naively %d, %v", len(whole), err, len(want), clean)
			}
		}
	})
}
