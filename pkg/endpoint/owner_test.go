package endpoint

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestPortOwner(t *testing.T) {
	self := fmt.Sprintf("process %d (", os.Getpid())
	for _, address := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0"} {
		l, err := net.Listen("tcp", address)
		harness.Must(t, err)
		port := netip.MustParseAddrPort(l.Addr().String()).Port()
		if got := PortOwner(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)); !strings.HasPrefix(got, self) {
			t.Errorf("the owner of %s is %q", l.Addr(), got)
		}
		got := PortOwner(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.2"), port))
		if overlaps := address != "127.0.0.1:0"; (got != "") != overlaps {
			t.Errorf("the owner of 127.0.0.2 beside %s is %q", l.Addr(), got)
		}
		harness.Must(t, l.Close())
		if got := PortOwner(netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)); got != "" {
			t.Errorf("the owner of a closed port is %q", got)
		}
	}
}

// The table contains the sockets of all containers of the pod.
func TestListeners(t *testing.T) {
	const table = `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:06FE 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:06FE 0200007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1
   2: 0200007F:06FE 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0
   3: 00000000:06FF 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4714 1 0 100 0 0 10 0
`
	if hexWord(netip.MustParseAddr("127.0.0.1")) != "0100007F" {
		lab.Skip(t, "a little-endian host")
	}
	for address, want := range map[string]string{
		"127.0.0.1:1790": "[4711]", "127.0.0.2:1790": "[4713]", "127.0.0.3:1790": "[]", "127.0.0.3:1791": "[4714]",
	} {
		if got := fmt.Sprint(listeners([]byte(table), netip.MustParseAddrPort(address))); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}

// The error of a port in use names the port and the process that listens on it.
func TestPortInUseNamesOwner(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Must(t, err)
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	want := fmt.Sprintf("port %d is used by process %d (endpoint.test): ", port, os.Getpid())
	for _, host := range []string{"127.0.0.1", "0.0.0.0"} {
		_, err := ListenTCP(t.Context(), fmt.Sprintf("%s:%d", host, port), MaxConnections, true)
		if err == nil || !strings.HasPrefix(err.Error(), want) || !errors.Is(err, syscall.EADDRINUSE) {
			t.Errorf("%s: got %v, want %s", host, err, want)
		}
	}
}
