package e2e

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// A new configuration restarts only the sessions that it changes (docs/bird.md#configuration):
// when VIPs and gateways are added and removed, the sessions of all other gateways stay up.
func TestReloadKeepsOtherSessions(t *testing.T) {
	t.Parallel()
	const added = "20.0.0.3/32"
	f := newFixture(t)
	b := f.second()
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(every()...)
	f.wantRoutesAt(b)
	mark, bird, sessions := f.mark(), f.birdPID(), f.sessions()
	up := map[string]string{}
	for _, g := range f.frontendStatus().GetGateways() {
		up[g.GetName()] = g.GetSince().String()
	}
	records := []*healthRecord{
		f.recordHealth("Egress"), f.recordHealth("Egress/ipv4"), f.recordHealth("Egress/ipv6"),
		f.recordHealth("vip/" + vipA4), f.recordHealth("vip/" + vipA6),
	}
	for _, r := range records {
		r.wait(healthServing)
	}
	untouched := func(step string) {
		t.Helper()
		if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
			t.Errorf("%s: sessions were %v and are %v", step, sessions, now)
		}
		if now := f.birdPID(); now != bird {
			t.Errorf("%s: BIRD is %d now, it was %d", step, now, bird)
		}
		f.wantNoUpdates(mark, vipA4, vipA6)
		for _, g := range f.frontendStatus().GetGateways() {
			if since, known := up[g.GetName()]; known && (!g.GetUp() || g.GetSince().String() != since) {
				t.Errorf("%s: gateway %s is up since %s: %v", step, g.GetName(), since, g)
			}
		}
		for _, r := range records {
			r.wantOnly(healthServing)
		}
	}

	gateways := []string{lineA6, lineA6 + "\n    " + lineB4 + "\n    " + lineB6}
	f.must(f.pod.WriteTrench(edited(t, gateways...)))
	f.wantRoutesAt(b, every()...)
	f.wantRoutes(every()...)
	untouched("gateways added")

	vips := []string{
		fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6), fmt.Sprintf(
			"vips: [%s, %q, %s, %q]", added, vipA6, vipA4, vipB6,
		),
		fmt.Sprintf("vips: [%s, %q]\n", vipB4, vipB6), fmt.Sprintf("vips: [%s, %q]\n", added, vipB6),
	}
	f.must(f.pod.WriteTrench(edited(t, slices.Concat(gateways, vips)...)))
	f.wantRoutes(vipA4, vipA6, vipB6, added)
	f.wantRoutesAt(b, vipA4, vipA6, vipB6, added)
	f.wantUpdates(mark, vipB4, depreferred, withdrawn)
	f.wantUpdates(mark, added, announced)
	f.wantNoUpdates(mark, vipB6)
	untouched("a VIP replaced by another")

	// A change of one gateway's timer restarts only that session.
	slower := with("holdTime: 6s", lineB4)[0]
	f.must(f.pod.WriteTrench(edited(t,
		slices.Concat([]string{lineA6, lineA6 + "\n    " + slower + "\n    " + lineB6}, vips)...)))
	f.waitFor(func() error {
		out, err := b.Command(t.Context(), "show protocols all trench0")
		if err != nil {
			return err
		}
		if !strings.Contains(out, "Established") {
			return fmt.Errorf("the session with the changed hold time is not up:\n%s", out)
		}
		return nil
	})
	f.wantRoutesAt(b, vipA4, vipA6, vipB6, added)
	untouched("a hold time changed")

	f.must(f.pod.WriteTrench(usualTrench()))
	f.wantRoutes(every()...)
	f.wantRoutesAt(b)
	f.wantUpdates(mark, added, announced, depreferred, withdrawn)
	untouched("everything as it was")
	if got := len(f.frontendStatus().GetGateways()); got != 2 {
		t.Errorf("the status shows %d gateways", got)
	}
}

// A refused trench file changes nothing in BIRD or at the gateways
// (docs/architecture.md#failure-table).
func TestInvalidTrenchFileKeepsGateways(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	b := f.second()
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	mark, sessions := f.mark(), f.sessions()
	valid := func() float64 {
		return metric(t, f.get(lab.FrontendMetrics, "/metrics"), "vipgate_configuration_valid")
	}
	configures := func() float64 {
		return metric(t, f.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_bird_configures_total")
	}
	before := configures()

	// An invalid file is rejected as a whole, including its valid parts.
	from := length(f.pod.Frontend)
	f.must(
		f.pod.WriteTrench(edited(t, lineA6,
			lineA6+"\n    "+lineB4+"\n    "+strings.Replace(lineB6, "address", "adress", 1))),
	)
	where := fmt.Sprintf("%s:9: attractor.gateways[3].adress: unknown field", f.pod.TrenchFile())
	f.waitLine(f.pod.Frontend, from, where)
	f.waitFrontend("Configuration", false, where)
	if valid() != 0 {
		t.Error("vipgate_configuration_valid is not 0")
	}
	f.wantRoutesAt(b)
	if now := configures(); now != before {
		t.Errorf("BIRD was configured %v times", now-before)
	}

	f.must(f.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6)))
	f.waitFrontend("Configuration", true)
	f.wantRoutesAt(b, vipA4, vipA6)
	if valid() != 1 {
		t.Error("vipgate_configuration_valid is not 1")
	}
	f.wantNoUpdates(mark, vipA4, vipA6)
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
}

// A family without VIPs, and a trench without any VIP, keeps its sessions and stays ready: the
// session is already up for the first VIP.
func TestGatewaysWithoutVIPs(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2)
	sessions := f.sessions()
	records := []*healthRecord{f.recordHealth("Egress"), f.recordHealth("Readiness")}
	for _, r := range records {
		r.wait(healthServing)
	}
	full := usualTrench()
	withoutIPv6 := strings.NewReplacer(
		fmt.Sprintf(", %q", vipA6), "", fmt.Sprintf(", %q", vipB6), "", `, "`+lab.Target1v6.String()+`"`, "",
		`, "`+lab.Target2v6.String()+`"`, "",
	).Replace(full)
	head, _, _ := strings.Cut(full, "streams:")
	empty := regexp.MustCompile(`vips: \[.*\]`).ReplaceAllString(head, "vips: []") + "streams: []\n"
	for _, step := range []struct {
		trench string
		want   []string
	}{{withoutIPv6, []string{vipA4, vipB4}}, {empty, nil}, {withoutIPv6, []string{vipA4, vipB4}}, {full, every()}} {
		f.must(f.pod.WriteTrench(step.trench))
		f.wantRoutes(step.want...)
		for _, name := range []string{"gateway-a4", "gateway-a6"} {
			f.waitGateway(name, isUp)
		}
	}
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	for _, r := range records {
		r.wantOnly(healthServing)
	}
}
