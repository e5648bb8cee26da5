package fwstate

import (
	"net/netip"
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

// targetTable is what the kernel has notified of a target's rule and routing table, in one family.
type targetTable struct {
	rule, blackhole bool
	hops            []netip.Addr
}

// routeMonitor follows the rules and routes of targets in the order of the kernel's notifications.
type routeMonitor struct {
	mu     sync.Mutex
	tables map[RouteKey]*targetTable
	// leaks are the tables with a rule from which packets could leave by another table.
	leaks []RouteKey
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
		if isBlackhole(r) {
			x.blackhole = kind == unix.RTM_NEWROUTE
		} else if x.hops = nil; kind == unix.RTM_NEWROUTE {
			x.hops = append(x.hops, r.NextHop)
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

// wait waits until the tables of a fwmark have a rule and lead to the next hops, or are gone.
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

// At no moment a packet of a target finds neither its route nor the blackhole: it would leave by the
// main table.
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
