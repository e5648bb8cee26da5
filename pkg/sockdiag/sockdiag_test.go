package sockdiag

import (
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

func addrPort(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }

func TestTCP(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", "[::]:0"} {
		t.Run(address, func(t *testing.T) {
			listener, err := net.Listen("tcp", address)
			harness.Must(t, err)
			defer listener.Close()
			to := addrPort(listener.Addr())
			if to.Addr().IsUnspecified() {
				to = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), to.Port())
			}
			if got, err := TCP(to, netip.AddrPort{}); err != nil || got != (Socket{Listens: true}) {
				t.Errorf("listener: %+v, %v", got, err)
			}
			var client net.Conn
			harness.Must(t, harness.As(1234, func() (err error) {
				client, err = net.Dial("tcp", to.String())
				return err
			}))
			defer client.Close()
			server, err := listener.Accept()
			harness.Must(t, err)
			defer server.Close()
			peer := addrPort(server.RemoteAddr())
			want := Socket{User: 1234, Established: true}
			if got, err := TCP(peer, addrPort(server.LocalAddr())); err != nil || got != want {
				t.Errorf("peer: %+v, %v", got, err)
			}
			if got, err := TCP(addrPort(server.LocalAddr()), peer); err != nil || got != (Socket{Established: true}) {
				t.Errorf("own: %+v, %v", got, err)
			}
			if _, err := TCP(peer, netip.AddrPort{}); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("no listener: %v", err)
			}
			// A closed socket is not established, whatever its user is.
			harness.Must(t, client.Close())
			if got, err := TCP(peer, addrPort(server.LocalAddr())); err == nil && (got.Established || got.Listens) {
				t.Errorf("closed: %+v", got)
			}
		})
	}
}
