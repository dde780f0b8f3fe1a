// Package event is the contract between bridges, which write the log, and
// indexers, which read it: sources and their subjects, the record that one
// message of the log carries, and the registration of a worker.
//
// docs/record.md has the record byte by byte.
package event

import "github.com/kvmesh/kvmesh/indexer/event/mpack"

// Version is the record version that this package writes, and the only one it
// reads.
const Version = 1

// Header is what a record says beside its operations.
type Header struct {
	// Incarnation is the life of the engine that the record is about. It
	// grows with every life.
	Incarnation uint64
	// First and Last are numbers that the engine gave its batches: the first
	// batch that the record has anything of, and the last one that is complete
	// with this record or was so before; in that case First is greater. They
	// are valid if Batches is set: no batch is complete before the first one.
	First, Last uint64
	Batches     bool
	// Partial says that the record ends inside a batch, which the next record
	// of the subject goes on with.
	Partial bool
	// TS is when the engine made the last batch, in seconds since 1970.
	TS float64
	// Fingerprint is the XXH3-64 of the payload of batch Last, by which a
	// bridge that starts again tells whether the engine is still the same.
	Fingerprint uint64
}

// OpKind tells what an operation does. Kinds up to OpRetired, and OpHome, are for
// indexers; the others are what a bridge needs to read its own state back, and an
// indexer skips them.
type OpKind uint8

// The operations of a record.
const (
	// OpStored: the source holds a run of blocks in a tier.
	OpStored OpKind = 1
	// OpRemoved: the source holds blocks in a tier no longer.
	OpRemoved OpKind = 2
	// OpCleared: the source holds nothing in some tiers.
	OpCleared OpKind = 3
	// OpReset: the source is empty from here on.
	OpReset OpKind = 4
	// OpGap: engine batches are lost for good.
	OpGap OpKind = 5
	// OpDigest: what the source holds after this record.
	OpDigest OpKind = 6
	// OpCheckpoint: a part of the whole state of the source in a tier. A
	// record that has one is a chunk of a checkpoint, and every other
	// operation in it is a part of that state too.
	OpCheckpoint OpKind = 7
	// OpRetired: the worker is gone.
	OpRetired OpKind = 8
	// OpCopies: how many physical copies of engine blocks there are.
	OpCopies OpKind = 9
	// OpParked: engine blocks that wait for their parent.
	OpParked OpKind = 10
	// OpGroup: whether a KV cache group is a main attention group.
	OpGroup OpKind = 11
	// OpPublisher: the identity that the engine's publisher gives itself.
	OpPublisher OpKind = 12
	// OpKnown: blocks that no tier holds, which a store may still name. Only
	// in checkpoints.
	OpKnown OpKind = 13
	// OpGaps: how many gaps there were before. Only in checkpoints.
	OpGaps OpKind = 14
	// OpHome: which rank's engine names this rank in its batches.
	OpHome OpKind = 15
)

// Why a source became empty, or batches are lost: values of Op.Reason.
const (
	ReasonNew         = "new"         // reset: the source's first record
	ReasonRestart     = "restart"     // reset: the engine restarted
	ReasonGap         = "gap"         // reset: state given up because of a gap (--on-gap=reset)
	ReasonTrimmed     = "trimmed"     // gap: the engine's replay ring starts later
	ReasonAbsent      = "absent"      // gap: no replay brought the batches
	ReasonNoReplay    = "no_replay"   // gap: the worker has no replay endpoint
	ReasonUnreachable = "unreachable" // gap: the replay endpoint does not answer
	ReasonUndecodable = "undecodable" // gap: the batch arrived and can't be read
)

// Group is a KV cache group of an engine with hybrid attention. An event that
// names none is of no group, which is not group 0.
type Group struct {
	Index int64
	Set   bool
}

// EngineHash is an engine's own name for a block: an integer of 64 bits, or
// bytes, or text, in which case Name is set. It is compared with others of the
// same source only.
type EngineHash struct {
	Bits uint64
	Name []byte
	Text bool
}

// EngineHashes is a list of engine hashes as a record carries it. The zero
// value is no list, which a record may have where the names are unknown.
type EngineHashes struct {
	n    int
	ints []byte // n little-endian integers, or nil
	list []byte // else n MessagePack values
}

// Len returns the number of hashes.
func (h EngineHashes) Len() int { return h.n }

// AppendTo appends the hashes to dst. Names are views into the record.
func (h EngineHashes) AppendTo(dst []EngineHash) []EngineHash {
	if h.ints != nil {
		for at := 0; at < len(h.ints); at += 8 {
			dst = append(dst, EngineHash{Bits: leUint64(h.ints[at:])})
		}
		return dst
	}
	r := mpack.NewReader(h.list)
	for range h.n {
		dst = append(dst, readEngineHash(&r))
	}
	return dst
}

// Run is a chain of blocks, each the parent of the next.
type Run struct {
	// Parent is the sequence hash of the block before the first one; Root
	// says that there is none.
	Parent uint64
	Root   bool
	// Base is the position of the first block in its prompt, in blocks.
	Base uint32
	// Locals are the local hashes.
	Locals []uint64
	// Engine names the blocks as the engine does. One engine block may cover
	// several index blocks: Engine.Len() divides len(Locals).
	Engine EngineHashes
	// Group is the KV cache group that the copies belong to.
	Group Group
	// ParentName is the engine's name for the block before the first one. It
	// is there only if several engine blocks have that index block.
	ParentName    EngineHash
	HasParentName bool
}

// Op is one operation. Which fields have a meaning depends on Kind.
type Op struct {
	Kind  OpKind
	Tier  Tier     // stored, removed, checkpoint, copies, parked
	Tiers TierMask // cleared
	Owner string   // stored, removed, cleared, checkpoint, copies, parked; "" is the engine itself

	Run                   // stored, known; of parked: Locals, Engine, Group; of removed, copies: Engine, Group
	ParentName EngineHash // parked: the engine's name of the missing parent

	Seqs   []uint64 // removed: sequence hashes
	Counts []uint64 // copies: one a name in Engine

	From, To uint64 // gap: batch numbers; gaps: how many gaps, how many batches
	Reason   string // reset, gap

	Digests Digests // digest

	Chunk, Chunks int   // checkpoint: number of this chunk, and of all
	Runs          []Run // checkpoint

	Main      bool   // group
	Publisher []byte // publisher
	Home      uint32 // home
}
