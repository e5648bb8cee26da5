package registry

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
)

// parseAnnouncement makes sense of a RegisterRequest, or says what is wrong with it.
func parseAnnouncement(req *targetv1.RegisterRequest) (announcement, error) {
	a := announcement{stream: req.GetStream()}
	if err := checkCount(len(req.GetTargets())); err != nil {
		return a, err
	}
	grace, asked, err := parseDuration("grace", req.GetGrace())
	if err != nil {
		return a, err
	}
	a.grace, a.asked = grace, asked
	names := make(map[string]struct{}, len(req.GetTargets()))
	users := make(map[netip.Addr]string, len(req.GetTargets()))
	for _, t := range req.GetTargets() {
		if err := targetset.CheckName(t.GetName()); err != nil {
			return a, refuse(RefusedInput, codes.InvalidArgument, "a target %v", err)
		}
		if _, twice := names[t.GetName()]; twice {
			return a, refuse(RefusedInput, codes.InvalidArgument, "target %s is there twice: write all its addresses into one", t.GetName())
		}
		names[t.GetName()] = struct{}{}
		ips, err := parseAddresses(t.GetAddresses())
		if err != nil {
			return a, refuse(RefusedAddress, codes.InvalidArgument, "target %s: %v", t.GetName(), err)
		}
		for _, ip := range ips {
			if other, twice := users[ip]; twice {
				return a, refuse(RefusedAddress, codes.InvalidArgument, "target %s: %s is the address of target %s as well: an address belongs to one target", t.GetName(), ip, other)
			}
			users[ip] = t.GetName()
		}
		a.targets = append(a.targets, announced{name: t.GetName(), ips: ips})
	}
	return a, nil
}

// checkCount refuses calls that name no target or too many.
func checkCount(n int) error {
	switch {
	case n == 0:
		return refuse(RefusedInput, codes.InvalidArgument, "no target is named: name 1 to %d", MaxTargetsPerCall)
	case n > MaxTargetsPerCall:
		return refuse(RefusedInput, codes.InvalidArgument, "%d targets in one call: name 1 to %d, and use several calls for more", n, MaxTargetsPerCall)
	}
	return nil
}

// parseDuration returns a duration of a request and whether it is there.
func parseDuration(what string, d *durationpb.Duration) (length time.Duration, asked bool, err error) {
	if d == nil {
		return 0, false, nil
	}
	if err := d.CheckValid(); err != nil {
		return 0, true, refuse(RefusedInput, codes.InvalidArgument, "%s: %v", what, err)
	}
	length = d.AsDuration()
	if length < 0 || length > trench.MaxDrainTime {
		return 0, true, refuse(RefusedInput, codes.InvalidArgument, "%s is %v: 0s to %v may be asked for", what, length, trench.MaxDrainTime)
	}
	return length, true, nil
}

// parseAddresses makes addresses of what a target was announced with.
func parseAddresses(texts []string) ([]netip.Addr, error) {
	if len(texts) == 0 || len(texts) > 2 {
		return nil, errAddressCount(len(texts))
	}
	ips := make([]netip.Addr, 0, len(texts))
	for _, text := range texts {
		ip, err := netip.ParseAddr(text)
		if err != nil {
			return nil, fmt.Errorf("%s is not an IP address: write one such as 172.16.1.1 or fd00::1, without a prefix length", targetset.Quote(text))
		}
		ips = append(ips, ip)
	}
	return ips, checkAddresses(ips)
}

func errAddressCount(n int) error {
	return fmt.Errorf("it has %d addresses: write one or two, at most one of a family", n)
}

// checkAddresses says what is wrong with the addresses of one target among themselves.
func checkAddresses(ips []netip.Addr) error {
	switch {
	case len(ips) == 0, len(ips) > 2:
		return errAddressCount(len(ips))
	case len(ips) == 2 && ips[0].Unmap().Is4() == ips[1].Unmap().Is4():
		return fmt.Errorf("%s and %s are of one family: write at most one of each", ips[0], ips[1])
	}
	for _, ip := range ips {
		if !ip.IsValid() {
			return errors.New("an address is empty: write one such as 172.16.1.1")
		}
	}
	return nil
}
