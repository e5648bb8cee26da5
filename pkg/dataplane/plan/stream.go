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
func RequestOf(target InstalledTarget, stream *InstalledStream) Request {
	request := Request{ips: target.IPs}
	for f := range request.roles {
		switch {
		case !target.Flows[f]:
			request.roles[f] = Down
		case stream != nil && contains(stream.Tables[f], target.Name):
			request.roles[f] = Serving
		default:
			request.roles[f] = Draining
		}
	}
	return request
}

// WithoutNewFlows returns the request with Draining in place of Serving.
func (r Request) WithoutNewFlows() Request {
	for f, role := range r.roles {
		r.roles[f] = min(role, Draining)
	}
	return r
}

// next returns the current request for a target. An Unknown role keeps the previous role.
func (r Request) next(target Target) Request {
	next := Request{ips: ByFamily(target.IPs)}
	for f, ip := range next.ips {
		next.roles[f] = Down
		if ip.IsValid() {
			next.roles[f] = cmp.Or(target.Roles[f], r.roles[f], Down)
		}
	}
	return next
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
	// LinkRestored reports whether the kernel removed routes of a fwmark with a link that is up again.
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
func ForStream(input StreamInput) StreamPlan {
	size := len(input.Targets) // most targets remain
	next := StreamPlan{
		Name: input.Name, Targets: make(map[string]InstalledTarget, size), Apply: make(map[uint32]bool, size),
		Requests: make(map[string]Request, size),
	}
	desired, installed := input.Desired, input.Installed
	if desired == nil {
		next.Remove, next.Removed = true, SortedTargets(input.Targets)
		return next
	}
	next.Stream = InstalledStream{
		Name: input.Name, VIPs: input.VIPs, Size: desired.Size, Seed: desired.Seed, Match: desired.Match, Stage: StageApplied,
	}
	next.Forced = input.Repair || installed == nil || installed.Stage != StageApplied ||
		installed.Size != desired.Size || installed.Seed != desired.Seed || !slices.Equal(installed.VIPs, input.VIPs) ||
		!SameMatch(installed.Match, desired.Match)

	// Find the changed targets first: a stream whose chain is missing is rebuilt with all its
	// targets, but only if its desired state changed.
	changed := next.request(input)
	next.planLeaving(input)
	next.planDesired(input, changed)
	for _, family := range vip.Families {
		slices.Sort(next.Stream.Tables[family])
		// Without a VIP of the family no packet looks up its map.
		if !HasFamily(input.VIPs, family) && !desired.Prepare[family] {
			next.Stream.Tables[family] = nil
		}
	}
	// A broken stream is drift: only a repair, or a change of the desired state, writes it.
	next.Write = next.Forced || !input.Fault.Broken && !sameTables(next.Stream.Tables, installed.Tables)
	if !next.Write {
		// Record the installed tables: the planned ones are not written.
		next.Stream.Tables = installed.Tables
	}
	return next
}

// request computes the requests of the desired targets. The result has the targets to install, and
// whether the objects of each are written again.
func (p *StreamPlan) request(input StreamInput) (changed map[string]bool) {
	changed = make(map[string]bool, len(input.Targets))
	for _, target := range input.Desired.Targets {
		old, recorded := input.Targets[target.Name]
		before, known := input.Requests[target.Name]
		switch {
		case !recorded:
			// Without installed objects there is no role to keep: Unknown becomes Down.
			before = Request{}
		case !known:
			// First plan after a restart: only the kernel objects record the last request.
			before = RequestOf(old, input.Installed)
		}
		next := before.next(target)
		p.Requests[target.Name] = next
		// A target gets a fwmark once it serves, or earlier if its checks need routes.
		routed := input.Desired.RouteAll && input.Network.Connects(target.IPs)
		if !recorded && !slices.Contains(next.roles[:], Serving) && !routed {
			continue
		}
		restored := recorded && input.LinkRestored(old.FWMark)
		changed[target.Name] = restored || input.Repair || old.Stage != StageApplied || before != next
		// Routes that return with a link are no reason to undo changes by other processes.
		p.Forced = p.Forced || changed[target.Name] && !restored
	}
	return changed
}

// planLeaving drains or removes the installed targets that are no longer desired.
func (p *StreamPlan) planLeaving(input StreamInput) {
	leaving := map[string]InstalledTarget{}
	for name, old := range input.Targets {
		if _, desired := p.Requests[name]; !desired {
			leaving[name] = old
		}
	}
	for _, old := range SortedTargets(leaving) {
		drained, stays := drainOrRemove(input, old)
		if !stays {
			p.Removed = append(p.Removed, old)
			// The Maglev table must lose its entries before its chain is removed, even with drift.
			p.Forced = p.Forced || wasServing(input.Installed, old.Name)
			continue
		}
		// A drain that starts takes the target out of the Maglev table.
		p.Forced = p.Forced || !drained.DrainEnd.Equal(old.DrainEnd)
		drained.Stage = StageApplied
		p.Targets[old.Name] = drained
		p.Apply[old.FWMark] = old.Stage != StageApplied || input.Repair || input.LinkRestored(old.FWMark) ||
			!sameTarget(drained, old)
	}
}

// planDesired plans the desired targets in changed, and adds the serving ones to the Maglev tables.
func (p *StreamPlan) planDesired(input StreamInput, changed map[string]bool) {
	for _, target := range input.Desired.Targets {
		write, ok := changed[target.Name]
		if !ok {
			continue
		}
		old, recorded := input.Targets[target.Name]
		if !recorded {
			var err error
			if old.FWMark, err = input.AllocateFWMark(); err != nil {
				// Without a free fwmark only this target is left out, not the stream.
				problem := Problem{Object: "target " + input.Name + "/" + target.Name, Detail: err.Error()}
				p.Problems = append(p.Problems, problem)
				continue
			}
		}
		request := p.Requests[target.Name]
		next := InstalledTarget{FWMark: old.FWMark, Stage: StageApplied}
		next.Label = Label{Stream: input.Name, Name: target.Name, IPs: request.ips}
		write = write || p.Forced && input.Fault.ChainMissing
		for _, family := range vip.Families {
			next.Flows[family] = request.roles[family] >= Draining
			// Never give entries to a target whose drift stays: its packets would be lost.
			forwards := write || Forwards(old, input.Observed[old.FWMark], family)
			if request.roles[family] == Serving && forwards && input.Network.UnreachableReason(request.ips[family]) == "" {
				p.Stream.Tables[family] = append(p.Stream.Tables[family], target.Name)
			}
		}
		p.Targets[target.Name] = next
		p.Apply[next.FWMark] = write || !sameTarget(next, old)
	}
}

// drainOrRemove returns the next state of a target that is no longer desired, and reports
// whether it remains installed: a target that served keeps its flows for the stream's drain time.
func drainOrRemove(input StreamInput, target InstalledTarget) (InstalledTarget, bool) {
	switch {
	// After a crash some objects are already removed, so the target cannot drain.
	case target.Stage == StageRemoving:
		return target, false
	// A changed drain time does not apply to a running drain.
	case !target.DrainEnd.IsZero():
		return target, input.Now.Before(target.DrainEnd)
	case wasServing(input.Installed, target.Name) && input.Desired.DrainTime > 0:
		target.Drain(input.Now.Add(input.Desired.DrainTime), input.Desired.DrainTime)
		return target, true
	}
	return target, false
}

// Idle reports whether the plan changes nothing.
func (p *StreamPlan) Idle(input StreamInput) bool {
	if p.Remove || len(p.Removed) > 0 || p.Write || input.Installed == nil || !sameStream(p.Stream, *input.Installed) {
		return false
	}
	for name, target := range p.Targets {
		if p.Apply[target.FWMark] || !sameTarget(target, input.Targets[name]) {
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
