package bird

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// RouterID derives a BGP router id from who we are: the pod's UID (POD_UID), else
// the machine's id, else the host's name. BIRD finds none on a host without
// IPv4, and does not say so beforehand.
func RouterID() netip.Addr {
	seed := os.Getenv("POD_UID")
	if seed == "" {
		if b, err := os.ReadFile("/etc/machine-id"); err == nil {
			seed = string(b)
		}
	}
	if name, err := os.Hostname(); err == nil {
		seed += name
	}
	sum := sha256.Sum256([]byte("vipgate router id " + seed))
	// Anything but 0.0.0.0 is allowed (RFC 6286); the first byte keeps it from
	// looking like an address in use.
	return netip.AddrFrom4([4]byte{1 + sum[0]%126, sum[1], sum[2], sum[3] | 1})
}

// ownAddress is an address of ours with the network it is in.
type ownAddress struct {
	addr    netip.Addr
	network netip.Prefix
	second  bool // deprecated, temporary or secondary: only if there is no other
}

// interfaceAddresses returns the usable addresses of an interface: those whose
// duplicate address detection is over.
func interfaceAddresses(name string) ([]ownAddress, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	list, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of interface %s: %w", name, err)
	}
	var own []ownAddress
	for _, a := range list {
		if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0 {
			continue
		}
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		x := ownAddress{addr: ip.Unmap(), second: a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_SECONDARY) != 0}
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
// gateway, the narrowest first, since BIRD's session is with a neighbor on the
// link.
func localFor(gateway netip.Addr, own []ownAddress) (netip.Addr, bool) {
	var best ownAddress
	for _, a := range own {
		if !a.network.IsValid() || !a.network.Contains(gateway) || a.addr == gateway {
			continue
		}
		switch {
		case !best.addr.IsValid(), best.second && !a.second, best.second == a.second && a.network.Bits() > best.network.Bits():
			best = a
		}
	}
	return best.addr, best.addr.IsValid()
}

// resolve makes sessions of gateways. Those that cannot have one yet are
// returned with the reason.
func resolve(gateways []trench.Gateway, iface string) (sessions []Session, problems map[string]string) {
	problems = map[string]string{}
	addresses, errAddresses := interfaceAddresses(iface)
	for _, g := range gateways {
		if errAddresses != nil {
			problems[g.Name] = errAddresses.Error()
			continue
		}
		local, ok := localFor(g.Address, addresses)
		if !ok {
			problems[g.Name] = fmt.Sprintf("interface %s has no usable %s address in a network with %s", iface, vip.FamilyOf(g.Address), g.Address)
			continue
		}
		s := Session{Gateway: g, Local: local}
		if g.PasswordFile != "" {
			password, err := readPassword(g.PasswordFile)
			if err != nil {
				// Never an empty password: the session would come up unsigned.
				problems[g.Name] = err.Error()
				continue
			}
			s.Password = password
		}
		sessions = append(sessions, s)
	}
	return sessions, problems
}

func readPassword(path string) (string, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("password file %s does not exist", path)
	}
	if err != nil {
		return "", fmt.Errorf("password file: %w", err)
	}
	password, err := ParsePassword(b)
	if err != nil {
		return "", fmt.Errorf("password file %s: %w", path, err)
	}
	return password, nil
}
