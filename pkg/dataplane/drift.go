package dataplane

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// slotStands tells whether packets with the target's mark get the mark and, for one
// family, go to it. A family without an address has nothing to stand.
func slotStands(t installedTarget, a *slotContent, f vip.Family) bool {
	hop := addressOf(t.IPs, f)
	if a == nil || !a.chain || a.stream != t.Stream || a.name != t.Name || !hop.IsValid() {
		return false
	}
	return a.rules[f] && a.hops[f] == hop && (a.flows[f] || !t.Flows[f])
}

// slotWant is what the kernel has of a target when all is as written down.
func slotWant(t installedTarget) slotContent {
	s := slotContent{number: t.Number, label: t.label(), chain: true, flows: t.Flows}
	for _, f := range vip.Families {
		s.hops[f] = addressOf(t.IPs, f)
		s.rules[f] = s.hops[f].IsValid()
		s.blackhole[f] = s.rules[f]
	}
	return s
}

// sameWays compares rules and routes.
func sameWays(a, b slotContent) bool {
	return a.rules == b.rules && a.hops == b.hops && a.blackhole == b.blackhole
}

// sameElements compares what nftables has of a target.
func sameElements(a, b slotContent) bool {
	return a.chain == b.chain && a.label == b.label && a.flows == b.flows
}

// slotDrift compares one target with the kernel. For routes of links that are not
// up ask lost first: nobody removed those by hand.
func slotDrift(t installedTarget, a *slotContent, lost bool) (list []Drift) {
	add := func(object, format string, args ...any) {
		list = append(list, Drift{Object: object, Stream: t.Stream, Target: t.Name, Detail: fmt.Sprintf(format, args...)})
	}
	if a == nil {
		a = &slotContent{}
	}
	want := slotWant(t)
	chain := "chain " + targetChain(t.Number)
	switch {
	case !a.chain:
		add(chain, "the chain or its rule is missing")
	case a.label != want.label:
		add(chain, "its comment is %q instead of %q", a.label, want.label)
	}
	for _, f := range vip.Families {
		element := fmt.Sprintf("element %d of map %s", t.Number, liveMap(f, t.Stream))
		switch {
		case want.flows[f] && !a.flows[f]:
			add(element, "it is missing")
		case !want.flows[f] && a.flows[f]:
			add(element, "it is there although the target is to get no flows")
		}
		rule := fmt.Sprintf("rule fwmark %d lookup %d (%s)", t.Number, t.Number, familyName(f))
		route := fmt.Sprintf("route default via %s table %d (%s)", want.hops[f], t.Number, familyName(f))
		if want.rules[f] && !a.rules[f] {
			add(rule, "it is missing")
		}
		if lost || !want.rules[f] {
			continue
		}
		switch {
		case !a.hops[f].IsValid():
			add(route, "it is missing")
		case a.hops[f] != want.hops[f]:
			add(route, "the table leads to %s", a.hops[f])
		}
		if !a.blackhole[f] {
			add(fmt.Sprintf("route blackhole default table %d (%s)", t.Number, familyName(f)), "it is missing")
		}
	}
	return list
}

// streamFault is what is wrong with one stream in the kernel.
type streamFault struct {
	drift []Drift
	// problems say by family why packets are not forwarded; "" if they are.
	problems [len(vip.Families)]string
	// broken: chain, maps or entries are missing; bare: there is no chain at all.
	broken, bare bool
}

// streamDrift compares one stream with the kernel. tables are those that follow
// from the record; nil where the stream has none.
func streamDrift(s installedStream, tables [len(vip.Families)][]uint32, a *streamContent, vips map[vip.VIP]string) (x streamFault) {
	add := func(object, format string, args ...any) string {
		d := Drift{Object: object, Stream: s.Name, Detail: fmt.Sprintf(format, args...)}
		x.drift = append(x.drift, d)
		return object + ": " + d.Detail
	}
	if a == nil {
		a = &streamContent{}
		x.bare = true
	}
	if !a.chain || a.size != s.Size || a.seed != s.Seed {
		text := add("chain "+streamChain(s.Name), "the chain or rules of it are missing or changed")
		x.broken = true
		for _, f := range vip.Families {
			if tables[f] != nil {
				x.problems[f] = text
			}
		}
	}
	for _, f := range vip.Families {
		object := "map " + maglevMap(f, s.Name)
		switch {
		case tables[f] == nil:
			continue
		case a.tables[f] == nil:
			x.broken = true
			x.problems[f] = add(object, "it is missing")
			continue
		case len(a.tables[f]) != len(tables[f]):
			x.broken = true
			x.problems[f] = add(object, "it is for %d entries instead of %d", len(a.tables[f]), len(tables[f]))
			continue
		}
		missing, changed := 0, 0
		for i, number := range tables[f] {
			switch actual := a.tables[f][i]; {
			case actual == number:
			case actual == 0:
				missing++
			default:
				changed++
			}
		}
		if missing > 0 {
			x.broken = true
			x.problems[f] = add(object, "%d of %d entries are missing", missing, len(tables[f]))
		}
		if changed > 0 {
			add(object, "%d of %d entries lead to other targets", changed, len(tables[f]))
		}
	}
	for _, v := range s.VIPs {
		switch by := vips[v]; by {
		case s.Name:
		case "":
			add("element "+v.String()+" of map "+vipMap(v), "it is missing")
		default:
			add("element "+v.String()+" of map "+vipMap(v), "it leads to stream %s", by)
		}
	}
	return x
}

// baseDrift is the drift of what no stream owns.
func (e *engine) baseDrift() []Drift {
	switch {
	case e.actual.base || !e.hasApplied():
		return nil
	case e.actual.problem != "":
		return []Drift{{Object: "table inet " + TableName, Detail: e.actual.problem}}
	}
	return []Drift{{Object: fmt.Sprintf("policy rules of priority %d and %d", e.o.Priority, e.o.Priority+2), Detail: "one of them is missing or changed"}}
}

// tableOf divides size entries among the targets of one table; numbers are by name.
func tableOf(names []string, numbers map[string]installedTarget, size, seed uint32) []uint32 {
	table := make([]uint32, size)
	for i, which := range maglev(names, size, seed) {
		table[i] = numbers[names[which]].Number
	}
	return table
}

// tableKey is what a table follows from.
type tableKey struct {
	names      []string
	numbers    []uint32
	size, seed uint32
}

// tableCache keeps the last table of one stream and family.
type tableCache struct {
	key   tableKey
	table []uint32
}

func (c *tableCache) of(names []string, targets map[string]installedTarget, size, seed uint32) []uint32 {
	k := tableKey{names: names, size: size, seed: seed}
	for _, n := range names {
		k.numbers = append(k.numbers, targets[n].Number)
	}
	if c.table == nil || k.size != c.key.size || k.seed != c.key.seed || !slices.Equal(k.names, c.key.names) || !slices.Equal(k.numbers, c.key.numbers) {
		c.key, c.table = k, tableOf(names, targets, size, seed)
	}
	return c.table
}

func familyName(f vip.Family) string {
	if f == vip.IPv4 {
		return "IPv4"
	}
	return "IPv6"
}

func vipMap(v vip.VIP) string {
	if v.Prefix().IsSingleIP() {
		return hostMaps[v.Family()]
	}
	return netMaps[v.Family()]
}

// reason tells why an address cannot be reached; "" if nothing is known against it.
func (s *surroundings) reason(a netip.Addr) string {
	if _, ok := s.failed[a]; ok {
		return "the neighbour does not answer (NUD_FAILED)"
	}
	l, ok := s.leadsTo(a)
	switch {
	case !ok:
		return "it is on no connected network"
	case !l.up:
		return fmt.Sprintf("link %s is down", l.name)
	}
	return ""
}

// driftKey tells drifts apart.
type driftKey struct{ object, stream, target string }

func (d Drift) key() driftKey { return driftKey{d.Object, d.Stream, d.Target} }

// without returns the drifts of a that are not in b.
func without(a, b []Drift) []Drift {
	in := make(map[driftKey]bool, len(b))
	for _, d := range b {
		in[d.key()] = true
	}
	return slices.DeleteFunc(slices.Clone(a), func(d Drift) bool { return in[d.key()] })
}
