package load

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
)

// TestLateAfter counts the SYNs that a kernel sends again before a timeout (RFC 6298, Linux 6.18).
func TestLateAfter(t *testing.T) {
	for _, tt := range []struct {
		timeout time.Duration
		linear  uint32
		sent    uint32
	}{
		{900 * time.Millisecond, 0, 0},
		{time.Second, 4, 0},
		{time.Second + 1, 4, 1},
		{DefaultTimeout, 0, 1},
		{DefaultTimeout, 4, 2},
		{3*time.Second + 1, 0, 2},
		{MaxTimeout, 0, 4},
		{MaxTimeout, 4, 8},
	} {
		c := Config{Timeout: tt.timeout, linear: tt.linear}
		if sent := c.sentAgain(); sent != tt.sent {
			t.Errorf("%v with %d: %d, want %d", tt.timeout, tt.linear, sent, tt.sent)
		}
	}
}

// TestLate loses the first SYN of a connection: the queue of its listener is full.
func TestLate(t *testing.T) {
	for timeout, late := range map[time.Duration]bool{900 * time.Millisecond: true, time.Minute: false} {
		t.Run(timeout.String(), func(t *testing.T) {
			t.Parallel()
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			must(t, err)
			defer unix.Close(fd)
			must(t, unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
			must(t, unix.Listen(fd, 0))
			name, err := unix.Getsockname(fd)
			must(t, err)
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(name.(*unix.SockaddrInet4).Port))
			first, err := net.Dial("tcp", to.String()) // fills the queue
			must(t, err)
			defer first.Close()
			c, ended := Config{Timeout: timeout, linear: linearTimeouts()}, make(chan error)
			go func() {
				conn, err := c.dial(t.Context(), to)
				if err == nil {
					err = conn.Close()
				}
				ended <- err
			}()
			await.True(t, "a SYN is lost", func() bool { return synSent(t, to.Port()) })
			accepted, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			must(t, err)
			defer unix.Close(accepted)
			if err := <-ended; late != (err != nil && strings.Contains(err.Error(), "lost ones")) {
				t.Errorf("the second SYN was answered: %v", err)
			}
		})
	}
}

// synSent reports whether a socket of this network namespace connects to a port of 127.0.0.1.
func synSent(t *testing.T, port uint16) bool {
	table, err := os.ReadFile("/proc/net/tcp")
	must(t, err)
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, fmt.Sprintf("0100007F:%04X 02 ", port)) {
			return true
		}
	}
	return false
}
