package zmtp

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Flags of a frame. The other five bits are reserved.
const (
	flagMore    = 0x01 // another frame of the same message follows
	flagLong    = 0x02 // the length has 8 bytes instead of 1
	flagCommand = 0x04
)

const (
	greetingLen  = 64
	signatureLen = 10 // the part of the greeting that never changed
	maxCommand   = 64 << 10
	maxPing      = 16 // bytes of context in a PING that are sent back
)

// The version of this side. ZMTP 3.1 peers answer PING and take SUBSCRIBE as a
// command.
const (
	major = 3
	minor = 1
)

// The only mechanism, padded as it is in the greeting.
var mechanism = [20]byte{'N', 'U', 'L', 'L'}

// appendGreeting appends this side's greeting.
func appendGreeting(b []byte) []byte {
	b = append(b, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, major, minor)
	b = append(b, mechanism[:]...)
	return append(b, make([]byte, greetingLen-len(mechanism)-12)...)
}

// checkGreeting judges a greeting, or as much of it as has arrived, and returns
// the peer's minor version once that is there. A peer that is none shows in the
// first byte already, and may never send 64 of them.
func checkGreeting(b []byte) (peerMinor byte, err error) {
	if b[0] != 0xff {
		return 0, fmt.Errorf("%w: starts with byte 0x%02x", ErrGreeting, b[0])
	}
	if len(b) >= signatureLen && b[signatureLen-1] != 0x7f {
		return 0, fmt.Errorf("%w: signature ends with byte 0x%02x", ErrGreeting, b[signatureLen-1])
	}
	if len(b) > 10 && b[10] < major {
		return 0, fmt.Errorf("%w: %d", ErrVersion, b[10])
	}
	if len(b) < greetingLen {
		return 0, nil
	}
	if name := b[12:32]; !bytes.Equal(name, mechanism[:]) {
		return 0, fmt.Errorf("%w: %q", ErrMechanism, bytes.TrimRight(name, "\x00"))
	}
	if b[10] > major {
		return minor, nil // a later version has to talk to 3.1
	}
	return b[11], nil
}

// header is what stands before the body of a frame.
type header struct {
	flags byte
	len   int    // of the header, bytes
	size  uint64 // of the body, bytes, as the peer claims
}

// parseHeader reads the header that b starts with; ok is false if b ends
// inside it.
func parseHeader(b []byte) (h header, ok bool, err error) {
	if len(b) == 0 {
		return header{}, false, nil
	}
	h.flags = b[0]
	if h.flags&^(flagMore|flagLong|flagCommand) != 0 || h.flags&(flagMore|flagCommand) == flagMore|flagCommand {
		return header{}, false, fmt.Errorf("%w: 0x%02x", ErrFlags, h.flags)
	}
	if h.flags&flagLong == 0 {
		if len(b) < 2 {
			return header{}, false, nil
		}
		h.len, h.size = 2, uint64(b[1])
		return h, true, nil
	}
	if len(b) < 9 {
		return header{}, false, nil
	}
	h.len, h.size = 9, binary.BigEndian.Uint64(b[1:])
	return h, true, nil
}

// appendHeader appends the header of a frame of size bytes.
func appendHeader(b []byte, flags byte, size int) []byte {
	if size <= 255 {
		return append(b, flags, byte(size))
	}
	return binary.BigEndian.AppendUint64(append(b, flags|flagLong), uint64(size))
}

// appendMessage appends all frames of a message.
func appendMessage(b []byte, frames ...[]byte) []byte {
	for i, f := range frames {
		var flags byte
		if i < len(frames)-1 {
			flags = flagMore
		}
		b = append(appendHeader(b, flags, len(f)), f...)
	}
	return b
}

// appendCommand appends a command frame with all parts of its content.
func appendCommand(b []byte, name string, content ...[]byte) []byte {
	size := 1 + len(name)
	for _, p := range content {
		size += len(p)
	}
	b = appendHeader(b, flagCommand, size)
	b = append(append(b, byte(len(name))), name...)
	for _, p := range content {
		b = append(b, p...)
	}
	return b
}

// splitCommand splits the body of a command frame into its name and content.
func splitCommand(b []byte) (name, content []byte, err error) {
	if len(b) == 0 || b[0] == 0 || int(b[0]) > len(b)-1 {
		return nil, nil, fmt.Errorf("%w: no name", ErrCommand)
	}
	n := 1 + int(b[0])
	return b[1:n], b[n:], nil
}

// appendReady appends the READY command of a socket of type t.
func appendReady(b []byte, t SocketType) []byte {
	const property = "\x0bSocket-Type\x00\x00\x00"
	return appendCommand(b, "READY", []byte(property), []byte{byte(len(t))}, []byte(t))
}

// readySocketType returns the Socket-Type among the properties of a READY.
func readySocketType(b []byte) (string, error) {
	var peer []byte
	for len(b) > 0 {
		n := 1 + int(b[0])
		if n == 1 || len(b) < n+4 {
			return "", fmt.Errorf("%w: cut in a property name", ErrReady)
		}
		name, size := b[1:n], binary.BigEndian.Uint32(b[n:])
		b = b[n+4:]
		if uint64(size) > uint64(len(b)) {
			return "", fmt.Errorf("%w: cut in property %q", ErrReady, name)
		}
		if bytes.EqualFold(name, []byte("Socket-Type")) {
			peer = b[:size]
		}
		b = b[size:]
	}
	if peer == nil {
		return "", fmt.Errorf("%w: no Socket-Type", ErrReady)
	}
	return string(peer), nil
}

// errorReason returns what an ERROR command says.
func errorReason(b []byte) (string, error) {
	if len(b) == 0 || int(b[0]) > len(b)-1 {
		return "", fmt.Errorf("%w: ERROR without reason", ErrCommand)
	}
	return string(b[1 : 1+int(b[0])]), nil
}
