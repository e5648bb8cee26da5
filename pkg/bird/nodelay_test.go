package bird_test

import (
	"errors"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// tcpOptions holds options of a TCP connection.
type tcpOptions struct {
	noDelay     bool
	userTimeout time.Duration
}

// connections returns the options of a process's TCP connections, by their remote addresses.
func connections(t *testing.T, pid int) map[netip.Addr]tcpOptions {
	t.Helper()
	pidfd, err := unix.PidfdOpen(pid, 0)
	harness.Must(t, err)
	defer unix.Close(pidfd)
	entries, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd")
	harness.Must(t, err)
	found := map[netip.Addr]tcpOptions{}
	for _, e := range entries {
		n, err := strconv.Atoi(e.Name())
		harness.Must(t, err)
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err != nil {
			continue // closed after the listing
		}
		f := os.NewFile(uintptr(fd), e.Name())
		value, err := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY)
		timeout, err2 := unix.GetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		peer, err3 := unix.Getpeername(fd)
		_ = f.Close()
		if errors.Join(err, err2, err3) != nil {
			continue // not TCP, or a listener
		}
		options := tcpOptions{value != 0, time.Duration(timeout) * time.Millisecond}
		switch a := peer.(type) {
		case *unix.SockaddrInet4:
			found[netip.AddrFrom4(a.Addr)] = options
		case *unix.SockaddrInet6:
			found[netip.AddrFrom16(a.Addr)] = options
		}
	}
	return found
}

func withNoDelay(names ...string) func(bird.State) bool {
	return func(s bird.State) bool {
		for _, g := range s.Gateways {
			if !g.NoDelay || g.NoDelayProblem != "" {
				return false
			}
		}
		return up(names...)(s)
	}
}

func TestNoDelay(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{})
	// The loopback session is not touched: BIRD sends nothing but KEEPALIVEs there.
	gatewayOptions := tcpOptions{noDelay: true, userTimeout: 6 * time.Second} // twice the hold time
	want := map[netip.Addr]tcpOptions{
		gatewayAddress(vip.IPv4): gatewayOptions, gatewayAddress(vip.IPv6): gatewayOptions, bird.LoopbackAnnouncer: {},
	}
	check := func(when string) {
		t.Helper()
		s := p.await("TCP_NODELAY of both sessions "+when, withNoDelay("gateway-ipv4", "gateway-ipv6"))
		await.True(t, "loopback session", func() bool { return p.Announcer.State().Load().Established })
		if got := connections(t, s.PID); !maps.Equal(got, want) {
			t.Errorf("%s: connections %v, want %v", when, got, want)
		}
	}
	check("at the start")

	gw.Command(`disable "trench4"`)
	p.await("session lost", down("gateway-ipv4"))
	if g := p.Gateway("gateway-ipv4"); g.NoDelay || g.NoDelayProblem != "" {
		t.Errorf("a gateway without a session: %+v", g)
	}
	gw.Command(`enable "trench4"`)
	check("after a session restart")

	pid := p.State().Load().PID
	kill(t, pid, syscall.SIGKILL)
	p.await("another BIRD", func(s bird.State) bool { return s.Alive && s.PID != pid })
	check("after a restart of BIRD")

	// It has a descriptor of BIRD's socket while it looks at the options, which it repeats.
	await.True(t, "the frontend to have only its loopback connection", func() bool {
		return len(connections(t, os.Getpid())) <= 1
	})
}

// A BIRD with an unreadable executable is not dumpable, so its parent cannot access its sockets.
func TestNoDelayRefused(t *testing.T) {
	const dropped = "-sys_ptrace,-dac_override,-dac_read_search" // which override that
	if has, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_PTRACE, 0, 0, 0); err != nil || has == 1 {
		self, err := os.Executable()
		harness.Must(t, err)
		cmd := exec.CommandContext(t.Context(), "setpriv", "--bounding-set="+dropped, "--inh-caps="+dropped,
			self, "-test.run=^TestNoDelayRefused$", "-test.v")
		cmd.Env = append(os.Environ(), insideVariable+"=")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestNoDelayRefused") {
			t.Fatalf("%v: %s", err, out)
		}
		return
	}
	content, err := os.ReadFile(birdExecutable)
	harness.Must(t, err)
	dir, err := os.MkdirTemp("/tmp", "vg")
	harness.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	file := filepath.Join(dir, "bird")
	harness.Must(t, errors.Join(os.WriteFile(file, content, 0o711), os.Chown(file, 65534, 65534)))
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4)
	gw := l.Router(routerConfig{})
	p := newPod(t, l.Dev, func(o *bird.Options) { o.Executable = file })
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4)}, []vip.VIP{vip4})
	p.Start()
	for range 2 {
		s := p.await("the reason", func(s bird.State) bool {
			return up("gateway-ipv4")(s) && s.Gateways[0].NoDelayProblem != ""
		})
		if s.Gateways[0].NoDelay {
			t.Errorf("%+v", s.Gateways[0])
		}
		p.Announce(announce.Announced, vip4)
		await.True(t, "VIP at the gateway", func() bool { return gw.Has(vip4) })
		gw.Command(`disable "trench4"`)
		p.await("session lost", down("gateway-ipv4"))
		gw.Command(`enable "trench4"`)
	}
	const line = "TCP_NODELAY and TCP_USER_TIMEOUT are not set on BIRD's sessions"
	await.True(t, "a line in the log", func() bool { return strings.Contains(p.Log.String(), line) })
	if log := p.Log.String(); strings.Count(log, line) != 1 {
		t.Errorf("logged %d times", strings.Count(log, line))
	}
}
