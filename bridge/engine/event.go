package engine

import (
	"encoding/binary"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// field is a field of an event that means something here.
type field uint8

const (
	fSkip field = iota
	fTag
	fHashes
	fParent
	fTokens
	fBlockSize
	fMedium
	fLora
	fSalt
	fExtraKeys
	fMMInfos
	fGroup
	fSpecKind
	fLocality
	fOwner
	fRemaining
)

// Fields of events that are arrays, in the order in which releases appended
// them. An array may end anywhere, and may go on with fields of a later day.
var layouts = [...][]field{
	Stored: {
		fHashes, fParent, fTokens, fBlockSize, fSkip, // lora_id
		fMedium, fLora, fExtraKeys, fGroup, fSpecKind, fSkip, // sliding window
		fLocality, fOwner,
	},
	Removed: {fHashes, fMedium, fGroup, fSpecKind, fSkip, fLocality, fOwner},
	Cleared: nil,
}

// Fields that an event of each kind has. What another kind's field holds is
// of no interest, whatever its type.
var fieldsOf = [...]uint32{
	Stored: 1<<fHashes | 1<<fParent | 1<<fTokens | 1<<fBlockSize | 1<<fMedium | 1<<fLora | 1<<fSalt |
		1<<fExtraKeys | 1<<fMMInfos | 1<<fGroup | 1<<fSpecKind | 1<<fLocality | 1<<fOwner,
	Removed: 1<<fHashes | 1<<fMedium | 1<<fGroup | 1<<fSpecKind | 1<<fLocality | 1<<fOwner | 1<<fRemaining,
	Cleared: 1<<fMedium | 1<<fGroup | 1<<fLocality | 1<<fOwner,
}

func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return fTag
	case "block_hashes":
		return fHashes
	case "parent_block_hash":
		return fParent
	case "token_ids":
		return fTokens
	case "block_size":
		return fBlockSize
	case "medium":
		return fMedium
	case "lora_name":
		return fLora
	case "cache_salt":
		return fSalt
	case "extra_keys":
		return fExtraKeys
	case "block_mm_infos":
		return fMMInfos
	case "group_idx":
		return fGroup
	case "kv_cache_spec_kind":
		return fSpecKind
	case "locality":
		return fLocality
	case "ownership":
		return fOwner
	case "remaining_copy_counts":
		return fRemaining
	}
	return fSkip
}

func kindOf(tag []byte) (k Kind, ok bool) {
	switch string(tag) {
	case "BlockStored":
		return Stored, true
	case "BlockRemoved":
		return Removed, true
	case "AllBlocksCleared":
		return Cleared, true
	}
	return 0, false
}

// taken is the Reason of an event that is taken.
const taken = Reasons

// draft is an event that is being read.
type draft struct {
	Event
	from                 mark // where the event begins in the memory of the batch
	hasHashes, hasTokens bool
	extraKeys, mmInfos   mpack.Reader // at these fields, if there are any
}

// readEvent appends the next event to the batch. Unless it is taken, the
// Reader and the batch are left somewhere in the event.
func (d *Decoder) readEvent(from mark) Reason {
	d.ev = draft{from: from}
	reason := NoEvent
	switch d.r.Next() {
	case mpack.KindArray:
		reason = d.arrayEvent()
	case mpack.KindMap:
		reason = d.mapEvent()
	}
	if reason == taken {
		reason = d.finish()
	}
	return reason
}

func (d *Decoder) arrayEvent() Reason {
	n := d.r.Array()
	if n == 0 || d.r.Next() != mpack.KindStr {
		return NoEvent
	}
	kind, ok := kindOf(d.r.Str())
	if !ok {
		return UnknownTag
	}
	d.ev.Kind = kind
	layout, at := layouts[kind], 0
	for range n - 1 {
		f := fSkip
		if at < len(layout) {
			f, at = d.place(layout, at)
		}
		if reason := d.read(f); reason != taken {
			return reason
		}
	}
	return taken
}

// place returns the field that the next element is, and where in the layout
// the one behind it stands. Behind extra_keys the layouts of producers differ
// and the type of an element decides.
func (d *Decoder) place(layout []field, at int) (f field, next int) {
	stored, kind := d.ev.Kind == Stored, d.r.Next()
	switch f = layout[at]; f {
	case fGroup:
		switch kind {
		case mpack.KindArray: // Dynamo had block_mm_infos in front of the group
			return fMMInfos, at
		case mpack.KindStr: // or left the group out
			return fSpecKind, at + 2
		}
	case fSpecKind:
		switch {
		case stored && kind == mpack.KindInt && !d.ev.HasGroup: // or had nil block_mm_infos
			return fGroup, at
		case !stored && kind == mpack.KindStr && isLocality(d.r): // vLLM's order
			return fLocality, at + 3
		case !stored && kind != mpack.KindStr:
			return fSkip, at + 1
		}
	case fLocality, fOwner:
		if kind != mpack.KindStr { // ATOM has a number here
			return fSkip, at + 1
		}
	}
	return f, at + 1
}

func isLocality(r mpack.Reader) bool {
	s := string(r.Str())
	return s == "LOCAL" || s == "REMOTE"
}

func (d *Decoder) mapEvent() Reason {
	n := d.r.Map()
	kind, reason := findTag(d.r, n)
	if reason != taken {
		return reason
	}
	d.ev.Kind = kind
	for range n {
		f := fieldOf(key(&d.r))
		if f == fTag {
			if again, ok := kindOf(d.r.Str()); !ok || again != kind {
				return NoEvent
			}
			continue
		}
		if reason := d.read(f); reason != taken {
			return reason
		}
	}
	return taken
}

// findTag returns the kind of an event whose n pairs r is at. Encoders put the
// tag first, but only the kind says which of the other fields matter.
func findTag(r mpack.Reader, n int) (Kind, Reason) {
	for range n {
		if fieldOf(key(&r)) != fTag {
			r.Skip()
			continue
		}
		if r.Next() != mpack.KindStr {
			return 0, NoEvent
		}
		kind, ok := kindOf(r.Str())
		if !ok {
			return 0, UnknownTag
		}
		return kind, taken
	}
	return 0, NoEvent
}

// read reads the next value as field f.
func (d *Decoder) read(f field) Reason {
	ev := &d.ev
	if fieldsOf[ev.Kind]>>f&1 == 0 {
		f = fSkip
	}
	switch f {
	case fHashes:
		return d.readHashes()
	case fTokens:
		return d.readTokens()
	case fRemaining:
		return d.readRemaining()
	case fParent:
		ev.Parent, ev.HasParent = Hash{}, !d.r.Nil()
		if ev.HasParent && !d.readHash(&ev.Parent) {
			return BadHash
		}
	case fBlockSize:
		ev.BlockSize, _ = d.integer()
	case fMedium:
		ev.Medium = d.text()
	case fLora:
		d.readLora()
	case fSalt:
		ev.Salt = d.text()
	case fExtraKeys:
		ev.extraKeys = d.r
		d.r.Skip()
	case fMMInfos:
		ev.mmInfos = d.r
		d.r.Skip()
	case fGroup:
		ev.Group, ev.HasGroup = d.integer()
	case fSpecKind:
		ev.SpecKind = d.text()
	case fLocality:
		where := d.text()
		ev.Remote = len(where) > 0 && string(where) != "LOCAL"
	case fOwner:
		ev.Owner = d.text()
	default:
		d.r.Skip()
	}
	if d.r.Err() != nil {
		return BadField
	}
	return taken
}

// text reads a string or nil.
func (d *Decoder) text() []byte {
	if d.r.Nil() {
		return nil
	}
	return d.r.Str()
}

// integer reads an integer or nil.
func (d *Decoder) integer() (v int64, ok bool) {
	if d.r.Nil() {
		return 0, false
	}
	return d.r.Int(), true
}

// readLora reads the name of an adapter. In its place, SGLang's arrays have a
// map with the cache salt.
func (d *Decoder) readLora() {
	d.ev.Lora = nil
	if d.r.Next() != mpack.KindMap {
		d.ev.Lora = d.text()
		return
	}
	for range d.r.Map() {
		if fieldOf(key(&d.r)) == fSalt {
			d.ev.Salt = d.text()
		} else {
			d.r.Skip()
		}
	}
}

func (d *Decoder) readHashes() Reason {
	b, from := d.b, d.ev.from.hashes
	b.hashes, d.ev.Hashes = b.hashes[:from], nil
	if d.ev.hasHashes = !d.r.Nil(); !d.ev.hasHashes {
		return taken
	}
	n := d.r.Array()
	if n > MaxHashes-from {
		return TooMany
	}
	for i := range n {
		b.hashes = append(b.hashes, Hash{})
		if !d.readHash(&b.hashes[from+i]) {
			return BadHash
		}
	}
	if d.r.Err() != nil {
		return BadHash
	}
	d.ev.Hashes = b.hashes[from : from+n : from+n]
	return taken
}

// readHash reads a hash into h, which is zero.
func (d *Decoder) readHash(h *Hash) bool {
	switch d.r.Next() {
	case mpack.KindInt:
		h.Bits, _ = d.r.Bits()
		return d.r.Err() == nil
	case mpack.KindBin:
		h.Name = d.r.Bin()
		if n := len(h.Name); n == 32 && d.profile.ShortBytes {
			h.Bits, h.Name = binary.BigEndian.Uint64(h.Name[n-8:]), nil
			return true
		}
	case mpack.KindStr:
		h.Name, h.Text = d.r.Str(), true
	}
	return len(h.Name) > 0 && len(h.Name) <= MaxName
}

func (d *Decoder) readTokens() Reason {
	b, from := d.b, d.ev.from.tokens
	b.tokens, d.ev.Tokens, d.ev.Over = b.tokens[:from], nil, 0
	d.ev.hasTokens = true
	if d.r.Nil() {
		return taken
	}
	n := d.r.Array()
	if n > 0 && d.r.Next() == mpack.KindArray {
		d.ev.Over = 1
		if !d.readPairs(n) {
			return BadTokens
		}
	} else {
		b.tokens = d.r.AppendUint32s(b.tokens, n)
	}
	if d.r.Err() != nil {
		return BadTokens
	}
	d.ev.Tokens = b.tokens[from:len(b.tokens):len(b.tokens)]
	return taken
}

// readPairs reads n pairs of neighbours as the tokens that they are made of.
func (d *Decoder) readPairs(n int) bool {
	b := d.b
	for i := range n {
		if d.r.Array() != 2 {
			return false
		}
		first, second := d.r.Uint32(), d.r.Uint32()
		switch {
		case d.r.Err() != nil:
			return false
		case i == 0:
			b.tokens = append(b.tokens, first)
		case first != b.tokens[len(b.tokens)-1]:
			return false
		}
		b.tokens = append(b.tokens, second)
	}
	return true
}

func (d *Decoder) readRemaining() Reason {
	b, from := d.b, d.ev.from.remaining
	b.remaining, d.ev.Remaining = b.remaining[:from], nil
	if d.ev.HasRemaining = !d.r.Nil(); !d.ev.HasRemaining {
		return taken
	}
	n := d.r.Array()
	if n > MaxHashes {
		return BadCounts
	}
	for range n {
		b.remaining = append(b.remaining, d.r.Uint())
	}
	if d.r.Err() != nil {
		return BadCounts
	}
	d.ev.Remaining = b.remaining[from : from+n : from+n]
	return taken
}

// finish checks what only the whole event shows, and appends it.
func (d *Decoder) finish() Reason {
	ev, b := &d.ev, d.b
	switch {
	case ev.Kind != Cleared && !ev.hasHashes, ev.Kind == Stored && !ev.hasTokens:
		return MissingField
	case ev.HasRemaining && len(ev.Remaining) != len(ev.Hashes):
		return BadCounts
	case len(b.Events) >= MaxEvents:
		return TooMany
	}
	ev.Tier = d.media.Tier(ev.Medium)
	if ev.Kind == Stored {
		d.readExtras()
	}
	b.Events = append(b.Events, ev.Event)
	return taken
}
