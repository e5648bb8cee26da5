package plan

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// VIPOwners assigns VIPs to streams.
type VIPOwners struct {
	// Owned are the VIPs of each stream that need an element, in the order of vip.Compare.
	Owned map[string][]vip.VIP
	// Owner is the stream of each of them.
	Owner map[vip.VIP]string
	// Covered maps each VIP without an element to the wider VIP of the same stream that
	// covers it: intervals of one nftables map must not overlap.
	Covered  map[vip.VIP]vip.VIP
	Problems []Problem
}

// AssignVIPs gives each VIP to the stream whose name sorts first, unless its packets are delivered
// to this network namespace: it is an address there, or has a local route.
func AssignVIPs(streams map[string]*Stream, local map[netip.Addr]struct{}, routes []LocalRoute) VIPOwners {
	s := VIPOwners{Owned: map[string][]vip.VIP{}, Owner: map[vip.VIP]string{}, Covered: map[vip.VIP]vip.VIP{}}
	var wide []vip.VIP // owned ones that are wider than a host
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		vips := slices.Clone(streams[name].VIPs)
		slices.SortFunc(vips, func(a, b vip.VIP) int {
			return cmp.Or(cmp.Compare(a.Prefix().Bits(), b.Prefix().Bits()), vip.Compare(a, b))
		})
		for _, v := range slices.Compact(vips) {
			problem := func(local bool, detail, remedy string) {
				p := Problem{Object: "VIP " + v.String(), Detail: detail, Remedy: remedy, VIPs: []vip.VIP{v}, Local: local}
				s.Problems = append(s.Problems, p)
			}
			if a, ok := localIn(v, local); ok {
				problem(true, a.String()+" is an address of this network namespace: "+
					"its packets are delivered here before any rule of the data plane",
					fmt.Sprintf("ip address del %s/%d dev DEVICE, or take the VIP out of stream %s", a, a.BitLen(), name))
				continue
			}
			overlaps := func(r LocalRoute) bool { return v.Prefix().Overlaps(r.Prefix) }
			if i := slices.IndexFunc(routes, overlaps); i >= 0 {
				detail, remedy := routes[i].explain(name)
				problem(true, detail, remedy)
				continue
			}
			other, by := overlap(v, s.Owner, wide)
			host := v.Prefix().IsSingleIP()
			switch {
			case by == "" || by == name && host:
				s.Owner[v] = name
				if !host {
					wide = append(wide, v)
				}
				s.Owned[name] = append(s.Owned[name], v)
			case by == name:
				s.Covered[v] = other
			default:
				problem(false, fmt.Sprintf("stream %s wants it, but stream %s serves %s", name, by, other),
					fmt.Sprintf("take it out of one of the streams %s and %s", by, name))
			}
		}
		slices.SortFunc(s.Owned[name], vip.Compare)
	}
	return s
}

// explain returns why a VIP of a stream is not forwarded, and the remedy.
func (r LocalRoute) explain(stream string) (detail, remedy string) {
	if r.Target {
		return fmt.Sprintf("\"target run\" of this network namespace takes the packets to %s (local route)", r.Prefix),
			"end it here and run target cleanup"
	}
	return fmt.Sprintf("%s is a local route of this network namespace: "+
			"its packets are delivered here before any rule of the data plane", r.Prefix),
		fmt.Sprintf("ip route del local %s table local, or take the VIP out of stream %s", r.Prefix, stream)
}

// Limit leaves out the VIPs of one address that a map does not hold, rather new ones.
func (s *VIPOwners) Limit(installed map[vip.VIP]string) {
	var hosts [len(vip.Families)][]vip.VIP
	for _, vips := range s.Owned {
		for _, v := range vips {
			if v.Prefix().IsSingleIP() {
				hosts[v.Family()] = append(hosts[v.Family()], v)
			}
		}
	}
	isNew := func(v vip.VIP) int {
		if _, ok := installed[v]; ok {
			return 0
		}
		return 1
	}
	for f, vips := range hosts {
		if len(vips) <= MaxHostVIPs {
			continue
		}
		slices.SortFunc(vips, func(a, b vip.VIP) int { return cmp.Or(isNew(a)-isNew(b), vip.Compare(a, b)) })
		surplus := vip.NewSet(vips[MaxHostVIPs:]...)
		s.Problems = append(s.Problems, Problem{
			Object: "map inet " + TableName + " " + HostMaps[f],
			Detail: fmt.Sprintf("%s holds %d VIPs of one address, and streams have %d", HostMaps[f], MaxHostVIPs, len(vips)),
			Remedy: "serve wider prefixes, or fewer VIPs", VIPs: vips[MaxHostVIPs:],
		})
		maps.DeleteFunc(s.Owner, func(v vip.VIP, _ string) bool { return surplus.Has(v) })
		for name, owned := range s.Owned {
			s.Owned[name] = slices.DeleteFunc(owned, surplus.Has)
		}
	}
}

// overlap finds an owned VIP that shares an address with v, rather one of another stream.
func overlap(v vip.VIP, owner map[vip.VIP]string, wide []vip.VIP) (first vip.VIP, by string) {
	if by, ok := owner[v]; ok {
		return v, by
	}
	if i := slices.IndexFunc(wide, v.Overlaps); i >= 0 {
		return wide[i], owner[wide[i]]
	}
	if !v.Prefix().IsSingleIP() {
		for w := range owner {
			if w.Overlaps(v) && (first.IsZero() || vip.Compare(w, first) < 0) {
				first = w
			}
		}
	}
	return first, owner[first]
}

// localIn returns the first local address in a VIP.
func localIn(v vip.VIP, local map[netip.Addr]struct{}) (first netip.Addr, ok bool) {
	if v.Prefix().IsSingleIP() {
		_, ok := local[v.Prefix().Addr()]
		return v.Prefix().Addr(), ok
	}
	for a := range local {
		if v.Prefix().Contains(a) && (!first.IsValid() || a.Less(first)) {
			first = a
		}
	}
	return first, first.IsValid()
}
