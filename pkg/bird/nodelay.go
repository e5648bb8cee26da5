package bird

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/latest"
	"github.com/vipgate/vipgate/pkg/trench"
)

// BIRD has no option for TCP_NODELAY: after one small segment it holds the next back until the
// gateway acknowledged the first, which the gateway delays by 40 ms (Nagle's algorithm against
// delayed acknowledgements). As BIRD's parent, the frontend sets the option on each new connection
// with a gateway: docs/adr/0032-tcp-nodelay.md. BIRD before 2.15 has no send hold timer (RFC 9687)
// either: TCP_USER_TIMEOUT replaces it.

// sendHold is how many hold times BIRD's data may be unacknowledged, or the gateway's window shut,
// before the kernel ends the connection: the default of BIRD's own send hold timer. RFC 9687 has at
// least 8 minutes, for which a withdrawn VIP would stay at the gateway. One hold time is too short:
// a gateway may be busy that long with a large update.
const sendHold = 2

// noDelay is the result of the last attempt.
type noDelay struct {
	at  time.Time           // when it began: it says nothing about sessions that came up later
	set map[netip.Addr]bool // remote addresses of the connections that have the option
	err error               // why others have not; nil if there is none
}

// keepNoDelay sets the options of the connections with gateways whenever a session came up, until
// BIRD exits. It is a goroutine of its own, since polls wait for a BIRD that is busy with its feed.
func (s *Supervisor) keepNoDelay(p *process) {
	s.noDelay.Store(&noDelay{})
	logged := false
	for {
		select {
		case <-p.exited:
			return
		case <-s.sessionUp:
		}
		holdTimes := map[netip.Addr]time.Duration{}
		for _, g := range s.resolver.result.Load().gateways {
			if g.Protocol == trench.BGP {
				holdTimes[g.Address] = g.HoldTime
			}
		}
		at := time.Now()
		set, err := setNoDelay(p.cmd.Process, holdTimes)
		s.noDelay.Store(&noDelay{at, set, err})
		if err != nil && !logged && !errors.Is(err, os.ErrProcessDone) {
			logged = true
			s.options.Log.Info("TCP_NODELAY and TCP_USER_TIMEOUT are not set on BIRD's sessions", "pid", p.pid(), "error", err)
		}
	}
}

// sessionCame has TCP_NODELAY set on the connections of new sessions. It does not block.
func (s *Supervisor) sessionCame() { latest.Wake(s.sessionUp) }

// setNoDelay sets TCP_NODELAY and TCP_USER_TIMEOUT on each TCP connection of a child process with
// one of the gateways of holdTimes, and returns the addresses of those that have both. It does not
// depend on the child running: a copy of the descriptor (pidfd_getfd) exists for some microseconds,
// and would keep a connection open only for as long. TCP_NODELAY sends what the kernel holds
// back already.
func setNoDelay(
	p *os.Process, holdTimes map[netip.Addr]time.Duration,
) (set map[netip.Addr]bool, err error) {
	set = map[netip.Addr]bool{}
	// Numbers read after the end of the process may be those of another one, but the handle is not.
	failed := p.WithHandle(func(pidfd uintptr) {
		var descriptors []int
		if descriptors, err = sockets(p.Pid); err != nil {
			return
		}
		for _, fd := range descriptors {
			var peer netip.Addr
			peer, err = setNoDelayOn(int(pidfd), fd, holdTimes)
			switch {
			case errors.Is(err, unix.EBADF), errors.Is(err, unix.ENOTCONN):
				err = nil // closed meanwhile
			case err != nil:
				return
			case peer.IsValid():
				set[peer] = true
			}
		}
	})
	return set, errors.Join(failed, err)
}

// sockets returns the descriptors of a process that are sockets.
func sockets(pid int) ([]int, error) {
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var list []int
	for _, e := range entries {
		target, err := os.Readlink(dir + e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // closed meanwhile
		}
		fd, err2 := strconv.Atoi(e.Name())
		if err := errors.Join(err, err2); err != nil {
			return nil, err
		}
		if strings.HasPrefix(target, "socket:") {
			list = append(list, fd)
		}
	}
	return list, nil
}

// setNoDelayOn sets the options on a socket of another process if it is a TCP connection with one
// of the gateways, whose address it returns.
func setNoDelayOn(pidfd, target int, holdTimes map[netip.Addr]time.Duration) (netip.Addr, error) {
	fd, err := unix.PidfdGetfd(pidfd, target, 0) // close-on-exec
	if err != nil {
		return netip.Addr{}, fmt.Errorf("pidfd_getfd: %w", err)
	}
	defer unix.Close(fd)
	protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
	if err != nil || protocol != unix.IPPROTO_TCP {
		return netip.Addr{}, err
	}
	name, err := unix.Getpeername(fd)
	if err != nil {
		return netip.Addr{}, err // ENOTCONN: it listens
	}
	var peer netip.Addr
	switch a := name.(type) {
	case *unix.SockaddrInet4:
		peer = netip.AddrFrom4(a.Addr)
	case *unix.SockaddrInet6:
		peer = netip.AddrFrom16(a.Addr)
	}
	hold, ok := holdTimes[peer]
	if !ok {
		return netip.Addr{}, nil
	}
	return peer, errors.Join(
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int((sendHold*hold).Milliseconds())),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1))
}

// describe sets the result in the states of the BGP sessions that are up.
func (n *noDelay) describe(gateways []GatewayState) {
	for i := range gateways {
		g := &gateways[i]
		if g.Protocol != trench.BGP || !g.Up || n == nil || n.at.Before(g.Since) {
			continue
		}
		if g.NoDelay = n.set[g.Address]; !g.NoDelay && n.err != nil {
			g.NoDelayProblem = n.err.Error()
		}
	}
}
