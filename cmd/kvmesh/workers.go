package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/replica"
)

// workerFlags are workers that are registered at start.
type workerFlags struct {
	workers   []string
	model     string
	group     string
	engine    string
	blockSize uint32
	labels    []string
	ttl       time.Duration
	owner     string
}

func (f *workerFlags) add(flags *pflag.FlagSet) {
	flags.StringArrayVar(&f.workers, "worker", nil, "worker to register: instance[:rank]=endpoint[,replay=endpoint][,topic=t][,owner=auto|id] (repeatable)")
	flags.StringVar(&f.model, "model", "default", "model of the workers given by --worker")
	flags.StringVar(&f.group, "routing-group", "default", "routing group of the workers given by --worker")
	flags.StringVar(&f.engine, "engine", "", "engine of the workers given by --worker: vllm, sglang, trtllm, ...")
	flags.Uint32Var(&f.blockSize, "block-size", 16, "block size of the workers given by --worker, in tokens")
	flags.StringArrayVar(&f.labels, "label", nil, "labels of the workers given by --worker, such as node=a,rack=b")
	flags.StringVar(&f.owner, "cache-owner", "", "memory that outlives the engines of the workers given by --worker: auto for ids derived from what they are, or an id; empty: none")
	flags.DurationVar(&f.ttl, "worker-ttl", 0, "for how long the workers given by --worker are there if nothing comes from them and nobody registers them again; 0: until they are unregistered")
}

// parse returns the workers that the flags name. Errors say where in flags they
// were given.
func (f *workerFlags) parse(flags *pflag.FlagSet) ([]event.Worker, error) {
	var out []event.Worker
	labels, err := parseLabels(f.labels)
	if err != nil {
		return nil, fmt.Errorf("--label: %w", err)
	}
	for _, text := range f.workers {
		w, err := f.worker(text, labels)
		if err != nil {
			return nil, located(flags, "worker", text, fmt.Errorf("--worker %q: %w", text, err))
		}
		out = append(out, w)
	}
	return out, nil
}

// parseLabels reads labels: key=value, separated by commas.
func parseLabels(texts []string) (map[string]string, error) {
	var out map[string]string
	for _, text := range texts {
		for part := range strings.SplitSeq(text, ",") {
			key, value, ok := strings.Cut(part, "=")
			if !ok || key == "" {
				return nil, fmt.Errorf("%q: want key=value", part)
			}
			if out == nil {
				out = map[string]string{}
			}
			out[key] = value
		}
	}
	return out, nil
}

func (f *workerFlags) worker(text string, labels map[string]string) (event.Worker, error) {
	name, rest, ok := strings.Cut(text, "=")
	if !ok {
		return event.Worker{}, errors.New("want instance[:rank]=endpoint[,replay=endpoint][,topic=t][,owner=auto|id]")
	}
	w := event.Worker{Source: event.Source{Model: f.model, Group: f.group, Instance: name}, Engine: f.engine, BlockSize: f.blockSize, CacheOwner: f.owner, Labels: labels, TTL: f.ttl}
	if at := strings.LastIndex(name, ":"); at >= 0 {
		rank, err := strconv.ParseUint(name[at+1:], 10, 32)
		if err != nil {
			return event.Worker{}, fmt.Errorf("rank %q: want a number", name[at+1:])
		}
		w.Instance, w.Rank = name[:at], uint32(rank)
	}
	parts := strings.Split(rest, ",")
	w.Endpoint = parts[0]
	for _, part := range parts[1:] {
		key, value, _ := strings.Cut(part, "=")
		switch key {
		case "replay":
			w.ReplayEndpoint = value
		case "topic":
			w.Topic = value
		case "owner":
			w.CacheOwner = value
		default:
			return event.Worker{}, fmt.Errorf("%q: want replay=endpoint, topic=t or owner=auto|id", part)
		}
	}
	return w, w.Validate()
}

// register registers workers, and goes on trying until that is done. What is
// registered otherwise under the same name is replaced.
func register(ctx context.Context, catalog *replica.Catalog, workers []event.Worker, log *slog.Logger) {
	for _, w := range workers {
		pause := 20 * time.Millisecond // the catalog is not there at once
		for ctx.Err() == nil {
			attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
			err := catalog.Register(attempt, w)
			if errors.Is(err, event.ErrConflict) {
				rank := w.Rank
				if _, gone := catalog.Unregister(attempt, w.Instance, w.Model, w.Group, &rank); gone == nil {
					err = catalog.Register(attempt, w)
				}
			}
			cancel()
			if err == nil {
				break
			}
			if pause *= 2; pause >= time.Second {
				pause = time.Second
				log.Warn("worker not registered yet", "instance", w.Instance, "rank", w.Rank, "error", err)
			}
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	}
}
