package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// meridioNext replaces the next check for a Meridio load balancer, which has no `lb status`.
var meridioNext = map[readinessv1.AdvertisementReason]string{
	readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NEVER_SEEN: "the load balancer's line below; " +
		"does the container stateless-lb run, do both containers mount the readiness socket?",
	readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY: "the log of the container stateless-lb: " +
		"it needs an enabled target and this frontend at the NSP; does NSPCli hold here?",
}

// explainReason explains the reason of an advertisement for a frontend's load balancer and speaker.
func explainReason(status *frontendv1.Status, reason readinessv1.AdvertisementReason) Explanation {
	explanation := Explain(reason)
	if next := meridioNext[reason]; next != "" && besideMeridio(status) {
		explanation.Next = next
	}
	for _, text := range []*string{&explanation.Short, &explanation.Meaning, &explanation.Next} {
		*text = speakerText(status, *text)
	}
	return explanation
}

// otherSpeaker names a speaker that another program runs in the texts about BIRD.
var otherSpeaker = strings.NewReplacer("BIRD's loopback session", "The speaker's session",
	"BIRD has the VIP", "The speaker has the VIP", "BIRD", "the speaker")

// speakerText names the speaker of a frontend in a text about BIRD.
func speakerText(status *frontendv1.Status, text string) string {
	if status.GetBird().GetExternal() {
		return otherSpeaker.Replace(text)
	}
	return text
}

// besideMeridio reports whether the frontend runs with a Meridio load balancer. Before the first
// contact, the NSP as the source of the configuration implies one.
func besideMeridio(status *frontendv1.Status) bool {
	service := status.GetLoadBalancer().GetService()
	return strings.HasPrefix(service, "loadbalancer.") ||
		service == "" && strings.HasPrefix(status.GetConfigurationSource(), "NSP ")
}

// Frontend renders the status of a frontend, and reports whether every configured VIP is
// advertised. A de-preferred VIP counts as advertised.
func (view View) Frontend(status *frontendv1.Status, now time.Time) (text string, complete bool) {
	var out strings.Builder
	fmt.Fprintf(&out, "frontend %s, trench %s, attractor %s\n",
		cut(status.GetVersion(), maxCell), cut(status.GetTrench(), maxCell), cut(status.GetAttractor(), maxCell))
	if status.GetStopping() {
		out.WriteString("STOPPING: the frontend moves traffic away\n")
	}
	if !status.GetGating() {
		out.WriteString("GATING IS OFF: VIPs are advertised regardless of the load balancer\n")
	}

	// Count by reason: with thousands of VIPs the table below is too long to read.
	count := 0
	counts := summary{}
	attracts := map[string]bool{} // by family
	for _, vip := range status.GetVips() {
		advertisement := vip.GetAdvertisement()
		if isAdvertised(advertisement) {
			count++
			attracts[familyOf(vip.GetVip())] = true
		}
		explanation := explainReason(status, vip.GetReason())
		counts[group{advertisements[advertisement].rank, advertised(advertisement), explanation}]++
	}
	for _, condition := range status.GetConditions() {
		// A family without advertised VIPs attracts no traffic, so a missing route is harmless.
		family, ok := strings.CutPrefix(condition.GetName(), "RouteBack/")
		if ok && !condition.GetServing() && attracts[family] {
			fmt.Fprintf(&out, "%s VIPs attract traffic, and no route leads back to clients\n", family)
		}
	}
	// Gateways explain VIPs that are not advertised, so their problems come first.
	writeGateways(&out, status, now)
	// The exit status of `frontend status` depends on this.
	complete = count == len(status.GetVips())
	fmt.Fprintf(&out, "\n%d of %s advertised\n", count, plural(len(status.GetVips()), "VIP"))
	counts.write(&out, view)
	writeConditions(&out, status.GetConditions())
	writeConfigurationError(&out, status.GetConfigurationError(), status.GetTrench(), status.GetConfigurationSource())

	var head table
	if source := status.GetConfigurationSource(); strings.HasPrefix(source, "NSP ") {
		// The condition tells a cached configuration from one that the NSP confirms.
		state := "current"
		for _, condition := range status.GetConditions() {
			if condition.GetName() == "NSPCli" && !condition.GetServing() {
				state = cut(condition.GetDetail(), maxLine)
			}
		}
		head.row("configuration", cut(source, maxCell)+", "+state)
	}
	switch source, dir := status.GetLoadBalancer(), status.GetLoadBalancer().GetReadinessDir(); {
	case !status.GetGating():
	case view.Problems && source.GetFreshness() == frontendv1.Freshness_FRESHNESS_LIVE && source.GetSynced():
	case dir != "":
		head.row("readiness files", cut(dir, maxCell)+": "+view.loadBalancer(status))
	default:
		head.row("load balancer", view.loadBalancer(status))
		head.row("identity", identity(status.GetSpiffeId(), status.GetIdentityExpires(), now))
	}
	process := status.GetBird()
	if runs := process.GetPid() != 0 || process.GetExternal(); !view.Problems || !runs || process.GetError() != "" {
		head.row(speaker(process), bird(process, now))
	}
	head.write(&out)

	// A drained gateway is not good, although its session is up.
	gateways(only(view, status.GetGateways(), func(gateway *frontendv1.GatewayStatus) bool {
		return !gateway.GetUp() && !gateway.GetHeld() || gateway.GetDrained() || gateway.GetWarning() != ""
	}), now).write(&out)
	vips := slices.Concat(status.GetVips(), status.GetLeaving())
	view.writeTable(&out, frontendVIPs(status, only(view, vips, func(vip *frontendv1.VipStatus) bool {
		return vip.GetAdvertisement() != readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED
	}), now), 0, 2, "VIPs")
	if failed := status.GetExportsError(); failed != "" {
		out.WriteString("\nattributes that gateways receive are unknown: " + cut(failed, maxLine) + "\n")
	}
	exports(status.GetExports()).write(&out)
	return out.String(), complete
}

// MaxExported is the largest number of VIPs whose attributes a status shows unless it is wide.
const MaxExported = 100

// exports shows what BIRD exports, a row for each gateway and combination of attributes.
func exports(all []*frontendv1.Export) *table {
	rows := newTable("SENT TO", "VIPS", "ATTRIBUTES")
	for _, export := range all {
		vips := names(export.GetVips())
		if count := len(export.GetVips()); count > maxNames {
			vips = fmt.Sprintf("%d VIPs: %s", count, vips)
		}
		rows.add(export.GetGateway(), vips, strings.Trim(attributes(export), " ()"))
	}
	return rows
}

var freshness = map[frontendv1.Freshness]string{
	frontendv1.Freshness_FRESHNESS_LIVE: "live", frontendv1.Freshness_FRESHNESS_STALE: "STALE (grace period)",
}

func (view View) loadBalancer(status *frontendv1.Status) string {
	source := status.GetLoadBalancer()
	var parts []string
	if source.GetPosition().GetInstanceId() == "" {
		parts = append(parts, "never seen")
	} else {
		parts = append(parts, cmp.Or(freshness[source.GetFreshness()], "LOST"))
		if !source.GetSynced() {
			parts = append(parts, "not synced (targets not checked yet)")
		}
		if source.GetGoingAway() {
			parts = append(parts, "going away")
		}
		if source.GetLeaseLeft() != nil {
			parts = append(parts, "lease "+left(source.GetLeaseLeft().AsDuration()))
		}
		if view.Wide {
			parts = append(parts, position(source.GetPosition()))
		}
	}
	if text := source.GetService(); strings.HasPrefix(text, "loadbalancer.") {
		parts = append(parts, "of Meridio ("+text+"): one state for all VIPs")
	}
	// Conditions with the same error are already in the list above.
	isAbove := func(condition *adminv1.Condition) bool {
		return !condition.GetServing() && condition.GetDetail() == source.GetError()
	}
	if source.GetError() != "" && !slices.ContainsFunc(status.GetConditions(), isAbove) {
		parts = append(parts, "last error: "+cut(source.GetError(), maxError))
	}
	return strings.Join(parts, ", ")
}

func position(at *readinessv1.Position) string {
	if at.GetInstanceId() == "" {
		return none
	}
	return fmt.Sprintf("instance %s revision %d", cut(at.GetInstanceId(), maxCell), at.GetRevision())
}

func bird(process *frontendv1.BirdStatus, now time.Time) string {
	text := "does not run"
	switch {
	case process.GetExternal():
		return external(process)
	case process.GetPid() != 0:
		text = fmt.Sprintf("%s, pid %d, up %s",
			cut(process.GetVersion(), maxCell), process.GetPid(), ago(process.GetSince(), now))
	}
	text += ", " + plural(int(process.GetRestarts()), "restart")
	if process.GetError() != "" {
		text += ", PROBLEM: " + cut(process.GetError(), maxLine)
	}
	return text
}

func speaker(process *frontendv1.BirdStatus) string {
	if process.GetExternal() {
		return "speaker"
	}
	return "BIRD"
}

func external(process *frontendv1.BirdStatus) string {
	text := cmp.Or(cut(process.GetVersion(), maxCell), "unknown") + ", run by another program"
	if process.GetExternalRouting() {
		text += ", which owns source routing"
	}
	if process.GetError() != "" {
		text += ", PROBLEM: " + cut(process.GetError(), maxLine)
	}
	return text
}

// writeGateways appends the problems of gateways, and the static gateways that send traffic of
// VIPs that are not announced.
func writeGateways(out *strings.Builder, status *frontendv1.Status, now time.Time) {
	sent := map[string][]string{} // VIPs, by gateway
	for _, vip := range status.GetVips() {
		for _, g := range vip.GetStaticGateways() {
			sent[g] = append(sent[g], vip.GetVip())
		}
	}
	for _, gateway := range status.GetGateways() {
		kind := "gateway"
		if gateway.GetProtocol() == "static" {
			kind = "static gateway"
		}
		problems, next := sessionProblems(status, gateway, now)
		for _, problem := range problems {
			fmt.Fprintf(out, "%s %s: %s\n", kind, cut(gateway.GetName(), maxCell), cut(problem, maxError))
		}
		if next != "" {
			fmt.Fprintf(out, "  next: %s\n", cut(next, maxLine))
		}
		if vips := sent[gateway.GetName()]; len(vips) > 0 {
			fmt.Fprintf(out, "static gateway %s sends traffic of VIPs that are not announced: %s\n",
				cut(gateway.GetName(), maxCell), cut(names(vips), maxLine))
		}
	}
}

func gateways(all []*frontendv1.GatewayStatus, now time.Time) *table {
	rows := newTable("GATEWAY", "ADDRESS", "SESSION", "SINCE", "IMPORTED", "EXPORTED", "BFD", "STATE")
	// A session that is held down on purpose sorts with the sessions that are up.
	rank := func(gateway *frontendv1.GatewayStatus) int {
		if gateway.GetUp() || gateway.GetHeld() {
			return 1
		}
		return 0
	}
	for _, gateway := range problemsFirst(all, rank) {
		state := gateway.GetState()
		if gateway.GetDrained() {
			state += ", drained by an operator" + drainEnd(gateway.GetDrainEnds(), now)
		}
		// The error is above the table.
		state = strings.TrimSuffix(state, " ("+gateway.GetLastError()+")")
		// The socket option exists only while the session has a socket.
		if gateway.GetUp() && gateway.GetNoDelayProblem() != "" {
			state += ", without TCP_NODELAY: " + gateway.GetNoDelayProblem()
		}
		// A held session is down on purpose, and not a problem.
		session := upOrDown(gateway.GetUp())
		if gateway.GetHeld() && !gateway.GetUp() {
			session = "held"
		}
		// BIRD exports no route to a static gateway.
		exported := none
		if gateway.GetProtocol() != "static" {
			exported = fmt.Sprintf("%d of %d", gateway.GetExported(), gateway.GetExpected())
		}
		if gateway.GetChange() != "" {
			state += ", " + gateway.GetChange()
		}
		rows.add(gateway.GetName(), gatewayAddress(gateway), session, ago(gateway.GetSince(), now),
			gateway.GetImported(), exported, gateway.GetBfd(), state)
	}
	return rows
}

func frontendVIPs(status *frontendv1.Status, all []*frontendv1.VipStatus, now time.Time) *table {
	rank := func(vip *frontendv1.VipStatus) int { return advertisements[vip.GetAdvertisement()].rank }
	rows := newTable("VIP", "ADVERTISED", "SINCE", "REASON", "LOAD BALANCER", "GATEWAYS")
	for _, vip := range problemsFirst(all, rank) {
		rows.add(vip.GetVip(), advertised(vip.GetAdvertisement()), ago(vip.GetSince(), now),
			speakerText(status, VIPReason(vip, now)), lbState(vip.GetReadiness()), names(vip.GetGateways()))
	}
	return rows
}

// VIPReason returns the reason of the advertisement, or the load balancer's reason if the load
// balancer caused it.
func VIPReason(vip *frontendv1.VipStatus, now time.Time) string {
	switch report := vip.GetReadiness(); vip.GetReason() {
	// The reason of the load balancer is more specific.
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY,
		readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING:
		if report != nil && report.GetState() != readinessv1.VipState_VIP_STATE_READY {
			return "LB: " + lbReason(report)
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LAST_RESORT:
		if report.GetDetail() != "" {
			return "last resort (" + report.GetDetail() + ")"
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_PROBES:
		if report.GetDetail() != "" {
			return "probes (" + report.GetDetail() + ")"
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED:
		text := Explain(vip.GetReason()).Short
		if vip.GetKept() == "leaving" {
			return Explain(readinessv1.VipReason_VIP_REASON_LEAVING).Short
		}
		if isAdvertised(vip.GetAdvertisement()) {
			text = "draining, by an operator"
		}
		return text + drainEnd(vip.GetDrainEnds(), now)
	}
	return Explain(vip.GetReason()).Short
}

func lbReason(report *readinessv1.VipReadiness) string {
	short := Explain(report.GetReason()).Short
	if report.GetDetail() != "" {
		short += " (" + report.GetDetail() + ")"
	}
	return short
}

// lbState returns the load balancer's last state, with the numbers of ready and of all targets.
func lbState(report *readinessv1.VipReadiness) string {
	if report == nil {
		return "never seen"
	}
	return vipState(report.GetState()) + " " + readyTargets(report)
}

// readyTargets returns the numbers of ready and of all targets, and by how many targets the ready
// ones count in weights while some of them warm up.
func readyTargets(report *readinessv1.VipReadiness) string {
	text := fmt.Sprintf("%d/%d", report.GetReadyTargets(), report.GetTotalTargets())
	if report.GetWarmingTenths() > 0 {
		text += fmt.Sprintf(", weight %.1f", max(0, float64(report.GetReadyTargets())-float64(report.GetWarmingTenths())/10))
	}
	return text
}

// drainEnd returns when a drain ends by itself, as the end of a text; "" for never.
func drainEnd(ends *timestamppb.Timestamp, now time.Time) string {
	if ends == nil {
		return ""
	}
	return ", " + left(ends.AsTime().Sub(now))
}

// familyOf returns the family of a VIP as it appears in the names of conditions.
// gatewayFamily returns the family of a gateway's state, which older frontends do not report.
func gatewayFamily(gateway *frontendv1.GatewayStatus) string {
	return cmp.Or(gateway.GetFamily(), familyOf(gateway.GetAddress()))
}

// gatewayAddress returns the address of a gateway, with the family of the VIPs if that differs.
func gatewayAddress(gateway *frontendv1.GatewayStatus) string {
	if family := gatewayFamily(gateway); family != familyOf(gateway.GetAddress()) {
		return gateway.GetAddress() + " (" + family + ")"
	}
	return gateway.GetAddress()
}

func familyOf(vip string) string {
	if strings.Contains(vip, ":") {
		return "ipv6"
	}
	return "ipv4"
}
