package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// A stall of the machine withdraws no VIP while hold times permit
// (docs/architecture.md#the-two-leases). All checks, and all timers of lb and frontend that a test
// does not name, have their defaults.
func TestStallKeepsVIPs(t *testing.T) {
	t.Parallel()
	nft := []string{"--dataplane=nftables"}
	for _, test := range []struct {
		name     string
		stall    time.Duration
		hold     int // of the gateways in seconds
		lb       []string
		frontend []string
	}{
		{"gateways with 3 s, nftables", time.Second, 3, nft, nil},
		{"gateways with 9 s", 2 * time.Second, 9, nil, nil},
		{"gateways with 9 s, nftables", 2 * time.Second, 9, nft, nil},
		{"all with 9 s, nftables", 4 * time.Second, 9, nft, []string{"--lb-bgp-hold-time=9s"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.pod.ProductTimers = true
			f.regateway(func(c *lab.GatewayConfig) { c.HoldSeconds = test.hold })
			f.must(f.pod.WriteTrench(strings.NewReplacer(
				lab.CheckTimers, "via: address", lab.HoldTime, fmt.Sprintf("holdTime: %ds", test.hold),
			).Replace(usualTrench())))
			f.up(f.target1, f.target2)
			f.must(f.pod.StartLB(test.lb...))
			f.must(f.pod.StartFrontend(test.frontend...))
			f.wantRoutes(every()...)
			for round := range 2 {
				sessions, mark := f.sessions(), f.mark()
				took := f.stall(test.stall)
				// Any timer that the stall brought to its end expires in this time.
				f.waitPast(time.Now().Add(4 * time.Second))
				t.Logf("round %d: a stall of %v", round, took.Round(time.Millisecond))
				f.wantNoUpdates(mark, every()...)
				if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
					t.Errorf("sessions were %v and are %v", sessions, now)
				}
			}
			if out := f.pod.LB.Output(); strings.Contains(out, "overdue") {
				t.Error("lb found targets overdue")
			}
		})
	}
}

// A stall that begins while BIRD is asked, and ends when its answer is due, is no evidence against
// BIRD.
func TestStallWhileBIRDIsAsked(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.startPod("--lb-bgp-hold-time=9s") // BIRD may be silent for 6 s
	// A poll of each second waits for so long when the stall begins.
	for _, asked := range []time.Duration{600 * time.Millisecond, 100 * time.Millisecond} {
		const stall, first = 6 * time.Second, 100 * time.Millisecond // in which only the frontend runs
		for isLonger := true; isLonger; {
			f.wantRoutes(every()...)
			mark, second := f.mark(), time.Now().Truncate(time.Second).Add(2*time.Second)
			f.waitPast(second.Add(-20 * time.Millisecond))
			f.must(syscall.Kill(f.birdPID(), syscall.SIGSTOP))
			f.waitPast(second.Add(asked))
			f.must(f.pod.Frontend.Signal(syscall.SIGSTOP))
			f.waitPast(time.Now().Add(stall))
			f.must(f.pod.Frontend.Signal(syscall.SIGCONT))
			f.waitPast(time.Now().Add(first))
			f.must(syscall.Kill(f.birdPID(), syscall.SIGCONT))
			// A machine that stalls besides may withdraw, as BIRD is silent for longer.
			if isLonger = time.Now().After(second.Add(asked + stall + first + 200*time.Millisecond)); !isLonger {
				f.waitPast(time.Now().Add(2 * time.Second)) // the frontend has asked again
				f.wantNoUpdates(mark, every()...)
			}
		}
	}
}

// A stall of lb does not use up the time in which the frontend withdraws at lb's end.
func TestStallDuringStop(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB(noDrain))
	f.must(f.pod.StartFrontend(noDrain))
	f.wantRoutes(every()...)
	f.must(f.pod.Frontend.Signal(syscall.SIGSTOP))
	f.must(f.pod.LB.Signal(syscall.SIGTERM))
	f.waitLog(f.pod.LB, "going away")
	f.must(f.pod.LB.Signal(syscall.SIGSTOP))
	f.must(f.pod.Frontend.Signal(syscall.SIGCONT))
	f.waitPast(time.Now().Add(3 * time.Second)) // longer than lb waits
	f.must(f.pod.LB.Signal(syscall.SIGCONT))
	f.wantExit(f.pod.LB, 0)
	if out := f.pod.LB.Output(); !strings.Contains(out, "every VIP is withdrawn; stopping") {
		t.Errorf("lb ended without the frontend's withdrawal:\n%s", f.pod.LB.Tail(5))
	}
}

// stall stops all processes of the pod and of the gateway, as a stall of the machine does, after
// the KEEPALIVE of a full second. It returns the time for which they did not run.
func (f *fixture) stall(d time.Duration) time.Duration {
	f.t.Helper()
	f.waitPast(time.Now().Truncate(time.Second).Add(1200 * time.Millisecond))
	pids := []int{f.pod.LB.PID(), f.pod.Frontend.PID(), f.birdPID(), f.gateway.Process.PID()}
	began := time.Now()
	for _, signal := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
		for _, pid := range pids {
			f.must(syscall.Kill(pid, signal))
		}
		if signal == syscall.SIGSTOP {
			f.waitPast(began.Add(d))
		}
	}
	return time.Since(began)
}
