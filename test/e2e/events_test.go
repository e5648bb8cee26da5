package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// follower is a running `frontend events --follow`.
type follower struct {
	f          *fixture
	cmd        *exec.Cmd
	out, notes harness.Log
}

func (f *fixture) follow(args ...string) *follower {
	f.t.Helper()
	return f.followProgram("frontend", f.pod.FrontendAdmin(), args...)
}

func (f *fixture) followProgram(program, admin string, args ...string) *follower {
	f.t.Helper()
	events := &follower{f: f}
	events.cmd = exec.Command(filepath.Join(binaries, program),
		append([]string{"events", "--follow", "--admin-socket=unix://" + admin}, args...)...)
	events.cmd.Stdout, events.cmd.Stderr = &events.out, &events.notes
	f.must(events.cmd.Start())
	f.t.Cleanup(func() {
		if events.cmd.ProcessState == nil {
			// Only after a failure; the process may already have ended.
			_ = events.cmd.Process.Kill()
			_ = events.cmd.Wait()
		}
	})
	return events
}

// waitFor waits until a line has all the words.
func (events *follower) waitFor(o *harness.Log, words ...string) {
	events.f.t.Helper()
	events.f.waitFor(func() error {
		for line := range strings.Lines(o.String()) {
			has := true
			for _, word := range words {
				has = has && strings.Contains(line, word)
			}
			if has {
				return nil
			}
		}
		return fmt.Errorf("no line with %q in\n%s%s", words, events.out.String(), events.notes.String())
	})
}

// interrupt sends SIGINT (Ctrl-C); the process must exit immediately, without an error.
func (events *follower) interrupt() {
	events.f.t.Helper()
	events.f.must(events.cmd.Process.Signal(syscall.SIGINT))
	done := make(chan error, 1)
	go func() { done <- events.cmd.Wait() }()
	var ended error
	events.f.waitFor(func() error {
		select {
		case ended = <-done:
			return nil
		default:
			return fmt.Errorf("it still runs after Ctrl-C")
		}
	})
	if ended != nil {
		events.f.t.Errorf("Ctrl-C ended it with %v\n%s", ended, events.notes.String())
	}
}

// `frontend events --follow` names VIP, gateway and cause, also across a kill -9 of the frontend.
func TestFrontendEventsAcrossRestart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if out, code := f.run("frontend", "events", "--follow", "--admin-socket=unix://"+f.pod.FrontendAdmin()); code != 1 ||
		!strings.Contains(out, "is `frontend run` running here") {
		t.Errorf("without a frontend: exit status %d: %s", code, out)
	}
	f.up(f.target1)
	f.startPod()
	f.wantRoutes(vipA4, vipA6)
	people, machine, one := f.follow(), f.follow("-o", "json"), f.follow("--vip="+vipB4)
	for _, events := range []*follower{people, machine} {
		events.waitFor(&events.out, "frontend", "is starting")
	}
	people.waitFor(&people.out, "gateway-a4", "up")
	machine.waitFor(&machine.out, `"object":"gateway-a4"`, `"to":"up"`)

	f.up(f.target2)
	people.waitFor(&people.out, vipB4, "announced", "ready")
	one.waitFor(&one.out, vipB4, "announced")
	f.down(f.target2)
	people.waitFor(&people.out, vipB4, "withdrawn", "LB says not ready", "target-2")
	f.must(f.gateway.Process.Kill())
	people.waitFor(&people.out, "gateway-a4", "DOWN")
	people.waitFor(&people.out, vipA4, "withdrawn", "no gateway is up", "gateway-a4: ")
	machine.waitFor(&machine.out, `"object":"gateway-a4"`, `"to":"down"`)
	f.must(f.gateway.Start())
	f.wantRoutes(vipA4, vipA6)

	f.must(f.pod.Frontend.Kill())
	for _, events := range []*follower{people, machine, one} {
		events.waitFor(&events.notes, "the frontend is gone, waiting for it")
	}
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6)
	people.waitFor(&people.notes, "was restarted")
	f.up(f.target2)
	for _, events := range []*follower{people, one} {
		f.waitFor(func() error {
			if n := strings.Count(events.out.String(), "announced"); n < 2 {
				return fmt.Errorf("announced %d times in\n%s", n, events.out.String())
			}
			return nil
		})
	}
	machine.waitFor(&machine.out, `"object":"`+vipB6+`"`, `"to":"announced","reason":"ready"`)
	for _, events := range []*follower{people, machine, one} {
		events.interrupt()
		if strings.Contains(events.notes.String(), "lost:") {
			t.Errorf("a gap was reported:\n%s", events.notes.String())
		}
	}
	if strings.Contains(one.out.String(), vipA4) || strings.Contains(one.out.String(), "gateway-a4") {
		t.Errorf("asked for %s, got\n%s", vipB4, one.out.String())
	}
	wantNumbersInARow(t, machine.out.String())
}

// wantNumbersInARow checks that the event numbers have neither gaps nor duplicates. Each process
// counts from 1.
func wantNumbersInARow(t *testing.T, text string) {
	t.Helper()
	starts, last := 0, uint64(0)
	for line := range strings.Lines(text) {
		var e struct {
			Sequence uint64 `json:",string"`
		}
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if e.Sequence == 1 {
			starts, last = starts+1, 0
		}
		if e.Sequence != last+1 {
			t.Errorf("event %d follows event %d", e.Sequence, last)
		}
		last = e.Sequence
	}
	if starts != 2 {
		t.Errorf("two processes ran, the events of %d were received from the first one on", starts)
	}
}

// A configuration that cannot be passed to BIRD: the sessions remain, and condition, metrics and
// events report the failure until BIRD accepts the configuration.
func TestUnappliedBIRDConfiguration(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	sessions := f.sessions()
	configured := func() (float64, float64) {
		page := f.get(lab.FrontendMetrics, "/metrics")
		return metric(t, page, "vipgate_frontend_bird_configured"), metric(
			t, page, "vipgate_frontend_bird_configure_failures_total",
		)
	}
	if good, failures := configured(); good != 1 || failures != 0 {
		t.Errorf("configured %v, failures %v", good, failures)
	}
	events := f.follow("--limit=1")

	away := f.pod.BirdDir() + "-away"
	f.must(os.Rename(f.pod.BirdDir(), away))
	f.must(os.WriteFile(f.pod.BirdDir(), nil, 0o600)) // or the next write would create the directory again
	f.must(f.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4)))
	f.waitFrontend("BIRDConfiguration", false, "keeps an older configuration", f.pod.BirdDir())
	f.waitFrontend("Configuration", true)
	f.waitFrontend("Readiness", false, "BIRDConfiguration")
	events.waitFor(&events.out, "BIRD keeps an older configuration")
	if good, failures := configured(); good != 0 || failures < 1 {
		t.Errorf("configured %v, failures %v", good, failures)
	}

	f.must(os.Remove(f.pod.BirdDir()))
	f.must(os.Rename(away, f.pod.BirdDir()))
	f.waitFrontend("BIRDConfiguration", true)
	events.waitFor(&events.out, "BIRD loaded the desired configuration")
	if good, _ := configured(); good != 1 {
		t.Errorf("configured %v", good)
	}
	events.interrupt()
	if now := f.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
}

// lb events --follow shows each event once, also across a restart.
func TestLBEventsAcrossRestart(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	f.must(f.pod.StartLB())
	f.waitLog(f.pod.LB, "readiness is synced")
	events, machine := f.followProgram("lb", f.pod.LBAdmin()), f.followProgram("lb", f.pod.LBAdmin(), "-o", "json")
	events.waitFor(&events.out, vipA4, "ready")
	f.up(f.target2)
	events.waitFor(&events.out, vipB4, " ready")
	machine.waitFor(&machine.out, `"object":"`+vipB4+`"`, `"to":"ready"`)
	f.must(f.pod.LB.Kill())
	for _, events := range []*follower{events, machine} {
		events.waitFor(&events.notes, "the lb is gone, waiting for it")
	}
	f.must(f.pod.StartLB())
	events.waitFor(&events.notes, "the lb was restarted")
	f.down(f.target1)
	events.waitFor(&events.out, vipA4, "not ready", "connection refused")
	machine.waitFor(&machine.out, `"object":"`+vipA4+`"`, `"to":"not ready"`, "connection refused")
	events.interrupt()
	machine.interrupt()
	wantNumbersInARow(t, machine.out.String())
}
