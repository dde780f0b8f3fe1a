package event

import (
	"fmt"
	"slices"
	"strconv"
)

// Position says up to where a log was read: LogSeq if it is in one stream; LogSeqs,
// one for each shard, if it is in several. The zero Position is before everything.
type Position struct {
	LogSeq  uint64
	LogSeqs []uint64
}

// PositionOf returns the Position with the log sequences of all shards. It keeps
// them if they are several.
func PositionOf(seqs []uint64) Position {
	if len(seqs) == 1 {
		return Position{LogSeq: seqs[0]}
	}
	return Position{LogSeqs: seqs}
}

// Seq returns the log sequence of a shard; 0 if the log has none of that number.
func (p Position) Seq(shard int) uint64 {
	if shard < len(p.LogSeqs) {
		return p.LogSeqs[shard]
	}
	return p.LogSeq
}

// Zero tells whether it is before everything.
func (p Position) Zero() bool { return p.LogSeq == 0 && len(p.LogSeqs) == 0 }

// Equal tells whether two Positions are the same.
func (p Position) Equal(o Position) bool {
	return p.LogSeq == o.LogSeq && slices.Equal(p.LogSeqs, o.LogSeqs)
}

// Of tells whether it can be a Position of a log with so many shards. The error says
// what would be one.
func (p Position) Of(shards int) error {
	switch {
	case p.Zero():
		return nil
	case shards == 1 && len(p.LogSeqs) > 0:
		return fmt.Errorf("%d log sequences for a log that is in one stream: give one, min_log_seq", len(p.LogSeqs))
	case shards > 1 && p.LogSeq != 0:
		return fmt.Errorf("one log sequence for a log that is in %d streams: give %d, min_log_seqs, as in the log_seqs of an answer", shards, shards)
	case shards > 1 && len(p.LogSeqs) != shards:
		return fmt.Errorf("%d log sequences for a log that is in %d streams: give %d, min_log_seqs, as in the log_seqs of an answer", len(p.LogSeqs), shards, shards)
	}
	return nil
}

// AppendJSON appends it as a member of an object: "log_seq" or "log_seqs".
func (p Position) AppendJSON(b []byte) []byte {
	if len(p.LogSeqs) == 0 {
		return strconv.AppendUint(append(b, `"log_seq":`...), p.LogSeq, 10)
	}
	b = append(b, `"log_seqs":[`...)
	for i, seq := range p.LogSeqs {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, seq, 10)
	}
	return append(b, ']')
}

// PositionJSON is a Position as members of an object, which has either.
type PositionJSON struct {
	LogSeq  *uint64  `json:"log_seq,omitempty"`
	LogSeqs []uint64 `json:"log_seqs,omitempty"`
}

// JSON returns the Position as members of an object.
func (p Position) JSON() PositionJSON {
	if len(p.LogSeqs) == 0 {
		return PositionJSON{LogSeq: &p.LogSeq}
	}
	return PositionJSON{LogSeqs: p.LogSeqs}
}

// Position returns what the members say.
func (j PositionJSON) Position() Position {
	p := Position{LogSeqs: j.LogSeqs}
	if j.LogSeq != nil {
		p.LogSeq = *j.LogSeq
	}
	return p
}
