package change

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

const (
	// defaultRemoval is the percentage of an incomplete configuration.
	defaultRemoval = 50
	// Fewer removed VIPs, or streams without targets, are an ordinary edit.
	minVIPs    = 3
	minStreams = 2
)

// Alive reports whether a target passes its checks and does not drain.
type Alive func(stream, target string) bool

// Hold returns the configuration to put in force for a valid one, and the removals that wait for a
// confirmation: VIPs, if the configuration removes more than MaxRemoval percent and at least three
// of those in force; the last gateways of a family; and, of at least two streams, all targets that
// are alive. The result has the held objects in addition to the configuration.
//
// before is the hold in force, which objects that the configuration adds do not end. confirmed has
// confirmed identifiers in addition to the field of the configuration. A nil alive ignores targets.
func Hold(inForce, next *trench.Config, before trench.Held, confirmed string,
	alive Alive,
) (*trench.Config, trench.Held) {
	percent := cmp.Or(next.MaxRemoval, defaultRemoval)
	if percent >= 100 {
		return next, trench.Held{}
	}
	confirmed += "," + next.Confirm
	var held trench.Held
	held.VIPs, held.Base = removedVIPs(inForce, next, percent, before.Base)
	held.Gateways = lastGateways(inForce, next, held.VIPs)
	// Both depend on the configurations alone, so that every pod computes the same identifier.
	held.ID = identify("v", held.VIPs, held.Gateways)
	if strings.Contains(confirmed, held.ID) {
		held = trench.Held{}
	}
	if alive != nil {
		streams := emptied(inForce, next, alive)
		id := identify("t", nil, streams)
		// Without the second condition, the failure of one stream would release the others.
		if (len(streams) >= minStreams || len(streams) > 0 && len(before.Streams) > 0) && !strings.Contains(confirmed, id) {
			held.Streams = streams
			held.ID = strings.TrimPrefix(held.ID+","+id, ",")
		}
	}
	if held.ID == "" {
		return next, held
	}
	effective := merge(inForce, next, held)
	// An added object may conflict with a held one, such as a VIP that contains it.
	if held.Whole = len(trench.Validate(effective)) > 0; held.Whole {
		return inForce, held
	}
	return effective, held
}

// identify returns an identifier of names, "" for none. Its prefix makes it a text in YAML.
func identify(prefix string, vips []vip.VIP, names []string) string {
	if len(vips)+len(names) == 0 {
		return ""
	}
	hash := sha256.New()
	for _, name := range slices.Concat(names, vip.Texts(vips)) {
		hash.Write([]byte(name + "\n"))
	}
	return prefix + hex.EncodeToString(hash.Sum(nil)[:4])
}

// IdentifyChecks returns an identifier of new checks by stream, "" for none. Another edit of a
// check has another one, unless it changes the timing only.
func IdentifyChecks(checks map[string]trench.Check) string {
	var edits []string
	for stream, check := range checks {
		edits = append(edits, fmt.Sprint(stream, untimed(check)))
	}
	slices.Sort(edits)
	return identify("c", nil, edits)
}

// removedVIPs returns the removed VIPs, sorted, and the VIPs before; nil within the limit.
func removedVIPs(inForce, next *trench.Config, percent int, base []vip.VIP) (removed, of []vip.VIP) {
	// VIPs that were added during a hold do not count: they would hide the removal, and make the edit
	// that reverts it a removal of its own.
	if base == nil {
		base = inForce.Attractor.VIPs
	}
	wanted := vip.NewSet(next.Attractor.VIPs...)
	removed = slices.DeleteFunc(slices.Clone(base), wanted.Has)
	if len(removed) < minVIPs || len(removed)*100 <= percent*len(base) {
		return nil, nil
	}
	slices.SortFunc(removed, vip.Compare)
	return removed, base
}

// lastGateways returns the names of the gateways that are the last ones of a family with VIPs.
func lastGateways(inForce, next *trench.Config, held []vip.VIP) (last []string) {
	for _, family := range vip.Families {
		has := func(gateway trench.Gateway) bool { return gateway.Has(family) }
		of := func(prefix vip.VIP) bool { return prefix.Family() == family }
		if slices.ContainsFunc(next.Attractor.Gateways, has) ||
			!slices.ContainsFunc(next.Attractor.VIPs, of) && !slices.ContainsFunc(held, of) {
			continue
		}
		for _, gateway := range inForce.Attractor.Gateways {
			if has(gateway) {
				last = append(last, gateway.Name)
			}
		}
	}
	slices.Sort(last)
	return last
}

// active reports whether a target gets new flows according to the configuration.
func active(target trench.Target) bool { return !target.Terminating }

// served returns the VIPs that a stream with an active target serves.
func served(config *trench.Config) vip.Set {
	vips := vip.Set{}
	for _, stream := range config.Streams {
		if slices.ContainsFunc(stream.Targets, active) {
			maps.Copy(vips, vip.NewSet(stream.VIPs...))
		}
	}
	return vips
}

// emptied returns the names of the streams that have an alive target, and a VIP that stays in the
// attractor and loses all targets.
func emptied(inForce, next *trench.Config, alive Alive) (names []string) {
	stays, serves := vip.NewSet(next.Attractor.VIPs...), served(next)
	marked := map[[2]string]bool{} // targets that next marks as terminating
	for _, stream := range next.Streams {
		for _, target := range stream.Targets {
			marked[[2]string{stream.Name, target.Name}] = target.Terminating
		}
	}
	for _, stream := range inForce.Streams {
		loses := slices.ContainsFunc(stream.VIPs, func(prefix vip.VIP) bool {
			return stays.Has(prefix) && !serves.Has(prefix)
		})
		// Search the targets last: alive may look each one up.
		if loses && slices.ContainsFunc(stream.Targets, func(target trench.Target) bool {
			return active(target) && !marked[[2]string{stream.Name, target.Name}] && alive(stream.Name, target.Name)
		}) {
			names = append(names, stream.Name)
		}
	}
	slices.Sort(names)
	return names
}

// merge returns next with the held objects of the configuration in force.
func merge(inForce, next *trench.Config, held trench.Held) *trench.Config {
	// Copy before appending: next is judged again after a confirmation.
	config := *next
	config.Attractor.VIPs = slices.Concat(next.Attractor.VIPs, held.VIPs)
	config.Attractor.Policies = slices.Concat(next.Attractor.Policies,
		keepPolicies(inForce.Attractor.Policies, next.Attractor.Policies, vip.NewSet(held.VIPs...)))
	config.Attractor.Gateways = slices.Clone(next.Attractor.Gateways)
	for _, gateway := range inForce.Attractor.Gateways {
		if slices.Contains(held.Gateways, gateway.Name) {
			config.Attractor.Gateways = append(config.Attractor.Gateways, gateway)
		}
	}
	config.Streams = slices.Clone(next.Streams)
	index := make(map[string]int, len(config.Streams))
	for i, stream := range config.Streams {
		index[stream.Name] = i
	}
	stays, serves, keeps := vip.NewSet(next.Attractor.VIPs...), served(next), vip.NewSet(held.VIPs...)
	for _, stream := range inForce.Streams {
		lost := slices.Contains(held.Streams, stream.Name)
		// A held VIP keeps its streams, and a stream that would lose all targets its VIPs.
		vips := slices.DeleteFunc(slices.Clone(stream.VIPs), func(prefix vip.VIP) bool {
			return !keeps.Has(prefix) && !(lost && stays.Has(prefix) && !serves.Has(prefix))
		})
		if len(vips) == 0 {
			continue
		}
		at, known := index[stream.Name]
		if !known {
			stream.VIPs = vips
			config.Streams = append(config.Streams, stream)
			continue
		}
		config.Streams[at] = extend(config.Streams[at], stream, vips)
	}
	return &config
}

// keepPolicies returns the policies that kept VIPs have, without other VIPs. It clears keeps.
func keepPolicies(inForce, next []trench.Policy, keeps vip.Set) (policies []trench.Policy) {
	isRest := func(policy trench.Policy) bool { return len(policy.VIPs) == 0 }
	var rest trench.Policy
	for _, policy := range inForce {
		if isRest(policy) {
			rest = policy
			continue
		}
		policy.VIPs = slices.DeleteFunc(slices.Clone(policy.VIPs), func(prefix vip.VIP) bool { return !keeps.Has(prefix) })
		for _, prefix := range policy.VIPs {
			delete(keeps, prefix)
		}
		policies = append(policies, policy)
	}
	rest.VIPs = keeps.Sorted()
	// Without a policy for the rest, no policy is as good.
	if slices.ContainsFunc(slices.Concat(inForce, next), isRest) {
		policies = append(policies, rest)
	}
	return slices.DeleteFunc(policies, isRest)
}

// extend returns a stream with VIPs of its predecessor and, unless it has active targets of its
// own, the predecessor's targets.
func extend(stream, before trench.Stream, vips []vip.VIP) trench.Stream {
	own := vip.NewSet(stream.VIPs...)
	stream.VIPs = slices.Concat(stream.VIPs, slices.DeleteFunc(vips, own.Has))
	if slices.ContainsFunc(stream.Targets, active) {
		return stream
	}
	listed := stream.Targets
	stream.Targets = slices.Clone(listed)
	for _, target := range before.Targets {
		same := func(other trench.Target) bool { return other.Name == target.Name }
		if active(target) && !slices.ContainsFunc(listed, same) {
			stream.Targets = append(stream.Targets, target)
		}
	}
	// Targets need a check, which a stream without targets may lack.
	if stream.Check == (trench.Check{}) {
		stream.Check = before.Check
	}
	return stream
}
