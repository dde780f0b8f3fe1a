package faults

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"go.uber.org/goleak"
)

// asNATS is the environment variable that makes this test a NATS server.
const asNATS = "KVMESH_FAULTS_NATS"

// binaries is where the programs of a deployment are built, once for all tests:
// kvmesh, and this package's test, which is the NATS server. Their clocks can be made to
// jump.
var binaries = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "kvmesh-faults-")
	if err != nil {
		return "", err
	}
	overlay, err := clockOverlay(dir)
	if err != nil {
		return dir, err
	}
	for _, build := range [][]string{
		{"build", "-overlay", overlay, "-o", filepath.Join(dir, "kvmesh"), "github.com/kvmesh/kvmesh/cmd/kvmesh"},
		{"test", "-c", "-overlay", overlay, "-o", filepath.Join(dir, "nats"), "."},
	} {
		if out, err := exec.Command("go", build...).CombinedOutput(); err != nil {
			return dir, fmt.Errorf("go %s: %w\n%s", strings.Join(build, " "), err, out)
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	if config := os.Getenv(asNATS); config != "" {
		serveNATS(config)
		return
	}
	clean := goleak.Cleanup(func(code int) {
		if dir, _ := binaries(); dir != "" {
			os.RemoveAll(dir)
		}
		os.Exit(code)
	})
	goleak.VerifyTestMain(m, clean,
		goleak.IgnoreTopFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreTopFunction("net/http.(*persistConn).writeLoop"))
}

// natsConfig is what a NATS server is started with.
type natsConfig struct {
	Name           string
	Port, Cluster  int
	Routes         []string
	Dir            string
	MaxStore       int64
	MaxPending     int64
	WriteDeadlines int // milliseconds
}

// serveNATS is a NATS server until the process is killed.
func serveNATS(config string) {
	var c natsConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		panic(err)
	}
	options := &server.Options{
		ServerName: c.Name, Host: "127.0.0.1", Port: c.Port, JetStream: true, StoreDir: c.Dir, JetStreamMaxStore: c.MaxStore,
		JetStreamMaxMemory: 256 << 20, NoSigs: true, MaxPending: c.MaxPending,
	}
	if c.Cluster > 0 {
		options.Cluster = server.ClusterOpts{Name: "faults", Host: "127.0.0.1", Port: c.Cluster, NoAdvertise: true, PoolSize: -1}
		options.Routes = server.RoutesFromStr(join(c.Routes))
	}
	s, err := server.NewServer(options)
	if err != nil {
		panic(err)
	}
	s.ConfigureLogger()
	s.Start()
	s.WaitForShutdown()
}

func join(urls []string) string {
	out := ""
	for i, u := range urls {
		if i > 0 {
			out += ","
		}
		out += u
	}
	return out
}
