package endpoint

import (
	"net"
	"net/netip"
)

// Except returns a listener that closes connections to a local address for which refused returns
// true. It returns l if refused is nil.
func Except(l net.Listener, refused func(netip.Addr) bool) net.Listener {
	if refused == nil {
		return l
	}
	return except{l, refused}
}

type except struct {
	net.Listener
	refused func(netip.Addr) bool
}

// Accept returns the next connection that is not refused.
func (l except) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		at, ok := c.LocalAddr().(*net.TCPAddr)
		if !ok || !l.refused(at.AddrPort().Addr().Unmap()) {
			return c, nil
		}
		_ = c.Close() // nothing was read or written
	}
}
