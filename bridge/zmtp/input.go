package zmtp

import (
	"sync/atomic"
	"time"
)

// Sizes of the read buffer, in bytes.
const (
	bufMin  = 4 << 10  // of a connection that waits for the rest of a message
	bufLoad = 64 << 10 // of one that reads; more only for a message that needs it
	bufKeep = 1 << 20  // a larger one is given back behind its message

	readMax   = 64 << 10 // read at most, unless more is missing
	readAhead = 4 << 10  // read behind a large frame
)

// span is a part of the buffer.
type span struct{ off, len int }

// input is the receiving half of a Conn.
//
// Without anything to keep buf may be nil. Between off 0 and r there are the frames of the message under way, with what
// is of no use any more around them; between r and w there are bytes that were
// read and not looked at. The message stays in one piece of memory, so frames
// are views, never copies.
type input struct {
	buf   []byte
	r, w  int
	parts []span // frames of the message under way, or of the last one
	size  int    // bytes in parts
	whole bool   // the message in parts was returned

	full bool // the last read filled the buffer

	buffers *Buffers // where buf is from

	err      error       // ended the connection
	deadline time.Time   // of Recv
	armed    time.Time   // deadline of the socket, zero if not known
	heard    time.Time   // when the last bytes came; zero before the handshake
	pinged   time.Time   // when silence was noticed; zero if bytes came since
	wake     atomic.Bool // interrupt was called
}

func (in *input) buffered() []byte { return in.buf[in.r:in.w] }

func (in *input) view(at span) []byte {
	end := at.off + at.len
	return in.buf[at.off:end:end]
}

// kept returns how many bytes of the buffer are still needed.
func (in *input) kept() int { return in.size + in.w - in.r }

// room makes room for at least one byte, and returns where to read to. Behind a
// large frame only little is read, or much of the next one would have to be moved.
func (in *input) room(missing int) []byte {
	in.makeRoom(missing)
	n := readMax
	if missing > readMax/4 {
		n = missing + readAhead
	}
	return in.buf[in.w:min(len(in.buf), in.w+n)]
}

// makeRoom makes room for at least one byte to read. A buffer beyond bufLoad only
// ever doubles, and only when three quarters of it are in use: a peer pays for our
// memory with bytes, not with promises.
func (in *input) makeRoom(missing int) {
	kept, size := in.kept(), len(in.buf)
	switch {
	case kept == 0 && (size == 0 || size > bufKeep):
		in.move(bufLoad)
	case size < bufLoad && (in.full || kept > size/4*3):
		in.move(bufLoad)
	case kept+missing > size && kept > size/4*3:
		in.move(min(2*size, max(kept+missing+readAhead, bufKeep)))
	case in.w > kept && size-in.w < max(size/4, min(missing, size-kept)):
		in.move(size)
	}
	if in.kept() == 0 {
		in.r, in.w = 0, 0
	}
}

// move packs what is kept at the start of a buffer of size bytes, which may be
// the same one.
func (in *input) move(size int) {
	old, dst := in.buf, in.buf
	if size != len(dst) {
		dst = in.buffers.get(size)
	}
	w := 0
	for i, at := range in.parts {
		in.parts[i].off = w
		w += copy(dst[w:], in.view(at))
	}
	n := copy(dst[w:], in.buffered())
	in.buf, in.r, in.w, in.full = dst, w, w+n, false
	if size != len(old) {
		in.buffers.put(old)
	}
}

// rest gives back memory that is not needed until something comes. What is kept of
// a message is kept in as little as there is.
func (in *input) rest() {
	switch kept := in.kept(); {
	case kept == 0 && in.buf != nil:
		in.buffers.put(in.buf)
		in.buf, in.r, in.w, in.full = nil, 0, 0, false
		for i := range in.parts {
			in.parts[i].off = 0 // they are empty, as a delimiter is
		}
	case kept > 0 && kept <= bufMin/2 && len(in.buf) > bufMin:
		in.move(bufMin)
	}
}

// arrived takes note of n bytes read.
func (in *input) arrived(n int) {
	in.w += n
	in.full = in.w == len(in.buf)
	in.heard = time.Now()
	if !in.pinged.IsZero() {
		in.pinged = time.Time{}
		in.armed = time.Time{} // set for the answer, now too late
	}
}
