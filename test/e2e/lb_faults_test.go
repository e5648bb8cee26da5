package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// Design section 9: "VIP A loses its last target | A withdrawn; no UPDATE for B".
func TestLastTargetLostWithdrawsOnlyItsVIP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// Stream A is served by both targets.
	w.must(w.pod.WriteTrench(strings.Replace(usualTrench(), "  - name: stream-b",
		"      - {name: target-2, ips: ["+lab.Target2v4.String()+`, "`+lab.Target2v6.String()+"\"]}\n  - name: stream-b", 1)))
	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := w.mark()

	w.down(w.target2) // the last one of B, not of A
	w.wantRoutes(vipA4, vipA6)
	w.wantNothing(mark, vipA4, vipA6)
	w.up(w.target2)
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark = w.mark()
	w.down(w.target1)
	w.waitFor(func() error { // until the LB knows
		for _, v := range w.lbStatus().GetVips() {
			if r := v.GetReadiness(); r.GetVip() != vipB4 && r.GetVip() != vipB6 && r.GetReadyTargets() != 1 {
				return fmt.Errorf("%s has %d ready targets", r.GetVip(), r.GetReadyTargets())
			}
		}
		return nil
	})
	w.wantNothing(mark, vipA4, vipA6, vipB4, vipB6)
	w.down(w.target2)
	w.wantRoutes()
	for _, vip := range []string{vipA4, vipA6, vipB4, vipB6} {
		w.wantStory(mark, vip, withdrawn)
	}
}

// Design section 9: "LB kill -9 | its VIPs withdrawn (with a stale_grace: kept that long)".
func TestLBKillKeepsVIPsForItsGrace(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Second
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6)
	mark := w.mark()

	killed := time.Now()
	w.must(w.pod.LB.Kill())
	w.wantRoutes()
	for _, vip := range []string{vipA4, vipA6} {
		w.wantStory(mark, vip, depreferred, withdrawn)
		heard := w.heard(mark, vip)
		if after := heard[0].At.Sub(killed); after < grace-time.Second-clockSlack {
			t.Errorf("%s was de-preferred %v after the LB's death, before the last second of its grace of %v", vip, after, grace)
		}
		if after := heard[1].At.Sub(killed); after < grace-clockSlack {
			t.Errorf("%s was withdrawn %v after the LB's death, before the end of its grace of %v", vip, after, grace)
		}
	}
	w.wantNothing(0, vipB4, vipB6)
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	w.wantRoutes(vipA4, vipA6)
}

// clockSlack covers that the gateway's BIRD looks at the clock once in each
// round of its loop.
const clockSlack = 50 * time.Millisecond

// Design section 9: "LB kill -9 while VIP A was not ready | A stays withdrawn, at every moment".
func TestLBKillNeverRaisesAVIPThatIsNotReady(t *testing.T) {
	for name, grace := range map[string]string{"without a grace": "--stale-grace=0s", "with a grace": "--stale-grace=1s"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.up(w.target2)
			w.must(w.pod.StartLB(grace))
			w.must(w.pod.StartFrontend())
			w.wantRoutes(vipB4, vipB6)
			witness, err := w.gateway.WatchRoutes(t.Context(), time.Millisecond)
			w.must(err)
			begin := time.Now()
			for range 3 {
				w.must(w.pod.LB.Kill())
				w.wantRoutes()
				w.must(w.pod.StartLB(grace))
				w.wantRoutes(vipB4, vipB6)
			}
			w.wantNothing(0, vipA4, vipA6)
			for _, s := range witness.Since(begin) {
				for _, vip := range []string{vipA4, vipA6} {
					if s.Has(netip.MustParsePrefix(vip)) {
						t.Errorf("%s was in the gateway's table at %v", vip, s.At)
					}
				}
			}
			w.must(witness.Close())
			// A can appear, and does so once only.
			w.up(w.target1)
			w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
			w.wantStory(0, vipA4, announced)
			w.wantStory(0, vipA6, announced)
		})
	}
}

// Design section 9: "LB SIGSTOP | as kill -9 | lease (1 s default, down to 100 ms) + 50 ms".
func TestLBStoppedWithdrawsWhenItsLeaseEnds(t *testing.T) {
	for name, flags := range map[string][]string{"default lease": nil, "short lease": {"--lease=200ms"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.up(w.target1)
			w.must(w.pod.StartLB(flags...))
			w.must(w.pod.StartFrontend())
			w.wantRoutes(vipA4, vipA6)

			w.must(w.pod.LB.Signal(syscall.SIGSTOP))
			w.wantRoutes()
			w.waitLog(w.pod.Frontend, "to=withdrawn reason=lb_lost")
			mark := w.mark()
			w.must(w.pod.LB.Signal(syscall.SIGCONT))
			w.wantRoutes(vipA4, vipA6)
			w.waitHeard(mark, vipA4, announced)
			w.wantNothing(0, vipB4, vipB6)
			w.wantRunning(w.pod.LB, w.pod.Frontend)
		})
	}
}

// Design section 9: "LB SIGTERM | GoingAway → de-prefer → withdraw → report → the LB tears down only then".
func TestLBTermMovesTrafficAwayFirst(t *testing.T) {
	t.Parallel()
	const drain = 500 * time.Millisecond
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB("--drain-time=" + drain.String()))
	w.must(w.pod.StartFrontend("--drain-time=1m"))
	w.wantRoutes(vipA4, vipA6)
	w.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)
	mark := w.mark()

	terminated := time.Now()
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	for _, vip := range []string{vipA4, vipA6} {
		w.wantStory(mark, vip, depreferred, withdrawn)
		last := w.waitHeard(mark, vip, withdrawn)
		if !last.At.Before(w.pod.LB.Ended()) {
			t.Errorf("the LB ended at %v, before %v", w.pod.LB.Ended(), last)
		}
		if after := last.At.Sub(terminated); after < drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the signal, before the drain time of %v was over", vip, after, drain)
		}
	}
	w.waitLog(w.pod.LB, "every VIP is withdrawn; stopping")
	w.waitLog(w.pod.Frontend, "to=withdrawn reason=lb_draining")
	w.must(w.pod.StartLB())
	w.wantRoutes(vipA4, vipA6)
}

// waitReported waits until the frontend has told the lb what it does with a VIP.
func (w *world) waitReported(vip string, want readinessv1.Advertisement) {
	w.t.Helper()
	w.waitFor(func() error {
		for _, v := range w.lbStatus().GetVips() {
			if v.GetReadiness().GetVip() == vip && v.GetReported().GetAdvertisement() == want {
				return nil
			}
		}
		return fmt.Errorf("the lb has not heard that %s is %s", vip, want)
	})
}

// Design section 9: "LB SIGTERM | … the LB tears down only then", also when the frontend has not yet taken in that the
// LB goes: a VIP that just became ready, or whose gateway just came up, may be announced at this moment.
func TestLBTermWaitsForAFrontendThatLagsBehind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB("--drain-time=10m"))
	frontend := w.startScriptedFrontend()
	position := frontend.first.GetPosition()
	frontend.report(position, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY, vipA4, vipA6, vipB4, vipB6)
	w.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)

	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetGoingAway() != nil })
	goes := frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetDelta() != nil })
	for range 3 { // it goes on speaking
		frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetHeartbeat() != nil })
	}
	frontend.report(goes.GetPosition(), readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING, vipA4, vipA6)
	w.wantExit(w.pod.LB, 0)
	w.waitLog(w.pod.LB, "every VIP is withdrawn; stopping")
}

// Design section 5: "a second SIGTERM skips to the end".
func TestLBTermTwiceEndsAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB("--drain-time=10m"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6)
	mark := w.mark()
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.waitHeard(mark, vipA4, depreferred)
	w.waitHeard(mark, vipA6, depreferred)
	w.wantRunning(w.pod.LB)
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	w.wantRoutes()
}

// Design section 9: "LB restarts before the grace ends | new instance_id, no withdraw of VIPs that its synced
// snapshot says are ready".
func TestLBRestartWithinItsGraceWithdrawsNothingThatIsReady(t *testing.T) {
	t.Parallel()
	const grace = 6 * time.Second // the new LB has all of it but the last second
	w := newWorld(t)
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark, before := w.mark(), w.lbStatus().GetPosition().GetInstanceId()

	killed := time.Now()
	w.must(w.pod.LB.Kill())
	w.down(w.target2)
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	// What the new one says is not ready goes at once, what is ready stays.
	w.wantRoutes(vipA4, vipA6)
	w.waitLogs(w.pod.LB, "readiness watch opened", 2)
	if after := w.lbStatus().GetPosition().GetInstanceId(); after == before {
		t.Errorf("the new LB has the old instance_id %s", after)
	}
	// The grace is over for good, not only unheard.
	w.waitPast(killed.Add(grace))
	w.up(w.target2)
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantNothing(mark, vipA4, vipA6)
	w.wantStory(mark, vipB4, withdrawn, announced)
	w.wantStory(mark, vipB6, withdrawn, announced)
}

// Design section 4: "An unsynced snapshot (targets not yet checked) neither withdraws nor raises anything".
// An LB is unsynced until each target has a verdict, or for half of its grace period.
func TestUnsyncedLBNeitherRaisesNorWithdraws(t *testing.T) {
	t.Parallel()
	const grace = 6 * time.Second
	w := newWorld(t)
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 60s, timeout: 60s")))
	w.up(w.target1)
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6)
	mark := w.mark()

	killed := time.Now()
	w.must(w.pod.LB.Kill())
	w.down(w.target1)
	hung := w.hang(netip.AddrPortFrom(lab.Target1v4, checkPort), netip.AddrPortFrom(lab.Target1v6, checkPort))
	w.must(w.pod.StartLB("--stale-grace=" + grace.String()))
	w.waitLogs(w.pod.LB, "readiness watch opened", 2)
	w.wantRoutes()
	w.wantStatus("targets not checked yet", "0 of 4 VIPs ready")
	w.wantRunning(w.pod.LB)
	for _, vip := range []string{vipA4, vipA6} {
		heard := w.heard(mark, vip)
		if words := story(heard); len(words) == 0 || slices.Contains(words, announced) {
			t.Fatalf("%s: %v, want its withdrawal alone", vip, words)
		}
		if after := heard[len(heard)-1].At.Sub(killed); after < grace/2-clockSlack {
			t.Errorf("%s was withdrawn %v after the LB's death, before half of its grace of %v", vip, after, grace)
		}
	}
	mark = w.mark()
	hung.accept()
	w.wantRoutes(vipA4, vipA6)
	w.wantStory(mark, vipA4, announced)
	w.wantStory(mark, vipA6, announced)
	w.wantNothing(0, vipB4, vipB6)
}

// hangingTarget is a target that takes no connection and refuses none, until it
// is told to accept.
type hangingTarget struct {
	listeners []net.Listener
	fillers   []net.Conn
	wg        sync.WaitGroup
}

// hang makes a hanging target: its queue is full, so that the kernel drops
// further SYNs.
func (w *world) hang(addrs ...netip.AddrPort) *hangingTarget {
	w.t.Helper()
	h := &hangingTarget{}
	w.t.Cleanup(h.close)
	for _, a := range addrs {
		w.must(w.Backend.Do(func() error {
			family, address := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()})
			if a.Addr().Is4() {
				family, address = unix.AF_INET, &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
			}
			fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return os.NewSyscallError("socket", err)
			}
			file := os.NewFile(uintptr(fd), "hanging target")
			defer file.Close()
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return os.NewSyscallError("setsockopt", err)
			}
			if err := unix.Bind(fd, address); err != nil {
				return os.NewSyscallError("bind", err)
			}
			if err := unix.Listen(fd, 0); err != nil {
				return os.NewSyscallError("listen", err)
			}
			listener, err := net.FileListener(file)
			if err != nil {
				return err
			}
			h.listeners = append(h.listeners, listener)
			filler, err := net.Dial("tcp", a.String()) // a backlog of 0 holds one
			if err != nil {
				return err
			}
			h.fillers = append(h.fillers, filler)
			return nil
		}))
	}
	return h
}

// accept ends the hanging.
func (h *hangingTarget) accept() {
	for _, l := range h.listeners {
		h.wg.Go(func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return // closed
				}
				conn.Close()
			}
		})
	}
}

func (h *hangingTarget) close() {
	for _, l := range h.listeners {
		l.Close()
	}
	for _, c := range h.fillers {
		c.Close()
	}
	h.wg.Wait()
}

// Design section 5: "--on-lb-loss=keep: as row 8, without limit", and rows 6 and 8 never raise.
func TestLBLossKeepsVIPsWhenAskedTo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--on-lb-loss=keep"))
	w.wantRoutes(vipA4, vipA6)
	mark := w.mark()

	w.must(w.pod.LB.Kill())
	w.waitLog(w.pod.Frontend, "load balancer's word went from live to lost")
	w.up(w.target2) // nobody says that B is ready now
	w.wantRoutes(vipA4, vipA6)
	w.wantNothing(mark, vipA4, vipA6)
	w.wantNothing(0, vipB4, vipB6)
	w.must(w.pod.StartLB())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantNothing(mark, vipA4, vipA6)
}

// Design section 5: "Gating on the LB is switched off only by --gating=off (logged, metric, shown in status)".
func TestGatingOffAdvertisesWithoutAnLB(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.pod.StartFrontend("--gating=off"))
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantHealth(lab.FrontendHealth, "Advertised", healthServing)
	w.waitLog(w.pod.Frontend, "gating is off")
	if w.frontendStatus().GetGating() {
		t.Error("status says that gating is on")
	}
	out, status := w.run("frontend", "status", "--admin-socket=unix://"+w.pod.FrontendAdmin())
	if status != 0 || !strings.Contains(strings.ToLower(out), "gating") {
		t.Errorf("frontend status ended with %d and does not show that gating is off:\n%s", status, out)
	}
	if page := w.get(lab.FrontendMetrics, "/metrics"); !strings.Contains(page, "\nvipgate_frontend_gating 0\n") {
		t.Errorf("the metrics do not show that gating is off:\n%s", page)
	}
}

// Design section 5: "an empty socket value is an error".
func TestEmptyLBSocketIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, env := range map[string]string{"flag": "", "variable": "VIPGATE_LB_SOCKET=", "Meridio's variable": "NFE_LB_SOCKET="} {
		args := w.pod.FrontendArgs()
		if env == "" {
			args = append(args, "--lb-socket=")
		} else {
			args = append([]string{"env", env}, slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--lb-socket=") })...)
		}
		p, err := w.Start(w.Pod, "frontend-"+strings.ReplaceAll(name, " ", "-"), args...)
		w.must(err)
		w.wantExit(p, 2)
		if out := p.Output(); !strings.Contains(out, "--lb-socket") || !strings.Contains(out, "--gating=off") {
			t.Errorf("by %s: it does not say what to do: %s", name, out)
		}
	}
	w.wantNothing(0, vipA4, vipA6, vipB4, vipB6)
}
