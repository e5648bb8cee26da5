package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// built is the folder of all programs. Its name has a space, as a user's folder may.
var built string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the demo needs root for network namespaces: run as root")
		return 1
	}
	dir, err := os.MkdirTemp("", "vipgate demo ")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	programs, err := lab.Programs()
	built = filepath.Join(dir, "bin")
	if err == nil {
		err = os.Symlink(programs, built)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if status := m.Run(); status != 0 {
		return status
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// demoTimeout bounds a whole demo. It detects a hang: the first act takes 30 s with pauses to
// read and 15 s without, the second one about a minute, the third one half of that.
const demoTimeout = 6 * time.Minute

// quick leaves no time to read, only to see that tables stay.
const quick = "--pause=300ms"

// firstAct is about advertisements, secondAct about real traffic, thirdAct about a rollout.
const firstAct, secondAct, thirdAct = "--act=1", "--act=2", "--act=3"

// demoRun is a running demo.
type demoRun struct {
	t    *testing.T
	cmd  *exec.Cmd
	done chan struct{}
	err  error // valid once done is closed

	mu      sync.Mutex
	lines   []string
	changed chan struct{}
}

// startDemo starts a demo, which is ended with the test.
func startDemo(t *testing.T, args ...string) *demoRun {
	t.Helper()
	p := &demoRun{
		t: t, cmd: exec.Command(filepath.Join(built, "demo"), append([]string{"--binaries=" + built}, args...)...),
		done: make(chan struct{}), changed: make(chan struct{}),
	}
	out, err := p.cmd.StdoutPipe()
	harness.Must(t, err)
	p.cmd.Stderr = p.cmd.Stdout
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	harness.Must(t, p.cmd.Start())
	go func() {
		defer close(p.done)
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			p.add(lines.Text())
		}
		p.err = p.cmd.Wait()
	}()
	t.Cleanup(func() {
		p.signal(syscall.SIGTERM)
		p.wait()
		if t.Failed() {
			t.Logf("the demo said:\n%s", p.text())
		}
	})
	return p
}

func (p *demoRun) add(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lines = append(p.lines, line)
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *demoRun) pid() int { return p.cmd.Process.Pid }

func (p *demoRun) text() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.Join(p.lines, "\n")
}

func (p *demoRun) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
}

// waitFor waits until the demo has printed a text.
func (p *demoRun) waitFor(text string) {
	p.t.Helper()
	timeout := time.After(demoTimeout)
	for {
		p.mu.Lock()
		said, changed := strings.Contains(strings.Join(p.lines, "\n"), text), p.changed
		p.mu.Unlock()
		if said {
			return
		}
		select {
		case <-changed:
		case <-p.done:
			p.t.Fatalf("the demo ended without saying %q: %v", text, p.err)
		case <-timeout:
			p.t.Fatalf("the demo has not said %q", text)
		}
	}
}

// wait waits for the end of the demo and returns its exit status.
func (p *demoRun) wait() int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(demoTimeout):
		p.signal(syscall.SIGKILL)
		<-p.done
		p.t.Errorf("the demo did not end")
	}
	return p.cmd.ProcessState.ExitCode()
}

// left lists the namespaces, processes and files that a demo has not removed.
func left(pid int) []string {
	var found []string
	prefix := fmt.Sprintf("vg-%d-", pid)
	for _, pattern := range []string{"/run/netns/" + prefix + "*", "/tmp/" + prefix + "*"} {
		matches, err := filepath.Glob(pattern)
		if err != nil {
			return []string{err.Error()}
		}
		found = append(found, matches...)
	}
	// Everything that a demo starts has a path of its folder among its arguments.
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return []string{err.Error()}
	}
	for _, path := range commands {
		// A process may end between the listing and the reading.
		if b, err := os.ReadFile(path); err == nil && strings.Contains(string(b), "/tmp/"+prefix) {
			found = append(found, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}

func wantNothingLeft(t *testing.T, pid int) {
	t.Helper()
	if found := left(pid); len(found) > 0 {
		t.Errorf("left behind:\n%s", strings.Join(found, "\n"))
	}
}

func wantOutput(t *testing.T, p *demoRun) {
	t.Helper()
	if status := p.wait(); status != 0 {
		t.Fatalf("exit status %d", status)
	}
	if said := p.text(); !strings.Contains(said, "Every step held") || strings.Count(said, "   ok") != 12 {
		t.Errorf("not twelve steps that held")
	}
	wantNothingLeft(t, p.pid())
}

// The second act passes only if planned changes lost nothing in the gated run, and lost
// something in the control.
func TestTrafficWithAndWithoutGating(t *testing.T) {
	t.Parallel()
	p := startDemo(t, secondAct)
	if status := p.wait(); status != 0 {
		t.Fatalf("exit status %d", status)
	}
	harness.WantText(t, p.text(),
		"no planned change lost a request", "the control loses what vipgate keeps",
		"Every step held",
	)
	t.Log(p.text())
	wantNothingLeft(t, p.pid())
}

// The third act stays after the rollout, and its suggested commands work.
func TestHeldRollout(t *testing.T) {
	t.Parallel()
	p := startDemo(t, thirdAct, "--hold")
	p.waitFor("Ctrl-C clears everything up")
	if !strings.Contains(p.text(), "no planned change lost a request") {
		t.Error("it does not say that nothing was lost")
	}
	tries := printed.FindAllStringSubmatch(p.text(), -1)
	if len(tries) < 10 {
		t.Fatalf("only %d commands", len(tries))
	}
	for _, c := range tries {
		t.Run(c[1], func(t *testing.T) { try1(t, c[1], c[2]) })
	}
	p.signal(syscall.SIGINT)
	if status := p.wait(); status != 0 {
		t.Errorf("exit status %d", status)
	}
	wantNothingLeft(t, p.pid())
}

func TestDemoHoldCleansUp(t *testing.T) {
	t.Parallel()
	wantOutput(t, startDemo(t, quick, firstAct))
}

func TestDemoAfterKilledRun(t *testing.T) {
	t.Parallel()
	killed := startDemo(t, quick, firstAct)
	killed.waitFor("\n4. ")
	if len(left(killed.pid())) < 5 { // namespaces, folder, processes
		t.Fatalf("a running demo has only %v", left(killed.pid()))
	}
	killed.signal(syscall.SIGKILL)
	if status := killed.wait(); status == 0 {
		t.Fatal("a killed demo ends with status 0")
	}
	wantOutput(t, startDemo(t, quick, firstAct))
	wantNothingLeft(t, killed.pid())
}

func TestDemoSignal(t *testing.T) {
	t.Parallel()
	for _, s := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(s.String(), func(t *testing.T) {
			p := startDemo(t, quick, firstAct)
			p.waitFor("\n2. ")
			p.signal(s)
			if status := p.wait(); status != 1 {
				t.Errorf("exit status %d, want 1", status)
			}
			wantNothingLeft(t, p.pid())
		})
	}
}

func TestDemoFailureOutput(t *testing.T) {
	t.Parallel()
	p := startDemo(t, quick, firstAct)
	p.waitFor("\n3. ")
	// The frontend is killed during a step.
	pid, err := os.ReadFile(filepath.Join(glob(t, fmt.Sprintf("/tmp/vg-%d-*", p.pid())), "frontend.pid"))
	harness.Must(t, err)
	if out, err := exec.CommandContext(t.Context(), "kill", "-9",
		strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if status := p.wait(); status != 1 {
		t.Errorf("exit status %d, want 1", status)
	}
	harness.WantText(t, p.text(),
		"FAILED: ", "frontend ended by itself", "the gateway holds:", "last lines of lb", "last lines of frontend",
		"last lines of bird",
		"| time=", `msg="VIP changed"`, "trench0: State changed to up",
	)
	wantNothingLeft(t, p.pid())
}

func glob(t *testing.T, pattern string) string {
	t.Helper()
	matches, err := filepath.Glob(pattern)
	if err != nil || len(matches) != 1 {
		t.Fatalf("%s is %v (%v), want one", pattern, matches, err)
	}
	return matches[0]
}

// printed matches a comment and the command below it.
var printed = regexp.MustCompile(`(?m)^# (.+)\n(.+)$`)

func TestHeldDemoCommands(t *testing.T) {
	t.Parallel()
	p := startDemo(t, quick, firstAct, "--hold")
	p.waitFor("Ctrl-C ends the pod")
	tries := printed.FindAllStringSubmatch(p.text(), -1)
	if len(tries) < 20 {
		t.Fatalf("only %d commands", len(tries))
	}
	gatewayTable := ""
	for _, c := range tries {
		if strings.Contains(c[2], "show route all") {
			gatewayTable = c[2]
		}
	}
	for _, c := range tries {
		what, command := c[1], c[2]
		t.Run(what, func(t *testing.T) {
			try1(t, what, command)
			if killed, ok := strings.CutPrefix(what, "kill the "); ok {
				killed, _, _ = strings.Cut(killed, ";")
				p.waitFor("-- " + strings.Replace(killed, "load balancer", "lb", 1) + " runs again")
			}
			wantVIPs(t, gatewayTable, vipsAfter(what))
		})
	}
	p.signal(syscall.SIGINT)
	wantOutput(t, p)
}

// vipsAfter returns the number of VIPs that the gateway must hold some time after a command.
func vipsAfter(what string) int {
	for prefix, n := range map[string]int{"move traffic": 3, "target-2 loses": 3, "no new flows": 2, "pull": 0} {
		if strings.HasPrefix(what, prefix) {
			return n
		}
	}
	return 4
}

func wantVIPs(t *testing.T, gatewayTable string, want int) {
	t.Helper()
	ctx := harness.Context(t, time.Minute)
	harness.Check(t, lab.Eventually(ctx, 50*time.Millisecond, func() error {
		out, err := exec.CommandContext(ctx, "sh", "-c", gatewayTable).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if n := strings.Count(string(out), "BGP.as_path: 8103\n"); n != want {
			return fmt.Errorf("the gateway holds %d VIPs, want %d: %s", n, want, out)
		}
		return nil
	}))
}

// try1 runs a printed command as a shell does and checks the result against the comment.
func try1(t *testing.T, what, command string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if !strings.Contains(what, "until Ctrl-C") {
		out, err := exec.CommandContext(ctx, "sh", "-c", command).CombinedOutput()
		if refused := strings.HasPrefix(what, "refused"); refused != (err != nil) {
			t.Errorf("%s: %v\n%s", command, err, out)
		}
		return
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", "exec "+command)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	out, err := cmd.StdoutPipe()
	harness.Must(t, err)
	harness.Must(t, cmd.Start())
	lines := bufio.NewScanner(out)
	n := 0
	for lines.Scan() && n < 5 {
		n++
	}
	cancel()
	if n < 5 {
		t.Errorf("%s: only %d lines", command, n)
	}
	// The exit status after an interrupt is not checked.
	_ = cmd.Wait()
}
