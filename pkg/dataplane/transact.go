package dataplane

import (
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// additions returns the additions and changes of a plan.
func (e *engine) additions(p *streamChange) plan.Change {
	c := plan.Change{VIPs: map[vip.VIP]string{}}
	for _, t := range p.toApply() {
		if want := t.Kernel(); !plan.SameNFTables(orNone(e.observed.Targets[t.FWMark]), want) {
			c.Targets = append(c.Targets, want)
		}
	}
	if !p.Write {
		return c
	}
	want, now := p.kernel(), e.observed.Streams[p.Name]
	if !plan.SameStream(now, want) {
		c.Streams = append(c.Streams, plan.StreamWrite{Desired: *want, Observed: now})
	}
	for _, v := range p.Stream.VIPs {
		by := e.observed.VIPs[v]
		// The element of another process shows as drift.
		foreign := by != "" && (e.streams[by] == nil || e.streams[by].installed == nil)
		if by != p.Name && p.Forced && (!foreign || p.input.Repair) {
			c.VIPs[v] = p.Name
		}
	}
	return c
}

// removals returns the removals of a plan.
func (e *engine) removals(p *streamChange) plan.Change {
	c := plan.Change{VIPs: map[vip.VIP]string{}}
	for _, t := range p.Removed {
		c.RemoveTargets = append(c.RemoveTargets, t.FWMark)
	}
	if p.input.Installed == nil {
		return c
	}
	if p.Remove {
		c.RemoveStreams = []string{p.Name}
	}
	// After a crash it is unknown which elements the stream installed: all that lead to it.
	all := p.Remove || p.input.Installed.Stage != plan.StageApplied
	for v, by := range e.observed.VIPs {
		if by != p.Name || e.vipOwners.Owner[v] != "" {
			continue
		}
		if _, installed := slices.BinarySearchFunc(p.input.Installed.VIPs, v, vip.Compare); installed || all {
			c.VIPs[v] = ""
		}
	}
	return c
}

// transact writes all plans in one transaction, or, if that fails, in one for each, so that one
// stream does not fail the others.
func (e *engine) transact(plans []*streamChange, repairBase bool) error {
	var all plan.Change
	for _, p := range plans {
		p.add, p.remove = e.additions(p), e.removals(p)
		all.Add(p.add)
		all.Add(p.remove)
	}
	all.Base = !e.observed.Base && (repairBase || len(all.Targets)+len(all.Streams) > 0)
	if all.Empty() {
		return nil
	}
	if all.Base {
		// Packets are forwarded without these rules, too: a failure shows as drift.
		if err := e.kernel.AddCommonRules().Err(); err != nil {
			e.log.Warn("failed to add policy rules", "error", err)
		}
	}
	err := e.kernel.Write(all)
	if err != nil {
		e.log.Warn("transaction failed, retrying stream by stream", "streams", len(plans), "error", err)
		e.transactEach(plans, all.Base)
	}
	if !all.Base {
		return nil
	}
	if err := e.readBase(); err != nil {
		return err
	}
	for _, p := range plans {
		if e.observed.Problem != "" {
			p.fail(fmt.Errorf("table inet %s is not as it was written: %s", TableName, e.observed.Problem))
		}
	}
	return nil
}

// transactEach writes each plan in transactions of its own, additions first.
func (e *engine) transactEach(plans []*streamChange, base bool) {
	write := func(p *streamChange, c plan.Change) {
		if p.failure == nil && !c.Empty() {
			if err := e.kernel.Write(c); err != nil {
				p.fail(err)
			}
		}
	}
	if base {
		if err := e.kernel.Write(plan.Change{Base: true}); err != nil {
			for _, p := range plans {
				p.fail(err)
			}
		}
	}
	for _, p := range plans {
		write(p, p.add)
	}
	for _, p := range plans {
		write(p, p.remove)
	}
}
