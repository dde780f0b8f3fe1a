// Package zmtp is the client side of ZMTP 3.0 and 3.1, the protocol of ZeroMQ,
// as far as a reader of engine events needs it: SUB and DEALER sockets with the
// NULL mechanism over TCP and unix sockets.
//
// A Conn is one connection: Dial connects and shakes hands, Recv returns one
// message after the other as views into the connection's buffer. A Sub keeps
// one subscription up for ever, dialling or listening, and tells a Handler what
// happens. There are no queues: a handler that is slow slows TCP down, and the
// publisher drops.
//
// The peer is not trusted. Every length is checked against a limit before
// anything is made of it, and memory grows with the bytes that have arrived,
// not with the bytes that were announced. A peer that breaks the protocol loses
// its connection.
package zmtp

import (
	"fmt"
	"log/slog"
	"time"
)

// SocketType is the kind of socket this side is.
type SocketType string

// The socket types, as they are named on the wire.
const (
	// SUB receives what a PUB or XPUB publishes under the topics subscribed to.
	SUB SocketType = "SUB"
	// DEALER sends requests to a ROUTER, or to another DEALER, and receives any
	// number of answers.
	DEALER SocketType = "DEALER"
)

// accepts tells whether a socket of type t talks to a peer of the given type.
func (t SocketType) accepts(peer string) bool {
	switch t {
	case SUB:
		return peer == "PUB" || peer == "XPUB"
	case DEALER:
		return peer == "ROUTER" || peer == "DEALER"
	}
	return false
}

// Message is one message: what Recv fills in. Its frames are views into the
// buffer of the connection and valid until the next Recv with the same Conn.
type Message struct {
	Frames [][]byte
}

// Options are the limits and times of a connection. Start from Default.
type Options struct {
	// MaxFrame is the most bytes in one frame of a message.
	MaxFrame int
	// MaxMessage is the most bytes in all frames of one message.
	MaxMessage int
	// MaxFrames is the most frames in one message.
	MaxFrames int

	// HandshakeTimeout bounds connecting and the handshake together.
	HandshakeTimeout time.Duration
	// WriteTimeout bounds each write. A connection that misses it is closed,
	// because half a frame may be on the wire.
	WriteTimeout time.Duration

	// HeartbeatInterval is how long a peer may be silent before Recv sends it a
	// PING, if it speaks ZMTP 3.1. 0 turns heartbeats off.
	HeartbeatInterval time.Duration
	// HeartbeatTimeout is how long Recv waits for anything after a PING.
	HeartbeatTimeout time.Duration

	// BackoffMin and BackoffMax bound the waits of a Sub between two attempts.
	// The wait doubles with each one, and each is shortened by up to a half at
	// random. A connection that lives longer than BackoffMax resets it.
	BackoffMin, BackoffMax time.Duration

	// Buffers is what connections read into. nil: each has its own.
	Buffers *Buffers

	// Logger takes what a Handler isn't told. nil: nothing is logged.
	Logger *slog.Logger
}

// Default returns the options for an engine in the same data centre.
func Default() Options {
	return Options{
		MaxFrame:          64 << 20,
		MaxMessage:        64 << 20,
		MaxFrames:         64,
		HandshakeTimeout:  5 * time.Second,
		WriteTimeout:      5 * time.Second,
		HeartbeatInterval: 10 * time.Second,
		HeartbeatTimeout:  10 * time.Second,
		BackoffMin:        100 * time.Millisecond,
		BackoffMax:        5 * time.Second,
		Buffers:           NewBuffers(),
	}
}

// Validate returns an error that names the first option, or pair of options,
// that makes no sense.
func (o *Options) Validate() error {
	switch {
	case o.MaxFrame <= 0:
		return fmt.Errorf("zmtp: MaxFrame is %d, must be positive", o.MaxFrame)
	case o.MaxMessage < o.MaxFrame:
		return fmt.Errorf("zmtp: MaxMessage is %d, less than MaxFrame, %d", o.MaxMessage, o.MaxFrame)
	case o.MaxFrames <= 0:
		return fmt.Errorf("zmtp: MaxFrames is %d, must be positive", o.MaxFrames)
	case o.HandshakeTimeout <= 0:
		return fmt.Errorf("zmtp: HandshakeTimeout is %v, must be positive", o.HandshakeTimeout)
	case o.WriteTimeout <= 0:
		return fmt.Errorf("zmtp: WriteTimeout is %v, must be positive", o.WriteTimeout)
	case o.HeartbeatInterval < 0:
		return fmt.Errorf("zmtp: HeartbeatInterval is %v, must not be negative", o.HeartbeatInterval)
	case o.HeartbeatInterval > 0 && o.HeartbeatTimeout <= 0:
		return fmt.Errorf("zmtp: HeartbeatTimeout is %v, must be positive", o.HeartbeatTimeout)
	case o.BackoffMin <= 0:
		return fmt.Errorf("zmtp: BackoffMin is %v, must be positive", o.BackoffMin)
	case o.BackoffMax < o.BackoffMin:
		return fmt.Errorf("zmtp: BackoffMax is %v, less than BackoffMin, %v", o.BackoffMax, o.BackoffMin)
	}
	return nil
}
