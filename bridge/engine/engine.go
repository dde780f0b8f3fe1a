// Package engine turns what inference engines announce about their KV cache
// into events that no longer depend on the engine.
//
// vLLM, SGLang, TensorRT-LLM, Dynamo and others send batches of MessagePack
// that differ by engine and release: events as arrays or as maps, batches of
// two to five elements or as a map, block hashes as integers, bytes or text. A
// Decoder reads all of them, one event at a time and without trust: what can't
// be read costs itself, not its neighbours, and is counted by reason.
//
// The decoder says what an event says and no more. Which blocks are resident,
// which attention groups count and where a block stands in its prompt is for
// the caller to decide.
package engine

import (
	"errors"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// ErrBatch is returned by Decode for a payload that is well-formed but no
// batch of events: no array of at least two elements and no map with events.
var ErrBatch = errors.New("engine: payload is no batch of events")

// TierUnknown is the tier of a medium that the media table does not know. Such
// an event says nothing about any tier; least of all about the device.
const TierUnknown = event.Tier(255)

// Limits of a batch. They are far above what engines send and bound what a
// payload of one-byte elements can make of memory.
const (
	MaxEvents = 1 << 18 // events of a batch
	MaxHashes = 1 << 20 // block hashes of all events of a batch
	MaxName   = 255     // bytes of a block hash that is bytes or text
)

// Hash is the engine's own name for a block. It is either a 64-bit pattern,
// whatever the sign and width it was sent with, or a Name of 1 to MaxName bytes,
// which is a view into the payload.
type Hash = event.EngineHash

// Kind is what an event is about.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = iota // blocks are held from now on
	Removed             // blocks are held no longer
	Cleared             // all blocks are gone; Profile.ClearsOnlyDevice says from where
)

// String returns the name of the kind in lower case.
func (k Kind) String() string {
	switch k {
	case Stored:
		return "stored"
	case Removed:
		return "removed"
	case Cleared:
		return "cleared"
	}
	return "unknown"
}

// Event is one thing that an engine said about its cache. Fields that the
// kind of event or the release of the engine lacks are zero. All slices belong
// to the Batch or are views into the payload.
type Event struct {
	Kind   Kind
	Hashes []Hash // blocks in the order of their prompt; may be empty

	// Parent is the block in front of the first one. Without a parent the first
	// block begins a prompt, unless there are no Tokens either: an event
	// without tokens names blocks that were announced before.
	Parent    Hash
	HasParent bool

	// Tokens of the blocks, all together. Block i spans BlockSize of them plus
	// Over, which is 1 for engines that key their cache by pairs of neighbours:
	// then Tokens holds the first token of each pair and the last one's second.
	// Nothing promises that the tokens fill the blocks.
	Tokens    []uint32
	Over      int
	BlockSize int64 // as sent, so perhaps negative; 0 if absent

	// Tier is what the media table says about Medium, or TierUnknown. Without a
	// medium it is the device, except that a Cleared event without a medium
	// says nothing about tiers.
	Tier   event.Tier
	Medium []byte // as sent; nil if absent

	Lora []byte // name of the LoRA adapter; empty if absent
	Salt []byte // cache salt; empty if absent
	MM   MM     // multimodal hashes of each block

	Group    int64 // KV cache group
	HasGroup bool
	SpecKind []byte // attention kind of the group, as sent; nil if absent

	Remote bool   // locality is given and is not LOCAL: another worker holds the blocks
	Owner  []byte // ownership, as sent; nil if absent

	// Remaining counts the copies of each of the Hashes that are left after a
	// Removed event. It is nil if the engine does not count.
	Remaining    []uint64
	HasRemaining bool
}

// MM holds the hashes of the multimodal inputs that the tokens of each block
// stand for. The zero MM has none.
type MM struct {
	hashes []uint64
	ends   []uint32 // of each block, in hashes
}

// Empty reports whether no block has a multimodal hash.
func (m MM) Empty() bool { return len(m.hashes) == 0 }

// Block returns the hashes of block i in the order they were sent, none for a
// block that the engine did not mention.
func (m MM) Block(i int) []uint64 {
	if i < 0 || i >= len(m.ends) {
		return nil
	}
	from := uint32(0)
	if i > 0 {
		from = m.ends[i-1]
	}
	return m.hashes[from:m.ends[i]]
}

// Reason is why something in a batch was not taken.
type Reason uint8

// The reasons. The first ones cost one event each.
const (
	// NoEvent: an element of the batch is neither an array nor a map, or has no
	// tag, or two.
	NoEvent Reason = iota
	// UnknownTag: the tag is none of BlockStored, BlockRemoved and
	// AllBlocksCleared. Engines extend their protocols this way, so it need not
	// mean that anything was lost.
	UnknownTag
	// MissingField: block_hashes is absent or nil, or a BlockStored has no
	// token_ids. Nil token_ids are fine.
	MissingField
	// BadHash: block_hashes is no array, or it or the parent holds something
	// else than integers and names of 1 to MaxName bytes.
	BadHash
	// BadTokens: token_ids is no array of integers from 0 to 2^32-1, or of pairs
	// of them that chain.
	BadTokens
	// BadField: another field that decides which blocks are meant has a type it
	// can't have.
	BadField
	// BadCounts: remaining_copy_counts does not hold one count for each hash.
	BadCounts
	// TooMany: the batch is over MaxEvents or MaxHashes with this event.
	TooMany

	// BadRank: the rank of the batch is no integer from 0 to 2^32-1. The batch
	// counts as one without a rank.
	BadRank
	// Broken: the rest of the batch can't be read, see Batch.Partial.
	Broken
	// Trailing: bytes follow the batch. They are ignored.
	Trailing

	// Reasons is the number of reasons.
	Reasons
)

var reasonNames = [Reasons]string{
	NoEvent: "no_event", UnknownTag: "unknown_tag", MissingField: "missing_field", BadHash: "bad_hash",
	BadTokens: "bad_tokens", BadField: "bad_field", BadCounts: "bad_counts", TooMany: "too_many",
	BadRank: "bad_rank", Broken: "broken", Trailing: "trailing_bytes",
}

// String returns the name of the reason, fit for a metric label.
func (r Reason) String() string {
	if r < Reasons {
		return reasonNames[r]
	}
	return "unknown"
}
