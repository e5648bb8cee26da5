package frontend

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/logs"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
)

// showStart updates Started and Advertised. If a pod were ready before its VIPs are advertised,
// Kubernetes would delete the pod that advertises them.
func (f *follower) showStart(l trench.Loaded, lb lbState) {
	if f.advertised {
		return
	}
	problem := "no trench file accepted yet: " + logs.Text(l.Err)
	if l.Generation > 0 {
		problem = f.startProblem(l.Config, lb)
	}
	f.advertised = problem == ""
	f.health.Set(Advertised, f.advertised, problem)
	if f.started {
		return
	}
	others := !slices.ContainsFunc(f.health.Conditions(), func(c health.Condition) bool {
		return !c.Serving && slices.Contains(f.parts, c.Name)
	})
	switch now := time.Now(); {
	case l.Generation == 0 || !others:
		f.startBy = time.Time{}
	case f.startBy.IsZero():
		f.startBy = now.Add(f.ReadyTimeout)
	case !f.advertised && !now.Before(f.startBy):
		f.started = true
		f.Log.Warn("ready after --ready-timeout, although VIPs are not advertised",
			"timeout", f.ReadyTimeout, "problem", problem)
		f.observer.note("ready after --ready-timeout, although " + problem)
	}
	f.started = f.started || f.advertised
	f.health.Set(Started, f.started, problem)
}

// startProblem returns what the start waits for, or "": the load balancer must have reported every
// VIP, and each ready VIP must be advertised.
func (p *process) startProblem(c *trench.Config, lb lbState) string {
	// Every decision on the load balancer's snapshot must have been applied here.
	if !p.Gate.Ungated && (!lb.Synced || p.applied.Load().InstanceID != lb.Position.InstanceID) {
		return "load balancer has not reported the VIPs yet"
	}
	s := p.observer.state
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, v := range c.Attractor.VIPs {
		switch st := s.vips[v]; {
		case !p.Gate.Ungated && st.Readiness == nil:
			return fmt.Sprintf("load balancer has not reported VIP %s", v)
		case !p.Gate.Ungated && st.Readiness.State != readiness.Ready:
		case st.Decision.Advertisement == gate.Withdrawn:
			return strings.TrimSuffix(fmt.Sprintf("VIP %s is ready and not advertised, %s: %s",
				v, st.Decision.Reason, p.reasonDetail(st.Decision.Reason, v.Family())), ": ")
		}
	}
	return ""
}
