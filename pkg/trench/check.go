package trench

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// name reads a name. Gateway names become names of BIRD's protocols, and all of them stand in
// metrics and logs.
func (v value) name() (string, bool) {
	const remedy = "write 1 to 60 characters out of A-Z a-z 0-9 _ . -"
	s, ok := v.text(remedy)
	if !ok {
		return "", false
	}
	if len(s) > 60 || strings.Trim(s, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-") != "" {
		v.problem("is %s: %s", quote(s), remedy)
		return "", false
	}
	return s, true
}

func (v value) vip() (vip.VIP, bool) {
	s, ok := v.text("write a VIP such as 20.0.0.1/32 or 2000::1/128")
	if !ok {
		return vip.VIP{}, false
	}
	x, err := vip.Parse(s)
	if err != nil {
		v.problem("%v", err)
		return vip.VIP{}, false
	}
	return x, true
}

// address reads an address that a host of a network can have.
func (v value) address(example string) (netip.Addr, bool) {
	s, ok := v.text("write an IP address such as " + example)
	if !ok {
		return netip.Addr{}, false
	}
	a, err := netip.ParseAddr(s)
	if err != nil {
		if p, errPrefix := netip.ParsePrefix(s); errPrefix == nil {
			v.problem("is %s, which has a prefix length: write %s", quote(s), p.Addr())
		} else {
			v.problem("is %s, not an IP address: write one such as %s", quote(s), example)
		}
		return netip.Addr{}, false
	}
	if a.Zone() != "" { // which can be any text
		v.problem("is %s, which has a zone: write an address that needs none", quote(s))
		return netip.Addr{}, false
	}
	if what, remedy := vip.NotHost(a); what != "" {
		v.problem("is %s, %s: %s", a, what, remedy)
		return netip.Addr{}, false
	}
	return a, true
}

func (v value) protocol() {
	s, ok := v.text("write bgp, or remove the field")
	switch {
	case !ok, s == "bgp":
	case s == "static":
		v.problem("is \"static\": static gateways are not supported yet: write bgp")
	default:
		v.problem("is %s: write bgp, the only protocol so far", quote(s))
	}
}

// checkASN says why a number cannot be a gateway's AS, or "".
func checkASN(n uint32) string {
	switch n {
	case 0:
		return "is 0, which is reserved (RFC 7607): write the AS number of that side"
	case 23456:
		return "is 23456, which stands for 4-octet AS numbers (RFC 6793): write the AS number itself"
	case 65535, 4294967295:
		return fmt.Sprintf("is %d, which is reserved (RFC 7300): write the AS number of that side", n)
	case LoopbackASN:
		return fmt.Sprintf("is %d, which vipgate itself uses on the loopback session: choose another private AS number", n)
	}
	return ""
}

func checkHoldTime(d time.Duration) string {
	if d < MinHoldTime || d > MaxHoldTime || d%time.Second != 0 {
		return fmt.Sprintf("is %s: BGP wants whole seconds between %s and %s (RFC 4271)", d, words(MinHoldTime), words(MaxHoldTime))
	}
	return ""
}

// cross checks what concerns several fields.
func (p *parser) cross() {
	covers := p.overlaps()
	for _, g := range p.gateways {
		if v, ok := covers.of(g.is); ok {
			g.at.problem("is %s, which lies in the VIP %s: a gateway cannot be reached through itself, change one of them", g.is, v)
		}
	}
	for _, t := range p.targets {
		if v, ok := covers.of(t.is); ok {
			t.at.problem("is %s, which lies in the VIP %s: write the target's own address", t.is, v)
		}
	}
	for _, s := range p.sources {
		if v, ok := covers.of(s.is); ok {
			s.at.problem("is %s, which lies in the VIP %s: what comes from a VIP is sent to the gateways, write an address of the load balancer's own", s.is, v)
		}
	}
	if p.vipsRefused {
		return
	}
	var has [len(vip.Families)]bool
	for v := range p.vips {
		has[v.Family()] = true
	}
	for _, g := range p.gateways {
		if f := vip.FamilyOf(g.is); !has[f] {
			g.at.problem("is %s, but the attractor has no %s VIP: add one to attractor.vips or remove the gateway", g.is, familyName(f))
		}
	}
	for _, v := range p.streamVIPs {
		if _, ok := p.vips[v.is]; !ok {
			v.at.problem("VIP %s is not one of the attractor: add it to attractor.vips or remove it here", v.is)
		}
	}
}

// familyName writes the family as people do.
func familyName(f vip.Family) string {
	if f == vip.IPv4 {
		return "IPv4"
	}
	return "IPv6"
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
			p.vips[v].problem("VIP %s lies in the VIP %s of line %d, which would attract its traffic even while it is withdrawn: remove one of them", v, c[n-1], p.vips[c[n-1]].node.Line)
			continue
		}
		c = append(c, v)
	}
	return c
}

// of returns the VIP that contains the address.
func (c covering) of(a netip.Addr) (vip.VIP, bool) {
	i, found := slices.BinarySearchFunc(c, a, func(v vip.VIP, a netip.Addr) int { return v.Prefix().Addr().Compare(a) })
	if !found {
		i--
	}
	if i >= 0 && c[i].Prefix().Contains(a) {
		return c[i], true
	}
	return vip.VIP{}, false
}
