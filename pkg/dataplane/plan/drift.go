package plan

import (
	"fmt"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Drift is one object in the kernel that another process removed or changed.
type Drift struct {
	// Object names the object as an operator's tools list it, such as "rule fwmark 5003 (IPv4)".
	Object string
	// Stream and Target own the object; Target is empty for objects of the stream.
	Stream, Target string
	// Detail describes the difference.
	Detail string
	Since  time.Time
}

// Key identifies the drift.
func (drift Drift) Key() [3]string { return [3]string{drift.Object, drift.Stream, drift.Target} }

const missing = "it is missing"

// Forwards reports whether the kernel marks packets of a family for a target and routes them to it.
func Forwards(target InstalledTarget, kernel *KernelTarget, family vip.Family) bool {
	hop := target.IPs[family]
	return kernel != nil && kernel.ChainIntact && kernel.Stream == target.Stream && kernel.Name == target.Name &&
		hop.IsValid() &&
		kernel.Rules[family] && kernel.NextHops[family] == hop && (kernel.Flows[family] || !target.Flows[family])
}

// SameRoutes compares rules and routes.
func SameRoutes(a, b KernelTarget) bool {
	return a.Rules == b.Rules && a.NextHops == b.NextHops && a.Blackhole == b.Blackhole
}

// SameNFTables compares the nftables objects of a target.
func SameNFTables(a, b KernelTarget) bool {
	return a.ChainIntact == b.ChainIntact && a.Label == b.Label && a.Flows == b.Flows
}

// TargetDrift compares a target with the kernel. lost excludes routes that it removed with a link.
func TargetDrift(target InstalledTarget, kernel *KernelTarget, lost bool) (list []Drift) {
	add := func(object, format string, args ...any) {
		list = append(list, Drift{
			Object: object, Stream: target.Stream, Target: target.Name,
			Detail: fmt.Sprintf(format, args...),
		})
	}
	// A missing target has every difference, so that each object is listed.
	if kernel == nil {
		kernel = &KernelTarget{}
	}
	want := target.Kernel()
	chain := "chain " + TargetChain(target.FWMark)
	switch {
	case !kernel.ChainIntact:
		add(chain, "the chain or its rule is missing")
	case kernel.Label != want.Label:
		add(chain, "its comment is %q instead of %q", kernel.Label, want.Label)
	}
	for _, family := range vip.Families {
		element := fmt.Sprintf("element %d of map %s", target.FWMark, LiveMap(family, target.Stream))
		switch {
		case want.Flows[family] && !kernel.Flows[family]:
			add(element, missing)
		case !want.Flows[family] && kernel.Flows[family]:
			add(element, "it is there although the target is to get no flows")
		}
		if want.Rules[family] && !kernel.Rules[family] {
			add(RuleName(target.FWMark, family), missing)
		}
		// A link that went down took the routes with it; they return with the link.
		if lost || !want.Rules[family] {
			continue
		}
		switch route := RouteName(target.FWMark, want.NextHops[family], family); {
		case !kernel.NextHops[family].IsValid():
			add(route, missing)
		case kernel.NextHops[family] != want.NextHops[family]:
			add(route, "the table leads to %s", kernel.NextHops[family])
		}
		if !kernel.Blackhole[family] {
			add(BlackholeName(target.FWMark, family), missing)
		}
	}
	return list
}

// StreamFault is the difference between the installed stream and the kernel.
type StreamFault struct {
	Drift []Drift
	// Problems holds the reason, by family, why packets are not forwarded; "" if they are.
	Problems [len(vip.Families)]string
	// Broken: chain, maps or entries are missing. ChainMissing: the chain does not exist.
	Broken, ChainMissing bool
}

// StreamDrift compares one stream as observed, a, with its expected kernel state, want.
func StreamDrift(s InstalledStream, want, a *KernelStream, vips map[vip.VIP]string) (fault StreamFault) {
	add := func(object, format string, args ...any) string {
		drift := Drift{Object: object, Stream: s.Name, Detail: fmt.Sprintf(format, args...)}
		fault.Drift = append(fault.Drift, drift)
		return object + ": " + drift.Detail
	}
	if a == nil {
		a = &KernelStream{}
		fault.ChainMissing = true
	}
	// With another size or seed the chain looks up entries that the maps do not have.
	if !a.ChainIntact || a.Size != want.Size || a.Seed != want.Seed {
		text := add("chain "+StreamChain(s.Name), "the chain or rules of it are missing or changed")
		fault.Broken = true
		// One chain looks up the maps of both families.
		for _, f := range want.Families() {
			fault.Problems[f] = text
		}
	}
	for _, family := range want.Families() {
		object, absent, changed := "map "+MaglevMap(family, s.Name), 0, 0
		// A missing entry drops packets. A foreign entry only moves flows, so it is drift, but no fault.
		switch {
		case a.Tables[family] == nil:
			fault.Problems[family] = add(object, missing)
		case len(a.Tables[family]) != len(want.Tables[family]):
			fault.Problems[family] = add(object, "it is for %d entries instead of %d", len(a.Tables[family]),
				len(want.Tables[family]))
		default:
			for i, number := range want.Tables[family] {
				switch actual := a.Tables[family][i]; {
				case actual == number:
				case actual == 0:
					absent++
				default:
					changed++
				}
			}
			if absent > 0 {
				fault.Problems[family] = add(object, "%d of %d entries are missing", absent, len(want.Tables[family]))
			}
			if changed > 0 {
				add(object, "%d of %d entries lead to other targets", changed, len(want.Tables[family]))
			}
		}
		fault.Broken = fault.Broken || fault.Problems[family] != ""
	}
	if !SameMatch(a.Match, want.Match) {
		matchDrift(&fault, add, want, a)
	}
	// A missing element is drift of the stream, but the other VIPs are still forwarded.
	for _, v := range s.VIPs {
		element := "element " + v.String() + " of map " + VIPMap(v)
		switch by := vips[v]; by {
		case s.Name:
		case "":
			add(element, missing)
		default:
			add(element, "it leads to stream %s", by)
		}
	}
	return fault
}

// matchDrift compares the port set of a stream. A missing port is a fault: its packets are dropped.
func matchDrift(fault *StreamFault, add func(object, format string, args ...any) string, want, stream *KernelStream) {
	object := "set " + MatchSet(want.Name)
	absent, surplus := len(MissingPorts(stream.Match, want.Match)), len(MissingPorts(want.Match, stream.Match))
	text := ""
	switch {
	// Surplus ports are drift, but no fault: the stream's packets still pass.
	case want.Match == nil:
		add(object, "it exists although the stream has no match")
	case stream.Match == nil:
		text = add(object, missing)
	case absent > 0:
		text = add(object, "%d of %d ports are missing", absent, len(want.Match))
	default:
		add(object, "it has %d ports more", surplus)
	}
	if text == "" {
		return
	}
	fault.Broken = true
	for _, f := range want.Families() {
		fault.Problems[f] = text
	}
}
