package status

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	lbv1 "github.com/vipgate/vipgate/pkg/api/lb/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	targetv1 "github.com/vipgate/vipgate/pkg/api/target/v1"
)

// LB renders the status of a load balancer.
func (view View) LB(status *lbv1.Status, now time.Time) string {
	var out strings.Builder
	fmt.Fprintf(&out, "lb %s, trench %s\n", cut(status.GetVersion(), maxCell), cut(status.GetTrench(), maxCell))
	if status.GetGoingAway() {
		out.WriteString("GOING AWAY: the frontend moves traffic away\n")
	}
	if !status.GetSynced() {
		out.WriteString("NOT SYNCED: not every target was checked yet; no VIP is reported\n")
	}
	// A forgotten hold must not be missed, so it is at the top.
	holds(&out, status.GetDataPlane(), now)

	// Without any report, "advertises 0" would look like a fault of the frontend.
	ready, advertised, reported := 0, 0, 0
	counts := summary{}
	for _, vip := range status.GetVips() {
		report := vip.GetReadiness()
		if report.GetState() == readinessv1.VipState_VIP_STATE_READY {
			ready++
		}
		if vip.GetReported() != nil {
			reported++
		}
		if isAdvertised(reportedAdvertisement(vip.GetReported())) {
			advertised++
		}
		// Count by reason: with thousands of VIPs the table below is too long to read.
		counts[group{vipStates[report.GetState()].rank, vipState(report.GetState()), Explain(report.GetReason())}]++
	}
	fmt.Fprintf(&out, "\n%d of %s ready; ", ready, plural(len(status.GetVips()), "VIP"))
	if reported == 0 {
		out.WriteString("no frontend reports what it advertises\n")
	} else {
		fmt.Fprintf(&out, "the frontend advertises %d\n", advertised)
	}
	counts.write(&out, view)
	// Causes come before the tables, which may have thousands of rows.
	writeConditions(&out, status.GetConditions())
	writeConfigurationError(&out, status.GetConfigurationError(), status.GetTrench(), "")

	var head table
	if view.Wide {
		head.row("position", position(status.GetPosition()))
	}
	if !view.Problems {
		head.row("lease", status.GetLease().AsDuration().String())
		head.row("identity", identity(status.GetSpiffeId(), status.GetIdentityExpires(), now))
	}
	head.write(&out)

	view.writeTable(&out, lbVIPs(only(view, status.GetVips(), func(vip *lbv1.VipStatus) bool {
		return vip.GetReadiness().GetState() != readinessv1.VipState_VIP_STATE_READY ||
			reportedAdvertisement(vip.GetReported()) != readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	}), now), 0, 2, "VIPs")
	sources(only(view, status.GetSources(), func(source *lbv1.SourceStatus) bool { return !source.GetLive() }), now).
		write(&out)
	for _, source := range status.GetSources() {
		writeList(&out, "Ignored from the "+clean(source.GetName())+":", single(source.GetProblems()))
	}
	probes(only(view, status.GetProbes(), func(probe *lbv1.ProbeStatus) bool {
		return !probe.GetLive() || len(probe.GetDeadVips()) > 0
	}), status.GetProbeQuorum(), now).write(&out)
	if !view.Problems {
		streams(status.GetStreams()).write(&out)
	}
	view.writeTable(&out, targets(status.GetStreams(), now, view.Problems), 1, 4, "targets")
	view.writeDataPlane(&out, status.GetDataPlane(), now)
	if len(status.GetWatchers()) == 0 {
		out.WriteString("\nNo frontend is connected to the readiness socket.\n")
	}
	if !view.Problems {
		watchers(status.GetWatchers(), now).write(&out)
	}
	return out.String()
}

// reportedAdvertisement returns the advertisement that a frontend reports. A VIP that no gateway
// receives is not advertised, although the frontend announces it.
func reportedAdvertisement(reported *readinessv1.VipAdvertisement) readinessv1.Advertisement {
	if reported.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED {
		return readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	}
	return reported.GetAdvertisement()
}

func lbVIPs(all []*lbv1.VipStatus, now time.Time) *table {
	rank := func(vip *lbv1.VipStatus) int { return vipStates[vip.GetReadiness().GetState()].rank }
	rows := newTable("VIP", "STATE", "SINCE", "TARGETS", "ADVERTISED", "FRONTEND'S REASON", "REASON")
	for _, vip := range problemsFirst(all, rank) {
		report := vip.GetReadiness()
		shown, frontendReason := "not reported", none
		if advertisement := vip.GetReported(); advertisement != nil {
			shown, frontendReason = advertised(reportedAdvertisement(advertisement)), Explain(advertisement.GetReason()).Short
			if advertisement.GetUnconfirmed() {
				shown += " (unconfirmed)"
			}
		}
		rows.add(vip.GetVip(), vipState(report.GetState()), ago(report.GetSince(), now),
			readyTargets(report), shown, frontendReason, lbReason(report))
	}
	return rows
}

// targetReady is the state of a target that passes its checks.
const targetReady = "ready"

// targetState normalizes a state: "NOT_READY" and "not ready" are the same.
func targetState(text string) string { return strings.ReplaceAll(strings.ToLower(text), "_", " ") }

func streams(all []*lbv1.StreamStatus) *table {
	rows := newTable("STREAM", "VIPS", "MIN READY", "READY", "TARGETS")
	for _, stream := range all {
		ready := 0
		for _, target := range stream.GetTargets() {
			if targetState(target.GetState()) == targetReady {
				ready++
			}
		}
		rows.add(stream.GetName(), names(stream.GetVips()), stream.GetMinReady(), ready, len(stream.GetTargets()))
	}
	return rows
}

func sources(all []*lbv1.SourceStatus, now time.Time) *table {
	rows := newTable("SOURCE", "STATE", "SINCE", "TARGETS", "ON LOSS", "DETAIL")
	for _, source := range all {
		state := "GONE"
		if source.GetLive() {
			state = "live"
		}
		rows.add(source.GetName(), state, ago(source.GetSince(), now), source.GetTargets(), source.GetOnGone(),
			source.GetDetail())
	}
	return rows
}

// probes lists the probes that report verdicts, but those without a lease: nothing depends on them.
func probes(all []*lbv1.ProbeStatus, quorum uint32, now time.Time) *table {
	rows := newTable(fmt.Sprintf("PROBE (%d MUST AGREE)", quorum), "STATE", "AGE", "PATHS", "THROUGH THIS POD",
		"DEAD VIPS")
	for _, probe := range all {
		state, age := "absent", none
		if probe.GetLive() {
			state = "live"
		}
		if probe.GetLastReport() != nil {
			age = ago(probe.GetLastReport(), now)
		}
		rows.add(probe.GetSpiffeId(), state, age, probe.GetPaths(),
			fmt.Sprintf("%d, %d dead", probe.GetPathsHere(), probe.GetDeadHere()), names(probe.GetDeadVips()))
	}
	return rows
}

func stateDetail(target *lbv1.TargetStatus, now time.Time) string {
	state := targetState(target.GetState())
	if target.GetDrainCause() == "" {
		return state
	}
	parts := target.GetDrainCause()
	if end := target.GetDrainEnd(); end != nil && end.AsTime().After(now) {
		parts = span(end.AsTime().Sub(now)) + " left, " + parts
	}
	return state + ": " + parts
}

func targets(all []*lbv1.StreamStatus, now time.Time, problems bool) *table {
	rows := newTable("STREAM", "TARGET", "ADDRESS", "STATE", "SINCE", "SOURCE", "LAST CHECK", "LAST ERROR")
	// Targets that are not ready come first: they are the reason to look.
	for _, ready := range []bool{false, true} {
		for _, stream := range all {
			for _, target := range stream.GetTargets() {
				state := targetState(target.GetState())
				if (state == targetReady) != ready || ready && problems {
					continue
				}
				checked := none
				if target.GetLastCheck() != nil {
					checked = ago(target.GetLastCheck(), now) + " ago"
				}
				rows.add(stream.GetName(), target.GetName(), target.GetAddress(), stateDetail(target, now),
					ago(target.GetSince(), now),
					names(target.GetSources()), checked, target.GetLastError())
			}
		}
	}
	return rows
}

func watchers(all []*lbv1.WatcherStatus, now time.Time) *table {
	rows := newTable("WATCH", "PEER", "READER", "SINCE", "SENT", "APPLIED", "REPORTS", "EXTERNAL CONNECTIVITY")
	for _, watcher := range all {
		applied, reports := none, "no"
		if watcher.GetAppliedRevision() > 0 {
			applied = fmt.Sprint(watcher.GetAppliedRevision())
		}
		if watcher.GetReporting() {
			reports = "yes"
		}
		rows.add(watcher.GetWatchId(), watcher.GetPeer(), watcher.GetReader(), ago(watcher.GetSince(), now),
			watcher.GetSentRevision(), applied, reports,
			families(watcher.GetFamilies()))
	}
	return rows
}

func families(all []*readinessv1.FamilyConnectivity) string {
	var parts []string
	for _, family := range all {
		name := strings.Replace(family.GetFamily().String(), "IP_FAMILY_IPV", "IPv", 1)
		parts = append(parts, name+" "+upOrDown(family.GetUp()))
	}
	return strings.Join(parts, ", ")
}

// targetRanks orders the states in the summary. Problems have no entry and therefore come first.
var targetRanks = map[targetv1.State]int{
	targetv1.State_STATE_STARTING: 1, targetv1.State_STATE_DRAINING: 1, targetv1.State_STATE_DRAINED: 1,
	targetv1.State_STATE_READY: 2,
}

// Targets renders a list of targets, sorted by stream, name and address.
func (view View) Targets(all []*targetv1.TargetInfo, now time.Time) string {
	if len(all) == 0 {
		return "no targets\n"
	}
	counts := map[targetv1.State]int{}
	for _, info := range all {
		counts[info.GetState()]++
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%d of %d addresses of targets ready\n", counts[targetv1.State_STATE_READY], len(all))
	summary := &table{}
	for _, state := range slices.SortedFunc(maps.Keys(counts), func(first, second targetv1.State) int {
		return cmp.Or(cmp.Compare(targetRanks[first], targetRanks[second]), cmp.Compare(first, second))
	}) {
		explanation := Explain(state)
		summary.explain(counts[state], explanation.Short, explanation.Meaning, explanation)
	}
	summary.align(&out, "  ")
	rows := newTable("STREAM", "TARGET", "ADDRESS", "STATE", "SINCE", "SOURCE", "REGISTERED BY", "LAST ERROR")
	for _, info := range slices.SortedStableFunc(slices.Values(only(view, all, func(info *targetv1.TargetInfo) bool {
		return info.GetState() != targetv1.State_STATE_READY
	})), func(x, y *targetv1.TargetInfo) int {
		return cmp.Or(strings.Compare(x.GetStream(), y.GetStream()), strings.Compare(x.GetName(), y.GetName()),
			strings.Compare(x.GetAddress(), y.GetAddress()))
	}) {
		rows.add(info.GetStream(), info.GetName(), info.GetAddress(), targetDetail(info), ago(info.GetSince(), now),
			names(info.GetSources()), info.GetRegisteredBy(), info.GetLastError())
	}
	rows.write(&out)
	return out.String()
}

// targetDetail returns the state with the remaining drain time and its cause.
func targetDetail(info *targetv1.TargetInfo) string {
	text := Explain(info.GetState()).Short
	why := info.GetDrainCause()
	if d := info.GetDrainFor(); d != nil {
		why = strings.TrimSuffix(span(max(0, d.AsDuration()))+" left, "+why, ", ")
	}
	if why != "" {
		text += ": " + why
	}
	return text
}

// TargetLine renders one address of a target on one line, for `--follow`.
func TargetLine(info *targetv1.TargetInfo) string {
	text := fmt.Sprintf("%s/%s %s: %s", info.GetStream(), info.GetName(), info.GetAddress(), targetDetail(info))
	if why := info.GetLastError(); why != "" && info.GetState() != targetv1.State_STATE_READY {
		text += ": " + why
	}
	return cut(text, maxLine)
}
