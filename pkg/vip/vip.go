package vip

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// Family is an address family.
type Family uint8

// The address families. They are independent of each other.
const (
	IPv4 Family = iota
	IPv6
)

// Families lists both families in display order.
var Families = [...]Family{IPv4, IPv6}

// FamilyOf returns the family of an address. An IPv4-mapped IPv6 address is IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "ipv4" or "ipv6".
func (f Family) String() string { return [...]string{"ipv4", "ipv6"}[f] }

// MarshalText implements encoding.TextMarshaler.
func (f Family) MarshalText() ([]byte, error) { return []byte(f.String()), nil }

// VIP is a canonical prefix that may be advertised; only the zero value is invalid. VIPs are
// comparable and can be map keys.
type VIP struct{ prefix netip.Prefix }

// Parse parses a VIP such as "20.0.0.1/32" or "2000::1/128". The error states the defect of s and
// the remedy.
func Parse(s string) (VIP, error) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		if a, errAddr := netip.ParseAddr(s); errAddr == nil && a.Zone() == "" {
			return VIP{}, fmt.Errorf("VIP %q has no prefix length; use %s/%d", s, a.Unmap(), a.Unmap().BitLen())
		}
		return VIP{}, fmt.Errorf("VIP %q is not a prefix such as 20.0.0.1/32 or 2000::1/128", s)
	}
	return FromPrefix(p)
}

// specialPrefixes are the prefixes that contain neither VIPs nor hosts (RFC 6890).
var specialPrefixes = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address"},
	{netip.MustParsePrefix("::1/128"), "a loopback address"},
	{netip.MustParsePrefix("0.0.0.0/32"), "the unspecified address"},
	{netip.MustParsePrefix("::/128"), "the unspecified address"},
	{netip.MustParsePrefix("255.255.255.255/32"), "a multicast or broadcast address"},
	{netip.MustParsePrefix("224.0.0.0/4"), "a multicast or broadcast address"},
	{netip.MustParsePrefix("ff00::/8"), "a multicast or broadcast address"},
	{netip.MustParsePrefix("0.0.0.0/8"), "a reserved address"},
	{netip.MustParsePrefix("240.0.0.0/4"), "a reserved address"},
	{netip.MustParsePrefix("fe80::/10"), "an IPv6 link-local address"},
}

// NotHost returns why an address cannot belong to a host, and the remedy; "" and "" if it can.
func NotHost(a netip.Addr) (what, remedy string) {
	if a.Is4In6() {
		return "an IPv4-mapped address", "write " + a.Unmap().String()
	}
	for _, s := range specialPrefixes {
		switch {
		case !s.prefix.Contains(a.WithZone("")):
		case a.Is6() && a.IsLinkLocalUnicast():
			return s.what, "write a global or unique local address"
		default:
			return s.what, "write the address of one host"
		}
	}
	return "", ""
}

// FromPrefix returns the VIP of a prefix. It rejects default routes, prefixes with host bits set,
// IPv4-mapped prefixes, and addresses that no gateway can route to.
func FromPrefix(p netip.Prefix) (VIP, error) {
	a := p.Addr()
	switch {
	case !p.IsValid():
		return VIP{}, fmt.Errorf("VIP %q is not a prefix", p)
	case a.Is4In6():
		return VIP{}, fmt.Errorf("VIP %s is an IPv4-mapped prefix; use IPv4 notation", p)
	case p.Bits() == 0:
		return VIP{}, fmt.Errorf("VIP %s is a default route, which attracts all traffic; use the addresses to serve", p)
	case p.Masked() != p:
		return VIP{}, fmt.Errorf("VIP %s has host bits set; use %s, or %s/%d for one address", p, p.Masked(), a, a.BitLen())
	case a.Is4() && a.IsLinkLocalUnicast():
		return VIP{}, fmt.Errorf("VIP %s is a link-local address: no gateway can route to it", p)
	}
	if isOrdinary(p) {
		return VIP{prefix: p}, nil
	}
	for _, s := range specialPrefixes {
		if s.prefix.Overlaps(p) {
			return VIP{}, fmt.Errorf("VIP %s is or contains %s: no gateway can route to it", p, s.what)
		}
	}
	return VIP{prefix: p}, nil
}

// isOrdinary reports whether the first 8 bits of a prefix show that it overlaps no special one.
func isOrdinary(p netip.Prefix) bool {
	if p.Bits() < 8 {
		return false
	}
	if p.Addr().Is4() {
		first := p.Addr().As4()[0]
		return first != 0 && first != 127 && first < 224
	}
	first := p.Addr().As16()[0]
	return first != 0 && first < 0xfe
}

// Require is Parse for constants: it panics if s is not a VIP.
func Require(s string) VIP {
	v, err := Parse(s)
	if err != nil {
		panic(err)
	}
	return v
}

// Prefix returns the prefix; it is invalid only for the zero VIP.
func (v VIP) Prefix() netip.Prefix { return v.prefix }

// Family returns the address family.
func (v VIP) Family() Family { return FamilyOf(v.prefix.Addr()) }

// IsZero reports whether v is the zero VIP.
func (v VIP) IsZero() bool { return v == VIP{} }

// Overlaps reports whether the two VIPs share an address.
func (v VIP) Overlaps(w VIP) bool { return v.prefix.Overlaps(w.prefix) }

// String returns the canonical prefix, or "" for the zero VIP.
func (v VIP) String() string {
	if v.IsZero() {
		return ""
	}
	return v.prefix.String()
}

// Append appends the result of String to b.
func (v VIP) Append(b []byte) []byte {
	if v.IsZero() {
		return b
	}
	return v.prefix.AppendTo(b)
}

// MarshalText implements encoding.TextMarshaler.
func (v VIP) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with the rules of [Parse].
func (v *VIP) UnmarshalText(text []byte) error {
	parsed, err := Parse(string(text))
	if err == nil {
		*v = parsed
	}
	return err
}

// Compare orders VIPs: IPv4 first, then by address, then wider prefixes first.
func Compare(a, b VIP) int {
	return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()))
}

// Last returns the highest address of a prefix.
func Last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 1 << (7 - i%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Set is a set of VIPs. The nil Set is empty and can be read.
type Set map[VIP]struct{}

// NewSet returns the set of the given VIPs.
func NewSet(vips ...VIP) Set {
	s := make(Set, len(vips))
	for _, v := range vips {
		s[v] = struct{}{}
	}
	return s
}

// Has reports whether v is in the set.
func (s Set) Has(v VIP) bool {
	_, ok := s[v]
	return ok
}

// Equal reports whether both sets have the same VIPs.
func (s Set) Equal(t Set) bool { return maps.Equal(s, t) }

// Sorted returns the VIPs in the order of [Compare].
func (s Set) Sorted() []VIP {
	sorted := make([]VIP, 0, len(s))
	for v := range s {
		sorted = append(sorted, v)
	}
	slices.SortFunc(sorted, Compare)
	return sorted
}

// State is the load balancer's state of a VIP. The zero State is NotReady.
type State uint8

// The states of a VIP.
const (
	NotReady State = iota // traffic to the VIP would be dropped
	Ready                 // traffic to the VIP can be forwarded to a target
	Draining              // traffic is still forwarded, but only until the end of the drain
)

// String returns "not ready", "ready" or "draining".
func (s State) String() string { return [...]string{"not ready", "ready", "draining"}[s] }
