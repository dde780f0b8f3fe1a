package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/engines"
)

// digestReply is the reply to GET /digest of an indexer.
type digestReply struct {
	LogSeq  uint64 `json:"log_seq"`
	Sources []struct {
		Instance string `json:"instance_id"`
		Model    string `json:"model_name"`
		Group    string `json:"routing_group"`
		Rank     uint32 `json:"dp_rank"`
		LogSeq   uint64 `json:"log_seq"`
		Digest   map[string]struct {
			Count uint64 `json:"count"`
			Sum   string `json:"sum"`
		} `json:"digest"`
	} `json:"sources"`
}

// digestsFrom asks an indexer what it holds.
func digestsFrom(ctx context.Context, addr string) (held map[event.Source]event.Digests, at map[event.Source]uint64, logSeq uint64, err error) {
	var reply digestReply
	if err := getJSON(ctx, http.DefaultClient, "http://"+addr+"/digest", &reply); err != nil {
		return nil, nil, 0, err
	}
	held, at = map[event.Source]event.Digests{}, map[event.Source]uint64{}
	for _, s := range reply.Sources {
		name := event.Source{Model: s.Model, Group: s.Group, Instance: s.Instance, Rank: s.Rank}
		var d event.Digests
		for t := range event.Tier(event.Tiers) {
			of := s.Digest[t.String()]
			d[t].Count = of.Count
			if d[t].Sum, err = strconv.ParseUint(of.Sum, 16, 64); err != nil {
				return nil, nil, 0, fmt.Errorf("digest of %s: %w", name.Key(), err)
			}
		}
		held[name], at[name] = d, s.LogSeq
	}
	return held, at, reply.LogSeq, nil
}

// joinLate starts another indexer while requests run, and compares it with the
// first one, source by source, where both have applied the same last record.
func (r *fleetRun) joinLate(ctx context.Context) error {
	began := time.Now()
	late, err := r.indexer(ctx)
	r.late = late
	if err != nil {
		return err
	}
	ready := time.Since(began)
	compared, unequal := 0, 0
	for range 5 {
		a, atA, _, errA := digestsFrom(ctx, r.indexers[0].http)
		b, atB, _, errB := digestsFrom(ctx, late.http)
		if err := errors.Join(errA, errB); err != nil {
			return err
		}
		for name, d := range a {
			if atA[name] == atB[name] {
				compared++
				if b[name] != d {
					unequal++
				}
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.f["late_ready_s"] = ready.Seconds()
	r.f["late_compared"], r.f["late_unequal"] = float64(compared), float64(unequal)
	return nil
}

// verify compares what every index holds with what the caches hold.
func (r *fleetRun) verify(ctx context.Context) error {
	fmt.Fprintln(r.progress, "comparing what the indexes hold with what the caches hold")
	if err := errors.Join(r.machine(ctx), r.keepMemory(ctx)); err != nil {
		return err
	}
	truth, err := r.truth(ctx)
	if err != nil {
		return err
	}
	readers := append(slices.Clone(r.indexers), r.late)
	readers = slices.DeleteFunc(readers, func(p *process) bool { return p == nil })
	differing := r.differing(truth, r.own())
	for _, p := range readers {
		err := until(ctx, p.role+" is where the router is", func() (bool, error) {
			_, _, at, err := digestsFrom(ctx, p.http)
			return at >= r.index.Position().LogSeq, err
		})
		if err != nil {
			return err
		}
		held, _, _, err := digestsFrom(ctx, p.http)
		if err != nil {
			return err
		}
		differing += r.differing(truth, held)
	}
	for _, p := range r.dialers {
		var held engines.Truth
		if err := getJSON(ctx, http.DefaultClient, "http://"+p.http+"/digests", &held); err != nil {
			return err
		}
		of := map[event.Source]event.Digests{}
		for _, w := range held.Workers {
			of[event.Source{Model: r.partition.Model, Group: r.partition.Group, Instance: w.Instance, Rank: w.Rank}] = w.Digests
		}
		r.f["dial_differing"] += float64(r.differing(truth, of))
	}
	r.f["differing"] = float64(differing)
	r.f["digest_equal"] = 0
	if differing == 0 {
		r.f["digest_equal"] = 1
	}
	if !r.b.dump || r.late == nil {
		return nil
	}
	fmt.Fprintln(r.progress, "comparing dumps")
	first, size, err := dumpOf(ctx, r.indexers[0].http)
	if err != nil {
		return err
	}
	second, _, err := dumpOf(ctx, r.late.http)
	if err != nil {
		return err
	}
	r.f["dump_mb"], r.f["dump_equal"] = float64(size)/1e6, 0
	if first == second {
		r.f["dump_equal"] = 1
	}
	return nil
}

// dumpOf returns a hash of the reply to GET /dump of an indexer, which has the
// log sequence in it, and its size in bytes.
func dumpOf(ctx context.Context, addr string) (sum [sha256.Size]byte, size int64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/dump", nil)
	if err != nil {
		return sum, 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return sum, 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return sum, 0, fmt.Errorf("/dump: %s", resp.Status)
	}
	h := sha256.New()
	size, err = io.Copy(h, resp.Body)
	return [sha256.Size]byte(h.Sum(nil)), size, err
}
