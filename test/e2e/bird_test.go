package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// BIRD that is killed, exits or hangs is restarted with back-off; VIPs return with the sessions
// (docs/architecture.md#failure-table).
func TestBIRDRestart(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(f *fixture, bird int){
		"kill -9": func(f *fixture, bird int) { f.must(syscall.Kill(bird, syscall.SIGKILL)) },
		"exit 0": func(f *fixture, _ int) {
			_, err := f.Pod.Run(f.t.Context(), "birdc", "-s", f.pod.BirdSocket(), "down")
			f.must(err)
		},
		"hang": func(f *fixture, bird int) { f.must(syscall.Kill(bird, syscall.SIGSTOP)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newServing(t, 1, lab.BIRDTimer)
			mark, bird := f.mark(), f.birdPID()
			records := []*healthRecord{
				f.recordHealth("Egress"), f.recordHealth("Egress/ipv4"), f.recordHealth("Egress/ipv6"), f.recordHealth("Readiness"),
			}
			for _, r := range records {
				r.wait(healthServing)
			}

			end(f, bird)
			for _, r := range records {
				r.wait(healthNotServing)
			}
			if name == "hang" {
				f.waitLog(f.pod.Frontend, "BIRD_HUNG")
			}
			f.waitUpdate(mark, vipA4, withdrawn)
			f.waitUpdate(mark, vipA6, withdrawn)
			f.wantRoutes(vipA4, vipA6)
			for _, r := range records {
				r.wait(healthServing)
			}
			if now := f.birdPID(); now == bird || !f.runs(now) || f.runs(bird) {
				t.Errorf("BIRD was %d (runs: %v) and is %d (runs: %v)", bird, f.runs(bird), now, f.runs(now))
			}
			f.wantUpdates(mark, vipA4, withdrawn, announced)
			f.wantUpdates(mark, vipA6, withdrawn, announced)
			if b := f.frontendStatus().GetBird(); b.GetRestarts() != 1 || b.GetError() != "" {
				t.Errorf("status of BIRD: %v", b)
			}
			if n := metric(t, f.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_bird_restarts_total"); n != 1 {
				t.Errorf("vipgate_frontend_bird_restarts_total is %v", n)
			}
			f.wantRunning(f.pod.LB, f.pod.Frontend)
		})
	}
}

// BIRD counts as hung after two thirds of the hold time (docs/bird.md#hangs). A stop of 1 s changes
// nothing, also if the machine stalls for 2 s besides.
func TestPausedBIRDKeepsVIPs(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--lb-bgp-hold-time=6s")
	records := []*healthRecord{
		f.recordHealth("Egress"), f.recordHealth("Readiness"), f.recordHealth("BIRD"), f.recordHealth("vip/" + vipA4),
	}
	for _, r := range records {
		r.wait(healthServing)
	}
	mark, bird, sessions := f.mark(), f.birdPID(), f.sessions()
	for range 3 {
		f.must(syscall.Kill(bird, syscall.SIGSTOP))
		stopped := time.Now()
		f.waitPast(stopped.Add(time.Second))
		f.must(syscall.Kill(bird, syscall.SIGCONT))
		// BIRD processes the backlog of the stop; wait until it is idle again.
		f.waitPast(stopped.Add(2500 * time.Millisecond))
	}
	// The update of a VIP that flips now is the first one: the pauses caused none.
	f.up(f.target2)
	f.wantRoutes(every()...)
	f.wantNoUpdates(mark, vipA4, vipA6)
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	if now := f.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
	for _, r := range records {
		r.wantOnly(healthServing)
	}
}

// wantNoWildcard fails if a process of the pod listens on a wildcard address. It returns the
// listening sockets.
func (f *fixture) wantNoWildcard(protocol string) string {
	f.t.Helper()
	out, err := f.Pod.Run(f.t.Context(), "ss", "-Hln", protocol)
	f.must(err)
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		if len(words) < 4 {
			f.t.Errorf("not a line of ss: %q", line)
			continue
		}
		local := words[3]
		for _, wildcard := range []string{"*", "0.0.0.0", "[::]", "%"} {
			if strings.HasPrefix(local, wildcard) {
				f.t.Errorf("a listener is bound to the wildcard address: %s", line)
			}
		}
	}
	if strings.TrimSpace(out) == "" {
		f.t.Error("nothing listens at all")
	}
	return out
}
