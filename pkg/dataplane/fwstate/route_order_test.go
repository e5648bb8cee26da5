package fwstate

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// targetTable is a target's rule and routing table in one family, from notifications.
type targetTable struct {
	rule, blackhole bool
	hops            []netip.Addr
}

// routeMonitor tracks the rules and routes of targets in the order of the kernel's notifications.
type routeMonitor struct {
	mu     sync.Mutex
	tables map[RouteKey]*targetTable
	// leaks lists the tables with a rule from which packets could fall through to a later table.
	leaks []RouteKey
	// late lists the routes deleted after their replacement was added.
	late []rtnetlink.Route
}

func newRouteMonitor(t *testing.T, ns *lab.NetNS) *routeMonitor {
	t.Helper()
	m := &routeMonitor{tables: map[RouteKey]*targetTable{}}
	l := rtnetlink.NewListener()
	must(t, ns.Do(func() error {
		return l.Listen("rules and routes", rtnetlink.Subscription{
			Protocol: unix.NETLINK_ROUTE,
			Groups: []uint32{
				unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
			},
			Handle:  m.handle,
			Overrun: func() { t.Error("notifications were lost") },
		})
	}))
	t.Cleanup(func() { must(t, l.Close()) })
	return m
}

func (m *routeMonitor) handle(msg netlink.Message) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch kind := uint16(msg.Header.Type); kind {
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		family := vip.IPv4
		if msg.Data[0] == unix.AF_INET6 {
			family = vip.IPv6
		}
		key := RouteKey{nlmsg.Attributes(msg.Data[unix.SizeofRtMsg:]).Get(unix.FRA_TABLE).Uint32(), family}
		m.table(key).rule = kind == unix.RTM_NEWRULE
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		r, err := rtnetlink.ParseRoute(msg.Data)
		if err != nil || !r.IsDefault() {
			return
		}
		x := m.table(RouteKey{r.Table, r.Family})
		switch {
		case isBlackhole(r):
			x.blackhole = kind == unix.RTM_NEWROUTE
		case kind == unix.RTM_NEWROUTE:
			x.hops = []netip.Addr{r.NextHop}
		case len(x.hops) > 0 && x.hops[0] != r.NextHop:
			m.late = append(m.late, r)
		default:
			x.hops = nil
		}
	}
	for key, x := range m.tables {
		if x.rule && !x.blackhole {
			m.leaks = append(m.leaks, key)
		}
	}
}

func (m *routeMonitor) table(key RouteKey) *targetTable {
	if m.tables[key] == nil {
		m.tables[key] = &targetTable{}
	}
	return m.tables[key]
}

// wait waits until the tables of a fwmark have a rule and the next hops, or are removed.
func (m *routeMonitor) wait(t *testing.T, what string, fwmark uint32, hops ...netip.Addr) {
	t.Helper()
	await.True(t, what, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		for _, family := range vip.Families {
			x := m.table(RouteKey{fwmark, family})
			if x.rule != (hops != nil) || x.blackhole != x.rule || x.rule && (len(x.hops) != 1 || x.hops[0] != hops[family]) {
				return false
			}
		}
		return true
	})
	if m.mu.Lock(); len(m.leaks) > 0 {
		t.Errorf("%s: a rule led to a table without a blackhole: %v", what, m.leaks)
	}
	m.leaks = nil
	m.mu.Unlock()
}

// A packet of a target always matches its route or the blackhole. Otherwise it would use the main
// table.
func TestBlackholeOutlivesRule(t *testing.T) {
	t.Parallel()
	pod := lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", lab.NewNetNS(t), "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	f, m := openConn(t, pod, Config{}), newRouteMonitor(t, pod)
	slot := exampleSlots("web", 5000)[0]
	first := []netip.Addr{netip.MustParseAddr("172.16.0.10"), netip.MustParseAddr("fd16::10")}
	moved := []netip.Addr{netip.MustParseAddr("172.16.0.11"), netip.MustParseAddr("fd16::11")}
	add := func(what string, hops []netip.Addr) {
		copy(slot.NextHops[:], hops)
		must(t, f.AddRoutes([]plan.KernelTarget{slot}, false).Err())
		m.wait(t, what, slot.FWMark, hops...)
	}
	add("a new target", first)
	add("another next hop", moved)
	must(t, f.RemoveRoutes([]uint32{slot.FWMark}))
	m.wait(t, "removal", slot.FWMark)
}

// Routes of another process in a target's table are ignored and preserved. A route of an earlier
// data plane is removed before the correct one is added.
func TestRoutesBesideTargetRoutes(t *testing.T) {
	t.Parallel()
	pod := lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", lab.NewNetNS(t), "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	for everything, network := range map[string]string{"0.0.0.0/0": "172.16.0.", "::/0": "fd16::"} {
		must(t, pod.Batch(
			"route add default via "+network+"7 table 5000 proto 99 metric 7",
			fmt.Sprintf("route add blackhole %s table 5000 proto 99 metric %d", everything, uint32(lastMetric-1)),
			"route add default via "+network+"9 table 5000 proto 179 metric 9",
		))
	}
	f, m := openConn(t, pod, Config{}), newRouteMonitor(t, pod)
	slot := exampleSlots("web", 5000)[0]
	copy(slot.NextHops[:], []netip.Addr{netip.MustParseAddr("172.16.0.10"), netip.MustParseAddr("fd16::10")})
	must(t, f.AddRoutes([]plan.KernelTarget{slot}, false).Err())
	m.wait(t, "routes", slot.FWMark, slot.NextHops[:]...)
	has := func(what string, want ...uint32) {
		t.Helper()
		routes, err := f.routes(rtnetlink.RouteFilter{Table: slot.FWMark})
		must(t, err)
		var metrics [len(vip.Families)][]uint32
		for _, r := range routes {
			metrics[r.Family] = append(metrics[r.Family], r.Metric)
		}
		for _, family := range vip.Families {
			expected := slices.Clone(want)
			if i := slices.Index(expected, 1024); i >= 0 && family == vip.IPv4 {
				expected[i] = 0 // metric of the default route
			}
			slices.Sort(expected)
			if slices.Sort(metrics[family]); !slices.Equal(metrics[family], expected) {
				t.Errorf("%s: %s routes with metrics %v, want %v", what, family, metrics[family], expected)
			}
		}
	}
	has("added", 7, 1024, lastMetric-1, lastMetric)
	if m.mu.Lock(); len(m.late) > 0 {
		t.Errorf("the right route was added before these were deleted: %v", m.late)
	}
	m.mu.Unlock()
	must(t, f.RemoveRoutes([]uint32{slot.FWMark}))
	m.wait(t, "removal", slot.FWMark)
	has("removed", 7, lastMetric-1)
}
