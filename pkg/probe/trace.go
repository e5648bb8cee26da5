package probe

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// maxHops is the hop limit of the last packet of a trace; it ends earlier after maxSilent hops
	// that do not answer within hopTimeout.
	maxHops    = 16
	maxSilent  = 2
	maxBusy    = 10
	hopTimeout = 300 * time.Millisecond
	// traceTime is how long --once waits for traces.
	traceTime = 2 * time.Second
)

// trace returns the address of the last router on the path that answers, and its distance: the path
// ends there, or one hop further. It sends SYN packets with increasing hop limits from the source
// port of the path, which ECMP therefore sends over the same routers. It returns "" if none answered:
// routers answer only some packets in a second.
func (path *path) trace(ctx context.Context) (last string) {
	silent, busy := 0, 0
	for hops := 1; hops <= maxHops && silent < maxSilent && ctx.Err() == nil; hops++ {
		router, final, err := path.hopAt(hops)
		if (errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EADDRINUSE)) && busy < maxBusy {
			// Another process has a connection with these addresses and ports.
			busy++
			hops--
			select {
			case <-time.After(busyRecheck):
			case <-ctx.Done():
			}
			continue
		}
		if err != nil {
			return last
		}
		if silent++; router.IsValid() {
			last, silent = fmt.Sprintf("%s (hop %d)", router, hops), 0
		}
		if final {
			return last
		}
	}
	return last
}

// hopAt returns the router that drops a packet with a hop limit; the zero address if none answers.
// final reports whether the packet reached the VIP, or another answer ends the trace.
func (path *path) hopAt(hops int) (router netip.Addr, final bool, err error) {
	to := path.target.address
	isV4 := vip.FamilyOf(to) == vip.IPv4
	domain, level, limit, receive := unix.AF_INET, unix.IPPROTO_IP, unix.IP_TTL, unix.IP_RECVERR
	if !isV4 {
		domain, level, limit, receive = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, unix.IPV6_RECVERR
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		return router, false, fmt.Errorf("failed to create a socket: %w", err)
	}
	defer unix.Close(fd)
	port := connectPort(path.target.Checks[0])
	from := path.source
	if !from.IsValid() {
		from = unspecified(to)
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.SetsockoptInt(fd, level, limit, hops),
		// Queues the ICMP error with its sender (Linux 5.11 for TCP), without privileges.
		unix.SetsockoptInt(fd, level, receive, 1),
		unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}),
		unix.Bind(fd, sockaddr(from, path.port)),
	)
	if err != nil {
		return router, false, fmt.Errorf("failed to prepare a socket: %w", err)
	}
	if err := unix.Connect(fd, sockaddr(to, port)); err != nil && err != unix.EINPROGRESS {
		return router, true, fmt.Errorf("failed to connect: %w", err)
	}
	poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for {
		n, err := unix.Poll(poll, int(hopTimeout/time.Millisecond))
		if err == unix.EINTR {
			continue
		}
		if n == 0 || err != nil {
			return router, false, nil
		}
		break
	}
	control := make([]byte, 512)
	_, n, _, _, err := unix.Recvmsg(fd, make([]byte, 1), control, unix.MSG_ERRQUEUE)
	if err != nil {
		return to, true, nil // the VIP itself answered
	}
	return offender(control[:n])
}

// offender returns the sender of an ICMP error.
func offender(control []byte) (router netip.Addr, final bool, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return router, false, fmt.Errorf("failed to read an ICMP error: %w", err)
	}
	const (
		// struct sock_extended_err: errno, origin, type, code, pad, info, data; a sockaddr follows.
		size, kind  = 16, 5
		exceeded    = 11 // ICMP time exceeded
		exceededV6  = 3  // ICMPv6 time exceeded
		addressOf4  = 4  // in struct sockaddr_in
		addressOf16 = 8  // in struct sockaddr_in6
	)
	for _, message := range messages {
		data := message.Data
		if len(data) < size+addressOf16+16 && (len(data) < size+addressOf4+4 || message.Header.Level != unix.IPPROTO_IP) {
			continue
		}
		switch sender := data[size:]; binary.NativeEndian.Uint16(sender) {
		case unix.AF_INET:
			router, _ = netip.AddrFromSlice(sender[addressOf4 : addressOf4+4])
			return router, data[kind] != exceeded, nil
		case unix.AF_INET6:
			router, _ = netip.AddrFromSlice(sender[addressOf16 : addressOf16+16])
			return router, data[kind] != exceededV6, nil
		}
	}
	return router, false, nil
}

func sockaddr(address netip.Addr, port uint16) unix.Sockaddr {
	if vip.FamilyOf(address) == vip.IPv4 {
		return &unix.SockaddrInet4{Addr: address.As4(), Port: int(port)}
	}
	return &unix.SockaddrInet6{Addr: address.As16(), Port: int(port)}
}
