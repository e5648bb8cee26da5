package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/crash"
	"github.com/vipgate/vipgate/test/lab"
)

// lastGood is one program that gets a poisoned configuration.
type lastGood struct {
	*fixture
	program string // lb or frontend
	state   string
	process func() *lab.Process
	start   func(...string) error
	wait    func(name string, serving bool, words ...string) string
}

// newLastGood starts a pod, whose program crashes or hangs right after it accepted a VIP of package
// crash, and waits until its configuration is the last good one.
func newLastGood(t *testing.T, program string) *lastGood {
	t.Helper()
	f := newFixture(t)
	f.pod.ProductTimers = true // a hang is found by a heartbeat that is missing
	f.up(f.target1, f.target2)
	p := &lastGood{
		fixture: f, program: program, state: f.pod.StateDir(), start: f.pod.StartLB, wait: f.waitLB,
		process: func() *lab.Process { return f.pod.LB },
	}
	other := f.pod.StartFrontend
	if program == "frontend" {
		p.state, p.start, other, p.wait = f.pod.BirdDir(), other, p.start, f.waitFrontend
		p.process = func() *lab.Process { return f.pod.Frontend }
	}
	f.must(other())
	f.pod.Binaries = filepath.Join(binaries, "poisoned")
	f.must(p.start())
	f.wantRoutes(every()...)
	f.waitState(p.state, "trial.json", `"good"`)
	return p
}

// waitState waits until a file of a state directory has this text.
func (f *fixture) waitState(dir, name, text string) {
	f.t.Helper()
	f.waitFor(func() error {
		content, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil && !strings.Contains(string(content), text) {
			err = fmt.Errorf("%s has no %s: %s", name, text, content)
		}
		return err
	})
}

// edit adds a VIP to the configuration and returns the digest of the file.
func (p *lastGood) edit(prefix string) string {
	p.t.Helper()
	text := edited(p.t, fmt.Sprintf("vips: [%s, %q, %s, %q]", vipA4, vipA6, vipB4, vipB6),
		fmt.Sprintf("vips: [%s, %q, %s, %q, %s]", vipA4, vipA6, vipB4, vipB6, prefix))
	p.must(p.pod.WriteTrench(text))
	digest := sha256.Sum256([]byte(text))
	return hex.EncodeToString(digest[:])
}

// ends waits until the process has ended.
func (p *lastGood) ends() {
	p.t.Helper()
	await.Receive(p.t, "the end of "+p.program, p.process().Done())
}

// servesLastGood starts the process, and wants the VIPs of the last good configuration at the
// gateway and a condition that names the refused file and the cause.
func (p *lastGood) servesLastGood(digest, cause string) {
	p.t.Helper()
	p.must(p.start())
	p.wait("Configuration", false, digest, cause, "the last good configuration is in force", "correct the file")
	p.wantRoutes(every()...)
	p.wantRunning(p.pod.LB, p.pod.Frontend)
}

// recovers corrects the file and wants it in force.
func (p *lastGood) recovers() {
	p.t.Helper()
	p.edit("20.0.0.99/32")
	p.wait("Configuration", true)
	p.wantRunning(p.pod.LB, p.pod.Frontend)
}

// A valid configuration that crashes or hangs the program right after its acceptance is not
// accepted again at the next start: the last good one is (Fastly, 2021-06-08).
func TestLastGoodConfiguration(t *testing.T) {
	t.Parallel()
	for _, program := range []string{"frontend", "lb"} {
		t.Run(program+" panics", func(t *testing.T) {
			t.Parallel()
			p := newLastGood(t, program)
			digest := p.edit(crash.Panics)
			p.ends()
			p.servesLastGood(digest, "poisoned configuration")
			// The file stays refused at the next start.
			p.must(p.process().Kill())
			p.servesLastGood(digest, "poisoned configuration")
			p.recovers()
		})
	}
	t.Run("process killed", func(t *testing.T) {
		t.Parallel()
		p := newLastGood(t, "lb")
		digest := p.edit(crash.Dies)
		p.ends()
		// A kill from outside looks the same, so the first one does not refuse the file.
		p.must(p.start())
		p.ends()
		p.servesLastGood(digest, "the process ended 2 times without a known cause")
		p.recovers()
	})
	t.Run("loop hangs", func(t *testing.T) {
		t.Parallel()
		p := newLastGood(t, "lb")
		digest := p.edit(crash.Hangs)
		p.waitState(p.state, "trial.json", "hung")
		p.must(p.process().Kill()) // as the kubelet does after its probes failed
		p.servesLastGood(digest, "hung")
		p.recovers()
	})
}

// A kill right after an edit does not refuse the edit.
func TestKillAfterEditKeepsEdit(t *testing.T) {
	t.Parallel()
	p := newLastGood(t, "frontend")
	p.waitState(p.state, "trial.json", p.edit("20.0.0.99/32"))
	p.must(p.process().Kill())
	p.must(p.start())
	p.wait("Configuration", true)
	p.waitState(p.state, "last-good.yaml", "20.0.0.99/32")
	p.wantRoutes(every()...)
}
