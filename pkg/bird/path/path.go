package path

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Kernel reads the paths. A test replaces its functions.
type Kernel struct {
	Addresses func(device string) ([]rtnetlink.Address, error)
	Routers   func(device string) ([]netip.Addr, error)
	FirstHop  func(device string, gateway netip.Addr) (netip.Addr, error)
}

// System is the kernel of this network namespace.
func System() Kernel { return Kernel{Addresses, Routers, FirstHop} }

// Find returns the path to a gateway on an interface with addresses, and completes the address of
// an unnumbered gateway. It keeps the current session's addresses if possible. The problem is "" if
// a session is possible.
func (kernel Kernel) Find(device string, gateway, current turns.Session, addrs []rtnetlink.Address) (
	found turns.Session, problem string,
) {
	var err error
	if gateway.Interface != "" {
		// Only the frontend knows the default of attractor.interface.
		if gateway.Interface != device {
			return gateway, fmt.Sprintf("not interface %s of the gateway; write the same name in attractor.interface "+
				"and in the gateway", gateway.Interface)
		}
		if gateway.Address, err = kernel.router(device, current.Address); err != nil {
			return gateway, err.Error()
		}
	}
	if gateway.Address != current.Address {
		current.Path = turns.Path{}
	}
	if gateway.Multihop > 0 {
		if gateway.Via, err = kernel.FirstHop(device, gateway.Address); err != nil {
			return gateway, err.Error()
		}
		gateway.Local, problem = sourceToward(gateway.Address, current.Local, addrs)
	} else {
		gateway.Local, problem = SelectLocal(gateway.Address, current.Local, addrs)
	}
	if gateway.Address.Is4() && gateway.Has(vip.IPv6) {
		gateway.Local6 = global6(current.Local6, addrs)
	}
	return gateway, problem
}

// router returns the only router on the link. It keeps the current one while that is a router or no
// other is known: a link that flaps loses the neighbor entries, and the session may survive that.
func (kernel Kernel) router(device string, current netip.Addr) (netip.Addr, error) {
	routers, err := kernel.Routers(device)
	switch {
	case slices.Contains(routers, current), len(routers) == 0 && current.IsValid():
		return current, nil
	case err != nil:
		return netip.Addr{}, err
	case len(routers) == 1:
		return routers[0], nil
	case len(routers) == 0:
		return netip.Addr{}, errors.New("no router on the link yet; have the gateway send router advertisements, " +
			"as FRR does for `neighbor IF interface`, or write its address")
	}
	return netip.Addr{}, fmt.Errorf("several routers on the link (%s), and an unnumbered gateway is the only one; "+
		"write the address of the gateway", strings.Join(vip.Texts(routers), ", "))
}

// Routers returns the link-local addresses of the routers on a link. The kernel learns them from
// router and neighbor advertisements, also with accept_ra=0 or forwarding. While there is not
// exactly one, Routers probes the other neighbors; while there is none, it solicits advertisements.
func Routers(device string) ([]netip.Addr, error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	index, own, err := addresses(conn, device)
	if err != nil {
		return nil, err
	}
	routers, err := knownRouters(conn, index, own)
	if err == nil && len(routers) == 0 {
		if err = solicit(index); err == nil {
			routers, err = knownRouters(conn, index, own)
		}
	}
	return routers, err
}

// knownRouters returns the routers on a link among the neighbors.
func knownRouters(conn *rtnetlink.Conn, index int, own []rtnetlink.Address) ([]netip.Addr, error) {
	neighbors, err := conn.Neighbors(vip.IPv6)
	if err != nil {
		return nil, err
	}
	var routers []netip.Addr
	var probes []rtnetlink.Request
	for _, neighbor := range neighbors {
		isOwn := func(a rtnetlink.Address) bool { return a.Addr == neighbor.Addr }
		switch valid := neighbor.State&(unix.NUD_REACHABLE|unix.NUD_STALE|unix.NUD_DELAY|unix.NUD_PROBE) != 0; {
		case neighbor.Link != index, !neighbor.Addr.IsLinkLocalUnicast(), !valid, slices.ContainsFunc(own, isOwn):
			continue
		case neighbor.Router:
			routers = append(routers, neighbor.Addr)
		}
		// The entry of a router that left is FAILED after a probe; an advertisement says who is a router.
		if neighbor.State&(unix.NUD_STALE|unix.NUD_DELAY) != 0 {
			probes = append(probes, neighbor.Verify())
		}
	}
	if len(routers) != 1 {
		_, _ = conn.Do(probes...) // an entry may have expired
	}
	slices.SortFunc(routers, netip.Addr.Compare)
	return routers, nil
}

// Bounds of the wait for answers of routers on the link, and of second requests.
const (
	answerTime = 100 * time.Millisecond
	maxAsked   = 20
)

// solicit sends a router solicitation (RFC 4861 section 4.1), and an echo request to all routers on
// the link: GoBGP answers only that, by its kernel, whose reply shows its address. The kernel sends no
// solicitation while it forwards, and FRR advertises itself only every 10 s.
func solicit(link int) error {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMPV6)
	if err != nil {
		return fmt.Errorf("failed to open a socket for router solicitations: %w; the frontend needs NET_RAW", err)
	}
	defer unix.Close(fd)
	const routerSolicitation, echoRequest, echoReply = 133, 128, 129
	var replies unix.ICMPv6Filter // a set bit blocks
	for kind := range 256 {
		if kind != echoReply {
			replies.Data[kind/32] |= 1 << (kind % 32)
		}
	}
	if err := errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MULTICAST_HOPS, 255),
		unix.SetsockoptICMPv6Filter(fd, unix.IPPROTO_ICMPV6, unix.ICMPV6_FILTER, &replies),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BINDTOIFINDEX, link)); err != nil {
		return fmt.Errorf("failed to set options of the socket for router solicitations: %w", err)
	}
	allRouters := netip.MustParseAddr("ff02::2").As16()
	// An error passes: the interface may be down, or its link-local address tentative.
	for _, kind := range []uint64{routerSolicitation, echoRequest} {
		_ = unix.Sendto(fd, binary.BigEndian.AppendUint64(nil, kind<<56), unix.MSG_DONTWAIT,
			&unix.SockaddrInet6{ZoneId: uint32(link), Addr: allRouters})
	}
	// A router that knows this pod's link address answers without a neighbor solicitation, and BIRD's
	// advertisements have no link address: the kernel learns the router only when it asks for that.
	answer, readable := make([]byte, 8), []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	end := time.Now().Add(answerTime)
	for asked, left := 0, answerTime; asked < maxAsked && left > 0; left = time.Until(end) {
		// A signal or an error of the socket ends a wait early; the next one ends in time.
		if n, _ := unix.Poll(readable, int(left.Milliseconds())+1); n != 1 {
			continue
		}
		_, from, err := unix.Recvfrom(fd, answer, unix.MSG_DONTWAIT)
		if router, is := from.(*unix.SockaddrInet6); err == nil && is && router.ZoneId != 0 && answer[7] == 0 {
			asked++
			router.Port = 0
			_ = unix.Sendto(fd, binary.BigEndian.AppendUint64(nil, echoRequest<<56|1), unix.MSG_DONTWAIT, router)
		}
	}
	return nil
}

// FirstHop returns the next hop toward a gateway, which is the gateway itself on the link.
func FirstHop(device string, gateway netip.Addr) (netip.Addr, error) {
	conn, err := rtnetlink.Dial()
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	index, _, err := addresses(conn, device)
	if err != nil {
		return netip.Addr{}, err
	}
	route, err := conn.Lookup(gateway, 0)
	switch {
	case err != nil:
		return netip.Addr{}, fmt.Errorf("%w; add a route to the gateway", err)
	case route.Link != index:
		return netip.Addr{}, fmt.Errorf("the route to the gateway %s leaves by another interface; add one by this", gateway)
	// BIRD's filters cannot set an address of a link, or of the other family.
	case route.NextHop.Is6() && (gateway.Is4() || route.NextHop.IsLinkLocalUnicast()):
		return netip.Addr{}, fmt.Errorf("the route to the gateway %s has the next hop %s; write a global one of its family",
			gateway, route.NextHop)
	case route.NextHop.IsValid():
		return route.NextHop, nil
	}
	return gateway, nil
}

// sourceToward returns the address that the kernel selects for packets to a gateway, or the current
// one while it exists.
func sourceToward(gateway, current netip.Addr, addrs []rtnetlink.Address) (local netip.Addr, problem string) {
	has := func(address netip.Addr) bool {
		return slices.ContainsFunc(addrs, func(a rtnetlink.Address) bool { return a.Addr == address && !a.Duplicate() })
	}
	if has(current) {
		return current, ""
	}
	local, err := rtnetlink.SourceToward(gateway)
	if err != nil {
		return local, fmt.Sprintf("no route to gateway %s: %v", gateway, err)
	}
	if !has(local) || local.IsLinkLocalUnicast() && local.Is6() {
		return netip.Addr{}, fmt.Sprintf("the kernel selects %s toward gateway %s, which is not an address of it; "+
			"add one, or src to the route", local, gateway)
	}
	return local, ""
}

// global6 returns a global IPv6 address, the current one if possible; zero without one.
func global6(current netip.Addr, addrs []rtnetlink.Address) (best netip.Addr) {
	for _, a := range addrs {
		switch {
		case !a.Addr.Is6() || a.Addr.IsLinkLocalUnicast() || a.Duplicate():
		case a.Addr == current:
			return current
		case !best.IsValid() && !a.Tentative() && !lastChoice(a):
			best = a.Addr
		}
	}
	return best
}
