package bird

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/vip"
)

// ownAddress is an address of ours with the network it is in.
type ownAddress struct {
	addr      netip.Addr
	network   netip.Prefix
	second    bool // deprecated, temporary or secondary: only if there is no other
	tentative bool // duplicate address detection (RFC 4862) is not over
	duplicate bool // somebody else has it
}

// errNoInterface tells that there is no such interface. Other errors tell
// nothing about its addresses.
var errNoInterface = errors.New("does not exist")

// interfaceAddresses returns the addresses of an interface.
func interfaceAddresses(name string) ([]ownAddress, error) {
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil, fmt.Errorf("interface %s %w", name, errNoInterface)
	}
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	list, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of interface %s: %w", name, err)
	}
	var own []ownAddress
	for _, a := range list {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		x := ownAddress{
			addr:      ip.Unmap(),
			second:    a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_SECONDARY) != 0,
			tentative: a.Flags&unix.IFA_F_TENTATIVE != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0,
			duplicate: a.Flags&unix.IFA_F_DADFAILED != 0,
		}
		network := a.IPNet
		if a.Peer != nil {
			network = a.Peer // the other end of a point-to-point address
		}
		if n, ok := netip.AddrFromSlice(network.IP); ok {
			ones, _ := network.Mask.Size()
			x.network = netip.PrefixFrom(n.Unmap(), ones).Masked()
		}
		own = append(own, x)
	}
	return own, nil
}

// localFor picks our address toward a gateway: one whose network holds the
// gateway, since BIRD's session is with a neighbor on the link. current, if it
// still fits, stays: another address would restart the session, whether it is
// better or not, and an address that was in use is not the duplicate that a link
// that came back has it checked for. The problem says why there is none.
func localFor(gateway, current netip.Addr, own []ownAddress) (local netip.Addr, problem string) {
	var best, waiting ownAddress
	family := false
	for _, a := range own {
		family = family || vip.FamilyOf(a.addr) == vip.FamilyOf(gateway) && !a.addr.IsLinkLocalUnicast()
		switch {
		case a.addr == gateway:
			return netip.Addr{}, fmt.Sprintf("the gateway's address %s is our own", gateway)
		case !a.network.IsValid() || !a.network.Contains(gateway):
		case a.duplicate:
			waiting = a
		case a.addr == current:
			return current, ""
		case a.tentative:
			if !waiting.duplicate {
				waiting = a
			}
		case !best.addr.IsValid(), best.second && !a.second, best.second == a.second && a.network.Bits() > best.network.Bits():
			best = a
		}
	}
	switch {
	case best.addr.IsValid():
		return best.addr, ""
	case waiting.duplicate:
		return netip.Addr{}, fmt.Sprintf("our address %s is somebody else's, too: duplicate address detection failed", waiting.addr)
	case waiting.tentative:
		return netip.Addr{}, fmt.Sprintf("our address %s is not usable yet: duplicate address detection runs", waiting.addr)
	case !family:
		return netip.Addr{}, fmt.Sprintf("no %s address", vip.FamilyOf(gateway))
	}
	return netip.Addr{}, fmt.Sprintf("no address in a network with %s", gateway)
}
