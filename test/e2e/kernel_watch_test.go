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
func (f *fixture) podShell(line string) string {
	f.t.Helper()
	out, err := f.Pod.Run(f.t.Context(), "sh", "-c", line)
	f.must(err)
	return out
}

// waitStatus waits until the status of the frontend matches, and returns the submatches of the
// first group.
func (f *fixture) waitStatus(pattern string) string {
	f.t.Helper()
	var found []string
	f.waitFor(func() error {
		// The exit status is 1 while a VIP is withdrawn.
		out, err := f.pod.Run(f.t.Context(), "frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
		if found = regexp.MustCompile(pattern).FindStringSubmatch(out); found == nil {
			return fmt.Errorf("the status does not match %q (%v):\n%s", pattern, err, out)
		}
		return nil
	})
	return found[len(found)-1]
}

// A sysctl that makes the kernel drop packets of a family, set at run time, withdraws that
// family's VIPs; the status names the command that resets it, and that command restores the VIPs.
func TestFrontendWatchesSysctls(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	for _, tt := range []struct{ flip, lost, kept string }{
		{"sysctl -w net.ipv4.ip_forward=0", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf." + lab.External + ".forwarding=0", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf." + lab.External + ".rp_filter=1", vipA4, vipA6},
		{"sysctl -w net.ipv4.conf.all.rp_filter=1", vipA4, vipA6},
		{"sysctl -w net.ipv6.conf.all.forwarding=0", vipA6, vipA4},
	} {
		mark := f.mark()
		f.podShell(tt.flip)
		f.wantRoutes(tt.kept)
		remedy := f.waitStatus(`run (sysctl -w .*=\d)`)
		if key := regexp.MustCompile(`=.*`).ReplaceAllString(strings.Fields(tt.flip)[2], ""); !strings.Contains(remedy,
			"rp_filter") && !strings.Contains(remedy, key) {
			t.Errorf("%s: the status names %q", tt.flip, remedy)
		}
		f.podShell(remedy)
		f.wantRoutes(vipA4, vipA6)
		f.wantNoUpdates(mark, tt.kept)
		f.podShell("sysctl -w net.ipv4.conf.all.rp_filter=0 net.ipv4.conf." + lab.External + ".rp_filter=0")
	}
}

// Like TestFrontendWatchesSysctls for the lb, including interfaces that are created again.
func TestLBWatchesSysctls(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.must(f.pod.StartFrontend("--flap-backoff=off"))
	f.must(f.WantVia(f.ctx, 1))
	via := func(vip netip.Addr, want ...int) {
		t.Helper()
		f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
			got, err := f.Via(vip)
			if err == nil && !slices.Equal(got, want) {
				err = fmt.Errorf("%s leads to the pods %v, want %v", vip, got, want)
			}
			return err
		}))
	}
	// The reason of the VIP has the remedy until its targets fail, too; the problem keeps it.
	remedy := regexp.MustCompile(`sysctl -w \S*=\d`)
	for _, tt := range []struct {
		flip   string
		family int
	}{
		{"sysctl -w net.ipv4.ip_forward=0", 0},
		{"sysctl -w net.ipv4.conf." + lab.Internal + ".forwarding=0", 0},
		{"sysctl -w net.ipv4.conf." + lab.Internal + ".rp_filter=1", 0},
		{"sysctl -w net.ipv4.fwmark_reflect=1", 0},
		{"sysctl -w net.ipv4.conf.default.rp_filter=1; ip link add again0 type veth peer name again1; sysctl -w " +
			"net.ipv4.conf.again1.rp_filter=0; ip link set again1 up; ip link set again0 up", 0},
		{"sysctl -w net.ipv6.conf.all.forwarding=0", 1},
		{"sysctl -w net.ipv6.fwmark_reflect=1", 1},
	} {
		f.shell(tt.flip)
		via(f.VIPs[tt.family])
		via(f.VIPs[1-tt.family], 1)
		f.shell(remedy.FindString(f.waitOutput("sysctl -w ", "status")))
		f.must(f.WantVia(f.ctx, 1))
	}
	// The start applies the same rule: the remaining family is forwarded.
	f.shell("sysctl -w net.ipv6.conf.all.forwarding=0")
	via(f.VIPs[1])
	f.must(f.pod.LB.Kill())
	f.must(f.pod.StartLB("--dataplane=nftables"))
	f.waitOutput("sysctl -w net.ipv6.conf.all.forwarding=1", "status")
	f.waitOutput("confirmed   desired state", "status")
	via(f.VIPs[0], 1)
	via(f.VIPs[1])
	f.shell("sysctl -w net.ipv6.conf.all.forwarding=1")
	f.must(f.WantVia(f.ctx, 1))
	// A setting that loses no packet is only a problem.
	f.shell("sysctl -w net.ipv4.fib_multipath_hash_policy=0")
	f.waitOutput("sysctl -w net.ipv4.fib_multipath_hash_policy=1", "status")
	f.shell("ip link set " + lab.Internal + " mtu 1400")
	f.waitOutput("its MTU is 1400, that of "+lab.External+" toward the gateways 1500", "status")
	f.must(f.WantVia(f.ctx, 1))
}

// Rules and routes of other agents divert answers from VIPs away from the gateways: the family is
// not advertised, and status names the rule or route, until it is removed.
func TestDivertedAnswersWithdraw(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.up(f.target1)
	// The pod's own default route.
	f.podShell(fmt.Sprintf("ip route add default via %s; ip -6 route add default via %s", lab.Target2v4, lab.Target2v6))
	f.startPod("--flap-backoff=off")
	f.wantRoutes(vipA4, vipA6)
	for family, c := range []struct{ vip, kept, name, option, via string }{
		{vipA4, vipA6, "ipv4", "-4", lab.Target1v4.String()}, {vipA6, vipA4, "ipv6", "-6", lab.Target1v6.String()},
	} {
		for _, d := range []struct{ divert, restore, names string }{
			{
				"rule add priority 95 iif " + lab.Internal + " lookup main", "rule del priority 95",
				"remove the rule " + c.name + " 95: iif " + lab.Internal + " lookup 254",
			},
			{
				"route add default via " + c.via + " dev " + lab.Internal + " table 4096 metric 1",
				"route del default table 4096 metric 1", "via " + c.via + " metric 1 table 4096",
			},
		} {
			mark := f.mark()
			f.podShell("ip " + c.option + " " + d.divert)
			f.wantRoutes(c.kept)
			f.waitFrontend("SourceRouting/"+c.name, false, d.names)
			f.waitFrontend("SourceRouting/"+[]string{"ipv6", "ipv4"}[family], true)
			f.wantNoUpdates(mark, c.kept)
			f.podShell("ip " + c.option + " " + d.restore)
			f.wantRoutes(vipA4, vipA6)
			f.waitFrontend("SourceRouting/"+c.name, true)
		}
	}
}

// gatewayDefaults adds or removes the default routes of the gateway.
func (f *fixture) gatewayDefaults(command string) {
	f.t.Helper()
	birdc := filepath.Join(filepath.Dir(lab.BIRD()), "birdc")
	for _, protocol := range []string{"routes4", "routes6"} {
		if out, err := exec.CommandContext(f.t.Context(), birdc, "-s", f.gateway.Socket(), command,
			protocol).CombinedOutput(); err != nil {
			f.t.Fatalf("%s %s: %v\n%s", command, protocol, err, out)
		}
	}
}

// routeBack waits until the routes from a VIP to a client exist, or are gone.
func (f *fixture) routeBack(want bool) {
	f.t.Helper()
	f.waitFor(func() error {
		for _, table := range []string{"-4", "-6"} {
			out, err := f.Pod.Run(f.t.Context(), "ip", table, "route", "show", "table", "4096", "default")
			if err != nil && want || strings.Contains(out, "default") != want {
				return fmt.Errorf("ip %s route show table 4096 default: %q, %v", table, out, err)
			}
		}
		return nil
	})
}

// Routes that another process removes are restored immediately, not at BIRD's next scan; while no
// gateway provides a route, condition and status report it.
func TestRouteBackIsWatched(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1)
	f.routeBack(true)
	mark := f.mark()
	const scanTime, flushes = 10 * time.Second, 5
	began := time.Now()
	for range flushes {
		f.podShell("ip -4 route flush table 4096; ip -6 route flush table 4096")
		f.routeBack(true)
	}
	// BIRD's scans alone restore the routes once per scan time.
	if took := time.Since(began); took >= (flushes-1)*scanTime {
		t.Errorf("%d restorations took %v: BIRD's scans restored the routes", flushes, took)
	}
	f.gatewayDefaults("disable")
	f.routeBack(false)
	for _, family := range []string{"ipv4", "ipv6"} {
		f.waitStatus(family + " VIPs attract traffic, and no route leads back to clients")
	}
	f.gatewayDefaults("enable")
	f.routeBack(true)
	f.waitFor(func() error {
		out, err := f.pod.Run(t.Context(), "frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
		if strings.Contains(out, "no route leads back") {
			return fmt.Errorf("the status still warns (%v)", err)
		}
		return nil
	})
	f.wantNoUpdates(mark, vipA4, vipA6)
}

// With --require-route the VIPs of a family without a route back are withdrawn.
func TestRequireRoute(t *testing.T) {
	t.Parallel()
	f := newServing(t, 1, "--require-route")
	f.gatewayDefaults("disable")
	f.wantRoutes()
	f.waitStatus("no gateway gives a route back to clients")
	f.gatewayDefaults("enable")
	f.wantRoutes(vipA4, vipA6)
}
