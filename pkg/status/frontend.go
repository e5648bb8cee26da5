package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

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

// besideMeridio reports whether the frontend runs with a Meridio load balancer. Before the first
// contact, the NSP as the source of the configuration implies one.
func besideMeridio(s *frontendv1.Status) bool {
	service := s.GetLoadBalancer().GetService()
	return strings.HasPrefix(service, "loadbalancer.") ||
		service == "" && strings.HasPrefix(s.GetConfigurationSource(), "NSP ")
}

// Frontend renders the status of a frontend, and reports whether every configured VIP is
// advertised. A de-preferred VIP counts as advertised.
func Frontend(s *frontendv1.Status, now time.Time) (text string, complete bool) {
	var b strings.Builder
	fmt.Fprintf(&b, "frontend %s, trench %s, attractor %s\n",
		cut(s.GetVersion(), maxCell), cut(s.GetTrench(), maxCell), cut(s.GetAttractor(), maxCell))
	if s.GetStopping() {
		b.WriteString("STOPPING: the frontend moves traffic away\n")
	}
	if !s.GetGating() {
		b.WriteString("GATING IS OFF: VIPs are advertised regardless of the load balancer\n")
	}

	count := 0
	counts := summary{}
	attracts := map[string]bool{} // by family
	for _, v := range s.GetVips() {
		a := v.GetAdvertisement()
		if isAdvertised(a) {
			count++
			attracts[familyOf(v.GetVip())] = true
		}
		e := Explain(v.GetReason())
		if next := meridioNext[v.GetReason()]; next != "" && besideMeridio(s) {
			e.Next = next
		}
		counts[group{advertisements[a].rank, advertised(a), e}]++
	}
	for _, c := range s.GetConditions() {
		if family, ok := strings.CutPrefix(c.GetName(), "RouteBack/"); ok && !c.GetServing() && attracts[family] {
			fmt.Fprintf(&b, "%s VIPs attract traffic, and no route leads back to clients\n", family)
		}
	}
	writeGateways(&b, s)
	complete = count == len(s.GetVips())
	fmt.Fprintf(&b, "\n%d of %s advertised\n", count, plural(len(s.GetVips()), "VIP"))
	counts.write(&b)
	writeConditions(&b, s.GetConditions())
	writeConfigurationError(&b, s.GetConfigurationError(), s.GetTrench(), s.GetConfigurationSource())

	var head table
	if source := s.GetConfigurationSource(); strings.HasPrefix(source, "NSP ") {
		state := "current"
		for _, c := range s.GetConditions() {
			if c.GetName() == "NSPCli" && !c.GetServing() {
				state = cut(c.GetDetail(), maxLine)
			}
		}
		head.row("configuration", cut(source, maxCell)+", "+state)
	}
	switch dir := s.GetLoadBalancer().GetReadinessDir(); {
	case !s.GetGating():
	case dir != "":
		head.row("readiness files", cut(dir, maxCell)+": "+loadBalancer(s))
	default:
		head.row("load balancer", loadBalancer(s))
		head.row("identity", identity(s.GetSpiffeId(), s.GetIdentityExpires(), now))
	}
	head.row("BIRD", bird(s.GetBird(), now))
	b.WriteByte('\n')
	head.align(&b, "")

	gateways(s.GetGateways(), now).write(&b)
	frontendVIPs(s.GetVips(), now).write(&b)
	return b.String(), complete
}

var freshness = map[frontendv1.Freshness]string{
	frontendv1.Freshness_FRESHNESS_LIVE: "live", frontendv1.Freshness_FRESHNESS_STALE: "STALE (grace period)",
}

func loadBalancer(s *frontendv1.Status) string {
	l := s.GetLoadBalancer()
	var parts []string
	if l.GetPosition().GetInstanceId() == "" {
		parts = append(parts, "never seen")
	} else {
		parts = append(parts, cmp.Or(freshness[l.GetFreshness()], "LOST"))
		if !l.GetSynced() {
			parts = append(parts, "not synced (targets not checked yet)")
		}
		if l.GetGoingAway() {
			parts = append(parts, "going away")
		}
		if l.GetLeaseLeft() != nil {
			parts = append(parts, "lease "+left(l.GetLeaseLeft().AsDuration()))
		}
		parts = append(parts, position(l.GetPosition()))
	}
	if s := l.GetService(); strings.HasPrefix(s, "loadbalancer.") {
		parts = append(parts, "of Meridio ("+s+"): one state for all VIPs")
	}
	isAbove := func(c *adminv1.Condition) bool { return !c.GetServing() && c.GetDetail() == l.GetError() }
	if l.GetError() != "" && !slices.ContainsFunc(s.GetConditions(), isAbove) {
		parts = append(parts, "last error: "+cut(l.GetError(), maxError))
	}
	return strings.Join(parts, ", ")
}

func position(p *readinessv1.Position) string {
	if p.GetInstanceId() == "" {
		return none
	}
	return fmt.Sprintf("instance %s revision %d", cut(p.GetInstanceId(), maxCell), p.GetRevision())
}

func bird(s *frontendv1.BirdStatus, now time.Time) string {
	text := "does not run"
	if s.GetPid() != 0 {
		text = fmt.Sprintf("%s, pid %d, up %s", cut(s.GetVersion(), maxCell), s.GetPid(), ago(s.GetSince(), now))
	}
	text += ", " + plural(int(s.GetRestarts()), "restart")
	if s.GetError() != "" {
		text += ", PROBLEM: " + cut(s.GetError(), maxLine)
	}
	return text
}

// writeGateways appends the problems of gateways, and the static gateways that send traffic of
// VIPs that are not announced.
func writeGateways(b *strings.Builder, s *frontendv1.Status) {
	sent := map[string][]string{} // VIPs, by gateway
	for _, v := range s.GetVips() {
		for _, g := range v.GetStaticGateways() {
			sent[g] = append(sent[g], v.GetVip())
		}
	}
	for _, g := range s.GetGateways() {
		if g.GetWarning() != "" {
			kind := "gateway"
			if g.GetProtocol() == "static" {
				kind = "static gateway"
			}
			fmt.Fprintf(b, "%s %s: %s\n", kind, cut(g.GetName(), maxCell), cut(g.GetWarning(), maxLine))
		}
		if vips := sent[g.GetName()]; len(vips) > 0 {
			fmt.Fprintf(b, "static gateway %s sends traffic of VIPs that are not announced: %s\n",
				cut(g.GetName(), maxCell), cut(names(vips), maxLine))
		}
	}
}

func gateways(all []*frontendv1.GatewayStatus, now time.Time) *table {
	t := newTable("GATEWAY", "ADDRESS", "SESSION", "SINCE", "IMPORTED", "EXPORTED", "BFD", "STATE")
	rank := func(g *frontendv1.GatewayStatus) int {
		if g.GetUp() || g.GetHeld() {
			return 1
		}
		return 0
	}
	for _, g := range problemsFirst(all, rank) {
		state := g.GetState()
		if g.GetLastError() != "" && !strings.Contains(state, g.GetLastError()) {
			state += ", last error: " + g.GetLastError()
		}
		if g.GetLastErrorAt() != nil {
			state += ", " + ago(g.GetLastErrorAt(), now) + " ago"
		}
		if g.GetUp() && g.GetNoDelayProblem() != "" {
			state += ", without TCP_NODELAY: " + g.GetNoDelayProblem()
		}
		session := upOrDown(g.GetUp())
		if g.GetHeld() && !g.GetUp() {
			session = "held"
		}
		exported := none
		if g.GetProtocol() != "static" {
			exported = fmt.Sprintf("%d of %d", g.GetExported(), g.GetExpected())
		}
		t.add(g.GetName(), g.GetAddress(), session, ago(g.GetSince(), now), g.GetImported(), exported, g.GetBfd(), state)
	}
	return t
}

func frontendVIPs(all []*frontendv1.VipStatus, now time.Time) *table {
	rank := func(v *frontendv1.VipStatus) int { return advertisements[v.GetAdvertisement()].rank }
	t := newTable("VIP", "ADVERTISED", "SINCE", "REASON", "LOAD BALANCER", "GATEWAYS")
	for _, v := range problemsFirst(all, rank) {
		t.add(v.GetVip(), advertised(v.GetAdvertisement()), ago(v.GetSince(), now), reason(v),
			lbState(v.GetReadiness()), names(v.GetGateways()))
	}
	return t
}

// reason returns the reason of the advertisement, or the load balancer's reason if the load
// balancer caused it.
func reason(v *frontendv1.VipStatus) string {
	switch r := v.GetReadiness(); v.GetReason() {
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY,
		readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING:
		if r != nil && r.GetState() != readinessv1.VipState_VIP_STATE_READY {
			return "LB: " + lbReason(r)
		}
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED:
		if isAdvertised(v.GetAdvertisement()) {
			return "draining, by an operator"
		}
	}
	return Explain(v.GetReason()).Short
}

// lbReason returns the load balancer's reason with its detail.
func lbReason(r *readinessv1.VipReadiness) string {
	short := Explain(r.GetReason()).Short
	if r.GetDetail() != "" {
		short += " (" + r.GetDetail() + ")"
	}
	return short
}

// lbState returns the last state that the load balancer reported, with the numbers of ready and
// of all targets.
func lbState(r *readinessv1.VipReadiness) string {
	if r == nil {
		return "never seen"
	}
	return fmt.Sprintf("%s %d/%d", vipState(r.GetState()), r.GetReadyTargets(), r.GetTotalTargets())
}

// familyOf returns the family of a VIP as it appears in the names of conditions.
func familyOf(vip string) string {
	if strings.Contains(vip, ":") {
		return "ipv6"
	}
	return "ipv4"
}
