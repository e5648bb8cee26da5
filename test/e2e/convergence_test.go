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

// converged waits until the kernel is as it was.
func (w *dataPlaneWorld) converged(want string) {
	w.t.Helper()
	w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
		if got := w.installed(); got != want {
			return fmt.Errorf("the kernel has\n%s\nwant\n%s", got, want)
		}
		return nil
	}))
}

// installed is the data plane in the kernel, also when its table is missing.
func (w *dataPlaneWorld) installed() string {
	if !strings.Contains(w.shell("nft list tables"), "vipgate-lb") {
		return "no table\n" + w.kernel()
	}
	return w.plane()
}

// notReady counts the events that say that a VIP is not ready.
func (w *dataPlaneWorld) notReady(vip string) int {
	w.t.Helper()
	out, err := w.lb("events", "--output=json")
	w.must(err)
	return len(regexp.MustCompile(`"object": *"`+regexp.QuoteMeta(vip)+`",\s*"what": *"not ready"`).FindAllString(out, -1))
}

// What another process removes is restored without a command and without a restart.
func TestDataPlaneConverges(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.start()
	number := numberOf(t, w.until("confirmed   everything that is wanted", "status"), "target-2")
	want := w.plane()
	for _, tt := range []struct{ name, hand, event string }{
		{"flush ruleset", "nft flush ruleset", "table inet vipgate-lb"},
		{"delete table", "nft delete table inet vipgate-lb", "table inet vipgate-lb"},
		{"rule of a target", "ip rule del fwmark " + number + "/0xffffff table " + number, "rule fwmark " + number},
		{"routes of a target", "ip route flush table " + number + "; ip -6 route flush table " + number, "table " + number + " (IPv6)"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w.shell(tt.hand)
			w.converged(want)
			w.until(tt.event, "events")
			w.must(w.WantVia(w.ctx, 1))
		})
	}
	if n := metric(t, (&world{t: t, Lab: w.Lab}).get(lab.LBMetrics, "/metrics"), "vipgate_lb_dataplane_repairs_total "); n < 4 {
		t.Errorf("the metric counts %v repairs", n)
	}
	g, err := w.Load(w.ctx, 50, 4, load.Config{})
	w.must(err)
	defer g.Stop(w.ctx)
	w.must(errors.Join(g.WaitFlows(w.ctx), g.WaitTargets(w.ctx, "target-1", "target-2")))
}

// The rules that only save time are no reason to withdraw anything.
func TestPolicyRuleRemovalWithdrawsNothing(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.start()
	w.until("confirmed   everything that is wanted", "status")
	want := w.plane()
	before := []int{w.notReady("20.0.0.1/32"), w.notReady("2000::1/128")}
	for _, hand := range []string{"ip rule del prio 92", "ip -6 rule del prio 92", "ip rule del prio 90; ip rule del prio 92"} {
		w.shell(hand)
		w.until("policy rules of priority 90 and 92", "events")
		w.converged(want)
	}
	if after := []int{w.notReady("20.0.0.1/32"), w.notReady("2000::1/128")}; fmt.Sprint(before) != fmt.Sprint(after) {
		t.Errorf("VIPs were not ready %v times, %v before", after, before)
	}
}

// Repairs back off while another process keeps deleting a rule, and that is an event.
func TestContestedRuleIsReported(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.start()
	number := numberOf(t, w.until("confirmed   everything that is wanted", "status"), "target-2")
	want := w.plane()
	w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
		w.shell("ip rule del fwmark " + number + "/0xffffff table " + number + " || true")
		out, err := w.lb("events")
		if err == nil && !strings.Contains(out, "contested") {
			err = errors.New("no event says that the rule is contested")
		}
		return err
	}))
	w.converged(want)
}

// While held, changes of another process stay, over a restart as well.
func TestHoldAndResume(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.start()
	number := numberOf(t, w.until("confirmed   everything that is wanted", "status"), "target-2")
	want := w.plane()
	rule := "rule fwmark " + number
	if out, err := w.lb("hold", "--stream=stream-b"); err == nil || !strings.Contains(out, "no stream stream-b") {
		t.Errorf("a hold of an unknown stream: %v\n%s", err, out)
	}
	out, err := w.lb("hold", "--stream=stream-a")
	if err != nil || !strings.Contains(out, "until lb resume") {
		t.Fatalf("hold: %v\n%s", err, out)
	}
	w.shell("ip rule del fwmark " + number + "/0xffffff table " + number)
	held := func() {
		t.Helper()
		w.until("DataPlaneHold", "status")
		w.until("STREAM stream-a HELD until `lb resume`", "status")
		w.until(rule, "status")
		if out, err := w.lb("reconcile"); err != nil || !strings.Contains(out, "nothing to repair") {
			t.Errorf("reconcile: %v\n%s", err, out)
		}
		w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
			page := (&world{t: t, Lab: w.Lab}).get(lab.LBMetrics, "/metrics")
			if drift, holds := metric(t, page, "vipgate_lb_dataplane_drift "), metric(t, page, "vipgate_lb_dataplane_held "); drift != 1 || holds != 1 {
				return fmt.Errorf("metrics: drift %v, held %v", drift, holds)
			}
			return nil
		}))
	}
	held()
	w.until("drift", "events")
	w.must(w.pod.LB.Kill())
	w.must(w.pod.StartLB("--dataplane=nftables"))
	held()
	if out, err := w.lb("resume"); err != nil || !strings.Contains(out, "repaired: "+rule) {
		t.Errorf("resume: %v\n%s", err, out)
	}
	w.converged(want)
	w.until("resumed", "events")
}

func TestHoldExpires(t *testing.T) {
	t.Parallel()
	w := newDataPlaneWorld(t)
	w.start()
	w.until("confirmed   everything that is wanted", "status")
	want := w.plane()
	if out, err := w.lb("hold", "--for=5s"); err != nil || !strings.Contains(out, "held until ") {
		t.Fatalf("hold: %v\n%s", err, out)
	}
	w.shell("ip rule del prio 92")
	w.until("policy rules of priority 90 and 92", "status")
	w.until("ALL STREAMS HELD for another", "status")
	w.converged(want)
	w.until("the hold expired", "events")
}

// What one family loses does not concern the other.
func TestFamilyLossLeavesTheOther(t *testing.T) {
	for _, tt := range []struct {
		name, hand, trench, why string
	}{
		{"link down and up", "printf 'link set int0 down\\nlink set int0 up\\n' | ip -batch -", "", "is on no connected network"},
		{"IPv6 off", "sysctl -w net.ipv6.conf.int0.disable_ipv6=1", "", "is on no connected network"},
		{"an address on no network", "", "fd00:99::1", "fd00:99::1): it is on no connected network"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := newDataPlaneWorld(t)
			w.start()
			w.until("confirmed   everything that is wanted", "status")
			before := w.notReady("20.0.0.1/32")
			if tt.trench != "" {
				trench := dataPlaneTrench(1)
				w.must(w.WriteTrench(strings.Replace(trench, lab.TargetAddrs(1)[1].String(), tt.trench, 1)))
			} else {
				w.shell(tt.hand)
			}
			ready := regexp.MustCompile(`(?m)^20\.0\.0\.1/32 +ready `)
			w.must(lab.Eventually(w.ctx, 10*time.Millisecond, func() error {
				out, err := w.lb("status")
				if err == nil && (!regexp.MustCompile(`(?m)^2000::1/128 +not ready.*`+regexp.QuoteMeta(tt.why)).MatchString(out) || !ready.MatchString(out)) {
					err = fmt.Errorf("IPv6 alone is to be not ready, since an address %s:\n%s", tt.why, out)
				}
				return err
			}))
			if after := w.notReady("20.0.0.1/32"); after != before {
				out, _ := w.lb("events")
				t.Errorf("IPv4 was not ready %d times\n%s", after-before, out)
			}
			w.VIPs = w.VIPs[:1]
			g, err := w.Load(w.ctx, 20, 2, load.Config{})
			w.must(err)
			defer g.Stop(w.ctx)
			w.must(g.WaitFlows(w.ctx))
		})
	}
}
