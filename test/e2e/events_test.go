package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// output collects what a process prints.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// follower is a `frontend events --follow`.
type follower struct {
	w          *world
	cmd        *exec.Cmd
	out, notes output
}

func (w *world) follow(args ...string) *follower {
	w.t.Helper()
	return w.followProgram("frontend", w.pod.FrontendAdmin(), args...)
}

func (w *world) followProgram(program, admin string, args ...string) *follower {
	w.t.Helper()
	f := &follower{w: w}
	f.cmd = exec.Command(filepath.Join(binaries, program), append([]string{"events", "--follow", "--admin-socket=unix://" + admin}, args...)...)
	f.cmd.Stdout, f.cmd.Stderr = &f.out, &f.notes
	w.must(f.cmd.Start())
	w.t.Cleanup(func() {
		if f.cmd.ProcessState == nil {
			// Only after a failure: it may have ended meanwhile.
			_ = f.cmd.Process.Kill()
			_ = f.cmd.Wait()
		}
	})
	return f
}

// waitFor waits until a line has all the words.
func (f *follower) waitFor(o *output, words ...string) {
	f.w.t.Helper()
	f.w.waitFor(func() error {
		for line := range strings.Lines(o.String()) {
			has := true
			for _, word := range words {
				has = has && strings.Contains(line, word)
			}
			if has {
				return nil
			}
		}
		return fmt.Errorf("no line with %q in\n%s%s", words, f.out.String(), f.notes.String())
	})
}

// interrupt is Ctrl-C; it must end at once and well.
func (f *follower) interrupt() {
	f.w.t.Helper()
	f.w.must(f.cmd.Process.Signal(syscall.SIGINT))
	done := make(chan error, 1)
	go func() { done <- f.cmd.Wait() }()
	var ended error
	f.w.waitFor(func() error {
		select {
		case ended = <-done:
			return nil
		default:
			return fmt.Errorf("it still runs after Ctrl-C")
		}
	})
	if ended != nil {
		f.w.t.Errorf("Ctrl-C ended it with %v\n%s", ended, f.notes.String())
	}
}

// Issue 3: `frontend events --follow`. What is told at 3 a.m.: which VIP and which gateway, and why; over a kill -9 of the
// frontend, too.
func TestEventsAreFollowedOverARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if out, code := w.run("frontend", "events", "--follow", "--admin-socket=unix://"+w.pod.FrontendAdmin()); code != 1 || !strings.Contains(out, "is `frontend run` running here") {
		t.Errorf("without a frontend: exit status %d: %s", code, out)
	}
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	people, machine, one := w.follow(), w.follow("-o", "json"), w.follow("--vip="+vipB4)
	for _, f := range []*follower{people, machine} {
		f.waitFor(&f.out, "frontend", "is starting")
	}
	people.waitFor(&people.out, "gateway-a4", "up")
	machine.waitFor(&machine.out, `"gateway":"gateway-a4"`, `"gatewayUp":true`)

	w.up(w.target2)
	people.waitFor(&people.out, vipB4, "announced", "ready")
	one.waitFor(&one.out, vipB4, "announced")
	w.down(w.target2)
	people.waitFor(&people.out, vipB4, "withdrawn", "LB says not ready", "target-2")
	w.must(w.gateway.Process.Kill())
	people.waitFor(&people.out, "gateway-a4", "DOWN")
	people.waitFor(&people.out, vipA4, "withdrawn", "no gateway is up", "gateway-a4: ")
	machine.waitFor(&machine.out, `"gateway":"gateway-a4"`, `"gatewayUp":false`)
	w.must(w.gateway.Start())
	w.wantRoutes(vipA4, vipA6)

	w.must(w.pod.Frontend.Kill())
	for _, f := range []*follower{people, machine, one} {
		f.waitFor(&f.notes, "the frontend is gone, waiting for it")
	}
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6)
	people.waitFor(&people.notes, "was restarted")
	w.up(w.target2)
	for _, f := range []*follower{people, one} {
		w.waitFor(func() error {
			if n := strings.Count(f.out.String(), "announced"); n < 2 {
				return fmt.Errorf("announced %d times in\n%s", n, f.out.String())
			}
			return nil
		})
	}
	machine.waitFor(&machine.out, `"vip":"`+vipB6+`"`, `ANNOUNCED","reason":"ADVERTISEMENT_REASON_READY"`)
	for _, f := range []*follower{people, machine, one} {
		f.interrupt()
		if strings.Contains(f.notes.String(), "lost:") {
			t.Errorf("a gap was told:\n%s", f.notes.String())
		}
	}
	if strings.Contains(one.out.String(), vipA4) || strings.Contains(one.out.String(), "gateway-a4") {
		t.Errorf("asked for %s, got\n%s", vipB4, one.out.String())
	}
	wantNumbersInARow(t, machine.out.String())
}

// wantNumbersInARow reads one event in each line: none is missing and none comes
// twice. Each process counts from 1.
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
		t.Errorf("two processes ran, %d were heard from their first event on", starts)
	}
}

// A configuration that cannot be given to BIRD: the sessions stay, and condition, metrics and events tell, until it can.
func TestConfigurationThatBIRDDoesNotGetShows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	sessions := w.sessions()
	configured := func() (float64, float64) {
		page := w.get(lab.FrontendMetrics, "/metrics")
		return metric(t, page, "vipgate_frontend_bird_configured"), metric(t, page, "vipgate_frontend_bird_configure_failures_total")
	}
	if good, failures := configured(); good != 1 || failures != 0 {
		t.Errorf("configured %v, failures %v", good, failures)
	}
	f := w.follow("--limit=1")

	away := w.pod.BirdDir() + "-away"
	w.must(os.Rename(w.pod.BirdDir(), away))
	w.must(w.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4)))
	w.waitFrontend("BIRDConfiguration", false, "keeps an older configuration", w.pod.BirdDir())
	w.waitFrontend("Configuration", true)
	w.waitFrontend("Readiness", false, "BIRDConfiguration")
	f.waitFor(&f.out, "BIRD keeps an older configuration")
	if good, failures := configured(); good != 0 || failures < 1 {
		t.Errorf("configured %v, failures %v", good, failures)
	}

	w.must(os.Rename(away, w.pod.BirdDir()))
	w.waitFrontend("BIRDConfiguration", true)
	f.waitFor(&f.out, "BIRD has the wanted configuration again")
	if good, _ := configured(); good != 1 {
		t.Errorf("configured %v", good)
	}
	f.interrupt()
	if now := w.sessions(); fmt.Sprint(now) != fmt.Sprint(sessions) {
		t.Errorf("sessions were %v and are %v", sessions, now)
	}
}

// lb events --follow shows each event once, over a restart, too.
func TestLBEventsAreFollowedOverARestart(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.waitLog(w.pod.LB, "readiness is synced")
	f, machine := w.followProgram("lb", w.pod.LBAdmin()), w.followProgram("lb", w.pod.LBAdmin(), "-o", "json")
	f.waitFor(&f.out, vipA4, "ready")
	w.up(w.target2)
	f.waitFor(&f.out, vipB4, " ready")
	machine.waitFor(&machine.out, `"object":"`+vipB4+`","what":"ready"`)
	w.must(w.pod.LB.Kill())
	for _, f := range []*follower{f, machine} {
		f.waitFor(&f.notes, "the lb is gone, waiting for it")
	}
	w.must(w.pod.StartLB())
	f.waitFor(&f.notes, "the lb was restarted")
	w.down(w.target1)
	f.waitFor(&f.out, vipA4, "not ready", "connection refused")
	machine.waitFor(&machine.out, `"object":"`+vipA4+`","what":"not ready"`, "connection refused")
	f.interrupt()
	machine.interrupt()
	wantNumbersInARow(t, machine.out.String())
}
