package kernel

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// formerRules adds the rules of n VIPs of a former frontend. It returns a function that counts
// them.
func formerRules(t *testing.T, ns *lab.NetNS, n, priority, protocol int) (count func() int) {
	t.Helper()
	ns.Shell(t, fmt.Sprintf(`for i in $(seq %d); do
		echo "rule add from 20.1.$((i/250)).$((i%%250)) lookup 4096 priority %d protocol %d"
	done | ip -batch -`, n, priority, protocol))
	return func() int { return strings.Count(ns.Shell(t, "ip rule"), "from 20.1.") }
}

func removeLeftovers(t *testing.T, ns *lab.NetNS, p *reconciler) (more bool) {
	t.Helper()
	must(t, ns.Do(func() (err error) {
		more, err = p.removeLeftovers()
		return err
	}))
	return more
}

// Leftovers are removed in batches, so that new VIPs do not wait for the whole removal; Cleanup
// removes them in one batch.
func TestLeftoversAreRemovedInBatches(t *testing.T) {
	ns := lab.NewNetNS(t)
	count := formerRules(t, ns, leftoverBatch+1, meridioPriority, 0)
	list := vip.NewSet(vips("20.0.0.1/32")...)
	p := passIn(t)
	look(t, ns, p, &list)
	if more := removeLeftovers(t, ns, p); !more || count() != 1 {
		t.Errorf("after the first batch: %d rules, more %v", count(), more)
	}
	if more := removeLeftovers(t, ns, p); more || count() != 0 {
		t.Errorf("after the second batch: %d rules, more %v", count(), more)
	}
	formerRules(t, ns, leftoverBatch+1, 200, protocol)
	must(t, ns.Do(func() error { return Cleanup(t.Context(), p.policy.Options) }))
	if count() != 0 {
		t.Errorf("after a cleanup: %d rules", count())
	}
}

// Rules of a former frontend are removed after the state of this one is installed. Rules that
// another process adds later stay until the VIPs change.
func TestLeftoversAreRemovedOnce(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "d0", lab.NewNetNS(t), "d1"))
	count := formerRules(t, ns, 1, meridioPriority, 0)
	list, other := vip.NewSet(vips("20.0.0.1/32")...), vip.NewSet(vips("20.0.0.2/32")...)
	p := passIn(t)
	ns.Shell(t, "ip -6 route add 2001:db8::/32 dev d0 table 4097") // IPv6 fails
	if x := look(t, ns, p, &list); x.err == nil || !x.vips.Equal(list) {
		t.Fatalf("with a foreign route for IPv6: %d VIPs, %v", len(x.vips), x.err)
	}
	if removeLeftovers(t, ns, p); count() != 1 {
		t.Error("removed while a family failed")
	}
	ns.Shell(t, "ip -6 route del 2001:db8::/32 dev d0 table 4097")
	look(t, ns, p, &list)
	if removeLeftovers(t, ns, p); count() != 0 {
		t.Error("not removed")
	}
	formerRules(t, ns, 1, meridioPriority, 0)
	look(t, ns, p, &list)
	if removeLeftovers(t, ns, p); count() != 1 {
		t.Error("removed again")
	}
	look(t, ns, p, &other)
	if removeLeftovers(t, ns, p); count() != 0 {
		t.Error("not removed with other VIPs")
	}
}

func TestManyMeridioRulesDoNotDelay(t *testing.T) {
	ns := lab.NewNetNS(t)
	count := formerRules(t, ns, 3*leftoverBatch, meridioPriority, 0)
	o := testOptions(t)
	o.checkInterval, o.Log = time.Hour, slog.New(slog.DiscardHandler)
	r := start(t, ns, o)
	list := vips("20.0.0.1/32")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	await.True(t, "removal of all", func() bool { return count() == 0 })
}

func TestMeridioRulesAreRemoved(t *testing.T) {
	ns := lab.NewNetNS(t)
	ns.Shell(t, `
		nft 'add table inet other; add chain inet other c { type filter hook output priority 0; }'
		nft 'add set inet other vip4 { type ipv4_addr; }'
		ip route add blackhole 10.9.0.0/16 table 4098
		ip -6 route add blackhole default table 4099
		ip rule add from 20.0.0.9 lookup 4096 priority 99
		ip rule add from 20.0.0.9 lookup 4096 priority 101
		ip rule add from 20.0.0.9 lookup 4098 priority 100
		ip rule add from 20.0.0.9 to 30.0.0.1 lookup 4096 priority 100
		ip rule add from 20.0.0.9 fwmark 5 lookup 4096 priority 100
		ip rule add from 20.0.0.9 iif lo lookup 4096 priority 100
		ip rule add not from 20.0.0.8 lookup 4096 priority 100
		ip rule add from 20.0.0.9 ipproto tcp lookup 4096 priority 100
		ip rule add to 20.0.0.9 lookup 4096 priority 100
		ip rule add from all lookup 4097 priority 101
		ip -6 rule add from 2000::9 lookup 4097 priority 100
		ip -6 rule add from 2000::9 blackhole priority 101`)
	before := state(t, ns)
	ns.Shell(t, `
		ip route add blackhole default table 4097 metric 32
		ip rule add from 20.0.0.1 lookup 4096 priority 100
		ip rule add from 20.0.0.1 lookup 4097 priority 101
		ip rule add from 20.0.7.0/24 lookup 4096 priority 100
		ip -6 rule add from 2000::1 lookup 4096 priority 100
		ip -6 rule add from 2000::1 lookup 4097 priority 101`)
	meridio := normalized(t, ns)
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	if got := ns.Shell(t, "ip rule; ip -6 rule"); strings.Count(got, "from 20.0.0.1 lookup")+strings.Count(got,
		"from 2000::1 lookup") != 4 {
		t.Errorf("removed before the frontend's rules were installed:\n%s\nbefore:\n%s", got, meridio)
	}
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	await.True(t, "removal of Meridio's rules", func() bool {
		rules := ns.Shell(t, "ip rule; ip -6 rule")
		return !strings.Contains(rules, "from 20.0.0.1 lookup") && !strings.Contains(rules, "from 20.0.7.0/24") &&
			!strings.Contains(rules, "from 2000::1 lookup")
	})
	r.stop()
	ns.Shell(t, "ip route del blackhole default table 4097 metric 32")
	must(t, ns.Do(func() error { return Cleanup(context.Background(), testOptions(t)) }))
	if after := state(t, ns); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func TestLeftoversOfOtherOptions(t *testing.T) {
	ns := lab.NewNetNS(t)
	before := state(t, ns)
	list := vips("20.0.0.1/32", "2000::1/128")
	o := testOptions(t)
	o.TableID, o.Priority, o.Mark, o.Mask = 5000, 200, 0x10, 0xf0
	r := start(t, ns, o)
	r.Configure(list)
	r.waitConfirmed(t, list...)
	r.stop()
	if s := state(t, ns); !strings.Contains(s, "200:\tfrom all fwmark 0x10/0xf0 lookup 5000") ||
		!strings.Contains(s, "blackhole default table 5001") {
		t.Errorf("options have no effect:\n%s", s)
	}
	r = start(t, ns, testOptions(t))
	r.Configure(list)
	r.waitConfirmed(t, list...)
	await.True(t, "removal of leftovers", func() bool {
		s := state(t, ns)
		return !strings.Contains(s, "0x10/0xf0") && !strings.Contains(s, "5001")
	})
	r.stop()
	must(t, ns.Do(func() error { return Cleanup(context.Background(), testOptions(t)) }))
	must(t, ns.Do(func() error { return Cleanup(context.Background(), testOptions(t)) }))
	if after := state(t, ns); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// Only the reversal of a change by another process counts as a repair. Installations and
// reconciliations after a failure or a change of the VIPs do not count.
func TestOnlyDriftIsARepair(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "d0", lab.NewNetNS(t), "d1"))
	list, other := vip.NewSet(vips("20.0.0.1/32")...), vip.NewSet(vips("20.0.0.2/32")...)
	const drift, fault = "ip rule del priority 100", "ip -6 route add 2001:db8::/32 dev d0 table 4097"
	p := passIn(t)
	for _, step := range []struct {
		name, before string
		wanted       *vip.Set
		repaired     bool
	}{
		{"the first pass", "true", nil, false},
		{"the first VIPs", "true", &list, false},
		{"nothing happened", "true", &list, false},
		{"drift", drift, &list, true},
		{"drift and other VIPs", drift, &other, false},
		{"a fault", fault, &other, false},
		{"drift beside the fault", drift, &other, false},
		{"drift, and the fault is over", drift + "; ip -6 route del 2001:db8::/32 dev d0 table 4097", &other, false},
		{"drift afterwards", drift, &other, true},
	} {
		ns.Shell(t, step.before)
		if x := look(t, ns, p, step.wanted); x.repaired != step.repaired {
			t.Errorf("%s: repaired %v, %v", step.name, x.repaired, x.err)
		}
	}
}
