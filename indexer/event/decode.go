package event

import (
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// Decoder reads records, one after the other, into buffers that it uses again.
// It is not for concurrent use.
type Decoder struct {
	// Header of the record.
	Header Header
	// Op is the operation that Next has read. It is valid until the next
	// call; its slices are the Decoder's, its names views into the record.
	Op Op

	r      mpack.Reader
	left   int // operations not read yet
	err    error
	hashes []uint64 // backs the hash lists of Op
	runs   []Run
	owner  string // last owner read: nearly always the same one again
	reason string
}

// Reset begins to read a record. Errors wrap ErrRecord or ErrVersion.
func (d *Decoder) Reset(record []byte) error {
	*d = Decoder{hashes: d.hashes, runs: d.runs, owner: d.owner, reason: d.reason}
	r := mpack.NewReader(record)
	n := r.Array()
	version := r.Uint()
	if r.Err() == nil && version != Version {
		return fmt.Errorf("%w %d", ErrVersion, version)
	}
	if n < recordLen {
		r.Fail(mpack.ErrType)
	}
	h := &d.Header
	h.Incarnation = r.Uint()
	if !r.Nil() {
		h.Batches = true
		h.First = r.Uint()
		h.Last = r.Uint()
	} else if !r.Nil() {
		r.Fail(mpack.ErrType)
	}
	h.TS = r.Number()
	ops := r // the operations are read by Next, later
	r.Skip()
	h.Fingerprint = r.Uint()
	h.Partial = r.Bool()
	d.left = ops.Array()
	d.r = ops
	if err := r.Err(); err != nil {
		return d.fail(err)
	}
	return nil
}

// Next reads the next operation into Op and tells whether there was one.
// Operations of kinds that this version does not know are skipped.
func (d *Decoder) Next() bool {
	for d.err == nil && d.left > 0 {
		d.left--
		if d.op() {
			return true
		}
	}
	return false
}

// Err returns why Next stopped, nil at the end of the record. It wraps
// ErrRecord.
func (d *Decoder) Err() error { return d.err }

func (d *Decoder) fail(err error) error {
	if d.err == nil {
		d.err = fmt.Errorf("%w: %w", ErrRecord, err)
	}
	return d.err
}

// op reads one operation, and tells whether its kind is known.
func (d *Decoder) op() bool {
	r := &d.r
	start := *r
	n := r.Array()
	number := r.Uint() // may be more than an OpKind holds
	kind := OpKind(min(number, uint64(len(opFields)-1)))
	d.hashes = d.hashes[:0]
	d.Op = Op{Kind: kind}
	if fields := opFields[kind]; fields == 0 {
		*r = start
		r.Skip()
		if err := r.Err(); err != nil {
			d.fail(err)
		}
		return false
	} else if n < fields {
		r.Fail(mpack.ErrType)
	}
	read := d.fields(kind, n)
	for range n - read { // a later version's additions
		r.Skip()
	}
	if err := r.Err(); err != nil {
		d.fail(err)
		return false
	}
	return true
}

// opFields holds the least number of elements of an operation, by kind; 0 for a
// kind that does not exist.
var opFields = [...]int{0, 9, 6, 3, 2, 4, 1, 5, 1, 6, 7, 3, 2, 7, 3, 2, 0}

// fields reads what follows the kind, and returns how many elements of the
// operation have been read in all.
func (d *Decoder) fields(kind OpKind, n int) int {
	r, op := &d.r, &d.Op
	switch kind {
	case OpStored:
		d.place()
		d.run(&op.Run)
	case OpRemoved:
		d.place()
		op.Seqs = d.packed()
		op.Engine = d.engine()
		op.Group = d.group()
	case OpCleared:
		op.Tiers = TierMask(r.Uint()) & AllTiers
		op.Owner = d.name(&d.owner)
	case OpReset:
		op.Reason = d.name(&d.reason)
	case OpGap:
		op.From, op.To = r.Uint(), r.Uint()
		op.Reason = d.name(&d.reason)
		if op.From > op.To {
			r.Fail(mpack.ErrType)
		}
	case OpDigest:
		pairs := min((n-1)/2, Tiers)
		for i := range pairs {
			op.Digests[i] = Digest{Count: r.Uint(), Sum: r.Uint()}
		}
		return 1 + 2*pairs
	case OpCheckpoint:
		d.checkpoint(n - 5)
		return n
	case OpCopies:
		d.place()
		op.Group = d.group()
		op.Engine = d.engine()
		op.Counts = d.counts(op.Engine.Len())
	case OpParked:
		d.place()
		op.Group = d.group()
		op.ParentName, op.HasParentName = readEngineHash(r), true
		op.Locals = d.packed()
		op.Engine = d.engine()
		d.covers(&op.Run)
	case OpGroup:
		op.Group = Group{Index: r.Int(), Set: true}
		op.Main = r.Bool()
	case OpPublisher:
		op.Publisher = r.Bin()
	case OpKnown:
		d.run(&op.Run)
	case OpGaps:
		op.From, op.To = r.Uint(), r.Uint()
	case OpHome:
		op.Home = r.Uint32()
	}
	return opFields[kind]
}

func (d *Decoder) place() {
	tier := d.r.Uint()
	if tier >= Tiers {
		d.r.Fail(mpack.ErrType)
		return
	}
	d.Op.Tier = Tier(tier)
	d.Op.Owner = d.name(&d.owner)
}

// name reads a string without making a new one of a text that was read before.
func (d *Decoder) name(last *string) string {
	b := d.r.Str()
	if string(b) != *last {
		*last = string(b)
	}
	return *last
}

func (d *Decoder) run(run *Run) {
	r := &d.r
	if run.Root = r.Nil(); !run.Root {
		run.Parent = r.Uint()
	}
	run.Base = r.Uint32()
	run.Locals = d.packed()
	run.Engine = d.engine()
	run.Group = d.group()
	if !r.Nil() {
		run.ParentName, run.HasParentName = readEngineHash(r), true
	}
	d.covers(run)
}

// covers checks that the engine blocks of a run cover as many index blocks
// each.
func (d *Decoder) covers(run *Run) {
	if n := run.Engine.Len(); n > 0 && len(run.Locals)%n != 0 || n > len(run.Locals) {
		d.r.Fail(mpack.ErrType)
	}
}

func (d *Decoder) checkpoint(runs int) {
	op := &d.Op
	chunk, chunks := d.r.Uint32(), d.r.Uint32()
	if chunk >= chunks {
		d.r.Fail(mpack.ErrType)
		return
	}
	op.Chunk, op.Chunks = int(chunk), int(chunks)
	d.place()
	d.runs = d.runs[:0]
	for range runs {
		n := d.r.Array()
		if n < 6 {
			d.r.Fail(mpack.ErrType)
			return
		}
		var run Run
		d.run(&run)
		for range n - 6 {
			d.r.Skip()
		}
		d.runs = append(d.runs, run)
	}
	op.Runs = d.runs
}

// packed reads a binary of little-endian 64-bit integers. What it returns is
// valid until the next operation.
func (d *Decoder) packed() []uint64 {
	b := d.r.Bin()
	if len(b)%8 != 0 {
		d.r.Fail(mpack.ErrType)
		return nil
	}
	at := len(d.hashes)
	for ; len(b) > 0; b = b[8:] {
		d.hashes = append(d.hashes, leUint64(b))
	}
	return d.hashes[at:len(d.hashes):len(d.hashes)]
}

func (d *Decoder) counts(want int) []uint64 {
	if d.r.Array() != want {
		d.r.Fail(mpack.ErrType)
		return nil
	}
	at := len(d.hashes)
	for range want {
		d.hashes = append(d.hashes, d.r.Uint())
	}
	return d.hashes[at:len(d.hashes):len(d.hashes)]
}

func (d *Decoder) group() Group {
	if d.r.Nil() {
		return Group{}
	}
	return Group{Index: d.r.Int(), Set: true}
}

func (d *Decoder) engine() EngineHashes {
	r := &d.r
	if r.Nil() {
		return EngineHashes{}
	}
	if r.Next() == mpack.KindBin {
		b := r.Bin()
		if len(b)%8 != 0 || len(b) == 0 {
			r.Fail(mpack.ErrType)
			return EngineHashes{}
		}
		return EngineHashes{n: len(b) / 8, ints: b}
	}
	n := r.Array()
	list := *r
	for range n {
		readEngineHash(r)
	}
	if r.Err() != nil {
		return EngineHashes{}
	}
	return EngineHashes{n: n, list: list.View(r.Offset() - list.Offset())}
}

func readEngineHash(r *mpack.Reader) EngineHash {
	switch r.Next() {
	case mpack.KindStr:
		return EngineHash{Name: r.Str(), Text: true}
	case mpack.KindBin:
		return EngineHash{Name: r.Bin()}
	}
	bits, _ := r.Bits()
	return EngineHash{Bits: bits}
}
