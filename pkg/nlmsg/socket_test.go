package nlmsg

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Without CAP_NET_ADMIN, as in a user namespace, the send buffer has the size of the sysctl.
func TestSendBufferOfSysctl(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/core/wmem_max")
	if err != nil {
		t.Skip(err)
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	opened := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine, because it lacks the capability
		opened <- func() error {
			header, data := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
			if err := unix.Capget(&header, &data[0]); err != nil {
				return err
			}
			data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
			if err := unix.Capset(&header, &data[0]); err != nil {
				return err
			}
			socket, err := Open(unix.NETLINK_NETFILTER)
			if err != nil {
				return err
			}
			// The kernel doubles the size.
			if want := 2 * min(limit, sendBuffer); socket.SendLimit != want {
				t.Errorf("the send buffer has %d bytes, want %d", socket.SendLimit, want)
			}
			return socket.Close()
		}()
	}()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
}
