package mock

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// This file is ZMTP 3.1 with the NULL mechanism, as far as a PUB needs it:
// https://rfc.zeromq.org/spec/37/.

// Bits of the first byte of a frame.
const (
	flagMore    = 1
	flagLong    = 2
	flagCommand = 4
)

// maxInbound is the longest message that a peer may send. Peers send
// subscriptions and replay requests.
const maxInbound = 64 << 10

// Errors that end a connection.
var (
	errNotZMTP = errors.New("mock: the peer does not speak ZMTP 3 with NULL security")
	errTooLong = errors.New("mock: the peer sends too long a message")
	errPeer    = errors.New("mock: the peer's socket does not go with a PUB")
)

// frameHead returns the flags of the next frame and the lengths of its head and
// its body, of which it reads nothing.
func frameHead(r *bufio.Reader) (flags byte, head, body int, err error) {
	b, err := r.Peek(2)
	if err != nil {
		return 0, 0, 0, err
	}
	flags, head, size := b[0], 2, uint64(b[1])
	if flags&flagLong != 0 {
		head = 9
		if b, err = r.Peek(head); err != nil {
			return 0, 0, 0, err
		}
		size = binary.BigEndian.Uint64(b[1:])
	}
	if size > maxInbound {
		return 0, 0, 0, errTooLong
	}
	return flags, head, int(size), nil
}

// readFrame reads one frame.
func readFrame(r *bufio.Reader) (flags byte, body []byte, err error) {
	flags, head, size, err := frameHead(r)
	if err != nil {
		return 0, nil, err
	}
	if _, err := r.Discard(head); err != nil {
		return 0, nil, err
	}
	body = make([]byte, size)
	_, err = io.ReadFull(r, body)
	return flags, body, err
}

// appendFrame appends one frame. flags are without the one for long frames.
func appendFrame(dst []byte, flags byte, body []byte) []byte {
	if len(body) > 255 {
		dst = binary.BigEndian.AppendUint64(append(dst, flags|flagLong), uint64(len(body)))
	} else {
		dst = append(dst, flags, byte(len(body)))
	}
	return append(dst, body...)
}

// appendCommand appends a command frame.
func appendCommand(dst []byte, name string, data []byte) []byte {
	body := append([]byte{byte(len(name))}, name...)
	return appendFrame(dst, flagCommand, append(body, data...))
}

// command takes the body of a command frame apart; the name is empty if it is
// none.
func command(body []byte) (name string, data []byte) {
	if len(body) == 0 || int(body[0]) >= len(body) {
		return "", nil
	}
	n := 1 + int(body[0])
	return string(body[1:n]), body[n:]
}

// property returns the value of a property of a READY command, empty if it is
// not there.
func property(data []byte, name string) string {
	for len(data) > 0 {
		n := 1 + int(data[0])
		if n+4 > len(data) {
			break
		}
		key, size := data[1:n], binary.BigEndian.Uint32(data[n:])
		data = data[n+4:]
		if uint64(size) > uint64(len(data)) {
			break
		}
		if bytes.EqualFold(key, []byte(name)) {
			return string(data[:size])
		}
		data = data[size:]
	}
	return ""
}

// rawPeer is a subscriber to which this package speaks ZMTP itself.
type rawPeer struct {
	conn net.Conn
	r    *bufio.Reader // of the goroutine that reads subscriptions

	mu  sync.Mutex // guards writing to conn, and out
	out []byte
}

// openRaw shakes hands as a PUB. It does not matter who dialled.
func openRaw(conn net.Conn, _ bool) (peer, error) {
	conn.SetDeadline(time.Now().Add(handshakeLimit))
	defer conn.SetDeadline(time.Time{})
	hello := make([]byte, 64, 128)
	hello[0], hello[9], hello[10], hello[11] = 0xff, 0x7f, 3, 1
	copy(hello[12:], "NULL")
	hello = appendCommand(hello, "READY", []byte("\x0bSocket-Type\x00\x00\x00\x03PUB"))
	if _, err := conn.Write(hello); err != nil {
		return nil, err
	}
	p := &rawPeer{conn: conn, r: bufio.NewReader(conn)}
	var theirs [64]byte
	if _, err := io.ReadFull(p.r, theirs[:]); err != nil {
		return nil, err
	}
	if theirs[0] != 0xff || theirs[9]&1 == 0 || theirs[10] < 3 || string(theirs[12:17]) != "NULL\x00" {
		return nil, errNotZMTP
	}
	flags, body, err := readFrame(p.r)
	if err != nil {
		return nil, err
	}
	name, data := command(body)
	if flags&flagCommand == 0 || name != "READY" {
		return nil, errNotZMTP
	}
	if t := property(data, "Socket-Type"); t != "SUB" && t != "XSUB" {
		return nil, fmt.Errorf("%w: %q", errPeer, t)
	}
	return p, nil
}

// subscription implements peer. Peers of ZMTP 3.0 subscribe with messages, those
// of 3.1 with commands.
func (p *rawPeer) subscription() (topic string, on bool, err error) {
	for {
		flags, body, err := readFrame(p.r)
		if err != nil {
			return "", false, err
		}
		if flags&flagCommand == 0 {
			if len(body) > 0 && body[0] <= 1 {
				return string(body[1:]), body[0] == 1, nil
			}
			continue
		}
		switch name, data := command(body); name {
		case "SUBSCRIBE", "CANCEL":
			return string(data), name == "SUBSCRIBE", nil
		case "PING": // a time to live of two bytes, then what the PONG repeats
			if err := p.pong(data[min(2, len(data)):]); err != nil {
				return "", false, err
			}
		}
	}
}

func (p *rawPeer) pong(context []byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, err := p.conn.Write(appendCommand(nil, "PONG", context))
	return err
}

// send implements peer. It writes many small messages at once.
func (p *rawPeer) send(msgs []message) error {
	const enough = 256 << 10
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out = p.out[:0]
	for i, m := range msgs {
		for j, frame := range m {
			var flags byte
			if j < len(m)-1 {
				flags = flagMore
			}
			p.out = appendFrame(p.out, flags, frame)
		}
		if i == len(msgs)-1 || len(p.out) >= enough {
			if _, err := p.conn.Write(p.out); err != nil {
				return err
			}
			p.out = p.out[:0]
		}
	}
	return nil
}
