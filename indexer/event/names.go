package event

import (
	"encoding/binary"
	"fmt"

	"github.com/kvmesh/kvmesh/indexer/event/mpack"
)

const namesPrefix = "kvmesh.names."

// NamesSubject returns where the bridge that reads the source with the given key
// is asked for the engine's names of blocks. The request has the sequence hashes
// of a prompt's blocks, from the first one on, and the reply the names of those
// that the engine holds, up to the first that it does not.
func NamesSubject(key string) string { return namesPrefix + key }

// maxNames is how many blocks a request may ask for.
const maxNames = 1 << 17

// NamesRequest returns the body of a request: little-endian integers.
func NamesRequest(seqs []uint64) []byte {
	b := make([]byte, 0, 8*len(seqs))
	for _, seq := range seqs {
		b = binary.LittleEndian.AppendUint64(b, seq)
	}
	return b
}

// ParseNamesRequest is the inverse of NamesRequest. Errors wrap ErrRecord.
func ParseNamesRequest(b []byte) ([]uint64, error) {
	if len(b)%8 != 0 || len(b)/8 > maxNames {
		return nil, fmt.Errorf("%w: a request for names of %d bytes", ErrRecord, len(b))
	}
	out := make([]uint64, 0, len(b)/8)
	for ; len(b) > 0; b = b[8:] {
		out = append(out, leUint64(b))
	}
	return out, nil
}

// AppendNames appends the body of a reply: a MessagePack array.
func AppendNames(b []byte, names []EngineHash) []byte {
	b = mpack.AppendArray(b, len(names))
	for _, h := range names {
		b = appendEngineHash(b, h)
	}
	return b
}

// ParseNames is the inverse of AppendNames. Names are views into b. Errors wrap
// ErrRecord.
func ParseNames(b []byte) ([]EngineHash, error) {
	r := mpack.NewReader(b)
	out := make([]EngineHash, r.Array())
	for i := range out {
		out[i] = readEngineHash(&r)
	}
	if err := r.Err(); err != nil {
		return nil, fmt.Errorf("%w: names: %w", ErrRecord, err)
	}
	return out, nil
}
