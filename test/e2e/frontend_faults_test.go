package e2e

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// Design section 9: "frontend kill -9 | BIRD withdraws all; the next start ends an orphan BIRD of ours (pid file and
// executable match)".
func TestFrontendKillHasBIRDWithdraw(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	mark, orphan := w.mark(), w.birdPID()

	w.must(w.pod.Frontend.Kill())
	w.wantRoutes()
	w.wantStory(mark, vipA4, withdrawn)
	w.wantStory(mark, vipA6, withdrawn)
	// BIRD did that: it lives, and so do its sessions.
	if !w.runs(orphan) {
		t.Errorf("BIRD (pid %d) died with the frontend", orphan)
	}
	if out := w.gatewaySays("show protocols"); strings.Count(out, "Established") != 2 {
		t.Errorf("BIRD's sessions did not survive the frontend:\n%s", out)
	}

	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6)
	w.waitLog(w.pod.Frontend, fmt.Sprintf("ending a BIRD that an earlier run left behind\" pid=%d", orphan))
	if w.runs(orphan) {
		t.Errorf("the orphan BIRD (pid %d) still runs", orphan)
	}
	if now := w.birdPID(); now == orphan || !w.runs(now) {
		t.Errorf("the new frontend has BIRD %d, the orphan was %d", now, orphan)
	}
}

// gatewaySays is an answer of the gateway's BIRD.
func (w *world) gatewaySays(command string) string {
	w.t.Helper()
	out, err := w.gateway.Command(w.t.Context(), command)
	w.must(err)
	return out
}

// Design section 9: "frontend SIGSTOP | BIRD withdraws all | hold time 3 s + 0.5 s".
func TestFrontendStoppedHasBIRDWithdraw(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	mark, bird := w.mark(), w.birdPID()

	w.must(w.pod.Frontend.Signal(syscall.SIGSTOP))
	w.wantRoutes()
	w.wantStory(mark, vipA4, withdrawn)
	w.wantStory(mark, vipA6, withdrawn)
	w.must(w.pod.Frontend.Signal(syscall.SIGCONT))
	w.wantRoutes(vipA4, vipA6)
	w.wantRunning(w.pod.Frontend, w.pod.LB)
	if now := w.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
}

// Design section 9: "frontend SIGTERM | NOT_SERVING, de-prefer, withdraw, BIRD down and waited for; rules stay".
func TestFrontendTermMovesTrafficAwayFirst(t *testing.T) {
	t.Parallel()
	const drain = 500 * time.Millisecond
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--drain-time=" + drain.String()))
	w.wantRoutes(vipA4, vipA6)
	w.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)
	mark, bird := w.mark(), w.birdPID()

	terminated := time.Now()
	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.Frontend, 0)
	if w.runs(bird) {
		t.Errorf("the frontend did not wait for BIRD (pid %d)", bird)
	}
	for _, vip := range []string{vipA4, vipA6} {
		w.wantStory(mark, vip, depreferred, withdrawn)
		last := w.waitHeard(mark, vip, withdrawn)
		if !last.At.Before(w.pod.Frontend.Ended()) {
			t.Errorf("the frontend ended at %v, before %v", w.pod.Frontend.Ended(), last)
		}
		if after := last.At.Sub(terminated); after < drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the signal, before the drain time of %v was over", vip, after, drain)
		}
	}
	// The withdrawal came as such: the sessions went down after it.
	w.wantSessionsDownLast()
	// The LB was told, and so was everybody else.
	w.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)
	for _, v := range w.lbStatus().GetVips() {
		if r := v.GetReported(); strings.HasPrefix(v.GetReadiness().GetVip(), vipA4) &&
			(r.GetReason() != readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING || r.GetUnconfirmed()) {
			t.Errorf("the LB was told %v", r)
		}
	}
	w.wantRunning(w.pod.LB)

	// Rules stay, and an in-place restart takes them over.
	w.wantRules(true)
	w.must(w.pod.StartFrontend(quick))
	w.wantRoutes(vipA4, vipA6)
	w.wantRules(true)
	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.Frontend, 0)
	w.wantRules(true)
	if out, status := w.run("frontend", "cleanup"); status != 0 {
		t.Errorf("frontend cleanup ended with %d: %s", status, out)
	}
	w.wantRules(false)
}

// wantSessionsDownLast fails if a session at the gateway ended before the last
// route was withdrawn: its end would have taken the routes along.
func (w *world) wantSessionsDownLast() {
	w.t.Helper()
	log := w.gateway.Process.Output()
	if end, last := strings.Index(log, "State changed to stop"), strings.LastIndex(log, "> removed"); last < 0 || end < last {
		w.t.Errorf("a session ended before the last withdrawal:\n%s", log)
	}
}

// wantRules fails unless the pod has, or has not, what the source routing is
// made of: the nftables table, two rules a family and the blackholes.
func (w *world) wantRules(want bool) {
	w.t.Helper()
	for _, ask := range []struct{ has, command string }{
		{"lookup 4096", "ip -4 rule show"},
		{"lookup 4096", "ip -6 rule show"},
		{"lookup 4097", "ip -4 rule show"},
		{"lookup 4097", "ip -6 rule show"},
		{"blackhole default", "ip -4 route show table all type blackhole"},
		{"blackhole default", "ip -6 route show table all type blackhole"},
	} {
		words := strings.Fields(ask.command)
		out, err := w.Pod.Run(w.t.Context(), words[0], words[1:]...)
		w.must(err)
		if got := strings.Contains(out, ask.has); got != want {
			w.t.Errorf("%q in the answer of %q: %v, want %v:\n%s", ask.has, ask.command, got, want, out)
		}
	}
}

// Design section 8 and section 5: rules stay, "frontend cleanup, or --remove-rules-on-exit, removes them".
func TestFrontendTermRemovesRulesWhenAskedTo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--remove-rules-on-exit", quick, quickSettle))
	w.wantRoutes(vipA4, vipA6)
	w.wantRules(true)
	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.Frontend, 0)
	w.wantRoutes()
	w.wantRules(false)
}

// Design section 5: on SIGTERM "Readiness NOT_SERVING (Liveness stays SERVING)", and "a second SIGTERM skips to the end".
func TestFrontendTermIsSeenByProbesAndSkippedByASecond(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--drain-time=10m"))
	w.wantRoutes(vipA4, vipA6)
	const serving, notServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	w.wantHealth(lab.FrontendHealth, "Readiness", serving)
	w.wantHealth(lab.FrontendHealth, "Liveness", serving)
	mark, bird := w.mark(), w.birdPID()

	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.waitHeard(mark, vipA4, depreferred)
	w.waitHeard(mark, vipA6, depreferred)
	w.wantHealth(lab.FrontendHealth, "Readiness", notServing)
	w.wantHealth(lab.FrontendHealth, "", notServing)
	w.wantHealth(lab.FrontendHealth, "Liveness", serving)
	w.wantHealth(lab.FrontendHealth, "Egress", serving)
	// Its VIPs are still advertised, and what it tells still holds.
	w.wantHealth(lab.FrontendHealth, "vip/"+vipA4, serving)
	w.wantRoutes(vipA4, vipA6)
	w.wantRunning(w.pod.Frontend)

	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.Frontend, 0)
	if w.runs(bird) {
		t.Errorf("BIRD (pid %d) outlived the frontend", bird)
	}
	w.wantRoutes()
	w.wantStory(mark, vipA4, depreferred, withdrawn)
	w.wantStory(mark, vipA6, depreferred, withdrawn)
}

// Design section 5: at the end of a stop of the frontend "`down`, wait 2 s, SIGKILL, exit".
func TestFrontendTermWaitsForABIRDThatHangs(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--drain-time=0s", "--settle=1m"))
	w.wantRoutes(vipA4, vipA6)
	mark, bird := w.mark(), w.birdPID()

	w.must(w.pod.Frontend.Signal(syscall.SIGTERM))
	w.waitHeard(mark, vipA4, withdrawn)
	w.waitHeard(mark, vipA6, withdrawn)
	w.must(syscall.Kill(bird, syscall.SIGSTOP))
	w.must(w.pod.Frontend.Signal(syscall.SIGTERM)) // no more settling
	w.wantExit(w.pod.Frontend, 0)
	if w.runs(bird) {
		t.Errorf("BIRD (pid %d) outlived the frontend", bird)
	}
	w.waitLog(w.pod.Frontend, "BIRD did not end in time; killing it")
}

// Design section 5, rows 6 and 7: "operator drained … drain time not over: de-preferred", "drain time over: withdrawn".
func TestOperatorDrainsOneVIPAndTakesItBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend(quick, quickSettle))
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := w.mark()
	admin := "--admin-socket=unix://" + w.pod.FrontendAdmin()

	if out, status := w.run("frontend", "drain", admin, vipA4); status != 0 || !strings.Contains(out, "draining until ") || !strings.Contains(out, ", then withdrawn: "+vipA4) {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	w.wantRoutes(vipA6, vipB4, vipB6)
	w.wantStory(mark, vipA4, depreferred, withdrawn)
	w.waitLog(w.pod.Frontend, "to=withdrawn reason=drained")
	w.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)
	// A drained VIP stays so when it becomes ready again.
	w.down(w.target1)
	w.wantRoutes(vipB4, vipB6)
	w.up(w.target1)
	w.wantRoutes(vipA6, vipB4, vipB6)
	if out, status := w.run("frontend", "undrain", admin, vipA4); status != 0 || !strings.Contains(out, "no VIP is drained") {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantStory(mark, vipA4, depreferred, withdrawn, announced)
	w.wantStory(mark, vipA6, withdrawn, announced)
	w.wantNothing(mark, vipB4, vipB6)

	// Exit status 0 when all is as wanted already, 1 for a VIP of another attractor, 2 for what is
	// none.
	if out, status := w.run("frontend", "undrain", admin, vipA4); status != 0 || !strings.Contains(out, "no VIP is drained") {
		t.Errorf("a second undrain ended with %d: %s", status, out)
	}
	for _, command := range []string{"drain", "undrain"} {
		if out, status := w.run("frontend", command, admin, "20.0.0.99/32"); status != 1 || !strings.Contains(out, "not in the attractor") {
			t.Errorf("%s of a VIP that is not configured ended with %d: %s", command, status, out)
		}
		if out, status := w.run("frontend", command, admin, "20.0.0.99"); status != 2 || !strings.Contains(out, "has no prefix length") {
			t.Errorf("%s of no VIP ended with %d: %s", command, status, out)
		}
	}
	// Without a VIP it is all of them.
	if out, status := w.run("frontend", "drain", admin); status != 0 {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	w.wantRoutes()
	if out, status := w.run("frontend", "undrain", admin); status != 0 {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantStory(mark, vipB4, depreferred, withdrawn, announced)
}

// Design section 5: "Families are independent: a dead IPv6 gateway never withdraws an IPv4 VIP"; section 9: "gateway
// session lost | Egress and per-family state flip; the other family untouched".
func TestFamiliesDoNotInfluenceEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	const serving, notServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	families := []struct {
		vip, other       string
		service, steady  string
		target           *lab.Target
		session, gateway string
	}{
		{vipA6, vipA4, "Egress/ipv6", "Egress/ipv4", w.target1[1], "trench1", "gateway-a6"},
		{vipA4, vipA6, "Egress/ipv4", "Egress/ipv6", w.target1[0], "trench0", "gateway-a4"},
	}
	control, err := w.gateway.Control(t.Context())
	w.must(err)
	defer control.Close()
	for _, f := range families {
		mark := w.mark()
		w.must(f.target.Down())
		w.wantRoutes(f.other)
		w.must(f.target.Up())
		w.wantRoutes(vipA4, vipA6)

		if _, err := control.Command(fmt.Sprintf("disable %q", f.session)); err != nil {
			t.Fatal(err)
		}
		w.wantHealth(lab.FrontendHealth, f.service, notServing)
		w.wantRoutes(f.other)
		w.waitFor(func() error {
			for _, v := range w.frontendStatus().GetVips() {
				if v.GetVip() == f.vip && v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY {
					return nil
				}
			}
			return fmt.Errorf("%s does not say that it has no gateway", f.vip)
		})
		w.wantHealth(lab.FrontendHealth, f.steady, serving)
		w.wantHealth(lab.FrontendHealth, "Egress", serving)
		w.wantHealth(lab.FrontendHealth, "Readiness", serving)
		if _, err := control.Command(fmt.Sprintf("enable %q", f.session)); err != nil {
			t.Fatal(err)
		}
		w.wantRoutes(vipA4, vipA6)
		w.wantHealth(lab.FrontendHealth, f.service, serving)
		w.wantNothing(mark, f.other)
		if got := story(w.heard(mark, f.vip)); !slices.Equal(got, []string{withdrawn, announced, withdrawn, announced}) {
			t.Errorf("the gateway heard of %s %v", f.vip, got)
		}
	}
}
