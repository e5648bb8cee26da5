package dataplane

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/vip"
)

// planned is a plan on its way into the kernel.
type planned struct {
	streamPlan
	view   view
	memory *streamMemory
	// undone are targets of which something could not be done, with why.
	undone map[string]error
	// failure says why the stream, or the removal of something of it, failed.
	failure error
	// touched: something of it is in the transaction; vips: elements of VIPs as well.
	touched, vips bool
}

func (p *planned) fail(err error) {
	if p.failure == nil {
		p.failure = err
	}
}

// toApply lists the targets that are compared with the kernel and brought there.
func (p *planned) toApply() []installedTarget {
	return slices.DeleteFunc(sortedTargets(p.targets), func(t installedTarget) bool { return !p.apply[t.Number] })
}

// apply carries plans out: first rules and routes, then one transaction in nftables,
// then what is gone is removed; then all of it is read back. After a crash at any step
// the next process finds in the kernel what was done.
//
// An error is about everything; what fails for one stream is in its failure.
func (e *engine) apply(plans []*planned, repairBase bool) error {
	fault(stepPlanned)
	for _, p := range plans {
		e.begin(p)
		e.settle(p.name, &p.streamPlan)
		e.logPlan(p)
	}
	e.makeWays(plans)
	fault(stepWays)

	if err := e.transact(plans, repairBase); err != nil {
		e.need.all = true
		e.redo(plans)
		return err
	}
	fault(stepWritten)

	e.removeTraces(plans)

	if err := e.readBack(plans); err != nil {
		e.need.all = true
		e.redo(plans)
		return err
	}
	fault(stepReadBack)
	e.conclude(plans)
	return nil
}

// redo has the next pass plan again.
func (e *engine) redo(plans []*planned) {
	for _, p := range plans {
		p.memory.dirty = true
	}
}

// begin notes what is about to change.
func (e *engine) begin(p *planned) {
	for _, t := range p.gone {
		t.Stage = stageRemoving
		e.keepTarget(t)
	}
	if p.remove {
		if p.view.installed != nil {
			s := *p.view.installed
			s.Stage = stageRemoving
			e.keepStream(s)
		}
		return
	}
	for _, t := range p.toApply() {
		t.Stage = stagePending
		e.keepTarget(t)
	}
	s := p.stream
	if p.write {
		s.Stage = stagePending
	}
	e.keepStream(s)
}

// makeWays makes rules and routes. Targets that they do not lead to stay out of the
// tables.
func (e *engine) makeWays(plans []*planned) {
	var slots []slotContent
	made := map[uint32]bool{}
	for _, p := range plans {
		for _, t := range p.toApply() {
			want := slotWant(t)
			if has := e.actual.slots[t.Number]; has == nil || !sameWays(*has, want) {
				slots = append(slots, want)
				made[t.Number] = true
			}
		}
	}
	if len(slots) == 0 {
		return
	}
	failures := e.kernel.addWays(slots)
	for _, p := range plans {
		for _, t := range p.toApply() {
			if !made[t.Number] {
				continue
			}
			want := slotWant(t)
			for _, f := range vip.Families {
				if !want.rules[f] {
					continue
				}
				err := failures[wayKey{t.Number, f}]
				if err == nil {
					err = e.checkWay(t, f, want.hops[f])
				}
				if err != nil {
					want.hops[f] = netip.Addr{}
					p.drop(t.Name, f)
					p.leaveUndone(t.Name, err)
				}
			}
			e.setWays(t.Number, want)
			if p.undone[t.Name] == nil {
				delete(e.lost, t.Number)
			}
			p.memory.stale = true
		}
	}
}

func (p *planned) leaveUndone(target string, err error) {
	if p.undone == nil {
		p.undone = map[string]error{}
	}
	if p.undone[target] == nil {
		p.undone[target] = err
	}
}

// checkWay asks the kernel where packets for a target would go.
func (e *engine) checkWay(t installedTarget, f vip.Family, hop netip.Addr) error {
	got, err := e.kernel.way(t.Number, f)
	switch {
	case err != nil:
		return fmt.Errorf("ask the kernel where mark %d leads to (%s): %w", t.Number, familyName(f), err)
	case !got.IsValid():
		return fmt.Errorf("packets with mark %d are dropped instead of going to %s", t.Number, hop)
	case got != hop:
		return fmt.Errorf("packets with mark %d go to %s instead of %s", t.Number, got, hop)
	}
	return nil
}

// removeTraces removes what is left of targets that are gone from nftables: the
// connection-tracking entries first, so that no flow has the number when it leads
// nowhere, then rules and routes.
func (e *engine) removeTraces(plans []*planned) {
	var gone []uint32
	for _, p := range plans {
		if p.failure == nil {
			for _, t := range p.gone {
				gone = append(gone, t.Number)
			}
		}
	}
	if len(gone) == 0 {
		return
	}
	forgetErr := e.kernel.forget(gone)
	fault(stepForgotten)
	removeErr := e.kernel.removeWays(gone)
	fault(stepUnrouted)
	for _, p := range plans {
		if len(p.gone) == 0 {
			continue
		}
		if forgetErr != nil {
			p.fail(fmt.Errorf("forget the connections of removed targets: %w", forgetErr))
		}
		if removeErr != nil {
			p.fail(fmt.Errorf("remove rules and routes of removed targets: %w", removeErr))
		}
	}
}

// readBack reads from the kernel what was touched.
func (e *engine) readBack(plans []*planned) error {
	touched := slices.DeleteFunc(slices.Clone(plans), func(p *planned) bool { return !p.touched })
	var gone []uint32
	for _, p := range plans {
		p.memory.stale = true
		for _, t := range p.gone {
			gone = append(gone, t.Number)
		}
	}
	if len(touched) >= manyStreams {
		e.need.all = false
		if err := e.readAll(); err != nil {
			return err
		}
	} else if err := e.readTouched(touched); err != nil {
		return err
	}
	if len(gone) == 0 {
		return nil
	}
	ways, err := e.kernel.readWays(gone)
	if err != nil {
		return fmt.Errorf("read rules and routes back: %w", err)
	}
	for _, number := range gone {
		w := ways[number]
		if w == nil {
			w = &slotContent{}
		}
		e.setWays(number, *w)
		if s := e.actual.slots[number]; sameWays(*s, slotContent{}) && !s.chain && s.flows == [len(vip.Families)]bool{} {
			delete(e.actual.slots, number)
		}
	}
	return nil
}

func (e *engine) readTouched(plans []*planned) error {
	var numbers []uint32
	vips := false
	for _, p := range plans {
		for number, apply := range p.apply {
			if apply {
				numbers = append(numbers, number)
			}
		}
		for _, t := range p.gone {
			numbers = append(numbers, t.Number)
		}
		vips = vips || p.vips
		if !p.write && !p.remove {
			continue
		}
		s, err := e.kernel.readStream(p.name)
		if err != nil {
			return fmt.Errorf("read stream %s back: %w", p.name, err)
		}
		if s == nil {
			delete(e.actual.streams, p.name)
		} else {
			e.actual.streams[p.name] = s
		}
	}
	if len(numbers) > 0 {
		slots, err := e.kernel.readSlots(numbers)
		if err != nil {
			return fmt.Errorf("read targets back: %w", err)
		}
		for _, number := range numbers {
			e.setElements(number, slots[number])
		}
	}
	if vips {
		all, err := e.kernel.readVIPs()
		if err != nil {
			return fmt.Errorf("read VIPs back: %w", err)
		}
		if all == nil {
			all = map[vip.VIP]string{}
		}
		e.actual.vips = all
	}
	return nil
}

// conclude notes what was read back: what is in the kernel is applied, what is gone is
// forgotten, and the rest is tried again.
func (e *engine) conclude(plans []*planned) {
	for _, p := range plans {
		for _, t := range p.gone {
			if e.actual.slots[t.Number] == nil && p.failure == nil {
				e.dropTarget(t)
				e.log.Info("a target is gone from the data plane", "stream", t.Stream, "target", t.Name, "number", t.Number)
			} else {
				p.fail(fmt.Errorf("target %s (number %d) is still in the kernel after its removal", t.Name, t.Number))
			}
		}
		if p.remove {
			if p.failure == nil && e.actual.streams[p.name] != nil {
				p.fail(fmt.Errorf("the chain of stream %s is still in the kernel after its removal", p.name))
			}
			if p.failure == nil && p.view.installed != nil {
				delete(e.installed.Streams, p.name)
				p.memory.stale = true
			}
			e.finish(p)
			continue
		}
		for _, t := range p.toApply() {
			want := slotWant(t)
			has := e.actual.slots[t.Number]
			switch {
			case p.undone[t.Name] != nil:
			case has == nil || !sameElements(*has, want):
				p.fail(fmt.Errorf("the chain of target %s (number %d), or its elements, are not in the kernel after they were written", t.Name, t.Number))
			default:
				e.keepTarget(t)
			}
		}
		if p.write {
			if err := e.confirm(p); err != nil {
				p.fail(err)
			} else {
				e.keepStream(p.stream)
			}
		}
		e.finish(p)
	}
}

// confirm compares a stream that was written with what was read back. Elements of
// VIPs that somebody else made are no failure of ours.
func (e *engine) confirm(p *planned) error {
	a := e.actual.streams[p.name]
	want := streamContent{name: p.name, chain: true, size: p.stream.Size, seed: p.stream.Seed}
	for _, f := range vip.Families {
		if hasFamily(p.stream.VIPs, f) {
			want.tables[f] = p.memory.tables[f].of(p.stream.Tables[f], p.targets, want.size, want.seed)
		}
	}
	if !sameContent(a, &want) {
		return fmt.Errorf("chain and maps of stream %s are not in the kernel as they were written", p.name)
	}
	for _, v := range p.stream.VIPs {
		if p.forced && e.actual.vips[v] == "" {
			return fmt.Errorf("VIP %s of stream %s is not in the kernel after it was written", v, p.name)
		}
	}
	return nil
}

// finish turns what was not done into problems.
func (e *engine) finish(p *planned) {
	m := p.memory
	for _, name := range slices.Sorted(maps.Keys(p.undone)) {
		m.problems = append(m.problems, Problem{Object: "target " + p.name + "/" + name, Detail: p.undone[name].Error(), Remedy: "the plane tries again; see that the target is on a connected network and nobody else's rules or routes are in its way"})
		m.failure = p.undone[name]
	}
	if p.failure == nil {
		return
	}
	m.failure = p.failure
	problem := Problem{Object: "stream " + p.name, Detail: p.failure.Error(), Remedy: "the plane tries again; look at the table with: nft list table inet " + TableName}
	if foreign, ok := errors.AsType[*foreignError](p.failure); ok {
		problem.Object, problem.Remedy = foreign.object, "remove or rename it, or the stream; what is of vipgate is marked by comments"
	}
	if !p.remove {
		problem.VIPs = p.stream.VIPs
	}
	m.problems = append(m.problems, problem)
}

// logPlan says what is about to be done.
func (e *engine) logPlan(p *planned) {
	for _, t := range p.gone {
		e.log.Info("a target leaves the data plane", "stream", t.Stream, "target", t.Name, "number", t.Number)
	}
	if p.remove {
		if p.view.installed != nil {
			e.log.Info("a stream leaves the data plane", "stream", p.name)
		}
		return
	}
	for _, t := range sortedTargets(p.targets) {
		old, recorded := p.view.targets[t.Name]
		switch {
		case !recorded:
			e.log.Info("a target comes into the data plane", "stream", t.Stream, "target", t.Name, "number", t.Number, "ips", t.IPs)
		case !t.DrainEnd.IsZero() && old.DrainEnd.IsZero():
			e.log.Info("a target was left out while it served, and is drained", "stream", t.Stream, "target", t.Name, "number", t.Number, "until", t.DrainEnd)
		case !sameAddresses(t.IPs, old.IPs):
			e.log.Info("a target has other addresses", "stream", t.Stream, "target", t.Name, "number", t.Number, "ips", t.IPs)
		}
	}
}
