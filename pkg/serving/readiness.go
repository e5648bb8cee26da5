package serving

import (
	"fmt"
	"slices"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// judge returns the readiness of a VIP, without the VIP.
func (evaluator *Evaluator) judge(entry *judged) *readiness.VIPReadiness {
	group, in := entry.group, 0
	if entry.verdict == nil || entry.verdict.State == vip.NotReady {
		in |= isDown
	}
	if evaluator.forwarded(entry) {
		in |= isForwarded
	}
	memo := &group.memos[in]
	if memo.evaluation != evaluator.evaluation {
		result := evaluator.readiness(group, in)
		if memo.verdict == nil || *memo.verdict != result { // an equal one keeps its address, which is compared first
			fresh := result
			memo.verdict = &fresh
		}
		memo.evaluation = evaluator.evaluation
	}
	if memo.verdict.Reason == readinessv1.VipReason_VIP_REASON_DATA_PLANE {
		if obstacle := evaluator.obstacle(entry, memo.verdict.Detail); obstacle != "" {
			own := *memo.verdict
			own.Detail = bounded(obstacle)
			return &own
		}
	}
	wasReady := entry.verdict != nil && entry.verdict.State == vip.Ready
	// The last resort keeps its reason, which keeps the VIP advertised.
	if is := memo.verdict; evaluator.reconfigured && wasReady && is.State == vip.NotReady &&
		is.Reason != readinessv1.VipReason_VIP_REASON_LAST_RESORT {
		own := *is
		own.Reason = readinessv1.VipReason_VIP_REASON_RECONFIGURED
		return &own
	}
	if is := memo.verdict; !entry.leaves.IsZero() && (is.State == vip.Ready || is.DrainEnd.After(entry.leaves)) {
		own := *is
		own.State, own.DrainEnd = vip.Draining, entry.leaves
		own.Reason, own.Detail = readinessv1.VipReason_VIP_REASON_LEAVING, ""
		return &own
	}
	if entry.suspicion != "" && memo.verdict.State == vip.Ready {
		own := *memo.verdict
		own.Reason, own.Detail = readinessv1.VipReason_VIP_REASON_PROBES, bounded(entry.suspicion)
		return &own
	}
	return memo.verdict
}

// readiness judges the VIPs of a group that are in the same circumstances.
func (evaluator *Evaluator) readiness(group *group, in int) readiness.VIPReadiness {
	family, streams := group.family, group.streams
	down, forwarded := in&isDown != 0, in&isForwarded != 0
	result := readiness.VIPReadiness{State: vip.NotReady}
	var starting, overdue uint32
	var enough, alive, lastResort bool
	var failing string
	var drainEnd time.Time
	var registering *stream // has enough targets, and may get more
	for _, stream := range streams {
		counts := &stream.tallies[family]
		alive = alive || stream.enough(counts.alive) || stream.enough(counts.alive+counts.leaving)
		// The kernel forwards a VIP to its owner only.
		if evaluator.kernel != nil && group.owner != stream {
			continue
		}
		result.ReadyTargets += counts.ready
		result.WarmingTenths += counts.cold
		result.TotalTargets += counts.total
		starting += counts.starting
		overdue += counts.overdue
		lastResort = lastResort || forwarded && stream.LastResort == trench.Depreferred && counts.ready+counts.failed > 0
		if failing == "" && counts.failing != "" {
			failing = stream.counts(family, counts.failing)
		}
		gathers := !stream.gathering.over && down
		switch {
		case gathers && forwarded && stream.enough(counts.ready):
			registering = stream
		case !gathers && forwarded && (stream.enough(counts.ready) || counts.relieved):
			enough = true
		case !gathers && forwarded && counts.drainEnd.After(drainEnd):
			// This stream explains the drain.
			drainEnd, result.Detail = counts.drainEnd, stream.describe(family)
		case result.Detail == "" && counts.total > 0:
			result.Detail = stream.describe(family)
		}
	}
	waits := down && group.settles()
	enough = enough && !waits
	switch {
	case enough:
		result.State, result.Reason, result.Detail = vip.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, failing
		if next := group.successor; next != nil {
			result.Detail = bounded(fmt.Sprintf("served by stream %s until its new stream is ready; %s", group.owner.Name,
				next.describe(family)))
		}
	case !drainEnd.IsZero():
		result.State, result.Reason = vip.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING
		result.DrainEnd = drainEnd
	case evaluator.kernel != nil && alive && !waits && registering == nil:
		result.Reason, result.Detail = readinessv1.VipReason_VIP_REASON_DATA_PLANE, evaluator.notForwarded(group)
	case registering != nil:
		result.Reason = readinessv1.VipReason_VIP_REASON_REGISTERING
		result.Detail = bounded(fmt.Sprintf("%s; no VIP rises before no new target has registered for %v",
			registering.describe(family), evaluator.options.RegistrySettle))
	case len(streams) == 0:
		result.Reason = readinessv1.VipReason_VIP_REASON_NO_STREAM
		result.Detail = "no stream of the trench file lists this VIP"
	case result.TotalTargets == 0:
		result.Reason = readinessv1.VipReason_VIP_REASON_NO_TARGETS
		result.Detail = fmt.Sprintf("no target has an %s address", family)
	// Before the next cases: targets that crash and return are checked for the first time again.
	case lastResort:
		result.Reason = readinessv1.VipReason_VIP_REASON_LAST_RESORT
	case overdue > 0:
		result.Reason = readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE
	case starting > 0:
		result.Reason = readinessv1.VipReason_VIP_REASON_NOT_CHECKED
	default:
		result.Reason = readinessv1.VipReason_VIP_REASON_TOO_FEW_READY
	}
	return result
}

// settles reports whether VIPs wait for first verdicts on targets of their family.
func (group *group) settles() bool {
	return slices.ContainsFunc(group.streams, func(s *stream) bool { return s.settles(group.family) })
}

// forwarded reports whether packets of a VIP are forwarded to its owner. A VIP stays forwarded
// while the kernel moves it from one stream to another.
func (evaluator *Evaluator) forwarded(entry *judged) bool {
	kernel, group := evaluator.kernel, entry.group
	switch {
	case kernel == nil || group.owner == nil:
		return kernel == nil
	case entry.installed == "" || kernel.state.Withheld[group.family] != "" ||
		kernel.isRevoked(revocation{vip: entry.VIP}):
		return false
	}
	return entry.installed == group.owner.Name ||
		kernel.state.Err == nil && kernel.problems[entry.VIP] == nil && kernel.serving(entry.installed, group.family)
}

// notConfirmed is the detail of a VIP that is not forwarded although no problem is known.
const notConfirmed = "not confirmed by the kernel yet"

// notForwarded explains why the kernel does not forward VIPs although targets are alive.
func (evaluator *Evaluator) notForwarded(g *group) string {
	kernel, family, stream := evaluator.kernel, g.family, g.owner
	counts := &stream.tallies[family]
	d := notConfirmed
	switch st := kernel.state.Streams[stream.Name]; {
	case kernel.state.Withheld[family] != "":
		d = kernel.state.Withheld[family]
	case !stream.enough(counts.alive) && !stream.enough(counts.alive+counts.leaving):
		d = fmt.Sprintf("of its streams only %s, whose name sorts first, is forwarded to; %s", stream.Name,
			stream.describe(family))
	case st != nil && st.Problem[family] != "":
		d = fmt.Sprintf("stream %s: %s", stream.Name, st.Problem[family])
	case kernel.state.Err != nil:
		d = kernel.state.Err.Error()
	}
	return bounded(d)
}

// obstacle returns the problem or drift of one VIP, which replaces its group's detail; "" for none.
func (evaluator *Evaluator) obstacle(entry *judged, ofGroup string) string {
	kernel := evaluator.kernel
	if p := kernel.problems[entry.VIP]; p != nil && kernel.state.Withheld[entry.group.family] == "" {
		return p.Object + ": " + p.Detail
	}
	if len(kernel.drift) > 0 && ofGroup == notConfirmed {
		return kernel.drift[entry.String()]
	}
	return ""
}
