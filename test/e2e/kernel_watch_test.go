package e2e

import (
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// podShell runs a command line in the pod.
func (w *world) podShell(line string) string {
	w.t.Helper()
	out, err := w.Pod.Run(w.t.Context(), "sh", "-c", line)
	w.must(err)
	return out
}

// waitStatus waits until the status of the frontend matches, and returns what the first group
// matched.
func (w *world) waitStatus(pattern string) string {
	w.t.Helper()
	var found []string
	w.waitFor(func() error {
		// The exit status is 1 while a VIP is withdrawn.
		out, err := w.pod.Run(w.t.Context(), "frontend", "status", "--admin-socket=unix://"+w.pod.FrontendAdmin())
		if found = regexp.MustCompile(pattern).FindStringSubmatch(out); found == nil {
			return fmt.Errorf("the status does not match %q (%v):\n%s", pattern, err, out)
		}
		return nil
	})
	return found[len(found)-1]
}

// Issue 10, item 1: a sysctl that makes the kernel drop packets of a family, set at run time, withdraws that family's
// VIPs; the status names the command that sets it back, and that command brings the VIPs back.
func TestFrontendWatchesSysctls(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.startPod()
	w.wantRoutes(vipA4, vipA6)
	for _, tt := range []struct{ flip, lost, kept string }{
		{"sysctl -w net.ipv4.ip_forward=0", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf." + lab.External + ".forwarding=0", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf." + lab.External + ".rp_filter=1", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf.all.rp_filter=1", vipA4, vipA6},
		{"sysctl -w net.ipv6.conf.all.forwarding=0", vipA6, vipA4},
	} {
		mark := w.mark()
		w.podShell(tt.flip)
		w.wantRoutes(tt.kept)
		remedy := w.waitStatus(`run (sysctl -w .*=\d)`)
		if key := regexp.MustCompile(`=.*`).ReplaceAllString(strings.Fields(tt.flip)[2], ""); !strings.Contains(remedy, "rp_filter") && !strings.Contains(remedy, key) {
			t.Errorf("%s: the status names %q", tt.flip, remedy)
		}
		w.podShell(remedy)
		w.wantRoutes(vipA4, vipA6)
		w.wantNothing(mark, tt.kept)
		w.podShell("sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf." + lab.External + ".rp_filter=0")
	}
}

// Issue 10, item 1, for the lb: interfaces that are created again count, too.
func TestLBWatchesSysctls(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.must(w.pod.StartLB("--dataplane=nftables"))
	w.must(w.pod.StartFrontend("--flap-backoff=off"))
	w.must(w.WantVia(w.ctx, 1))
	via := func(vip netip.Addr, want ...int) {
		t.Helper()
		w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
			got, err := w.Via(w.ctx, vip)
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("%s leads to the pods %v, want %v", vip, got, want)
			}
			return err
		}))
	}
	remedy := regexp.MustCompile(`run (sysctl -w .*=\d)`)
	for _, tt := range []struct {
		flip   string
		family int
	}{
		{"sysctl -w net.ipv4.ip_forward=0", 0},
		{"sysctl -w net.ipv4.conf." + lab.Internal + ".forwarding=0", 0},
		{"sysctl -w net.ipv4.conf." + lab.Internal + ".rp_filter=1", 0},
		{"sysctl -w net.ipv4.fwmark_reflect=1", 0},
		{"sysctl -w net.ipv4.conf.default.rp_filter=1; ip link add again0 type veth peer name again1; sysctl -w net.ipv4.conf.again1.rp_filter=0; ip link set again1 up; ip link set again0 up", 0},
		{"sysctl -w net.ipv6.conf.all.forwarding=0", 1},
		{"sysctl -w net.ipv6.fwmark_reflect=1", 1},
	} {
		w.shell(tt.flip)
		via(w.VIPs[tt.family])
		via(w.VIPs[1-tt.family], 1)
		status := w.until("run sysctl -w ", "status")
		w.shell(remedy.FindStringSubmatch(status)[1])
		w.must(w.WantVia(w.ctx, 1))
	}
	// What loses no packet is a problem and no more.
	w.shell("sysctl -w net.ipv4.fib_multipath_hash_policy=0")
	w.until("sysctl -w net.ipv4.fib_multipath_hash_policy=1", "status")
	w.must(w.WantVia(w.ctx, 1))
}

// gatewayDefaults switches the default routes of the gateway on or off.
func (w *world) gatewayDefaults(command string) {
	w.t.Helper()
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	for _, protocol := range []string{"default4", "default6"} {
		if out, err := exec.CommandContext(w.t.Context(), birdc, "-s", w.gateway.Socket(), command, protocol).CombinedOutput(); err != nil {
			w.t.Fatalf("%s %s: %v\n%s", command, protocol, err, out)
		}
	}
}

// routeBack waits until the routes from a VIP to a client exist, or do not.
func (w *world) routeBack(want bool) {
	w.t.Helper()
	w.waitFor(func() error {
		for _, table := range []string{"-4", "-6"} {
			out, err := w.Pod.Run(w.t.Context(), "ip", table, "route", "show", "table", "4096", "default")
			if err != nil && want || strings.Contains(out, "default") != want {
				return fmt.Errorf("ip %s route show table 4096 default: %q, %v", table, out, err)
			}
		}
		return nil
	})
}

// Issue 10, item 7: routes that another process removes are back at once, not at BIRD's next scan; while no gateway
// gives a route, condition and status say so.
func TestRouteBackIsWatched(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--bird-kernel-scan-time=1h"))
	w.wantRoutes(vipA4, vipA6)
	w.routeBack(true)
	mark := w.mark()
	for range 2 {
		w.podShell("ip -4 route flush table 4096; ip -6 route flush table 4096")
		w.routeBack(true)
	}
	w.gatewayDefaults("disable")
	w.routeBack(false)
	for _, f := range []string{"ipv4", "ipv6"} {
		w.waitStatus(f + " VIPs attract traffic, and no route leads back to clients")
	}
	w.gatewayDefaults("enable")
	w.routeBack(true)
	w.waitFor(func() error {
		out, err := w.pod.Run(t.Context(), "frontend", "status", "--admin-socket=unix://"+w.pod.FrontendAdmin())
		if strings.Contains(out, "no route leads back") {
			return fmt.Errorf("the status still warns (%v)", err)
		}
		return nil
	})
	w.wantNothing(mark, vipA4, vipA6)
}

// With --require-route the VIPs of a family without a route back are withdrawn.
func TestRequireRoute(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--require-route"))
	w.wantRoutes(vipA4, vipA6)
	w.gatewayDefaults("disable")
	w.wantRoutes()
	w.waitStatus("no gateway gives a route back to clients")
	w.gatewayDefaults("enable")
	w.wantRoutes(vipA4, vipA6)
}
