package engines

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/kvmesh/kvmesh/integration/cache"
	"github.com/kvmesh/kvmesh/integration/mock"
	"github.com/kvmesh/kvmesh/integration/model"
)

// Options say what a Fleet is. Zero fields have defaults.
type Options struct {
	Engines int    // 1
	Ranks   int    // of each engine; 1
	Name    string // of instances, before their number; mock
	Host    string // that all sockets bind; 127.0.0.1
	// Port is that of the first PUB: rank r of engine e is at Port + e*Ranks + r,
	// and its replay socket as many further as there are ranks in all. 0: any free
	// ports.
	Port     int
	NoReplay bool

	Dialect mock.Dialect // vllm-map
	Topic   string       // of all workers; with %w in it, the worker's own name stands there
	Ring    int          // batches that a replay socket has; 10,000
	HWM     int          // messages that wait for a subscriber; 100,000
	Islands int          // engines that share a transfer domain; 0: no domains
	Domain  string       // name of the domains, before their number; island

	Cache   cache.Options // of each rank, but for its seed
	Seed    uint64        // of the engines' names for blocks
	Latency Latency
	Step    int // tokens of an answer that are announced together; the block size
}

func (o *Options) defaults() error {
	o.Engines, o.Ranks = max(o.Engines, 1), max(o.Ranks, 1)
	if o.Name == "" {
		o.Name = "mock"
	}
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	if o.Dialect == "" {
		o.Dialect = mock.VLLMMap
	}
	if o.Domain == "" {
		o.Domain = "island"
	}
	if o.Cache.BlockSize == 0 {
		o.Cache.BlockSize = 16
	}
	if o.Step <= 0 {
		o.Step = o.Cache.BlockSize
	}
	sglang := strings.HasPrefix(string(o.Dialect), "sglang")
	o.Cache.GroupRemoved = o.Cache.GroupRemoved || sglang
	o.Cache.ClearHost = o.Cache.ClearHost || sglang
	if last := o.Port + 2*o.Engines*o.Ranks; o.Port < 0 || last > 1<<16 {
		return fmt.Errorf("engines: %d engines of %d ranks from port %d on need ports up to %d", o.Engines, o.Ranks, o.Port, last)
	}
	if o.Cache.Host > 0 && o.Dialect.Features()&model.Media == 0 {
		return fmt.Errorf("engines: dialect %s has no words for a host tier", o.Dialect)
	}
	if o.Cache.Owner != "" && o.Cache.Host == 0 {
		return errors.New("engines: there is no host tier to have an owner: it needs blocks")
	}
	if o.Cache.Owner != "" && o.Dialect.Features()&model.Owners == 0 {
		return fmt.Errorf("engines: dialect %s has no words for owners", o.Dialect)
	}
	return nil
}

// Fleet is fake engines that serve requests.
type Fleet struct {
	Workers []*Worker // by engine and rank; not changed after New

	o       Options
	byName  map[string]*Worker
	profile string
}

// New returns a Fleet that is not started yet.
func New(o Options) (*Fleet, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	f := &Fleet{o: o, byName: map[string]*Worker{}, profile: "vllm"}
	if strings.HasPrefix(string(o.Dialect), "sglang") {
		f.profile = "sglang"
	}
	all := o.Engines * o.Ranks
	for i := range all {
		instance, rank := fmt.Sprintf("%s-%d", o.Name, i/o.Ranks), uint32(i%o.Ranks)
		eo := mock.Options{
			Dialect: o.Dialect, Rank: rank, BlockSize: o.Cache.BlockSize, Endpoint: o.endpoint(i), Ring: o.Ring, HWM: o.HWM,
			Topic: strings.ReplaceAll(o.Topic, "%w", fmt.Sprintf("%s:%d", instance, rank)),
		}
		if !o.NoReplay {
			eo.ReplayEndpoint = o.endpoint(all + i)
			eo.Replay.Topic = f.profile == "vllm" // as vLLM does since 0.26
		}
		wo := o
		wo.Cache.Seed = o.Seed<<20 + uint64(i)
		w, err := newWorker(instance, eo, wo)
		if err != nil {
			return nil, err
		}
		if o.Islands > 0 {
			w.Domain = fmt.Sprintf("%s-%d", o.Domain, i/o.Ranks/o.Islands)
		}
		f.Workers = append(f.Workers, w)
		f.byName[key(instance, rank)] = w
	}
	return f, nil
}

func (o *Options) endpoint(i int) string {
	port := 0
	if o.Port > 0 {
		port = o.Port + i
	}
	return "tcp://" + net.JoinHostPort(o.Host, strconv.Itoa(port))
}

func key(instance string, rank uint32) string {
	return instance + ":" + strconv.FormatUint(uint64(rank), 10)
}

// Start starts all workers, or none.
func (f *Fleet) Start() error {
	for i, w := range f.Workers {
		if err := w.start(); err != nil {
			for _, w := range f.Workers[:i] {
				w.stop()
			}
			return fmt.Errorf("%s rank %d: %w", w.Instance, w.Rank, err)
		}
	}
	return nil
}

// Stop stops all workers. Requests that run fail.
func (f *Fleet) Stop() {
	for _, w := range f.Workers {
		w.stop()
	}
}

// Worker returns a worker. The error wraps ErrUnknownWorker.
func (f *Fleet) Worker(instance string, rank uint32) (*Worker, error) {
	w := f.byName[key(instance, rank)]
	if w == nil {
		return nil, fmt.Errorf("%w: rank %d of %q", ErrUnknownWorker, rank, instance)
	}
	return w, nil
}

// Profile names the engine that the dialect belongs to.
func (f *Fleet) Profile() string { return f.profile }

// BlockSize returns how many tokens a block has.
func (f *Fleet) BlockSize() int { return f.o.Cache.BlockSize }

// Totals returns the sum over all workers.
func (f *Fleet) Totals() Totals {
	var sum Totals
	for _, w := range f.Workers {
		t := w.Totals()
		sum.Requests += t.Requests
		sum.Prompt += t.Prompt
		sum.CachedDevice += t.CachedDevice
		sum.CachedHost += t.CachedHost
		sum.Output += t.Output
		sum.Batches += t.Batches
		sum.Events += t.Events
		sum.Restarts += t.Restarts
		sum.Dropped += t.Dropped
	}
	return sum
}

// Err returns why batches could not be published, nil if all were.
func (f *Fleet) Err() error {
	var errs []error
	for _, w := range f.Workers {
		errs = append(errs, w.Err())
	}
	return errors.Join(errs...)
}

// Settled tells whether all that has happened has been published.
func (f *Fleet) Settled() bool {
	for _, w := range f.Workers {
		if !w.Settled() {
			return false
		}
	}
	return true
}
