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

	"github.com/vipgate/vipgate/pkg/trench"
)

// BIRD has no option for TCP_NODELAY. Without it the kernel holds back the second small segment
// until the gateway acknowledges the first, and the gateway delays the acknowledgment by 40 ms
// (Nagle's algorithm and delayed acknowledgments). As BIRD's parent, the frontend sets the option
// on each new connection with a gateway: docs/adr/0032-tcp-nodelay.md. BIRD before 2.15 has no
// send hold timer (RFC 9687) either: TCP_USER_TIMEOUT replaces it.

// sendHold is the number of hold times for which BIRD's data may stay unacknowledged, or the
// gateway's window closed, before the kernel ends the connection. It is the default of BIRD's
// send hold timer. RFC 9687 requires at least 8 minutes, for which a withdrawn VIP would stay at
// the gateway. One hold time is too short: a gateway may be busy that long with a large update.
const sendHold = 2

// noDelay is the result of the last attempt.
type noDelay struct {
	at  time.Time           // start of the attempt; it does not cover sessions that came up later
	set map[netip.Addr]bool // remote addresses of the connections with the option
	err error               // why the option is missing on a connection; nil after success
}

// keepNoDelay sets the options on connections with gateways whenever a session comes up, until BIRD
// exits. It runs in a separate goroutine, because a poll blocks while BIRD feeds the new session.
func (supervisor *Supervisor) keepNoDelay(process *process) {
	supervisor.noDelay.Store(&noDelay{})
	logged := false
	for {
		select {
		case <-process.exited:
			return
		case <-supervisor.sessionUp:
		}
		holdTimes := map[netip.Addr]time.Duration{}
		for _, gateway := range supervisor.resolver.result.Load().gateways {
			if gateway.Protocol == trench.BGP {
				holdTimes[gateway.Address] = gateway.HoldTime
			}
		}
		at := time.Now()
		set, err := setNoDelay(process.cmd.Process, holdTimes)
		supervisor.noDelay.Store(&noDelay{at, set, err})
		if err != nil && !logged && !errors.Is(err, os.ErrProcessDone) {
			logged = true
			supervisor.options.Log.Info("TCP_NODELAY and TCP_USER_TIMEOUT are not set on BIRD's sessions", "pid",
				process.pid(), "error", err)
		}
	}
}

// setNoDelay sets TCP_NODELAY and TCP_USER_TIMEOUT on the TCP connections of a child process with
// the gateways of holdTimes. It returns the gateways whose connections have both options. The
// child may exit during the call: a copied descriptor (pidfd_getfd) exists for some microseconds
// and cannot keep a connection open for longer. Setting TCP_NODELAY also sends the data that the
// kernel holds back.
func setNoDelay(
	p *os.Process, holdTimes map[netip.Addr]time.Duration,
) (set map[netip.Addr]bool, err error) {
	set = map[netip.Addr]bool{}
	// After the exit of the process its PID may be reused, so that descriptor numbers read from
	// /proc belong to another process. The pidfd never refers to another process.
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
				err = nil // BIRD closed the socket after the listing
			case err != nil:
				return
			case peer.IsValid():
				set[peer] = true
			}
		}
	})
	return set, errors.Join(failed, err)
}

// sockets returns the socket descriptors of a process.
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
			continue // BIRD closed the descriptor after the listing
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

// setNoDelayOn sets the options on a socket of another process if the socket is a TCP connection
// with a gateway of holdTimes. It returns the gateway's address; the zero one for other sockets.
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
		return netip.Addr{}, err // ENOTCONN for a listening socket
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

// describe sets NoDelay and NoDelayProblem of the BGP sessions that are up.
func (n *noDelay) describe(gateways []GatewayState) {
	for i := range gateways {
		gateway := &gateways[i]
		if gateway.Protocol != trench.BGP || !gateway.Up || n == nil || n.at.Before(gateway.Since) {
			continue
		}
		if gateway.NoDelay = n.set[gateway.Address]; !gateway.NoDelay && n.err != nil {
			gateway.NoDelayProblem = n.err.Error()
		}
	}
}
