package dataplane

import (
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// additions returns the additions and changes of a plan.
func (e *engine) additions(p *streamChange) (c plan.Change) {
	if p.Remove {
		return c
	}
	for _, t := range p.toApply() {
		want := plan.KernelTargetOf(t)
		if has := e.observed.Targets[t.FWMark]; has == nil || !plan.SameNFTables(*has, want) {
			c.Targets = append(c.Targets, want)
		}
	}
	if !p.Write {
		return c
	}
	want := plan.KernelStream{Name: p.Name, ChainIntact: true, Size: p.Stream.Size, Seed: p.Stream.Seed}
	for _, f := range vip.Families {
		if plan.HasFamily(p.Stream.VIPs, f) {
			want.Tables[f] = p.record.tables[f].Table(p.Stream.Tables[f], p.Targets, want.Size, want.Seed)
		}
	}
	now := e.observed.Streams[p.Name]
	if !plan.SameStream(now, &want) {
		c.Streams = append(c.Streams, plan.StreamWrite{Desired: want, Observed: now})
	}
	for _, v := range p.Stream.VIPs {
		by := e.observed.VIPs[v]
		if by == p.Name || !p.Forced {
			continue
		}
		if _, ours := e.installed.Streams[by]; by != "" && !ours && !p.input.Repair {
			continue // Another process created it; it shows as drift.
		}
		c.VIPs = plan.SetVIP(c.VIPs, v, p.Name)
	}
	return c
}

// removals returns the removals of a plan.
func (e *engine) removals(p *streamChange) (c plan.Change) {
	for _, t := range p.Removed {
		c.RemoveTargets = append(c.RemoveTargets, t.FWMark)
	}
	if p.Remove && p.input.Installed != nil {
		c.RemoveStreams = append(c.RemoveStreams, p.Name)
	}
	leads := func(v vip.VIP) bool { return e.observed.VIPs[v] == p.Name && e.owner[v] == "" }
	switch {
	case p.input.Installed == nil:
	case p.Remove || p.input.Installed.Stage != plan.StageApplied:
		// All that lead to the stream: which ones it installed is unknown after a crash.
		for v := range e.observed.VIPs {
			if leads(v) {
				c.VIPs = plan.SetVIP(c.VIPs, v, "")
			}
		}
	default:
		for _, v := range p.input.Installed.VIPs {
			if !slices.Contains(p.Stream.VIPs, v) && leads(v) {
				c.VIPs = plan.SetVIP(c.VIPs, v, "")
			}
		}
	}
	return c
}

// transact writes all plans in one transaction, or, if that fails, in one for each, so that one
// stream does not fail the others.
func (e *engine) transact(plans []*streamChange, repairBase bool) error {
	var all plan.Change
	add, remove := make([]plan.Change, len(plans)), make([]plan.Change, len(plans))
	for i, p := range plans {
		add[i], remove[i] = e.additions(p), e.removals(p)
		p.touched = !add[i].Empty() || !remove[i].Empty()
		p.vips = len(add[i].VIPs)+len(remove[i].VIPs) > 0
		all.Add(add[i])
		all.Add(remove[i])
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
	if err == nil {
		return e.readBaseBack(all.Base, plans)
	}
	e.log.Warn("transaction failed, retrying stream by stream", "streams", len(plans), "error", err)
	if all.Base {
		if err := e.kernel.Write(plan.Change{Base: true}); err != nil {
			for _, p := range plans {
				p.fail(err)
			}
			return nil
		}
		if err := e.readBaseBack(true, plans); err != nil {
			return err
		}
	}
	for i, p := range plans {
		if !add[i].Empty() {
			if err := e.kernel.Write(add[i]); err != nil {
				p.fail(err)
			}
		}
	}
	for i, p := range plans {
		if p.failure == nil && !remove[i].Empty() {
			if err := e.kernel.Write(remove[i]); err != nil {
				p.fail(err)
			}
		}
	}
	return nil
}

// readBaseBack reads back the objects that no stream owns.
func (e *engine) readBaseBack(written bool, plans []*streamChange) error {
	if !written {
		return nil
	}
	base, problem, err := e.kernel.ReadBase()
	if err != nil {
		return fmt.Errorf("read table inet %s back: %w", TableName, err)
	}
	e.observed.Base, e.observed.Problem = base, problem
	for _, m := range e.streams {
		m.stale = true
	}
	if problem != "" {
		for _, p := range plans {
			p.fail(fmt.Errorf("table inet %s is not as it was written: %s", TableName, problem))
		}
	}
	return nil
}
