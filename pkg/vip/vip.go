package vip

import (
	"cmp"
	"fmt"
	"iter"
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
func FamilyOf(address netip.Addr) Family {
	if address.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "ipv4" or "ipv6".
func (family Family) String() string { return [...]string{"ipv4", "ipv6"}[family] }

// MarshalText implements encoding.TextMarshaler.
func (family Family) MarshalText() ([]byte, error) { return []byte(family.String()), nil }

// VIP is a canonical prefix that may be advertised; only the zero value is invalid. VIPs are
// comparable and can be map keys.
type VIP struct{ prefix netip.Prefix }

// Parse parses a VIP such as "20.0.0.1/32" or "2000::1/128". The error states the defect of text and
// the remedy.
func Parse(text string) (VIP, error) {
	prefix, err := netip.ParsePrefix(text)
	if err != nil {
		// Return the complete VIP in the error, so that the operator can copy it.
		if address, errAddr := netip.ParseAddr(text); errAddr == nil && address.Zone() == "" {
			return VIP{}, fmt.Errorf("VIP %q has no prefix length; use %s/%d", text, address.Unmap(), address.Unmap().BitLen())
		}
		return VIP{}, fmt.Errorf("VIP %q is not a prefix such as 20.0.0.1/32 or 2000::1/128", text)
	}
	return FromPrefix(prefix)
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
func NotHost(address netip.Addr) (what, remedy string) {
	if address.Is4In6() {
		return "an IPv4-mapped address", "write " + address.Unmap().String()
	}
	for _, special := range specialPrefixes {
		switch {
		// Prefix.Contains is false for any address with a zone.
		case !special.prefix.Contains(address.WithZone("")):
		case address.Is6() && address.IsLinkLocalUnicast():
			return special.what, "write a global or unique local address"
		default:
			return special.what, "write the address of one host"
		}
	}
	return "", ""
}

// operatorPrefixes are the prefixes of services of a machine or cloud, which trust every client, so
// that no target has an address there unless an operator names it.
var operatorPrefixes = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address"},
	{netip.MustParsePrefix("::1/128"), "a loopback address"},
	{netip.MustParsePrefix("169.254.0.0/16"), "an IPv4 link-local address"},
	{netip.MustParsePrefix("100.100.100.200/32"), "the address of a cloud's metadata service"},
	{netip.MustParsePrefix("168.63.129.16/32"), "the address of a cloud's metadata service"},
	{netip.MustParsePrefix("fd20:ce::254/128"), "the address of a cloud's metadata service"},
	{netip.MustParsePrefix("fd00:ec2::254/128"), "the address of a cloud's metadata service"},
}

// NotTarget returns why a target cannot register with the address of a host; "" if it can. A subnet
// that has such addresses alone permits them.
func NotTarget(address netip.Addr, subnets []netip.Prefix) string {
	for _, special := range operatorPrefixes {
		named := func(subnet netip.Prefix) bool {
			return subnet.Contains(address) && subnet.Bits() >= special.prefix.Bits()
		}
		if special.prefix.Contains(address) && !slices.ContainsFunc(subnets, named) {
			return special.what
		}
	}
	return ""
}

// FromPrefix returns the VIP of a prefix. It rejects default routes, prefixes with host bits set,
// IPv4-mapped prefixes, and addresses that no gateway can route to.
func FromPrefix(prefix netip.Prefix) (VIP, error) {
	address := prefix.Addr()
	switch {
	case !prefix.IsValid():
		return VIP{}, fmt.Errorf("VIP %q is not a prefix", prefix)
	case address.Is4In6():
		return VIP{}, fmt.Errorf("VIP %s is an IPv4-mapped prefix; use IPv4 notation", prefix)
	case prefix.Bits() == 0:
		return VIP{}, fmt.Errorf("VIP %s is a default route, which attracts all traffic; use the addresses to serve", prefix)
	case prefix.Masked() != prefix:
		return VIP{}, fmt.Errorf("VIP %s has host bits set; use %s, or %s/%d for one address",
			prefix, prefix.Masked(), address, address.BitLen())
	case address.Is4() && address.IsLinkLocalUnicast():
		return VIP{}, fmt.Errorf("VIP %s is a link-local address: no gateway can route to it", prefix)
	}
	// A configuration may have very many VIPs; few need a comparison with each special prefix.
	if isOrdinary(prefix) {
		return VIP{prefix: prefix}, nil
	}
	for _, special := range specialPrefixes {
		if special.prefix.Overlaps(prefix) {
			return VIP{}, fmt.Errorf("VIP %s is or contains %s: no gateway can route to it", prefix, special.what)
		}
	}
	return VIP{prefix: prefix}, nil
}

// isOrdinary reports whether the first 8 bits of a prefix show that it overlaps no special one.
func isOrdinary(prefix netip.Prefix) bool {
	// A shorter prefix may contain special prefixes with other first bits.
	if prefix.Bits() < 8 {
		return false
	}
	if prefix.Addr().Is4() {
		first := prefix.Addr().As4()[0]
		// From 224 on all addresses are multicast, reserved or broadcast.
		return first != 0 && first != 127 && first < 224
	}
	first := prefix.Addr().As16()[0]
	// "::" and "::1" begin with 0, fe80::/10 and ff00::/8 with 0xfe and 0xff.
	return first != 0 && first < 0xfe
}

// Require is Parse for constants: it panics if s is not a VIP.
func Require(s string) VIP {
	vip, err := Parse(s)
	if err != nil {
		panic(err)
	}
	return vip
}

// Prefix returns the prefix; it is invalid only for the zero VIP.
func (vip VIP) Prefix() netip.Prefix { return vip.prefix }

// Family returns the address family.
func (vip VIP) Family() Family { return FamilyOf(vip.prefix.Addr()) }

// IsZero reports whether vip is the zero VIP.
func (vip VIP) IsZero() bool { return vip == VIP{} }

// Overlaps reports whether the two VIPs share an address.
func (vip VIP) Overlaps(w VIP) bool { return vip.prefix.Overlaps(w.prefix) }

// String returns the canonical prefix, or "" for the zero VIP.
func (vip VIP) String() string {
	var text [64]byte
	return string(vip.Append(text[:0]))
}

// Append appends the result of String to text.
func (vip VIP) Append(text []byte) []byte {
	if vip.IsZero() {
		return text
	}
	return vip.prefix.AppendTo(text)
}

// MarshalText implements encoding.TextMarshaler.
func (vip VIP) MarshalText() ([]byte, error) { return []byte(vip.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler with the rules of [Parse].
func (vip *VIP) UnmarshalText(text []byte) error {
	parsed, err := Parse(string(text))
	if err == nil {
		*vip = parsed
	}
	return err
}

// Compare orders VIPs: IPv4 first, then by address, then wider prefixes first.
func Compare(vip, text VIP) int {
	return cmp.Or(vip.prefix.Addr().Compare(text.prefix.Addr()), cmp.Compare(vip.prefix.Bits(), text.prefix.Bits()))
}

// Containing returns the VIP that contains an address. vips are sorted and do not overlap, so only
// the last one that starts at or before the address can contain it.
func Containing(vips []VIP, a netip.Addr) (VIP, bool) {
	i, found := slices.BinarySearchFunc(vips, a, func(v VIP, a netip.Addr) int { return v.prefix.Addr().Compare(a) })
	if !found {
		i--
	}
	if i >= 0 && vips[i].prefix.Contains(a) {
		return vips[i], true
	}
	return VIP{}, false
}

// Last returns the highest address of a prefix.
func Last(prefix netip.Prefix) netip.Addr {
	bytes := prefix.Masked().Addr().AsSlice()
	for i := prefix.Bits(); i < len(bytes)*8; i++ {
		bytes[i/8] |= 1 << (7 - i%8)
	}
	address, _ := netip.AddrFromSlice(bytes)
	return address
}

// Set is a set of VIPs. The nil Set is empty and can be read.
type Set map[VIP]struct{}

// NewSet returns the set of the given VIPs.
func NewSet(vips ...VIP) Set {
	set := make(Set, len(vips))
	for _, vip := range vips {
		set[vip] = struct{}{}
	}
	return set
}

// Has reports whether vip is in the set.
func (set Set) Has(vip VIP) bool {
	_, ok := set[vip]
	return ok
}

// Equal reports whether both sets have the same VIPs.
func (set Set) Equal(t Set) bool { return maps.Equal(set, t) }

// Sorted returns the VIPs in the order of [Compare].
func (set Set) Sorted() []VIP { return slices.SortedFunc(maps.Keys(set), Compare) }

// Of returns the VIPs of values, such as changes of VIPs.
func Of[T any](values []T, vip func(*T) VIP) iter.Seq[VIP] {
	return func(yield func(VIP) bool) {
		for i := range values {
			if !yield(vip(&values[i])) {
				return
			}
		}
	}
}

// Texts returns values, such as VIPs and their addresses, as text.
func Texts[T fmt.Stringer](values []T) (texts []string) {
	for _, value := range values {
		texts = append(texts, value.String())
	}
	return texts
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
func (state State) String() string { return [...]string{"not ready", "ready", "draining"}[state] }
