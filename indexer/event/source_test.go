package event

import (
	"errors"
	"strings"
	"testing"
)

func TestSubjectsTellNamesApart(t *testing.T) {
	names := []string{"api.b", "api_b", "api/b", "api b", "api-b", "7", "8", "api%2Eb", "api=2Eb", "", "=", "*", ">", "a*", "ü", "\x00", "org/Model-7B v2.1 (fp8)", strings.Repeat("x", MaxName)}
	seen := map[string]Source{}
	for _, model := range names {
		for _, instance := range names {
			s := Source{Model: model, Group: "default", Instance: instance, Rank: 3}
			subject := s.Subject()
			if other, ok := seen[subject]; ok {
				t.Fatalf("%+v and %+v share %q", s, other, subject)
			}
			seen[subject] = s
			if strings.Count(subject, ".") != 4 || strings.ContainsAny(subject, " *>\t\x00%") {
				t.Errorf("%+v: subject %q is not five plain tokens", s, subject)
			}
			if got, err := ParseSubject(subject); err != nil || got != s {
				t.Errorf("%q: got %+v, error %v", subject, got, err)
			}
		}
	}
}

func TestSubjectsOfNobody(t *testing.T) {
	for _, s := range []string{"", "kv", "kv.a.b.c", "kv.a.b.c.d", "kv.a.b.c.1.2", "kw.a.b.c.1", "kv.a.b.c.-1", "kv.a.b.c.01", "kv.a.b.c.4294967296", "kv.a.b..1", "kv.a.b.=4.1", "kv.a.b.=zz.1", "kv.a.b.=61.1", "kv.a.b.c d.1", "kv.a.b.=2e.1"} {
		if got, err := ParseSubject(s); !errors.Is(err, ErrSubject) {
			t.Errorf("%q: got %+v, error %v, want ErrSubject", s, got, err)
		}
	}
}

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
