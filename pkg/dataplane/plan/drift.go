package plan

import (
	"fmt"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Forwards reports whether the kernel marks packets for a target and routes them to it in
// one family; false for a family without an address.
func Forwards(t InstalledTarget, a *KernelTarget, f vip.Family) bool {
	hop := AddressOf(t.IPs, f)
	if a == nil || !a.ChainIntact || a.Stream != t.Stream || a.Name != t.Name || !hop.IsValid() {
		return false
	}
	return a.Rules[f] && a.NextHops[f] == hop && (a.Flows[f] || !t.Flows[f])
}

// KernelTargetOf returns what the kernel must have of an installed target.
func KernelTargetOf(t InstalledTarget) KernelTarget {
	s := KernelTarget{FWMark: t.FWMark, Label: t.Label(), ChainIntact: true, Flows: t.Flows}
	for _, f := range vip.Families {
		s.NextHops[f] = AddressOf(t.IPs, f)
		s.Rules[f] = s.NextHops[f].IsValid()
		s.Blackhole[f] = s.Rules[f]
	}
	return s
}

// SameRoutes compares rules and routes.
func SameRoutes(a, b KernelTarget) bool {
	return a.Rules == b.Rules && a.NextHops == b.NextHops && a.Blackhole == b.Blackhole
}

// SameNFTables compares what nftables has of a target.
func SameNFTables(a, b KernelTarget) bool {
	return a.ChainIntact == b.ChainIntact && a.Label == b.Label && a.Flows == b.Flows
}

// TargetDrift compares one target with the kernel. With lost the kernel removed its routes
// together with a link, which is no drift.
func TargetDrift(t InstalledTarget, a *KernelTarget, lost bool) (list []Drift) {
	add := func(object, format string, args ...any) {
		list = append(list, Drift{Object: object, Stream: t.Stream, Target: t.Name, Detail: fmt.Sprintf(format, args...)})
	}
	if a == nil {
		a = &KernelTarget{}
	}
	want := KernelTargetOf(t)
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
			add(element, "it is missing")
		case !want.Flows[f] && a.Flows[f]:
			add(element, "it is there although the target is to get no flows")
		}
		rule := fmt.Sprintf("rule fwmark %d lookup %d (%s)", t.FWMark, t.FWMark, FamilyName(f))
		route := fmt.Sprintf("route default via %s table %d (%s)", want.NextHops[f], t.FWMark, FamilyName(f))
		if want.Rules[f] && !a.Rules[f] {
			add(rule, "it is missing")
		}
		if lost || !want.Rules[f] {
			continue
		}
		switch {
		case !a.NextHops[f].IsValid():
			add(route, "it is missing")
		case a.NextHops[f] != want.NextHops[f]:
			add(route, "the table leads to %s", a.NextHops[f])
		}
		if !a.Blackhole[f] {
			add(fmt.Sprintf("route blackhole default table %d (%s)", t.FWMark, FamilyName(f)), "it is missing")
		}
	}
	return list
}

// StreamFault is what is wrong with one stream in the kernel.
type StreamFault struct {
	Drift []Drift
	// Problems say by family why packets are not forwarded; "" if they are.
	Problems [len(vip.Families)]string
	// Broken: chain, maps or entries are missing; bare: there is no chain at all.
	Broken, ChainMissing bool
}

// StreamDrift compares one stream with the kernel. tables are those that follow
// from the record; nil where the stream has none.
func StreamDrift(s InstalledStream, tables [len(vip.Families)][]uint32, a *KernelStream, vips map[vip.VIP]string) (x StreamFault) {
	add := func(object, format string, args ...any) string {
		d := Drift{Object: object, Stream: s.Name, Detail: fmt.Sprintf(format, args...)}
		x.Drift = append(x.Drift, d)
		return object + ": " + d.Detail
	}
	if a == nil {
		a = &KernelStream{}
		x.ChainMissing = true
	}
	if !a.ChainIntact || a.Size != s.Size || a.Seed != s.Seed {
		text := add("chain "+StreamChain(s.Name), "the chain or rules of it are missing or changed")
		x.Broken = true
		for _, f := range vip.Families {
			if tables[f] != nil {
				x.Problems[f] = text
			}
		}
	}
	for _, f := range vip.Families {
		object := "map " + MaglevMap(f, s.Name)
		switch {
		case tables[f] == nil:
			continue
		case a.Tables[f] == nil:
			x.Broken = true
			x.Problems[f] = add(object, "it is missing")
			continue
		case len(a.Tables[f]) != len(tables[f]):
			x.Broken = true
			x.Problems[f] = add(object, "it is for %d entries instead of %d", len(a.Tables[f]), len(tables[f]))
			continue
		}
		missing, changed := 0, 0
		for i, number := range tables[f] {
			switch actual := a.Tables[f][i]; {
			case actual == number:
			case actual == 0:
				missing++
			default:
				changed++
			}
		}
		if missing > 0 {
			x.Broken = true
			x.Problems[f] = add(object, "%d of %d entries are missing", missing, len(tables[f]))
		}
		if changed > 0 {
			add(object, "%d of %d entries lead to other targets", changed, len(tables[f]))
		}
	}
	for _, v := range s.VIPs {
		switch by := vips[v]; by {
		case s.Name:
		case "":
			add("element "+v.String()+" of map "+VIPMap(v), "it is missing")
		default:
			add("element "+v.String()+" of map "+VIPMap(v), "it leads to stream %s", by)
		}
	}
	return x
}

// DriftKey tells drifts apart.
type DriftKey struct{ object, stream, target string }

func (d Drift) Key() DriftKey { return DriftKey{d.Object, d.Stream, d.Target} }
