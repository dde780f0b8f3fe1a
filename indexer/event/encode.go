package event

import (
	"encoding/binary"
	"slices"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// The number of elements of a record's array.
const recordLen = 8

// HeaderRoom is how many bytes AppendRecord adds to the operations at most.
const HeaderRoom = 64

// AppendRecord appends a record to b: the header, and ops, which together hold
// count operations as the other Append functions write them.
func AppendRecord(b []byte, h Header, count int, ops ...[]byte) []byte {
	b = mpack.AppendArray(b, recordLen)
	b = mpack.AppendUint(b, Version)
	b = mpack.AppendUint(b, h.Incarnation)
	if h.Batches {
		b = mpack.AppendUint(b, h.First)
		b = mpack.AppendUint(b, h.Last)
	} else {
		b = mpack.AppendNil(b)
		b = mpack.AppendNil(b)
	}
	b = mpack.AppendFloat64(b, h.TS)
	b = mpack.AppendArray(b, count)
	for _, o := range ops {
		b = append(b, o...)
	}
	b = mpack.AppendUint(b, h.Fingerprint)
	return mpack.AppendBool(b, h.Partial)
}

// AppendStored appends an OpStored. len(engine) divides len(run.Locals), or is
// 0; run.Engine is not used.
func AppendStored(b []byte, tier Tier, owner string, run Run, engine []EngineHash) []byte {
	b = appendHead(b, 9, OpStored)
	b = appendPlace(b, tier, owner)
	return appendRun(b, run, engine)
}

// ExtendStored adds blocks to the end of the run of an OpStored, which is what b has
// from start on, and tells whether it could: hashes of the engine have to be integers.
func ExtendStored(b []byte, start int, locals []uint64, engine []EngineHash) ([]byte, bool) {
	r := mpack.NewReader(b[start:])
	r.Array()
	for range 5 { // kind, tier, owner, parent, base
		r.Skip()
	}
	at := start + r.Offset()
	before := r.Bin()
	if r.Next() != mpack.KindBin || slices.ContainsFunc(engine, func(h EngineHash) bool { return h.Name != nil }) {
		return b, false
	}
	named := r.Bin()
	rest := b[start+r.Offset():]
	if r.Err() != nil {
		return b, false
	}
	end := len(b)
	b = append(mpack.AppendBinHead(b, len(before)+8*len(locals)), before...)
	for _, h := range locals {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	b = append(mpack.AppendBinHead(b, len(named)+8*len(engine)), named...)
	for i := range engine {
		b = binary.LittleEndian.AppendUint64(b, engine[i].Bits)
	}
	b = append(b, rest...)
	return b[:at+copy(b[at:], b[end:])], true
}

// AppendRemoved appends an OpRemoved: the index blocks that left the tier, and
// the engine blocks of a group whose last copy there went.
func AppendRemoved(b []byte, tier Tier, owner string, seqs []uint64, group Group, engine []EngineHash) []byte {
	b = appendHead(b, 6, OpRemoved)
	b = appendPlace(b, tier, owner)
	b = appendHashes(b, seqs)
	b = appendEngine(b, engine)
	return appendGroup(b, group)
}

// AppendCleared appends an OpCleared.
func AppendCleared(b []byte, tiers TierMask, owner string) []byte {
	b = appendHead(b, 3, OpCleared)
	b = mpack.AppendUint(b, uint64(tiers))
	return mpack.AppendStr(b, owner)
}

// AppendReset appends an OpReset.
func AppendReset(b []byte, reason string) []byte {
	return mpack.AppendStr(appendHead(b, 2, OpReset), reason)
}

// AppendGap appends an OpGap for the engine batches from and to and all
// between.
func AppendGap(b []byte, from, to uint64, reason string) []byte {
	b = appendHead(b, 4, OpGap)
	b = mpack.AppendUint(b, from)
	b = mpack.AppendUint(b, to)
	return mpack.AppendStr(b, reason)
}

// AppendDigest appends an OpDigest.
func AppendDigest(b []byte, d *Digests) []byte {
	n := Tiers
	for n > 0 && d[n-1] == (Digest{}) {
		n--
	}
	b = appendHead(b, 1+2*n, OpDigest)
	for i := range n {
		b = mpack.AppendUint(b, d[i].Count)
		b = mpack.AppendUint(b, d[i].Sum)
	}
	return b
}

// AppendCheckpoint appends an OpCheckpoint with the given number of runs, which
// the caller appends next with AppendRun.
func AppendCheckpoint(b []byte, chunk, chunks int, tier Tier, owner string, runs int) []byte {
	b = appendHead(b, 5+runs, OpCheckpoint)
	b = mpack.AppendUint(b, uint64(chunk))
	b = mpack.AppendUint(b, uint64(chunks))
	return appendPlace(b, tier, owner)
}

// AppendRun appends one run of a checkpoint.
func AppendRun(b []byte, run Run, engine []EngineHash) []byte {
	return appendRun(mpack.AppendArray(b, 6), run, engine)
}

// AppendRetired appends an OpRetired.
func AppendRetired(b []byte) []byte { return appendHead(b, 1, OpRetired) }

// AppendCopies appends an OpCopies; counts holds one number a hash.
func AppendCopies(b []byte, tier Tier, owner string, group Group, engine []EngineHash, counts []uint64) []byte {
	b = appendHead(b, 6, OpCopies)
	b = appendPlace(b, tier, owner)
	b = appendGroup(b, group)
	b = appendEngine(b, engine)
	b = mpack.AppendArray(b, len(counts))
	for _, n := range counts {
		b = mpack.AppendUint(b, n)
	}
	return b
}

// AppendParked appends an OpParked: a chain of engine blocks in a tier that
// waits for the block that the engine calls parent.
func AppendParked(b []byte, tier Tier, owner string, group Group, parent EngineHash, locals []uint64, engine []EngineHash) []byte {
	b = appendHead(b, 7, OpParked)
	b = appendPlace(b, tier, owner)
	b = appendGroup(b, group)
	b = appendEngineHash(b, parent)
	b = appendHashes(b, locals)
	return appendEngine(b, engine)
}

// AppendGroupKind appends an OpGroup.
func AppendGroupKind(b []byte, index int64, main bool) []byte {
	return mpack.AppendBool(mpack.AppendInt(appendHead(b, 3, OpGroup), index), main)
}

// AppendPublisher appends an OpPublisher.
func AppendPublisher(b, id []byte) []byte {
	return mpack.AppendBin(appendHead(b, 2, OpPublisher), id)
}

// AppendKnown appends an OpKnown.
func AppendKnown(b []byte, run Run, engine []EngineHash) []byte {
	return appendRun(appendHead(b, 7, OpKnown), run, engine)
}

// AppendGaps appends an OpGaps: how many gaps there were in this incarnation,
// and how many batches were lost in them.
func AppendGaps(b []byte, gaps, batches uint64) []byte {
	b = appendHead(b, 3, OpGaps)
	return mpack.AppendUint(mpack.AppendUint(b, gaps), batches)
}

// AppendHome appends an OpHome: the records are about what the engine of another
// rank of the instance says of this one.
func AppendHome(b []byte, rank uint32) []byte {
	return mpack.AppendUint(appendHead(b, 2, OpHome), uint64(rank))
}

func appendHead(b []byte, n int, kind OpKind) []byte {
	return append(mpack.AppendArray(b, n), byte(kind))
}

func appendPlace(b []byte, tier Tier, owner string) []byte {
	return mpack.AppendStr(append(b, byte(tier)), owner)
}

func appendRun(b []byte, run Run, engine []EngineHash) []byte {
	if run.Root {
		b = mpack.AppendNil(b)
	} else {
		b = mpack.AppendUint(b, run.Parent)
	}
	b = mpack.AppendUint(b, uint64(run.Base))
	b = appendHashes(b, run.Locals)
	b = appendEngine(b, engine)
	b = appendGroup(b, run.Group)
	if !run.HasParentName {
		return mpack.AppendNil(b)
	}
	return appendEngineHash(b, run.ParentName)
}

func appendHashes(b []byte, hashes []uint64) []byte {
	b = mpack.AppendBinHead(b, 8*len(hashes))
	for _, h := range hashes {
		b = binary.LittleEndian.AppendUint64(b, h)
	}
	return b
}

func appendGroup(b []byte, g Group) []byte {
	if !g.Set {
		return mpack.AppendNil(b)
	}
	return mpack.AppendInt(b, g.Index)
}

// appendEngine writes engine hashes as packed integers where they all are
// integers, as they are with every engine's defaults; else one by one.
func appendEngine(b []byte, hashes []EngineHash) []byte {
	if len(hashes) == 0 {
		return mpack.AppendNil(b)
	}
	for i := range hashes {
		if hashes[i].Name != nil {
			b = mpack.AppendArray(b, len(hashes))
			for _, h := range hashes {
				b = appendEngineHash(b, h)
			}
			return b
		}
	}
	b = mpack.AppendBinHead(b, 8*len(hashes))
	for i := range hashes {
		b = binary.LittleEndian.AppendUint64(b, hashes[i].Bits)
	}
	return b
}

func appendEngineHash(b []byte, h EngineHash) []byte {
	switch {
	case h.Name == nil:
		return mpack.AppendUint(b, h.Bits)
	case h.Text:
		return mpack.AppendStr(b, string(h.Name))
	}
	return mpack.AppendBin(b, h.Name)
}

func leUint64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
