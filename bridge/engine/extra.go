package engine

import (
	"bytes"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

// saltPrefix marks the cache salt among the extra keys of Dynamo's vLLM.
const saltPrefix = "dynamo-cache-salt:"

// readExtras takes from extra_keys and block_mm_infos what sets blocks of equal
// tokens apart: the multimodal hashes, and the cache salt where it is sent
// nowhere else. Engines extend both fields freely, so what is not known there
// is passed over. They come last because a LoRA name or a salt among the extra
// keys is no multimodal hash, whatever it looks like.
func (d *Decoder) readExtras() {
	ev, b := &d.ev, d.b
	if len(ev.Salt) == 0 {
		ev.Salt = taggedSalt(ev.extraKeys)
	}
	if !d.readMMInfos(ev.mmInfos) {
		d.readExtraKeys(ev.extraKeys)
	}
	if hashes, ends := b.mm[ev.from.mm:], b.mmEnds[ev.from.mmEnds:]; len(hashes) > 0 {
		ev.MM = MM{hashes: hashes[:len(hashes):len(hashes)], ends: ends[:len(ends):len(ends)]}
	}
}

// elements enters an array and returns its length, 0 if the next value is
// anything else.
func elements(r *mpack.Reader) int {
	if r.Next() != mpack.KindArray {
		r.Skip()
		return 0
	}
	return r.Array()
}

// taggedSalt returns the tagged salt among the extra keys of the first block.
func taggedSalt(r mpack.Reader) []byte {
	if elements(&r) == 0 {
		return nil
	}
	for range elements(&r) {
		if r.Next() != mpack.KindStr {
			r.Skip()
		} else if salt, ok := bytes.CutPrefix(r.Str(), []byte(saltPrefix)); ok && len(salt) > 0 {
			return salt
		}
	}
	return nil
}

// readExtraKeys collects the multimodal hashes among the extra keys: nil or a
// list for each block, of identifiers or of identifiers with an offset.
func (d *Decoder) readExtraKeys(r mpack.Reader) {
	for block := range elements(&r) {
		if r.Nil() { // nearly all
			d.endBlock(block)
			continue
		}
		for range elements(&r) {
			var id []byte
			switch r.Next() {
			case mpack.KindStr:
				id = r.Str()
			case mpack.KindArray:
				n := r.Array()
				if n == 2 && r.Next() == mpack.KindStr {
					id, n = r.Str(), 1
				}
				skip(&r, n)
			default:
				r.Skip()
			}
			if h, ok := mmHash(id); ok && !bytes.Equal(id, d.ev.Lora) && !bytes.Equal(id, d.ev.Salt) {
				d.b.mm = append(d.b.mm, h)
			}
		}
		d.endBlock(block)
	}
}

// mmHash returns the hash that an identifier of 64 hexadecimal digits stands
// for: its first 16.
func mmHash(id []byte) (h uint64, ok bool) {
	if len(id) != 64 {
		return 0, false
	}
	for i, c := range id {
		switch {
		case c >= '0' && c <= '9':
			c -= '0'
		case c|0x20 >= 'a' && c|0x20 <= 'f':
			c = (c | 0x20) - 'a' + 10
		default:
			return 0, false
		}
		if i < 16 {
			h = h<<4 | uint64(c)
		}
	}
	return h, true
}

// endBlock says that the multimodal hashes of a block have been appended. The
// blocks in front of the first hash are only noted when there is one.
func (d *Decoder) endBlock(block int) {
	b, from := d.b, d.ev.from
	n := len(b.mm) - from.mm
	if n == 0 {
		return
	}
	for len(b.mmEnds)-from.mmEnds < block {
		b.mmEnds = append(b.mmEnds, 0)
	}
	b.mmEnds = append(b.mmEnds, uint32(n))
}

// readMMInfos collects the multimodal hashes of block_mm_infos: nil or a
// structure for each block, as Dynamo writes it. It is all or nothing: where
// the form is another one it collects nothing and returns false.
func (d *Decoder) readMMInfos(r mpack.Reader) bool {
	if r.Next() != mpack.KindArray {
		return false
	}
	b := d.b
	for block := range r.Array() {
		if !r.Nil() {
			d.readMMObjects(&r)
		}
		d.endBlock(block)
	}
	if r.Err() != nil {
		b.mm, b.mmEnds = b.mm[:d.ev.from.mm], b.mmEnds[:d.ev.from.mmEnds]
		return false
	}
	return true
}

func (d *Decoder) readMMObjects(r *mpack.Reader) {
	behind := member(r, "mm_objects")
	for range r.Array() {
		rest := member(r, "mm_hash")
		h, _ := r.Bits()
		skip(r, rest)
		d.b.mm = append(d.b.mm, h)
	}
	skip(r, behind)
}

// member moves to the named member of a structure, which is the first one if
// the structure is an array, and returns how many values follow it.
func member(r *mpack.Reader, name string) (behind int) {
	switch r.Next() {
	case mpack.KindArray:
		if n := r.Array(); n > 0 {
			return n - 1
		}
	case mpack.KindMap:
		n := r.Map()
		for i := range n {
			if string(key(r)) == name {
				return 2 * (n - i - 1)
			}
			r.Skip()
		}
	}
	r.Fail(mpack.ErrType)
	return 0
}

func skip(r *mpack.Reader, n int) {
	for range n {
		r.Skip()
	}
}
