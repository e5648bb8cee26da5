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

// The loss of a VIP's last target withdraws that VIP, without an UPDATE for any other VIP
// (docs/architecture.md#failure-table).
func TestLastTargetLossWithdrawsItsVIP(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	// Stream A is served by both targets.
	f.must(f.pod.WriteTrench(strings.Replace(usualTrench(), "  - name: stream-b",
		"      - {name: target-2, ips: ["+lab.Target2v4.String()+`, "`+lab.Target2v6.String()+"\"]}\n  - name: stream-b", 1)))
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := f.mark()

	f.down(f.target2) // the last one of B, not of A
	f.wantRoutes(vipA4, vipA6)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.up(f.target2)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark = f.mark()
	f.down(f.target1)
	f.waitFor(func() error { // until the LB knows
		for _, v := range f.lbStatus().GetVips() {
			if n := v.GetReadiness().GetReadyTargets(); v.GetVip() != vipB4 && v.GetVip() != vipB6 && n != 1 {
				return fmt.Errorf("%s has %d ready targets", v.GetVip(), n)
			}
		}
		return nil
	})
	f.wantNoUpdates(mark, vipA4, vipA6, vipB4, vipB6)
	f.down(f.target2)
	f.wantRoutes()
	for _, vip := range []string{vipA4, vipA6, vipB4, vipB6} {
		f.wantUpdates(mark, vip, withdrawn)
	}
}

// The VIPs of a killed lb are kept for its grace period, then withdrawn
// (docs/architecture.md#failure-table).
func TestLBKillWithinGracePeriod(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Second
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()

	killed := time.Now()
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	for _, vip := range []string{vipA4, vipA6} {
		f.wantUpdates(mark, vip, depreferred, withdrawn)
		received := f.updates(mark, vip)
		if after := received[0].At.Sub(killed); after < grace-time.Second-clockSlack {
			t.Errorf("%s was de-preferred %v after the LB's death, before the last second of its grace of %v", vip,
				after, grace)
		}
		if after := received[1].At.Sub(killed); after < grace-clockSlack {
			t.Errorf("%s was withdrawn %v after the LB's death, before the end of its grace of %v", vip, after, grace)
		}
	}
	f.wantNoUpdates(0, vipB4, vipB6)
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	f.wantRoutes(vipA4, vipA6)
}

// clockSlack allows for the gateway's BIRD, which reads the clock once per iteration of its event
// loop.
const clockSlack = 50 * time.Millisecond

// A VIP that was not ready when the lb was killed is never announced
// (docs/architecture.md#failure-table).
func TestLBKillKeepsNotReadyVIPDown(t *testing.T) {
	t.Parallel()
	for name, grace := range map[string]string{
		"without a grace": "--stale-grace=0s",
		"with a grace":    "--stale-grace=1s",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.up(f.target2)
			f.must(f.pod.StartLB(grace))
			f.must(f.pod.StartFrontend())
			f.wantRoutes(vipB4, vipB6)
			watcher, err := f.gateway.WatchRoutes(t.Context(), time.Millisecond)
			f.must(err)
			begin := time.Now()
			for range 3 {
				f.must(f.pod.LB.Kill())
				f.wantRoutes()
				f.must(f.pod.StartLB(grace))
				f.wantRoutes(vipB4, vipB6)
			}
			f.wantNoUpdates(0, vipA4, vipA6)
			for _, s := range watcher.Since(begin) {
				for _, vip := range []string{vipA4, vipA6} {
					if s.Has(netip.MustParsePrefix(vip)) {
						t.Errorf("%s was in the gateway's table at %v", vip, s.At)
					}
				}
			}
			f.must(watcher.Close())
			// A can be announced, and is announced exactly once.
			f.up(f.target1)
			f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
			f.wantUpdates(0, vipA4, announced)
			f.wantUpdates(0, vipA6, announced)
		})
	}
}

// The VIPs of a stopped lb are withdrawn when its lease expires
// (docs/architecture.md#failure-table).
func TestLBPausedUntilLeaseExpires(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"default lease": {"--lease=1s"}, "short lease": {"--lease=200ms"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.up(f.target1)
			f.must(f.pod.StartLB(flags...))
			f.must(f.pod.StartFrontend())
			f.wantRoutes(vipA4, vipA6)

			f.must(f.pod.LB.Signal(syscall.SIGSTOP))
			f.wantRoutes()
			f.waitLog(f.pod.Frontend, "to=withdrawn reason=lb_lost")
			mark := f.mark()
			f.must(f.pod.LB.Signal(syscall.SIGCONT))
			f.wantRoutes(vipA4, vipA6)
			f.waitUpdate(mark, vipA4, announced)
			f.wantNoUpdates(0, vipB4, vipB6)
			f.wantRunning(f.pod.LB, f.pod.Frontend)
		})
	}
}

// SIGTERM of the lb: GoingAway, de-prefer, withdraw, report, and only then teardown
// (docs/architecture.md#stopping).
func TestLBTermDrainsFirst(t *testing.T) {
	t.Parallel()
	const drain = 4 * time.Second // visibleDrain
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--drain-time=" + drain.String()))
	f.must(f.pod.StartFrontend("--drain-time=1m"))
	f.wantRoutes(vipA4, vipA6)
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_ANNOUNCED)
	mark := f.mark()

	terminated := time.Now()
	f.stop(f.pod.LB)
	for _, vip := range []string{vipA4, vipA6} {
		f.wantUpdates(mark, vip, depreferred, withdrawn)
		last := f.waitUpdate(mark, vip, withdrawn)
		if !last.At.Before(f.pod.LB.Ended()) {
			t.Errorf("the LB ended at %v, before %v", f.pod.LB.Ended(), last)
		}
		if after := last.At.Sub(terminated); after < drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the signal, before the drain time of %v was over", vip, after, drain)
		}
	}
	f.waitLog(f.pod.LB, "every VIP is withdrawn; stopping")
	f.waitLog(f.pod.Frontend, "to=withdrawn reason=lb_draining")
	f.must(f.pod.StartLB())
	f.wantRoutes(vipA4, vipA6)
}

// waitReported waits until the lb has received the advertisement of a VIP from the frontend.
func (f *fixture) waitReported(vip string, want readinessv1.Advertisement) {
	f.t.Helper()
	f.waitFor(func() error {
		for _, v := range f.lbStatus().GetVips() {
			if v.GetVip() == vip && v.GetReported().GetAdvertisement() == want {
				return nil
			}
		}
		return fmt.Errorf("the lb has no report that %s is %s", vip, want)
	})
}

// The lb tears down only after the withdrawal, also when the frontend has not applied GoingAway
// yet: the frontend may just be announcing a VIP that became ready or whose gateway came up.
func TestLBTermWaitsForSlowFrontend(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--drain-time=10m", "--lease=1s"))
	frontend := f.startScriptedFrontend()
	position := frontend.first.GetPosition()
	frontend.report(position, readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_NO_GATEWAY, vipA4, vipA6, vipB4,
		vipB6)
	f.waitReported(vipA4, readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN)

	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetGoingAway() != nil })
	goes := frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetDelta() != nil })
	for range 3 { // it keeps sending
		frontend.wait(func(m *readinessv1.WatchReadinessResponse) bool { return m.GetHeartbeat() != nil })
	}
	frontend.report(goes.GetPosition(), readinessv1.AdvertisementReason_ADVERTISEMENT_REASON_LB_DRAINING, vipA4, vipA6)
	f.wantExit(f.pod.LB, 0)
	f.waitLog(f.pod.LB, "every VIP is withdrawn; stopping")
}

// A second SIGTERM skips the waiting (docs/architecture.md#stopping).
func TestLBTermTwice(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB("--drain-time=10m"))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()
	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	f.waitUpdate(mark, vipA4, depreferred)
	f.waitUpdate(mark, vipA6, depreferred)
	f.wantRunning(f.pod.LB)
	f.stop(f.pod.LB)
	f.wantRoutes()
}

// An lb that restarts within its grace period withdraws no ready VIP
// (docs/architecture.md#failure-table).
func TestLBRestartWithinGracePeriod(t *testing.T) {
	t.Parallel()
	const grace = 6 * time.Second // the new LB has all but the last second
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark, before := f.mark(), f.lbStatus().GetPosition().GetInstanceId()

	killed := time.Now()
	f.must(f.pod.LB.Kill())
	f.down(f.target2)
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	// VIPs that the new LB reports as not ready are withdrawn immediately, ready ones stay
	// advertised.
	f.wantRoutes(vipA4, vipA6)
	f.waitLogs(f.pod.LB, "readiness watch opened", 2)
	if after := f.lbStatus().GetPosition().GetInstanceId(); after == before {
		t.Errorf("the new LB has the old instance_id %s", after)
	}
	// The grace period has ended in the frontend, not only at the gateway.
	f.waitPast(killed.Add(grace))
	f.up(f.target2)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.wantUpdates(mark, vipB4, withdrawn, announced)
	f.wantUpdates(mark, vipB6, withdrawn, announced)
}

// An unsynced snapshot neither withdraws nor raises a VIP (docs/architecture.md#wire-contract). An
// LB is unsynced until each target has a check result, or for half of its grace period.
func TestUnsyncedLBChangesNothing(t *testing.T) {
	t.Parallel()
	const grace = 6 * time.Second
	f := newFixture(t)
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "interval: 500ms, timeout: 500ms",
		"interval: 60s, timeout: 60s")))
	f.up(f.target1)
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()

	killed := time.Now()
	f.must(f.pod.LB.Kill())
	f.down(f.target1)
	hung := f.hang(netip.AddrPortFrom(lab.Target1v4, checkPort), netip.AddrPortFrom(lab.Target1v6, checkPort))
	f.must(f.pod.StartLB("--stale-grace=" + grace.String()))
	f.waitLogs(f.pod.LB, "readiness watch opened", 2)
	f.wantRoutes()
	f.wantStatus("targets not checked yet", "0 of 4 VIPs ready")
	f.wantRunning(f.pod.LB)
	for _, vip := range []string{vipA4, vipA6} {
		received := f.updates(mark, vip)
		if words := changes(received); len(words) == 0 || slices.Contains(words, announced) {
			t.Fatalf("%s: %v, want its withdrawal alone", vip, words)
		}
		if after := received[len(received)-1].At.Sub(killed); after < grace/2-clockSlack {
			t.Errorf("%s was withdrawn %v after the LB's death, before half of its grace of %v", vip, after, grace)
		}
	}
	mark = f.mark()
	hung.accept()
	f.wantRoutes(vipA4, vipA6)
	f.wantUpdates(mark, vipA4, announced)
	f.wantUpdates(mark, vipA6, announced)
	f.wantNoUpdates(0, vipB4, vipB6)
}

// hangingTarget is a target that neither accepts nor refuses connections until accept is called.
type hangingTarget struct {
	listeners []net.Listener
	fillers   []net.Conn
	wg        sync.WaitGroup
}

// hang creates a hanging target: its accept queue is full, so that the kernel drops further SYNs.
func (f *fixture) hang(addrs ...netip.AddrPort) *hangingTarget {
	f.t.Helper()
	h := &hangingTarget{}
	f.t.Cleanup(h.close)
	for _, a := range addrs {
		listener, err := f.Backend.Listen("tcp", a.String())
		f.must(err)
		h.listeners = append(h.listeners, listener)
		socket, err := listener.(*net.TCPListener).SyscallConn()
		f.must(err)
		f.must(socket.Control(func(fd uintptr) { err = unix.Listen(int(fd), 0) }))
		f.must(os.NewSyscallError("listen", err))
		f.must(f.Backend.Do(func() error {
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

// accept makes the target accept connections.
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

// --on-lb-loss=keep is row 9 of the gate without a limit; rows 7 and 9 never raise a VIP
// (docs/architecture.md#the-gate).
func TestLBLossKeepsVIPs(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--on-lb-loss=keep")
	mark := f.mark()

	f.must(f.pod.LB.Kill())
	f.waitLog(f.pod.Frontend, "load balancer readiness went from live to lost")
	f.up(f.target2) // no LB reports that B is ready now
	f.wantRoutes(vipA4, vipA6)
	f.wantNoUpdates(mark, vipA4, vipA6)
	f.wantNoUpdates(0, vipB4, vipB6)
	f.must(f.pod.StartLB())
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantNoUpdates(mark, vipA4, vipA6)
}

// Only --gating=off switches gating off; log, metric and status report it
// (docs/architecture.md#the-gate).
func TestGatingOff(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.StartFrontend("--gating=off"))
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantHealth(lab.FrontendHealth, "Advertised", healthServing)
	f.waitLog(f.pod.Frontend, "gating is off")
	if f.frontendStatus().GetGating() {
		t.Error("status says that gating is on")
	}
	out, status := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if status != 0 || !strings.Contains(strings.ToLower(out), "gating") {
		t.Errorf("frontend status ended with %d and does not show that gating is off:\n%s", status, out)
	}
	if page := f.get(lab.FrontendMetrics, "/metrics"); !strings.Contains(page, "\nvipgate_frontend_gating 0\n") {
		t.Errorf("the metrics do not show that gating is off:\n%s", page)
	}
}

// An empty socket address is an error (docs/architecture.md#the-gate).
func TestEmptyLBSocketIsRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	for name, env := range map[string]string{
		"flag": "", "variable": "VIPGATE_LB_SOCKET=",
	} {
		args := f.pod.FrontendArgs()
		if env == "" {
			args = append(args, "--lb-socket=")
		} else {
			args = append([]string{"env", env},
				slices.DeleteFunc(args, func(a string) bool { return strings.HasPrefix(a, "--lb-socket=") })...)
		}
		p, err := f.Start(f.Pod, "frontend-"+strings.ReplaceAll(name, " ", "-"), args...)
		f.must(err)
		f.wantExit(p, 2)
		if out := p.Output(); !strings.Contains(out, "--lb-socket") || !strings.Contains(out, "--gating=off") {
			t.Errorf("by %s: it does not say what to do: %s", name, out)
		}
	}
	f.wantNoUpdates(0, vipA4, vipA6, vipB4, vipB6)
}
