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

// interfaceAddresses returns the usable addresses of an interface: those whose
// duplicate address detection is over.
func interfaceAddresses(name string) ([]netip.Prefix, error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	list, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("addresses of interface %s: %w", name, err)
	}
	var prefixes []netip.Prefix
	for _, a := range list {
		if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			continue
		}
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok {
			continue
		}
		ones, _ := a.Mask.Size()
		prefixes = append(prefixes, netip.PrefixFrom(ip.Unmap(), ones))
	}
	return prefixes, nil
}

// localFor picks our address toward a gateway: one whose network holds the
// gateway, else the first of its family that is not link-local.
func localFor(gateway netip.Addr, addresses []netip.Prefix) (netip.Addr, bool) {
	for _, p := range addresses {
		if p.Contains(gateway) {
			return p.Addr(), true
		}
	}
	for _, p := range addresses {
		if vip.FamilyOf(p.Addr()) == vip.FamilyOf(gateway) && !p.Addr().IsLinkLocalUnicast() {
			return p.Addr(), true
		}
	}
	return netip.Addr{}, false
}

// resolve makes sessions of gateways. Those that cannot have one yet are
// returned with the reason.
func resolve(gateways []trench.Gateway, iface string) (sessions []Session, problems map[string]string) {
	problems = map[string]string{}
	addresses, err := interfaceAddresses(iface)
	for _, g := range gateways {
		if err != nil {
			problems[g.Name] = err.Error()
			continue
		}
		local, ok := localFor(g.Address, addresses)
		if !ok {
			problems[g.Name] = fmt.Sprintf("interface %s has no usable %s address", iface, vip.FamilyOf(g.Address))
			continue
		}
		s := Session{Gateway: g, Local: local}
		if g.PasswordFile != "" {
			if s.Password, err = readPassword(g.PasswordFile); err != nil {
				// Never an empty password: the session would come up unsigned.
				problems[g.Name] = err.Error()
				err = nil
				continue
			}
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
