package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica"
)

const (
	// wantPayload is the largest record that a bridge makes.
	wantPayload = 512 << 10
	// wantClock is how far clocks may be apart.
	wantClock = 2 * time.Second
	// slowRTT is a round trip that makes publishing slow: one record of a source
	// is under way at a time.
	slowRTT = 20 * time.Millisecond
)

// redacted returns the URL of NATS without passwords.
func (c *checker) redacted() string {
	var out []string
	for _, one := range strings.Split(c.NATS, ",") {
		if u, err := url.Parse(strings.TrimSpace(one)); err == nil {
			one = u.Redacted()
		}
		out = append(out, one)
	}
	return strings.Join(out, ",")
}

// connectFix says what to do if NATS can't be reached.
func connectFix(err error) string {
	switch {
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout):
		return "start nats-server, or correct --nats (the server that kvmesh serve embeds is reached with its --nats-listen only; --nats '' leaves NATS out); " +
			"a firewall between here and there drops what it does not refuse"
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired):
		return "say who you are: --nats-user and --nats-password, --nats-token, --nats-nkey or --nats-creds"
	case strings.Contains(err.Error(), "tls"), strings.Contains(err.Error(), "x509"):
		return "the server wants TLS that this side can't do: a tls:// URL, and SSL_CERT_FILE for a private authority"
	}
	return ""
}

func (c *checker) connection(nc *nats.Conn) {
	at := nc.ConnectedUrlRedacted()
	rtt, err := nc.RTT()
	switch {
	case err != nil:
		c.add(Fail, "nats", at, "", "no answer to a ping: %v", err)
	case rtt > slowRTT:
		c.add(Warn, "nats", at, "run bridges and NATS in one place; each worker has one record under way at a time",
			"version %s, a round trip takes %v", nc.ConnectedServerVersion(), rtt.Round(time.Microsecond))
	default:
		c.add(OK, "nats", at, "", "version %s, a round trip takes %v", nc.ConnectedServerVersion(), rtt.Round(time.Microsecond))
	}
	if most := nc.MaxPayload(); most < wantPayload/2 {
		c.add(Fail, "nats", at, "max_payload: 1MB in the server's configuration", "max_payload is %d bytes, records take up to %d", most, wantPayload)
	} else if most < wantPayload {
		c.add(Warn, "nats", at, "max_payload: 1MB in the server's configuration", "max_payload is %d bytes: large batches are split more often", most)
	}
	if n := len(nc.Servers()); n < c.Replicas {
		c.add(Fail, "nats", at, "start the other servers of the cluster, with the same cluster name and routes to each other",
			"%d servers are known, and the log is to be kept by %d", n, c.Replicas)
	}
}

// account looks at JetStream and its limits, and tells whether there is one.
func (c *checker) account(ctx context.Context, nc *nats.Conn, js jetstream.JetStream) bool {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	info, err := js.AccountInfo(ctx)
	at := nc.ConnectedUrlRedacted()
	if err != nil {
		fix := "the servers of the cluster may not have found each other: a majority has to be up"
		if errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) || errors.Is(err, nats.ErrNoResponders) {
			fix = "start nats-server with -js -sd DIRECTORY, or jetstream { store_dir: ... }; with accounts, jetstream: enabled in this one"
		}
		c.add(Fail, "nats", at, fix, "JetStream does not answer: %v", err)
		return false
	}
	tiers := maps.Clone(info.Tiers)
	if len(tiers) == 0 {
		tiers = map[string]jetstream.Tier{"": info.Tier}
	}
	if info.API.Level < 1 {
		c.add(Fail, "nats", at, "update the servers to NATS 2.11 or later", "JetStream knows no keys that end by themselves, which bridges' leases are")
	}
	good := true
	for _, name := range slices.Sorted(maps.Keys(tiers)) {
		good = c.tier(at, name, tiers[name]) && good
	}
	if good {
		c.add(OK, "nats", at, "", "JetStream has room: %s of storage used, of %s", size(int64(info.Store)), size(info.Limits.MaxStore))
	}
	return true
}

// tier looks at the limits of an account.
func (c *checker) tier(at, name string, t jetstream.Tier) bool {
	if name != "" {
		at += " tier " + name
	}
	good := true
	l := &t.Limits
	if l.MaxStore == 0 {
		c.add(Fail, "nats", at, "let the account have file storage (max_file)", "the account has no file storage")
		good = false
	} else if l.MaxStore > 0 && float64(t.Store) > .8*float64(l.MaxStore) {
		c.add(Warn, "nats", at, "raise max_file: a full log refuses records", "%s of %s are used", size(int64(t.Store)), size(l.MaxStore))
		good = false
	}
	if l.MaxStreams >= 0 && l.MaxStreams-t.Streams < 1 && t.Streams == 0 {
		c.add(Fail, "nats", at, "raise max_streams to at least 4", "the account may have %d streams", l.MaxStreams)
		good = false
	}
	return good
}

func size(n int64) string {
	switch {
	case n < 0:
		return "unlimited"
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}

// log looks at the streams of the log, and NATS's clock.
func (c *checker) log(ctx context.Context, js jetstream.JetStream) {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	log, ok := c.whichLog(ctx, js)
	if !ok {
		return
	}
	clock := false
	for shard := range log.Shards {
		want := log.Config(shard, c.Replicas)
		at := "stream " + want.Name
		asked := time.Now()
		stream, err := js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			c.add(OK, "log", at, "", "not there yet: the first bridge or indexer makes it")
			continue
		}
		if err != nil {
			c.add(Fail, "log", at, "", "%v", err)
			continue
		}
		info := stream.CachedInfo()
		if !clock {
			clock = true
			c.clock(info, asked)
		}
		c.config(&info.Config, &want)
		c.copies(info)
		c.add(OK, "log", at, "", "%d records, %s, %d sources, sequences %d to %d", info.State.Msgs, size(int64(info.State.Bytes)), info.State.NumSubjects,
			info.State.FirstSeq, info.State.LastSeq)
	}
}

// whichLog finds out in how many streams the log is.
func (c *checker) whichLog(ctx context.Context, js jetstream.JetStream) (log event.Log, ok bool) {
	log = event.DefaultLog()
	if c.Shards > 0 {
		log.Shards = c.Shards
	}
	names, put, err := event.LogStreams(ctx, js)
	if err != nil {
		c.add(Fail, "log", "all", "", "%v", err)
		return log, false
	}
	if len(put) > 0 { // these, or those that it makes, are not to be deleted by people
		c.add(Fail, "log", "stream "+put[0], "let kvmesh reshard end, or start it again with the number that is wanted",
			"it was put aside by kvmesh reshard, which is at work or was interrupted: nobody opens the log")
		return log, false
	}
	const fix = "give all bridges and indexers the --log-shards that the log was made with, and delete the streams that they don't use"
	for i, name := range names {
		found, _, known := event.LogOf(name)
		switch {
		case !known:
			c.add(Fail, "log", "stream "+name, "have it take other subjects, or delete it", "it takes records (kv.>), and is none of the log's")
			return log, false
		case i == 0 && c.Shards == 0:
			log = found
		case found != log:
			c.add(Fail, "log", "stream "+name, fix, "it is of a log in %d streams, where one in %d is wanted", found.Shards, log.Shards)
			return log, false
		}
	}
	return log, true
}

// clock compares NATS's clock with this machine's.
func (c *checker) clock(info *jetstream.StreamInfo, asked time.Time) {
	middle := asked.Add(time.Since(asked) / 2)
	if off := info.TimeStamp.Sub(middle).Round(time.Millisecond); off.Abs() > wantClock {
		c.add(Fail, "clock", "NATS", "have both machines follow NTP (timedatectl set-ntp true): incarnations of engines are told apart by time",
			"the server's clock is %v ahead of this one", off)
	} else {
		c.add(OK, "clock", "NATS", "", "the server's clock is within %v of this one", max(off.Abs(), time.Since(asked).Round(time.Millisecond)))
	}
}

// config looks at a stream's configuration.
func (c *checker) config(have, want *jetstream.StreamConfig) {
	at := "stream " + want.Name
	edit := func(flags string) string { return "nats stream edit " + want.Name + " " + flags }
	if have.Storage != want.Storage {
		c.add(Warn, "log", at, "delete the stream while bridges run: they make it again, and write checkpoints", "it is kept in memory: a restart of NATS empties it")
	}
	if have.MaxAge > 0 || have.MaxMsgs > 0 || have.MaxMsgsPerSubject > 0 {
		c.add(Fail, "log", at, edit("--max-age=-1 --max-msgs=-1 --max-msgs-per-subject=-1"),
			"records go by age or number (max age %v, max messages %d, %d a subject): indexers lose state", have.MaxAge, have.MaxMsgs, have.MaxMsgsPerSubject)
	}
	if have.Discard != want.Discard && have.MaxBytes > 0 {
		c.add(Fail, "log", at, edit("--discard=new"), "a full log forgets its oldest records: indexers lose state")
	}
	if have.Replicas < want.Replicas {
		c.add(Warn, "log", at, edit(fmt.Sprintf("--replicas=%d", want.Replicas)), "%d servers keep it, %d are wanted", have.Replicas, want.Replicas)
	}
	if have.Duplicates < want.Duplicates {
		c.add(Warn, "log", at, edit("--dupe-window=30s"), "retries are recognised for %v only", have.Duplicates)
	}
	if !slices.Equal(have.Subjects, want.Subjects) {
		c.add(Fail, "log", at, edit("--subjects="+strings.Join(want.Subjects, ",")), "its subjects are %v, want %v", have.Subjects, want.Subjects)
	}
}

// copies looks at who keeps a stream.
func (c *checker) copies(info *jetstream.StreamInfo) {
	if info.Cluster == nil {
		return
	}
	at := "stream " + info.Config.Name
	if info.Cluster.Leader == "" {
		c.add(Fail, "log", at, "start the NATS servers that are down: a majority has to be up", "it has no leader")
	}
	for _, r := range info.Cluster.Replicas {
		if r.Offline || !r.Current {
			c.add(Warn, "log", at, "start the server, or wait until it has caught up", "%s is not up to date (offline: %v, %d records behind)", r.Name, r.Offline, r.Lag)
		}
	}
}

// bridges asks who reads engines, and how that goes.
func (c *checker) bridges(ctx context.Context, nc *nats.Conn) {
	inbox := make(chan *nats.Msg, 4096)
	sub, err := nc.ChanSubscribe(event.StatusSubjects, inbox)
	if err == nil {
		defer sub.Unsubscribe()
		if err = nc.Publish(event.StatusRequestSubject, nil); err == nil {
			err = nc.FlushTimeout(c.Timeout)
		}
	}
	if err == nil {
		err = nc.LastError()
	}
	if err != nil {
		c.add(Fail, "bridges", event.StatusSubjects, "allow clients to subscribe to kvmesh.> and to publish on kvmesh.>", "%v", err)
		return
	}
	told := map[string]map[string]event.ListenerStatus{}
	quiet := time.NewTimer(min(c.Timeout, 1500*time.Millisecond))
	defer quiet.Stop()
	for listening := true; listening; {
		select {
		case msg := <-inbox:
			var st event.Status
			if json.Unmarshal(msg.Data, &st) != nil {
				continue
			}
			if told[st.Bridge] == nil {
				told[st.Bridge] = map[string]event.ListenerStatus{}
			}
			for _, l := range st.Listeners {
				told[st.Bridge][l.Source] = l
			}
		case <-quiet.C:
			listening = false
		case <-ctx.Done():
			listening = false
		}
	}
	if len(told) == 0 {
		c.add(Warn, "bridges", "all", "start kvmesh bridge (or serve) with the same --nats", "no bridge answers")
	}
	for _, id := range slices.Sorted(maps.Keys(told)) {
		c.bridge(id, told[id])
	}
}

func (c *checker) bridge(id string, listeners map[string]event.ListenerStatus) {
	active := 0
	for _, l := range listeners {
		if l.State == event.StateActive {
			active++
		}
	}
	c.add(OK, "bridges", id, "", "reads %d of %d workers", active, len(listeners))
	for _, key := range slices.Sorted(maps.Keys(listeners)) {
		l := listeners[key]
		if l.Uncertain {
			c.add(Warn, "bridges", id, "give engines a replay socket with room for what is published while a bridge restarts (buffer_steps)",
				"%s: batches were lost for good", key)
		}
		if l.State == event.StateFailed {
			c.add(Fail, "bridges", id, "", "%s: %s", key, l.LastError)
		}
	}
}

// gathered is an observer that keeps what it is told until the catalog is read.
type gathered struct {
	workers map[event.Source]event.Worker
	read    chan struct{}
}

func (g *gathered) Registered(w event.Worker)   { g.workers[w.Source] = w }
func (g *gathered) Unregistered(s event.Source) { delete(g.workers, s) }
func (g *gathered) CatalogRead() {
	select {
	case <-g.read:
	default:
		close(g.read)
	}
}

// catalog returns the workers that are registered.
func (c *checker) catalog(ctx context.Context, js jetstream.JetStream) []event.Worker {
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	where := replica.DefaultCatalog()
	if _, err := js.KeyValue(ctx, where.Bucket); err != nil {
		if errors.Is(err, jetstream.ErrBucketNotFound) {
			c.add(OK, "bridges", "catalog", "", "not there yet: no worker is registered")
		} else {
			c.add(Fail, "bridges", "catalog", "", "%v", err)
		}
		return nil
	}
	g := &gathered{workers: map[event.Source]event.Worker{}, read: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		replica.NewCatalog(js, where, c.Logger, g).Run(ctx)
	}()
	select {
	case <-g.read:
	case <-ctx.Done():
		c.add(Fail, "bridges", "catalog", "", "it could not be read within %v", c.Timeout)
	}
	cancel()
	<-ended
	return slices.SortedFunc(maps.Values(g.workers), func(a, b event.Worker) int { return strings.Compare(a.Source.Key(), b.Source.Key()) })
}
