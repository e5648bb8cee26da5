package registration

import (
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vipgate/vipgate/pkg/identity"
)

// Address is the address of a registry: a unix socket, or a host and port.
type Address struct {
	text       string
	path       string // of a unix socket
	host, port string // of TCP
}

// ParseAddress parses unix:///PATH, a path, or HOST:PORT. The error begins with s.
func ParseAddress(s string) (Address, error) {
	if strings.HasPrefix(s, "unix:") || strings.HasPrefix(s, "/") {
		path, err := identity.SocketPath(s)
		if err != nil {
			return Address{}, fmt.Errorf("%s: %w", s, err)
		}
		return Address{text: s, path: path}, nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" || port == "" {
		return Address{}, fmt.Errorf("%s: write unix:///PATH, or HOST:PORT", s)
	}
	return Address{text: s, host: host, port: port}, nil
}

// String returns the address as it was written.
func (a Address) String() string { return a.text }

// fixed reports whether the address needs no lookup.
func (a Address) fixed() bool {
	_, err := netip.ParseAddr(a.host)
	return a.path != "" || err == nil
}

// at returns the address with the host name resolved to ip.
func (a Address) at(ip netip.Addr) Address {
	return Address{text: net.JoinHostPort(ip.String(), a.port), host: ip.String(), port: a.port}
}

// target returns the target of a gRPC client.
func (a Address) target() string {
	if a.path != "" {
		return "unix:" + a.path
	}
	return "dns:///" + a.text
}
