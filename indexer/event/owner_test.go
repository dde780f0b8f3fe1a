package event

import (
	"errors"
	"testing"
)

func owned(change func(*Worker)) *Worker {
	w := &Worker{Source: Source{Model: "m", Group: "g", Instance: "i", Rank: 2}, Endpoint: "tcp://node-1:5557", BlockSize: 16, CacheOwner: AutoOwner}
	if change != nil {
		change(w)
	}
	return w
}

func TestOwnerIDs(t *testing.T) {
	w := owned(nil)
	w.Complete()
	// Engines are started with these: they never change.
	const id = "[e558eac9546851ef2a768e9f838e8ff4:8721a23173fae6670efd043fcd0df3b1]/0000000000000000/32e3f639e2d77fd2234a2a890610ac36"
	if w.CacheOwner != id || w.Topic != "kvcr-87e15dae5fdf097ae8c8c97cdff76145" || w.Validate() != nil {
		t.Errorf("got %s, topic %s, %v", w.CacheOwner, w.Topic, w.Validate())
	}
	seen := map[string]bool{id: true}
	for name, change := range map[string]func(*Worker){
		"model":      func(w *Worker) { w.Model = "n" },
		"block size": func(w *Worker) { w.BlockSize = 32 },
		"group":      func(w *Worker) { w.Group = "h" },
		"dc":         func(w *Worker) { w.Labels = map[string]string{"dc": "west"} },
		"endpoint":   func(w *Worker) { w.Endpoint = "tcp://node-2:5557" },
		"rank":       func(w *Worker) { w.Rank = 3 },
	} {
		if id := OwnerID(owned(change)); seen[id] || !isOwnerID(id) {
			t.Errorf("%s makes no difference, or no id: %s", name, id)
		} else {
			seen[id] = true
		}
	}
	for name, change := range map[string]func(*Worker){
		"instance": func(w *Worker) { w.Instance = "j" },
		"replay":   func(w *Worker) { w.ReplayEndpoint = "tcp://node-1:5558" },
		"labels":   func(w *Worker) { w.Labels = map[string]string{"rack": "1"} },
	} {
		if got := OwnerID(owned(change)); got != id {
			t.Errorf("%s makes a difference: %s", name, got)
		}
	}
	w = owned(func(w *Worker) { w.Topic, w.CacheOwner = "mine", id })
	w.Complete()
	if w.Topic != "mine" || w.CacheOwner != id {
		t.Errorf("what is said is replaced: %+v", w)
	}
	w = owned(func(w *Worker) { w.CacheOwner = "" })
	if w.Complete(); w.Topic != "" || w.CacheOwner != "" {
		t.Errorf("what nobody asked for: %+v", w)
	}
}

func TestOwnersOfNobody(t *testing.T) {
	id := OwnerID(owned(nil))
	for _, bad := range []string{"Auto", "x", id + "0", id[1:], "[" + id, id[:10] + "G" + id[11:], id[:40] + "A" + id[41:], " " + id} {
		if err := owned(func(w *Worker) { w.CacheOwner = bad }).Validate(); !errors.Is(err, ErrWorker) {
			t.Errorf("%q: got %v", bad, err)
		}
	}
	for _, endpoint := range []string{"tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://[0:0::0]:5557", "tcp://[::ffff:0.0.0.0]:5557", "tcp://[::%lo]:5557"} {
		for _, owner := range []string{AutoOwner, id, ""} {
			err := owned(func(w *Worker) { w.CacheOwner, w.Endpoint = owner, endpoint }).Validate()
			if errors.Is(err, ErrWorker) != (owner != "") {
				t.Errorf("%s of %q: got %v", endpoint, owner, err)
			}
		}
	}
}

func TestConfinedEndpoints(t *testing.T) {
	for endpoint, want := range map[string]bool{
		"tcp://127.0.0.1:1": true, "tcp://127.8.9.1:1": true, "tcp://[::1]:1": true, "tcp://localhost:1": true, "tcp://LocalHost:1": true, "ipc:///tmp/x": true,
		"tcp://[::ffff:127.0.0.1]:1": true, "tcp://10.0.0.1:1": false, "tcp://node:1": false, "tcp://[fe80::1]:1": false, "tcp://*:1": false,
	} {
		if got := (&Worker{Endpoint: endpoint}).Confined(); (got == endpoint) != want {
			t.Errorf("%s: %q", endpoint, got)
		}
		if got := (&Worker{Endpoint: "tcp://node:1", ReplayEndpoint: endpoint}).Confined(); (got == endpoint) != want {
			t.Errorf("replay %s: %q", endpoint, got)
		}
	}
}
