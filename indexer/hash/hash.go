// Package hash names blocks of tokens.
//
// A local hash names the tokens of one block, whatever stands before it. A
// sequence hash names a whole prefix up to and including a block, so equal
// sequence hashes mean equal prompts. Both are bit for bit the hashes of
// Dynamo's KV router and of the Mooncake conductor:
//
//	local[i] = XXH3-64(tokens of block i as little-endian u32 ‖ sorted multimodal hashes as little-endian u64, seed)
//	seq[0]   = local[0]
//	seq[i]   = XXH3-64(seq[i-1] LE ‖ local[i] LE, 1337)
//
// Only whole blocks are hashed; a tail shorter than a block has no name.
package hash

import (
	"encoding/binary"
	"slices"

	"github.com/zeebo/xxh3"
)

// Seed is the seed of a namespace with neither LoRA adapter nor cache salt,
// and the seed of every sequence hash.
const Seed = 1337

// SeedOf returns the seed of local hashes under a LoRA adapter and a cache
// salt. Empty names are absent names.
func SeedOf(lora, salt string) uint64 {
	seed := uint64(Seed)
	if lora != "" {
		seed += xxh3.HashString(lora)
	}
	if salt != "" {
		seed += xxh3.HashStringSeed(salt, 1)
	}
	return seed
}

// Local returns the local hash of one block. mm holds the hashes of the
// multimodal inputs that the block's tokens stand for, in any order; most
// blocks have none.
func Local(tokens []uint32, seed uint64, mm []uint64) uint64 {
	if len(mm) == 0 {
		b := tokenBytes(tokens)
		if len(b) == 64 {
			return hash64((*[64]byte)(b), seed)
		}
		return xxh3.HashSeed(b, seed)
	}
	mm = slices.Clone(mm)
	slices.Sort(mm)
	buf := make([]byte, 0, 4*len(tokens)+8*len(mm))
	buf = append(buf, tokenBytes(tokens)...)
	for _, h := range mm {
		buf = binary.LittleEndian.AppendUint64(buf, h)
	}
	return xxh3.HashSeed(buf, seed)
}

// Next returns the sequence hash of a block with the given local hash under
// the prefix named parent. The first block of a prompt has no parent: its
// sequence hash is its local hash.
func Next(parent, local uint64) uint64 { return hash16(parent, local) }

// AppendLocals appends the local hashes of the whole blocks of a prompt to dst.
// over is how many tokens a block's window reaches into the next block: 0, or 1
// for engines that key their cache by bigrams (EAGLE). A blockSize below 1
// appends nothing.
func AppendLocals(dst []uint64, tokens []uint32, blockSize, over int, seed uint64) []uint64 {
	if blockSize < 1 {
		return dst
	}
	n := (len(tokens) - over) / blockSize
	if n <= 0 {
		return dst
	}
	dst = slices.Grow(dst, n)
	if blockSize == 16 && over == 0 {
		b := tokenBytes(tokens)
		for i := range n {
			dst = append(dst, hash64((*[64]byte)(b[64*i:]), seed))
		}
		return dst
	}
	for i := range n {
		dst = append(dst, Local(tokens[i*blockSize:(i+1)*blockSize+over], seed, nil))
	}
	return dst
}

// AppendSequence appends the sequence hashes of a prompt, given by the local
// hashes of its blocks from the first one on, to dst.
func AppendSequence(dst, locals []uint64) []uint64 {
	if len(locals) == 0 {
		return dst
	}
	dst = append(slices.Grow(dst, len(locals)), locals[0])
	return AppendNext(dst, locals[0], locals[1:])
}

// AppendNext appends the sequence hashes of blocks that follow the prefix named
// parent, given by their local hashes, to dst.
func AppendNext(dst []uint64, parent uint64, locals []uint64) []uint64 {
	for _, l := range locals {
		parent = hash16(parent, l)
		dst = append(dst, parent)
	}
	return dst
}

// Bytes returns the XXH3-64 of b with seed 0: the fingerprint by which a
// bridge recognises a payload it has seen.
func Bytes(b []byte) uint64 { return xxh3.Hash(b) }

// Text returns the XXH3-64 of s with seed 0.
func Text(s string) uint64 { return xxh3.HashString(s) }

func decodeTokens(buf []uint32, b []byte) []uint32 {
	buf = buf[:0]
	for ; len(b) >= 4; b = b[4:] {
		buf = append(buf, binary.LittleEndian.Uint32(b))
	}
	return buf
}

// Wide returns the XXH3-128 of bytes, in its canonical (big-endian) form.
func Wide(b []byte) [16]byte { return xxh3.Hash128(b).Bytes() }
