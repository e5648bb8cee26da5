package frontend

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/health"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
)

// showStart shows how far the start is. A pod that is ready before its VIPs are
// advertised lets Kubernetes delete the one that advertises them.
func (f *follower) showStart(l trench.Loaded, lb lbState) {
	p := f.process
	if f.advertised {
		return
	}
	problem := "no trench file was accepted yet: " + errorText(l.Err)
	if l.Generation > 0 {
		problem = p.startProblem(l.Config, lb)
	}
	f.advertised = problem == ""
	p.health.Set(Advertised, f.advertised, problem)
	if f.started {
		return
	}
	others := !slices.ContainsFunc(p.health.Conditions(), func(c health.Condition) bool { return !c.Serving && slices.Contains(p.parts, c.Name) })
	switch now := time.Now(); {
	case l.Generation == 0 || !others:
		f.startBy = time.Time{}
	case f.startBy.IsZero():
		f.startBy = now.Add(p.ReadyTimeout)
	case !f.advertised && !now.Before(f.startBy):
		f.started = true
		p.Log.Warn("ready after --ready-timeout, although VIPs are not advertised", "timeout", p.ReadyTimeout, "problem", problem)
		p.observer.remark("ready after --ready-timeout, although " + problem)
	}
	f.started = f.started || f.advertised
	p.health.Set(Started, f.started, problem)
}

// startProblem says what the start waits for, "" for nothing: the load balancer has
// judged every VIP, and those that are ready are advertised for their family.
func (p *process) startProblem(c *trench.Config, lb lbState) string {
	// Not before every decision on what the load balancer said is known here.
	if p.Gating && (!lb.Synced || p.applied.Load().InstanceID != lb.InstanceID) {
		return "the load balancer has not judged the VIPs yet"
	}
	s := p.observer.state
	s.mu.RLock()
	defer s.mu.RUnlock()
	for _, v := range c.Attractor.VIPs {
		switch st := s.vips[v]; {
		case p.Gating && !st.Spoken:
			return fmt.Sprintf("the load balancer has not judged VIP %s", v)
		case p.Gating && st.Word.State != readiness.Ready:
		case st.Decision.Advertisement == gate.Withdrawn:
			return strings.TrimSuffix(fmt.Sprintf("VIP %s is ready and not advertised, %s: %s", v, st.Decision.Reason, p.why(st.Decision.Reason, v.Family())), ": ")
		}
	}
	return ""
}
