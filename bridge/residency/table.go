package residency

import "math/rand/v2"

// table maps 64-bit hashes to cells. It is an open-addressed hash table with
// linear probing, and deletes by moving entries back, so it never fills up with
// gravestones. Compared with a Go map it finds or makes an entry with one probe
// instead of two look-ups, which is most of what a store of new blocks costs.
// The zero table is empty. Whoever uses it gives each key with its hash, hashOf with
// the table's seed.
type table struct {
	slots []slot
	n     int
	seed  uint64 // keys come from engines: nobody can make them collide without it
	bits  uint8  // of a part of a directory: so many first bits of the hash of all keys are the same
}

type slot struct {
	key uint64
	id  uint32 // 0: empty
}

const tableMin = 16 // slots

func hashOf(key, seed uint64) uint64 { return (key ^ seed) * 0x9e3779b97f4a7c15 }

// home returns the slot where the search for a key begins that has a hash.
func (t *table) home(hash uint64) int { return int((hash ^ hash>>32) & uint64(len(t.slots)-1)) }

// full tells whether one key more would be too many for the slots.
func (t *table) full() bool { return (t.n+1)*4 > len(t.slots)*3 }

// empty makes the table one that holds nothing and has room for n keys.
func (t *table) empty(n int) {
	t.n = 0
	if t.seed == 0 {
		t.seed = rand.Uint64() | 1
	}
	if slots := len(t.slots); n*4 < slots*3 && slots <= 1<<16 {
		clear(t.slots)
		return
	}
	slots := tableMin
	for n*4 >= slots*3 {
		slots *= 2
	}
	t.slots = nil
	t.resize(slots)
}

// get returns the cell of a key, 0 if there is none.
func (t *table) get(key, hash uint64) uint32 {
	if t.n == 0 {
		return 0
	}
	for i := t.home(hash); ; i = (i + 1) & (len(t.slots) - 1) {
		if s := &t.slots[i]; s.id == 0 || s.key == key {
			return s.id
		}
	}
}

// ref returns where the cell of a key is kept, which the caller sets if it is 0.
// It is valid until the table changes otherwise.
func (t *table) ref(key, hash uint64) *uint32 {
	if t.full() {
		t.resize(max(2*len(t.slots), tableMin))
	}
	for i := t.home(hash); ; i = (i + 1) & (len(t.slots) - 1) {
		s := &t.slots[i]
		if s.id != 0 && s.key == key {
			return &s.id
		}
		if s.id == 0 {
			s.key = key
			t.n++
			return &s.id
		}
	}
}

// del takes a key out.
func (t *table) del(key, hash uint64) {
	if t.n == 0 {
		return
	}
	mask := len(t.slots) - 1
	i := t.home(hash)
	for ; t.slots[i].id == 0 || t.slots[i].key != key; i = (i + 1) & mask {
		if t.slots[i].id == 0 {
			return
		}
	}
	t.n--
	// Whatever could stand nearer to its home moves into the hole.
	for j := (i + 1) & mask; t.slots[j].id != 0; j = (j + 1) & mask {
		if (j-t.home(hashOf(t.slots[j].key, t.seed)))&mask >= (j-i)&mask {
			t.slots[i] = t.slots[j]
			i = j
		}
	}
	t.slots[i] = slot{}
	if len(t.slots) > tableMin && t.n*8 < len(t.slots) {
		t.resize(len(t.slots) / 2)
	}
}

func (t *table) resize(slots int) {
	old := t.slots
	t.slots = make([]slot, slots)
	for _, s := range old {
		if s.id == 0 {
			continue
		}
		i := t.home(hashOf(s.key, t.seed))
		for t.slots[i].id != 0 {
			i = (i + 1) & (slots - 1)
		}
		t.slots[i] = s
	}
}
