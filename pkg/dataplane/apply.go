package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// manyStreams is the number of streams from which on one read of everything is cheaper than a
// read of each.
const manyStreams = 8

// afterStep is called after each step of a change. Tests end the process in it.
var afterStep = func(step string) {}

// streamChange is the plan of one stream while it is applied.
type streamChange struct {
	plan.StreamPlan
	input  plan.StreamInput
	record *streamRecord
	// failedTargets has the errors of targets whose rules or routes failed.
	failedTargets map[string]error
	// failure is why the change of the stream failed.
	failure error
	// add and remove are the additions and changes, and the removals, in nftables.
	add, remove plan.Change
}

// fail keeps the first failure.
func (p *streamChange) fail(err error) {
	if p.failure == nil {
		p.failure = err
	}
}

// toApply lists the targets whose objects are compared with the kernel and written.
func (p *streamChange) toApply() []plan.InstalledTarget {
	return slices.DeleteFunc(plan.SortedTargets(p.Targets), func(t plan.InstalledTarget) bool { return !p.Apply[t.FWMark] })
}

// kernel returns what the kernel must have of the stream.
func (p *streamChange) kernel() *plan.KernelStream {
	return p.Stream.Kernel(p.Targets, &p.record.tables)
}

// apply applies plans: rules and routes first, so that no packet is marked without a route,
// then one nftables transaction, then the removal of what it no longer refers to. Finally it
// reads everything back. After a crash at any step the next process recovers from the kernel.
//
// An error concerns all plans; the failure of one stream is in its streamChange.
func (e *engine) apply(plans []*streamChange, repairBase bool) error {
	afterStep("planned")
	for _, p := range plans {
		e.begin(p)
		e.markPlanned(&p.StreamPlan)
		e.logPlan(p)
	}
	e.addRoutes(plans)
	afterStep("routes")

	err := e.transact(plans, repairBase)
	if err == nil {
		afterStep("written")
		e.removeTargets(plans)
		err = e.readBack(plans)
	}
	if err != nil {
		e.stale |= nftables
		for _, p := range plans {
			p.record.dirty = true
		}
		return err
	}
	afterStep("read-back")
	for _, p := range plans {
		e.conclude(p)
		p.addProblems()
	}
	return nil
}

// begin records what is about to change as pending or removing.
func (e *engine) begin(p *streamChange) {
	for _, t := range p.Removed {
		t.Stage = plan.StageRemoving
		e.keepTarget(t)
	}
	if p.Remove {
		if p.input.Installed != nil {
			s := *p.input.Installed
			s.Stage = plan.StageRemoving
			e.keepStream(s)
		}
		return
	}
	for _, t := range p.toApply() {
		t.Stage = plan.StagePending
		e.keepTarget(t)
	}
	s := p.Stream
	if p.Write {
		s.Stage = plan.StagePending
	}
	e.keepStream(s)
}

// addRoutes installs rules and routes. Targets whose packets do not reach them afterwards are
// removed from the tables of their plans.
func (e *engine) addRoutes(plans []*streamChange) {
	var slots []plan.KernelTarget
	changes := map[uint32]*streamChange{}
	for _, p := range plans {
		for _, t := range p.toApply() {
			if want := t.Kernel(); !plan.SameRoutes(orNone(e.observed.Targets[t.FWMark]), want) {
				slots = append(slots, want)
				changes[t.FWMark] = p
			}
		}
	}
	if len(slots) == 0 {
		return
	}
	failures := e.kernel.AddRoutes(slots)
	for _, want := range slots {
		p := changes[want.FWMark]
		for _, f := range vip.Families {
			if !want.Rules[f] {
				continue
			}
			err := failures[fwstate.RouteKey{FWMark: want.FWMark, Family: f}]
			if err == nil {
				err = e.verifyRoute(want.FWMark, f, want.NextHops[f])
			}
			if err == nil {
				continue
			}
			want.NextHops[f] = netip.Addr{}
			p.RemoveFromTable(want.Name, f)
			if p.failedTargets[want.Name] == nil {
				p.failedTargets[want.Name] = err
			}
		}
		e.setRoutes(want.FWMark, want)
		if p.failedTargets[want.Name] == nil {
			delete(e.lost, want.FWMark)
		}
		p.record.stale = true
	}
}

// verifyRoute checks by a route lookup that packets for a target would reach it.
func (e *engine) verifyRoute(fwmark uint32, f vip.Family, hop netip.Addr) error {
	got, err := e.kernel.ResolveNextHop(fwmark, f)
	switch {
	case err != nil:
		return err
	case !got.IsValid():
		return fmt.Errorf("packets with fwmark %d are dropped instead of going to %s", fwmark, hop)
	case got != hop:
		return fmt.Errorf("packets with fwmark %d go to %s instead of %s", fwmark, got, hop)
	}
	return nil
}

// removeTargets removes the rest of targets that nftables no longer has: connection tracking
// entries first, so that no flow has the fwmark when its routes are gone, then rules and routes.
func (e *engine) removeTargets(plans []*streamChange) {
	var gone []uint32
	for _, p := range plans {
		if p.failure == nil {
			gone = append(gone, p.remove.RemoveTargets...)
		}
	}
	if len(gone) == 0 {
		return
	}
	flushErr := e.kernel.FlushConntrack(gone)
	afterStep("flushed")
	removeErr := e.kernel.RemoveRoutes(gone)
	afterStep("unrouted")
	for _, p := range plans {
		if len(p.Removed) == 0 {
			continue
		}
		if flushErr != nil {
			p.fail(fmt.Errorf("flush connection tracking entries of removed targets: %w", flushErr))
		}
		if removeErr != nil {
			p.fail(fmt.Errorf("remove rules and routes of removed targets: %w", removeErr))
		}
	}
}

// readBack reads the changed objects from the kernel.
func (e *engine) readBack(plans []*streamChange) error {
	var gone []uint32
	for _, p := range plans {
		p.record.stale = true
		gone = append(gone, p.remove.RemoveTargets...)
	}
	touched := slices.DeleteFunc(slices.Clone(plans), func(p *streamChange) bool { return p.add.Empty() && p.remove.Empty() })
	if len(touched) >= manyStreams {
		e.stale &^= nftables
		if err := e.readAll(); err != nil {
			return err
		}
	} else if err := e.readTouched(touched); err != nil {
		return err
	}
	if len(gone) == 0 {
		return nil
	}
	read, err := e.kernel.ReadRoutes(gone)
	if err != nil {
		return fmt.Errorf("read rules and routes back: %w", err)
	}
	for _, number := range gone {
		e.setRoutes(number, orNone(read[number]))
	}
	return nil
}

func (e *engine) readTouched(plans []*streamChange) error {
	var numbers []uint32
	vips := 0
	for _, p := range plans {
		for _, t := range p.toApply() {
			numbers = append(numbers, t.FWMark)
		}
		numbers = append(numbers, p.remove.RemoveTargets...)
		vips += len(p.add.VIPs) + len(p.remove.VIPs)
		if !p.Write && !p.Remove {
			continue
		}
		s, err := e.kernel.ReadStream(p.Name)
		if err != nil {
			return fmt.Errorf("read stream %s back: %w", p.Name, err)
		}
		delete(e.observed.Streams, p.Name)
		if s != nil {
			e.observed.Streams[p.Name] = s
		}
	}
	if len(numbers) > 0 {
		read, err := e.kernel.ReadTargets(numbers)
		if err != nil {
			return fmt.Errorf("read targets back: %w", err)
		}
		for _, number := range numbers {
			e.setTarget(number, orNone(read[number]), orNone(e.observed.Targets[number]))
		}
	}
	if vips > 0 {
		read, err := e.kernel.ReadVIPs()
		if err != nil {
			return fmt.Errorf("read VIPs back: %w", err)
		}
		e.observed.VIPs = read
	}
	return nil
}

// conclude compares a plan with what was read back: confirmed objects become applied, removed
// ones are forgotten, and the rest fails and is retried.
func (e *engine) conclude(p *streamChange) {
	for _, t := range p.Removed {
		if e.observed.Targets[t.FWMark] != nil || p.failure != nil {
			p.fail(fmt.Errorf("target %s (fwmark %d) is still in the kernel after its removal", t.Name, t.FWMark))
			continue
		}
		e.dropTarget(t)
		e.log.Info("target removed", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark)
	}
	if p.Remove {
		if e.observed.Streams[p.Name] != nil {
			p.fail(fmt.Errorf("the chain of stream %s is still in the kernel after its removal", p.Name))
		}
		if p.failure == nil && p.input.Installed != nil {
			p.record.installed, p.record.stale = nil, true
		}
		return
	}
	for _, t := range p.toApply() {
		switch {
		case p.failedTargets[t.Name] != nil:
		case !plan.SameNFTables(orNone(e.observed.Targets[t.FWMark]), t.Kernel()):
			p.fail(fmt.Errorf("the chain of target %s (fwmark %d), or its elements, are not in the kernel after they were written", t.Name, t.FWMark))
		default:
			e.keepTarget(t)
		}
	}
	if !p.Write {
		return
	}
	if !plan.SameStream(e.observed.Streams[p.Name], p.kernel()) {
		p.fail(fmt.Errorf("chain and maps of stream %s are not in the kernel as they were written", p.Name))
		return
	}
	for _, v := range p.Stream.VIPs {
		// An element of another process is drift rather than a failure.
		if p.Forced && e.observed.VIPs[v] == "" {
			p.fail(fmt.Errorf("VIP %s of stream %s is not in the kernel after it was written", v, p.Name))
			return
		}
	}
	e.keepStream(p.Stream)
}

// addProblems turns failures into problems.
func (p *streamChange) addProblems() {
	m := p.record
	for _, name := range slices.Sorted(maps.Keys(p.failedTargets)) {
		m.failed = true
		m.problems = append(m.problems, Problem{
			Object: "target " + p.Name + "/" + name, Detail: p.failedTargets[name].Error(),
			Remedy: "it is retried; check that the target is on a connected network, and for rules or routes of other processes",
		})
	}
	if p.failure == nil {
		return
	}
	m.failed = true
	problem := Problem{
		Object: "stream " + p.Name, Detail: p.failure.Error(), VIPs: p.Stream.VIPs,
		Remedy: "it is retried; look at the table with: nft list table inet " + TableName,
	}
	if foreign, ok := errors.AsType[*fwstate.ConflictError](p.failure); ok {
		problem.Object, problem.Remedy = foreign.Object, "remove or rename it, or the stream; objects of vipgate have comments"
	}
	m.problems = append(m.problems, problem)
}

// logPlan logs the changes of a plan.
func (e *engine) logPlan(p *streamChange) {
	log := e.log.With("stream", p.Name)
	for _, t := range p.Removed {
		log.Info("removing target", "target", t.Name, "fwmark", t.FWMark)
	}
	if p.Remove && p.input.Installed != nil {
		log.Info("removing stream")
	}
	for _, t := range plan.SortedTargets(p.Targets) {
		log := log.With("target", t.Name, "fwmark", t.FWMark)
		old, recorded := p.input.Targets[t.Name]
		switch {
		case !recorded:
			log.Info("adding target", "ips", t.Addresses())
		case !t.DrainEnd.IsZero() && old.DrainEnd.IsZero():
			log.Info("draining removed target", "until", t.DrainEnd)
		case t.IPs != old.IPs:
			log.Info("target addresses changed", "ips", t.Addresses())
		}
	}
}
