package path

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// ErrNoInterface reports that the interface does not exist. After any other error its addresses
// are unknown.
var ErrNoInterface = errors.New("does not exist")

// Addresses returns the addresses of an interface.
func Addresses(name string) ([]rtnetlink.Address, error) {
	c, err := rtnetlink.Dial()
	if err != nil {
		return nil, err
	}
	defer c.Close()
	_, list, err := addresses(c, name)
	return list, err
}

// addresses returns the index and the addresses of an interface.
func addresses(c *rtnetlink.Conn, name string) (int, []rtnetlink.Address, error) {
	links, err := c.Links()
	if err != nil {
		return 0, nil, err
	}
	i := slices.IndexFunc(links, func(l rtnetlink.Link) bool { return l.Name == name })
	if i < 0 {
		return 0, nil, fmt.Errorf("interface %s %w", name, ErrNoInterface)
	}
	index := links[i].Index
	list, err := c.Addresses()
	return index, slices.DeleteFunc(list, func(a rtnetlink.Address) bool { return a.Link != index }), err
}

// Local returns the local address of a session with a gateway on an interface.
func Local(device string, gateway trench.Gateway) (netip.Addr, error) {
	list, err := Addresses(device)
	local, problem := SelectLocal(gateway.Address, netip.Addr{}, list)
	if gateway.Multihop > 0 {
		local, problem = sourceToward(gateway.Address, netip.Addr{}, list)
	}
	if err == nil && problem != "" {
		err = fmt.Errorf("interface %s: %s", device, problem)
	}
	return local, err
}

// lastChoice reports whether an address is deprecated, temporary or secondary.
func lastChoice(a rtnetlink.Address) bool {
	return a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_SECONDARY) != 0
}

// maxAddresses bounds the addresses in a problem.
const maxAddresses = 5

// SelectLocal returns the local address of the session to a gateway on the link, or a problem if no
// address is usable. It keeps current if possible: a change of the address restarts the session.
func SelectLocal(gateway, current netip.Addr, addrs []rtnetlink.Address) (local netip.Addr, problem string) {
	var best, waiting rtnetlink.Address
	var others []string // of the gateway's family
	for _, a := range addrs {
		if vip.FamilyOf(a.Addr) == vip.FamilyOf(gateway) && !(a.Addr.Is6() && a.Addr.IsLinkLocalUnicast()) {
			others = append(others, netip.PrefixFrom(a.Addr, a.Network.Bits()).String())
		}
		switch {
		case a.Addr == gateway:
			return local, fmt.Sprintf("gateway address %s is a local address", gateway)
		case !a.Network.Contains(gateway):
		case a.Duplicate():
			waiting = a
		case a.Addr == current: // also if tentative: the kernel repeats the detection when a link returns
			return current, ""
		case a.Tentative():
			if !waiting.Duplicate() {
				waiting = a
			}
		case !best.Addr.IsValid(), lastChoice(best) && !lastChoice(a),
			lastChoice(best) == lastChoice(a) && a.Network.Bits() > best.Network.Bits():
			best = a
		}
	}
	switch {
	case best.Addr.IsValid():
		return best.Addr, ""
	case waiting.Duplicate():
		return local, fmt.Sprintf("duplicate address detection failed for local address %s", waiting.Addr)
	case waiting.Tentative():
		return local, fmt.Sprintf("local address %s is tentative: duplicate address detection runs", waiting.Addr)
	case len(others) == 0:
		return local, fmt.Sprintf("no %s address", vip.FamilyOf(gateway))
	case len(others) > maxAddresses:
		others = append(others[:maxAddresses], fmt.Sprintf("%d more", len(others)-maxAddresses))
	}
	return local, fmt.Sprintf("gateway %s is in the network of none of its addresses (%s); correct the gateway's "+
		"address, or add an address in its network to the interface", gateway, strings.Join(others, ", "))
}
