package feed

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvmesh/kvmesh/indexer/event"
	"github.com/kvmesh/kvmesh/indexer/hash"
	"github.com/kvmesh/kvmesh/integration/model"
)

// ErrRule: a record breaks a rule of the log.
var ErrRule = errors.New("feed: record breaks a rule")

// Gap is engine batches that are lost for good.
type Gap struct {
	From, To uint64
	Reason   string
}

// Digest is the count of the blocks of a tier and the wrapping sum of their
// mixes.
type Digest struct{ Count, Sum uint64 }

// Source is what the log says of one source.
type Source struct {
	Name        event.Source
	Incarnation uint64
	Batches     bool   // a batch is complete
	Last        uint64 // the last one
	TS          float64
	Fingerprint uint64
	Partial     bool // the last record ends inside a batch
	Retired     bool // the worker is gone

	LogSeq      uint64   // of the last record
	Records     int      // that were applied
	Resets      []string // the reasons, in order
	Gaps        []Gap    // gaps on record, in order
	LostBefore  uint64   // batches that were lost before the last checkpoint, if that says so
	Checkpoints int      // whole ones
	Restarts    int      // of them, those that say what is left of the life before
	Publisher   []byte   // identity of the engine's publisher

	began  bool // everything held is known: there was a reset or a whole checkpoint
	held   blocks
	staged *staging
}

// blocks are the sequence hashes that each tier holds.
type blocks map[event.Tier]map[uint64]bool

// staging is a checkpoint of which chunks are missing.
type staging struct {
	next, chunks int
	held         blocks
}

// Resident returns the sequence hashes that each tier holds; a tier that holds
// nothing has no entry.
func (s *Source) Resident() map[event.Tier]map[uint64]bool {
	out := map[event.Tier]map[uint64]bool{}
	for t, seqs := range s.held {
		if len(seqs) > 0 {
			out[t] = maps.Clone(seqs)
		}
	}
	return out
}

// Digests returns the digest of each tier that holds anything.
func (s *Source) Digests() map[event.Tier]Digest { return s.held.digests() }

func (b blocks) digests() map[event.Tier]Digest {
	out := map[event.Tier]Digest{}
	for t, seqs := range b {
		if len(seqs) == 0 {
			continue
		}
		var d Digest
		for seq := range seqs {
			d.Count++
			d.Sum += mix(seq, t)
		}
		out[t] = d
	}
	return out
}

// mix is the finaliser of splitmix64 over a sequence hash salted with its tier.
func mix(seq uint64, t event.Tier) uint64 {
	x := seq + (uint64(t)+1)*0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Diff tells how what the source holds differs from what it should hold; empty
// if it does not.
func (s *Source) Diff(want map[model.Tier]map[uint64]bool) string {
	have := s.Resident()
	var out []string
	for t := range event.Tier(event.Tiers) {
		missing, surplus := 0, 0
		var example uint64
		for seq := range want[model.Tier(t)] {
			if !have[t][seq] {
				missing, example = missing+1, seq
			}
		}
		for seq := range have[t] {
			if !want[model.Tier(t)][seq] {
				surplus, example = surplus+1, seq
			}
		}
		if missing+surplus > 0 {
			out = append(out, fmt.Sprintf("%v: %d held, %d wanted, %d missing, %d surplus, such as %x",
				t, len(have[t]), len(want[model.Tier(t)]), missing, surplus, example))
		}
	}
	return strings.Join(out, "; ")
}

// apply applies a record. It panics with a type error on operations that are
// not as the page says.
func (s *Source) apply(seq uint64, r record) error {
	err := s.follows(r)
	s.LogSeq = seq
	s.Records++
	if len(r.ops) > 0 && r.ops[0].kind == checkpoint {
		err = errors.Join(err, s.chunk(r))
	} else {
		s.staged = nil // whatever it was, it ends here
		s.header(r)
		for _, o := range r.ops {
			err = errors.Join(err, s.op(o))
		}
	}
	return err
}

// follows tells what is wrong with a record's place behind the ones before.
func (s *Source) follows(r record) error {
	if s.Records == 0 {
		return nil
	}
	kinds := map[uint64]bool{}
	for _, o := range r.ops {
		kinds[o.kind] = true
	}
	fresh := kinds[reset] || kinds[checkpoint] || kinds[retired]
	switch {
	case r.incarnation < s.Incarnation:
		return fmt.Errorf("%w: incarnation %d after %d", ErrRule, r.incarnation, s.Incarnation)
	case r.incarnation > s.Incarnation && !fresh:
		return fmt.Errorf("%w: incarnation %d begins without a reset", ErrRule, r.incarnation)
	case fresh:
		return nil
	case s.Batches && !r.batches:
		return fmt.Errorf("%w: no batch is complete, but %d was", ErrRule, s.Last)
	case s.Batches && r.last < s.Last:
		return fmt.Errorf("%w: batch %d is the last one after %d was", ErrRule, r.last, s.Last)
	case s.Batches && r.first <= s.Last:
		return fmt.Errorf("%w: begins with batch %d, which was complete: the last one was %d", ErrRule, r.first, s.Last)
	case s.Partial && r.batches && !r.partial && r.last == s.Last && s.Batches:
		return fmt.Errorf("%w: does not go on with the batch that was begun after %d", ErrRule, s.Last)
	}
	return nil
}

func (s *Source) header(r record) {
	s.Incarnation, s.Partial = r.incarnation, r.partial
	s.Batches, s.Last = r.batches, r.last
	s.TS, s.Fingerprint = r.ts, r.fingerprint
}

// op applies an operation of a record that is no part of a checkpoint.
func (s *Source) op(o op) error {
	switch o.kind {
	case stored:
		s.held.store(tierOf(o.args), o.args[2:])
	case removed:
		t := tierOf(o.args)
		for _, seq := range hashes(o.args[2]) {
			if s.began && !s.held[t][seq] {
				return fmt.Errorf("%w: removal of %x, which is not there", ErrRule, seq)
			}
			delete(s.held[t], seq)
		}
	case cleared:
		mask := number(o.args[0])
		for t := range s.held {
			if mask>>t&1 == 1 {
				delete(s.held, t)
			}
		}
	case reset:
		reason := o.args[0].(string)
		s.Resets = append(s.Resets, reason)
		s.held, s.began, s.Retired = blocks{}, true, false
		if reason != "gap" {
			s.Publisher = nil
		}
	case retired:
		s.held, s.began, s.Retired = blocks{}, true, true
	case checkpoint:
		return fmt.Errorf("%w: a checkpoint that is not at the beginning", ErrRule)
	default:
		return s.note(o, s.held, s.began)
	}
	return nil
}

// note takes in an operation that is not about blocks.
func (s *Source) note(o op, held blocks, began bool) error {
	switch o.kind {
	case gap:
		g := Gap{number(o.args[0]), number(o.args[1]), o.args[2].(string)}
		s.Gaps = append(s.Gaps, g)
		if g.From > g.To || g.Reason == "" {
			return fmt.Errorf("%w: gap %+v", ErrRule, g)
		}
	case gaps:
		s.LostBefore = number(o.args[1])
	case publisher:
		s.Publisher = slices.Clone(o.args[0].([]byte))
	case digest:
		want := map[event.Tier]Digest{}
		for i := 0; i+1 < len(o.args); i += 2 {
			if d := (Digest{number(o.args[i]), number(o.args[i+1])}); d != (Digest{}) {
				want[event.Tier(i/2)] = d
			}
		}
		if have := held.digests(); began && !maps.Equal(have, want) {
			return fmt.Errorf("%w: digest is %v, the record says %v", ErrRule, have, want)
		}
	}
	return nil
}

// chunk takes in a chunk of a checkpoint. The last one puts the state in force.
func (s *Source) chunk(r record) error {
	at, of := int(number(r.ops[0].args[0])), int(number(r.ops[0].args[1]))
	if at == 0 {
		s.staged = &staging{chunks: of, held: blocks{}}
	}
	if s.staged == nil || s.staged.next != at || s.staged.chunks != of {
		s.staged = nil
		return nil // its beginning is missing: it means nothing
	}
	st := s.staged
	st.next++
	last := st.next == of
	var errs []error
	digests := 0
	for _, o := range r.ops {
		switch o.kind {
		case checkpoint:
			if int(number(o.args[0])) != at || int(number(o.args[1])) != of {
				errs = append(errs, fmt.Errorf("%w: chunk %d of %d has a part of another", ErrRule, at, of))
			}
			for _, run := range o.args[4:] {
				st.held.store(tierOf(o.args[2:]), run.([]any))
			}
		case stored, removed, cleared, reset, retired:
			errs = append(errs, fmt.Errorf("%w: operation %d inside a checkpoint", ErrRule, o.kind))
		case digest:
			digests++
			fallthrough
		default:
			errs = append(errs, s.note(o, st.held, true))
		}
	}
	if last {
		if digests != 1 {
			errs = append(errs, fmt.Errorf("%w: a checkpoint with %d digests", ErrRule, digests))
		}
		have, want := st.held.digests(), s.held.digests()
		switch {
		case s.began && r.incarnation > s.Incarnation: // what is left of the life before
			s.Restarts++
			s.Publisher = nil
		case s.began && !s.Partial && !maps.Equal(have, want):
			errs = append(errs, fmt.Errorf("%w: a checkpoint of %v where %v was", ErrRule, have, want))
		}
		s.held, s.staged, s.began, s.Retired = st.held, nil, true, false
		s.Checkpoints++
		s.header(r)
	}
	return errors.Join(errs...)
}

// store holds a run: parent or nil, base index, local hashes, and so on.
func (b blocks) store(t event.Tier, run []any) {
	if b[t] == nil {
		b[t] = map[uint64]bool{}
	}
	var seq uint64
	root := run[0] == nil
	if !root {
		seq = number(run[0])
	}
	for _, local := range hashes(run[2]) {
		if root {
			seq, root = local, false
		} else {
			seq = hash.Next(seq, local)
		}
		b[t][seq] = true
	}
}

// tierOf reads the tier, and sees that there is an owner.
func tierOf(args []any) event.Tier {
	t, _ := number(args[0]), args[1].(string)
	if t > 3 {
		panic(fmt.Sprintf("tier %d", t))
	}
	return event.Tier(t)
}
