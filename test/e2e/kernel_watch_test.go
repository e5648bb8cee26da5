package e2e

import (
	"fmt"
	"net/netip"
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

// waitStatus waits until the status of the frontend matches, and returns what the first group matched.
func (w *world) waitStatus(pattern string) string {
	w.t.Helper()
	var found []string
	w.waitFor(func() error {
		// The exit status is 1 while a VIP is withdrawn.
		out, err := w.pod.Run(w.t.Context(), "frontend", "status", "--admin-socket=unix://"+w.pod.FrontendAdmin())
		if found = regexp.MustCompile(pattern).FindStringSubmatch(out); found == nil {
			return fmt.Errorf("the status does not match %q (%w):\n%s", pattern, err, out)
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
