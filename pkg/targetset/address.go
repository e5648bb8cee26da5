package targetset

import (
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/vip"
)

// AddressPolicy decides which addresses targets may have.
type AddressPolicy struct {
	// Subnets lists the prefixes that may contain targets; none means every address.
	Subnets []netip.Prefix
	// VIPs lists the prefixes that must not contain targets. They do not overlap and are sorted by
	// [vip.Compare], since there may be very many.
	VIPs []vip.VIP
	// Gateways lists addresses that no target registers with.
	Gateways []netip.Addr
}

// CheckRegistered returns why a target must not register with an address. The trench file may have
// more addresses: an operator writes them.
func (p AddressPolicy) CheckRegistered(address netip.Addr) error {
	if what := vip.NotTarget(address, p.Subnets); what != "" {
		return fmt.Errorf("%s is %s: register another one, or have a --target-subnet of such addresses", address, what)
	}
	if slices.Contains(p.Gateways, address) {
		return fmt.Errorf("%s belongs to a gateway: use the target's own address", address)
	}
	return p.Check(address)
}

// Check returns why a target must not have an address, with the remedy.
func (p AddressPolicy) Check(address netip.Addr) error {
	switch {
	case !address.IsValid():
		return errors.New("no address: write one such as 172.16.1.1")
	case address.Zone() != "":
		return fmt.Errorf("%s has a zone: use an address that needs none", address.WithZone(""))
	}
	// The reader of the trench file refuses loopback addresses itself.
	if what, remedy := vip.NotHost(address); what != "" && !address.IsLoopback() {
		return fmt.Errorf("%s is %s: %s", address, what, remedy)
	}
	if len(p.Subnets) > 0 && !slices.ContainsFunc(p.Subnets, func(s netip.Prefix) bool { return s.Contains(address) }) {
		return fmt.Errorf("%s is not in a subnet that --target-subnet allows (%s)", address, join(p.Subnets))
	}
	if v, ok := vip.Containing(p.VIPs, address); ok {
		return fmt.Errorf("%s lies in the VIP %s: use the target's own address", address, v)
	}
	return nil
}

// SameAddresses reports whether two lists without duplicates have the same addresses, in any order.
func SameAddresses(a, b []netip.Addr) bool {
	return len(a) == len(b) && !slices.ContainsFunc(a, func(x netip.Addr) bool { return !slices.Contains(b, x) })
}

// join writes a list for status and errors.
func join[T fmt.Stringer](list []T) string { return strings.Join(vip.Texts(list), ", ") }

// names matches valid names of streams and targets, as in the trench file.
var names = regexp.MustCompile(`\A[A-Za-z0-9_.-]{1,60}\z`)

// CheckName returns why the name of a stream or target is invalid.
func CheckName(s string) error {
	const remedy = "write 1 to 60 characters out of A-Z a-z 0-9 _ . -"
	switch {
	case s == "":
		return errors.New("has no name: " + remedy)
	case !names.MatchString(s):
		return fmt.Errorf("%s is not a name: %s", Quote(s), remedy)
	}
	return nil
}

// Quote quotes input, truncated to a length that fits into a line.
func Quote(s string) string {
	const most = 120
	if len(s) > most {
		s = s[:most] + "…"
	}
	return fmt.Sprintf("%q", s)
}
