package status

import (
	"fmt"
	"slices"
	"strings"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
)

// Frontend renders the status of a frontend. It also tells whether every
// configured VIP is advertised; a de-preferred one is.
func Frontend(s *frontendv1.Status, now time.Time) (text string, complete bool) {
	var b strings.Builder
	fmt.Fprintf(&b, "frontend %s, trench %s, attractor %s\n", cut(s.GetVersion(), maxCell), cut(s.GetTrench(), maxCell), cut(s.GetAttractor(), maxCell))
	if s.GetStopping() {
		b.WriteString("STOPPING: traffic is moved away\n")
	}
	if !s.GetGating() {
		b.WriteString("GATING IS OFF: VIPs are advertised whatever the load balancer says\n")
	}

	count := 0
	counts := summary{}
	attracts := map[string]bool{} // by family
	for _, v := range s.GetVips() {
		if isAdvertised(v.GetAdvertisement()) {
			count++
			attracts[familyOf(v.GetVip())] = true
		}
		counts[group{rank(v.GetAdvertisement()), advertised(v.GetAdvertisement()), AdvertisementReason(v.GetReason())}]++
	}
	for _, c := range s.GetConditions() {
		if family, ok := strings.CutPrefix(c.GetName(), "RouteBack/"); ok && !c.GetServing() && attracts[family] {
			fmt.Fprintf(&b, "%s VIPs attract traffic, and no route leads back to clients\n", family)
		}
	}
	complete = count == len(s.GetVips())
	fmt.Fprintf(&b, "\n%d of %s advertised\n", count, plural(len(s.GetVips()), "VIP"))
	counts.write(&b)
	writeConditions(&b, s.GetConditions())
	writeConfigurationError(&b, s.GetConfigurationError(), s.GetTrench())

	var head facts
	switch dir := s.GetLoadBalancer().GetReadinessDir(); {
	case !s.GetGating():
	case dir != "":
		head.add("readiness files", cut(clean(dir), maxCell)+": "+loadBalancer(s.GetLoadBalancer()))
	default:
		head.add("load balancer", loadBalancer(s.GetLoadBalancer()))
		head.add("identity", identity(s.GetSpiffeId(), s.GetIdentityExpires(), now))
	}
	head.add("BIRD", bird(s.GetBird(), now))
	head.write(&b)

	gateways(s.GetGateways(), now).write(&b)
	frontendVIPs(s.GetVips(), now).write(&b)
	return b.String(), complete
}

// rank orders VIPs: what needs a person first.
func rank(a readinessv1.Advertisement) int {
	switch a {
	case readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED:
		return 2
	case readinessv1.Advertisement_ADVERTISEMENT_DEPREFERRED:
		return 1
	}
	return 0
}

func loadBalancer(l *frontendv1.LoadBalancerStatus) string {
	var words []string
	if l.GetPosition().GetInstanceId() == "" {
		words = append(words, "never heard")
	} else {
		switch l.GetFreshness() {
		case frontendv1.Freshness_FRESHNESS_LIVE:
			words = append(words, "live")
		case frontendv1.Freshness_FRESHNESS_STALE:
			words = append(words, "SILENT, the grace runs")
		default:
			words = append(words, "LOST")
		}
		if !l.GetSynced() {
			words = append(words, "not synced (targets not checked yet)")
		}
		if l.GetGoingAway() {
			words = append(words, "going away")
		}
		if l.GetLeaseLeft() != nil {
			words = append(words, "lease "+left(l.GetLeaseLeft().AsDuration()))
		}
		words = append(words, position(l.GetPosition()))
	}
	if l.GetError() != "" {
		words = append(words, "last error: "+cut(l.GetError(), maxLine))
	}
	return strings.Join(words, ", ")
}

func position(p *readinessv1.Position) string {
	if p.GetInstanceId() == "" {
		return none
	}
	return fmt.Sprintf("instance %s revision %d", cut(p.GetInstanceId(), maxCell), p.GetRevision())
}

func bird(s *frontendv1.BirdStatus, now time.Time) string {
	var words []string
	if s.GetPid() == 0 {
		words = append(words, "does not run")
	} else {
		words = append(words, cut(s.GetVersion(), maxCell), fmt.Sprintf("pid %d", s.GetPid()), "up "+ago(s.GetSince(), now))
	}
	words = append(words, plural(int(s.GetRestarts()), "restart"))
	if s.GetError() != "" {
		words = append(words, "PROBLEM: "+cut(s.GetError(), maxLine))
	}
	return strings.Join(words, ", ")
}

func gateways(all []*frontendv1.GatewayStatus, now time.Time) *table {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(x, y *frontendv1.GatewayStatus) int { return order(x.GetUp(), y.GetUp()) })
	t := newTable("GATEWAY", "ADDRESS", "SESSION", "SINCE", "IMPORTED", "EXPORTED", "BFD", "STATE")
	for _, g := range sorted {
		session := "DOWN"
		if g.GetUp() {
			session = "up"
		}
		state := g.GetState()
		if g.GetLastError() != "" && !strings.Contains(state, g.GetLastError()) {
			state += ", last error: " + g.GetLastError()
		}
		t.add(g.GetName(), g.GetAddress(), session, ago(g.GetSince(), now), fmt.Sprint(g.GetImported()), fmt.Sprint(g.GetExported()),
			g.GetBfd(), state)
	}
	return t
}

// order puts false before true.
func order(x, y bool) int {
	switch {
	case x == y:
		return 0
	case y:
		return -1
	}
	return 1
}

func frontendVIPs(all []*frontendv1.VipStatus, now time.Time) *table {
	sorted := slices.Clone(all)
	slices.SortStableFunc(sorted, func(x, y *frontendv1.VipStatus) int {
		return rank(x.GetAdvertisement()) - rank(y.GetAdvertisement())
	})
	t := newTable("VIP", "ADVERTISED", "SINCE", "REASON", "LOAD BALANCER", "GATEWAYS")
	for _, v := range sorted {
		t.add(v.GetVip(), advertised(v.GetAdvertisement()), ago(v.GetSince(), now), reason(v), word(v.GetReadiness()), names(v.GetGateways()))
	}
	return t
}

// reason says why, with the load balancer's own reason where that is the one.
func reason(v *frontendv1.VipStatus) string {
	switch v.GetReason() {
	case readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_NOT_READY, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING:
		if r := v.GetReadiness(); r != nil && r.GetState() != readinessv1.VipState_VIP_STATE_READY {
			return "LB: " + lbReason(r)
		}
	}
	if v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_DRAINED && isAdvertised(v.GetAdvertisement()) {
		return "draining, by an operator"
	}
	return AdvertisementReason(v.GetReason()).Short
}

// lbReason is the load balancer's reason with its detail.
func lbReason(r *readinessv1.VipReadiness) string {
	short := VipReason(r.GetReason()).Short
	if r.GetDetail() != "" {
		short += " (" + r.GetDetail() + ")"
	}
	return short
}

// word is what the load balancer said last, with ready and all targets.
func word(r *readinessv1.VipReadiness) string {
	if r == nil {
		return "never heard"
	}
	return fmt.Sprintf("%s %d/%d", vipState(r.GetState()), r.GetReadyTargets(), r.GetTotalTargets())
}

// familyOf is the family of a VIP as the names of conditions have it.
func familyOf(vip string) string {
	if strings.Contains(vip, ":") {
		return "ipv6"
	}
	return "ipv4"
}
