package indexer_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/nats-io/nats.go"
)

// TestConnectionIsShared asks for things on the connection that records come on: a
// record must not be taken for a reply.
func TestConnectionIsShared(t *testing.T) {
	w := newWorld(t, 5)
	echo, err := w.nc.Subscribe("echo", func(m *nats.Msg) { m.Respond(m.Data) })
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Unsubscribe()
	r := w.start(nil)
	of := w.writer("a", 0)
	r.Registered(worker(of))
	rng := rand.New(rand.NewPCG(5, 0))
	var last uint64
	for i := range 300 {
		// One request at a time: of one that is alone the library believes any reply.
		last = w.fill(rng, of, 1)
		want := fmt.Append(nil, i)
		got, err := r.nc.RequestWithContext(w.ctx, "echo", want)
		if err != nil || string(got.Data) != string(want) {
			t.Fatalf("request %d: %v, %q", i, err, got.Data)
		}
	}
	r.reach(last)
}
