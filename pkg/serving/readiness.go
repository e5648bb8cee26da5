package serving

import (
	"fmt"
	"slices"
	"strings"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// readiness judges one VIP.
func (e *Evaluator) readiness(v vip.VIP) readiness.VIPReadiness {
	f, streams := v.Family(), e.byVIP[v]
	r := readiness.VIPReadiness{VIP: v, State: vip.NotReady}
	var starting, overdue, suspected uint32
	var enough, held, alive bool
	var drainEnd time.Time
	var registering *stream // has enough targets, and may get more
	forwarded, by := e.forwardedBy(v)
	for _, s := range streams {
		t := &s.tallies[f]
		alive = alive || s.enough(t.alive) || s.enough(t.alive+t.leaving)
		if by != nil && by != s {
			continue
		}
		r.ReadyTargets += t.ready
		r.TotalTargets += t.total
		starting += t.starting
		overdue += t.overdue
		suspected += t.suspected
		gathers := !s.gathering.over && e.current[v].State == vip.NotReady
		switch {
		case gathers && forwarded && s.enough(t.ready):
			registering = s
		case !gathers && forwarded && (s.enough(t.ready) || t.relieved):
			held = (!enough || held) && t.ready-t.held < uint32(s.MinReady) && !t.relieved
			enough = true
		case !gathers && forwarded && t.drainEnd.After(drainEnd):
			// This stream explains the drain.
			drainEnd, r.Detail = t.drainEnd, s.describe(f)
		case r.Detail == "" && t.total > 0:
			r.Detail = s.describe(f)
		}
	}
	waits := enough && e.current[v].State == vip.NotReady && e.settles(v)
	enough = enough && !waits
	switch {
	case held && enough && e.outage != "": // a pending failure is not suspected yet
		r.State, r.Reason, r.Detail = vip.Ready, readinessv1.VipReason_VIP_REASON_SUSPECT, e.outage
	case enough:
		r.State, r.Reason, r.Detail = vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, ""
	case !drainEnd.IsZero():
		r.State, r.Reason = vip.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING
		r.DrainEnd = drainEnd
	case e.kernel != nil && alive && !waits && registering == nil:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_DATA_PLANE, e.notForwarded(v)
	case registering != nil:
		r.Reason = readinessv1.VipReason_VIP_REASON_REGISTERING
		r.Detail = bounded(fmt.Sprintf("%s; no VIP rises before no new target has registered for %v",
			registering.describe(f), e.options.RegistrySettle))
	case len(streams) == 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NO_STREAM
		r.Detail = "no stream of the trench file lists this VIP"
	case r.TotalTargets == 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NO_TARGETS
		r.Detail = fmt.Sprintf("no target has an %s address", f)
	case suspected > 0:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_SUSPECT, e.outage
	case overdue > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE
	case starting > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	default:
		r.Reason = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	}
	return r
}

// settles reports whether a VIP waits for first verdicts on targets of its family.
func (e *Evaluator) settles(v vip.VIP) bool {
	return slices.ContainsFunc(e.byVIP[v], func(s *stream) bool {
		return !s.settleEnd.IsZero() && s.tallies[v.Family()].starting > 0
	})
}

// forwardedBy reports whether packets of a VIP are forwarded, and which of its streams is to get
// them; nil for any of them. A VIP that the kernel is about to move from one stream to another is
// forwarded all the time.
func (e *Evaluator) forwardedBy(v vip.VIP) (forwarded bool, by *stream) {
	k := e.kernel
	if k == nil || len(e.byVIP[v]) == 0 {
		return k == nil, nil
	}
	by = e.owner(v)
	if k.isRevoked(revocation{vip: v}) || k.state.Withheld[v.Family()] != "" {
		return false, by
	}
	name, installed := k.state.VIPs[v]
	moves := k.state.Err == nil && k.problems[v] == nil && k.serving(name, v.Family())
	return installed && (name == by.Name || moves), by
}

// owner returns the stream that serves a VIP in the kernel: of several the one whose name sorts
// first; nil for none.
func (e *Evaluator) owner(v vip.VIP) *stream {
	if len(e.byVIP[v]) == 0 {
		return nil
	}
	return slices.MinFunc(e.byVIP[v], func(a, b *stream) int { return strings.Compare(a.Name, b.Name) })
}

// notForwarded explains why the kernel does not forward a VIP although targets are alive.
func (e *Evaluator) notForwarded(v vip.VIP) string {
	k, f := e.kernel, v.Family()
	s := e.owner(v)
	t := &s.tallies[f]
	d := "not confirmed by the kernel yet"
	switch st := k.state.Streams[s.Name]; {
	case k.state.Withheld[f] != "":
		d = k.state.Withheld[f]
	case k.problems[v] != nil:
		d = k.problems[v].Object + ": " + k.problems[v].Detail
	case !s.enough(t.alive) && !s.enough(t.alive+t.leaving):
		d = fmt.Sprintf("of its streams only %s, whose name sorts first, is forwarded to; %s", s.Name, s.describe(f))
	case st != nil && st.Problem[f] != "":
		d = fmt.Sprintf("stream %s: %s", s.Name, st.Problem[f])
	case k.state.Err != nil:
		d = k.state.Err.Error()
	default:
		for _, x := range k.state.Drift {
			if strings.HasPrefix(x.Object, "element "+v.String()+" ") {
				d = x.Object + ": " + x.Detail
			}
		}
	}
	return bounded(d)
}
