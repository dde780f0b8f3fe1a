//go:build amd64 || arm64 || 386 || arm || riscv64 || loong64 || ppc64le || mips64le || mipsle || wasm

package hash

import "unsafe"

// tokenBytes views tokens as the little-endian bytes they already are here.
func tokenBytes(tokens []uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
}

// Tokens returns little-endian u32 tokens as a slice, without a copy where that
// is possible, else in buf. What is left of b after the last whole token is not
// looked at.
func Tokens(buf []uint32, b []byte) []uint32 {
	p := unsafe.SliceData(b)
	if uintptr(unsafe.Pointer(p))%4 != 0 {
		return decodeTokens(buf, b)
	}
	return unsafe.Slice((*uint32)(unsafe.Pointer(p)), len(b)/4)
}
