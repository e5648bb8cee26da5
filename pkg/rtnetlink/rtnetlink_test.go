package rtnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nlmsg"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

// connect opens a connection in a new namespace with an interface ext.
func connect(t *testing.T) (*lab.NetNS, *Conn) {
	t.Helper()
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "ext", lab.NewNetNS(t), "peer"))
	ns.Shell(t, "ip address add 169.254.100.2/24 dev ext; ip -6 address add fd64::2/64 dev ext nodad")
	return ns, dialIn(t, ns)
}

func dialIn(t *testing.T, ns *lab.NetNS) (c *Conn) {
	t.Helper()
	must(t, ns.Do(func() (err error) {
		c, err = Dial()
		return err
	}))
	t.Cleanup(func() { must(t, c.Close()) })
	return c
}

func TestRules(t *testing.T) {
	ns, c := connect(t)
	for _, f := range vip.Families {
		source := netip.MustParsePrefix([]string{"20.0.0.1/32", "2000::1/128"}[f])
		want := []Rule{
			{Family: f, Priority: 100, Source: source, Action: unix.FR_ACT_TO_TBL, Table: 4096, Protocol: 118},
			{Family: f, Priority: 101, Mark: 0x10, Mask: 0xf0, Action: unix.FR_ACT_TO_TBL, Table: 70000, Protocol: 118},
			{Family: f, Priority: 102, Mask: 0xff, Action: unix.FR_ACT_GOTO, Goto: 103, Protocol: 118},
			{Family: f, Priority: 103, Action: unix.FR_ACT_NOP, Protocol: 118},
			{Family: f, Priority: 104, Mark: 1, Mask: 1, Action: unix.FR_ACT_BLACKHOLE, Protocol: 118},
			{Family: f, Priority: 105, LocalICMP: 3<<8 | 4, Action: unix.FR_ACT_TO_TBL, Table: 4096, Protocol: 118},
			{Family: f, Priority: 106, Input: "ext", Action: unix.FR_ACT_UNREACHABLE, Protocol: 118},
			{Family: f, Priority: 107, Input: "lo", Action: unix.FR_ACT_PROHIBIT, Protocol: 118},
		}
		for _, r := range slices.Backward(want) {
			must(t, c.Apply(r.Add()))
			must(t, c.Apply(r.Add())) // exists
		}
		// Selectors without a field in Rule, or supported only in combination.
		extra := []string{
			"not iif ext", "oif ext", "ipproto " + icmpNames[f], "iif lo ipproto " + icmpNames[f], "ipproto tcp",
			"dport 772", "iif lo ipproto tcp dport 772", "iif ext ipproto " + icmpNames[f] + " dport 772",
			"iif lo ipproto " + icmpNames[f] + " dport 772-773", "iif lo ipproto " + icmpNames[f] + " sport 772",
		}
		for i, selector := range extra {
			ns.Shell(t, fmt.Sprintf("ip -%d rule add %s lookup 5 priority %d protocol 118", 4+2*f, selector, 110+i))
		}
		list := func() []Rule {
			rules, err := c.Rules(f)
			must(t, err)
			return slices.DeleteFunc(rules, func(r Rule) bool { return r.Protocol != 118 })
		}
		got := list()
		for _, r := range want {
			passes := r.Action == unix.FR_ACT_TO_TBL || r.Action == unix.FR_ACT_GOTO || r.Action == unix.FR_ACT_NOP
			if r.Drops() == passes {
				t.Errorf("%s drops: %t", r, r.Drops())
			}
		}
		if len(got) != len(want)+len(extra) || !slices.Equal(got[:len(want)], want) {
			t.Errorf("got %v", got)
		}
		for i, r := range got[len(want):] {
			if !r.Extra {
				t.Errorf("%s: %v is not extra", extra[i], r)
			}
		}
		for _, r := range want {
			must(t, c.Apply(r.Delete()))
			must(t, c.Apply(r.Delete())) // does not exist
		}
		if got := list(); len(got) != len(extra) {
			t.Errorf("left: %v", got)
		}
	}
}

// A port mask, which newer kernels list, is part of the selector.
func TestRuleWithPortMask(t *testing.T) {
	want := Rule{Priority: 100, LocalICMP: 3<<8 | 4, Action: unix.FR_ACT_TO_TBL, Table: 4096, Protocol: 118}
	for mask, extra := range map[uint16]bool{1<<16 - 1: false, 0xff00: true} {
		q := want.Add()
		q.Bytes(fraDportMask, binary.NativeEndian.AppendUint16(nil, mask))
		got, err := ParseRule(q.Data[unix.SizeofNlMsghdr:])
		if err != nil || got.Extra != extra || got.LocalICMP != want.LocalICMP {
			t.Errorf("mask %#x: %v, %v", mask, got, err)
		}
	}
}

func TestRoutes(t *testing.T) {
	ns, c := connect(t)
	must(t, ns.Sysctl("net.ipv4.ip_forward", "1"))
	must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", "0"))
	must(t, ns.Sysctl("net.ipv4.conf.ext.rp_filter", "0"))
	for f, hop := range map[vip.Family]string{vip.IPv4: "::ffff:169.254.100.1", vip.IPv6: "fd64::1"} {
		r := Route{
			Family: f, Table: 70000, Prefix: DefaultPrefix(f), Type: unix.RTN_UNICAST, Protocol: 118, Metric: 5,
			NextHop: netip.MustParseAddr(hop),
		}
		hole := Route{Family: f, Table: 70000, Prefix: DefaultPrefix(f), Type: unix.RTN_BLACKHOLE, Protocol: 119, Metric: 9}
		if got, err := c.Routes(f, RouteFilter{Table: 70000}); err != nil || got != nil {
			t.Errorf("an absent table: %v, %v", got, err)
		}
		must(t, c.Apply(hole.Replace()))
		must(t, c.Apply(r.Replace()))
		must(t, c.Apply(r.Replace()))
		r.NextHop = r.NextHop.Unmap()
		for _, tt := range []struct {
			filter RouteFilter
			want   int
		}{
			{RouteFilter{Table: 70000}, 2},
			{RouteFilter{Protocol: 118}, 1},
			{RouteFilter{Table: 70000, Protocol: 119}, 1},
			{RouteFilter{Table: 70001}, 0},
		} {
			got, err := c.Routes(f, tt.filter)
			if err != nil || len(got) != tt.want {
				t.Errorf("%+v: %v, %v", tt.filter, got, err)
			}
			for _, g := range got {
				if g.Link = 0; g != r && (g.Type != unix.RTN_BLACKHOLE || !g.Drops() || g.Metric != 9) {
					t.Errorf("%+v: got %+v", tt.filter, g)
				}
			}
		}
		to := map[vip.Family]string{vip.IPv4: "192.0.2.1", vip.IPv6: "2001:db8::1"}[f]
		if got, err := c.Lookup(netip.MustParseAddr(to), 7); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("lookup without a rule: %v, %v", got, err)
		}
		must(t, c.Apply(Rule{Family: f, Priority: 10, Mark: 7, Mask: 7, Action: unix.FR_ACT_TO_TBL, Table: 70000}.Add()))
		if got, err := c.Lookup(netip.MustParseAddr(to), 7); err != nil || got.NextHop != r.NextHop || got.Table != 70000 {
			t.Errorf("lookup: %+v, %v", got, err)
		}
		// A rule for the input interface precedes, and the source address also selects a rule.
		from := netip.MustParseAddr([]string{"20.0.0.1", "2000::1"}[f])
		links, err := c.Links()
		must(t, err)
		ext := links[slices.IndexFunc(links, func(l Link) bool { return l.Name == "ext" })]
		forwarded := func(mark uint32) Route {
			got, err := c.LookupForwarded(from, netip.MustParseAddr(to), ext.Index, mark)
			if err != nil {
				t.Errorf("lookup of a forwarded packet: %v", err)
			}
			return got
		}
		if got := forwarded(7); got.Table != 70000 || got.Protocol != 118 || got.NextHop != r.NextHop {
			t.Errorf("forwarded with the mark: %+v", got)
		}
		other := r
		other.Table, other.Protocol = 70001, 120
		must(t, c.Apply(other.Replace()))
		for _, rule := range []Rule{
			{Family: f, Priority: 9, Input: "ext", Action: unix.FR_ACT_TO_TBL, Table: 70001},
			{Family: f, Priority: 9, Source: netip.PrefixFrom(from, from.BitLen()), Action: unix.FR_ACT_TO_TBL, Table: 70001},
		} {
			must(t, c.Apply(rule.Add()))
			if got := forwarded(7); got.Table != 70001 || got.Protocol != 120 {
				t.Errorf("%s: %+v", rule, got)
			}
			must(t, c.Apply(rule.Delete()))
		}
		must(t, c.Apply(Rule{Family: f, Priority: 9, Input: "ext", Action: unix.FR_ACT_BLACKHOLE}.Add()))
		if got, err := c.LookupForwarded(from, netip.MustParseAddr(to), ext.Index, 7); !errors.Is(err, unix.EINVAL) {
			t.Errorf("a packet that is dropped: %+v, %v", got, err)
		}
		must(t, c.Apply(other.Delete()))
		for range 2 {
			must(t, c.Apply(r.Delete()))
			must(t, c.Apply(hole.Delete()))
		}
	}
}

// The requests fill several batches, and each has a separate result.
func TestBatchErrors(t *testing.T) {
	_, c := connect(t)
	const n = 192
	requests := make([]Request, 0, n)
	for i := range n {
		r := Route{Table: uint32(1000 + i), Prefix: DefaultPrefix(vip.IPv4), Type: unix.RTN_BLACKHOLE, Protocol: 118}
		if i%10 == 3 {
			r.Type, r.NextHop = unix.RTN_UNICAST, netip.MustParseAddr("192.0.2.1")
		}
		requests = append(requests, r.Replace())
	}
	rejected, err := c.Do(requests...)
	must(t, err)
	for i, err := range rejected {
		var e *nlmsg.Error
		rejected := errors.Is(err, unix.ENETUNREACH) && errors.As(err, &e) && e.Message != ""
		if bad := i%10 == 3; bad != rejected || !bad && err != nil {
			t.Errorf("request %d: %v", i, err)
		}
	}
	routes, err := c.Routes(vip.IPv4, RouteFilter{Protocol: 118})
	if err != nil || len(routes) != n-19 {
		t.Errorf("%d routes, %v", len(routes), err)
	}
}

func TestLinksAndAddresses(t *testing.T) {
	ns, c := connect(t)
	ns.Shell(t, "ip address add 10.0.0.1 peer 10.0.0.2/30 dev ext; ip link set ext mtu 1400 address 02:00:00:00:00:07")
	links, err := c.Links()
	must(t, err)
	i := slices.IndexFunc(links, func(l Link) bool { return l.Name == "ext" })
	if i < 0 || links[i].MTU != 1400 || links[i].MAC.String() != "02:00:00:00:00:07" || !links[i].Up() {
		t.Fatalf("links %+v", links)
	}
	addrs, err := c.Addresses()
	must(t, err)
	for _, want := range []struct{ addr, network string }{
		{"169.254.100.2", "169.254.100.0/24"},
		{"fd64::2", "fd64::/64"},
		{"10.0.0.1", "10.0.0.0/30"},
		{"127.0.0.1", "127.0.0.0/8"},
	} {
		if !slices.ContainsFunc(addrs, func(a Address) bool {
			return a.Addr.String() == want.addr && a.Network.String() == want.network && !a.Tentative() && !a.Duplicate()
		}) {
			t.Errorf("no %+v in %+v", want, addrs)
		}
	}
}

func TestNeighbors(t *testing.T) {
	ns, c := connect(t)
	ns.Shell(t, "ip neigh add 169.254.100.9 dev ext nud failed; "+
		"ip neigh add fd64::9 lladdr 02:00:00:00:00:01 dev ext nud permanent")
	got, err := c.Neighbors(vip.IPv6)
	must(t, err)
	if !slices.ContainsFunc(got, func(n Neighbor) bool {
		return n.Addr.String() == "fd64::9" && n.State == unix.NUD_PERMANENT && n.MAC.String() == "02:00:00:00:00:01"
	}) {
		t.Errorf("got %+v", got)
	}
	if got, err = c.Neighbors(vip.IPv4); err != nil || len(got) != 1 || got[0].State != unix.NUD_FAILED {
		t.Fatalf("got %+v, %v", got, err)
	}
	absent := got[0]
	absent.Addr = netip.MustParseAddr("169.254.100.8")
	rejected, err := c.Do(got[0].Probe(0), absent.Probe(0))
	if err != nil || rejected[0] != nil || !errors.Is(rejected[1], unix.ENOENT) {
		t.Errorf("got %v, %v", rejected, err)
	}
	const unresolved = unix.NUD_INCOMPLETE | unix.NUD_FAILED
	if got, err = c.Neighbors(vip.IPv4); err != nil || len(got) != 1 || got[0].State&unresolved == 0 {
		t.Errorf("got %+v, %v", got, err)
	}
	must(t, c.Apply(absent.Probe(unix.NLM_F_CREATE)))
	must(t, c.Apply(absent.Probe(unix.NLM_F_CREATE)))
	if got, err = c.Neighbors(vip.IPv4); err != nil || len(got) != 2 || got[1].State&unresolved == 0 {
		t.Errorf("got %+v, %v", got, err)
	}
}

// Only changes through other connections count.
func TestForeignRuleChanges(t *testing.T) {
	ns, c := connect(t)
	other := dialIn(t, ns)
	rule := func(priority uint32) Rule {
		return Rule{Family: vip.IPv6, Priority: priority, Action: unix.FR_ACT_TO_TBL, Table: 9, Protocol: 118}
	}
	changes := func() uint64 {
		n, err := c.ForeignRuleChanges()
		must(t, err)
		return n
	}
	before := changes()
	must(t, c.Apply(rule(100).Add()))
	if after := changes(); after != before {
		t.Errorf("%d instead of %d after a change by the same connection", after, before)
	}
	must(t, other.Apply(rule(101).Add()))
	if _, err := c.Rules(vip.IPv6); err != nil { // discards the notification
		t.Error(err)
	}
	added := changes()
	must(t, other.Apply(rule(101).Delete()))
	if deleted := changes(); added == before || deleted == added || changes() != deleted {
		t.Errorf("%d, after an addition %d, after a deletion %d", before, added, deleted)
	}
}

// Every successful dump contains the permanent rules while earlier rules are deleted concurrently.
func TestRuleDumpUnderChange(t *testing.T) {
	ns, c := connect(t)
	other := dialIn(t, ns)
	const n = 1500 // several datagrams
	rule := func(i int) Rule {
		return Rule{Family: vip.IPv4, Priority: uint32(1000 + i), Action: unix.FR_ACT_TO_TBL, Table: 9, Protocol: 118}
	}
	requests := make([]Request, 0, n)
	for i := range n {
		requests = append(requests, rule(i).Add())
	}
	_, err := c.Do(requests...)
	must(t, err)
	done := make(chan error)
	var stop atomic.Bool
	go func() {
		var err error
		for i := 0; !stop.Load() && err == nil; i = (i + 1) % 100 {
			err = errors.Join(other.Apply(rule(i).Delete()), other.Apply(rule(i).Add()))
			if i == 99 {
				time.Sleep(5 * time.Millisecond) // some dumps succeed
			}
		}
		done <- err
	}()
	for complete := 0; complete < 20; {
		rules, err := c.Rules(vip.IPv4)
		if errors.Is(err, ErrInterrupted) {
			continue
		}
		must(t, err)
		complete++
		kept := 0
		for _, r := range rules {
			if r.Protocol == 118 && r.Priority >= 1100 {
				kept++
			}
		}
		if kept != n-100 {
			t.Errorf("%d rules of %d", kept, n-100)
		}
	}
	stop.Store(true)
	must(t, <-done)
}

func TestListener(t *testing.T) {
	ns, c := connect(t)
	l := NewListener()
	seen, overrun := make(chan netlink.Message, 100), make(chan struct{}, 100)
	must(t, ns.Do(func() error {
		return l.Listen("routes", Subscription{
			Protocol: unix.NETLINK_ROUTE, Groups: []uint32{unix.RTNLGRP_IPV4_ROUTE},
			Handle: func(m netlink.Message) { seen <- m }, Overrun: func() { overrun <- struct{}{} },
		})
	}))
	r := Route{Family: vip.IPv4, Table: 77, Prefix: DefaultPrefix(vip.IPv4), Type: unix.RTN_BLACKHOLE, Protocol: 118}
	must(t, c.Apply(r.Replace()))
	m := <-seen
	if got, err := ParseRoute(m.Data); err != nil || got != r || m.Header.PID != c.Port() {
		t.Errorf("got %+v from port %d, %v", got, m.Header.PID, err)
	}
	// The reader is blocked, so the kernel's queue overflows.
	for range 100 {
		requests := make([]Request, 0, 200)
		for range 100 {
			requests = append(requests, r.Delete(), r.Replace())
		}
		_, err := c.Do(requests...)
		must(t, err)
	}
	timeout := time.After(time.Minute)
	for over := false; !over; {
		select {
		case <-seen:
		case <-overrun:
			over = true
		case <-timeout:
			t.Fatal("no overrun was reported")
		}
	}
	go func() {
		for range seen {
		}
	}()
	must(t, l.Close())
	<-l.Failed()
	if l.Err() == nil {
		t.Error("no failure")
	}
	close(seen)
}

// Every listed route can be deleted, including IPv6 routes that drop packets, which the kernel
// lists with the loopback interface.
func TestListedRoutesAreDeleted(t *testing.T) {
	_, c := connect(t)
	for _, f := range vip.Families {
		for _, kind := range []uint8{unix.RTN_BLACKHOLE, unix.RTN_UNREACHABLE, unix.RTN_PROHIBIT} {
			must(t, c.Apply(Route{Family: f, Table: 70000, Prefix: DefaultPrefix(f), Type: kind, Protocol: 118}.Replace()))
			listed, err := c.Routes(f, RouteFilter{Table: 70000})
			if err != nil || len(listed) != 1 || !listed[0].Drops() {
				t.Fatalf("%s type %d: %+v, %v", f, kind, listed, err)
			}
			must(t, c.Apply(listed[0].Delete()))
			if left, err := c.Routes(f, RouteFilter{Table: 70000}); err != nil || len(left) != 0 {
				t.Errorf("%s type %d: left %+v, %v", f, kind, left, err)
			}
		}
	}
}

// Routes over an interface without carrier are dead: the kernel ignores them, or will.
func TestRoutesWithoutCarrierAreDead(t *testing.T) {
	ns, peer := lab.NewNetNS(t, lab.WithoutDAD), lab.NewNetNS(t, lab.WithoutDAD)
	must(t, lab.Veth(ns, "ext", peer, "peer"))
	ns.Shell(t, "ip address add 169.254.100.2/24 dev ext; ip -6 address add fd64::2/64 dev ext nodad")
	c := dialIn(t, ns)
	for f, hop := range map[vip.Family]string{vip.IPv4: "169.254.100.1", vip.IPv6: "fd64::1"} {
		must(t, c.Apply(Route{
			Family: f, Table: 70000, Prefix: DefaultPrefix(f), Type: unix.RTN_UNICAST, NextHop: netip.MustParseAddr(hop),
		}.Replace()))
	}
	for _, link := range []string{"up", "down"} {
		peer.Shell(t, "ip link set peer "+link)
		for _, f := range vip.Families {
			await.True(t, fmt.Sprintf("the %s route is dead: %t", f, link == "down"), func() bool {
				routes, err := c.Routes(f, RouteFilter{Table: 70000})
				return err == nil && len(routes) == 1 && routes[0].Dead == (link == "down")
			})
		}
	}
}

func TestTentativeAddress(t *testing.T) {
	for flags, want := range map[uint32]bool{
		0: false, unix.IFA_F_TENTATIVE: true, unix.IFA_F_TENTATIVE | unix.IFA_F_DADFAILED: true,
		unix.IFA_F_TENTATIVE | unix.IFA_F_OPTIMISTIC: false, unix.IFA_F_OPTIMISTIC: false,
	} {
		a := Address{Flags: flags}
		if a.Tentative() != want || a.Duplicate() != (flags&unix.IFA_F_DADFAILED != 0) {
			t.Errorf("flags %#x: tentative %t, duplicate %t", flags, a.Tentative(), a.Duplicate())
		}
	}
}
