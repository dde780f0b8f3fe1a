package event

// Digest sums up the blocks of one source in one tier: how many there are, and
// the wrapping sum of Mix over them. It does not depend on the order in which
// they came, and one block more or less changes it in constant time.
type Digest struct {
	Count uint64
	Sum   uint64
}

// Add takes blocks in, given by their number and the sum of their Mix.
func (d *Digest) Add(count, sum uint64) { d.Count += count; d.Sum += sum }

// Sub takes blocks out.
func (d *Digest) Sub(count, sum uint64) { d.Count -= count; d.Sum -= sum }

// Digests holds one digest a tier.
type Digests [Tiers]Digest

// Salt returns what sets the blocks of a tier apart in a digest.
func Salt(tier Tier) uint64 { return (uint64(tier) + 1) * 0x9e3779b97f4a7c15 }

// Mix returns what a resident block adds to a digest: a bijective mix of its
// sequence hash and the salt of its tier.
func Mix(seq, salt uint64) uint64 {
	x := seq + salt
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
