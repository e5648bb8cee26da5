package e2e

import (
	"bytes"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/chromium"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// updatePicture makes the test write the picture of the documents: -run TestDashboard$ -update.
var updatePicture = flag.Bool("update", false, "write docs/dashboard.png")

// dashboardTrench has two VIPs of each family, and a target for each pair.
func dashboardTrench() string {
	text := fmt.Sprintf(`trench: trench-a
attractor:
  name: attractor-a-1
  vips: [%s, "%s", %s, "%s"]
  gateways:
    %s
    %s
    %s
    %s
streams:
`, vipA4, vipA6, vipB4, vipB6, lineA4, lineA6, lineB4, lineB6)
	for n, vips := range [][]any{{"stream-a", vipA4, vipA6}, {"stream-b", vipB4, vipB6}} {
		addresses := lab.TargetAddrs(n + 1)
		text += fmt.Sprintf(`  - name: %s
    vips: [%s, "%s"]
    check: {tcp: {port: %d}, %s, via: address}
    targets:
      - {name: target-%d, ips: [%s, "%s"]}
`, append(vips, lab.HealthPort, lab.CheckTimers, n+1, addresses[0], addresses[1])...)
	}
	return text
}

// The page shows without a reload that a VIP is advertised, and then withdrawn with the reason;
// that a program does not answer; and that vipgate itself is gone.
func TestDashboard(t *testing.T) {
	t.Parallel()
	lab.Need(t, "chromium")
	if lack := lab.MissingForTopology(); lack != "" {
		lab.Skip(t, lack)
	}
	topology, err := lab.NewTopology(lab.TopologyConfig{
		Pods: 2, Gateways: 2, Targets: 2, VIPs: []netip.Addr{netip.MustParseAddr("20.0.0.1")}, Binaries: binaries,
		Options: []lab.Option{lab.QuickDAD},
	})
	harness.Must(t, err)
	t.Cleanup(func() { harness.Check(t, topology.Close()) })
	f := &dataPlaneFixture{
		t: t, Topology: topology, ctx: harness.Context(t, 4*waitTimeout), pod: topology.Pods[0],
	}
	for _, target := range f.Targets {
		f.must(target.Start())
	}
	f.must(f.WriteTrench(dashboardTrench()))
	f.must(f.StartGateways(nil))
	sockets := t.TempDir()
	for i, pod := range f.Pods {
		dir := filepath.Join(sockets, fmt.Sprintf("pod-%d", i+1))
		f.must(os.Mkdir(dir, 0o700))
		f.must(os.Symlink(pod.FrontendAdmin(), filepath.Join(dir, "frontend.sock")))
		f.must(os.Symlink(pod.LBAdmin(), filepath.Join(dir, "lb.sock")))
		f.must(pod.StartLB())
		f.must(pod.StartFrontend())
	}
	vipgate := exec.CommandContext(f.ctx, filepath.Join(binaries, "vipgate"), "dashboard", "--sockets="+sockets)
	var output harness.Log
	vipgate.Stdout, vipgate.Stderr = &output, &output
	f.must(vipgate.Start())
	t.Cleanup(func() {
		_ = vipgate.Process.Kill() // it may have ended
		_ = vipgate.Wait()
	})
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		if !strings.Contains(output.String(), "\n") {
			return fmt.Errorf("no address: %s", output.String())
		}
		return nil
	}))
	url, _, _ := strings.Cut(output.String(), "\n")
	if !strings.HasPrefix(url, "http://127.0.0.1:") {
		t.Fatalf("no address: %s", output.String())
	}
	page := chromium.Open(t, url)

	page.WaitFor(`document.querySelector("#verdict.good")`)
	shows := func(id, pattern string) {
		t.Helper()
		page.WaitFor(fmt.Sprintf(`/%s/.test(document.querySelector("#%s").innerText)`, pattern, id))
	}
	shows("vips", `20\.0\.0\.1\/32[^]*pod-1.*announced.*gateway-a4, gateway-b4`)
	page.Evaluate("window.kept = true")
	picture(t, page, "healthy")

	f.must(f.Targets[1].Unhealthy())
	page.WaitFor(`document.querySelector("#verdict.bad")`)
	shows("vips", `20\.0\.0\.2\/32[^]*withdrawn.*target-2.*connection refused`)
	// The order of the flip: the lb, then its frontend.
	shows("steps", `lb.*ready → not ready[^]*frontend.*announced → withdrawn`)
	picture(t, page, "broken")

	f.must(f.Pods[1].LB.Kill())
	shows("pods", `pod-2[^]*lb does not answer`)
	page.WaitFor(`document.querySelector("#targets tr.unknown")`)
	shows("lanes", "lb: ready.*but now it does not answer")
	picture(t, page, "killed")
	if page.Evaluate("window.kept") != "true" {
		t.Error("the page was loaded again")
	}

	f.must(vipgate.Process.Kill())
	page.WaitFor(`document.body.matches(".stale") && !document.querySelector("#lost").hidden`)
	shows("lost", "vipgate does not answer")
	picture(t, page, "lost")
}

// picture writes screenshots with -update. The one of a broken VIP is in the documents.
func picture(t *testing.T, page *chromium.Page, name string) {
	t.Helper()
	if !*updatePicture {
		return
	}
	page.Evaluate(`(w => { w.value = "60"; w.dispatchEvent(new Event("change")) })(document.querySelector("#window"))`)
	dir := os.Getenv("VIPGATE_TEST_PICTURES")
	if dir != "" {
		harness.Must(t, os.WriteFile(filepath.Join(dir, name+"-narrow.png"), page.Screenshot(420, 1500, "light"), 0o644))
	}
	for _, scheme := range []string{"dark", "light"} {
		png := page.Screenshot(1280, 1560, scheme)
		if dir != "" {
			harness.Must(t, os.WriteFile(filepath.Join(dir, name+"-"+scheme+".png"), png, 0o644))
		}
		if name == "broken" && scheme == "light" {
			harness.Must(t, os.WriteFile("../../docs/dashboard.png", bytes.Clone(png), 0o644))
		}
	}
}
