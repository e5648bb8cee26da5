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

// When the frontend is killed, BIRD withdraws all VIPs; the next start ends the orphan BIRD
// (docs/architecture.md#failure-table).
func TestFrontendKillWithdraws(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	mark, orphan := f.mark(), f.birdPID()

	f.must(f.pod.Frontend.Kill())
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, withdrawn)
	f.wantUpdates(mark, vipA6, withdrawn)
	// BIRD withdrew the VIPs itself: it still runs, and its sessions are up.
	if !f.runs(orphan) {
		t.Errorf("BIRD (pid %d) died with the frontend", orphan)
	}
	if out := f.waitGatewayState("show protocols"); strings.Count(out, "Established") != 2 {
		t.Errorf("BIRD's sessions did not survive the frontend:\n%s", out)
	}

	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	f.waitLog(f.pod.Frontend, fmt.Sprintf("terminating BIRD of an earlier run\" pid=%d", orphan))
	if f.runs(orphan) {
		t.Errorf("the orphan BIRD (pid %d) still runs", orphan)
	}
	if now := f.birdPID(); now == orphan || !f.runs(now) {
		t.Errorf("the new frontend has BIRD %d, the orphan was %d", now, orphan)
	}
}

// waitGatewayState waits for an answer of the gateway's BIRD.
func (f *fixture) waitGatewayState(command string) string {
	f.t.Helper()
	out, err := f.gateway.Command(f.t.Context(), command)
	f.must(err)
	return out
}

// When the frontend is stopped, BIRD withdraws all VIPs at the end of the hold time
// (docs/architecture.md#failure-table).
func TestFrontendPausedWithdraws(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.pod.ProductTimers = true
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	mark, bird := f.mark(), f.birdPID()

	f.must(f.pod.Frontend.Signal(syscall.SIGSTOP))
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, withdrawn)
	f.wantUpdates(mark, vipA6, withdrawn)
	f.must(f.pod.Frontend.Signal(syscall.SIGCONT))
	f.wantRoutes(vipA4, vipA6)
	f.wantRunning(f.pod.Frontend, f.pod.LB)
	if now := f.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
}

// SIGTERM of the frontend: NOT_SERVING, de-prefer, withdraw, end of BIRD; rules remain
// (docs/architecture.md#stopping).
func TestFrontendTermDrainsFirst(t *testing.T) {
	t.Parallel()
	const drain = 4 * time.Second // visibleDrain
	f := newServing(t, 1, "--drain-time="+drain.String())
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)
	mark, bird := f.mark(), f.birdPID()

	terminated := time.Now()
	f.stop(f.pod.Frontend)
	if f.runs(bird) {
		t.Errorf("the frontend did not wait for BIRD (pid %d)", bird)
	}
	for _, vip := range []string{vipA4, vipA6} {
		f.wantUpdates(mark, vip, depreferred, withdrawn)
		last := f.waitUpdate(mark, vip, withdrawn)
		if !last.At.Before(f.pod.Frontend.Ended()) {
			t.Errorf("the frontend ended at %v, before %v", f.pod.Frontend.Ended(), last)
		}
		if after := last.At.Sub(terminated); after < drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the signal, before the drain time of %v was over", vip, after, drain)
		}
	}
	// The VIPs were withdrawn by an UPDATE before the sessions went down.
	f.wantSessionsDownLast()
	// The LB and every gateway were notified.
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)
	for _, v := range f.lbStatus().GetVips() {
		if r := v.GetReported(); strings.HasPrefix(v.GetVip(), vipA4) &&
			(r.GetReason() != readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_STOPPING || r.GetUnconfirmed()) {
			t.Errorf("the LB received %v", r)
		}
	}
	f.wantRunning(f.pod.LB)

	// Rules remain, and an in-place restart adopts them.
	f.wantRules(true)
	f.must(f.pod.StartFrontend(noDrain))
	f.wantRoutes(vipA4, vipA6)
	f.wantRules(true)
	f.stop(f.pod.Frontend)
	f.wantRules(true)
	if out, status := f.run("frontend", "cleanup"); status != 0 {
		t.Errorf("frontend cleanup ended with %d: %s", status, out)
	}
	f.wantRules(false)
}

// wantSessionsDownLast fails if a session at the gateway ended before the last route was
// withdrawn, because the end of a session also removes its routes.
func (f *fixture) wantSessionsDownLast() {
	f.t.Helper()
	log := f.gateway.Process.Output()
	if end, last := strings.Index(log, "State changed to stop"), strings.LastIndex(log, "> removed"); last < 0 ||
		end < last {
		f.t.Errorf("a session ended before the last withdrawal:\n%s", log)
	}
}

// wantRules fails unless the presence of the source routing in the pod equals want: the nftables
// table, two rules per family and the blackhole routes.
func (f *fixture) wantRules(want bool) {
	f.t.Helper()
	for _, ask := range []struct{ has, command string }{
		{"lookup 4096", "ip -4 rule show"},
		{"lookup 4096", "ip -6 rule show"},
		{"lookup 4097", "ip -4 rule show"},
		{"lookup 4097", "ip -6 rule show"},
		{"blackhole default", "ip -4 route show table all type blackhole"},
		{"blackhole default", "ip -6 route show table all type blackhole"},
	} {
		words := strings.Fields(ask.command)
		out, err := f.Pod.Run(f.t.Context(), words[0], words[1:]...)
		f.must(err)
		if got := strings.Contains(out, ask.has); got != want {
			f.t.Errorf("%q in the answer of %q: %v, want %v:\n%s", ask.has, ask.command, got, want, out)
		}
	}
}

// `frontend cleanup`, or --remove-rules-on-exit, removes the rules (docs/architecture.md#stopping).
func TestFrontendTermRemovesRules(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--remove-rules-on-exit", noDrain, shortSettle)
	f.wantRules(true)
	f.stop(f.pod.Frontend)
	f.wantRoutes()
	f.wantRules(false)
}

// On SIGTERM Readiness is NOT_SERVING and Liveness SERVING; a second SIGTERM skips the waiting
// (docs/architecture.md#stopping).
func TestFrontendTermProbesAndSecondTerm(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--drain-time=10m")
	const serving, notServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	f.wantHealth(lab.FrontendHealth, "Readiness", serving)
	f.wantHealth(lab.FrontendHealth, "Liveness", serving)
	mark, bird := f.mark(), f.birdPID()

	f.must(f.pod.Frontend.Signal(syscall.SIGTERM))
	f.waitUpdate(mark, vipA4, depreferred)
	f.waitUpdate(mark, vipA6, depreferred)
	f.wantHealth(lab.FrontendHealth, "Readiness", notServing)
	f.wantHealth(lab.FrontendHealth, "", notServing)
	f.wantHealth(lab.FrontendHealth, "Liveness", serving)
	f.wantHealth(lab.FrontendHealth, "Egress", serving)
	// Its VIPs are still advertised, and their health status is still valid.
	f.wantHealth(lab.FrontendHealth, "vip/"+vipA4, serving)
	f.wantRoutes(vipA4, vipA6)
	f.wantRunning(f.pod.Frontend)

	f.stop(f.pod.Frontend)
	if f.runs(bird) {
		t.Errorf("BIRD (pid %d) outlived the frontend", bird)
	}
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.wantUpdates(mark, vipA6, depreferred, withdrawn)
}

// BIRD that does not end within 2 s is killed (docs/architecture.md#stopping).
func TestFrontendTermWithHungBIRD(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--drain-time=0s", "--settle=1m")
	mark, bird := f.mark(), f.birdPID()

	f.must(f.pod.Frontend.Signal(syscall.SIGTERM))
	f.waitUpdate(mark, vipA4, withdrawn)
	f.waitUpdate(mark, vipA6, withdrawn)
	f.must(syscall.Kill(bird, syscall.SIGSTOP))
	f.must(f.pod.Frontend.Signal(syscall.SIGTERM)) // no more settling
	f.wantExit(f.pod.Frontend, 0)
	if f.runs(bird) {
		t.Errorf("BIRD (pid %d) outlived the frontend", bird)
	}
	f.waitLog(f.pod.Frontend, "BIRD did not exit in time; killing it")
}

// Rows 7 and 8 of the gate (docs/architecture.md#the-gate): a drained VIP is de-preferred for the
// drain time, then withdrawn.
func TestOperatorDrainsVIP(t *testing.T) {
	t.Parallel()
	f := newServing(t, 2, visibleDrain, shortSettle)
	mark := f.mark()
	admin := "--admin-socket=unix://" + f.pod.FrontendAdmin()

	if out, status := f.run("frontend", "drain", "--force", admin, vipA4); status != 0 ||
		!strings.Contains(out, "draining until ") || !strings.Contains(out, ", then withdrawn: "+vipA4) {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	f.wantRoutes(vipA6, vipB4, vipB6)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.waitLog(f.pod.Frontend, "to=withdrawn reason=drained")
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)
	// A drained VIP remains drained when it becomes ready again.
	f.down(f.target1)
	f.wantRoutes(vipB4, vipB6)
	f.up(f.target1)
	f.wantRoutes(vipA6, vipB4, vipB6)
	if out, status := f.run("frontend", "undrain", admin, vipA4); status != 0 ||
		!strings.Contains(out, "no VIP is drained") {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn, announced)
	f.wantUpdates(mark, vipA6, withdrawn, announced)
	f.wantNoUpdates(mark, vipB4, vipB6)

	// Exit status 0 if nothing changes, 1 for a VIP of another attractor, 2 for an argument that
	// is not a VIP.
	if out, status := f.run("frontend", "undrain", admin, vipA4); status != 0 ||
		!strings.Contains(out, "no VIP is drained") {
		t.Errorf("a second undrain ended with %d: %s", status, out)
	}
	for _, command := range []string{"drain", "undrain"} {
		if out, status := f.run("frontend", command, admin, "20.0.0.99/32"); status != 1 ||
			!strings.Contains(out, "not in the attractor") {
			t.Errorf("%s of a VIP that is not configured ended with %d: %s", command, status, out)
		}
		if out, status := f.run("frontend", command, admin, "20.0.0.99"); status != 2 ||
			!strings.Contains(out, "has no prefix length") {
			t.Errorf("%s of no VIP ended with %d: %s", command, status, out)
		}
	}
	// A drain of all VIPs needs a flag.
	if out, status := f.run("frontend", "drain", admin); status != 2 || !strings.Contains(out, "--all") {
		t.Errorf("drain without a VIP ended with %d: %s", status, out)
	}
	if out, status := f.run("frontend", "drain", "--all", "--force", admin); status != 0 {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	f.wantRoutes()
	if out, status := f.run("frontend", "undrain", admin); status != 0 {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantUpdates(mark, vipB4, depreferred, withdrawn, announced)
}

// Families are independent: a lost IPv6 gateway never withdraws an IPv4 VIP
// (docs/architecture.md#the-gate).
func TestFamiliesAreIndependent(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	const serving, notServing = healthv1.HealthCheckResponse_SERVING, healthv1.HealthCheckResponse_NOT_SERVING
	families := []struct {
		vip, other       string
		service, steady  string
		target           *lab.Target
		session, gateway string
	}{
		{vipA6, vipA4, "Egress/ipv6", "Egress/ipv4", f.target1[1], "trench1", "gateway-a6"},
		{vipA4, vipA6, "Egress/ipv4", "Egress/ipv6", f.target1[0], "trench0", "gateway-a4"},
	}
	control, err := f.gateway.Control(t.Context())
	f.must(err)
	defer control.Close()
	for _, family := range families {
		mark := f.mark()
		f.must(family.target.Down())
		f.wantRoutes(family.other)
		f.must(family.target.Up())
		f.wantRoutes(vipA4, vipA6)

		if _, err := control.Command(fmt.Sprintf("disable %q", family.session)); err != nil {
			t.Fatal(err)
		}
		f.wantHealth(lab.FrontendHealth, family.service, notServing)
		f.wantRoutes(family.other)
		f.waitFor(func() error {
			for _, v := range f.frontendStatus().GetVips() {
				if v.GetVip() == family.vip &&
					v.GetReason() == readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY {
					return nil
				}
			}
			return fmt.Errorf("%s does not say that it has no gateway", family.vip)
		})
		f.wantHealth(lab.FrontendHealth, family.steady, serving)
		f.wantHealth(lab.FrontendHealth, "Egress", serving)
		f.wantHealth(lab.FrontendHealth, "Readiness", serving)
		if _, err := control.Command(fmt.Sprintf("enable %q", family.session)); err != nil {
			t.Fatal(err)
		}
		f.wantRoutes(vipA4, vipA6)
		f.wantHealth(lab.FrontendHealth, family.service, serving)
		f.wantNoUpdates(mark, family.other)
		if got := changes(f.updates(mark, family.vip)); !slices.Equal(got,
			[]string{withdrawn, announced, withdrawn, announced}) {
			t.Errorf("the gateway received updates of %s %v", family.vip, got)
		}
	}
}
