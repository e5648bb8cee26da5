package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// Design section 7: what a new configuration restarts, and what not. Issue 2: "reload with added and removed VIPs and
// gateways where the sessions of the others stay up (uptime does not fall)".
func TestReloadLeavesTheSessionsOfOthersUp(t *testing.T) {
	t.Parallel()
	const added = "20.0.0.3/32"
	w := newWorld(t)
	b := w.second()
	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	w.wantRoutes(every()...)
	w.wantRoutesAt(b)
	mark, bird, sessions := w.mark(), w.birdPID(), w.sessions()
	up := map[string]string{}
	for _, g := range w.frontendStatus().GetGateways() {
		up[g.GetName()] = g.GetSince().String()
	}
	records := []*healthRecord{w.recordHealth("Egress"), w.recordHealth("Egress/ipv4"), w.recordHealth("Egress/ipv6"), w.recordHealth("vip/" + vipA4), w.recordHealth("vip/" + vipA6)}
	for _, r := range records {
		r.until(healthServing)
	}
	untouched := func(step string) {
		t.Helper()
		if now := w.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
			t.Errorf("%s: sessions were %v and are %v", step, sessions, now)
		}
		if now := w.birdPID(); now != bird {
			t.Errorf("%s: BIRD is %d now, it was %d", step, now, bird)
		}
		w.wantNothing(mark, vipA4, vipA6)
		for _, g := range w.frontendStatus().GetGateways() {
			if since, known := up[g.GetName()]; known && (!g.GetUp() || g.GetSince().String() != since) {
				t.Errorf("%s: gateway %s is up since %s: %v", step, g.GetName(), since, g)
			}
		}
		for _, r := range records {
			r.wantOnly(healthServing)
		}
	}

	gateways := []string{lineA6, lineA6 + "\n    " + lineB4 + "\n    " + lineB6}
	w.must(w.pod.WriteTrench(edited(t, gateways...)))
	w.wantRoutesAt(b, every()...)
	w.wantRoutes(every()...)
	untouched("gateways added")

	vips := []string{
		fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6), fmt.Sprintf("vips: [%s, %q, %s, %q]", added, vipA6, vipA4, vipB6),
		fmt.Sprintf("vips: [%s, %q]\n", vipB4, vipB6), fmt.Sprintf("vips: [%s, %q]\n", added, vipB6),
	}
	w.must(w.pod.WriteTrench(edited(t, slices.Concat(gateways, vips)...)))
	w.wantRoutes(vipA4, vipA6, vipB6, added)
	w.wantRoutesAt(b, vipA4, vipA6, vipB6, added)
	w.wantStory(mark, vipB4, withdrawn)
	w.wantStory(mark, added, announced)
	w.wantNothing(mark, vipB6)
	untouched("a VIP replaced by another")

	// A timer of one gateway restarts that one only.
	slower := strings.TrimSuffix(lineB4, "}") + ", holdTime: 6s}"
	w.must(w.pod.WriteTrench(edited(t, slices.Concat([]string{lineA6, lineA6 + "\n    " + slower + "\n    " + lineB6}, vips)...)))
	w.waitFor(func() error {
		out, err := b.Command(t.Context(), "show protocols all trench0")
		if err != nil {
			return err
		}
		if !strings.Contains(out, "Established") {
			return fmt.Errorf("the session with the changed hold time is not up:\n%s", out)
		}
		return nil
	})
	w.wantRoutesAt(b, vipA4, vipA6, vipB6, added)
	untouched("a hold time changed")

	w.must(w.pod.WriteTrench(usualTrench()))
	w.wantRoutes(every()...)
	w.wantRoutesAt(b)
	w.wantStory(mark, added, announced, withdrawn)
	untouched("everything as it was")
	if got := len(w.frontendStatus().GetGateways()); got != 2 {
		t.Errorf("the status shows %d gateways", got)
	}
}

// Design section 9: "bad trench file | old one stays in force": also what BIRD does, and toward whom.
func TestBadTrenchFileLeavesGatewaysAsTheyAre(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	b := w.second()
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	mark, sessions := w.mark(), w.sessions()
	valid := func() float64 {
		return metric(t, w.get(lab.FrontendMetrics, "/metrics"), "vipgate_configuration_valid")
	}
	configures := func() float64 {
		return metric(t, w.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_bird_configures_total")
	}
	before := configures()

	// Of what is good in a bad file, nothing comes into force.
	from := length(w.pod.Frontend)
	w.must(w.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4+"\n    "+strings.Replace(lineB6, "address", "adress", 1))))
	where := fmt.Sprintf("%s:9: attractor.gateways[3].adress: unknown field", w.pod.TrenchFile())
	w.waitLine(w.pod.Frontend, from, where)
	w.waitFrontend("Configuration", false, where)
	if valid() != 0 {
		t.Error("vipgate_configuration_valid is not 0")
	}
	w.wantRoutesAt(b)
	if now := configures(); now != before {
		t.Errorf("BIRD was configured %v times", now-before)
	}

	w.must(w.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6)))
	w.waitFrontend("Configuration", true)
	w.wantRoutesAt(b, vipA4, vipA6)
	if valid() != 1 {
		t.Error("vipgate_configuration_valid is not 1")
	}
	w.wantNothing(mark, vipA4, vipA6)
	if now := w.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
}
