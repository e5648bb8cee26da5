package targetset

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// AddressPolicy says which addresses targets may have.
type AddressPolicy struct {
	// Subnets are where targets may be; none: anywhere.
	Subnets []netip.Prefix
	// VIPs are where no target may be. They do not overlap and are sorted by
	// [vip.Compare], since there may be very many.
	VIPs []vip.VIP
}

// Check says what is wrong with an address of a target, with the remedy.
func (p AddressPolicy) Check(a netip.Addr) error {
	switch {
	case !a.IsValid():
		return fmt.Errorf("no address: write one such as 172.16.1.1")
	case a.Zone() != "":
		return fmt.Errorf("%s has a zone: use an address that needs none", a.WithZone(""))
	}
	// The trench file refuses loopback addresses itself.
	if what, remedy := vip.NotHost(a); what != "" && !a.IsLoopback() {
		return fmt.Errorf("%s is %s: %s", a, what, remedy)
	}
	if len(p.Subnets) > 0 && !slices.ContainsFunc(p.Subnets, func(s netip.Prefix) bool { return s.Contains(a) }) {
		return fmt.Errorf("%s is not in a subnet that --target-subnet allows (%s)", a, join(p.Subnets))
	}
	if v, ok := p.vipOf(a); ok {
		return fmt.Errorf("%s lies in the VIP %s: use the target's own address", a, v)
	}
	return nil
}

// vipOf finds the VIP that contains the address.
func (p AddressPolicy) vipOf(a netip.Addr) (vip.VIP, bool) {
	i, found := slices.BinarySearchFunc(p.VIPs, a, func(v vip.VIP, a netip.Addr) int {
		return v.Prefix().Addr().Compare(a)
	})
	if !found {
		i--
	}
	if i >= 0 && p.VIPs[i].Prefix().Contains(a) {
		return p.VIPs[i], true
	}
	return vip.VIP{}, false
}

// join writes a list for people.
func join[T fmt.Stringer](list []T) string {
	s := ""
	for i, x := range list {
		if i > 0 {
			s += ", "
		}
		s += x.String()
	}
	return s
}
