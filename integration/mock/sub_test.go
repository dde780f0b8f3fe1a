package mock

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

// sub is a SUB socket with one connection, as plain as can be: ZMTP 3.0.
type sub struct {
	net.Conn
	r *bufio.Reader
}

// greeting is the hello of a peer of ZMTP 3.minor, up to its READY.
func greeting(minor byte, socket string) []byte {
	g := make([]byte, 64)
	g[0], g[9], g[10], g[11] = 0xff, 0x7f, 3, minor
	copy(g[12:], "NULL")
	return appendCommand(g, "READY", append([]byte("\x0bSocket-Type\x00\x00\x00"), append([]byte{byte(len(socket))}, socket...)...))
}

// dialSub connects a SUB with one subscription.
func dialSub(endpoint, topic string) (*sub, error) {
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, err
	}
	c, err := net.Dial(network, addr)
	if err != nil {
		return nil, err
	}
	s := newSub(c)
	if err := s.shake(topic); err != nil {
		c.Close()
		return nil, err
	}
	return s, nil
}

func newSub(c net.Conn) *sub { return &sub{c, bufio.NewReaderSize(c, 64<<10)} }

func (s *sub) shake(topic string) error {
	if _, err := s.Write(appendFrame(greeting(0, "SUB"), 0, []byte("\x01"+topic))); err != nil {
		return err
	}
	if _, err := s.r.Discard(64); err != nil {
		return err
	}
	flags, body, err := readFrame(s.r)
	if name, data := command(body); err == nil && (flags != flagCommand || name != "READY" || property(data, "Socket-Type") != "PUB") {
		err = fmt.Errorf("%w: %x %q", errNotZMTP, flags, body)
	}
	return err
}

// next returns the frames of the next message.
func (s *sub) next() (message, error) {
	var out message
	for {
		flags, body, err := readFrame(s.r)
		if err != nil {
			return out, err
		}
		out = append(out, body)
		if flags&flagMore == 0 {
			return out, nil
		}
	}
}

// skip reads n messages and keeps nothing.
func (s *sub) skip(n int) error {
	for n > 0 {
		flags, head, body, err := frameHead(s.r)
		if err != nil {
			return err
		}
		if _, err := s.r.Discard(head + body); err != nil {
			return err
		}
		if flags&flagMore == 0 {
			n--
		}
	}
	return nil
}

// mustSub is dialSub for tests; nothing it reads may take long.
func mustSub(t testing.TB, endpoint, topic string) *sub {
	t.Helper()
	s, err := dialSub(endpoint, topic)
	if err != nil {
		t.Fatal(err)
	}
	s.SetDeadline(time.Now().Add(30 * time.Second))
	t.Cleanup(func() { s.Close() })
	return s
}

// mustNext returns the topic, number and payload of the next message.
func (s *sub) mustNext(t testing.TB) (topic string, seq uint64, payload string) {
	t.Helper()
	m, err := s.next()
	if err != nil {
		t.Fatal(err)
	}
	if len(m) != 3 || len(m[1]) != 8 {
		t.Fatalf("message %q", m)
	}
	return string(m[0]), binary.BigEndian.Uint64(m[1]), string(m[2])
}

// mustEnd checks that the connection ends without another message.
func (s *sub) mustEnd(t testing.TB) {
	t.Helper()
	if m, err := s.next(); err == nil || len(m) > 0 {
		t.Errorf("message %q, error %v, want the end", m, err)
	} else if e, ok := err.(net.Error); ok && e.Timeout() {
		t.Errorf("the connection did not end")
	} else if err != io.EOF && err != nil {
		t.Logf("ended with %v", err)
	}
}

// dealer is a DEALER socket with one connection.
type dealer struct{ sub }

func dialDealer(endpoint string) (*dealer, error) {
	network, addr, err := split(endpoint)
	if err != nil {
		return nil, err
	}
	c, err := net.Dial(network, addr)
	if err != nil {
		return nil, err
	}
	d := &dealer{*newSub(c)}
	_, err = d.Write(greeting(0, "DEALER"))
	if err == nil {
		_, err = d.r.Discard(64)
	}
	if err == nil {
		_, _, err = readFrame(d.r)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return d, nil
}

func mustDealer(t testing.TB, e *Engine) *dealer {
	t.Helper()
	d, err := dialDealer(e.ReplayAddr())
	if err != nil {
		t.Fatal(err)
	}
	d.SetDeadline(time.Now().Add(30 * time.Second))
	t.Cleanup(func() { d.Close() })
	return d
}

func (d *dealer) request(from uint64) error {
	_, err := d.Write(appendFrame(appendFrame(nil, flagMore, nil), 0, binary.BigEndian.AppendUint64(nil, from)))
	return err
}

// ask requests a replay and returns the answer up to its end marker, readable.
func (d *dealer) ask(t testing.TB, from uint64) string {
	t.Helper()
	return strings.Join(d.answer(t, from), " ")
}

// answer is ask, message by message.
func (d *dealer) answer(t testing.TB, from uint64) []string {
	t.Helper()
	if err := d.request(from); err != nil {
		t.Fatal(err)
	}
	var out []string
	for {
		m, err := d.next()
		if err != nil {
			t.Fatalf("%v after %v", err, out)
		}
		word := readable(m)
		out = append(out, word)
		if strings.HasSuffix(word, "end") {
			return out
		}
	}
}

// readable is a replay message in short: topic/number=payload.
func readable(m message) string {
	if len(m) < 3 || len(m) > 4 || len(m[0]) != 0 || len(m[len(m)-2]) != 8 {
		return fmt.Sprintf("%q", m)
	}
	topic := ""
	if len(m) == 4 {
		topic = string(m[1]) + "/"
	}
	seq := binary.BigEndian.Uint64(m[len(m)-2])
	if seq == endOfReplay && len(m[len(m)-1]) == 0 {
		return topic + "end"
	}
	return fmt.Sprintf("%s%d=%s", topic, seq, m[len(m)-1])
}
