package serving

import (
	"fmt"
	"slices"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
)

// judge returns the readiness of a VIP, without the VIP.
func (e *Evaluator) judge(j *judged) *readiness.VIPReadiness {
	g, in := j.group, 0
	if j.verdict == nil || j.verdict.State == vip.NotReady {
		in |= isDown
	}
	if e.forwarded(j) {
		in |= isForwarded
	}
	m := &g.memos[in]
	if m.evaluation != e.evaluation {
		is := e.readiness(g, in)
		if m.verdict == nil || *m.verdict != is { // an equal one keeps its address, which is compared first
			fresh := is
			m.verdict = &fresh
		}
		m.evaluation = e.evaluation
	}
	if m.verdict.Reason == readinessv1.VipReason_VIP_REASON_DATA_PLANE {
		if obstacle := e.obstacle(j, m.verdict.Detail); obstacle != "" {
			own := *m.verdict
			own.Detail = bounded(obstacle)
			return &own
		}
	}
	if is := m.verdict; !j.leaves.IsZero() && (is.State == vip.Ready || is.DrainEnd.After(j.leaves)) {
		own := *is
		own.State, own.DrainEnd = vip.Draining, j.leaves
		own.Reason, own.Detail = readinessv1.VipReason_VIP_REASON_LEAVING, ""
		return &own
	}
	return m.verdict
}

// readiness judges the VIPs of a group that are in the same circumstances.
func (e *Evaluator) readiness(g *group, in int) readiness.VIPReadiness {
	f, streams := g.family, g.streams
	down, forwarded := in&isDown != 0, in&isForwarded != 0
	r := readiness.VIPReadiness{State: vip.NotReady}
	var starting, overdue uint32
	var enough, alive bool
	var failing string
	var drainEnd time.Time
	var registering *stream // has enough targets, and may get more
	for _, s := range streams {
		t := &s.tallies[f]
		alive = alive || s.enough(t.alive) || s.enough(t.alive+t.leaving)
		// The kernel forwards a VIP to its owner only.
		if e.kernel != nil && g.owner != s {
			continue
		}
		r.ReadyTargets += t.ready
		r.TotalTargets += t.total
		starting += t.starting
		overdue += t.overdue
		if failing == "" && t.failing != "" {
			failing = s.counts(f, t.failing)
		}
		gathers := !s.gathering.over && down
		switch {
		case gathers && forwarded && s.enough(t.ready):
			registering = s
		case !gathers && forwarded && (s.enough(t.ready) || t.relieved):
			enough = true
		case !gathers && forwarded && t.drainEnd.After(drainEnd):
			// This stream explains the drain.
			drainEnd, r.Detail = t.drainEnd, s.describe(f)
		case r.Detail == "" && t.total > 0:
			r.Detail = s.describe(f)
		}
	}
	waits := down && g.settles()
	enough = enough && !waits
	switch {
	case enough:
		r.State, r.Reason, r.Detail = vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, failing
	case !drainEnd.IsZero():
		r.State, r.Reason = vip.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING
		r.DrainEnd = drainEnd
	case e.kernel != nil && alive && !waits && registering == nil:
		r.Reason, r.Detail = readinessv1.VipReason_VIP_REASON_DATA_PLANE, e.notForwarded(g)
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
	case overdue > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE
	case starting > 0:
		r.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	default:
		r.Reason = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	}
	return r
}

// settles reports whether VIPs wait for first verdicts on targets of their family.
func (g *group) settles() bool {
	return slices.ContainsFunc(g.streams, func(s *stream) bool { return s.settles(g.family) })
}

// forwarded reports whether packets of a VIP are forwarded to its owner. A VIP stays forwarded
// while the kernel moves it from one stream to another.
func (e *Evaluator) forwarded(j *judged) bool {
	k, g := e.kernel, j.group
	switch {
	case k == nil || g.owner == nil:
		return k == nil
	case j.installed == "" || k.state.Withheld[g.family] != "" || k.isRevoked(revocation{vip: j.VIP}):
		return false
	}
	return j.installed == g.owner.Name ||
		k.state.Err == nil && k.problems[j.VIP] == nil && k.serving(j.installed, g.family)
}

// notConfirmed is the detail of a VIP that is not forwarded although no problem is known.
const notConfirmed = "not confirmed by the kernel yet"

// notForwarded explains why the kernel does not forward VIPs although targets are alive.
func (e *Evaluator) notForwarded(g *group) string {
	k, f, s := e.kernel, g.family, g.owner
	t := &s.tallies[f]
	d := notConfirmed
	switch st := k.state.Streams[s.Name]; {
	case k.state.Withheld[f] != "":
		d = k.state.Withheld[f]
	case !s.enough(t.alive) && !s.enough(t.alive+t.leaving):
		d = fmt.Sprintf("of its streams only %s, whose name sorts first, is forwarded to; %s", s.Name, s.describe(f))
	case st != nil && st.Problem[f] != "":
		d = fmt.Sprintf("stream %s: %s", s.Name, st.Problem[f])
	case k.state.Err != nil:
		d = k.state.Err.Error()
	}
	return bounded(d)
}

// obstacle returns the problem or drift of a single VIP, which replaces the detail of its group; ""
// if it has none.
func (e *Evaluator) obstacle(j *judged, ofGroup string) string {
	k := e.kernel
	if p := k.problems[j.VIP]; p != nil && k.state.Withheld[j.group.family] == "" {
		return p.Object + ": " + p.Detail
	}
	if len(k.drift) > 0 && ofGroup == notConfirmed {
		return k.drift[j.String()]
	}
	return ""
}
