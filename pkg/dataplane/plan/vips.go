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
	// Owned maps each stream to its VIPs that need an element, sorted by vip.Compare.
	Owned map[string][]vip.VIP
	// Owner maps each owned VIP to its stream.
	Owner map[vip.VIP]string
	// Covered maps each VIP without an element to the wider VIP of the same stream that
	// contains it: intervals of one nftables map must not overlap.
	Covered  map[vip.VIP]vip.VIP
	Problems []Problem
}

// AssignVIPs assigns each VIP to the stream whose name sorts first. It rejects a VIP that is an
// address of this network namespace or overlaps a local route, because the kernel delivers its
// packets locally.
func AssignVIPs(streams map[string]*Stream, local map[netip.Addr]struct{}, routes []LocalRoute) VIPOwners {
	owners := VIPOwners{Owned: map[string][]vip.VIP{}, Owner: map[vip.VIP]string{}, Covered: map[vip.VIP]vip.VIP{}}
	parents, inside := parents(streams), map[vip.VIP]vip.VIP{} // inside: the lowest owned VIP in each VIP
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		vips := slices.Clone(streams[name].VIPs)
		// Wide prefixes first: they cover the narrow ones of the same stream.
		slices.SortFunc(vips, func(a, b vip.VIP) int {
			return cmp.Or(cmp.Compare(a.Prefix().Bits(), b.Prefix().Bits()), vip.Compare(a, b))
		})
		for _, v := range slices.Compact(vips) {
			problem := func(local bool, detail, remedy string) {
				p := Problem{Object: "VIP " + v.String(), Detail: detail, Remedy: remedy, VIPs: []vip.VIP{v}, Local: local}
				owners.Problems = append(owners.Problems, p)
			}
			if address, ok := localIn(v, local); ok {
				problem(true, address.String()+" is an address of this network namespace: "+
					"its packets are delivered here before any rule of the data plane",
					fmt.Sprintf("ip address del %s/%d dev DEVICE, or take the VIP out of stream %s", address, address.BitLen(), name))
				continue
			}
			overlaps := func(r LocalRoute) bool { return v.Prefix().Overlaps(r.Prefix) }
			if i := slices.IndexFunc(routes, overlaps); i >= 0 {
				detail, remedy := routes[i].explain(name)
				problem(true, detail, remedy)
				continue
			}
			// An owned VIP that overlaps v: itself, one around it, or one in it.
			other := v
			for other != (vip.VIP{}) && owners.Owner[other] == "" {
				other = parents[other]
			}
			other = cmp.Or(other, inside[v])
			switch by := owners.Owner[other]; {
			case by == "" || by == name && v.Prefix().IsSingleIP():
				owners.Owner[v] = name
				for wide := parents[v]; !wide.IsZero(); wide = parents[wide] {
					if inside[wide].IsZero() || vip.Compare(v, inside[wide]) < 0 {
						inside[wide] = v
					}
				}
				owners.Owned[name] = append(owners.Owned[name], v)
			case by == name:
				owners.Covered[v] = other
			default:
				problem(false, fmt.Sprintf("stream %s wants it, but stream %s serves %s", name, by, other),
					fmt.Sprintf("take it out of one of the streams %s and %s", by, name))
			}
		}
		slices.SortFunc(owners.Owned[name], vip.Compare)
	}
	return owners
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

// Limit removes single-address VIPs beyond the size of a map, new VIPs first.
func (owners *VIPOwners) Limit(installed map[vip.VIP]string) {
	var hosts [len(vip.Families)][]vip.VIP
	for _, vips := range owners.Owned {
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
	// Installed VIPs stay: a new VIP must not displace one that is advertised.
	for f, vips := range hosts {
		if len(vips) <= MaxHostVIPs {
			continue
		}
		slices.SortFunc(vips, func(a, b vip.VIP) int { return cmp.Or(isNew(a)-isNew(b), vip.Compare(a, b)) })
		surplus := vip.NewSet(vips[MaxHostVIPs:]...)
		owners.Problems = append(owners.Problems, Problem{
			Object: "map inet " + TableName + " " + HostMaps[f],
			Detail: fmt.Sprintf("%s holds %d VIPs of one address, and streams have %d", HostMaps[f], MaxHostVIPs, len(vips)),
			Remedy: "serve wider prefixes, or fewer VIPs", VIPs: vips[MaxHostVIPs:],
		})
		maps.DeleteFunc(owners.Owner, func(v vip.VIP, _ string) bool { return surplus.Has(v) })
		for name, owned := range owners.Owned {
			owners.Owned[name] = slices.DeleteFunc(owned, surplus.Has)
		}
	}
}

// parents maps each VIP to the narrowest VIP of any stream that contains it.
func parents(streams map[string]*Stream) map[vip.VIP]vip.VIP {
	var all, around []vip.VIP
	for _, stream := range streams {
		all = append(all, stream.VIPs...)
	}
	slices.SortFunc(all, vip.Compare) // a prefix follows the prefixes that contain it
	parents := map[vip.VIP]vip.VIP{}
	for _, v := range slices.Compact(all) {
		for len(around) > 0 && !around[len(around)-1].Overlaps(v) {
			around = around[:len(around)-1]
		}
		if len(around) > 0 {
			parents[v] = around[len(around)-1]
		}
		around = append(around, v)
	}
	return parents
}

// localIn returns the lowest local address in a VIP.
func localIn(v vip.VIP, local map[netip.Addr]struct{}) (first netip.Addr, ok bool) {
	if v.Prefix().IsSingleIP() {
		_, ok := local[v.Prefix().Addr()]
		return v.Prefix().Addr(), ok
	}
	for address := range local {
		if v.Prefix().Contains(address) && (!first.IsValid() || address.Less(first)) {
			first = address
		}
	}
	return first, first.IsValid()
}
