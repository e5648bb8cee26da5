package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// converged waits until the kernel state equals want.
func (f *dataPlaneFixture) converged(want string) {
	f.t.Helper()
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		if got := f.installed(); got != want {
			return fmt.Errorf("the kernel has\n%s\nwant\n%s", got, want)
		}
		return nil
	}))
}

// installed returns the data plane's kernel state, also when its table is missing.
func (f *dataPlaneFixture) installed() string {
	if !strings.Contains(f.shell("nft list tables"), "inet vipgate-lb") {
		return "no table\n" + f.kernel()
	}
	return f.plane()
}

// notReady counts the "not ready" events of a VIP.
func (f *dataPlaneFixture) notReady(vip string) int {
	f.t.Helper()
	out, err := f.lb("events", "--output=json")
	f.must(err)
	event := `"object": *"` + regexp.QuoteMeta(vip) + `",\s*"from": *"[^"]*",\s*"to": *"not ready"`
	return len(regexp.MustCompile(event).FindAllString(out, -1))
}

// An object that another process removes is restored without a command or a restart.
func TestDataPlaneConverges(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	number := numberOf(t, f.waitOutput("confirmed   desired state", "status"), "target-2")
	want := f.plane()
	for _, tt := range []struct{ name, hand, event string }{
		{"flush ruleset", "nft flush ruleset", "table inet vipgate-lb"},
		{"delete table", "nft delete table inet vipgate-lb", "table inet vipgate-lb"},
		{"rule of a target", "ip rule del fwmark " + number + "/0xffffff table " + number, "rule fwmark " + number},
		// One command per family: a change after an unconfirmed repair is a retry, not drift.
		{"IPv4 routes of a target", "ip route flush table " + number, "table " + number + " (IPv4)"},
		{"IPv6 routes of a target", "ip -6 route flush table " + number, "table " + number + " (IPv6)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.shell(tt.hand)
			f.converged(want)
			f.waitOutput(tt.event, "events")
			f.must(f.WantVia(f.ctx, 1))
		})
	}
	if n := metric(t, (&fixture{t: t, Lab: f.Lab}).get(lab.LBMetrics, "/metrics"),
		"vipgate_lb_dataplane_repairs_total "); n < 4 {
		t.Errorf("the metric counts %v repairs", n)
	}
	g, err := f.Load(f.ctx, 50, 4, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
}

// The policy rules are an optimization; their removal does not withdraw a VIP.
func TestPolicyRuleRemovalWithdrawsNothing(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	f.waitOutput("confirmed   desired state", "status")
	want := f.plane()
	before := []int{f.notReady("20.0.0.1/32"), f.notReady("2000::1/128")}
	for _, hand := range []string{
		"ip rule del prio 92", "ip -6 rule del prio 92",
		"ip rule del prio 90; ip rule del prio 92",
	} {
		f.shell(hand)
		f.waitOutput("policy rules of priority 90 and 92", "events")
		f.converged(want)
	}
	if after := []int{f.notReady("20.0.0.1/32"), f.notReady("2000::1/128")}; fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("VIPs were not ready %v times, %v before", after, before)
	}
}

// Repairs back off while another process keeps deleting a rule, and an event reports it.
func TestContestedRuleIsReported(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	number := numberOf(t, f.waitOutput("confirmed   desired state", "status"), "target-2")
	want := f.plane()
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		f.shell("ip rule del fwmark " + number + "/0xffffff table " + number + " || true")
		out, err := f.lb("events")
		if err == nil && !strings.Contains(out, "contested") {
			err = errors.New("no event says that the rule is contested")
		}
		return err
	}))
	f.converged(want)
}

// While the data plane is held, changes of another process are kept, also across a restart.
func TestHoldAndResume(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.checkOwnAddresses() // without its rule, a target would fail, and its change would write the rule
	f.start()
	number := numberOf(t, f.waitOutput("confirmed   desired state", "status"), "target-2")
	want := f.plane()
	rule := "rule fwmark " + number
	if out, err := f.lb("hold", "--stream=stream-b"); err == nil || !strings.Contains(out, "no stream stream-b") {
		t.Errorf("a hold of an unknown stream: %v\n%s", err, out)
	}
	out, err := f.lb("hold", "--stream=stream-a")
	if err != nil || !strings.Contains(out, "until lb resume") {
		t.Fatalf("hold: %v\n%s", err, out)
	}
	f.shell("ip rule del fwmark " + number + "/0xffffff table " + number)
	held := func() {
		t.Helper()
		f.waitOutput("DataPlaneHold", "status")
		f.waitOutput("STREAM stream-a HELD until `lb resume`", "status")
		f.waitOutput(rule, "status")
		if out, err := f.lb("reconcile"); err != nil || !strings.Contains(out, "nothing to repair") {
			t.Errorf("reconcile: %v\n%s", err, out)
		}
		f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
			page := (&fixture{t: t, Lab: f.Lab}).get(lab.LBMetrics, "/metrics")
			if drift, holds := metric(t, page, "vipgate_lb_dataplane_drift "), metric(t, page,
				"vipgate_lb_dataplane_held "); drift != 1 || holds != 1 {
				return fmt.Errorf("metrics: drift %v, held %v", drift, holds)
			}
			return nil
		}))
	}
	held()
	f.waitOutput("drift", "events")
	f.must(f.pod.LB.Kill())
	f.must(f.pod.StartLB("--dataplane=nftables"))
	held()
	if out, err := f.lb("resume"); err != nil || !strings.Contains(out, "repaired: "+rule) {
		t.Errorf("resume: %v\n%s", err, out)
	}
	f.converged(want)
	f.waitOutput("resumed", "events")
}

func TestHoldExpires(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixture(t)
	f.start()
	f.waitOutput("confirmed   desired state", "status")
	want := f.plane()
	if out, err := f.lb("hold", "--for=5s"); err != nil || !strings.Contains(out, "held until ") {
		t.Fatalf("hold: %v\n%s", err, out)
	}
	f.shell("ip rule del prio 92")
	f.waitOutput("policy rules of priority 90 and 92", "status")
	f.waitOutput("ALL STREAMS HELD for another", "status")
	f.converged(want)
	f.waitOutput("the hold expired", "events")
}

// The loss of one family does not affect the other.
func TestFamilyLossLeavesTheOther(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, hand, trench, why string
	}{
		{
			"link down and up", "printf 'link set int0 down\\nlink set int0 up\\n' | ip -batch -", "",
			"is on no connected network",
		},
		{"IPv6 off", "sysctl -w net.ipv6.conf.int0.disable_ipv6=1", "", "is on no connected network"},
		{"an address on no network", "", "fd00:99::1", "fd00:99::1): it is on no connected network"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := newDataPlaneFixture(t)
			// The kernel can take a second to send through a link that came up (linkwatch).
			tolerant := func(trench string) string { return strings.Replace(trench, "fall: 10", "fall: 100", 1) }
			f.must(f.WriteTrench(tolerant(dataPlaneTrench(1, 2))))
			f.start()
			f.waitOutput("confirmed   desired state", "status")
			before := f.notReady("20.0.0.1/32")
			if tt.trench != "" {
				trench := tolerant(dataPlaneTrench(1))
				f.must(f.WriteTrench(strings.Replace(trench, lab.TargetAddrs(1)[1].String(), tt.trench, 1)))
			} else {
				f.shell(tt.hand)
			}
			ready := regexp.MustCompile(`(?m)^20\.0\.0\.1/32 +ready `)
			f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
				out, err := f.lb("status")
				if err == nil && (!regexp.MustCompile(`(?m)^2000::1/128 +not ready.*`+regexp.QuoteMeta(tt.why)).MatchString(out) ||
					!ready.MatchString(out)) {
					err = fmt.Errorf("IPv6 alone is to be not ready, since an address %s:\n%s", tt.why, out)
				}
				return err
			}))
			if after := f.notReady("20.0.0.1/32"); after != before {
				out, _ := f.lb("events")
				t.Errorf("IPv4 was not ready %d times\n%s", after-before, out)
			}
			f.VIPs = f.VIPs[:1]
			g, err := f.Load(f.ctx, 20, 2, load.Config{})
			f.must(err)
			defer g.Stop(f.ctx)
			f.must(g.WaitFlows(f.ctx))
		})
	}
}
