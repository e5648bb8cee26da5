package plan

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Request is the desired state of a target at its last plan. It separates a change from
// drift: a target with an equal request is left as another process changed it.
type Request struct {
	ips   []netip.Addr
	roles [len(vip.Families)]Role
}

// RequestOf derives the last request before the start from the installed state.
func RequestOf(t InstalledTarget, s *InstalledStream) Request {
	a := Request{ips: t.IPs}
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

// next returns the request for a target now. An Unknown role keeps the last one.
func (a Request) next(t Target, recorded bool) Request {
	n := Request{ips: t.IPs}
	for _, f := range vip.Families {
		switch {
		case !AddressOf(t.IPs, f).IsValid():
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

// changed reports whether a request differs from the last one.
func (a Request) changed(n Request) bool {
	return !SameAddresses(a.ips, n.ips) || a.roles != n.roles
}

// StreamInput is everything that the plan of one stream depends on.
type StreamInput struct {
	Name string
	// Desired is nil for a stream to remove.
	Desired *Stream
	// VIPs are the VIPs of the stream that need an element, in the order of
	// vip.Compare (see AssignVIPs).
	VIPs []vip.VIP
	// Installed is nil for a stream that is not installed.
	Installed *InstalledStream
	Targets   map[string]InstalledTarget
	Requests  map[string]Request
	// Observed are the targets in the kernel.
	Observed map[uint32]*KernelTarget
	// Broken reports whether another process removed the chain, maps or entries of the
	// stream, ChainMissing whether the chain does not exist.
	Broken, ChainMissing bool
	// Unreachable reports whether an address cannot be reached at the moment.
	Unreachable func(netip.Addr) bool
	// LinkRestored reports whether the kernel removed the routes of a fwmark with a
	// link that is up again.
	LinkRestored func(uint32) bool
	// Repair also restores what another process changed.
	Repair bool
	Now    time.Time
	// AllocateFWMark returns the fwmark for a new target.
	AllocateFWMark func(name string) (uint32, error)
}

// StreamPlan is the next state of one stream.
type StreamPlan struct {
	Name string
	// Remove: the stream is removed, with the targets in Removed.
	Remove bool
	// Stream is installed when the plan is applied. Write: its chain and maps are
	// compared with the kernel, and differences are written.
	Stream InstalledStream
	Write  bool
	// Forced: the desired state of the stream changed, which also restores what another
	// process changed of it.
	Forced bool
	// Targets are those that stay, by name. Apply has the fwmarks of those whose rules,
	// routes and elements are compared with the kernel and written.
	Targets  map[string]InstalledTarget
	Apply    map[uint32]bool
	Removed  []InstalledTarget
	Requests map[string]Request
	// Problems are those of this stream's targets.
	Problems []Problem
}

// ForStream plans one stream from its installed, desired and observed state. Its only side
// effect is that of AllocateFWMark.
func ForStream(v StreamInput) StreamPlan {
	p := StreamPlan{Name: v.Name, Targets: map[string]InstalledTarget{}, Apply: map[uint32]bool{}, Requests: map[string]Request{}}
	if v.Desired == nil {
		p.Remove = true
		p.Removed = SortedTargets(v.Targets)
		return p
	}
	w := v.Desired
	p.Stream = InstalledStream{Name: v.Name, VIPs: v.VIPs, Size: w.Size, Seed: w.Seed, Stage: StageApplied}
	forced := v.Repair || v.Installed == nil || v.Installed.Stage != StageApplied ||
		v.Installed.Size != w.Size || v.Installed.Seed != w.Seed || !slices.Equal(v.Installed.VIPs, v.VIPs)

	// Which targets change comes first: a stream whose chain is missing is rebuilt with all
	// its targets, but only if its desired state changed.
	changed := map[string]bool{}
	for _, t := range w.Targets {
		old, recorded := v.Targets[t.Name]
		before, known := v.Requests[t.Name]
		if !known && recorded {
			before = RequestOf(old, v.Installed)
		}
		next := before.next(t, recorded)
		p.Requests[t.Name] = next
		if !recorded && !slices.Contains(next.roles[:], Serving) {
			continue
		}
		changed[t.Name] = !recorded || v.Repair || old.Stage != StageApplied || before.changed(next) || v.LinkRestored(old.FWMark)
		forced = forced || changed[t.Name] && !(recorded && v.LinkRestored(old.FWMark))
	}
	for name, old := range v.Targets {
		if _, ok := p.Requests[name]; ok {
			continue
		}
		drained, stays := drainOrRemove(v, old)
		if !stays {
			p.Removed = append(p.Removed, old)
			forced = forced || wasServing(v.Installed, name)
			continue
		}
		forced = forced || !drained.DrainEnd.Equal(old.DrainEnd)
		drained.Stage = StageApplied
		p.Targets[name] = drained
		p.Apply[old.FWMark] = old.Stage != StageApplied || v.Repair || v.LinkRestored(old.FWMark) || !sameTarget(drained, old)
	}
	slices.SortFunc(p.Removed, func(a, b InstalledTarget) int { return cmp.Compare(a.FWMark, b.FWMark) })

	var tables [len(vip.Families)][]string
	for _, t := range w.Targets {
		change, ok := changed[t.Name]
		if !ok {
			continue
		}
		old, recorded := v.Targets[t.Name]
		if !recorded {
			number, err := v.AllocateFWMark(t.Name)
			if err != nil {
				p.Problems = append(p.Problems, Problem{Object: "target " + v.Name + "/" + t.Name, Detail: err.Error()})
				continue
			}
			old.FWMark = number
		}
		next := p.Requests[t.Name]
		r := InstalledTarget{FWMark: old.FWMark, Stream: v.Name, Name: t.Name, IPs: t.IPs, Stage: StageApplied}
		redo := change || forced && v.ChainMissing
		slot := v.Observed[old.FWMark]
		for _, f := range vip.Families {
			a := AddressOf(t.IPs, f)
			r.Flows[f] = next.roles[f] >= Draining
			forwards := redo || Forwards(old, slot, f)
			if next.roles[f] == Serving && forwards && !v.Unreachable(a) {
				tables[f] = append(tables[f], t.Name)
			}
		}
		p.Targets[t.Name] = r
		p.Apply[r.FWMark] = redo || !sameTarget(r, old)
	}
	for _, f := range vip.Families {
		if HasFamily(v.VIPs, f) {
			slices.Sort(tables[f])
			p.Stream.Tables[f] = tables[f]
		}
	}
	p.Forced = forced
	p.Write = forced || !v.Broken && !sameTables(p.Stream.Tables, v.Installed.Tables)
	if !p.Write {
		p.Stream.Tables = v.Installed.Tables
	}
	return p
}

// drainOrRemove returns the next state of a target that is no longer desired, and reports
// whether it stays: a target that served keeps its flows for the drain time of the stream.
func drainOrRemove(v StreamInput, t InstalledTarget) (InstalledTarget, bool) {
	switch {
	case t.Stage == StageRemoving:
		return t, false
	case !t.DrainEnd.IsZero():
		return t, v.Now.Before(t.DrainEnd)
	case wasServing(v.Installed, t.Name) && v.Desired.DrainTime > 0:
		t.DrainEnd, t.Drain = v.Now.Add(v.Desired.DrainTime), v.Desired.DrainTime
		return t, true
	}
	return t, false
}

// Idle reports whether a plan leaves everything as it is.
func (p *StreamPlan) Idle(v StreamInput) bool {
	if p.Remove || len(p.Removed) > 0 || p.Write || v.Installed == nil || !sameStream(p.Stream, *v.Installed) {
		return false
	}
	for name, t := range p.Targets {
		if p.Apply[t.FWMark] || !sameTarget(t, v.Targets[name]) {
			return false
		}
	}
	return true
}

// RemoveFromTable removes a target from a table, because its rule or routes failed.
func (p *StreamPlan) RemoveFromTable(name string, f vip.Family) {
	p.Stream.Tables[f] = slices.DeleteFunc(slices.Clone(p.Stream.Tables[f]), func(s string) bool { return s == name })
}

func wasServing(s *InstalledStream, name string) bool {
	return s != nil && slices.ContainsFunc(s.Tables[:], func(names []string) bool { return contains(names, name) })
}
