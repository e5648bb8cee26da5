package dataplane

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
)

// routeOnly installs missing rules and routes of targets and changes nothing else: health checks
// need the fwmarks of targets before the first desired state. The targets remain pending, because
// the first desired state adds their chains and reports failures.
func (engine *engine) routeOnly(desired *plan.Desired) {
	if engine.readErr != nil || engine.desired != nil {
		return
	}
	engine.fwmarks.begin()
	var fresh []plan.InstalledTarget
	for _, name := range slices.Sorted(maps.Keys(desired.Streams)) {
		record := engine.record(name)
		for _, target := range desired.Streams[name].Targets {
			// Targets of an earlier process keep their fwmarks, which flows have as connection marks.
			_, recorded := record.targets[target.Name]
			if recorded || engine.holds.held(name) || engine.adoptFWMark(name, target) || !engine.network.Connects(target.IPs) {
				continue
			}
			fwmark, err := engine.allocateFWMark()
			if err != nil {
				engine.log.Warn("failed to route targets before the first desired state", "error", err)
				return
			}
			label := plan.Label{Stream: name, Name: target.Name, IPs: plan.ByFamily(target.IPs)}
			fresh = append(fresh, plan.InstalledTarget{FWMark: fwmark, Label: label, Stage: plan.StagePending})
		}
	}
	// Also without new routes: the state has the fwmarks of adopted targets, for which checks wait.
	defer engine.diff()
	if len(fresh) == 0 {
		return
	}
	slots := make([]plan.KernelTarget, len(fresh))
	for i, t := range fresh {
		slots[i] = t.Kernel()
	}
	failures := engine.kernel.AddRoutes(slots, !engine.observed.Base)
	for i, target := range fresh {
		slot := plan.KernelTarget{Rules: slots[i].Rules, NextHops: slots[i].NextHops, Blackhole: slots[i].Blackhole}
		for _, family := range vip.Families {
			if failures[fwstate.RouteKey{FWMark: target.FWMark, Family: family}] != nil {
				slot.NextHops[family] = netip.Addr{}
			}
		}
		engine.setRoutes(target.FWMark, slot)
		engine.keepTarget(target)
	}
}
