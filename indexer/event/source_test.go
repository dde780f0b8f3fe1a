package event

import (
	"errors"
	"strings"
	"testing"
)

func TestEndpoints(t *testing.T) {
	for s, want := range map[string]Endpoint{
		"tcp://127.0.0.1:5557":    {Network: "tcp", Address: "127.0.0.1:5557"},
		"tcp://worker-3.svc:5557": {Network: "tcp", Address: "worker-3.svc:5557"},
		"tcp://[::1]:5557":        {Network: "tcp", Address: "[::1]:5557"},
		"tcp://*:5557":            {Network: "tcp", Address: ":5557", Bind: true},
		"tcp://0.0.0.0:5557":      {Network: "tcp", Address: "0.0.0.0:5557", Bind: true},
		"tcp://[::]:5557":         {Network: "tcp", Address: "[::]:5557", Bind: true},
		"ipc:///run/kv.sock":      {Network: "unix", Address: "/run/kv.sock"},
	} {
		if got, err := ParseEndpoint(s); err != nil || got != want {
			t.Errorf("%q: got %+v, error %v, want %+v", s, got, err, want)
		}
	}
	for _, s := range []string{"", "127.0.0.1:5557", "udp://127.0.0.1:5557", "inproc://x", "tcp://127.0.0.1", "tcp://:5557", "tcp://127.0.0.1:0", "tcp://127.0.0.1:99999", "tcp://127.0.0.1:port", "tcp://a b:1", "ipc://", "ipc://" + strings.Repeat("x", 108)} {
		if got, err := ParseEndpoint(s); err == nil {
			t.Errorf("%q: got %+v, want an error", s, got)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Worker{Source: Source{Model: "m", Group: "default", Instance: "w", Rank: 0}, Endpoint: "tcp://h:1", BlockSize: 16}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for field, spoil := range map[string]func(*Worker){
		"instance_id":     func(w *Worker) { w.Instance = "" },
		"model_name":      func(w *Worker) { w.Model = "" },
		"routing_group":   func(w *Worker) { w.Group = strings.Repeat("g", MaxName+1) },
		"topic":           func(w *Worker) { w.Topic = strings.Repeat("t", MaxName+1) },
		"endpoint":        func(w *Worker) { w.Endpoint = "udp://h:1" },
		"block_size":      func(w *Worker) { w.BlockSize = 0 },
		"dp_rank":         func(w *Worker) { w.Rank = MaxRank + 1 },
		"replay_endpoint": func(w *Worker) { w.ReplayEndpoint = "nonsense" },
	} {
		w := good
		spoil(&w)
		if err := w.Validate(); !errors.Is(err, ErrWorker) || !strings.Contains(err.Error(), field) {
			t.Errorf("bad %s: error %v, want ErrWorker that names it", field, err)
		}
	}
	for _, replay := range []string{good.Endpoint, "tcp://*:2"} {
		w := good
		w.ReplayEndpoint = replay
		if err := w.Validate(); !errors.Is(err, ErrWorker) {
			t.Errorf("replay endpoint %q: error %v", replay, err)
		}
	}
}
