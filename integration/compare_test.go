package integration

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"reflect"
	"slices"

	"github.com/kvmesh/kvmesh/indexer"
	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/integration/model"
)

// settle waits until what engines have published is in the index.
func (s *script) settle(actors ...*actor) error {
	if s.mesh.index == nil {
		if err := s.startIndexer(); err != nil {
			return err
		}
	}
	if s.mesh.edge == nil {
		if err := s.startBridge(); err != nil {
			return err
		}
	}
	for _, a := range actors {
		if !eventually(func() bool {
			h, seq := s.mesh.heard.of(a.worker.Source)
			return seq > a.after && (a.target == nil || h.Batches && h.Fingerprint == *a.target)
		}) {
			h, seq := s.mesh.heard.of(a.worker.Source)
			return fmt.Errorf("%s/%d: batch %d has not arrived; the last header, at %d, is %+v", a.worker.Instance, a.worker.Rank, len(a.life)-1, seq, h)
		}
	}
	return nil
}

// check settles, and compares.
func (s *script) check() error {
	s.note("check")
	if err := s.settle(s.actors...); err != nil {
		return err
	}
	return s.compare()
}

// compare compares the index with the model.
func (s *script) compare() error {
	x := s.mesh.index
	if !eventually(func() bool { return x.Ready() == nil && len(x.Workers()) == len(s.mesh.workers) }) {
		return fmt.Errorf("the indexer is not ready: %v, %d of %d workers", x.Ready(), len(x.Workers()), len(s.mesh.workers))
	}
	if len(s.mesh.workers) == 0 {
		return nil
	}
	have := map[event.Source]indexer.SourceInfo{}
	sources, at := x.Sources()
	for _, info := range sources {
		have[info.Source] = info
	}
	for _, a := range s.actors {
		if _, ok := s.mesh.workers[a.worker.Source]; !ok {
			continue
		}
		for _, rank := range a.labels {
			source := a.worker.Source
			source.Rank = rank
			if got, want := have[source].Digests, digests(s.truth.Source(source.Instance, rank, a.profile)); got != want {
				return fmt.Errorf("%s/%d (%s, profile %q) at %v: digests %v, want %v", source.Instance, rank, a.dialect, a.profile, at, got, want)
			}
			if have[source].Diverged {
				return fmt.Errorf("%s/%d: diverged", source.Instance, rank)
			}
		}
		whole := !slices.ContainsFunc(a.life, func(d delivery) bool { return !d.seen || d.broken })
		if info := have[a.worker.Source]; whole && info.Gaps > 0 {
			return fmt.Errorf("%s/%d: %d gaps, %d batches lost, although all could be had", a.worker.Instance, a.worker.Rank, info.Gaps, info.Lost)
		}
	}
	state := s.truth.State()
	for i, p := range s.prompts {
		want := state.Answer(p.Locals)
		a, err := match(x, s.model, p.Locals)
		if err != nil {
			return err
		}
		if got := rows(&a); !reflect.DeepEqual(got, want) {
			return fmt.Errorf("prompt %d at %v: answer %v, want %v", i, a.Position, got, want)
		}
		if !p.Pairs && s.rng.IntN(5) == 0 {
			if err := s.ask(p, want); err != nil {
				return fmt.Errorf("prompt %d: %w", i, err)
			}
		}
	}
	return nil
}

// ask asks over HTTP.
func (s *script) ask(p model.Prompt, want map[string]model.Row) error {
	at := s.mesh.index.Position()
	body, err := json.Marshal(map[string]any{"model_name": s.model.Model, "token_ids": p.Tokens, "lora_name": p.LoRA, "cache_salt": p.Salt,
		"min_log_seq": at.LogSeq, "min_log_seqs": at.LogSeqs})
	if err != nil {
		return err
	}
	resp, err := http.Post(s.mesh.web.URL+"/query", "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d, %s, %w", resp.StatusCode, data, err)
	}
	got, err := parseAnswer(data)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(got, want) {
		return fmt.Errorf("answer over HTTP %s, want %v", data, want)
	}
	return nil
}

// parseAnswer reads the body of an answer to a query.
func parseAnswer(data []byte) (map[string]model.Row, error) {
	var reply struct {
		Instances map[string]struct {
			LongestMatched int            `json:"longest_matched"`
			GPU            int            `json:"gpu"`
			CPU            int            `json:"cpu"`
			Disk           int            `json:"disk"`
			DP             map[uint32]int `json:"dp"`
		} `json:"instances"`
	}
	if err := json.Unmarshal(data, &reply); err != nil {
		return nil, err
	}
	out := map[string]model.Row{}
	for name, r := range reply.Instances {
		out[name] = model.Row{GPU: r.GPU, CPU: r.CPU, Disk: r.Disk, Longest: r.LongestMatched, DP: r.DP}
	}
	return out, nil
}

// match asks an indexer.
func match(x *indexer.Indexer, p event.Partition, locals []uint64) (indexer.Answer, error) {
	return x.Match(new(indexer.Query), p, locals)
}

// rows returns an answer as the model gives it.
func rows(a *indexer.Answer) map[string]model.Row {
	out := map[string]model.Row{}
	for _, h := range a.Holdings {
		tokens := func(t event.Tier) int { return int(h.Ends[t] * a.BlockSize) }
		row, ok := out[h.Instance]
		if !ok {
			row.DP = map[uint32]int{}
		}
		row.GPU, row.CPU = max(row.GPU, tokens(event.Device)), max(row.CPU, tokens(event.Host))
		row.Disk, row.Longest = max(row.Disk, tokens(event.External)), max(row.Longest, tokens(event.External))
		if tokens(event.Device) > 0 {
			row.DP[h.Rank] = tokens(event.Device)
		}
		out[h.Instance] = row
	}
	return out
}

// digests returns what a source holds, as records and indexers sum it up.
func digests(s *model.Source) event.Digests {
	var out event.Digests
	sums := s.Digest(func(seq uint64, t model.Tier) uint64 {
		return event.Mix(seq, event.Salt(event.Tier(t)))
	})
	for t, d := range maps.All(sums) {
		out[t] = event.Digest{Count: d.Count, Sum: d.Sum}
	}
	return out
}
