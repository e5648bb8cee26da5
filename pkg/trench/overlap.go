package trench

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// checkAcross checks what concerns several objects.
func (p *parser) checkAcross() {
	covers := p.overlaps()
	var has [len(vip.Families)]bool
	for v := range p.vips {
		has[v.Family()] = true
	}
	for _, a := range p.addresses {
		family := vip.FamilyOf(a.is)
		if v, ok := covers.of(a.is); ok {
			a.at.problem("is %s, which lies in the VIP %s: %s", a.is, v, a.remedy)
		} else if a.remedy == gatewayInVIP && p.vipsKnown && !has[family] {
			a.at.problem("is %s, but the attractor has no %s VIP: add one to attractor.vips or remove the gateway",
				a.is, familyName(a.is.Is4()))
		}
	}
	for _, v := range p.streamVIPs {
		if _, ok := p.vips[v.is]; p.vipsKnown && !ok {
			v.at.problem("VIP %s is not one of the attractor: add it to attractor.vips or remove it here", v.is)
		}
	}
}

// covering is a list of VIPs that do not overlap, sorted.
type covering []vip.VIP

// overlaps reports VIPs that share addresses, and returns those that contain all others. Two VIPs
// that overlap are refused because the wider one would attract the traffic of the narrower one
// while that is withdrawn.
func (p *parser) overlaps() covering {
	var c covering
	for _, v := range slices.SortedFunc(maps.Keys(p.vips), vip.Compare) {
		// A prefix sorts behind those that contain it, and prefixes nest: what overlaps anything,
		// overlaps the last one that nothing contains.
		if n := len(c); n > 0 && c[n-1].Overlaps(v) {
			p.vips[v].problem("VIP %s lies in the VIP %s of line %d, which would attract its traffic even while it is "+
				"withdrawn: remove one of them", v, c[n-1], p.vips[c[n-1]].node.Line)
			continue
		}
		c = append(c, v)
	}
	return c
}

// of returns the VIP that contains the address.
func (c covering) of(a netip.Addr) (vip.VIP, bool) {
	i, found := slices.BinarySearchFunc(c, a,
		func(v vip.VIP, a netip.Addr) int { return v.Prefix().Addr().Compare(a) })
	if !found {
		i--
	}
	if i >= 0 && c[i].Prefix().Contains(a) {
		return c[i], true
	}
	return vip.VIP{}, false
}
