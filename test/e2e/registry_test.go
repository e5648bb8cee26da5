package e2e

import (
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// registryTrench is a trench without targets; they are registered.
func registryTrench() string {
	return attractor() + fmt.Sprintf(`streams:
  - name: stream-a
    vips: [%[1]s, "%[2]s"]
    check: {tcp: {port: %[5]d}, %[6]s}
    drainTime: 4s
  - name: stream-b
    vips: [%[3]s, "%[4]s"]
    check: {tcp: {port: %[5]d}, %[7]s}
    drainTime: 4s
`, vipA4, vipA6, vipB4, vipB6, checkPort, strings.Replace(lab.CheckTimers, "rise: 1", "rise: 2", 1), lab.CheckTimers)
}

// registry are the flags of an lb that only accepts registrations for stream-a by the application.
var registry = []string{
	"--source=file", "--source=registry", "--target-id=stream-a=spiffe://vipgate.demo/ns/*/sa/app", "--registry-grace=2s",
	"--registry-settle=0s",
}

// newRegistryFixture creates a fixture with a pod whose lb has a registry, and both targets up.
func newRegistryFixture(t *testing.T, extra ...string) *fixture {
	f := newFixture(t)
	f.must(f.pod.WriteTrench(registryTrench()))
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB(append(registry, extra...)...))
	f.must(f.pod.StartFrontend())
	f.waitLog(f.pod.LB, "serving readiness")
	return f
}

// register starts `lb target add` with the application's identity and returns it once registered.
func (f *fixture) register(stream, name string, ips ...fmt.Stringer) *lab.Process {
	f.t.Helper()
	p := f.startRegistration(stream, name, lab.AppID, ips...)
	f.waitLog(p, ": ready")
	return p
}

func (f *fixture) startRegistration(stream, name, id string, ips ...fmt.Stringer) *lab.Process {
	f.t.Helper()
	args := []string{
		filepath.Join(binaries, "lb"), "target", "add", name, "--stream=" + stream, "--registry=unix://" +
			f.pod.Socket(), "--lb-id=" + lab.LBID,
		"--identity=dev", "--dev-authority-dir=" + f.pod.Authority(), "--spiffe-id=" + id,
	}
	for _, ip := range ips {
		args = append(args, "--ip="+ip.String())
	}
	// A unique name for the log, so that the output of an earlier process is not matched.
	p, err := f.Start(f.Pod, name+"-"+rand.Text()[:8], args...)
	f.must(err)
	f.t.Cleanup(func() {
		if f.t.Failed() {
			f.t.Logf("== last lines of %s\n%s", p.Name, p.Tail(20))
		}
	})
	return p
}

// lbRun runs a sub-command of lb on the admin socket.
func (f *fixture) lbRun(args ...string) (string, error) {
	ctx := harness.Context(f.t, waitTimeout)
	return f.pod.Run(ctx, "lb", append(args, "--admin-socket=unix://"+f.pod.LBAdmin())...)
}

// wantStatus waits until `lb status` contains all words.
func (f *fixture) wantStatus(words ...string) string {
	f.t.Helper()
	var text string
	f.waitFor(func() (err error) {
		if text, err = f.lbRun("status"); err != nil {
			return err
		}
		for _, word := range words {
			if !strings.Contains(text, word) {
				return fmt.Errorf("lb status does not say %q:\n%s", word, text)
			}
		}
		return nil
	})
	return text
}

// Registered targets exist as long as their call, plus a grace period, and are merged with the
// targets of the trench file.
func TestRegistrationEndsWithStream(t *testing.T) {
	t.Parallel()
	f := newRegistryFixture(t)
	f.wantRoutes()
	mark := f.mark()
	p := f.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	f.wantRoutes(vipA4, vipA6)
	f.wantStatus("app-1", "registry", "1 target of 1 caller")

	// The lease ends: nothing happens for the grace, then it drains, then it is gone.
	const grace, drain = 2 * time.Second, 4 * time.Second // as in registry and registryTrench
	killed := time.Now()
	f.must(p.Kill())
	f.waitUpdate(mark, vipA4, withdrawn)
	f.wantRoutes()
	for _, vip := range []string{vipA4, vipA6} {
		f.wantUpdates(mark, vip, announced, depreferred, withdrawn)
		received := f.updates(mark, vip)
		if after := received[1].At.Sub(killed); after < grace-clockSlack {
			t.Errorf("%s was de-preferred %v after the call had ended, the grace is %v", vip, after, grace)
		}
		if after := received[2].At.Sub(killed); after < grace+drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the call had ended, grace and drain are %v", vip, after, grace+drain)
		}
	}
	f.wantStatus("0 of 4 VIPs ready", "0 targets of 0 callers")
}

// A new call within the grace period changes nothing at the gateway.
func TestReconnectWithinGracePeriod(t *testing.T) {
	t.Parallel()
	f := newRegistryFixture(t, "--registry-grace=1m")
	mark := f.mark()
	p := f.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	f.wantRoutes(vipA4, vipA6)
	f.must(p.Kill())
	again := f.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	f.wantStatus("1 target of 1 caller", "1/1")
	f.wantUpdates(mark, vipA4, announced)
	f.stop(again)
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, announced, depreferred, withdrawn)
}

// Registrations survive a restart of the LB for their grace period.
func TestRegistrationsSurviveLBRestart(t *testing.T) {
	t.Parallel()
	f := newRegistryFixture(t, "--registry-grace=1m", "--stale-grace=20s")
	p := f.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	f.wantRoutes(vipA4, vipA6)
	mark := f.mark()
	// The client does not reconnect, so that the registration exists only in the file.
	f.must(p.Signal(syscall.SIGSTOP))
	f.must(f.pod.LB.Kill())
	// The lb waits for no more registrations than the file contains.
	f.must(f.pod.StartLB(append(registry, "--registry-grace=1m", "--stale-grace=20s", "--registry-settle=1m")...))
	f.wantStatus("2 of 4 VIPs ready; the frontend advertises 2", "app-1", "1 target of 1 caller")
	f.wantNoUpdates(mark, vipA4)
	f.must(p.Signal(syscall.SIGCONT))
	f.waitLogs(p, "registered at", 2)
	f.wantNoUpdates(mark, vipA4)
}

func TestRefusedRegistrations(t *testing.T) {
	t.Parallel()
	f := newRegistryFixture(t, "--target-quota=1", "--target-subnet=172.16.0.0/16", "--target-subnet=20.0.0.0/30")
	p := f.register("stream-a", "app-1", lab.Target1v4)
	f.wantStatus("1 target of 1 caller, 1 each at most", "ipv4 neighbor entries of the node")
	for _, tt := range []struct {
		stream, name string
		ip           text
		words        []string
	}{
		{"stream-b", "x", "172.16.1.9", []string{"may not register targets of stream"}},
		{"stream-a", "x", "172.16.1.9", []string{"--target-quota", "1"}},
		{"stream-a", "app-1", "10.1.1.1", []string{"10.1.1.1", "--target-subnet"}},
		{"stream-a", "app-1", "20.0.0.1", []string{"20.0.0.1", "lies in the VIP"}},
		{"stream-a", "app-1", "172.16.255.255.1", []string{"172.16.255.255.1"}},
	} {
		refused := f.startRegistration(tt.stream, tt.name, lab.AppID, tt.ip)
		f.waitFor(func() error { // it only ends without a signal if it was refused
			select {
			case <-refused.Done():
				return nil
			default:
				return fmt.Errorf("%v was not refused:\n%s", tt, refused.Output())
			}
		})
		if status, err := refused.Wait(t.Context()); err != nil || status == 0 {
			t.Errorf("%v: exit status %d, %v", tt, status, err)
		}
		for _, word := range tt.words {
			if out := refused.Output(); !strings.Contains(out, word) {
				t.Errorf("%v: it does not say %q:\n%s", tt, word, out)
			}
		}
	}
	// The lb denies another identity and logs the authorized ones.
	other := f.startRegistration("stream-a", "x", "spiffe://vipgate.demo/ns/apps/sa/other", lab.Target2v4)
	f.waitLog(other, "it denied the client's SPIFFE ID or certificate")
	f.waitLog(f.pod.LB, "or one that --target-id allows: [stream-a=spiffe://vipgate.demo/ns/*/sa/app")
	f.stop(other)
	// The remaining targets keep serving.
	f.wantRoutes(vipA4)
	f.stop(p)
}

type text string

func (s text) String() string { return string(s) }

// A manual drain survives restarts until it is undone, and no resync overrides it. A VIP whose
// only targets drain is DRAINING.
func TestOperatorDrainOfTargetPersists(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 1h\n    targets:")))
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := f.mark()

	out, err := f.lbRun("target", "drain", "target-1")
	f.must(err)
	if !strings.Contains(out, "draining until ") || !strings.Contains(out, "stream-a/target-1") {
		t.Errorf("it printed %q", out)
	}
	f.wantStatus("draining: ")
	f.waitUpdate(mark, vipA4, depreferred)
	// A second order ends the drain.
	_, err = f.lbRun("target", "drain", "target-1", "--drain-time=0s")
	f.must(err)
	f.wantRoutes(vipB4, vipB6)
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.wantStatus("drained: by an operator")

	// A resync with an additional target, whose appearance shows that the lb has applied it.
	mark = f.mark()
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "fall: 10", "fall: 11") +
		"      - {name: target-3, ips: [172.16.3.3]}\n"))
	f.wantStatus("1/2", "drained: by an operator", "2 of 4 VIPs ready")
	f.stop(f.pod.LB)
	f.must(f.pod.StartLB())
	f.wantRoutes(vipB4, vipB6)
	f.wantStatus("drained: by an operator", "2 of 4 VIPs ready")
	f.wantNoUpdates(mark, vipA4, vipA6)

	_, err = f.lbRun("target", "undrain", "target-1")
	f.must(err)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	// The exit statuses equal the exit statuses of frontend drain and undrain.
	admin := "--admin-socket=unix://" + f.pod.LBAdmin()
	if out, status := f.run("lb", "target", "undrain", admin, "target-1"); status != 0 ||
		!strings.Contains(out, "not drained: target-1") {
		t.Errorf("a second undrain ended with %d: %s", status, out)
	}
	for _, command := range []string{"drain", "undrain"} {
		if out, status := f.run("lb", "target", command, admin, "target-9"); status != 1 ||
			!strings.Contains(out, "target-9") {
			t.Errorf("%s of no target ended with %d: %s", command, status, out)
		}
	}
	if out, status := f.run("lb", "target", "drain", admin, "target-1", "--drain-time=999h"); status != 2 ||
		!strings.Contains(out, "between 0 and") {
		t.Errorf("an absurd drain ended with %d: %s", status, out)
	}
}

// A target that is removed from the trench file, or is marked as terminating, drains.
func TestTargetRemovedFromFileDrains(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	with := strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 4s\n    targets:")
	f.must(f.pod.WriteTrench(with))
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := f.mark()
	target := func(name string, a, b fmt.Stringer) string {
		return fmt.Sprintf(`{name: %s, ips: [%s, "%s"]}`, name, a, b)
	}
	without := strings.Replace(with, "      - "+target("target-1", lab.Target1v4, lab.Target1v6)+"\n", "", 1)
	without = strings.Replace(without, "    drainTime: 4s\n    targets:\n  - name", "    drainTime: 4s\n  - name", 1)
	ending := strings.Replace(without, `"]}`, `"], terminating: true}`, 1)
	if without == with || ending == without {
		t.Fatal("the trench file was not changed")
	}
	f.must(f.pod.WriteTrench(ending))
	f.wantRoutes()
	for _, vip := range []string{vipA4, vipB6} {
		f.wantUpdates(mark, vip, depreferred, withdrawn)
	}
	f.waitFor(func() error { // it is removed, not only unused
		list, err := f.lbRun("target", "list")
		if err == nil && strings.Contains(list, "target-1") {
			err = fmt.Errorf("target-1 has not left:\n%s", list)
		}
		return err
	})
	f.must(f.pod.WriteTrench(with))
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
}

// The trench file is removed.
func TestTrenchFileRemoved(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 4s\n    targets:")))
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB("--on-missing-file=drain"))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := f.mark()
	saved, err := os.ReadFile(f.pod.TrenchFile())
	f.must(err)
	f.must(os.Remove(f.pod.TrenchFile()))
	f.wantRoutes()
	f.wantUpdates(mark, vipA4, depreferred, withdrawn)
	f.wantStatus("file    GONE", "no such file or directory")
	f.must(f.pod.WriteTrench(string(saved)))
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.wantStatus("file    live")
}
