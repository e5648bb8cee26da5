package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/frontend"
	"github.com/vipgate/vipgate/test/lab"
)

// heldDrain is the drain time of both programs and of the streams in these tests.
const heldDrain = 4 * time.Second

// heldTrench returns the usual trench file with heldDrain and replaced texts.
func heldTrench(pairs ...string) string {
	text := strings.ReplaceAll(usualTrench(), "    targets:", fmt.Sprintf("    drainTime: %v\n    targets:", heldDrain))
	return strings.NewReplacer(pairs...).Replace(text)
}

// onlyA4 removes every VIP except vipA4: three of four.
func onlyA4() string {
	text := heldTrench(fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6), "vips: ["+vipA4+"]",
		fmt.Sprintf("vips: [%s, %q]\n", vipA4, vipA6), "vips: ["+vipA4+"]\n")
	return text[:strings.Index(text, "  - name: stream-b")]
}

// startHeld starts a pod with heldTrench.
func startHeld(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.must(f.pod.WriteTrench(heldTrench()))
	f.startPod(fmt.Sprintf("--drain-time=%v", heldDrain), shortSettle)
	f.wantRoutes(every()...)
	return f
}

// heldID returns the identifier in the detail of the condition Held.
func heldID(detail string) string {
	id, _, _ := strings.Cut(detail, ":")
	return id
}

// confirm runs the confirm command of a program.
func (f *fixture) confirm(program, admin string, id ...string) (string, int) {
	f.t.Helper()
	return f.run(program, append([]string{"confirm", "--admin-socket=unix://" + admin}, id...)...)
}

// wantConfirmed fails unless a program confirms the removals.
func (f *fixture) wantConfirmed(program, admin string, id ...string) {
	f.t.Helper()
	if out, status := f.confirm(program, admin, id...); status != 0 || !strings.Contains(out, "confirmed") {
		f.t.Fatalf("%s confirm ended with %d: %s", program, status, out)
	}
}

// wantDrained waits until VIPs were withdrawn after a drain.
func (f *fixture) wantDrained(mark int, vips ...string) {
	f.t.Helper()
	for _, v := range vips {
		f.waitUpdate(mark, v, withdrawn)
		f.wantUpdates(mark, v, depreferred, withdrawn)
	}
}

// An edit that removes most VIPs waits for a confirmation in lb and frontend; the rest of the edit
// is in force, and a second edit cancels the removal.
func TestRemovalOfMostVIPsIsHeld(t *testing.T) {
	t.Parallel()
	f := startHeld(t)
	lbAdmin, frontendAdmin := f.pod.LBAdmin(), f.pod.FrontendAdmin()
	gone := []string{vipA6, vipB4, vipB6}
	mark := f.mark()

	// One VIP more than the file without the three: the rest of the edit.
	const added = "20.0.0.3/32"
	f.must(f.pod.WriteTrench(strings.ReplaceAll(onlyA4(), "vips: ["+vipA4, "vips: ["+added+", "+vipA4)))
	f.wantRoutes(append(every(), added)...)
	detail := f.waitFrontend(frontend.Held, false, "3 of 4 VIPs", vipA6, vipB4, vipB6, "frontend confirm v")
	if other := f.waitLB(frontend.Held, false, "3 of 4 VIPs"); other != detail {
		t.Errorf("lb holds %q, the frontend %q", other, detail)
	}
	f.wantNoUpdates(mark, every()...)
	for _, page := range []string{lab.LBMetrics, lab.FrontendMetrics} {
		if got := metric(t, f.get(page, "/metrics"), "vipgate_configuration_held"); got != 3 {
			t.Errorf("vipgate_configuration_held is %v", got)
		}
	}
	f.wantHealth(lab.FrontendHealth, frontend.Readiness, healthServing)
	f.wantHealth(lab.LBHealth, frontend.Readiness, healthServing)
	// An unrelated edit neither changes the identifier nor makes the removal a small one.
	f.must(f.pod.WriteTrench(strings.ReplaceAll(onlyA4(), "vips: ["+vipA4, "vips: [20.0.1.0/24, "+added+", "+vipA4)))
	f.wantRoutes(append(every(), added, "20.0.1.0/24")...)
	f.waitFrontend(frontend.Held, false, heldID(detail))
	out, status := f.confirm("frontend", frontendAdmin, "v00000000")
	if status == 0 || !strings.Contains(out, heldID(detail)) {
		t.Errorf("confirming another identifier ended with %d: %s", status, out)
	}

	f.must(f.pod.WriteTrench(heldTrench()))
	f.waitFrontend(frontend.Held, true)
	f.waitLB(frontend.Held, true)
	f.wantRoutes(every()...)
	f.wantNoUpdates(mark, every()...)
	if out, status := f.confirm("lb", lbAdmin); status == 0 || !strings.Contains(out, "no removal") {
		t.Errorf("confirming nothing ended with %d: %s", status, out)
	}

	// By commands, the frontend first: lb forwards the VIPs, and holds them until its own confirmation.
	f.must(f.pod.WriteTrench(onlyA4()))
	detail = f.waitFrontend(frontend.Held, false, "3 of 4 VIPs")
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantConfirmed("frontend", frontendAdmin, heldID(detail))
	f.wantDrained(mark, gone...)
	f.waitFrontend(frontend.Held, true)
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantConfirmed("lb", lbAdmin)
	f.waitLB(frontend.Held, true)
	f.wantRoutes(vipA4)
	f.wantNoUpdates(mark, vipA4)

	// A confirmation was for one removal: the same one is held again. Now lb comes first.
	f.must(f.pod.WriteTrench(heldTrench()))
	f.wantRoutes(every()...)
	mark = f.mark()
	f.must(f.pod.WriteTrench(onlyA4()))
	f.waitFrontend(frontend.Held, false, heldID(detail))
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantNoUpdates(mark, every()...)
	f.wantConfirmed("lb", lbAdmin)
	f.wantDrained(mark, gone...)
	f.wantConfirmed("frontend", frontendAdmin)
	f.waitFrontend(frontend.Held, true)
	f.wantRoutes(vipA4)

	// By the field of the file, in both programs.
	f.must(f.pod.WriteTrench(heldTrench()))
	f.wantRoutes(every()...)
	mark = f.mark()
	f.must(f.pod.WriteTrench("confirm: " + heldID(detail) + "\n" + onlyA4()))
	f.wantDrained(mark, gone...)

	// By the operator's limit.
	f.must(f.pod.WriteTrench(heldTrench()))
	f.wantRoutes(every()...)
	mark = f.mark()
	f.must(f.pod.WriteTrench("maxRemoval: 75\n" + onlyA4()))
	f.wantDrained(mark, gone...)
	f.wantNoUpdates(mark, vipA4)
}

// The last gateway of a family keeps its session until a confirmation.
func TestRemovalOfLastGatewayIsHeld(t *testing.T) {
	t.Parallel()
	f := startHeld(t)
	mark, sessions := f.mark(), f.sessions()
	f.must(f.pod.WriteTrench(heldTrench("    "+lineA6+"\n", "")))
	detail := f.waitFrontend(frontend.Held, false, "the last gateways of a family (gateway-a6)")
	f.waitLB(frontend.Held, false, heldID(detail))
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	f.wantNoUpdates(mark, every()...)
	f.wantConfirmed("frontend", f.pod.FrontendAdmin(), heldID(detail))
	f.wantRoutes(vipA4, vipB4)
	f.wantNoUpdates(mark, vipA4, vipB4)
}

// Targets that pass their checks and leave several streams together are held by lb; the targets of
// one stream are not.
func TestRemovalOfAllTargetsIsHeld(t *testing.T) {
	t.Parallel()
	f := startHeld(t)
	none := func(targets ...string) string {
		var pairs []string
		for _, target := range targets {
			text := heldTrench()
			at := strings.Index(text, "    targets:\n      - {name: "+target)
			end := at + strings.Index(text[at:], "}\n") + 2
			pairs = append(pairs, text[at:end], "    targets: []\n")
		}
		return heldTrench(pairs...)
	}
	mark := f.mark()
	f.must(f.pod.WriteTrench(none("target-1", "target-2")))
	detail := f.waitLB(frontend.Held, false, "all targets of streams (stream-a, stream-b)", "lb confirm t")
	f.waitFrontend(frontend.Held, true)
	f.waitFrontend(frontend.HeldTargets, false, "all targets of streams (stream-a, stream-b)", "lb confirm t")
	f.wantNoUpdates(mark, every()...)

	// Health checks decide about held targets, too.
	f.down(f.target2)
	f.waitUpdate(mark, vipB4, withdrawn)
	f.up(f.target2)
	f.waitUpdate(mark, vipB4, announced)

	f.must(f.pod.WriteTrench(heldTrench()))
	f.waitLB(frontend.Held, true)
	f.waitFrontend(frontend.HeldTargets, true)
	f.wantNoUpdates(mark, vipA4, vipA6)
	mark = f.mark()
	f.must(f.pod.WriteTrench(none("target-2")))
	f.wantDrained(mark, vipB4, vipB6)
	f.must(f.pod.WriteTrench(heldTrench()))
	f.wantRoutes(every()...)

	mark = f.mark()
	f.must(f.pod.WriteTrench(none("target-1", "target-2")))
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantNoUpdates(mark, every()...)
	f.wantConfirmed("lb", f.pod.LBAdmin(), heldID(detail))
	f.wantDrained(mark, every()...)
}

// A restart does not end a hold: the last good configuration is in the state directory.
func TestHoldSurvivesRestart(t *testing.T) {
	t.Parallel()
	f := startHeld(t)
	for _, dir := range []string{f.pod.StateDir(), f.pod.BirdDir()} {
		f.waitFor(func() error {
			content, err := os.ReadFile(filepath.Join(dir, "trial.json"))
			if err == nil && !strings.Contains(string(content), `"good"`) {
				err = fmt.Errorf("%s has no good configuration: %s", dir, content)
			}
			return err
		})
	}
	mark := f.mark()
	f.must(f.pod.WriteTrench(onlyA4()))
	detail := f.waitFrontend(frontend.Held, false, "3 of 4 VIPs")
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantNoUpdates(mark, every()...)

	f.must(f.pod.LB.Kill())
	f.must(f.pod.Frontend.Kill())
	f.startPod(fmt.Sprintf("--drain-time=%v", heldDrain), shortSettle)
	f.waitFrontend(frontend.Held, false, heldID(detail))
	f.waitLB(frontend.Held, false, heldID(detail))
	f.wantRoutes(every()...)
	mark = f.mark()
	f.must(f.pod.WriteTrench("confirm: " + heldID(detail) + "\n" + onlyA4()))
	f.wantDrained(mark, vipA6, vipB4, vipB6)
	f.waitFrontend(frontend.Held, true)
	f.waitLB(frontend.Held, true)
}

// With --max-removal, a list of the NSP without the attractor waits for a confirmation; without the
// option it is in force, as TestNSPAttractorChanges shows.
func TestRemovalByNSPIsHeld(t *testing.T) {
	t.Parallel()
	m := newMeridio(t)
	m.startMeridio("VIPGATE_MAX_REMOVAL=50")
	mark, sessions := m.mark(), m.sessions()
	m.nsp.SetAttractors()
	detail := m.waitFrontend(frontend.Held, false, "4 of 4 VIPs", "gateway-a4", "gateway-a6")
	m.wantNoUpdates(mark, every()...)
	if now := m.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	m.nsp.SetAttractors(nspAttractor())
	m.waitFrontend(frontend.Held, true)
	m.nsp.SetAttractors()
	m.waitFrontend(frontend.Held, false, heldID(detail))
	m.wantNoUpdates(mark, every()...)
	m.wantConfirmed("frontend", m.pod.FrontendAdmin(), heldID(detail))
	for _, vip := range every() {
		m.waitUpdate(mark, vip, withdrawn)
		// VIP and gateway leave: both may be de-preferred.
		if got := slices.Compact(changes(m.updates(mark, vip))); !slices.Equal(got, []string{depreferred, withdrawn}) {
			t.Errorf("the gateway received for %s %v", vip, got)
		}
	}
	m.waitFrontend(frontend.Held, true)
}
