package dataplane

import (
	"fmt"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// additions is the part of a transaction that adds and changes things of a plan.
func (e *engine) additions(p *planned) (c change) {
	if p.remove {
		return c
	}
	for _, t := range p.toApply() {
		want := slotWant(t)
		if has := e.actual.slots[t.Number]; has == nil || !sameElements(*has, want) {
			c.slots = append(c.slots, want)
		}
	}
	if !p.write {
		return c
	}
	want := streamContent{name: p.name, chain: true, size: p.stream.Size, seed: p.stream.Seed}
	for _, f := range vip.Families {
		if hasFamily(p.stream.VIPs, f) {
			want.tables[f] = p.memory.tables[f].of(p.stream.Tables[f], p.targets, want.size, want.seed)
		}
	}
	now := e.actual.streams[p.name]
	if !sameContent(now, &want) {
		c.streams = append(c.streams, streamWrite{want: want, now: now})
	}
	for _, v := range p.stream.VIPs {
		by := e.actual.vips[v]
		if by == p.name || !p.forced {
			continue
		}
		if _, ours := e.installed.Streams[by]; by != "" && !ours && !p.view.repair {
			continue // Another process created it; it shows as drift.
		}
		c.vips = setVIP(c.vips, v, p.name)
	}
	return c
}

// removals is the part of a transaction that removes things of a plan.
func (e *engine) removals(p *planned) (c change) {
	for _, t := range p.gone {
		c.removeSlots = append(c.removeSlots, t.Number)
	}
	if p.remove && p.view.installed != nil {
		c.removeStreams = append(c.removeStreams, p.name)
	}
	leads := func(v vip.VIP) bool { return e.actual.vips[v] == p.name && e.owner[v] == "" }
	switch {
	case p.view.installed == nil:
	case p.remove || p.view.installed.Stage != stageApplied:
		// All that lead to it: after an interrupted change it is not known which did.
		for v := range e.actual.vips {
			if leads(v) {
				c.vips = setVIP(c.vips, v, "")
			}
		}
	default:
		for _, v := range p.view.installed.VIPs {
			if !slices.Contains(p.stream.VIPs, v) && leads(v) {
				c.vips = setVIP(c.vips, v, "")
			}
		}
	}
	return c
}

func setVIP(m map[vip.VIP]string, v vip.VIP, stream string) map[vip.VIP]string {
	if m == nil {
		m = map[vip.VIP]string{}
	}
	m[v] = stream
	return m
}

func sameContent(a, b *streamContent) bool {
	if a == nil || b == nil || a.chain != b.chain || a.size != b.size || a.seed != b.seed {
		return false
	}
	for _, f := range vip.Families {
		if (a.tables[f] == nil) != (b.tables[f] == nil) || !slices.Equal(a.tables[f], b.tables[f]) {
			return false
		}
	}
	return true
}

func (c *change) add(d change) {
	c.slots = append(c.slots, d.slots...)
	c.streams = append(c.streams, d.streams...)
	c.removeStreams = append(c.removeStreams, d.removeStreams...)
	c.removeSlots = append(c.removeSlots, d.removeSlots...)
	for v, s := range d.vips {
		if _, taken := c.vips[v]; !taken || s != "" {
			c.vips = setVIP(c.vips, v, s)
		}
	}
}

func (c *change) empty() bool {
	return !c.base && len(c.slots)+len(c.streams)+len(c.vips)+len(c.removeStreams)+len(c.removeSlots) == 0
}

// transact does one transaction for all plans, or, if that fails, one for each, so
// that what is wrong with one does not keep the others from theirs.
func (e *engine) transact(plans []*planned, repairBase bool) error {
	var all change
	add, remove := make([]change, len(plans)), make([]change, len(plans))
	for i, p := range plans {
		add[i], remove[i] = e.additions(p), e.removals(p)
		p.touched = !add[i].empty() || !remove[i].empty()
		p.vips = len(add[i].vips)+len(remove[i].vips) > 0
		all.add(add[i])
		all.add(remove[i])
	}
	all.base = !e.actual.base && (repairBase || len(all.slots)+len(all.streams) > 0)
	if all.empty() {
		return nil
	}
	if all.base {
		// Packets are forwarded without these rules, too: what fails shows as drift.
		if err := e.kernel.addCommonRules().all(); err != nil {
			e.log.Warn("failed to add policy rules", "error", err)
		}
	}
	err := e.kernel.write(all)
	if err == nil {
		return e.baseBack(all.base, plans)
	}
	e.log.Warn("a change of the data plane failed as a whole and is tried stream by stream", "streams", len(plans), "error", err)
	if all.base {
		if err := e.kernel.write(change{base: true}); err != nil {
			for _, p := range plans {
				p.fail(err)
			}
			return nil
		}
		if err := e.baseBack(true, plans); err != nil {
			return err
		}
	}
	for i, p := range plans {
		if !add[i].empty() {
			if err := e.kernel.write(add[i]); err != nil {
				p.fail(err)
			}
		}
	}
	for i, p := range plans {
		if p.failure == nil && !remove[i].empty() {
			if err := e.kernel.write(remove[i]); err != nil {
				p.fail(err)
			}
		}
	}
	return nil
}

// baseBack reads back what no stream owns.
func (e *engine) baseBack(written bool, plans []*planned) error {
	if !written {
		return nil
	}
	base, problem, err := e.kernel.readBase()
	if err != nil {
		return fmt.Errorf("read table inet %s back: %w", TableName, err)
	}
	e.actual.base, e.actual.problem = base, problem
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
