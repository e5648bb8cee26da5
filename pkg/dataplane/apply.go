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

// manyStreams is the number of changed streams from which a full read is cheaper than several.
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
func (change *streamChange) fail(err error) {
	if change.failed {
		return
	}
	problem := Problem{
		Object: "stream " + change.Name, Detail: err.Error(), VIPs: change.Stream.VIPs,
		Remedy: "it is retried; look at the table with: nft list table inet " + plan.TableName,
	}
	if foreign, ok := errors.AsType[*fwstate.ConflictError](err); ok {
		problem.Object = foreign.Object
		problem.Remedy = "remove or rename it, or the stream; objects of vipgate have comments"
	}
	change.failed, change.record.failed = true, true
	change.record.problems = append(change.record.problems, problem)
}

// failTarget records the target's first failure as a problem and removes the target from a table.
func (change *streamChange) failTarget(name string, f vip.Family, err error) {
	change.RemoveFromTable(name, f)
	if change.failedTargets[name] {
		return
	}
	change.failedTargets[name], change.record.failed = true, true
	change.record.problems = append(change.record.problems, Problem{
		Object: "target " + change.Name + "/" + name, Detail: err.Error(),
		Remedy: "it is retried; check that the target is on a connected network, and for rules or routes of other processes",
	})
}

// toApply lists the targets whose objects are compared with the kernel and written.
func (change *streamChange) toApply() []plan.InstalledTarget {
	return slices.DeleteFunc(plan.SortedTargets(change.Targets), func(target plan.InstalledTarget) bool {
		return !change.Apply[target.FWMark]
	})
}

// kernel returns the expected kernel state of the stream.
func (change *streamChange) kernel() *plan.KernelStream {
	return change.Stream.Kernel(change.Targets, &change.record.tables)
}

// application applies the plans of one pass: rules and routes first, so that no packet is marked
// without a route, then one nftables transaction, then the removal of objects without references.
// Finally it reads the result back. After a crash at any step the next process recovers from the
// kernel state.
type application struct {
	*engine
	changes    []*streamChange
	repairBase bool
}

// run applies the plans. An error concerns all of them. A stream's failure is in its streamChange.
func (a *application) run() error {
	afterStep("planned")
	a.fast.suspend(a.changes)
	for _, change := range a.changes {
		a.begin(change)
	}
	a.addRoutes()
	afterStep("routes")
	a.prepareMoved()

	err := a.transact()
	if err == nil {
		afterStep("written")
		a.removeTargets()
		err = a.readBack()
	}
	if err != nil {
		// An unknown part of the change is in the kernel: read everything and plan again.
		a.stale |= nftables
		for _, change := range a.changes {
			change.record.dirty = true
		}
		return err
	}
	afterStep("read-back")
	for _, change := range a.changes {
		a.conclude(change)
	}
	return nil
}

// begin logs the planned changes and records the objects as pending or removing.
func (a *application) begin(change *streamChange) {
	a.markPlanned(&change.StreamPlan)
	log := a.log.With("stream", change.Name)
	for _, target := range change.Removed {
		log.Info("removing target", "target", target.Name, "fwmark", target.FWMark)
		// If this pass fails, the next plan continues the removal instead of draining the target.
		target.Stage = plan.StageRemoving
		a.keepTarget(target)
	}
	if change.Remove {
		if change.input.Installed != nil {
			log.Info("removing stream")
			stream := *change.input.Installed
			stream.Stage = plan.StageRemoving
			a.keepStream(stream)
		}
		return
	}
	// Pending until the read-back: readiness must not count a target that is only planned.
	for _, target := range plan.SortedTargets(change.Targets) {
		log := log.With("target", target.Name, "fwmark", target.FWMark)
		old, recorded := change.input.Targets[target.Name]
		switch {
		case !recorded:
			log.Info("adding target", "ips", target.Addresses())
		case !target.DrainEnd.IsZero() && old.DrainEnd.IsZero():
			log.Info("draining removed target", "until", target.DrainEnd)
		case target.IPs != old.IPs:
			log.Info("target addresses changed", "ips", target.Addresses())
		}
		if change.Apply[target.FWMark] {
			target.Stage = plan.StagePending
			a.keepTarget(target)
		}
	}
	stream := change.Stream
	if change.Write {
		stream.Stage = plan.StagePending
	}
	a.keepStream(stream)
}

// addRoutes installs rules and routes, and removes targets without working ones from Maglev tables.
func (a *application) addRoutes() {
	var routed []plan.KernelTarget
	changes := map[uint32]*streamChange{}
	for _, change := range a.changes {
		for _, target := range change.toApply() {
			if want := target.Kernel(); !plan.SameRoutes(a.target(target.FWMark), want) {
				routed = append(routed, want)
				changes[target.FWMark] = change
			}
		}
	}
	if len(routed) == 0 {
		return
	}
	// A rule may exist and still lead elsewhere, such as past a rule of another process with a
	// higher priority. Only a lookup shows the result.
	failures := a.kernel.AddRoutes(routed, !a.observed.Base)
	for _, want := range routed {
		change := changes[want.FWMark]
		for _, family := range vip.Families {
			if !want.Rules[family] {
				continue
			}
			err := failures[fwstate.RouteKey{FWMark: want.FWMark, Family: family}]
			if err == nil {
				err = a.verifyRoute(want.FWMark, family, want.NextHops[family])
			}
			if err != nil {
				want.NextHops[family] = netip.Addr{}
				change.failTarget(want.Name, family, err)
			}
		}
		// The lookups confirmed the routes, so they are not read back.
		a.setRoutes(want.FWMark, want)
		if !change.failedTargets[want.Name] {
			delete(a.lost, want.FWMark)
		}
		change.record.stale = true
	}
}

// additions returns the additions and changes of a plan.
func (a *application) additions(change *streamChange) plan.Change {
	additions := plan.Change{VIPs: map[vip.VIP]string{}}
	for _, target := range change.toApply() {
		if want := target.Kernel(); !plan.SameNFTables(a.target(target.FWMark), want) {
			additions.Targets = append(additions.Targets, want)
		}
	}
	if !change.Write {
		return additions
	}
	want, now := change.kernel(), a.observed.Streams[change.Name]
	if !plan.SameStream(now, want) {
		additions.Streams = append(additions.Streams, plan.StreamWrite{Desired: *want, Observed: now})
	}
	for _, v := range change.Stream.VIPs {
		by := a.observed.VIPs[v]
		// Keep the element of another process: it is reported as drift, unless Repair is set.
		foreign := by != "" && (a.streams[by] == nil || a.streams[by].installed == nil)
		if by != change.Name && change.Forced && (!foreign || change.input.Repair) {
			additions.VIPs[v] = change.Name
		}
	}
	return additions
}

// removals returns the removals of a plan.
func (a *application) removals(change *streamChange) plan.Change {
	removals := plan.Change{VIPs: map[vip.VIP]string{}}
	for _, target := range change.Removed {
		removals.RemoveTargets = append(removals.RemoveTargets, target.FWMark)
	}
	if change.input.Installed == nil {
		return removals
	}
	if change.Remove {
		removals.RemoveStreams = []string{change.Name}
	}
	// After a crash the installed elements are unknown: remove all that lead to the stream.
	all := change.Remove || change.input.Installed.Stage != plan.StageApplied
	for v, by := range a.observed.VIPs {
		if by != change.Name || a.vipOwners.Owner[v] != "" {
			continue
		}
		if _, installed := slices.BinarySearchFunc(change.input.Installed.VIPs, v, vip.Compare); installed || all {
			removals.VIPs[v] = ""
		}
	}
	return removals
}

// transact writes all plans in one transaction. If it fails, each plan is written separately, so
// that an invalid stream does not block other streams.
func (a *application) transact() error {
	var all plan.Change
	for _, change := range a.changes {
		change.add, change.remove = a.additions(change), a.removals(change)
		all.Add(change.add)
		all.Add(change.remove)
	}
	// An empty configuration creates no common objects: the first target or stream does.
	guests := a.guestChange(a.now())
	all.Add(guests)
	all.Base = !(a.observed.Base && a.observed.Checks) && (a.repairBase || len(all.Targets)+len(all.Streams) > 0)
	if all.Empty() {
		return nil
	}
	if all.Base {
		// Forwarding does not need these rules, so a failure is reported as drift.
		if err := a.kernel.AddCommonRules().Err(); err != nil {
			a.log.Warn("failed to add policy rules", "error", err)
		}
	}
	if err := a.kernel.Write(all); err != nil {
		a.log.Warn("transaction failed, retrying stream by stream", "streams", len(a.changes), "error", err)
		a.transactEach(all.Base, guests)
	} else {
		a.noteGuests(guests)
	}
	if !all.Base {
		return nil
	}
	// Without intact common objects no stream forwards packets, so their loss fails all changes.
	if err := a.readBase(); err != nil {
		return err
	}
	for _, change := range a.changes {
		if a.observed.Problem != "" {
			change.fail(fmt.Errorf("table inet %s is not as it was written: %s", plan.TableName, a.observed.Problem))
		}
	}
	return nil
}

// transactEach writes each plan in separate transactions, additions first.
func (a *application) transactEach(base bool, guests plan.Change) {
	write := func(change *streamChange, part plan.Change) {
		if !change.failed && !part.Empty() {
			a.pulse.Next(0) // the number of steps grows with the streams
			if err := a.kernel.Write(part); err != nil {
				change.fail(err)
			}
		}
	}
	if base {
		if err := a.kernel.Write(plan.Change{Base: true}); err != nil {
			for _, change := range a.changes {
				change.fail(err)
			}
		}
	}
	if !guests.Empty() {
		// A chain cannot be removed while a guest leads to it. The next pass adds the missing guests.
		if err := a.kernel.Write(guests); err != nil {
			a.log.Warn("failed to change the targets of draining flows", "error", err)
		}
		a.stale |= nftables
	}
	for _, change := range a.changes {
		write(change, change.add)
	}
	for _, change := range a.changes {
		write(change, change.remove)
	}
}

// removeTargets removes the remaining objects of targets that were removed from nftables:
// connection tracking entries first, so that no flow has the fwmark after the removal of its
// routes, then rules and routes.
func (a *application) removeTargets() {
	var gone []uint32
	for _, change := range a.changes {
		if !change.failed {
			gone = append(gone, change.remove.RemoveTargets...)
		}
	}
	if len(gone) == 0 {
		return
	}
	a.fast.forget(gone)
	err := a.kernel.FlushConntrack(gone)
	afterStep("flushed")
	if err == nil {
		err = a.kernel.RemoveRoutes(gone)
	}
	afterStep("unrouted")
	for _, change := range a.changes {
		if err != nil && len(change.Removed) > 0 {
			change.fail(fmt.Errorf("remove routes and connections of targets: %w", err))
		}
	}
}

// readBack reads the changed objects from the kernel.
func (a *application) readBack() error {
	var gone []uint32
	for _, change := range a.changes {
		change.record.stale = true
		gone = append(gone, change.remove.RemoveTargets...)
	}
	// Another process may have changed the rest; the kernel reports that separately.
	touched := slices.DeleteFunc(slices.Clone(a.changes), func(change *streamChange) bool {
		return change.add.Empty() && change.remove.Empty()
	})
	// The full read also replaces a pending read of nftables.
	if len(touched) >= manyStreams {
		a.stale &^= nftables
		if err := a.readAll(); err != nil {
			return err
		}
	} else if err := a.readTouched(touched); err != nil {
		return err
	}
	if len(gone) == 0 {
		return nil
	}
	read, err := a.kernel.ReadRoutes(gone)
	if err != nil {
		return fmt.Errorf("read rules and routes back: %w", err)
	}
	for _, fwmark := range gone {
		a.setRoutes(fwmark, orNone(read[fwmark]))
	}
	return nil
}

// readWritten reads the written objects of a stream. Objects that only another process may have
// changed are read again when the kernel reports the change.
func (a *application) readWritten(change *streamChange) (*plan.KernelStream, error) {
	if writes := change.add.Streams; !change.Remove && len(writes) == 1 && fwstate.ElementsOnly(writes[0]) {
		return a.kernel.ReadTables(writes[0])
	}
	return a.kernel.ReadStream(change.Name)
}

func (a *application) readTouched(touched []*streamChange) error {
	var fwmarks []uint32
	vips := 0
	for _, change := range touched {
		for _, target := range change.toApply() {
			fwmarks = append(fwmarks, target.FWMark)
		}
		// Read removed targets, too: conclude fails those that are still in the kernel.
		fwmarks = append(fwmarks, change.remove.RemoveTargets...)
		vips += len(change.add.VIPs) + len(change.remove.VIPs)
		if !change.Write && !change.Remove {
			continue
		}
		stream, err := a.readWritten(change)
		if err != nil {
			return fmt.Errorf("read stream %s back: %w", change.Name, err)
		}
		// A removed stream reads as nil.
		delete(a.observed.Streams, change.Name)
		if stream != nil {
			a.observed.Streams[change.Name] = stream
		}
	}
	if len(fwmarks) > 0 {
		read, err := a.kernel.ReadTargets(fwmarks)
		if err != nil {
			return fmt.Errorf("read targets back: %w", err)
		}
		for _, fwmark := range fwmarks {
			a.setTarget(fwmark, orNone(read[fwmark]), a.target(fwmark))
		}
	}
	if vips > 0 {
		// All streams share the VIP maps, so one read serves every change.
		read, err := a.kernel.ReadVIPs()
		if err != nil {
			return fmt.Errorf("read VIPs back: %w", err)
		}
		a.observed.VIPs = read
	}
	return nil
}

// conclude compares a plan with the state read back: confirmed objects become applied, the records
// of removed objects are deleted, and all other objects fail and are retried.
func (a *application) conclude(change *streamChange) {
	for _, target := range change.Removed {
		if a.observed.Targets[target.FWMark] != nil || change.failed {
			change.fail(fmt.Errorf("target %s (fwmark %d) is still in the kernel after its removal", target.Name, target.FWMark))
			continue
		}
		a.dropTarget(target)
		a.log.Info("target removed", "stream", target.Stream, "target", target.Name, "fwmark", target.FWMark)
	}
	// The record of a removed stream stays until its chain is gone, so that the removal is retried.
	if change.Remove {
		if a.observed.Streams[change.Name] != nil {
			change.fail(fmt.Errorf("the chain of stream %s is still in the kernel after its removal", change.Name))
		}
		if !change.failed && change.input.Installed != nil {
			change.record.installed, change.record.stale = nil, true
		}
		return
	}
	for _, target := range change.toApply() {
		switch {
		case change.failedTargets[target.Name]:
		case !plan.SameNFTables(a.target(target.FWMark), target.Kernel()):
			change.fail(fmt.Errorf("the chain of target %s (fwmark %d), or its elements, "+
				"are not in the kernel after they were written", target.Name, target.FWMark))
		default:
			a.keepTarget(target)
		}
	}
	if !change.Write {
		return
	}
	if !plan.SameStream(a.observed.Streams[change.Name], change.kernel()) {
		change.fail(fmt.Errorf("chain and maps of stream %s are not in the kernel as they were written", change.Name))
		return
	}
	for _, v := range change.Stream.VIPs {
		// An element of another process is drift, not a failure.
		if change.Forced && a.observed.VIPs[v] == "" {
			change.fail(fmt.Errorf("VIP %s of stream %s is not in the kernel after it was written", v, change.Name))
			return
		}
	}
	a.keepStream(change.Stream)
}
