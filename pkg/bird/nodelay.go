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
// with a gateway: docs/adr/0032-tcp-nodelay.md.

// noDelay is the result of the last attempt.
type noDelay struct {
	at  time.Time           // when it began: it says nothing about sessions that came up later
	set map[netip.Addr]bool // remote addresses of the connections that have the option
	err error               // why others have not; nil if there is none
}

// keepNoDelay sets TCP_NODELAY on the connections with gateways whenever a session came up, until
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
		gateways := map[netip.Addr]bool{}
		for _, g := range s.resolver.result.Load().gateways {
			gateways[g.Address] = g.Protocol == trench.BGP
		}
		at := time.Now()
		set, err := setNoDelay(p.cmd.Process, gateways)
		s.noDelay.Store(&noDelay{at, set, err})
		if err != nil && !logged && !errors.Is(err, os.ErrProcessDone) {
			logged = true
			s.options.Log.Info("TCP_NODELAY is not set on BIRD's sessions", "pid", p.pid(), "error", err)
		}
	}
}

// sessionCame has TCP_NODELAY set on the connections of new sessions. It does not block.
func (s *Supervisor) sessionCame() { latest.Wake(s.sessionUp) }

// setNoDelay sets TCP_NODELAY on each TCP connection of a child process with one of the gateways,
// and returns the addresses of those that have it. It does not depend on the child running: a copy
// of the descriptor (pidfd_getfd) exists for some microseconds, and would keep a connection open
// only for as long. Setting the option sends what the kernel holds back already.
func setNoDelay(p *os.Process, gateways map[netip.Addr]bool) (set map[netip.Addr]bool, err error) {
	set = map[netip.Addr]bool{}
	// Numbers read after the end of the process may be those of another one, but the handle is not.
	failed := p.WithHandle(func(pidfd uintptr) {
		var descriptors []int
		if descriptors, err = sockets(p.Pid); err != nil {
			return
		}
		for _, fd := range descriptors {
			var peer netip.Addr
			peer, err = setNoDelayOn(int(pidfd), fd, gateways)
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

// setNoDelayOn sets the option on a socket of another process if it is a TCP connection with one of
// the gateways, whose address it returns.
func setNoDelayOn(pidfd, target int, gateways map[netip.Addr]bool) (netip.Addr, error) {
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
	if !gateways[peer] {
		return netip.Addr{}, nil
	}
	return peer, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
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
