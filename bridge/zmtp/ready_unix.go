//go:build unix

package zmtp

import (
	"io"
	"net"
	"os"
	"syscall"
)

// socket reads from a connection into memory that is only taken when there is
// something to read.
type socket struct {
	raw     syscall.RawConn
	ready   func(fd uintptr) bool // read, made once
	in      *input
	missing int
	n       int // of the last read
	err     error
}

// newSocket returns nil if the system does not say when a connection has
// something to read.
func newSocket(nc net.Conn, in *input) *socket {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	s := &socket{raw: raw, in: in}
	s.ready = s.read
	return s
}

// fill reads once, at best the missing bytes and more.
func (s *socket) fill(missing int) (int, error) {
	s.missing, s.n, s.err = missing, 0, nil
	if err := s.raw.Read(s.ready); err != nil {
		return 0, err
	}
	if s.n == 0 && s.err == nil {
		return 0, io.EOF
	}
	return s.n, s.err
}

// read reads what is there, and tells whether that was anything; if not, it is
// called again when there is.
func (s *socket) read(fd uintptr) bool {
	p := s.in.room(s.missing)
	for {
		n, err := syscall.Read(int(fd), p)
		switch err {
		case nil:
			s.n = n
			return true
		case syscall.EINTR:
		case syscall.EAGAIN:
			s.in.rest()
			return false
		default:
			s.err = os.NewSyscallError("read", err)
			return true
		}
	}
}
