package zmtp

import "sync"

// Buffers is read buffers that connections share. Where the system tells when
// there is something to read, a connection has one only while that is so, or
// while a part of a message has come: of a thousand connections few do.
type Buffers struct {
	small sync.Pool // of *[bufMin]byte
	large sync.Pool // of *[bufLoad]byte
}

// NewBuffers returns Buffers without any memory yet.
func NewBuffers() *Buffers {
	return &Buffers{
		small: sync.Pool{New: func() any { return new([bufMin]byte) }},
		large: sync.Pool{New: func() any { return new([bufLoad]byte) }},
	}
}

// get returns a buffer of size bytes.
func (b *Buffers) get(size int) []byte {
	switch size {
	case bufMin:
		return b.small.Get().(*[bufMin]byte)[:]
	case bufLoad:
		return b.large.Get().(*[bufLoad]byte)[:]
	}
	return make([]byte, size)
}

// put takes a buffer back.
func (b *Buffers) put(buf []byte) {
	switch len(buf) {
	case bufMin:
		b.small.Put((*[bufMin]byte)(buf))
	case bufLoad:
		b.large.Put((*[bufLoad]byte)(buf))
	}
}
