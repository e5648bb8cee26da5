package probe

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/vip"
)

// State is the state of a path or of a VIP.
type State int8

// The states; their numbers are the values of the metric.
const (
	Unknown   State = iota - 1 // not checked, or not recently
	Dead                       // no path is reachable, and at least one is dead
	Partial                    // of a VIP: a path is dead, and another one is reachable
	Reachable                  // no path is dead, and at least one is reachable
)

// String returns the name of the state.
func (state State) String() string {
	return [...]string{"unknown", "dead", "partial", "reachable"}[state+1]
}

// MarshalText returns the name of the state.
func (state State) MarshalText() ([]byte, error) { return []byte(state.String()), nil }

// target is a VIP that is probed. It is immutable.
type target struct {
	Target
	address netip.Addr
	checks  []healthcheck.Single
	paths   []*path
}

// path is one source address and port toward a VIP. Prober.mu guards its fields below target.
type path struct {
	target *target
	source netip.Addr // zero: of the kernel's choice
	port   uint16

	due   time.Time
	index int // in the schedule; -1 while a check runs
	// verdict is Reachable, Dead, or Unknown before the first one; it was reached at judged.
	verdict  State
	judged   time.Time
	failures int // in a row
	took     time.Duration
	reason   string // why the last check failed
	notRun   string // why the last check could not run; "" if it ran
	hop      string // see trace
	tracedAt time.Time
	removed  bool
}

// state returns the verdict unless it is older than valid.
func (path *path) state(now time.Time, valid time.Duration) State {
	if now.Sub(path.judged) > valid {
		return Unknown
	}
	return path.verdict
}

// check performs the checks of the target until one passes.
func (path *path) check(ctx context.Context) (result healthcheck.Result) {
	for _, check := range path.target.checks {
		if result = check.Run(ctx, path.dial, path.target.address); result.Passed {
			break
		}
	}
	return result
}

// dial opens a connection from the source of the path.
func (path *path) dial(ctx context.Context, network, address string) (net.Conn, error) {
	dialer, from := &net.Dialer{KeepAlive: -1, Control: path.control}, netip.AddrPortFrom(path.source, path.port)
	switch {
	case strings.HasPrefix(network, "tcp"):
		dialer.LocalAddr = net.TCPAddrFromAddrPort(from)
	case strings.HasPrefix(network, "udp"):
		dialer.LocalAddr = net.UDPAddrFromAddrPort(from)
	case path.source.IsValid(): // a raw socket has no ports
		dialer.LocalAddr = &net.IPAddr{IP: path.source.AsSlice()}
	}
	dialer.SetMultipathTCP(false)
	conn, err := dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, local(err, vip.FamilyOf(path.target.address))
	}
	return conn, nil
}

// local returns an error of bind, with which a check counts as not run, if a connection failed for
// lack of an address, a free port or a permission of this host.
func local(err error, family vip.Family) error {
	var call *os.SyscallError
	if !errors.As(err, &call) {
		return err
	}
	switch call.Err {
	case syscall.EADDRNOTAVAIL, syscall.EADDRINUSE, syscall.EPERM, syscall.EACCES:
		return os.NewSyscallError("bind", call.Err)
	case syscall.ENETUNREACH, syscall.EHOSTUNREACH:
		if !hasAddress(family) {
			return os.NewSyscallError("bind", syscall.EADDRNOTAVAIL)
		}
	}
	return err
}

// control prepares a socket. It lets the paths of all VIPs use the same source ports.
func (path *path) control(network, _ string, c syscall.RawConn) (err error) {
	errControl := c.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		if err == nil && !strings.HasPrefix(network, "tcp") {
			err = healthcheck.ReportICMP(int(fd), vip.FamilyOf(path.target.address))
		}
	})
	if err == nil {
		err = errControl
	}
	return err
}

// hasAddress reports whether the host has a global address of a family: without one, an unreachable
// network is a fact about this host.
func hasAddress(family vip.Family) bool {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, address := range addresses {
		prefix, err := netip.ParsePrefix(address.String())
		if err == nil && vip.FamilyOf(prefix.Addr()) == family && prefix.Addr().IsGlobalUnicast() {
			return true
		}
	}
	return false
}
