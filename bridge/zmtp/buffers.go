package zmtp

// Buffers is read buffers that connections share. Where the system tells when
// there is something to read, a connection has one only while that is so, or
// while a part of a message has come: of a thousand connections few do.
type Buffers struct {
	small chan *[bufMin]byte
	large chan *[bufLoad]byte
}

// keepBuffers is how many buffers of a size are kept for the next one to read.
const keepBuffers = 64

// NewBuffers returns Buffers without any memory yet.
func NewBuffers() *Buffers {
	return &Buffers{small: make(chan *[bufMin]byte, keepBuffers), large: make(chan *[bufLoad]byte, keepBuffers)}
}

// get returns a buffer of size bytes.
func (b *Buffers) get(size int) []byte {
	switch size {
	case bufMin:
		return oneOf(b.small)[:]
	case bufLoad:
		return oneOf(b.large)[:]
	}
	return make([]byte, size)
}

// put takes a buffer back.
func (b *Buffers) put(buf []byte) {
	switch len(buf) {
	case bufMin:
		leave(b.small, (*[bufMin]byte)(buf))
	case bufLoad:
		leave(b.large, (*[bufLoad]byte)(buf))
	}
}

// oneOf returns one that is kept, or a new one. A sync.Pool would lose all of them
// whenever garbage is collected.
func oneOf[T any](kept chan *T) *T {
	select {
	case b := <-kept:
		return b
	default:
		return new(T)
	}
}

func leave[T any](kept chan *T, b *T) {
	select {
	case kept <- b:
	default:
	}
}
