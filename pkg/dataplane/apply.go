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

// streamChange is the plan of one stream while it is applied.
type streamChange struct {
	plan.StreamPlan
	input  plan.StreamInput
	record *streamRecord
	// failedTargets has the errors of targets whose rules or routes failed.
	failedTargets map[string]error
	// failure is why the change of the stream failed.
	failure error
	// touched: the transaction has objects of the stream; vips: elements of VIPs as well.
	touched, vips bool
}

func (p *streamChange) fail(err error) {
	if p.failure == nil {
		p.failure = err
	}
}

// toApply lists the targets whose objects are compared with the kernel and written.
func (p *streamChange) toApply() []plan.InstalledTarget {
	return slices.DeleteFunc(plan.SortedTargets(p.Targets), func(t plan.InstalledTarget) bool { return !p.Apply[t.FWMark] })
}

// apply applies plans: rules and routes first, so that no packet is marked without a route,
// then one nftables transaction, then the removal of what it no longer refers to. Finally it
// reads everything back. After a crash at any step the next process recovers from the kernel.
//
// An error concerns all plans; the failure of one stream is in its streamChange.
func (e *engine) apply(plans []*streamChange, repairBase bool) error {
	fault(stepPlanned)
	for _, p := range plans {
		e.begin(p)
		e.markPlanned(p.Name, &p.StreamPlan)
		e.logPlan(p)
	}
	e.addRoutes(plans)
	fault(stepRoutes)

	if err := e.transact(plans, repairBase); err != nil {
		e.stale.nftables = true
		e.replan(plans)
		return err
	}
	fault(stepWritten)

	e.removeTargets(plans)

	if err := e.readBack(plans); err != nil {
		e.stale.nftables = true
		e.replan(plans)
		return err
	}
	fault(stepReadBack)
	e.conclude(plans)
	return nil
}

// replan marks the streams to be planned again.
func (e *engine) replan(plans []*streamChange) {
	for _, p := range plans {
		p.record.dirty = true
	}
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
	made := map[uint32]bool{}
	for _, p := range plans {
		for _, t := range p.toApply() {
			want := plan.KernelTargetOf(t)
			if has := e.observed.Targets[t.FWMark]; has == nil || !plan.SameRoutes(*has, want) {
				slots = append(slots, want)
				made[t.FWMark] = true
			}
		}
	}
	if len(slots) == 0 {
		return
	}
	failures := e.kernel.AddRoutes(slots)
	for _, p := range plans {
		for _, t := range p.toApply() {
			if !made[t.FWMark] {
				continue
			}
			want := plan.KernelTargetOf(t)
			for _, f := range vip.Families {
				if !want.Rules[f] {
					continue
				}
				err := failures[fwstate.RouteKey{FWMark: t.FWMark, Family: f}]
				if err == nil {
					err = e.verifyRoute(t, f, want.NextHops[f])
				}
				if err != nil {
					want.NextHops[f] = netip.Addr{}
					p.RemoveFromTable(t.Name, f)
					p.failTarget(t.Name, err)
				}
			}
			e.setRoutes(t.FWMark, want)
			if p.failedTargets[t.Name] == nil {
				delete(e.lost, t.FWMark)
			}
			p.record.stale = true
		}
	}
}

func (p *streamChange) failTarget(target string, err error) {
	if p.failedTargets == nil {
		p.failedTargets = map[string]error{}
	}
	if p.failedTargets[target] == nil {
		p.failedTargets[target] = err
	}
}

// verifyRoute checks by a route lookup that packets for a target would reach it.
func (e *engine) verifyRoute(t plan.InstalledTarget, f vip.Family, hop netip.Addr) error {
	got, err := e.kernel.ResolveNextHop(t.FWMark, f)
	switch {
	case err != nil:
		return fmt.Errorf("look up the route of fwmark %d (%s): %w", t.FWMark, plan.FamilyName(f), err)
	case !got.IsValid():
		return fmt.Errorf("packets with fwmark %d are dropped instead of going to %s", t.FWMark, hop)
	case got != hop:
		return fmt.Errorf("packets with fwmark %d go to %s instead of %s", t.FWMark, got, hop)
	}
	return nil
}

// removeTargets removes the rest of targets that nftables no longer has: connection tracking
// entries first, so that no flow has the fwmark when its routes are gone, then rules and routes.
func (e *engine) removeTargets(plans []*streamChange) {
	var gone []uint32
	for _, p := range plans {
		if p.failure == nil {
			for _, t := range p.Removed {
				gone = append(gone, t.FWMark)
			}
		}
	}
	if len(gone) == 0 {
		return
	}
	forgetErr := e.kernel.FlushConntrack(gone)
	fault(stepFlushed)
	removeErr := e.kernel.RemoveRoutes(gone)
	fault(stepUnrouted)
	for _, p := range plans {
		if len(p.Removed) == 0 {
			continue
		}
		if forgetErr != nil {
			p.fail(fmt.Errorf("flush connection tracking entries of removed targets: %w", forgetErr))
		}
		if removeErr != nil {
			p.fail(fmt.Errorf("remove rules and routes of removed targets: %w", removeErr))
		}
	}
}

// readBack reads the changed objects from the kernel.
func (e *engine) readBack(plans []*streamChange) error {
	touched := slices.DeleteFunc(slices.Clone(plans), func(p *streamChange) bool { return !p.touched })
	var gone []uint32
	for _, p := range plans {
		p.record.stale = true
		for _, t := range p.Removed {
			gone = append(gone, t.FWMark)
		}
	}
	if len(touched) >= manyStreams {
		e.stale.nftables = false
		if err := e.readAll(); err != nil {
			return err
		}
	} else if err := e.readTouched(touched); err != nil {
		return err
	}
	if len(gone) == 0 {
		return nil
	}
	ways, err := e.kernel.ReadRoutes(gone)
	if err != nil {
		return fmt.Errorf("read rules and routes back: %w", err)
	}
	for _, number := range gone {
		w := ways[number]
		if w == nil {
			w = &plan.KernelTarget{}
		}
		e.setRoutes(number, *w)
		if s := e.observed.Targets[number]; plan.SameRoutes(*s, plan.KernelTarget{}) && !s.ChainIntact && s.Flows == [len(vip.Families)]bool{} {
			delete(e.observed.Targets, number)
		}
	}
	return nil
}

func (e *engine) readTouched(plans []*streamChange) error {
	var numbers []uint32
	vips := false
	for _, p := range plans {
		for number, apply := range p.Apply {
			if apply {
				numbers = append(numbers, number)
			}
		}
		for _, t := range p.Removed {
			numbers = append(numbers, t.FWMark)
		}
		vips = vips || p.vips
		if !p.Write && !p.Remove {
			continue
		}
		s, err := e.kernel.ReadStream(p.Name)
		if err != nil {
			return fmt.Errorf("read stream %s back: %w", p.Name, err)
		}
		if s == nil {
			delete(e.observed.Streams, p.Name)
		} else {
			e.observed.Streams[p.Name] = s
		}
	}
	if len(numbers) > 0 {
		slots, err := e.kernel.ReadTargets(numbers)
		if err != nil {
			return fmt.Errorf("read targets back: %w", err)
		}
		for _, number := range numbers {
			e.setNFTables(number, slots[number])
		}
	}
	if vips {
		all, err := e.kernel.ReadVIPs()
		if err != nil {
			return fmt.Errorf("read VIPs back: %w", err)
		}
		if all == nil {
			all = map[vip.VIP]string{}
		}
		e.observed.VIPs = all
	}
	return nil
}

// conclude compares the plans with what was read back: confirmed objects become applied, removed
// ones are forgotten, and the rest fails and is retried.
func (e *engine) conclude(plans []*streamChange) {
	for _, p := range plans {
		for _, t := range p.Removed {
			if e.observed.Targets[t.FWMark] == nil && p.failure == nil {
				e.dropTarget(t)
				e.log.Info("target removed", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark)
			} else {
				p.fail(fmt.Errorf("target %s (fwmark %d) is still in the kernel after its removal", t.Name, t.FWMark))
			}
		}
		if p.Remove {
			if p.failure == nil && e.observed.Streams[p.Name] != nil {
				p.fail(fmt.Errorf("the chain of stream %s is still in the kernel after its removal", p.Name))
			}
			if p.failure == nil && p.input.Installed != nil {
				delete(e.installed.Streams, p.Name)
				p.record.stale = true
			}
			e.finish(p)
			continue
		}
		for _, t := range p.toApply() {
			want := plan.KernelTargetOf(t)
			has := e.observed.Targets[t.FWMark]
			switch {
			case p.failedTargets[t.Name] != nil:
			case has == nil || !plan.SameNFTables(*has, want):
				p.fail(fmt.Errorf("the chain of target %s (fwmark %d), or its elements, are not in the kernel after they were written", t.Name, t.FWMark))
			default:
				e.keepTarget(t)
			}
		}
		if p.Write {
			if err := e.confirm(p); err != nil {
				p.fail(err)
			} else {
				e.keepStream(p.Stream)
			}
		}
		e.finish(p)
	}
}

// confirm compares a written stream with what was read back. VIP elements of other processes
// are not a failure.
func (e *engine) confirm(p *streamChange) error {
	a := e.observed.Streams[p.Name]
	want := plan.KernelStream{Name: p.Name, ChainIntact: true, Size: p.Stream.Size, Seed: p.Stream.Seed}
	for _, f := range vip.Families {
		if plan.HasFamily(p.Stream.VIPs, f) {
			want.Tables[f] = p.record.tables[f].Table(p.Stream.Tables[f], p.Targets, want.Size, want.Seed)
		}
	}
	if !plan.SameStream(a, &want) {
		return fmt.Errorf("chain and maps of stream %s are not in the kernel as they were written", p.Name)
	}
	for _, v := range p.Stream.VIPs {
		if p.Forced && e.observed.VIPs[v] == "" {
			return fmt.Errorf("VIP %s of stream %s is not in the kernel after it was written", v, p.Name)
		}
	}
	return nil
}

// finish turns failures into problems.
func (e *engine) finish(p *streamChange) {
	m := p.record
	for _, name := range slices.Sorted(maps.Keys(p.failedTargets)) {
		m.problems = append(m.problems, Problem{Object: "target " + p.Name + "/" + name, Detail: p.failedTargets[name].Error(), Remedy: "it is retried; check that the target is on a connected network, and for rules or routes of other processes"})
		m.failure = p.failedTargets[name]
	}
	if p.failure == nil {
		return
	}
	m.failure = p.failure
	problem := Problem{Object: "stream " + p.Name, Detail: p.failure.Error(), Remedy: "it is retried; look at the table with: nft list table inet " + TableName}
	if foreign, ok := errors.AsType[*fwstate.ConflictError](p.failure); ok {
		problem.Object, problem.Remedy = foreign.Object, "remove or rename it, or the stream; objects of vipgate have comments"
	}
	if !p.Remove {
		problem.VIPs = p.Stream.VIPs
	}
	m.problems = append(m.problems, problem)
}

// logPlan logs the changes of a plan.
func (e *engine) logPlan(p *streamChange) {
	for _, t := range p.Removed {
		e.log.Info("removing target", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark)
	}
	if p.Remove {
		if p.input.Installed != nil {
			e.log.Info("removing stream", "stream", p.Name)
		}
		return
	}
	for _, t := range plan.SortedTargets(p.Targets) {
		old, recorded := p.input.Targets[t.Name]
		switch {
		case !recorded:
			e.log.Info("adding target", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "ips", t.IPs)
		case !t.DrainEnd.IsZero() && old.DrainEnd.IsZero():
			e.log.Info("draining removed target", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "until", t.DrainEnd)
		case !plan.SameAddresses(t.IPs, old.IPs):
			e.log.Info("target addresses changed", "stream", t.Stream, "target", t.Name, "fwmark", t.FWMark, "ips", t.IPs)
		}
	}
}
