package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvmesh/kvmesh/indexer/event"
)

func digestCommand() *cobra.Command {
	var compare string
	var patience time.Duration
	cmd := newClientCommand("digest", "Print the digests of all workers, or compare them between indexers", func(c *client, cmd *cobra.Command, _ []string) error {
		if compare == "" {
			return c.call(cmd.Context(), cmd.OutOrStdout(), http.MethodGet, "/digest", nil)
		}
		servers := strings.Split(compare, ",")
		if len(servers) < 2 {
			return fmt.Errorf("--compare is %q: want two URLs or more, separated by commas", compare)
		}
		return c.compareDigests(cmd.Context(), cmd.OutOrStdout(), servers, patience)
	})
	cmd.Example = "  kvmesh digest --compare http://indexer-0:8090,http://indexer-1:8090"
	cmd.Flags().StringVar(&compare, "compare", "", "URLs of indexers, separated by commas: each worker is compared when all who serve its model have it at one log sequence; what differs is an error")
	cmd.Flags().DurationVar(&patience, "patience", 10*time.Second, "how long --compare waits for the indexers to have each worker at one log sequence")
	return cmd
}

// sourceDigest is what an indexer says of a worker rank.
type sourceDigest struct {
	InstanceID   json.RawMessage `json:"instance_id"`
	ModelName    string          `json:"model_name"`
	RoutingGroup string          `json:"routing_group"`
	Rank         uint32          `json:"dp_rank"`
	LogSeq       uint64          `json:"log_seq"`
	Diverged     bool            `json:"diverged"`
	Digest       json.RawMessage `json:"digest"`
}

func (d *sourceDigest) name() string {
	return fmt.Sprintf("%s, rank %d, of %s:%s", d.InstanceID, d.Rank, d.ModelName, d.RoutingGroup)
}

// compareDigests compares what indexers hold, worker by worker, as soon as all
// have one at the same log sequence.
func (c *client) compareDigests(ctx context.Context, out io.Writer, servers []string, patience time.Duration) error {
	open := map[string]string{} // workers that have not been compared, and why
	done := map[string]bool{}
	var differing []string
	for deadline := time.Now().Add(patience); ; {
		held := make([]*heldDigests, len(servers))
		for i, server := range servers {
			var err error
			if held[i], err = c.digests(ctx, server); err != nil {
				return fmt.Errorf("%s: %w", server, err)
			}
		}
		clear(open)
		for _, name := range namesIn(held) {
			if done[name] {
				continue
			}
			why, equal := compareOne(name, held)
			if why != "" {
				open[name] = why
				continue
			}
			done[name] = true
			if !equal {
				differing = append(differing, name)
			}
		}
		if len(open) == 0 || time.Now().After(deadline) {
			break
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fmt.Fprintf(out, "%d indexers, %d workers compared at one log sequence each, %d differ, %d not compared\n", len(servers), len(done), len(differing), len(open))
	var errs []error
	for _, name := range differing {
		errs = append(errs, fmt.Errorf("%s: the indexers hold different blocks", name))
	}
	for name, why := range open {
		errs = append(errs, fmt.Errorf("%s: %s", name, why))
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// heldDigests is what an indexer serves, and what it holds of that, by worker.
type heldDigests struct {
	share   event.Share
	workers map[string]*sourceDigest
}

// digests returns what an indexer holds, by worker.
func (c *client) digests(ctx context.Context, server string) (*heldDigests, error) {
	one := *c
	one.server = server
	var body bytes.Buffer
	if err := one.call(ctx, &body, http.MethodGet, "/digest", nil); err != nil {
		return nil, err
	}
	var reply struct {
		Sources []sourceDigest `json:"sources"`
		Serves  []string       `json:"serves"`
	}
	if err := json.Unmarshal(body.Bytes(), &reply); err != nil {
		return nil, err
	}
	share, err := event.ParseShare(reply.Serves)
	if err != nil {
		return nil, err
	}
	out := &heldDigests{share, map[string]*sourceDigest{}}
	for i := range reply.Sources {
		out.workers[reply.Sources[i].name()] = &reply.Sources[i]
	}
	return out, nil
}

func namesIn(held []*heldDigests) []string {
	var out []string
	for _, h := range held {
		for name := range h.workers {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// compareOne tells whether all who serve a worker's partition hold the same of
// it, or why that can't be told.
func compareOne(name string, held []*heldDigests) (why string, equal bool) {
	var first *sourceDigest
	for _, h := range held {
		if first = h.workers[name]; first != nil {
			break
		}
	}
	partition := event.Partition{Model: first.ModelName, Group: first.RoutingGroup}
	equal = true
	for _, h := range held {
		d := h.workers[name]
		switch {
		case !h.share.Has(partition):
			continue
		case d == nil:
			return "an indexer does not have it", false
		case d.Diverged:
			return "an indexer knows that it has it wrong, and waits for a checkpoint", false
		case d.LogSeq != first.LogSeq:
			return "the indexers don't have it at one log sequence", false
		case !bytes.Equal(compactJSON(d.Digest), compactJSON(first.Digest)):
			equal = false
		}
	}
	return "", equal
}

func compactJSON(data []byte) []byte {
	var out bytes.Buffer
	if json.Compact(&out, data) != nil {
		return data
	}
	return out.Bytes()
}
