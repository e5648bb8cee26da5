package bird

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
)

// localAddress is an address of the external interface with its network.
type localAddress struct {
	addr      netip.Addr
	network   netip.Prefix
	second    bool // deprecated, temporary or secondary: only if there is no other
	tentative bool // duplicate address detection (RFC 4862) is not over
	duplicate bool // duplicate address detection failed
}

// errNoInterface reports that the interface does not exist. Any other error leaves its addresses
// unknown.
var errNoInterface = errors.New("does not exist")

// interfaceAddresses returns the addresses of an interface.
func interfaceAddresses(name string) ([]localAddress, error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	links, err := c.Links()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(links, func(l rtnetlink.Link) bool { return l.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("interface %s %w", name, errNoInterface)
	}
	list, err := c.Addresses()
	if err != nil {
		return nil, err
	}
	var addrs []localAddress
	for _, a := range list {
		if a.Link == links[i].Index {
			addrs = append(addrs, localAddress{
				addr: a.Addr, network: a.Network, tentative: a.Tentative(), duplicate: a.Duplicate(),
				second: a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_SECONDARY) != 0,
			})
		}
	}
	return addrs, nil
}

// selectLocal returns the local address of the session to a gateway: one whose network contains the
// gateway, since BIRD peers with a neighbor on the link. It keeps current while that is possible:
// any other address would restart the session. current may be tentative, since the kernel repeats
// duplicate address detection whenever the link comes back. The problem says why there is none.
func selectLocal(gateway, current netip.Addr, addrs []localAddress) (local netip.Addr, problem string) {
	var best, waiting localAddress
	family := false
	for _, a := range addrs {
		family = family || vip.FamilyOf(a.addr) == vip.FamilyOf(gateway) && !a.addr.IsLinkLocalUnicast()
		switch {
		case a.addr == gateway:
			return netip.Addr{}, fmt.Sprintf("gateway address %s is a local address", gateway)
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
		return netip.Addr{}, fmt.Sprintf("duplicate address detection failed for local address %s", waiting.addr)
	case waiting.tentative:
		return netip.Addr{}, fmt.Sprintf("local address %s is tentative: duplicate address detection runs", waiting.addr)
	case !family:
		return netip.Addr{}, fmt.Sprintf("no %s address", vip.FamilyOf(gateway))
	}
	return netip.Addr{}, fmt.Sprintf("no address in a network with %s", gateway)
}
