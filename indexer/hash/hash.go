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
		return xxh3.HashSeed(tokenBytes(tokens), seed)
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
func Next(parent, local uint64) uint64 {
	var b [16]byte
	binary.LittleEndian.PutUint64(b[:8], parent)
	binary.LittleEndian.PutUint64(b[8:], local)
	return xxh3.HashSeed(b[:], Seed)
}

// AppendLocals appends the local hashes of the whole blocks of a prompt to dst.
// over is how many tokens a block's window reaches into the next block: 0, or 1
// for engines that key their cache by bigrams (EAGLE). A blockSize below 1
// appends nothing.
func AppendLocals(dst []uint64, tokens []uint32, blockSize, over int, seed uint64) []uint64 {
	if blockSize < 1 {
		return dst
	}
	for at := 0; at+blockSize+over <= len(tokens); at += blockSize {
		dst = append(dst, Local(tokens[at:at+blockSize+over], seed, nil))
	}
	return dst
}

// AppendSequence appends the sequence hashes of a prompt, given by the local
// hashes of its blocks from the first one on, to dst.
func AppendSequence(dst, locals []uint64) []uint64 {
	var prev uint64
	for i, l := range locals {
		if i == 0 {
			prev = l
		} else {
			prev = Next(prev, l)
		}
		dst = append(dst, prev)
	}
	return dst
}

// Bytes returns the XXH3-64 of b with seed 0: the fingerprint by which a
// bridge recognises a payload it has seen.
func Bytes(b []byte) uint64 { return xxh3.Hash(b) }
