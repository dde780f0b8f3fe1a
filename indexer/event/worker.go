package event

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// Limits of a registration.
const (
	// MaxName is how long a name may be, in bytes: a model's, a group's, an
	// instance's, a topic's.
	MaxName = 256
	// MaxBlockSize is the largest block size, in tokens.
	MaxBlockSize = 1 << 16
	// MaxRank is the largest data-parallel rank.
	MaxRank = 1 << 20
	// MaxLabels is how many labels a worker may have.
	MaxLabels = 64
	// MinTTL and MaxTTL bound how long a registration is for, if it is for a
	// time only.
	MinTTL, MaxTTL = 2 * time.Second, 365 * 24 * time.Hour
)

// Worker is the registration of one worker rank: the source that it feeds and
// where its engine publishes. Bridges dial it, indexers answer with it.
type Worker struct {
	Source
	// Endpoint is the engine's PUB socket: tcp://host:port, or ipc://path. A
	// wildcard host (*, 0.0.0.0, [::]) means that the engine connects, and
	// the bridge binds the port.
	Endpoint string
	// ReplayEndpoint is the engine's replay ROUTER socket; empty if it has
	// none.
	ReplayEndpoint string
	// Topic is what the engine's messages are published under; empty takes
	// every topic.
	Topic string
	// Engine names the engine's profile, such as vllm or sglang; empty is an
	// engine that nothing is assumed of.
	Engine string
	// BlockSize is the block size of the index, in tokens. All workers of a
	// partition have the same one.
	BlockSize uint32
	// CacheOwner is the id of the memory of the worker that outlives its
	// engine's process, or AutoOwner until Complete; empty if there is none.
	CacheOwner string
	// Labels say where a worker runs and what it is, for bridges to claim
	// it by and for selection.
	Labels map[string]string
	// IntegerID says that the instance id is an integer in JSON.
	IntegerID bool
	// TTL is for how long the worker counts as there if nobody registers it
	// again and nothing comes from its engine; 0: until it is unregistered.
	// Whole seconds.
	TTL time.Duration
	// Life sets a registration apart from an earlier one of the same worker
	// that was unregistered. The catalog gives it.
	Life string
}

// Validate checks everything that can be checked without looking at other
// workers or at the network. Errors wrap ErrWorker.
func (w *Worker) Validate() error {
	for _, f := range []struct{ name, value string }{
		{"instance_id", w.Instance}, {"model_name", w.Model}, {"routing_group", w.Group}, {"endpoint", w.Endpoint},
	} {
		if f.value == "" {
			return fmt.Errorf("%w: %s is missing or empty", ErrWorker, f.name)
		}
	}
	for _, f := range []struct{ name, value string }{
		{"instance_id", w.Instance}, {"model_name", w.Model}, {"routing_group", w.Group}, {"topic", w.Topic},
	} {
		if len(f.value) > MaxName {
			return fmt.Errorf("%w: %s has %d bytes, at most %d are allowed", ErrWorker, f.name, len(f.value), MaxName)
		}
	}
	if w.BlockSize == 0 || w.BlockSize > MaxBlockSize {
		return fmt.Errorf("%w: block_size is %d, want 1 to %d tokens", ErrWorker, w.BlockSize, MaxBlockSize)
	}
	if w.Rank > MaxRank {
		return fmt.Errorf("%w: dp_rank is %d, at most %d is allowed", ErrWorker, w.Rank, MaxRank)
	}
	if len(w.Labels) > MaxLabels {
		return fmt.Errorf("%w: %d labels, at most %d are allowed", ErrWorker, len(w.Labels), MaxLabels)
	}
	if w.TTL != 0 && (w.TTL < MinTTL || w.TTL > MaxTTL || w.TTL%time.Second != 0) {
		return fmt.Errorf("%w: ttl_seconds is %v, want whole seconds, %v to %v, or 0 for no end", ErrWorker, w.TTL.Seconds(), MinTTL.Seconds(), MaxTTL.Seconds())
	}
	if _, err := ParseEndpoint(w.Endpoint); err != nil {
		return fmt.Errorf("%w: endpoint %w", ErrWorker, err)
	}
	if w.CacheOwner != "" {
		if err := w.validateOwner(); err != nil {
			return err
		}
	}
	if w.ReplayEndpoint == "" {
		return nil
	}
	replay, err := ParseEndpoint(w.ReplayEndpoint)
	if err != nil {
		return fmt.Errorf("%w: replay_endpoint %w", ErrWorker, err)
	}
	if replay.Bind {
		return fmt.Errorf("%w: replay_endpoint %q has a wildcard host; engines bind the replay socket, so name a host to dial", ErrWorker, w.ReplayEndpoint)
	}
	if w.ReplayEndpoint == w.Endpoint {
		return fmt.Errorf("%w: endpoint and replay_endpoint are both %q; they are two sockets", ErrWorker, w.Endpoint)
	}
	return nil
}

// Equal tells whether two registrations say the same, but for how long they
// last and which one it is.
func (w *Worker) Equal(o *Worker) bool {
	if w.Source != o.Source || w.Endpoint != o.Endpoint || w.ReplayEndpoint != o.ReplayEndpoint || w.Topic != o.Topic ||
		w.Engine != o.Engine || w.CacheOwner != o.CacheOwner || w.BlockSize != o.BlockSize || len(w.Labels) != len(o.Labels) {
		return false
	}
	for k, v := range w.Labels {
		if x, ok := o.Labels[k]; !ok || x != v {
			return false
		}
	}
	return true
}

// Endpoint is a parsed ZMQ endpoint.
type Endpoint struct {
	// Network and Address are as package net takes them: tcp or unix.
	Network, Address string
	// Bind says that the bridge listens there and the engine dials.
	Bind bool
}

// ParseEndpoint reads a ZMQ endpoint: tcp://host:port with a port from 1 to
// 65535, or ipc://path.
func ParseEndpoint(s string) (Endpoint, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok {
		return Endpoint{}, fmt.Errorf("%q has no scheme: want tcp://host:port or ipc://path", s)
	}
	switch scheme {
	case "ipc":
		if rest == "" {
			return Endpoint{}, fmt.Errorf("%q has no path: want ipc://path", s)
		}
		if len(rest) > 107 { // what a socket address holds
			return Endpoint{}, fmt.Errorf("%q: the path has %d bytes, at most 107 are possible", s, len(rest))
		}
		return Endpoint{Network: "unix", Address: rest}, nil
	case "tcp":
		return parseTCP(s, rest)
	}
	return Endpoint{}, fmt.Errorf("%q has scheme %q: want tcp://host:port or ipc://path", s, scheme)
}

func parseTCP(s, rest string) (Endpoint, error) {
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		return Endpoint{}, fmt.Errorf("%q has no port: want tcp://host:port", s)
	}
	if host == "" {
		return Endpoint{}, fmt.Errorf("%q has no host: want tcp://host:port, or tcp://*:port for an engine that connects", s)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return Endpoint{}, fmt.Errorf("%q has port %q: want 1 to 65535", s, port)
	}
	if strings.ContainsAny(host, " \t\r\n/") {
		return Endpoint{}, fmt.Errorf("%q has a bad host %q", s, host)
	}
	if host == "*" {
		return Endpoint{Network: "tcp", Address: ":" + port, Bind: true}, nil
	}
	ip, err := netip.ParseAddr(host) // 0.0.0.0 and :: can be written in several ways
	bind := err == nil && ip.Unmap().WithZone("").IsUnspecified()
	return Endpoint{Network: "tcp", Address: net.JoinHostPort(host, port), Bind: bind}, nil
}
