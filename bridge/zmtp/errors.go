package zmtp

import (
	"errors"
	"fmt"
)

// Errors of the handshake. Dial returns them wrapped, a Sub passes them to
// Handler.Disconnected.
var (
	// ErrGreeting: what the peer says first is no ZMTP greeting.
	ErrGreeting = errors.New("zmtp: malformed greeting")
	// ErrVersion: the peer speaks a ZMTP older than 3.0.
	ErrVersion = errors.New("zmtp: unsupported protocol version")
	// ErrMechanism: the peer wants another security mechanism than NULL.
	ErrMechanism = errors.New("zmtp: unsupported security mechanism")
	// ErrReady: the greeting is followed by something else than a well-formed
	// READY command.
	ErrReady = errors.New("zmtp: malformed READY")
	// ErrSocketType: the peer is a socket that ours doesn't talk to.
	ErrSocketType = errors.New("zmtp: wrong socket type of the peer")
	// ErrHandshakeTimeout: Options.HandshakeTimeout passed before the peer was
	// connected and had said all of its handshake.
	ErrHandshakeTimeout = errors.New("zmtp: handshake timed out")
)

// Errors of Recv. Each of them ends the connection. ErrFlags and ErrCommand can
// come from the handshake, too.
var (
	// ErrFlags: a frame with reserved flags, or a command that claims to be
	// continued.
	ErrFlags = errors.New("zmtp: malformed frame flags")
	// ErrCommand: a command without a name, shorter than its content must be,
	// or longer than 64 KiB.
	ErrCommand = errors.New("zmtp: malformed command")
	// ErrFrameSize: a frame announces more than Options.MaxFrame.
	ErrFrameSize = errors.New("zmtp: frame too large")
	// ErrMessageSize: the frames of a message announce more than
	// Options.MaxMessage together.
	ErrMessageSize = errors.New("zmtp: message too large")
	// ErrFrameCount: a message has more than Options.MaxFrames frames.
	ErrFrameCount = errors.New("zmtp: too many frames in a message")
	// ErrHeartbeat: the peer left a PING unanswered for
	// Options.HeartbeatTimeout.
	ErrHeartbeat = errors.New("zmtp: peer answers no heartbeat")
)

// ErrWriteTimeout: the peer took nothing for Options.WriteTimeout. Subscribe and
// Send return it, and Recv if it was answering a command. The connection is
// closed.
var ErrWriteTimeout = errors.New("zmtp: write timed out")

// ErrOperation is returned by Subscribe on anything but a SUB socket, and by
// Send on anything but a DEALER, or without frames. Nothing was sent.
var ErrOperation = errors.New("zmtp: not an operation of this socket")

// PeerError is an ERROR command of the peer, in the handshake or later.
type PeerError struct {
	// Reason is the peer's text, at most 255 bytes.
	Reason string
}

// Error implements error.
func (e *PeerError) Error() string {
	return fmt.Sprintf("zmtp: peer reports error %q", e.Reason)
}

// errInterrupted is what Recv returns after interrupt.
var errInterrupted = errors.New("zmtp: interrupted")
