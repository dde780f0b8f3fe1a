package indexer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// puller takes messages from a consumer, in the order of the stream. The library's
// way has two goroutines, a timer and a parsed subject more for each message, which
// is a fifth of what a small record costs.
type puller struct {
	nc      *nats.Conn
	request string // subject of requests for messages
	sub     *nats.Subscription
	msgs    chan *nats.Msg
	status  chan nats.Status // connected anew
	tick    *time.Ticker

	left      int    // messages that were asked for, and have not come
	delivered uint64 // messages that have come
	quiet     int    // ticks since anything came
}

// pullExpiry is how long a request for messages stands.
const pullExpiry = 30 * time.Second

func newPuller(nc *nats.Conn, js jetstream.JetStream, consumer jetstream.Consumer) (*puller, error) {
	info := consumer.CachedInfo()
	p := &puller{
		nc:      nc,
		request: event.APIPrefix(js) + "CONSUMER.MSG.NEXT." + info.Stream + "." + info.Name,
		msgs:    make(chan *nats.Msg, 2*pullBatch), // with room for what is said beside messages
	}
	var err error
	// Not NewRespInbox: the library would take each message for a reply too.
	if p.sub, err = nc.ChanSubscribe(nc.NewInbox(), p.msgs); err != nil {
		return nil, err
	}
	p.status = nc.StatusChanged(nats.CONNECTED)
	p.tick = time.NewTicker(pullHeartbeat)
	return p, nil
}

func (p *puller) close() {
	p.tick.Stop()
	p.nc.RemoveStatusListener(p.status)
	p.sub.Unsubscribe() // of a connection that is gone there is nothing left
}

// next waits for the next message, and returns it with its sequence in the stream.
// Any error is the end of the consumer.
func (p *puller) next(ctx context.Context) (*nats.Msg, uint64, error) {
	for {
		if err := p.ask(); err != nil {
			return nil, 0, err
		}
		msg, err := p.wait(ctx)
		if err != nil {
			return nil, 0, err
		}
		p.quiet = 0
		if len(msg.Data) == 0 && msg.Header.Get("Status") != "" {
			if err := p.said(msg); err != nil {
				return nil, 0, err
			}
			continue
		}
		p.left--
		p.delivered++
		stream, consumer, ok := ackSequences(msg.Reply)
		if !ok {
			return nil, 0, fmt.Errorf("message with the reply subject %q", msg.Reply)
		}
		if consumer != p.delivered {
			return nil, 0, fmt.Errorf("message %d came as number %d", p.delivered, consumer)
		}
		return msg, stream, nil
	}
}

// ask asks for more messages, if few are to come.
func (p *puller) ask() error {
	if p.left > pullBatch/2 {
		return nil
	}
	more := pullBatch - max(p.left, 0)
	body, err := json.Marshal(map[string]int64{"batch": int64(more), "expires": int64(pullExpiry), "idle_heartbeat": int64(pullHeartbeat)})
	if err != nil {
		return err
	}
	p.left += more
	return p.nc.PublishRequest(p.request, p.sub.Subject, body)
}

// wait waits for what comes next. What is there already costs no look at the clock.
func (p *puller) wait(ctx context.Context) (*nats.Msg, error) {
	select {
	case msg := <-p.msgs:
		return msg, nil
	default:
	}
	for {
		select {
		case msg := <-p.msgs:
			return msg, nil
		case <-p.tick.C:
			const quiet = 3 // two heartbeats, wherever between two ticks the first was
			if p.quiet++; p.quiet == quiet {
				return nil, jetstream.ErrNoHeartbeat
			}
		case <-p.status:
			return nil, errReconnected
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// errReconnected ends a read because the server that was asked is another one now.
var errReconnected = errors.New("indexer: connected to NATS anew")

// serverShutdown is said by a server that stops, and is best asked for nothing any
// more. The connection, or its heartbeat, ends soon.
const serverShutdown = "Server Shutdown"

// said takes in what the server says beside messages.
func (p *puller) said(msg *nats.Msg) error {
	const heartbeat, expired = "100", "408"
	switch status := msg.Header.Get("Status"); status {
	case heartbeat:
	case expired:
		pending, err := strconv.Atoi(msg.Header.Get("Nats-Pending-Messages"))
		if err != nil {
			return fmt.Errorf("a request ended with so many messages to come: %w", err)
		}
		p.left -= pending
	default:
		if why := msg.Header.Get("Description"); why != serverShutdown {
			return fmt.Errorf("NATS says %s, %s", status, why)
		}
	}
	return nil
}

// ackSequences reads the sequences of the stream and of the consumer off a
// message's reply subject: $JS.ACK.stream.consumer.delivered.stream sequence.consumer
// sequence.time.pending, or with a domain and an account's hash behind $JS.ACK, and
// maybe more at the end.
func ackSequences(reply string) (stream, consumer uint64, ok bool) {
	const plain, long = 9, 11
	var at [long + 2]int // where tokens begin
	n := 1
	for i := range len(reply) {
		if reply[i] != '.' {
			continue
		}
		if n == len(at) {
			return 0, 0, false
		}
		at[n] = i + 1
		n++
	}
	first := 5
	switch {
	case n >= long:
		first += 2
	case n != plain:
		return 0, 0, false
	}
	stream, errS := strconv.ParseUint(reply[at[first]:at[first+1]-1], 10, 64)
	consumer, errC := strconv.ParseUint(reply[at[first+1]:at[first+2]-1], 10, 64)
	return stream, consumer, errS == nil && errC == nil
}
