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
func (e *engine) routeOnly(w *plan.Desired) {
	if e.readErr != nil || e.desired != nil {
		return
	}
	e.fwmarks.begin()
	var fresh []plan.InstalledTarget
	for _, name := range slices.Sorted(maps.Keys(w.Streams)) {
		m := e.record(name)
		for _, t := range w.Streams[name].Targets {
			_, recorded := m.targets[t.Name]
			if recorded || e.holds.held(name) || e.adoptFWMark(name, t) || !e.network.Connects(t.IPs) {
				continue
			}
			fwmark, err := e.allocateFWMark()
			if err != nil {
				e.log.Warn("failed to route targets before the first desired state", "error", err)
				return
			}
			label := plan.Label{Stream: name, Name: t.Name, IPs: plan.ByFamily(t.IPs)}
			fresh = append(fresh, plan.InstalledTarget{FWMark: fwmark, Label: label, Stage: plan.StagePending})
		}
	}
	defer e.diff()
	if len(fresh) == 0 {
		return
	}
	slots := make([]plan.KernelTarget, len(fresh))
	for i, t := range fresh {
		slots[i] = t.Kernel()
	}
	failures := e.kernel.AddRoutes(slots, !e.observed.Base)
	for i, t := range fresh {
		slot := plan.KernelTarget{Rules: slots[i].Rules, NextHops: slots[i].NextHops, Blackhole: slots[i].Blackhole}
		for _, f := range vip.Families {
			if failures[fwstate.RouteKey{FWMark: t.FWMark, Family: f}] != nil {
				slot.NextHops[f] = netip.Addr{}
			}
		}
		e.setRoutes(t.FWMark, slot)
		e.keepTarget(t)
	}
}
