package integration

import (
	"context"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// listLog lists the records of the log, one a line, for people who look at a
// test that failed.
func listLog(ctx context.Context, stream jetstream.Stream) string {
	info, err := stream.Info(ctx)
	if err != nil {
		return err.Error()
	}
	var out strings.Builder
	for seq := info.State.FirstSeq; seq <= info.State.LastSeq; seq++ {
		msg, err := stream.GetMsg(ctx, seq)
		if err != nil {
			fmt.Fprintf(&out, "%d: %v\n", seq, err)
			continue
		}
		fmt.Fprintf(&out, "%d %s %s\n", seq, msg.Subject, describe(msg.Data))
	}
	for c := range stream.ListConsumers(ctx).Info() {
		fmt.Fprintf(&out, "consumer %+v\n", *c)
	}
	return out.String()
}

// describe says what a record has.
func describe(data []byte) string {
	var d event.Decoder
	if err := d.Reset(data); err != nil {
		return err.Error()
	}
	var out strings.Builder
	h := d.Header
	fmt.Fprintf(&out, "life %d", h.Incarnation)
	if h.Batches {
		fmt.Fprintf(&out, " batches %d-%d", h.First, h.Last)
	}
	if h.Partial {
		out.WriteString(" partial")
	}
	for d.Next() {
		op := &d.Op
		switch op.Kind {
		case event.OpStored:
			fmt.Fprintf(&out, ", stored %v %d", op.Tier, len(op.Locals))
		case event.OpRemoved:
			fmt.Fprintf(&out, ", removed %v %d", op.Tier, len(op.Seqs))
		case event.OpCleared:
			fmt.Fprintf(&out, ", cleared %b", op.Tiers)
		case event.OpReset:
			fmt.Fprintf(&out, ", reset %s", op.Reason)
		case event.OpGap:
			fmt.Fprintf(&out, ", gap %d-%d %s", op.From, op.To, op.Reason)
		case event.OpDigest:
			out.WriteString(", digest")
			for _, d := range op.Digests {
				fmt.Fprintf(&out, " %d", d.Count)
			}
		case event.OpCheckpoint:
			fmt.Fprintf(&out, ", checkpoint %d/%d %v", op.Chunk, op.Chunks, op.Tier)
			for _, r := range op.Runs {
				fmt.Fprintf(&out, " %d", len(r.Locals))
			}
		case event.OpRetired:
			out.WriteString(", retired")
		case event.OpParked:
			fmt.Fprintf(&out, ", parked %v %d", op.Tier, len(op.Locals))
		default:
			fmt.Fprintf(&out, ", op %d", op.Kind)
		}
	}
	if err := d.Err(); err != nil {
		fmt.Fprintf(&out, ", %v", err)
	}
	return out.String()
}

// listLife lists the batches of an engine's present life, one a line.
func (a *actor) listLife() string {
	var out strings.Builder
	fmt.Fprintf(&out, "%s/%d, %s, profile %q, replay %v, life %d, stale %v\n", a.worker.Instance, a.worker.Rank, a.dialect, a.profile, a.replays(), a.lives, a.stale)
	for i, d := range a.life {
		fmt.Fprintf(&out, "%d: rank %d, seen %v, kept %v, broken %v", i, d.rank, d.seen, d.kept, d.broken)
		for _, e := range d.events {
			fmt.Fprintf(&out, "; op %d %s%q %v parent %v, %d tokens, group %v", e.Op, e.Locality, e.Medium, e.Hashes, e.Parent, len(e.Tokens), e.Group)
		}
		out.WriteString("\n")
	}
	return out.String()
}
