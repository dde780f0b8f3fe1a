package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvmesh/kvmesh/bridge/zmtp"
	"github.com/kvmesh/kvmesh/indexer/event"
)

// atOnce is how many engines are dialled at a time.
const atOnce = 32

// engines dials the sockets of workers.
func (c *checker) engines(ctx context.Context, workers []event.Worker) {
	if len(workers) == 0 {
		c.add(Warn, "engines", "all", "register workers: kvmesh register --worker w0=tcp://host:5557,replay=tcp://host:5657", "no worker is registered or given")
		return
	}
	found := make([][]Finding, len(workers))
	var wg sync.WaitGroup
	turn := make(chan struct{}, atOnce)
	for i, w := range workers {
		turn <- struct{}{}
		wg.Go(func() {
			defer func() { <-turn }()
			one := checker{Options: c.Options}
			one.engine(ctx, &w)
			found[i] = one.found
		})
	}
	wg.Wait()
	for _, f := range found {
		c.found = append(c.found, f...)
	}
}

func (c *checker) engine(ctx context.Context, w *event.Worker) {
	at := fmt.Sprintf("%s rank %d", w.Instance, w.Rank)
	e, err := event.ParseEndpoint(w.Endpoint)
	switch {
	case err != nil:
		c.add(Fail, "engines", at, "", "%v", err)
		return
	case e.Bind:
		c.add(OK, "engines", at, "", "the engine connects to the bridge at %s: nothing to dial", w.Endpoint)
	default:
		conn, err := c.dial(ctx, e, zmtp.SUB)
		if err != nil {
			c.add(Fail, "engines", at, dialFix(err, "PUB"), "%s: %v", w.Endpoint, err)
		} else {
			c.add(OK, "engines", at, "", "a PUB socket answers at %s", w.Endpoint)
			conn.Close()
		}
	}
	if w.ReplayEndpoint == "" {
		c.add(Warn, "engines", at, `set replay_endpoint in the engine's --kv-events-config, and register it`, "there is no replay socket: what is lost stays lost")
		return
	}
	c.replay(ctx, at, w.ReplayEndpoint)
}

func (c *checker) dial(ctx context.Context, e event.Endpoint, t zmtp.SocketType) (*zmtp.Conn, error) {
	o := zmtp.Default()
	o.HandshakeTimeout = c.Timeout
	return zmtp.Dial(ctx, e.Network, e.Address, t, o)
}

// replay asks a replay socket for what comes after everything: it answers with
// its end marker, and sends nothing again.
func (c *checker) replay(ctx context.Context, at, endpoint string) {
	e, err := event.ParseEndpoint(endpoint)
	if err != nil {
		c.add(Fail, "engines", at, "", "%v", err)
		return
	}
	conn, err := c.dial(ctx, e, zmtp.DEALER)
	if err != nil {
		c.add(Fail, "engines", at, dialFix(err, "replay"), "%s: %v", endpoint, err)
		return
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(c.Timeout))
	var m zmtp.Message
	if err = conn.Send(nil, []byte{255, 255, 255, 255, 255, 255, 255, 255}); err == nil {
		err = conn.Recv(&m)
	}
	if err != nil {
		c.add(Fail, "engines", at, "the engine's event thread may hang; a busy engine answers late: try again with a longer --timeout",
			"the replay socket at %s takes a request and does not answer: %v", endpoint, err)
		return
	}
	c.add(OK, "engines", at, "", "the replay socket answers at %s", endpoint)
}

// dialFix says what to do about a socket that can't be dialled.
func dialFix(err error, what string) string {
	var dns *net.DNSError
	switch {
	case errors.As(err, &dns):
		return "the host name is not known here: check from where bridges run, and register one that they can resolve"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "nothing listens there: start the engine with KV events on (--kv-events-config), bound to an address that is reached from here (tcp://*:PORT)"
	case errors.Is(err, zmtp.ErrSocketType) && what == "PUB":
		return "that is another kind of socket: endpoint and replay_endpoint may be the wrong way round"
	case errors.Is(err, zmtp.ErrSocketType):
		return "that is another kind of socket: endpoint and replay_endpoint may be the wrong way round, or collide with a port of another rank"
	case errors.Is(err, zmtp.ErrGreeting), errors.Is(err, zmtp.ErrVersion), errors.Is(err, zmtp.ErrReady):
		return "something else than ZMQ listens there: it may be the engine's HTTP port"
	case errors.Is(err, zmtp.ErrMechanism):
		return "kvmesh speaks ZMQ without CURVE or PLAIN: keep engines and bridges on a private network instead"
	case errors.Is(err, zmtp.ErrHandshakeTimeout), errors.Is(err, context.DeadlineExceeded):
		return "a firewall may drop the packets, or something else than ZMQ listens there, such as the engine's HTTP port"
	}
	return ""
}

// server looks at an indexer over HTTP.
func (c *checker) server(ctx context.Context) {
	began := time.Now()
	var ready struct {
		Ready   bool     `json:"ready"`
		Reasons []string `json:"reasons"`
		Lag     uint64   `json:"lag"`
	}
	resp, err := c.get(ctx, "/ready", &ready)
	if err != nil {
		c.add(Fail, "server", c.Server, "start kvmesh indexer (or serve); it takes HTTP from other machines only with --http 0.0.0.0:8090", "%v", err)
		return
	}
	if ready.Ready {
		c.add(OK, "server", c.Server, "", "ready, %d records behind", ready.Lag)
	} else {
		c.add(Fail, "server", c.Server, "wait, if the lag shrinks; else look at its log", "not ready: %s", strings.Join(ready.Reasons, "; "))
	}
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		// The header has whole seconds, cut off.
		if off := date.Add(500 * time.Millisecond).Sub(began.Add(time.Since(began) / 2)); off.Abs() > wantClock+500*time.Millisecond {
			c.add(Fail, "clock", c.Server, "have both machines follow NTP (timedatectl set-ntp true)", "the server's clock is %v ahead of this one", off.Round(time.Second))
		}
	}
	var workers []struct{}
	if resp, err = c.get(ctx, "/workers", &workers); err != nil {
		c.add(Fail, "server", c.Server, "", "/workers: %v", err)
	} else if resp.StatusCode == http.StatusUnauthorized {
		c.add(Fail, "server", c.Server, "give --token", "it wants a bearer token, or another one")
	}
}

func (c *checker) get(ctx context.Context, path string, into any) (*http.Response, error) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(c.Server, "/")+path, nil)
	if err != nil {
		return nil, err
	}
	if c.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusUnauthorized {
		if err := json.Unmarshal(body, into); err != nil {
			return nil, fmt.Errorf("%s: no kvmesh: %w", path, err)
		}
	}
	return resp, nil
}
