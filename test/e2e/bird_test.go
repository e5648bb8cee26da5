package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Design section 9: "BIRD kill -9, exit 0 or hang | Egress NOT_SERVING; restarted with back-off; VIPs back once sessions
// are".
func TestBIRDThatEndsOrHangsIsReplaced(t *testing.T) {
	for name, end := range map[string]func(w *world, bird int){
		"kill -9": func(w *world, bird int) { w.must(syscall.Kill(bird, syscall.SIGKILL)) },
		"exit 0": func(w *world, _ int) {
			_, err := w.Pod.Run(w.t.Context(), "birdc", "-s", w.pod.BirdSocket(), "down")
			w.must(err)
		},
		"hang": func(w *world, bird int) { w.must(syscall.Kill(bird, syscall.SIGSTOP)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.up(w.target1)
			w.startPod()
			w.wantRoutes(vipA4, vipA6)
			mark, bird := w.mark(), w.birdPID()
			records := []*healthRecord{w.recordHealth("Egress"), w.recordHealth("Egress/ipv4"), w.recordHealth("Egress/ipv6"), w.recordHealth("Readiness")}
			for _, r := range records {
				r.until(healthServing)
			}

			end(w, bird)
			for _, r := range records {
				r.until(healthNotServing)
			}
			if name == "hang" {
				w.waitLog(w.pod.Frontend, "BIRD_HUNG")
			}
			w.waitHeard(mark, vipA4, withdrawn)
			w.waitHeard(mark, vipA6, withdrawn)
			w.wantRoutes(vipA4, vipA6)
			for _, r := range records {
				r.until(healthServing)
			}
			if now := w.birdPID(); now == bird || !w.runs(now) || w.runs(bird) {
				t.Errorf("BIRD was %d (runs: %v) and is %d (runs: %v)", bird, w.runs(bird), now, w.runs(now))
			}
			w.wantStory(mark, vipA4, withdrawn, announced)
			w.wantStory(mark, vipA6, withdrawn, announced)
			if b := w.frontendStatus().GetBird(); b.GetRestarts() != 1 || b.GetError() != "" {
				t.Errorf("status of BIRD: %v", b)
			}
			if n := metric(t, w.get(lab.FrontendMetrics, "/metrics"), "vipgate_frontend_bird_restarts_total"); n != 1 {
				t.Errorf("vipgate_frontend_bird_restarts_total is %v", n)
			}
			w.wantRunning(w.pod.LB, w.pod.Frontend)
		})
	}
}

// Design section 9, "BIRD … hang", and section 7: BIRD counts as hung after 2 s. A stop of 1 s is nothing.
func TestBIRDStoppedForASecondChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	records := []*healthRecord{w.recordHealth("Egress"), w.recordHealth("Readiness"), w.recordHealth("BIRD"), w.recordHealth("vip/" + vipA4)}
	for _, r := range records {
		r.until(healthServing)
	}
	mark, bird, sessions := w.mark(), w.birdPID(), w.sessions()
	for range 3 {
		w.must(syscall.Kill(bird, syscall.SIGSTOP))
		stopped := time.Now()
		w.waitPast(stopped.Add(time.Second))
		w.must(syscall.Kill(bird, syscall.SIGCONT))
		// What it missed, it does now: the next stop finds it at rest.
		w.waitPast(stopped.Add(2500 * time.Millisecond))
	}
	// A VIP that flips now shows that all is well, and that nothing else came before.
	w.up(w.target2)
	w.wantRoutes(every()...)
	w.wantNothing(mark, vipA4, vipA6)
	if now := w.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
	if now := w.birdPID(); now != bird {
		t.Errorf("BIRD is %d now, it was %d", now, bird)
	}
	for _, r := range records {
		r.wantOnly(healthServing)
	}
}

// Design section 7: "never a wildcard listener".
func TestNoBGPListenerIsOpenToTheWorld(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	out := w.wantNoWildcard("-t")
	for _, want := range []string{"127.0.0.1:1790", lab.PodExternal4.String() + "%" + lab.External + ":10179", "[" + lab.PodExternal6.String() + "]%" + lab.External + ":10179"} {
		if !strings.Contains(out, want) {
			t.Errorf("nobody listens on %s:\n%s", want, out)
		}
	}
}

// wantNoWildcard fails if anything in the pod listens on every address. It
// returns what listens.
func (w *world) wantNoWildcard(protocol string) string {
	w.t.Helper()
	out, err := w.Pod.Run(w.t.Context(), "ss", "-Hln", protocol)
	w.must(err)
	for line := range strings.Lines(out) {
		words := strings.Fields(line)
		if len(words) < 4 {
			w.t.Errorf("not a line of ss: %q", line)
			continue
		}
		local := words[3]
		for _, wildcard := range []string{"*", "0.0.0.0", "[::]", "%"} {
			if strings.HasPrefix(local, wildcard) {
				w.t.Errorf("a listener is open to the world: %s", line)
			}
		}
	}
	if strings.TrimSpace(out) == "" {
		w.t.Error("nothing listens at all")
	}
	return out
}
