// Package hub has the NATS server of tests.
package hub

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// patience is how long a server may take to get ready.
const patience = 2 * time.Minute

// Hub is an embedded NATS server with JetStream on disk that can be stopped and
// started again on its files while clients stay. Any number of goroutines may use
// it, but one at a time starts and stops it.
type Hub struct {
	dir        string
	maxPayload int32

	mu sync.Mutex
	s  *server.Server // nil while it is down
}

// New returns a server, not started, with its files in dir. maxPayload bounds a
// message, in bytes; 0 is the server's own bound.
func New(dir string, maxPayload int32) *Hub { return &Hub{dir: dir, maxPayload: maxPayload} }

// Start starts the server, and returns when it takes clients.
func (h *Hub) Start() error {
	s, err := server.NewServer(&server.Options{
		ServerName: "test", JetStream: true, StoreDir: h.dir, NoSigs: true, NoLog: true, DontListen: true,
		JetStreamMaxMemory: 1 << 30, JetStreamMaxStore: 8 << 30, MaxPayload: h.maxPayload,
	})
	if err != nil {
		return err
	}
	s.Start()
	if !s.ReadyForConnections(patience) {
		s.Shutdown()
		return errors.New("the NATS server does not get ready")
	}
	h.mu.Lock()
	h.s = s
	h.mu.Unlock()
	return nil
}

// Stop stops the server, if it is up, and returns when its files are closed.
func (h *Hub) Stop() {
	h.mu.Lock()
	s := h.s
	h.s = nil
	h.mu.Unlock()
	if s != nil {
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// InProcessConn implements nats.InProcessConnProvider.
func (h *Hub) InProcessConn() (net.Conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.s == nil {
		return nil, errors.New("the NATS server is down")
	}
	return h.s.InProcessConn()
}

// Connect returns a connection through in, a Hub or what stands before one, that
// comes back by itself whenever it can.
func Connect(in nats.InProcessConnProvider, opts ...nats.Option) (*nats.Conn, jetstream.JetStream, error) {
	opts = append([]nats.Option{
		nats.InProcessServer(in), nats.MaxReconnects(-1), nats.ReconnectWait(5 * time.Millisecond),
		nats.ReconnectJitter(time.Millisecond, time.Millisecond), nats.ReconnectBufSize(-1), nats.RetryOnFailedConnect(true),
	}, opts...)
	nc, err := nats.Connect(nats.DefaultURL, opts...)
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, js, nil
}
