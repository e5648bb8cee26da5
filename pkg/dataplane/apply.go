package dataplane

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// manyStreams is the number of changed streams from which one full read is cheaper than a read per
// stream.
const manyStreams = 8

// afterStep is called after each step of a change. Tests kill the process in it.
var afterStep = func(step string) {}

// streamChange is the plan of one stream while it is applied.
type streamChange struct {
	plan.StreamPlan
	input  plan.StreamInput
	record *streamRecord
	// failedTargets holds the targets whose rules or routes failed; failed: the stream failed.
	failedTargets map[string]bool
	failed        bool
	// add holds the nftables additions and changes, remove the removals.
	add, remove plan.Change
}

// fail records the stream's first failure as a problem.
func (p *streamChange) fail(err error) {
	if p.failed {
		return
	}
	problem := Problem{
		Object: "stream " + p.Name, Detail: err.Error(), VIPs: p.Stream.VIPs,
		Remedy: "it is retried; look at the table with: nft list table inet " + TableName,
	}
	if foreign, ok := errors.AsType[*fwstate.ConflictError](err); ok {
		problem.Object = foreign.Object
		problem.Remedy = "remove or rename it, or the stream; objects of vipgate have comments"
	}
	p.failed, p.record.failed = true, true
	p.record.problems = append(p.record.problems, problem)
}

// failTarget records the target's first failure as a problem and removes the target from a table.
func (p *streamChange) failTarget(name string, f vip.Family, err error) {
	p.RemoveFromTable(name, f)
	if p.failedTargets[name] {
		return
	}
	p.failedTargets[name], p.record.failed = true, true
	p.record.problems = append(p.record.problems, Problem{
		Object: "target " + p.Name + "/" + name, Detail: err.Error(),
		Remedy: "it is retried; check that the target is on a connected network, and for rules or routes of other processes",
	})
}

// toApply lists the targets whose objects are compared with the kernel and written.
func (p *streamChange) toApply() []plan.InstalledTarget {
	return slices.DeleteFunc(plan.SortedTargets(p.Targets), func(t plan.InstalledTarget) bool {
		return !p.Apply[t.FWMark]
	})
}

// kernel returns the expected kernel state of the stream.
func (p *streamChange) kernel() *plan.KernelStream {
	return p.Stream.Kernel(p.Targets, &p.record.tables)
}

// apply applies plans: rules and routes first, so that no packet is marked without a route, then
// one nftables transaction, then the removal of objects without references. Finally it reads the
// result back. After a crash at any step the next process recovers from the kernel state.
//
// An error concerns all plans. The failure of one stream is recorded in its streamChange.
func (e *engine) apply(plans []*streamChange, repairBase bool) error {
	afterStep("planned")
	for _, p := range plans {
		e.begin(p)
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
	}
	return nil
}

// begin logs the planned changes and records the objects as pending or removing.
func (e *engine) begin(p *streamChange) {
	e.markPlanned(&p.StreamPlan)
	log := e.log.With("stream", p.Name)
	for _, t := range p.Removed {
		log.Info("removing target", "target", t.Name, "fwmark", t.FWMark)
		t.Stage = plan.StageRemoving
		e.keepTarget(t)
	}
	if p.Remove {
		if p.input.Installed != nil {
			log.Info("removing stream")
			s := *p.input.Installed
			s.Stage = plan.StageRemoving
			e.keepStream(s)
		}
		return
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
		if p.Apply[t.FWMark] {
			t.Stage = plan.StagePending
			e.keepTarget(t)
		}
	}
	s := p.Stream
	if p.Write {
		s.Stage = plan.StagePending
	}
	e.keepStream(s)
}

// addRoutes installs rules and routes and removes targets without a working route from their
// Maglev tables.
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
	failures := e.kernel.AddRoutes(slots, !e.observed.Base)
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
			if err != nil {
				want.NextHops[f] = netip.Addr{}
				p.failTarget(want.Name, f, err)
			}
		}
		e.setRoutes(want.FWMark, want)
		if !p.failedTargets[want.Name] {
			delete(e.lost, want.FWMark)
		}
		p.record.stale = true
	}
}

// verifyRoute verifies with a route lookup that packets for a target reach it.
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
		// Keep the element of another process: it is reported as drift, unless Repair is set.
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
	// After a crash the installed elements are unknown: remove all that lead to the stream.
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

// transact writes all plans in one transaction. If it fails, each plan is written separately, so
// that an invalid stream does not block other streams.
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
		// Forwarding does not need these rules, so a failure is reported as drift.
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

// transactEach writes each plan in separate transactions, additions first.
func (e *engine) transactEach(plans []*streamChange, base bool) {
	write := func(p *streamChange, c plan.Change) {
		if !p.failed && !c.Empty() {
			e.pulse.Next(0) // the number of steps grows with the streams
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

// removeTargets removes the remaining objects of targets that were removed from nftables:
// connection tracking entries first, so that no flow has the fwmark after the removal of its
// routes, then rules and routes.
func (e *engine) removeTargets(plans []*streamChange) {
	var gone []uint32
	for _, p := range plans {
		if !p.failed {
			gone = append(gone, p.remove.RemoveTargets...)
		}
	}
	if len(gone) == 0 {
		return
	}
	err := e.kernel.FlushConntrack(gone)
	afterStep("flushed")
	if err == nil {
		err = e.kernel.RemoveRoutes(gone)
	}
	afterStep("unrouted")
	for _, p := range plans {
		if err != nil && len(p.Removed) > 0 {
			p.fail(fmt.Errorf("remove routes and connections of targets: %w", err))
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
	touched := slices.DeleteFunc(slices.Clone(plans), func(p *streamChange) bool {
		return p.add.Empty() && p.remove.Empty()
	})
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

// readWritten reads the written objects of a stream. Objects that only another process may have
// changed are read again when the kernel reports the change.
func (e *engine) readWritten(p *streamChange) (*plan.KernelStream, error) {
	if w := p.add.Streams; !p.Remove && len(w) == 1 && fwstate.ElementsOnly(w[0]) {
		return e.kernel.ReadTables(w[0])
	}
	return e.kernel.ReadStream(p.Name)
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
		s, err := e.readWritten(p)
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

// conclude compares a plan with the state read back: confirmed objects become applied, the records
// of removed objects are deleted, and all other objects fail and are retried.
func (e *engine) conclude(p *streamChange) {
	for _, t := range p.Removed {
		if e.observed.Targets[t.FWMark] != nil || p.failed {
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
		if !p.failed && p.input.Installed != nil {
			p.record.installed, p.record.stale = nil, true
		}
		return
	}
	for _, t := range p.toApply() {
		switch {
		case p.failedTargets[t.Name]:
		case !plan.SameNFTables(orNone(e.observed.Targets[t.FWMark]), t.Kernel()):
			p.fail(fmt.Errorf("the chain of target %s (fwmark %d), or its elements, "+
				"are not in the kernel after they were written", t.Name, t.FWMark))
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
		// An element of another process is drift, not a failure.
		if p.Forced && e.observed.VIPs[v] == "" {
			p.fail(fmt.Errorf("VIP %s of stream %s is not in the kernel after it was written", v, p.Name))
			return
		}
	}
	e.keepStream(p.Stream)
}
