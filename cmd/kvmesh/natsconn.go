package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// natsFlags are which NATS to use.
type natsFlags struct {
	url      string
	listen   string
	replicas int
	shards   int
	auth     natsAuth
}

func (n *natsFlags) add(flags *pflag.FlagSet, embedded bool) {
	if embedded {
		flags.StringVar(&n.url, "nats", "", "URL of the NATS servers to use; empty: one that is embedded")
		flags.StringVar(&n.listen, "nats-listen", "", "address on which the embedded NATS server takes clients, such as 127.0.0.1:4222; empty: none")
	} else {
		flags.StringVar(&n.url, "nats", nats.DefaultURL, "URL of the NATS servers")
	}
	n.auth.add(flags)
	flags.IntVar(&n.replicas, "replicas", 1, "how many NATS servers keep the log and the catalog, should they have to be made")
	flags.IntVar(&n.shards, "log-shards", 1, fmt.Sprintf("how many streams the log is in, 1 to %d; the same for all bridges and indexers, and not to be changed while there is a log", event.MaxShards))
}

// connect connects to NATS, to the embedded server if there is one. It does not
// wait for servers that can't be reached: the connection comes up by itself.
func (n *natsFlags) connect(name string, embedded *server.Server, log *slog.Logger) (*nats.Conn, error) {
	url := n.url
	var lastLogged atomic.Int64
	complain := func(err error) {
		now := time.Now().Unix()
		if last := lastLogged.Load(); now-last >= 10 && lastLogged.CompareAndSwap(last, now) {
			log.Error("can't reach NATS, trying again", "url", redact(url), "error", err)
		}
	}
	options := []nats.Option{
		nats.Name(name),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1), // what can't be sent fails at once, and whoever sent it decides
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(100*time.Millisecond, 100*time.Millisecond),
		nats.RetryOnFailedConnect(true),
		nats.PingInterval(5 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) { complain(err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				log.Warn("connection to NATS lost", "url", redact(url), "error", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.Info("connected to NATS", "url", redact(nc.ConnectedUrl()))
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			log.Warn("NATS client error", "error", err)
		}),
	}
	auth, err := n.auth.options()
	if err != nil {
		return nil, err
	}
	if embedded != nil && n.auth.given() {
		return nil, errors.New("--nats-creds and the like are for the servers of --nats, which is not given")
	}
	options = append(options, auth...)
	if embedded != nil {
		options = append(options, nats.InProcessServer(embedded))
		url = nats.DefaultURL // not dialled
	}
	nc, err := nats.Connect(url, options...)
	if err != nil {
		return nil, fmt.Errorf("NATS at %s: %w", redact(url), err)
	}
	if !nc.IsConnected() {
		complain(errors.New("no server answers"))
	}
	return nc, nil
}

// redact takes the password out of a URL.
func redact(url string) string {
	if at := strings.LastIndex(url, "@"); at >= 0 {
		if slashes := strings.Index(url, "://"); slashes >= 0 && slashes < at {
			return url[:slashes+3] + "…" + url[at:]
		}
		return "…" + url[at:]
	}
	return url
}

// embed starts a NATS server in this process, with JetStream on disk.
func (n *natsFlags) embed(dataDir string, log *slog.Logger) (*server.Server, error) {
	options := &server.Options{
		ServerName:   "kvmesh",
		JetStream:    true,
		StoreDir:     filepath.Join(dataDir, "nats"),
		SyncInterval: time.Second,
		NoSigs:       true,
		DontListen:   n.listen == "",
	}
	if n.listen != "" {
		host, port, err := net.SplitHostPort(n.listen)
		if err != nil {
			return nil, fmt.Errorf("--nats-listen is %q: want host:port", n.listen)
		}
		number, err := strconv.ParseUint(port, 10, 16)
		if err != nil {
			return nil, fmt.Errorf("--nats-listen is %q: want a port from 1 to 65535", n.listen)
		}
		options.Host, options.Port = host, int(number)
	}
	lock, err := lockDir(dataDir)
	if err != nil {
		return nil, fmt.Errorf("--data-dir: %w", err)
	}
	s, err := server.NewServer(options)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("embedded NATS: %w", err)
	}
	failed := make(chan string, 1)
	s.SetLoggerV2(&natsLog{log: log.With("component", "nats"), failed: failed}, false, false, false)
	s.Start()
	go func() {
		s.WaitForShutdown()
		lock.Close()
	}()
	for began := time.Now(); !s.ReadyForConnections(50 * time.Millisecond); {
		select {
		case why := <-failed:
			s.Shutdown()
			return nil, fmt.Errorf("embedded NATS: %s", why)
		default:
		}
		if time.Since(began) > 30*time.Second {
			s.Shutdown()
			return nil, errors.New("embedded NATS: not ready after 30 s")
		}
	}
	return s, nil
}

// lockPatience is how long a server may take to let go of its directory.
const lockPatience = 3 * time.Second

// lockDir makes a directory this server's own until the file that it returns is
// closed, or the process has ended: two servers on the same files would ruin them.
func lockDir(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if time.Since(began) > lockPatience {
			f.Close()
			return nil, fmt.Errorf("%s is in use by another kvmesh: %w", dir, err)
		}
	}
}

// natsLog takes the log of the embedded server.
type natsLog struct {
	log    *slog.Logger
	failed chan<- string
}

func (l *natsLog) Noticef(format string, v ...any) { l.log.Debug(fmt.Sprintf(format, v...)) }
func (l *natsLog) Warnf(format string, v ...any)   { l.log.Warn(fmt.Sprintf(format, v...)) }
func (l *natsLog) Errorf(format string, v ...any)  { l.log.Error(fmt.Sprintf(format, v...)) }
func (l *natsLog) Debugf(format string, v ...any)  {}
func (l *natsLog) Tracef(format string, v ...any)  {}
func (l *natsLog) Fatalf(format string, v ...any) {
	text := fmt.Sprintf(format, v...)
	l.log.Error(text)
	select {
	case l.failed <- text:
	default:
	}
}
