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
func LB(s *lbv1.Status, now time.Time) string {
	var b strings.Builder
	fmt.Fprintf(&b, "lb %s, trench %s\n", cut(s.GetVersion(), maxCell), cut(s.GetTrench(), maxCell))
	if s.GetGoingAway() {
		b.WriteString("GOING AWAY: the frontend moves traffic away\n")
	}
	if !s.GetSynced() {
		b.WriteString("NOT SYNCED: not every target was checked yet; no VIP is reported\n")
	}
	holds(&b, s.GetDataPlane(), now)

	ready, advertised, reported := 0, 0, 0
	counts := summary{}
	for _, v := range s.GetVips() {
		r := v.GetReadiness()
		if r.GetState() == readinessv1.VipState_VIP_STATE_READY {
			ready++
		}
		if v.GetReported() != nil {
			reported++
		}
		if isAdvertised(reportedAdvertisement(v.GetReported())) {
			advertised++
		}
		counts[group{vipStates[r.GetState()].rank, vipState(r.GetState()), Explain(r.GetReason())}]++
	}
	fmt.Fprintf(&b, "\n%d of %s ready; ", ready, plural(len(s.GetVips()), "VIP"))
	if reported == 0 {
		b.WriteString("no frontend reports what it advertises\n")
	} else {
		fmt.Fprintf(&b, "the frontend advertises %d\n", advertised)
	}
	counts.write(&b)
	writeConditions(&b, s.GetConditions())
	writeConfigurationError(&b, s.GetConfigurationError(), s.GetTrench(), "")

	var head table
	head.row("position", fmt.Sprintf("%s, lease %v", position(s.GetPosition()), s.GetLease().AsDuration()))
	head.row("identity", identity(s.GetSpiffeId(), s.GetIdentityExpires(), now))
	b.WriteByte('\n')
	head.align(&b, "")

	lbVIPs(s.GetVips(), now).write(&b)
	sources(s.GetSources(), now).write(&b)
	for _, source := range s.GetSources() {
		writeList(&b, "Ignored from the "+clean(source.GetName())+":", single(source.GetProblems()))
	}
	streams(s.GetStreams()).write(&b)
	targets(s.GetStreams(), now).write(&b)
	writeDataPlane(&b, s.GetDataPlane(), now)
	if len(s.GetWatchers()) == 0 {
		b.WriteString("\nNo frontend is connected to the readiness socket.\n")
	}
	watchers(s.GetWatchers(), now).write(&b)
	return b.String()
}

// reportedAdvertisement returns the advertisement that a frontend reports. A VIP that no gateway
// receives is not advertised, although the frontend announces it.
func reportedAdvertisement(v *readinessv1.VipAdvertisement) readinessv1.Advertisement {
	if v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NOT_EXPORTED {
		return readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN
	}
	return v.GetAdvertisement()
}

func lbVIPs(all []*lbv1.VipStatus, now time.Time) *table {
	rank := func(v *lbv1.VipStatus) int { return vipStates[v.GetReadiness().GetState()].rank }
	t := newTable("VIP", "STATE", "SINCE", "TARGETS", "ADVERTISED", "FRONTEND'S REASON", "REASON")
	for _, v := range problemsFirst(all, rank) {
		r := v.GetReadiness()
		shown, frontendReason := "not reported", none
		if a := v.GetReported(); a != nil {
			shown, frontendReason = advertised(reportedAdvertisement(a)), Explain(a.GetReason()).Short
			if a.GetUnconfirmed() {
				shown += " (unconfirmed)"
			}
		}
		t.add(v.GetVip(), vipState(r.GetState()), ago(r.GetSince(), now),
			fmt.Sprintf("%d/%d", r.GetReadyTargets(), r.GetTotalTargets()), shown, frontendReason, lbReason(r))
	}
	return t
}

// targetReady is the state of a target that passes its checks.
const targetReady = "ready"

// targetState normalizes a state: "NOT_READY" and "not ready" are the same.
func targetState(s string) string { return strings.ReplaceAll(strings.ToLower(s), "_", " ") }

func streams(all []*lbv1.StreamStatus) *table {
	t := newTable("STREAM", "VIPS", "MIN READY", "READY", "TARGETS")
	for _, s := range all {
		ready := 0
		for _, x := range s.GetTargets() {
			if targetState(x.GetState()) == targetReady {
				ready++
			}
		}
		t.add(s.GetName(), names(s.GetVips()), s.GetMinReady(), ready, len(s.GetTargets()))
	}
	return t
}

func sources(all []*lbv1.SourceStatus, now time.Time) *table {
	t := newTable("SOURCE", "STATE", "SINCE", "TARGETS", "ON LOSS", "DETAIL")
	for _, s := range all {
		state := "GONE"
		if s.GetLive() {
			state = "live"
		}
		t.add(s.GetName(), state, ago(s.GetSince(), now), s.GetTargets(), s.GetOnGone(), s.GetDetail())
	}
	return t
}

// stateDetail returns the state of an address with its drain.
func stateDetail(x *lbv1.TargetStatus, now time.Time) string {
	state := targetState(x.GetState())
	if x.GetDrainCause() == "" {
		return state
	}
	parts := x.GetDrainCause()
	if end := x.GetDrainEnd(); end != nil && end.AsTime().After(now) {
		parts = span(end.AsTime().Sub(now)) + " left, " + parts
	}
	return state + ": " + parts
}

func targets(all []*lbv1.StreamStatus, now time.Time) *table {
	t := newTable("STREAM", "TARGET", "ADDRESS", "STATE", "SINCE", "SOURCE", "LAST CHECK", "LAST ERROR")
	for _, ready := range []bool{false, true} {
		for _, s := range all {
			for _, x := range s.GetTargets() {
				state := targetState(x.GetState())
				if (state == targetReady) != ready {
					continue
				}
				checked := none
				if x.GetLastCheck() != nil {
					checked = ago(x.GetLastCheck(), now) + " ago"
				}
				t.add(s.GetName(), x.GetName(), x.GetAddress(), stateDetail(x, now), ago(x.GetSince(), now),
					names(x.GetSources()), checked, x.GetLastError())
			}
		}
	}
	return t
}

func watchers(all []*lbv1.WatcherStatus, now time.Time) *table {
	t := newTable("WATCH", "PEER", "READER", "SINCE", "SENT", "APPLIED", "REPORTS", "EXTERNAL CONNECTIVITY")
	for _, w := range all {
		applied, reports := none, "no"
		if w.GetAppliedRevision() > 0 {
			applied = fmt.Sprint(w.GetAppliedRevision())
		}
		if w.GetReporting() {
			reports = "yes"
		}
		t.add(w.GetWatchId(), w.GetPeer(), w.GetReader(), ago(w.GetSince(), now), w.GetSentRevision(), applied, reports,
			families(w.GetFamilies()))
	}
	return t
}

func families(all []*readinessv1.FamilyConnectivity) string {
	var parts []string
	for _, f := range all {
		name := strings.Replace(f.GetFamily().String(), "IP_FAMILY_IPV", "IPv", 1)
		parts = append(parts, name+" "+upOrDown(f.GetUp()))
	}
	return strings.Join(parts, ", ")
}

// targetRanks orders the states in the summary. Problems have no entry and therefore come first.
var targetRanks = map[targetv1.State]int{
	targetv1.State_STATE_STARTING: 1, targetv1.State_STATE_DRAINING: 1, targetv1.State_STATE_DRAINED: 1,
	targetv1.State_STATE_READY: 2,
}

// Targets renders a list of targets, sorted by stream, name and address.
func Targets(all []*targetv1.TargetInfo, now time.Time) string {
	if len(all) == 0 {
		return "no targets\n"
	}
	counts := map[targetv1.State]int{}
	for _, i := range all {
		counts[i.GetState()]++
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d addresses of targets ready\n", counts[targetv1.State_STATE_READY], len(all))
	summary := &table{}
	for _, s := range slices.SortedFunc(maps.Keys(counts), func(x, y targetv1.State) int {
		return cmp.Or(cmp.Compare(targetRanks[x], targetRanks[y]), cmp.Compare(x, y))
	}) {
		e := Explain(s)
		summary.explain(counts[s], e.Short, e.Meaning, e)
	}
	summary.align(&b, "  ")
	t := newTable("STREAM", "TARGET", "ADDRESS", "STATE", "SINCE", "SOURCE", "REGISTERED BY", "LAST ERROR")
	for _, i := range slices.SortedStableFunc(slices.Values(all), func(x, y *targetv1.TargetInfo) int {
		return cmp.Or(strings.Compare(x.GetStream(), y.GetStream()), strings.Compare(x.GetName(), y.GetName()),
			strings.Compare(x.GetAddress(), y.GetAddress()))
	}) {
		t.add(i.GetStream(), i.GetName(), i.GetAddress(), targetDetail(i), ago(i.GetSince(), now),
			names(i.GetSources()), i.GetRegisteredBy(), i.GetLastError())
	}
	t.write(&b)
	return b.String()
}

// targetDetail returns the state with the remaining drain time and its cause.
func targetDetail(i *targetv1.TargetInfo) string {
	s := Explain(i.GetState()).Short
	why := i.GetDrainCause()
	if d := i.GetDrainFor(); d != nil {
		why = strings.TrimSuffix(span(max(0, d.AsDuration()))+" left, "+why, ", ")
	}
	if why != "" {
		s += ": " + why
	}
	return s
}

// TargetLine renders one address of a target on one line, for `--follow`.
func TargetLine(i *targetv1.TargetInfo) string {
	s := fmt.Sprintf("%s/%s %s: %s", i.GetStream(), i.GetName(), i.GetAddress(), targetDetail(i))
	if why := i.GetLastError(); why != "" && i.GetState() != targetv1.State_STATE_READY {
		s += ": " + why
	}
	return cut(s, maxLine)
}
