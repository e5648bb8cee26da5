package probe

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Target is a VIP with its checks.
type Target struct {
	VIP vip.VIP
	// Checks has one check of each stream that serves the VIP: it is reachable if any of them passes.
	Checks []trench.Check
	// Unchecked is the reason why there is no check; "" if there is one.
	Unchecked string
}

// Address returns the address that is checked.
func (target Target) Address() netip.Addr { return target.VIP.Prefix().Addr() }

// Targets returns the VIPs of a trench with the checks of their streams, sorted.
func Targets(config *trench.Config) []Target {
	index := make(map[vip.VIP]int, len(config.Attractor.VIPs))
	targets := make([]Target, 0, len(config.Attractor.VIPs))
	for _, v := range config.Attractor.VIPs {
		index[v] = len(targets)
		targets = append(targets, Target{VIP: v, Unchecked: "no stream serves it"})
	}
	for i := range config.Streams {
		stream := &config.Streams[i]
		for _, v := range stream.VIPs {
			at, known := index[v]
			if !known {
				continue
			}
			target := &targets[at]
			if problem := unusable(stream, v.Family()); problem != "" {
				if len(target.Checks) == 0 {
					target.Unchecked = fmt.Sprintf("stream %s: %s", stream.Name, problem)
				}
				continue
			}
			target.Unchecked = ""
			if check := subject(stream.Check); !slices.Contains(target.Checks, check) {
				target.Checks = append(target.Checks, check)
			}
		}
	}
	return sorted(targets)
}

// List returns VIPs that have one check.
func List(vips []vip.VIP, check trench.Check) []Target {
	targets := make([]Target, 0, len(vips))
	for _, v := range vips {
		targets = append(targets, Target{VIP: v, Checks: []trench.Check{subject(check)}})
	}
	return sorted(targets)
}

func sorted(targets []Target) []Target {
	slices.SortFunc(targets, func(a, b Target) int {
		return cmp.Or(cmp.Compare(a.VIP.Family(), b.VIP.Family()), a.Address().Compare(b.Address()))
	})
	return targets
}

// subject returns a check without its timing, families and sources, which belong to lb.
func subject(check trench.Check) trench.Check {
	untimed(&check.SingleCheck)
	for _, members := range []*trench.Members{&check.Any, &check.All} {
		list := members.List()
		for i := range list {
			untimed(&list[i])
		}
		*members = trench.MembersOf(list[:]...)
	}
	check.Warmup, check.Families, check.Via, check.Sources = 0, trench.BothFamilies, trench.ViaDefault, [2]netip.Addr{}
	return check
}

func untimed(check *trench.SingleCheck) {
	check.Interval, check.FastInterval, check.Timeout, check.Rise, check.Fall = 0, 0, 0, 0, 0
}

// unusable returns why the check of a stream is useless at its VIPs, or "".
func unusable(stream *trench.Stream, family vip.Family) string {
	check := &stream.Check
	port := unmatchedPort(stream)
	switch {
	case subject(*check) == trench.Check{}:
		return "it has no check"
	case check.Via == trench.ViaAddress:
		return "its check is via address, not through the VIP"
	case !check.Families.Has(family):
		return fmt.Sprintf("its check is for %s only", check.Families)
	case port != 0:
		return fmt.Sprintf("its match lacks TCP port %d of its check", port)
	}
	return ""
}

// unmatchedPort returns a TCP port of the check that the match of a stream lacks, or 0. Of a check
// of which any member may pass, all ports are missing then.
func unmatchedPort(stream *trench.Stream) (missing uint16) {
	members, anyPasses := stream.Check.Members()
	for _, member := range members {
		port := connectPort(member)
		lacks := port != 0 && len(stream.Match) > 0 && !slices.ContainsFunc(stream.Match, func(m trench.Match) bool {
			return slices.Contains(m.Ports, port) && slices.ContainsFunc(m.Protocols, func(protocol string) bool {
				return strings.EqualFold(protocol, "tcp")
			})
		})
		switch {
		case lacks:
			missing = port
		case anyPasses:
			return 0
		}
	}
	return missing
}

// connectPort returns the first TCP port of a check, or 0.
func connectPort(check trench.Check) uint16 {
	members, _ := check.Members()
	for _, member := range members {
		if port := cmp.Or(member.TCP.Port, member.HTTP.Port, member.GRPC.Port); port != 0 {
			return port
		}
	}
	return 0
}
