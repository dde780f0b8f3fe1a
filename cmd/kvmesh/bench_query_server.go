package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/api"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/blocks"
)

// The fleet of the benchmark, which is that of bench index: each sequence is held
// by a group of workers.
const (
	fleetWorkers   = blocks.Workers
	fleetGroup     = blocks.Share     // workers that hold the same sequences
	fleetSequences = blocks.PerWorker // of each worker
	fleetBlocks    = blocks.Length
	fleetBlockSize = blocks.BlockSize
)

var fleetPartition = event.Partition{Model: "bench", Group: "default"}

func fleetSource(worker int) event.Source {
	return event.Source{Model: fleetPartition.Model, Group: fleetPartition.Group, Instance: fmt.Sprintf("worker-%02d", worker)}
}

// fleetTokens returns the tokens of a sequence.
func fleetTokens(sequence int) []uint32 { return blocks.PromptTokens(uint64(sequence), fleetBlocks) }

// fleetLocals returns the local hashes of a sequence.
func fleetLocals(sequence int) []uint64 {
	return hash.AppendLocals(nil, fleetTokens(sequence), fleetBlockSize, 0, hash.Seed)
}

// held returns the i-th sequence that a worker holds.
func held(worker, i int) int { return worker/fleetGroup*fleetSequences + i }

// usage is what a process has used up, as the server of the benchmark tells.
type usage struct {
	CPU     time.Duration `json:"cpu_ns"`
	Mallocs uint64        `json:"mallocs"`
	Addr    string        `json:"addr,omitempty"`
}

// serveQueries is the benchmark's server: an index filled through its log, behind
// HTTP. It says where it listens, and then, for each line that it reads, what it
// has used up. It ends with its input.
func serveQueries(ctx context.Context, dir string, in io.Reader, out io.Writer, profile *profiler) error {
	ctx, stop := context.WithCancel(ctx)
	quiet := slog.New(slog.DiscardHandler)
	nats, err := (&natsFlags{}).embed(dir, quiet)
	if err != nil {
		stop()
		return err
	}
	defer nats.WaitForShutdown()
	defer nats.Shutdown()
	nc, err := (&natsFlags{}).connect("kvmesh bench", nats, quiet)
	if err != nil {
		stop()
		return err
	}
	defer nc.Close()
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer stop()
	index, err := fillIndex(ctx, &tasks, nc)
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	front := api.New(api.Default(), index, nil, api.NewFleet(nil), nil, nil).HTTPServer()
	front.Handler = &withFloor{next: front.Handler}
	tasks.Go(func() { front.Serve(listener) })
	defer front.Close()
	if err := profile.start(); err != nil {
		return err
	}
	say := json.NewEncoder(out)
	if err := say.Encode(usage{Addr: listener.Addr().String()}); err != nil {
		return err
	}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		if err := say.Encode(usage{CPU: cpuTime(), Mallocs: m.Mallocs}); err != nil {
			return err
		}
	}
	return profile.stop()
}

// fillIndex writes what the fleet holds to the log, and returns an index that has
// read it.
func fillIndex(ctx context.Context, tasks *sync.WaitGroup, nc *nats.Conn) (*indexer.Indexer, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	config := indexer.Default()
	config.CheckInterval = time.Minute // what it does then is not a query's cost
	if _, err := js.CreateStream(ctx, config.Log.Config(0, 1)); err != nil {
		return nil, err
	}
	index, err := indexer.New(nc, js, config, indexer.Options{})
	if err != nil {
		return nil, err
	}
	last := uint64(0)
	for worker := range fleetWorkers {
		s := fleetSource(worker)
		index.Registered(event.Worker{Source: s, Endpoint: "tcp://127.0.0.1:1", BlockSize: fleetBlockSize})
		for i := range fleetSequences {
			run := event.Run{Root: true, Locals: fleetLocals(held(worker, i))}
			op := event.AppendStored(nil, event.Device, "", run, nil)
			n := uint64(i)
			ack, err := js.Publish(ctx, event.DefaultLog().Subject(s), event.AppendRecord(nil, event.Header{Incarnation: 1, Batches: true, First: n, Last: n}, 1, op))
			if err != nil {
				return nil, err
			}
			last = ack.Sequence
		}
	}
	index.CatalogRead()
	tasks.Go(func() { index.Run(ctx) })
	waiting, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return index, index.WaitFor(waiting, event.Position{LogSeq: last})
}

// withFloor answers /floor beside the API: it reads the body, and answers with the
// last body that was put there. That is what net/http costs alone.
type withFloor struct {
	next  http.Handler
	reply []byte
	pool  sync.Pool
}

func (f *withFloor) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != "/floor" {
		f.next.ServeHTTP(w, r)
		return
	}
	if r.Method == http.MethodPut {
		f.reply, _ = io.ReadAll(r.Body)
		return
	}
	buf, _ := f.pool.Get().(*[]byte)
	if buf == nil || int64(cap(*buf)) < r.ContentLength {
		b := make([]byte, r.ContentLength)
		buf = &b
	}
	defer f.pool.Put(buf)
	if _, err := io.ReadFull(r.Body, (*buf)[:r.ContentLength]); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header()["Content-Type"] = []string{"application/json"}
	w.Write(f.reply)
}

// peer is the server of the benchmark as its client sees it.
type peer struct {
	say  io.WriteCloser
	hear *json.Decoder
	addr string
	wait func() error
}

// usage asks what the server has used up.
func (p *peer) usage() (u usage, err error) {
	if _, err = fmt.Fprintln(p.say); err == nil {
		err = p.hear.Decode(&u)
	}
	return u, err
}
