//go:build !(amd64 || arm64 || 386 || arm || riscv64 || loong64 || ppc64le || mips64le || mipsle || wasm)

package hash

import "encoding/binary"

func tokenBytes(tokens []uint32) []byte {
	b := make([]byte, 0, 4*len(tokens))
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, t)
	}
	return b
}

// Tokens returns little-endian u32 tokens as a slice, in buf. What is left of b
// after the last whole token is not looked at.
func Tokens(buf []uint32, b []byte) []uint32 { return decodeTokens(buf, b) }
