package dataplane

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// asked is what a target was last asked to be. A change is told from drift by it: a
// target that is asked for the same as before is left as somebody else made it.
type asked struct {
	ips   []netip.Addr
	roles [len(vip.Families)]Role
}

// recall tells what a target was asked to be before the start.
func recall(t installedTarget, s *installedStream) asked {
	a := asked{ips: t.IPs}
	for _, f := range vip.Families {
		switch {
		case !t.Flows[f]:
			a.roles[f] = Down
		case s != nil && contains(s.Tables[f], t.Name):
			a.roles[f] = Serving
		default:
			a.roles[f] = Draining
		}
	}
	return a
}

// next is what a target is asked to be now. An Unknown role stays as it was.
func (a asked) next(t Target, recorded bool) asked {
	n := asked{ips: t.IPs}
	for _, f := range vip.Families {
		switch {
		case !addressOf(t.IPs, f).IsValid():
			n.roles[f] = Down
		case t.Roles[f] != Unknown:
			n.roles[f] = t.Roles[f]
		case recorded:
			n.roles[f] = a.roles[f]
		default:
			n.roles[f] = Down
		}
	}
	return n
}

// differs tells whether somebody asks for something else than before.
func (a asked) differs(n asked) bool {
	return !sameAddresses(a.ips, n.ips) || a.roles != n.roles
}

// view is all that the plan for one stream depends on.
type view struct {
	name string
	// wanted is nil for a stream that is to go.
	wanted *Stream
	// owned are those of its VIPs that it serves and that need an element, in the
	// order of vip.Compare.
	owned []vip.VIP
	// installed is nil for a stream that is not installed.
	installed *installedStream
	targets   map[string]installedTarget
	before    map[string]asked
	// slots are what the kernel has of these targets.
	slots map[uint32]*slotContent
	// broken says that somebody removed chain, maps or entries of the stream, and bare
	// that there is no chain.
	broken, bare bool
	// dead tells whether an address cannot be reached, for now.
	dead func(netip.Addr) bool
	// lost tells of a number that the kernel itself removed its routes, with a link
	// that is up again.
	lost func(uint32) bool
	// repair: what another process changed is restored.
	repair bool
	now    time.Time
	// number returns the number for a target that has none.
	number func(name string) (uint32, error)
}

// streamPlan is what is to become of one stream.
type streamPlan struct {
	name string
	// remove: the stream goes, and all its targets are in gone.
	remove bool
	// stream is what is to be written down of it, at the end. write: its chain and
	// maps are compared with the kernel and brought there.
	stream installedStream
	write  bool
	// forced: something else is wanted of the stream than before, which restores what
	// another process changed of it.
	forced bool
	// targets are those that stay, by name; apply says whose rules, routes and
	// elements are compared with the kernel and brought there.
	targets map[string]installedTarget
	apply   map[uint32]bool
	gone    []installedTarget
	asked   map[string]asked
	// problems are those of this stream's targets.
	problems []Problem
}

// planStream computes, from what is written down, what is wanted, and what the
// kernel has, what is to be done. It is pure, but for number.
func planStream(v view) streamPlan {
	p := streamPlan{name: v.name, targets: map[string]installedTarget{}, apply: map[uint32]bool{}, asked: map[string]asked{}}
	if v.wanted == nil {
		p.remove = true
		p.gone = sortedTargets(v.targets)
		return p
	}
	w := v.wanted
	p.stream = installedStream{Name: v.name, VIPs: v.owned, Size: w.Size, Seed: w.Seed, Stage: stageApplied}
	forced := v.repair || v.installed == nil || v.installed.Stage != stageApplied ||
		v.installed.Size != w.Size || v.installed.Seed != w.Seed || !slices.Equal(v.installed.VIPs, v.owned)

	// Who changes comes first: a stream whose chain is gone is made anew with all
	// its targets, but only if something else is wanted of it.
	changed := map[string]bool{}
	for _, t := range w.Targets {
		old, recorded := v.targets[t.Name]
		before, known := v.before[t.Name]
		if !known && recorded {
			before = recall(old, v.installed)
		}
		next := before.next(t, recorded)
		p.asked[t.Name] = next
		if !recorded && !slices.Contains(next.roles[:], Serving) {
			continue
		}
		changed[t.Name] = !recorded || v.repair || old.Stage != stageApplied || before.differs(next) || v.lost(old.Number)
		forced = forced || changed[t.Name] && !(recorded && v.lost(old.Number))
	}
	for name, old := range v.targets {
		if _, ok := p.asked[name]; ok {
			continue
		}
		drained, stays := leave(v, old)
		if !stays {
			p.gone = append(p.gone, old)
			forced = forced || served(v.installed, name)
			continue
		}
		forced = forced || !drained.DrainEnd.Equal(old.DrainEnd)
		drained.Stage = stageApplied
		p.targets[name] = drained
		p.apply[old.Number] = old.Stage != stageApplied || v.repair || v.lost(old.Number) || !sameTarget(drained, old)
	}
	slices.SortFunc(p.gone, func(a, b installedTarget) int { return cmp.Compare(a.Number, b.Number) })

	var tables [len(vip.Families)][]string
	for _, t := range w.Targets {
		change, ok := changed[t.Name]
		if !ok {
			continue
		}
		old, recorded := v.targets[t.Name]
		if !recorded {
			number, err := v.number(t.Name)
			if err != nil {
				p.problems = append(p.problems, Problem{Object: "target " + v.name + "/" + t.Name, Detail: err.Error()})
				continue
			}
			old.Number = number
		}
		next := p.asked[t.Name]
		r := installedTarget{Number: old.Number, Stream: v.name, Name: t.Name, IPs: t.IPs, Stage: stageApplied}
		redo := change || forced && v.bare
		slot := v.slots[old.Number]
		for _, f := range vip.Families {
			a := addressOf(t.IPs, f)
			r.Flows[f] = next.roles[f] >= Draining
			stands := redo || slotStands(old, slot, f)
			if next.roles[f] == Serving && stands && !v.dead(a) {
				tables[f] = append(tables[f], t.Name)
			}
		}
		p.targets[t.Name] = r
		p.apply[r.Number] = redo || !sameTarget(r, old)
	}
	for _, f := range vip.Families {
		if hasFamily(v.owned, f) {
			slices.Sort(tables[f])
			p.stream.Tables[f] = tables[f]
		}
	}
	p.forced = forced
	p.write = forced || !v.broken && !sameTables(p.stream.Tables, v.installed.Tables)
	if !p.write {
		p.stream.Tables = v.installed.Tables
	}
	return p
}

// leave tells what becomes of a target that is left out, and whether it stays for
// now: one that served keeps its flows for the stream's drain time, any other has
// had its time.
func leave(v view, t installedTarget) (installedTarget, bool) {
	switch {
	case t.Stage == stageRemoving:
		return t, false
	case !t.DrainEnd.IsZero():
		return t, v.now.Before(t.DrainEnd)
	case served(v.installed, t.Name) && v.wanted.DrainTime > 0:
		t.DrainEnd, t.Drain = v.now.Add(v.wanted.DrainTime), v.wanted.DrainTime
		return t, true
	}
	return t, false
}

// idle reports whether a plan leaves everything as it is.
func (p *streamPlan) idle(v view) bool {
	if p.remove || len(p.gone) > 0 || p.write || v.installed == nil || !sameStream(p.stream, *v.installed) {
		return false
	}
	for name, t := range p.targets {
		if p.apply[t.Number] || !sameTarget(t, v.targets[name]) {
			return false
		}
	}
	return true
}

// drop takes a target out of a table, since its rule and routes do not lead to it.
func (p *streamPlan) drop(name string, f vip.Family) {
	p.stream.Tables[f] = slices.DeleteFunc(slices.Clone(p.stream.Tables[f]), func(s string) bool { return s == name })
}

func served(s *installedStream, name string) bool {
	return s != nil && slices.ContainsFunc(s.Tables[:], func(names []string) bool { return contains(names, name) })
}

// contains looks a name up in sorted ones.
func contains(sorted []string, name string) bool {
	_, ok := slices.BinarySearch(sorted, name)
	return ok
}

func sortedTargets(m map[string]installedTarget) []installedTarget {
	return slices.SortedFunc(maps.Values(m), func(a, b installedTarget) int { return cmp.Compare(a.Number, b.Number) })
}

// addressOf returns the address of a family, the zero Addr if there is none.
func addressOf(ips []netip.Addr, f vip.Family) netip.Addr {
	for _, a := range ips {
		if vip.FamilyOf(a) == f {
			return a.Unmap()
		}
	}
	return netip.Addr{}
}

// sameAddresses compares next hops; their order does not count.
func sameAddresses(a, b []netip.Addr) bool {
	for _, f := range vip.Families {
		if addressOf(a, f) != addressOf(b, f) {
			return false
		}
	}
	return true
}

// sameTarget compares all but the stage.
func sameTarget(a, b installedTarget) bool {
	return a.Number == b.Number && a.Stream == b.Stream && a.Name == b.Name && a.Flows == b.Flows &&
		a.DrainEnd.Equal(b.DrainEnd) && sameAddresses(a.IPs, b.IPs)
}

// sameStream compares all but the stage.
func sameStream(a, b installedStream) bool {
	return a.Name == b.Name && slices.Equal(a.VIPs, b.VIPs) && a.Size == b.Size && a.Seed == b.Seed &&
		sameTables(a.Tables, b.Tables)
}

func sameTables(a, b [len(vip.Families)][]string) bool {
	for _, f := range vip.Families {
		if !slices.Equal(a[f], b[f]) {
			return false
		}
	}
	return true
}

func hasFamily(vips []vip.VIP, f vip.Family) bool {
	return slices.ContainsFunc(vips, func(v vip.VIP) bool { return v.Family() == f })
}

// share is who serves which VIP.
type share struct {
	// owned are by stream, in the order of vip.Compare: those that need an element.
	owned map[string][]vip.VIP
	// within are VIPs that a wider one of the same stream covers: intervals of one
	// map must not overlap. The value is the wider one.
	within   map[vip.VIP]vip.VIP
	problems []Problem
}

// shareOut gives each VIP to the stream whose name sorts first, unless it is an
// address of this network namespace: such packets never get to our rules.
func shareOut(streams map[string]*Stream, local map[netip.Addr]struct{}) share {
	s := share{owned: make(map[string][]vip.VIP, len(streams)), within: map[vip.VIP]vip.VIP{}}
	owner := map[vip.VIP]string{}
	var wide []vip.VIP // owned ones that are wider than a host
	for _, name := range slices.Sorted(maps.Keys(streams)) {
		vips := slices.Clone(streams[name].VIPs)
		slices.SortFunc(vips, func(a, b vip.VIP) int {
			return cmp.Or(cmp.Compare(a.Prefix().Bits(), b.Prefix().Bits()), vip.Compare(a, b))
		})
		for _, v := range slices.Compact(vips) {
			if a, ok := localIn(v, local); ok {
				s.problems = append(s.problems, Problem{
					Object: "VIP " + v.String(), Detail: fmt.Sprintf("%s is an address of this network namespace: its packets are delivered here before any rule of the data plane", a),
					Remedy: fmt.Sprintf("ip address del %s dev DEVICE, or take the VIP out of stream %s", netip.PrefixFrom(a, a.BitLen()), name), VIPs: []vip.VIP{v},
				})
				continue
			}
			other, by := overlap(v, owner, wide)
			switch {
			case by == "":
				owner[v] = name
				if !v.Prefix().IsSingleIP() {
					wide = append(wide, v)
				}
				s.owned[name] = append(s.owned[name], v)
			case by == name && !v.Prefix().IsSingleIP():
				s.within[v] = other
			case by == name:
				owner[v] = name
				s.owned[name] = append(s.owned[name], v)
			default:
				s.problems = append(s.problems, Problem{
					Object: "VIP " + v.String(), Detail: fmt.Sprintf("stream %s wants it, but stream %s serves %s", name, by, other),
					Remedy: fmt.Sprintf("take it out of one of the streams %s and %s", by, name), VIPs: []vip.VIP{v},
				})
			}
		}
		slices.SortFunc(s.owned[name], vip.Compare)
	}
	return s
}

// bound leaves out the VIPs of one address that are more than a map holds, and rather
// new ones than those in the kernel.
func (s *share) bound(installed map[vip.VIP]string) {
	var hosts [len(vip.Families)][]vip.VIP
	for _, vips := range s.owned {
		for _, v := range vips {
			if v.Prefix().IsSingleIP() {
				hosts[v.Family()] = append(hosts[v.Family()], v)
			}
		}
	}
	for f, vips := range hosts {
		if len(vips) <= mapSize {
			continue
		}
		slices.SortFunc(vips, func(a, b vip.VIP) int {
			_, hasA := installed[a]
			_, hasB := installed[b]
			switch {
			case hasA == hasB:
				return vip.Compare(a, b)
			case hasA:
				return -1
			}
			return 1
		})
		surplus := vip.NewSet(vips[mapSize:]...)
		s.problems = append(s.problems, Problem{
			Object: "map inet " + TableName + " " + hostMaps[f], Detail: fmt.Sprintf("%s holds %d VIPs of one address, and streams have %d", hostMaps[f], mapSize, len(vips)),
			Remedy: "serve wider prefixes, or fewer VIPs", VIPs: vips[mapSize:],
		})
		for name, owned := range s.owned {
			s.owned[name] = slices.DeleteFunc(owned, surplus.Has)
		}
	}
}

// overlap finds an owned VIP that shares an address with v, one of another stream
// rather than one of the same.
func overlap(v vip.VIP, owner map[vip.VIP]string, wide []vip.VIP) (vip.VIP, string) {
	if by, ok := owner[v]; ok {
		return v, by
	}
	for _, w := range wide {
		if w.Overlaps(v) {
			return w, owner[w]
		}
	}
	first := vip.VIP{}
	if !v.Prefix().IsSingleIP() {
		for w := range owner {
			if w.Overlaps(v) && (first.IsZero() || vip.Compare(w, first) < 0) {
				first = w
			}
		}
	}
	return first, owner[first]
}

func localIn(v vip.VIP, local map[netip.Addr]struct{}) (netip.Addr, bool) {
	if v.Prefix().IsSingleIP() {
		_, ok := local[v.Prefix().Addr()]
		return v.Prefix().Addr(), ok
	}
	first := netip.Addr{}
	for a := range local {
		if v.Prefix().Contains(a) && (!first.IsValid() || a.Less(first)) {
			first = a
		}
	}
	return first, first.IsValid()
}
