package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

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
		remedy := w.waitStatus(`run (sysctl -w \S+)`)
		if key := regexp.MustCompile(`=.*`).ReplaceAllString(strings.Fields(tt.flip)[2], ""); !strings.Contains(remedy, "rp_filter") && !strings.Contains(remedy, key) {
			t.Errorf("%s: the status names %q", tt.flip, remedy)
		}
		w.podShell(remedy)
		w.wantRoutes(vipA4, vipA6)
		w.wantNothing(mark, tt.kept)
		w.podShell("sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf." + lab.External + ".rp_filter=0")
	}
}
