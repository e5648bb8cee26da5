package nlmsg

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// Without CAP_NET_ADMIN, as in a user namespace, the send buffer has the size of the sysctl.
func TestSendBufferOfSysctl(t *testing.T) {
	text, err := os.ReadFile("/proc/sys/net/core/wmem_max")
	if errors.Is(err, fs.ErrNotExist) {
		lab.Skip(t, "net.core.wmem_max, which only the first network namespace has")
	}
	harness.Must(t, err)
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	harness.Must(t, err)
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
	harness.Must(t, <-opened)
}
