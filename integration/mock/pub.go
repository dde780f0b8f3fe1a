package mock

import (
	"context"
	"net"
	"sync"
)

// message is the frames of a message. Nobody changes them once it is published.
type message [][]byte

// peer is a subscriber behind a finished handshake.
type peer interface {
	// subscription waits until the peer changes what it has subscribed to. One
	// goroutine calls it until it fails.
	subscription() (topic string, on bool, err error)
	// send writes messages. One goroutine calls it until it fails.
	send([]message) error
}

// pub is a PUB socket. Each subscriber has a queue of its own; what does not fit
// is dropped for this subscriber, and publishing never waits.
type pub struct {
	open  func(conn net.Conn, accepted bool) (peer, error)
	hwm   int
	links *links

	mu      sync.Mutex // guards all below
	subs    map[*subscriber]struct{}
	changed chan struct{} // closed and renewed when subscriptions change
	dropped uint64
}

// subscriber is the sending end of a peer. pub.mu guards all of it but peer.
type subscriber struct {
	peer    peer
	topics  map[string]int // how many times the peer has subscribed
	queue   []message
	sending int           // messages taken from the queue and not yet written
	wake    chan struct{} // has one element while the queue may have some
}

func newPub(open func(net.Conn, bool) (peer, error), hwm int) *pub {
	return &pub{open: open, hwm: hwm, subs: map[*subscriber]struct{}{}, changed: make(chan struct{})}
}

// start binds the socket to an endpoint, or connects it.
func (p *pub) start(endpoint string, dial bool) (err error) {
	if dial {
		p.links, err = connect(endpoint, func(ctx context.Context, c net.Conn) { p.serve(ctx, c, false) })
	} else {
		p.links, err = bind(endpoint, func(ctx context.Context, c net.Conn) { p.serve(ctx, c, true) })
	}
	return err
}

// stop ends all connections. The socket may start again.
func (p *pub) stop() { p.links.close() }

// publish queues a message for whoever has subscribed to it.
func (p *pub) publish(m message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s := range p.subs {
		if !s.wants(m[0]) {
			continue
		}
		if len(s.queue)+s.sending >= p.hwm {
			p.dropped++
			continue
		}
		s.queue = append(s.queue, m)
		select {
		case s.wake <- struct{}{}:
		default:
		}
	}
}

// serve runs a connection to its end.
func (p *pub) serve(ctx context.Context, c net.Conn, accepted bool) {
	peer, err := p.open(c, accepted)
	if err != nil {
		return // and the peer may try again
	}
	s := &subscriber{peer: peer, topics: map[string]int{}, wake: make(chan struct{}, 1)}
	p.mu.Lock()
	p.subs[s] = struct{}{}
	p.mu.Unlock()
	var writer sync.WaitGroup
	ctx, end := context.WithCancel(ctx)
	writer.Go(func() {
		p.write(ctx, s)
		c.Close() // so that the reading below ends too
	})
	for {
		topic, on, err := s.peer.subscription()
		if err != nil || !p.subscribe(s, topic, on) {
			break
		}
	}
	end()
	c.Close()
	writer.Wait()
	p.mu.Lock()
	delete(p.subs, s)
	p.announce()
	p.mu.Unlock()
}

// write sends what is queued until the connection or ctx ends.
func (p *pub) write(ctx context.Context, s *subscriber) {
	const most = 64 // messages at once, of which each frees its place when all are written
	var taken []message
	for {
		select {
		case <-s.wake:
		case <-ctx.Done():
			return
		}
		p.mu.Lock()
		taken, s.queue = s.queue, taken[:0]
		s.sending = len(taken)
		p.mu.Unlock()
		for rest := taken; len(rest) > 0; {
			n := min(most, len(rest))
			if err := s.peer.send(rest[:n]); err != nil {
				return
			}
			rest = rest[n:]
			p.mu.Lock()
			s.sending = len(rest)
			p.mu.Unlock()
		}
		clear(taken)
		if cap(taken) > 4096 {
			taken = nil
		}
	}
}

// subscribe notes a change; false if the peer asks for more than anyone needs.
func (p *pub) subscribe(s *subscriber, topic string, on bool) bool {
	const most = 1024
	p.mu.Lock()
	defer p.mu.Unlock()
	if on {
		s.topics[topic]++
	} else if s.topics[topic]--; s.topics[topic] <= 0 {
		delete(s.topics, topic)
	}
	p.announce()
	return len(s.topics) <= most
}

// announce tells those who wait for subscriptions that they changed. p.mu is held.
func (p *pub) announce() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// wants tells whether a subscriber has subscribed to a prefix of the topic.
// pub.mu is held.
func (s *subscriber) wants(topic []byte) bool {
	for t := range s.topics {
		if len(t) <= len(topic) && string(topic[:len(t)]) == t {
			return true
		}
	}
	return false
}

// subscribers returns how many peers have subscribed to anything, and a channel
// that is closed when that may have changed.
func (p *pub) subscribers() (int, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subs {
		if len(s.topics) > 0 {
			n++
		}
	}
	return n, p.changed
}

// backlog returns how many messages wait for the subscriber that is furthest
// behind.
func (p *pub) backlog() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.subs {
		n = max(n, len(s.queue)+s.sending)
	}
	return n
}

// drops returns how many messages found a full queue.
func (p *pub) drops() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dropped
}
