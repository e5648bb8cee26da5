package e2e

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// registryTrench is a trench whose targets come from elsewhere.
func registryTrench() string {
	return attractor() + fmt.Sprintf(`streams:
  - name: stream-a
    vips: [%[1]s, "%[2]s"]
    check: {tcp: {port: %[5]d}, interval: 100ms, timeout: 100ms, rise: 2, fall: 2}
    drainTime: 1s
  - name: stream-b
    vips: [%[3]s, "%[4]s"]
    check: {tcp: {port: %[5]d}, interval: 100ms, timeout: 100ms, rise: 1, fall: 2}
    drainTime: 1s
`, vipA4, vipA6, vipB4, vipB6, checkPort)
}

// registry is an lb that takes registrations for stream-a, from the application only.
var registry = []string{
	"--source=file", "--source=registry", "--target-id=stream-a=spiffe://vipgate.demo/ns/*/sa/app", "--registry-grace=2s",
}

// registryWorld is a world with a pod whose lb has a registry, and both targets up.
func registryWorld(t *testing.T, extra ...string) *world {
	w := newWorld(t)
	w.must(w.pod.WriteTrench(registryTrench()))
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB(append(registry, extra...)...))
	w.must(w.pod.StartFrontend())
	w.waitLog(w.pod.LB, "serving readiness")
	return w
}

// register starts `lb target add` with the application's identity and returns it once registered.
func (w *world) register(stream, name string, ips ...fmt.Stringer) *lab.Process {
	w.t.Helper()
	p := w.startRegistration(stream, name, lab.AppID, ips...)
	w.waitLog(p, ": ready")
	return p
}

func (w *world) startRegistration(stream, name, id string, ips ...fmt.Stringer) *lab.Process {
	w.t.Helper()
	args := []string{
		filepath.Join(binaries, "lb"), "target", "add", name, "--stream=" + stream, "--registry=unix://" + w.pod.Socket(), "--lb-id=" + lab.LBID,
		"--identity=dev", "--dev-authority-dir=" + w.pod.Authority(), "--spiffe-id=" + id,
	}
	for _, ip := range ips {
		args = append(args, "--ip="+ip.String())
	}
	// A log of its own: what an earlier one of the name printed is not its word.
	p, err := w.Start(w.Pod, name+"-"+rand.Text()[:8], args...)
	w.must(err)
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("== last lines of %s\n%s", p.Name, p.Tail(20))
		}
	})
	return p
}

// lbRun runs a sub-command of lb on the admin socket.
func (w *world) lbRun(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(w.t.Context(), patience)
	defer cancel()
	return w.pod.Run(ctx, "lb", append(args, "--admin-socket=unix://"+w.pod.LBAdmin())...)
}

// wantStatus waits until `lb status` says all of these.
func (w *world) wantStatus(words ...string) string {
	w.t.Helper()
	var text string
	w.waitFor(func() (err error) {
		if text, err = w.lbRun("status"); err != nil {
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

// Issue 4: "targets live as long as the stream, plus a grace", and with the file
// they are united.
func TestRegisteredTargetLivesAsLongAsItsStream(t *testing.T) {
	t.Parallel()
	w := registryWorld(t)
	w.wantRoutes()
	mark := w.mark()
	p := w.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	w.wantRoutes(vipA4, vipA6)
	w.wantStatus("app-1", "registry", "1 target of 1 caller")

	// The lease ends: nothing happens for the grace, then it drains, then it is gone.
	const grace, drain = 2 * time.Second, time.Second // as in registry and registryTrench
	killed := time.Now()
	w.must(p.Kill())
	w.waitHeard(mark, vipA4, withdrawn)
	w.wantRoutes()
	for _, vip := range []string{vipA4, vipA6} {
		w.wantStory(mark, vip, announced, depreferred, withdrawn)
		heard := w.heard(mark, vip)
		if after := heard[1].At.Sub(killed); after < grace-clockSlack {
			t.Errorf("%s was de-preferred %v after the call had ended, the grace is %v", vip, after, grace)
		}
		if after := heard[2].At.Sub(killed); after < grace+drain-clockSlack {
			t.Errorf("%s was withdrawn %v after the call had ended, grace and drain are %v", vip, after, grace+drain)
		}
	}
	w.wantStatus("0 of 4 VIPs ready", "0 targets of 0 callers")
}

// A new call within the grace changes nothing at the gateway.
func TestReconnectWithinTheGraceIsNotSeen(t *testing.T) {
	t.Parallel()
	w := registryWorld(t, "--registry-grace=1m")
	mark := w.mark()
	p := w.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	w.wantRoutes(vipA4, vipA6)
	w.must(p.Kill())
	again := w.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	w.wantStatus("1 target of 1 caller", "1/1")
	w.wantStory(mark, vipA4, announced)
	w.must(again.Signal(syscall.SIGTERM))
	w.wantExit(again, 0)
	w.wantRoutes()
	w.wantStory(mark, vipA4, announced, depreferred, withdrawn)
}

// "Registrations survive an LB restart for their grace."
func TestRegistrationsSurviveARestartOfTheLB(t *testing.T) {
	t.Parallel()
	w := registryWorld(t, "--registry-grace=1m", "--stale-grace=20s")
	p := w.register("stream-a", "app-1", lab.Target1v4, lab.Target1v6)
	w.wantRoutes(vipA4, vipA6)
	mark := w.mark()
	// The one who registers does not come back, so that only the file knows.
	w.must(p.Signal(syscall.SIGSTOP))
	w.must(w.pod.LB.Kill())
	w.must(w.pod.StartLB(append(registry, "--registry-grace=1m", "--stale-grace=20s")...))
	w.wantStatus("2 of 4 VIPs ready; the frontend advertises 2", "app-1", "1 target of 1 caller")
	w.wantNothing(mark, vipA4)
	w.must(p.Signal(syscall.SIGCONT))
	w.waitLogs(p, "registered at", 2)
	w.wantNothing(mark, vipA4)
}

func TestRefusedRegistrationsSayWhy(t *testing.T) {
	t.Parallel()
	w := registryWorld(t, "--target-quota=1", "--target-subnet=172.16.0.0/16", "--target-subnet=20.0.0.0/30")
	p := w.register("stream-a", "app-1", lab.Target1v4)
	w.wantStatus("1 target of 1 caller, 1 each at most", "ipv4 neighbor entries of the node")
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
		refused := w.startRegistration(tt.stream, tt.name, lab.AppID, tt.ip)
		w.waitFor(func() error { // it ends by itself only if it was refused
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
	// Another identity is not let in at all; who is, the lb says.
	other := w.startRegistration("stream-a", "x", "spiffe://vipgate.demo/ns/apps/sa/other", lab.Target2v4)
	w.waitLog(other, "it denied our SPIFFE ID or certificate")
	w.waitLog(w.pod.LB, "or one that --target-id allows: [stream-a=spiffe://vipgate.demo/ns/*/sa/app")
	w.must(other.Signal(syscall.SIGTERM))
	w.wantExit(other, 0)
	// The others go on.
	w.wantRoutes(vipA4)
	w.must(p.Signal(syscall.SIGTERM))
	w.wantExit(p, 0)
}

type text string

func (s text) String() string { return string(s) }

// "a manual drain survives restarts until undone, and no resync overrides it", and
// "a VIP whose only targets drain is DRAINING".
func TestTargetDrainedByHandStaysDrained(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 1s\n    targets:")))
	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := w.mark()

	out, err := w.lbRun("target", "drain", "target-1")
	w.must(err)
	if !strings.Contains(out, "draining until ") || !strings.Contains(out, "stream-a/target-1") {
		t.Errorf("it printed %q", out)
	}
	w.wantStatus("draining: ")
	w.wantRoutes(vipB4, vipB6)
	w.wantStory(mark, vipA4, depreferred, withdrawn)
	w.wantStatus("drained: by hand")

	// A resync, with a target more so that the lb shows when it has taken it over.
	mark = w.mark()
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "fall: 2", "fall: 3") + "      - {name: target-3, ips: [172.16.3.3]}\n"))
	w.wantStatus("1/2", "drained: by hand", "2 of 4 VIPs ready")
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	w.must(w.pod.StartLB())
	w.wantRoutes(vipB4, vipB6)
	w.wantStatus("drained: by hand", "2 of 4 VIPs ready")
	w.wantNothing(mark, vipA4, vipA6)

	_, err = w.lbRun("target", "undrain", "target-1")
	w.must(err)
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	// The exit statuses are those of frontend drain and undrain.
	admin := "--admin-socket=unix://" + w.pod.LBAdmin()
	if out, status := w.run("lb", "target", "undrain", admin, "target-1"); status != 0 || !strings.Contains(out, "not drained: target-1") {
		t.Errorf("a second undrain ended with %d: %s", status, out)
	}
	for _, command := range []string{"drain", "undrain"} {
		if out, status := w.run("lb", "target", command, admin, "target-9"); status != 1 || !strings.Contains(out, "target-9") {
			t.Errorf("%s of no target ended with %d: %s", command, status, out)
		}
	}
	if out, status := w.run("lb", "target", "drain", admin, "target-1", "--drain-for=999h"); status != 2 || !strings.Contains(out, "between 0 and") {
		t.Errorf("an absurd drain ended with %d: %s", status, out)
	}
}

// A target that leaves the trench file, or is marked as terminating, drains.
func TestTargetThatLeavesTheFileDrainsFirst(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	with := strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 1s\n    targets:")
	w.must(w.pod.WriteTrench(with))
	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := w.mark()
	target := func(name string, a, b fmt.Stringer) string {
		return fmt.Sprintf(`{name: %s, ips: [%s, "%s"]}`, name, a, b)
	}
	without := strings.Replace(with, "      - "+target("target-1", lab.Target1v4, lab.Target1v6)+"\n", "", 1)
	without = strings.Replace(without, "    drainTime: 1s\n    targets:\n  - name", "    drainTime: 1s\n  - name", 1)
	ending := strings.Replace(without, `"]}`, `"], terminating: true}`, 1)
	if without == with || ending == without {
		t.Fatal("the trench file was not changed")
	}
	w.must(w.pod.WriteTrench(ending))
	w.wantRoutes()
	for _, vip := range []string{vipA4, vipB6} {
		w.wantStory(mark, vip, depreferred, withdrawn)
	}
	w.waitFor(func() error { // it is not only out of use, it is gone
		list, err := w.lbRun("target", "list")
		if err == nil && strings.Contains(list, "target-1") {
			err = fmt.Errorf("target-1 has not left:\n%s", list)
		}
		return err
	})
	w.must(w.pod.WriteTrench(with))
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
}

// "Every source has a defined answer": the file is gone.
func TestTrenchFileThatIsGoneIsAnsweredAsAsked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "    targets:", "    drainTime: 1s\n    targets:")))
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB("--on-file-gone=drain"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mark := w.mark()
	saved, err := os.ReadFile(w.pod.TrenchFile())
	w.must(err)
	w.must(os.Remove(w.pod.TrenchFile()))
	w.wantRoutes()
	w.wantStory(mark, vipA4, depreferred, withdrawn)
	w.wantStatus("file    GONE", "no such file or directory") // not the heading WHEN GONE
	w.must(w.pod.WriteTrench(string(saved)))
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.wantStatus("file    live")
}
