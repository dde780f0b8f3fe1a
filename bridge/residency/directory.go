package residency

import (
	"math/rand/v2"
	"unsafe"
)

// directory is a table that grows a small part at a time: it has a table for each
// beginning of a key's hash, and one that is full is split in two by one more bit
// (extendible hashing). Growing as a whole a table of a million keys would keep its
// source, and a table of a few thousand in each of many sources with the same load
// the processors, for tens of milliseconds. The zero directory is empty.
type directory struct {
	parts []*table // by the first bits of the hash; those with fewer bits are there several times, in a row
	bits  uint8    // len(parts) is two to the power of bits
	most  int      // parts that have as many bits
	n     int
	seed  uint64
}

const (
	// partMax is how many slots a part has before it is split: 16 KiB.
	partMax = 1024
	// bitsMax ends splitting, which only hashes that are alike could ask for.
	bitsMax = 28
)

func (d *directory) at(hash uint64) int { return int(hash >> 32 >> (32 - d.bits)) }

// get returns the cell of a key, 0 if there is none.
func (d *directory) get(key uint64) uint32 {
	if d.n == 0 {
		return 0
	}
	h := hashOf(key, d.seed)
	return d.parts[d.at(h)].get(key, h)
}

// ref returns where the cell of a key is kept, which the caller sets if it is 0.
// It is valid until the directory changes otherwise.
func (d *directory) ref(key uint64) *uint32 {
	if d.parts == nil {
		d.seed = rand.Uint64()
		d.parts, d.most = []*table{{seed: d.seed}}, 1
	}
	h := hashOf(key, d.seed)
	at := d.at(h)
	t := d.parts[at]
	for t.full() && len(t.slots) >= partMax && t.bits < bitsMax {
		d.split(at)
		at = d.at(h)
		t = d.parts[at]
	}
	before := t.n
	p := t.ref(key, h)
	d.n += t.n - before
	return p
}

// del takes a key out.
func (d *directory) del(key uint64) {
	if d.n == 0 {
		return
	}
	h := hashOf(key, d.seed)
	at := d.at(h)
	t := d.parts[at]
	before := t.n
	t.del(key, h)
	if t.n == before {
		return
	}
	d.n--
	for t.bits > 0 && t.n <= partMax/8 {
		other := d.parts[at^1<<(d.bits-t.bits)]
		if other.bits != t.bits || t.n+other.n > partMax/4 {
			break
		}
		t = d.merge(at, t, other)
		at = d.at(h)
	}
}

// split makes two of the part at a place, by the next bit of the hash.
func (d *directory) split(at int) {
	old := d.parts[at]
	if old.bits == d.bits {
		parts := make([]*table, 2*len(d.parts))
		for i, t := range d.parts {
			parts[2*i], parts[2*i+1] = t, t
		}
		d.parts, d.most, at = parts, 0, 2*at
		d.bits++
	}
	bits := old.bits + 1
	halves := [2]*table{{seed: old.seed, bits: bits}, {seed: old.seed, bits: bits}}
	for _, h := range halves {
		h.resize(partMax)
	}
	for _, s := range old.slots {
		if s.id != 0 {
			h := hashOf(s.key, d.seed)
			*halves[h>>(64-bits)&1].ref(s.key, h) = s.id
		}
	}
	d.set(at, old.bits, halves[0])
	first := at &^ (1<<(d.bits-old.bits) - 1)
	d.set(first+1<<(d.bits-bits), bits, halves[1])
	if bits == d.bits {
		d.most += 2
	}
}

// merge makes one of a part, which is at a place, and the one beside it. It returns
// that.
func (d *directory) merge(at int, a, b *table) *table {
	t := &table{seed: a.seed, bits: a.bits - 1}
	for _, half := range []*table{a, b} {
		for _, s := range half.slots {
			if s.id != 0 {
				*t.ref(s.key, hashOf(s.key, d.seed)) = s.id
			}
		}
	}
	d.set(at, t.bits, t)
	if a.bits != d.bits {
		return t
	}
	for d.most -= 2; d.most == 0; {
		d.bits--
		for i := range len(d.parts) / 2 {
			if d.parts[i] = d.parts[2*i]; d.parts[i].bits == d.bits {
				d.most++
			}
		}
		d.parts = append([]*table(nil), d.parts[:len(d.parts)/2]...)
	}
	return t
}

// set puts a part in all places around one that have the same first bits.
func (d *directory) set(at int, bits uint8, t *table) {
	n := 1 << (d.bits - bits)
	first := at &^ (n - 1)
	for i := range n {
		d.parts[first+i] = t
	}
}

// bytes returns how much memory the directory takes.
func (d *directory) bytes() int {
	n := len(d.parts) * int(unsafe.Sizeof(d.parts[0]))
	for i, t := range d.parts {
		if i == 0 || t != d.parts[i-1] {
			n += len(t.slots)*int(unsafe.Sizeof(slot{})) + int(unsafe.Sizeof(*t))
		}
	}
	return n
}
