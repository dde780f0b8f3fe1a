package prefix

import (
	"math/bits"
	"sync/atomic"
)

// table finds the place of a block by its sequence hash. It keeps no hashes:
// an entry is a part of the hash and the place, and whoever looks a block up
// compares with the hash that stands there. One goroutine writes, and any number
// may read meanwhile: an entry that is neither added nor taken away stays to be
// found at every moment, also while others move and while the table grows.
//
// A bucket is one cache line: a byte a slot that says what may be there, a count
// of the entries that found no room and went on to the next bucket, and the
// slots. The table is divided so that growing one part of it is short.
type table struct {
	parts [256]atomic.Pointer[part]
	len   int // entries; the writer's own
}

type part struct {
	buckets []bucket
	len     int // entries; the writer's own
}

const slots = 7

type bucket struct {
	marks uint64 // byte i: mark of slot i, 0 if it is free; byte 7: how many went on, 255 for ever if too many
	slot  [slots]uint64
}

// place is where a block is kept: a page and a position in it.
type place uint64

const (
	pageBits = 28
	maxPages = 1 << pageBits
)

func placeOf(page uint32, at int) place { return place(page)<<8 | place(at) }

func (p place) page() uint32 { return uint32(p >> 8) }
func (p place) at() int      { return int(uint8(p)) }

// key is what the table takes from a sequence hash.
type key struct {
	part uint8
	mark uint8
	tag  uint64
}

const tagBits = 28

func keyOf(seq uint64) key {
	h := seq * 0x9e3779b97f4a7c15
	return key{part: uint8(h >> 56), mark: uint8(h>>20) | 0x80, tag: h >> 28 & (1<<tagBits - 1)}
}

func (k key) entry(p place) uint64 { return k.tag<<(64-tagBits) | uint64(p) }

func tagOf(entry uint64) uint64 { return entry >> (64 - tagBits) }

func placeIn(entry uint64) place { return place(entry & (1<<(64-tagBits) - 1)) }

const (
	ones  = 0x0001010101010101
	highs = 0x0080808080808080
)

// candidates returns a set of high bits, one in the byte of every slot with a
// mark, and rarely in one more.
func candidates(marks uint64, mark uint8) uint64 {
	x := marks ^ uint64(mark)*ones
	return (x - ones) &^ x & highs
}

// free returns a set of high bits, one in the byte of every free slot.
func free(marks uint64) uint64 { return ^marks & highs }

func (t *part) home(tag uint64) int { return int(tag * uint64(len(t.buckets)) >> tagBits) }

func (t *part) next(b int) int {
	if b++; b < len(t.buckets) {
		return b
	}
	return 0
}

// marks returns the marks of the bucket that an entry would be in first.
func (t *table) marks(seq uint64) uint64 {
	k := keyOf(seq)
	at := t.parts[k.part].Load()
	if at == nil {
		return 0
	}
	return at.buckets[at.home(k.tag)].marks
}

const wentOn = 56 // shift of the count in bucket.marks

// insert adds an entry.
func (t *table) insert(seq uint64, p place) {
	k := keyOf(seq)
	at := t.parts[k.part].Load()
	if at == nil || at.len >= len(at.buckets)*slots*4/5 {
		at = at.grown()
		t.parts[k.part].Store(at)
	}
	at.insert(k.mark, k.entry(p))
	t.len++
}

func (t *part) insert(mark uint8, entry uint64) {
	for b := t.home(tagOf(entry)); ; b = t.next(b) {
		at := &t.buckets[b]
		if f := free(at.marks); f != 0 {
			i := bits.TrailingZeros64(f) / 8
			atomic.StoreUint64(&at.slot[i], entry)
			atomic.StoreUint64(&at.marks, at.marks|uint64(mark)<<(8*i))
			t.len++
			return
		}
		if at.marks>>wentOn < 255 {
			atomic.StoreUint64(&at.marks, at.marks+1<<wentOn)
		}
	}
}

// grown returns a larger copy.
func (t *part) grown() *part {
	if t == nil {
		return &part{buckets: make([]bucket, 1)}
	}
	return t.resized(len(t.buckets) + (len(t.buckets)+1)/2)
}

func (t *part) resized(buckets int) *part {
	to := &part{buckets: make([]bucket, buckets)}
	for b := range t.buckets {
		at := &t.buckets[b]
		for i, entry := range at.slot {
			if mark := uint8(at.marks >> (8 * i)); mark != 0 {
				to.put(mark, entry)
			}
		}
	}
	return to
}

// put is insert for a part that nobody reads yet.
func (t *part) put(mark uint8, entry uint64) {
	for b := t.home(tagOf(entry)); ; b = t.next(b) {
		at := &t.buckets[b]
		if f := free(at.marks); f != 0 {
			i := bits.TrailingZeros64(f) / 8
			at.slot[i] = entry
			at.marks |= uint64(mark) << (8 * i)
			t.len++
			return
		}
		if at.marks>>wentOn < 255 {
			at.marks += 1 << wentOn
		}
	}
}

// change finds the entry of a place, which must be there, and puts another in
// its stead, or none if to is 0.
func (t *table) change(seq uint64, from, to place) {
	k := keyOf(seq)
	in := t.parts[k.part].Load()
	old := k.entry(from)
	for b := in.home(k.tag); ; b = in.next(b) {
		at := &in.buckets[b]
		for c := candidates(at.marks, k.mark); c != 0; c &= c - 1 {
			i := bits.TrailingZeros64(c) / 8
			if at.slot[i] != old || uint8(at.marks>>(8*i)) != k.mark {
				continue
			}
			if to != 0 {
				atomic.StoreUint64(&at.slot[i], k.entry(to))
				return
			}
			atomic.StoreUint64(&at.marks, at.marks&^(255<<(8*i)))
			for p := in.home(k.tag); p != b; p = in.next(p) {
				if before := &in.buckets[p]; before.marks>>wentOn < 255 {
					atomic.StoreUint64(&before.marks, before.marks-1<<wentOn)
				}
			}
			t.len--
			if in.len--; in.len < len(in.buckets)*slots/4 {
				t.parts[k.part].Store(in.resized(max(1, len(in.buckets)/2)))
			}
			return
		}
	}
}

func (t *table) remove(seq uint64, p place)      { t.change(seq, p, 0) }
func (t *table) move(seq uint64, from, to place) { t.change(seq, from, to) }

// bytes returns the memory that the table takes.
func (t *table) bytes() int {
	n := 0
	for i := range t.parts {
		if p := t.parts[i].Load(); p != nil {
			n += 64 * len(p.buckets)
		}
	}
	return n
}
