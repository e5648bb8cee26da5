package plan

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// Request is the desired state of a target at its last plan. It distinguishes a desired change
// from drift: a plan does not undo drift of a target whose request is unchanged.
type Request struct {
	ips   [len(vip.Families)]netip.Addr
	roles [len(vip.Families)]Role
}

// RequestOf derives from the installed state the last request of the previous process.
func RequestOf(t InstalledTarget, s *InstalledStream) Request {
	a := Request{ips: t.IPs}
	for f := range a.roles {
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

// next returns the current request for a target. An Unknown role keeps the previous role.
func (a Request) next(t Target) Request {
	n := Request{ips: ByFamily(t.IPs)}
	for f, ip := range n.ips {
		n.roles[f] = Down
		if ip.IsValid() {
			n.roles[f] = cmp.Or(t.Roles[f], a.roles[f], Down)
		}
	}
	return n
}

// StreamInput holds all inputs of the plan of one stream.
type StreamInput struct {
	Name string
	// Desired is nil for a stream to remove.
	Desired *Stream
	// VIPs lists the stream's VIPs that need an element, sorted by vip.Compare.
	VIPs []vip.VIP
	// Installed is nil for a stream that is not installed.
	Installed *InstalledStream
	Targets   map[string]InstalledTarget
	Requests  map[string]Request
	// Observed holds the targets in the kernel, by fwmark.
	Observed map[uint32]*KernelTarget
	Network  *Network
	// Fault is the difference between the installed stream and the kernel.
	Fault StreamFault
	// LinkRestored reports whether the kernel removed routes of a fwmark with a link that is up
	// again.
	LinkRestored func(uint32) bool
	// Repair also reverts changes by other processes.
	Repair bool
	Now    time.Time
	// AllocateFWMark returns the fwmark for a new target.
	AllocateFWMark func() (uint32, error)
}

// StreamPlan is the next state of one stream.
type StreamPlan struct {
	Name string
	// Remove removes the stream and the targets in Removed.
	Remove bool
	// Stream is the stream to install. Write: its chain and maps are compared and written.
	Stream InstalledStream
	Write  bool
	// Forced: the desired state changed, so changes by other processes are also reverted.
	Forced bool
	// Targets holds the remaining targets by name. Apply holds the fwmarks of the targets whose
	// rules, routes and elements are compared with the kernel and written.
	Targets  map[string]InstalledTarget
	Apply    map[uint32]bool
	Removed  []InstalledTarget
	Requests map[string]Request
	// Problems lists the problems of this stream's targets.
	Problems []Problem
}

// ForStream plans one stream. AllocateFWMark is its only side effect.
func ForStream(v StreamInput) StreamPlan {
	n := len(v.Targets) // most targets remain
	p := StreamPlan{
		Name: v.Name, Targets: make(map[string]InstalledTarget, n), Apply: make(map[uint32]bool, n),
		Requests: make(map[string]Request, n),
	}
	if v.Desired == nil {
		p.Remove, p.Removed = true, SortedTargets(v.Targets)
		return p
	}
	w := v.Desired
	p.Stream = InstalledStream{
		Name: v.Name, VIPs: v.VIPs, Size: w.Size, Seed: w.Seed, Match: w.Match, Stage: StageApplied,
	}
	p.Forced = v.Repair || v.Installed == nil || v.Installed.Stage != StageApplied ||
		v.Installed.Size != w.Size || v.Installed.Seed != w.Seed || !slices.Equal(v.Installed.VIPs, v.VIPs) ||
		!SameMatch(v.Installed.Match, w.Match)

	// Find the changed targets first: a stream whose chain is missing is rebuilt with all its
	// targets, but only if its desired state changed.
	changed := make(map[string]bool, n)
	for _, t := range w.Targets {
		old, recorded := v.Targets[t.Name]
		before, known := v.Requests[t.Name]
		switch {
		case !recorded:
			before = Request{}
		case !known:
			before = RequestOf(old, v.Installed)
		}
		next := before.next(t)
		p.Requests[t.Name] = next
		if !recorded && !slices.Contains(next.roles[:], Serving) && !(w.RouteAll && v.Network.Connects(t.IPs)) {
			continue
		}
		restored := recorded && v.LinkRestored(old.FWMark)
		changed[t.Name] = restored || v.Repair || old.Stage != StageApplied || before != next
		p.Forced = p.Forced || changed[t.Name] && !restored
	}
	left := map[string]InstalledTarget{} // no longer desired
	for name, old := range v.Targets {
		if _, desired := p.Requests[name]; !desired {
			left[name] = old
		}
	}
	for _, old := range SortedTargets(left) {
		drained, stays := drainOrRemove(v, old)
		if !stays {
			p.Removed = append(p.Removed, old)
			p.Forced = p.Forced || wasServing(v.Installed, old.Name)
			continue
		}
		p.Forced = p.Forced || !drained.DrainEnd.Equal(old.DrainEnd)
		drained.Stage = StageApplied
		p.Targets[old.Name] = drained
		p.Apply[old.FWMark] = old.Stage != StageApplied || v.Repair || v.LinkRestored(old.FWMark) || !sameTarget(drained, old)
	}

	for _, t := range w.Targets {
		change, ok := changed[t.Name]
		if !ok {
			continue
		}
		old, recorded := v.Targets[t.Name]
		if !recorded {
			var err error
			if old.FWMark, err = v.AllocateFWMark(); err != nil {
				p.Problems = append(p.Problems, Problem{Object: "target " + v.Name + "/" + t.Name, Detail: err.Error()})
				continue
			}
		}
		next := p.Requests[t.Name]
		r := InstalledTarget{FWMark: old.FWMark, Stage: StageApplied}
		r.Label = Label{Stream: v.Name, Name: t.Name, IPs: next.ips}
		redo := change || p.Forced && v.Fault.ChainMissing
		for _, f := range vip.Families {
			r.Flows[f] = next.roles[f] >= Draining
			forwards := redo || Forwards(old, v.Observed[old.FWMark], f)
			if next.roles[f] == Serving && forwards && v.Network.UnreachableReason(next.ips[f]) == "" {
				p.Stream.Tables[f] = append(p.Stream.Tables[f], t.Name)
			}
		}
		p.Targets[t.Name] = r
		p.Apply[r.FWMark] = redo || !sameTarget(r, old)
	}
	for _, f := range vip.Families {
		slices.Sort(p.Stream.Tables[f])
		if !HasFamily(v.VIPs, f) {
			p.Stream.Tables[f] = nil
		}
	}
	p.Write = p.Forced || !v.Fault.Broken && !sameTables(p.Stream.Tables, v.Installed.Tables)
	if !p.Write {
		p.Stream.Tables = v.Installed.Tables
	}
	return p
}

// drainOrRemove returns the next state of a target that is no longer desired, and reports
// whether it remains installed: a target that served keeps its flows for the stream's drain time.
func drainOrRemove(v StreamInput, t InstalledTarget) (InstalledTarget, bool) {
	switch {
	case t.Stage == StageRemoving:
		return t, false
	case !t.DrainEnd.IsZero():
		return t, v.Now.Before(t.DrainEnd)
	case wasServing(v.Installed, t.Name) && v.Desired.DrainTime > 0:
		t.Drain(v.Now.Add(v.Desired.DrainTime), v.Desired.DrainTime)
		return t, true
	}
	return t, false
}

// Idle reports whether the plan changes nothing.
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

// RemoveFromTable removes a target whose rule or routes failed from a Maglev table.
func (p *StreamPlan) RemoveFromTable(name string, f vip.Family) {
	p.Stream.Tables[f] = slices.DeleteFunc(slices.Clone(p.Stream.Tables[f]), func(s string) bool { return s == name })
}

func wasServing(s *InstalledStream, name string) bool {
	return s != nil && slices.ContainsFunc(s.Tables[:], func(names []string) bool { return contains(names, name) })
}

// contains reports whether sorted contains name.
func contains(sorted []string, name string) bool {
	_, ok := slices.BinarySearch(sorted, name)
	return ok
}
