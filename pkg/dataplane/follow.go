package dataplane

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
)

// handover is an installed target with its next place.
type handover struct {
	plan.InstalledTarget
	to      plan.Place
	request plan.Request
	drains  bool // to is no place of the desired state: the target keeps its flows until its drain ends
}

// followAddresses gives the fwmark of an installed target to the desired target that has its
// addresses, in whichever stream and by whichever name: the connection tracking entries of its
// flows have that fwmark. The targets of a removed stream without such a successor drain in the
// stream that got its VIPs.
func (engine *engine) followAddresses(now time.Time) {
	wanted := engine.placesWanted()
	var leaving []plan.InstalledTarget
	for _, name := range slices.Sorted(maps.Keys(engine.streams)) {
		record, desired := engine.streams[name], engine.desired.Streams[name]
		if record.desired == desired && desired != nil || name == noStream {
			continue
		}
		stays := plan.AddressesOf(desired)
		for _, target := range plan.SortedTargets(record.targets) {
			if target.Stage != plan.StageRemoving && stays[target.Name] != target.IPs {
				leaving = append(leaving, target)
			}
		}
	}
	var list []handover
	// The places of the own stream first: another stream may have the same addresses.
	for _, own := range []bool{true, false} {
		leaving = slices.DeleteFunc(leaving, func(target plan.InstalledTarget) bool {
			record := engine.streams[target.Stream]
			next := handover{InstalledTarget: target, request: record.requestOf(target)}
			to, found := wanted.Take(target, own)
			if !found && !own && engine.desired.Streams[target.Stream] == nil {
				if heir := engine.heirOf(record); heir != "" && engine.drains(record, &next, now) {
					to, found = plan.Place{Stream: heir, Target: next.draining()}, true
				}
			}
			if next.to = to; found {
				list = append(list, next)
			}
			return found
		})
	}
	engine.handOver(list, now)
}

// placesWanted returns the places of the changed streams whose targets are not installed with their
// addresses, or have a fwmark without flows: their stream had no VIP yet.
func (engine *engine) placesWanted() plan.Places {
	wanted := plan.Places{}
	for _, name := range slices.Sorted(maps.Keys(engine.desired.Streams)) {
		desired, record := engine.desired.Streams[name], engine.streams[name]
		if record.desired == desired {
			continue
		}
		for target, ips := range plan.AddressesOf(desired) {
			old, recorded := record.targets[target]
			if !recorded || old.IPs != ips || record.installed == nil || len(record.installed.VIPs) == 0 {
				wanted[ips] = append(wanted[ips], plan.Place{Stream: name, Target: target})
			}
		}
	}
	return wanted
}

func (record *streamRecord) requestOf(target plan.InstalledTarget) plan.Request {
	if request, known := record.requests[target.Name]; known {
		return request
	}
	return plan.RequestOf(target, record.installed)
}

// heirOf returns the stream that gets the first VIP of a removed stream; "" for none.
func (engine *engine) heirOf(record *streamRecord) string {
	if record.installed == nil || len(record.installed.VIPs) == 0 {
		return ""
	}
	return engine.vipOwners.Owner[record.installed.VIPs[0]]
}

// drains starts the drain of a target whose stream is removed, and reports whether it drains.
func (engine *engine) drains(record *streamRecord, target *handover, now time.Time) bool {
	if target.DrainEnd.IsZero() && record.desired != nil && record.serves(target.Name) {
		target.Drain(now.Add(record.desired.DrainTime), record.desired.DrainTime)
	}
	target.drains = now.Before(target.DrainEnd)
	return target.drains
}

// serves reports whether the Maglev table of some family has a target.
func (record *streamRecord) serves(target string) bool {
	return record.installed != nil && slices.ContainsFunc(record.installed.Tables[:],
		func(names []string) bool { return slices.Contains(names, target) })
}

// draining returns a name for a target that drains although another one may have its name.
func (target *handover) draining() string { return fmt.Sprintf("%s@%d", target.Name, target.FWMark) }

// handOver moves targets to their new places. A target whose place is taken drains.
func (engine *engine) handOver(list []handover, now time.Time) {
	// Two targets may swap their places, so all leave before the first arrives.
	for _, target := range list {
		record := engine.streams[target.Stream]
		// Flows of VIPs that stay in the stream keep the target as a guest.
		if stays := engine.desired.Streams[target.Stream]; stays != nil && target.to.Stream != target.Stream {
			engine.guests.add(plan.Guest{Stream: target.Stream, FWMark: target.FWMark}, now, now.Add(stays.DrainTime))
		}
		delete(record.targets, target.Name)
		delete(record.requests, target.Name)
		record.dirty, record.stale, record.reachedIn = true, true, nil
	}
	for _, target := range list {
		record := engine.record(target.to.Stream)
		if displaced, taken := record.targets[target.to.Target]; taken {
			next := handover{InstalledTarget: displaced}
			engine.drains(record, &next, now)
			delete(record.requests, displaced.Name)
			next.Name, next.Stage = next.draining(), plan.StagePending
			engine.keepTarget(next.InstalledTarget)
		}
		if !target.drains {
			target.DrainEnd, target.DrainEndMilli, target.DrainMilli = time.Time{}, 0, 0
			// In another stream a check must pass first, through its VIPs.
			if target.to.Stream != target.Stream {
				target.request = target.request.WithoutNewFlows()
			}
			record.requests[target.to.Target] = target.request
		}
		target.Stream, target.Name, target.Stage = target.to.Stream, target.to.Target, plan.StagePending
		record.dirty = true
		engine.keepTarget(target.InstalledTarget)
	}
}
