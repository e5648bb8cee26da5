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
func (d Drift) Key() [3]string { return [3]string{d.Object, d.Stream, d.Target} }

const missing = "it is missing"

// Forwards reports whether the kernel marks packets of a family for a target and routes them to
// it.
func Forwards(t InstalledTarget, a *KernelTarget, f vip.Family) bool {
	hop := t.IPs[f]
	return a != nil && a.ChainIntact && a.Stream == t.Stream && a.Name == t.Name && hop.IsValid() &&
		a.Rules[f] && a.NextHops[f] == hop && (a.Flows[f] || !t.Flows[f])
}

// SameRoutes compares rules and routes.
func SameRoutes(a, b KernelTarget) bool {
	return a.Rules == b.Rules && a.NextHops == b.NextHops && a.Blackhole == b.Blackhole
}

// SameNFTables compares the nftables objects of a target.
func SameNFTables(a, b KernelTarget) bool {
	return a.ChainIntact == b.ChainIntact && a.Label == b.Label && a.Flows == b.Flows
}

// TargetDrift compares one target with the kernel. lost excludes routes, which the kernel removed
// with a link.
func TargetDrift(t InstalledTarget, a *KernelTarget, lost bool) (list []Drift) {
	add := func(object, format string, args ...any) {
		list = append(list, Drift{Object: object, Stream: t.Stream, Target: t.Name, Detail: fmt.Sprintf(format, args...)})
	}
	if a == nil {
		a = &KernelTarget{}
	}
	want := t.Kernel()
	chain := "chain " + TargetChain(t.FWMark)
	switch {
	case !a.ChainIntact:
		add(chain, "the chain or its rule is missing")
	case a.Label != want.Label:
		add(chain, "its comment is %q instead of %q", a.Label, want.Label)
	}
	for _, f := range vip.Families {
		element := fmt.Sprintf("element %d of map %s", t.FWMark, LiveMap(f, t.Stream))
		switch {
		case want.Flows[f] && !a.Flows[f]:
			add(element, missing)
		case !want.Flows[f] && a.Flows[f]:
			add(element, "it is there although the target is to get no flows")
		}
		if want.Rules[f] && !a.Rules[f] {
			add(RuleName(t.FWMark, f), missing)
		}
		if lost || !want.Rules[f] {
			continue
		}
		switch route := RouteName(t.FWMark, want.NextHops[f], f); {
		case !a.NextHops[f].IsValid():
			add(route, missing)
		case a.NextHops[f] != want.NextHops[f]:
			add(route, "the table leads to %s", a.NextHops[f])
		}
		if !a.Blackhole[f] {
			add(BlackholeName(t.FWMark, f), missing)
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
func StreamDrift(s InstalledStream, want, a *KernelStream, vips map[vip.VIP]string) (x StreamFault) {
	add := func(object, format string, args ...any) string {
		d := Drift{Object: object, Stream: s.Name, Detail: fmt.Sprintf(format, args...)}
		x.Drift = append(x.Drift, d)
		return object + ": " + d.Detail
	}
	if a == nil {
		a = &KernelStream{}
		x.ChainMissing = true
	}
	if !a.ChainIntact || a.Size != want.Size || a.Seed != want.Seed {
		text := add("chain "+StreamChain(s.Name), "the chain or rules of it are missing or changed")
		x.Broken = true
		for _, f := range want.Families() {
			x.Problems[f] = text
		}
	}
	for _, f := range want.Families() {
		object, absent, changed := "map "+MaglevMap(f, s.Name), 0, 0
		switch {
		case a.Tables[f] == nil:
			x.Problems[f] = add(object, missing)
		case len(a.Tables[f]) != len(want.Tables[f]):
			x.Problems[f] = add(object, "it is for %d entries instead of %d", len(a.Tables[f]), len(want.Tables[f]))
		default:
			for i, number := range want.Tables[f] {
				switch actual := a.Tables[f][i]; {
				case actual == number:
				case actual == 0:
					absent++
				default:
					changed++
				}
			}
			if absent > 0 {
				x.Problems[f] = add(object, "%d of %d entries are missing", absent, len(want.Tables[f]))
			}
			if changed > 0 {
				add(object, "%d of %d entries lead to other targets", changed, len(want.Tables[f]))
			}
		}
		x.Broken = x.Broken || x.Problems[f] != ""
	}
	if !SameMatch(a.Match, want.Match) {
		matchDrift(&x, add, want, a)
	}
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
	return x
}

// matchDrift compares the port set of a stream. A missing port is a fault: its packets are
// dropped.
func matchDrift(x *StreamFault, add func(object, format string, args ...any) string, want, a *KernelStream) {
	object := "set " + MatchSet(want.Name)
	absent, surplus := len(MissingPorts(a.Match, want.Match)), len(MissingPorts(want.Match, a.Match))
	text := ""
	switch {
	case want.Match == nil:
		add(object, "it exists although the stream has no match")
	case a.Match == nil:
		text = add(object, missing)
	case absent > 0:
		text = add(object, "%d of %d ports are missing", absent, len(want.Match))
	default:
		add(object, "it has %d ports more", surplus)
	}
	if text == "" {
		return
	}
	x.Broken = true
	for _, f := range want.Families() {
		x.Problems[f] = text
	}
}
