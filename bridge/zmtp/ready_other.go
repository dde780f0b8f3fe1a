//go:build !unix

package zmtp

import "net"

// socket is for systems that say when a connection has something to read.
type socket struct{}

func newSocket(net.Conn, *input) *socket { return nil }

func (s *socket) fill(int) (int, error) { panic("zmtp: there is no socket") }
