package kernel

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// waitProblem waits until the VIPs of exactly one family are not confirmed, for a reason.
func (r *running) waitProblem(t *testing.T, f vip.Family, reason string) {
	t.Helper()
	r.waitFor(t, reason, func(c Confirmed) bool {
		for v := range c.VIPs {
			if v.Family() == f {
				return false
			}
		}
		return len(c.VIPs) == 1 && c.Family[f] != nil && c.Family[1-f] == nil && strings.Contains(c.Family[f].Error(), reason)
	})
}

// The error names rules and routes of another process that divert packets from VIPs. Only the
// VIPs of their family lose their confirmation.
func TestDivertedPacketsAreReported(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	o := testOptions(t)
	o.External, o.checkInterval = func() string { return "ext" }, time.Hour
	r := start(t, x.pod, o)
	r.Configure(forwardedVIPs)
	r.waitConfirmed(t, forwardedVIPs...)
	for _, f := range vip.Families {
		family, target := [...]string{"-4", "-6"}[f], targetAddrs[f]
		for _, c := range []struct{ name, divert, restore, reason string }{
			{
				"rule", "rule add priority 95 iif int0 lookup main", "rule del priority 95",
				fmt.Sprintf("on int0 leave by table 254, not by the gateways: remove the rule %s 95: iif int0 lookup 254", f),
			},
			{
				"rule that drops", "rule add priority 95 iif int0 blackhole", "rule del priority 95",
				fmt.Sprintf("are dropped, although table 4096 has a default route: remove the rule %s 95: iif int0 blackhole", f),
			},
			{
				"route in the gateways' table", fmt.Sprintf("route add default via %s dev int0 table 4096 metric 1", target),
				"route del default table 4096 metric 1", fmt.Sprintf("remove the %s route to", f),
			},
			{"rule to an empty table", "rule add priority 95 iif int0 lookup 77", "", ""},
			{
				// The kernel sends a notification, but source routing ignores foreign tables.
				"route in another table", fmt.Sprintf("route add default via %s dev int0 table 77", target),
				"route del default table 77", fmt.Sprintf("leave by table 77, not by the gateways: remove the rule %s 95", f),
			},
			{"rule of another interface", "rule add priority 96 iif eth0 lookup main", "rule del priority 96", ""},
		} {
			x.pod.Shell(t, fmt.Sprintf("ip %s %s", family, c.divert))
			if c.reason != "" {
				r.waitProblem(t, f, c.reason)
				x.pod.Shell(t, fmt.Sprintf("ip %s %s", family, c.restore))
				r.waitConfirmed(t, forwardedVIPs...)
			}
		}
	}
}

// A problem that ends before it is confirmed withdraws nothing: BIRD and other processes replace
// routes in two steps.
func TestPathsBetweenTwoSteps(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	x.pod.Shell(t, "ip rule add priority 95 iif int0 lookup 77")
	must(t, x.pod.Do(func() error {
		o := testOptions(t).withDefaults()
		o.External = func() string { return "ext" }
		r := newReconciler(o)
		desired := vip.NewSet(forwardedVIPs...)
		r.reconcile(&desired)
		p := &r.paths
		defer func() { must(t, p.close()) }()
		if len(p.inputs[vip.IPv4]) != 1 || p.inputs[vip.IPv4][0].Name != "int0" {
			t.Errorf("interfaces %v", p.inputs)
		}
		want := func(problem, unconfirmed bool) {
			t.Helper()
			if err, pending := p.check(vip.IPv4); (err != nil) != problem || pending != unconfirmed {
				t.Errorf("%v, unconfirmed %t", err, pending)
			}
		}
		want(false, false)
		x.pod.Shell(t, "ip route add default via 172.16.0.1 dev int0 table 77")
		want(false, true)
		if p.look(vip.IPv4) {
			t.Error("the same problem is another one")
		}
		x.pod.Shell(t, "ip route del default table 77")
		want(false, false)
		x.pod.Shell(t, "ip route add default via 172.16.0.1 dev int0 table 77")
		want(false, true)
		p.since[vip.IPv4] = p.since[vip.IPv4].Add(-lookAgain)
		want(true, false)
		// A different problem does not reset the start time.
		since := p.since[vip.IPv4]
		x.pod.Shell(t, "ip route add default via 172.16.0.1 dev int0 table 78; "+
			"ip rule add priority 94 iif int0 lookup 78; ip rule del priority 95 iif int0 lookup 77")
		if want(true, false); p.since[vip.IPv4] != since {
			t.Error("another problem begins a new wait")
		}
		x.pod.Shell(t, "ip rule add priority 95 iif int0 lookup 77; ip rule del priority 94 iif int0 lookup 78; "+
			"ip route del default table 78; ip route del default table 77")

		// Packets that are dropped are a problem only if they should be forwarded.
		drops := func(f vip.Family, want bool) {
			t.Helper()
			if p.look(f); (p.found[f] != "") != want {
				t.Errorf("%s: %q", f, p.found[f])
			}
		}
		x.closeGateway(t)
		drops(vip.IPv4, false)
		drops(vip.IPv6, false)
		x.pod.Shell(t, "ip rule add priority 95 iif int0 blackhole; ip -6 rule add priority 95 iif int0 blackhole")
		drops(vip.IPv4, false)
		drops(vip.IPv6, false)
		x.openGateway(t)
		drops(vip.IPv4, true)
		drops(vip.IPv6, true)
		must(t, x.pod.Sysctl("net.ipv4.conf.int0.forwarding", "0"))
		drops(vip.IPv4, false)
		must(t, x.pod.Sysctl("net.ipv4.conf.int0.forwarding", "1"))
		drops(vip.IPv4, true)
		x.pod.Shell(t, "ip rule del priority 95 iif int0 blackhole")
		drops(vip.IPv4, false)
		must(t, x.pod.Sysctl("net.ipv4.conf.int0.rp_filter", "1")) // the route to VIPs is static here
		drops(vip.IPv4, false)
		p.configure(vip.NewSet(vip.Require("20.9.9.9/32"))) // no route leads back to it
		drops(vip.IPv4, false)
		p.configure(vip.NewSet(localVIPs...)) // the kernel drops their packets that come from outside
		must(t, x.pod.Sysctl("net.ipv4.conf.int0.rp_filter", "0"))
		drops(vip.IPv4, false)
		p.configure(desired)

		// The poll finds changes without a relevant notification. It starts after leftovers were
		// removed.
		x.pod.Shell(t, "ip route add default via 172.16.0.1 dev int0 table 77")
		r.judgesPaths = false
		if result := r.reconcile(&desired); r.pathsChanged() || result.err != nil || result.unconfirmed {
			t.Errorf("judged beside leftovers: %+v", result)
		}
		r.judgesPaths = true
		if !r.pathsChanged() || r.pathsChanged() {
			t.Error("the poll does not find the change, or finds it again")
		}
		p.since[vip.IPv4] = p.since[vip.IPv4].Add(-lookAgain)
		if result := r.reconcile(&desired); result.err == nil || result.family[vip.IPv6] != nil || len(result.vips) != 1 {
			t.Errorf("diverted: %+v", result)
		}

		// One interface is enough for a problem.
		x.pod.Shell(t, "ip link add int1 type veth peer name int2; ip addr add 172.31.0.1/24 dev int1; ip link set int1 up")
		must(t, p.findInputs())
		if list := p.inputs[vip.IPv4]; len(list) != 2 || list[0].Name != "int0" || list[1].Name != "int1" {
			t.Errorf("interfaces %v", list)
		}

		// The problem ends with the last VIP of its family.
		drops(vip.IPv4, true)
		p.configure(vip.NewSet(forwardedVIPs[1]))
		want(false, false)
		return nil
	}))
}

// The rules of an earlier frontend with other options divert packets, too, until they are
// removed.
func TestLeftoversDoNotCountAsDiversion(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	o := testOptions(t)
	o.External = func() string { return "ext" }
	former := o
	former.TableID, former.Priority = 5096, 80
	r := start(t, x.pod, former)
	r.Configure(forwardedVIPs)
	r.waitReady(t)
	r.stop()
	x.pod.Shell(t, `ip route add default via 169.254.100.1 dev ext table 5096 proto bird
		ip -6 route add default via fd64::1 dev ext table 5096 proto bird`)
	r = start(t, x.pod, o)
	r.Configure(forwardedVIPs)
	r.waitConfirmed(t, forwardedVIPs...)
	await.True(t, "the leftovers are removed", func() bool {
		return !strings.Contains(x.pod.Shell(t, "ip rule; ip -6 rule"), "5096")
	})
	r.waitConfirmed(t, forwardedVIPs...)
}
