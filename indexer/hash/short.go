package hash

import (
	"encoding/binary"
	"math/bits"
)

// XXH3-64 of the two lengths that blocks and prompts are made of, written out:
// 64 bytes (a block of 16 tokens) and 16 bytes (a link of the sequence). The
// general function spends more time on finding out the length than on hashing.
// The constants are XXH3's default secret, read as little-endian u64.
const (
	secret00 = 0xbe4ba423396cfeb8
	secret08 = 0x1cad21f72c81017c
	secret16 = 0xdb979083e96dd4de
	secret24 = 0x1f67b3b7a4a44072
	secret32 = 0x78e5c0cc4ee679cb
	secret40 = 0x2172ffcc7dd05a82
	secret48 = 0x8e2443f7744608b8
	secret56 = 0x4c263a81e69035e0

	prime64_1 = 0x9e3779b185ebca87
	avalanche = 0x165667919e3779f9
)

// hash16 returns XXH3-64 of a ‖ b, with Seed.
func hash16(a, b uint64) uint64 {
	lo := a ^ ((secret24 ^ secret32) + Seed)
	hi := b ^ ((secret40 ^ secret48) - Seed)
	h, l := bits.Mul64(lo, hi)
	return finish(16 + bits.ReverseBytes64(lo) + hi + (h ^ l))
}

// hash64 returns XXH3-64 of 64 bytes.
func hash64(p *[64]byte, seed uint64) uint64 {
	const length = 64 * prime64_1 % (1 << 64)
	return finish(length +
		mix16(p, 16, secret32+seed, secret40-seed) + mix16(p, 32, secret48+seed, secret56-seed) +
		mix16(p, 0, secret00+seed, secret08-seed) + mix16(p, 48, secret16+seed, secret24-seed))
}

func finish(h uint64) uint64 {
	h = (h ^ h>>37) * avalanche
	return h ^ h>>32
}

func mix16(p *[64]byte, at int, s0, s1 uint64) uint64 {
	h, l := bits.Mul64(binary.LittleEndian.Uint64(p[at:])^s0, binary.LittleEndian.Uint64(p[at+8:])^s1)
	return h ^ l
}
