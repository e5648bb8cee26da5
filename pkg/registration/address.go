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
func ParseAddress(text string) (Address, error) {
	if strings.HasPrefix(text, "unix:") || strings.HasPrefix(text, "/") {
		path, err := identity.SocketPath(text)
		if err != nil {
			return Address{}, fmt.Errorf("%s: %w", text, err)
		}
		return Address{text: text, path: path}, nil
	}
	host, port, err := net.SplitHostPort(text)
	if err != nil || host == "" || port == "" {
		return Address{}, fmt.Errorf("%s: write unix:///PATH, or HOST:PORT", text)
	}
	return Address{text: text, host: host, port: port}, nil
}

// String returns the address as it was written.
func (address Address) String() string { return address.text }

// fixed reports whether the address needs no lookup.
func (address Address) fixed() bool {
	_, err := netip.ParseAddr(address.host)
	return address.path != "" || err == nil
}

// at returns the address with the host name resolved to ip.
func (address Address) at(addr netip.Addr) Address {
	return Address{text: net.JoinHostPort(addr.String(), address.port), host: addr.String(), port: address.port}
}

// target returns the target of a gRPC client.
func (address Address) target() string {
	if address.path != "" {
		return "unix:" + address.path
	}
	return "dns:///" + address.text
}
