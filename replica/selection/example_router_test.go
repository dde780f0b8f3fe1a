package selection_test

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/replica"
	"github.com/kvmesh/kvmesh/replica/load"
	"github.com/kvmesh/kvmesh/replica/selection"
)

// check ends an example that went wrong.
func check(err error) {
	if err != nil {
		panic(err)
	}
}

// router is a router with catalog, index, load and selection in its own process:
// all that `kvmesh indexer` has, without HTTP.
type router struct {
	catalog  *replica.Catalog
	selector *selection.Selector
}

// newRouter starts one over a NATS connection. stop ends it.
func newRouter(nc *nats.Conn) (r *router, stop func()) {
	js, err := jetstream.New(nc)
	check(err)
	index, err := indexer.New(nc, js, indexer.Default(), indexer.Options{})
	check(err)
	shared, err := load.New(load.OverNATS(nc), load.Default(), load.Options{})
	check(err)
	selector, err := selection.New(index, shared, selection.Default(), selection.Options{})
	check(err)
	catalog := replica.NewCatalog(js, replica.DefaultCatalog(), nil, index, selector)
	ctx, cancel := context.WithCancel(context.Background())
	var tasks sync.WaitGroup
	for _, run := range []func(context.Context) error{catalog.Run, index.Run, shared.Run} {
		tasks.Go(func() { check(run(ctx)) })
	}
	for index.Ready() != nil || shared.Ready() != nil {
		time.Sleep(10 * time.Millisecond)
	}
	return &router{catalog, selector}, func() {
		cancel()
		tasks.Wait()
	}
}

// A router in Go needs no HTTP: it has the catalog of workers, the index, the
// shared load and the selection in its own process. Bridges, or another router,
// may run anywhere.
func Example_router() {
	dir, err := os.MkdirTemp("", "kvmesh-example-")
	check(err)
	defer os.RemoveAll(dir)
	// A NATS server with JetStream; here one in the same process.
	s, err := server.NewServer(&server.Options{DontListen: true, JetStream: true, StoreDir: dir, NoSigs: true})
	check(err)
	s.Start()
	defer s.WaitForShutdown()
	defer s.Shutdown()
	nc, err := nats.Connect("", nats.InProcessServer(s), nats.MaxReconnects(-1), nats.ReconnectBufSize(-1))
	check(err)
	defer nc.Close()

	ctx := context.Background()
	js, err := jetstream.New(nc)
	check(err)
	_, err = js.CreateStream(ctx, event.DefaultLog().Config(0, 1))
	check(err)
	r, stop := newRouter(nc)
	defer stop()

	// Two workers, of which b holds the prompt: what its bridge would write.
	p := event.Partition{Model: "m", Group: "default"}
	for _, name := range []string{"a", "b"} {
		check(r.catalog.Register(ctx, event.Worker{
			Source: event.Source{Model: p.Model, Group: p.Group, Instance: name}, Endpoint: "tcp://" + name + ":5557", BlockSize: 4,
		}))
	}
	locals := hash.AppendLocals(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, 4, 0, hash.SeedOf("", ""))
	record := event.AppendRecord(nil, event.Header{Incarnation: 1}, 1, event.AppendStored(nil, event.Device, "", event.Run{Root: true, Locals: locals[:2]}, nil))
	_, err = js.Publish(ctx, event.DefaultLog().Subject(event.Source{Model: p.Model, Group: p.Group, Instance: "b"}), record)
	check(err)

	var res selection.Result
	for res.Overlap.Device == 0 { // until the index has read it
		res, err = r.selector.Select(ctx, &selection.Request{Partition: p, Locals: locals})
		check(err)
	}
	res, err = r.selector.SelectAndReserve(ctx, &selection.Request{Partition: p, Locals: locals})
	check(err)
	fmt.Printf("to %s, which holds %d of %d blocks and has %d tokens to prefill\n", res.Source.Instance, res.Overlap.Device, res.Blocks, res.PrefillTokens)
	check(r.selector.Load().PrefillComplete(ctx, res.ID))
	check(r.selector.Free(ctx, res.ID))
	// Output: to b, which holds 2 of 3 blocks and has 4 tokens to prefill
}
