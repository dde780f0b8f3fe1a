// Package model is the oracle of the project's tests: what an exact index
// answers after a list of engine events, in the plainest form.
//
// A Source keeps what one engine rank announced and recomputes everything else
// from that whenever it is asked. There are no indexes, no increments and no
// limits, so that each rule stands in one place and can be read:
//
//   - copies of a block are counted per tier, owner, group and engine hash;
//     remaining copy counts, where an event gives them, win
//   - a block is in a tier while any engine block that covers it has a copy there,
//     whoever owns it
//   - the owner is the engine, or the cache owner (kvcr) of a source that has one;
//     events of other owners mean nothing. When the engine starts anew, the cache
//     owner's blocks stay where they are in their prompts
//   - a store whose parent is unknown takes part once the parent is known; a
//     block that loses its last copy before that is forgotten
//   - a store without tokens counts for blocks that are known already, all of
//     them or none, in its own tier
//   - a store of a known hash with another content changes what the hash means,
//     in every tier and for every descendant
//   - tokens that do not fill the hashes of their event exactly name no block
//   - an engine block of k index blocks is k index blocks, and goes as k
//   - only main attention groups count; which groups are main is learned from
//     stores, and group 0 is until a store says otherwise
//   - an unknown medium and a locality other than LOCAL give the source nothing
//   - tiers continue each other in the order device, host, disk, external, each
//     rank on its own; an instance is the best of its ranks
//   - a clear empties the device tier under the profile vllm, every tier under
//     any other, of one rank and one owner; one of a cache owner's, every tier
//   - under the profile vllm a hash of 32 bytes names the integer in its last 8
//
// Traffic invents seeded event lists that use all of this. Nothing here is safe
// for concurrent use.
package model

import (
	"encoding/binary"
	"fmt"
)

// Hash is an engine's own name for a block: a 64-bit pattern, bytes or a text.
// The zero Hash is no hash: the parent of a first block. Hashes compare with ==.
type Hash struct {
	kind hashKind
	bits uint64
	text string // the bytes of a Bytes hash too, so that hashes compare
}

type hashKind uint8

const (
	noHash hashKind = iota
	intHash
	bytesHash
	textHash
)

// Int returns the hash of a 64-bit pattern. Signed and unsigned integers of one
// pattern are one hash.
func Int(bits uint64) Hash { return Hash{kind: intHash, bits: bits} }

// Bytes returns the hash named by b, which it copies.
func Bytes(b []byte) Hash { return Hash{kind: bytesHash, text: string(b)} }

// Text returns the hash named by s.
func Text(s string) Hash { return Hash{kind: textHash, text: s} }

// IsZero tells whether h is no hash.
func (h Hash) IsZero() bool { return h.kind == noHash }

// Value returns what h was made of: a uint64, a []byte or a string; nil if h is
// no hash.
func (h Hash) Value() any {
	switch h.kind {
	case intHash:
		return h.bits
	case bytesHash:
		return []byte(h.text)
	case textHash:
		return h.text
	}
	return nil
}

// Bits returns the pattern of an integer hash, false if h is none.
func (h Hash) Bits() (bits uint64, ok bool) { return h.bits, h.kind == intHash }

// String returns a readable form for test failures.
func (h Hash) String() string {
	if h.kind == bytesHash {
		return fmt.Sprintf("%x", h.text)
	}
	return fmt.Sprint(h.Value())
}

// under returns the hash that h is an alias of under a profile.
func (h Hash) under(p Profile) Hash {
	if p == VLLM && h.kind == bytesHash && len(h.text) == 32 {
		return Int(binary.BigEndian.Uint64([]byte(h.text[24:])))
	}
	return h
}

// Profile says how an engine means what its events leave open.
type Profile string

// Profiles of engines. The empty profile is an engine nobody has named.
const (
	VLLM   Profile = "vllm"
	SGLang Profile = "sglang"
)

// Op is what an Event does.
type Op uint8

// Ops of events. A Raw event is any value where an event should be; it means
// nothing.
const (
	Store Op = iota
	Remove
	Clear
	Raw
)

// Event is one engine event, free of any wire format.
type Event struct {
	Op     Op
	Hashes []Hash // stored or removed, in order

	Parent    Hash    // zero: the first hash starts a prompt
	Tokens    []int64 // wider than token ids are, because engines may send anything; nil and empty differ on the wire only
	BlockSize *int    // tokens per hash; nil: the block size of the source
	Pairs     bool    // tokens go out as bigrams: len(Tokens)-1 of them
	LoRA      string
	Salt      string
	MM        [][]uint64 // hashes of multimodal inputs per engine block; nil: none

	Medium    string  // empty: unsaid
	Locality  string  // empty: unsaid
	Owner     string  // of the memory; empty: unsaid
	Group     *int    // nil: unsaid, which is another group than 0
	Kind      *string // of the group's attention; nil: unsaid
	Remaining []int   // copies left per hash of a removal; nil: unsaid

	Wire Wire
}

// Wire is what an event has on the wire besides its meaning. Models ignore it.
type Wire struct {
	Value   any      // the value that a Raw event is
	Also    []Field  // fields that are added or replaced, under their wire names
	Omit    []string // wire names of fields to leave out of a map
	Shuffle bool     // write the keys of a map in an order no engine uses
}

// Field is a field of an event on the wire.
type Field struct {
	Name  string
	Value any
}
