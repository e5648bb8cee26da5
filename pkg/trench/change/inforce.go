package change

import (
	"maps"
	"slices"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// Why is the reason for which a VIP is in force.
type Why uint8

const (
	Listed  Why = iota // the configuration has it
	Held               // its removal from the configuration waits for a confirmation
	Ended              // its last stream left the configuration
	Leaving            // it left the configuration, and drains
)

// String returns the reason for status; "" for Listed.
func (why Why) String() string { return [...]string{"", "held", "ended", "leaving"}[why] }

// InForce holds the VIPs in force: those of a configuration, and those that still attract traffic
// after it. It is not modified. The zero value has none.
type InForce struct {
	trench.Loaded // its Config has the held VIPs
	// Attractor is the attractor of Config with the VIPs that leave. VIPs that end or leave have the
	// policies from before, which may be gone: they must not attract more traffic than before.
	Attractor trench.Attractor
	Kept      map[vip.VIP]Why // without VIPs that are Listed
	served    vip.Set         // by a stream of Config, or Ended
}

// Next returns the VIPs in force with the next configuration. leaving VIPs drain if it lacks them.
// drains reports whether the load balancer drains VIPs without streams.
func (before *InForce) Next(loaded trench.Loaded, leaving vip.Set, drains bool) *InForce {
	next := &InForce{Loaded: loaded, Attractor: loaded.Config.Attractor, Kept: map[vip.VIP]Why{}, served: vip.Set{}}
	listed := vip.NewSet(next.Attractor.VIPs...)
	for _, stream := range loaded.Config.Streams {
		maps.Copy(next.served, vip.NewSet(stream.VIPs...))
	}
	for _, v := range loaded.Held.VIPs {
		next.Kept[v] = Held
	}
	former := vip.Set{} // the VIPs that have policies from before; Hold keeps those of held VIPs
	for v := range before.served {
		if drains && listed.Has(v) && !next.served.Has(v) {
			next.Kept[v], former[v], next.served[v] = Ended, struct{}{}, struct{}{}
		}
	}
	for v := range leaving {
		if !listed.Has(v) {
			next.Kept[v], former[v] = Leaving, struct{}{}
		}
	}
	for _, policy := range next.Attractor.Policies {
		for _, v := range policy.VIPs {
			delete(former, v)
		}
	}
	next.Attractor.VIPs = slices.Concat(next.Attractor.VIPs, next.Leaving())
	next.Attractor.Policies = slices.Concat(next.Attractor.Policies,
		keepPolicies(before.Attractor.Policies, next.Attractor.Policies, former))
	return next
}

// Leaving returns the VIPs that left the configuration, sorted.
func (inForce *InForce) Leaving() []vip.VIP {
	leaving := maps.Clone(inForce.Kept)
	maps.DeleteFunc(leaving, func(_ vip.VIP, why Why) bool { return why != Leaving })
	return slices.SortedFunc(maps.Keys(leaving), vip.Compare)
}
