package dataplane

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// place names a target in the desired state.
type place struct{ stream, target string }

// handover is an installed target with its next place.
type handover struct {
	plan.InstalledTarget
	to      place
	request plan.Request
	drains  bool // to is no place of the desired state: the target keeps its flows until its drain ends
}

// followAddresses gives the fwmark of an installed target to the desired target that has its
// addresses, in whichever stream and by whichever name: the connection tracking entries of its
// flows have that fwmark. The targets of a removed stream without such a successor drain in the
// stream that got its VIPs.
func (engine *engine) followAddresses(now time.Time) {
	wanted := engine.placesWanted()
	var list []handover
	for _, name := range slices.Sorted(maps.Keys(engine.streams)) {
		record, desired := engine.streams[name], engine.desired.Streams[name]
		if record.desired == desired && desired != nil || name == noStream {
			continue
		}
		stays := placesOf(desired)
		for _, target := range plan.SortedTargets(record.targets) {
			if target.Stage == plan.StageRemoving || stays[target.Name] == target.IPs {
				continue
			}
			next := handover{InstalledTarget: target, request: record.requestOf(target)}
			var found bool
			if next.to, found = wanted[target.IPs]; found {
				delete(wanted, target.IPs)
			} else if heir := engine.heirOf(record); desired == nil && heir != "" && engine.drains(record, &next, now) {
				next.to = place{heir, next.draining()}
			} else {
				continue
			}
			list = append(list, next)
		}
	}
	engine.handOver(list, now)
}

// placesWanted returns the places of the changed streams whose targets are not installed with their
// addresses, or have a fwmark without flows: their stream had no VIP yet.
func (engine *engine) placesWanted() map[[len(vip.Families)]netip.Addr]place {
	wanted := map[[len(vip.Families)]netip.Addr]place{}
	for name, desired := range engine.desired.Streams {
		record := engine.streams[name]
		if record.desired == desired {
			continue
		}
		for target, ips := range placesOf(desired) {
			old, recorded := record.targets[target]
			to := place{name, target}
			// Of several streams the one whose name sorts first gets the fwmark, in every run.
			vacant := !recorded || old.IPs != ips || record.installed == nil || len(record.installed.VIPs) == 0
			if by, taken := wanted[ips]; vacant && (!taken || name < by.stream) {
				wanted[ips] = to
			}
		}
	}
	return wanted
}

// placesOf returns the addresses of each target of a stream; none of a nil stream.
func placesOf(stream *plan.Stream) map[string][len(vip.Families)]netip.Addr {
	places := map[string][len(vip.Families)]netip.Addr{}
	for i := 0; stream != nil && i < len(stream.Targets); i++ {
		places[stream.Targets[i].Name] = plan.ByFamily(stream.Targets[i].IPs)
	}
	return places
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
		if stays := engine.desired.Streams[target.Stream]; stays != nil && target.to.stream != target.Stream {
			engine.guests.add(plan.Guest{Stream: target.Stream, FWMark: target.FWMark}, now, now.Add(stays.DrainTime))
		}
		delete(record.targets, target.Name)
		delete(record.requests, target.Name)
		record.dirty, record.stale, record.reachedIn = true, true, nil
	}
	for _, target := range list {
		record := engine.record(target.to.stream)
		if displaced, taken := record.targets[target.to.target]; taken {
			next := handover{InstalledTarget: displaced}
			engine.drains(record, &next, now)
			delete(record.requests, displaced.Name)
			next.Name, next.Stage = next.draining(), plan.StagePending
			engine.keepTarget(next.InstalledTarget)
		}
		if !target.drains {
			target.DrainEnd, target.DrainEndMilli, target.DrainMilli = time.Time{}, 0, 0
			// In another stream a check must pass first, through its VIPs.
			if target.to.stream != target.Stream {
				target.request = target.request.WithoutNewFlows()
			}
			record.requests[target.to.target] = target.request
		}
		target.Stream, target.Name, target.Stage = target.to.stream, target.to.target, plan.StagePending
		record.dirty = true
		engine.keepTarget(target.InstalledTarget)
	}
}
