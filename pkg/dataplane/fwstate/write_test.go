package fwstate

import (
	"errors"
	"fmt"
	"maps"
	gonet "net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// mustHave reads a stream and compares it with want.
func mustHave(t *testing.T, f *Conn, want plan.KernelStream) *plan.KernelStream {
	t.Helper()
	got, err := f.ReadStream(want.Name)
	must(t, err)
	want.Owned, want.ChainIntact = true, true
	if !reflect.DeepEqual(got, &want) {
		t.Fatalf("stream %s is not as it was written: chain %v, size %d, seed %d, %d and %d entries", want.Name,
			got.ChainIntact, got.Size, got.Seed, len(got.Tables[0]), len(got.Tables[1]))
	}
	return got
}

func TestOnlyDifferencesAreWritten(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	must(t, writeBase(f, exampleChange()))
	now, err := f.ReadStream("web")
	must(t, err)
	want := exampleChange().Streams[0].Desired
	want.Tables[vip.IPv6] = filled(101, 5000, 5001, 5002)
	want.Tables[vip.IPv6][50] = 5000 // was 5002
	want.Tables[vip.IPv6][51] = 0    // none
	want.ChainIntact = true
	before, done := f.nft.Messages, f.Transactions()
	must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: want, Observed: now}}}))
	// One message deletes two elements, one adds one of them again.
	if n := f.nft.Messages - before; n != 2 {
		t.Errorf("%d messages for two entries", n)
	}
	if n := f.Transactions() - done; n != 1 {
		t.Errorf("%d transactions", n)
	}
	written := plan.StreamWrite{Desired: want, Observed: now}
	if read, err := f.ReadTables(written); err != nil || !reflect.DeepEqual(read, mustHave(t, f, want)) {
		t.Errorf("the tables alone are %+v, %v", read, err)
	}
	// The maps are read only if the kernel's echo lacks a change.
	ns.Shell(t, "nft delete element inet vipgate-lb maglev6/web { 7 }")
	if read, err := f.ReadTables(written); err != nil || read.Tables[vip.IPv6][7] == 0 {
		t.Errorf("with all changes reported the tables are %+v, %v", read, err)
	}
	f.reported["maglev6/web"] = f.reported["maglev6/web"][2:]
	if read, err := f.ReadTables(written); err != nil || read.Tables[vip.IPv6][7] != 0 || read.Tables[vip.IPv6][51] != 0 {
		t.Errorf("without a report the tables are %+v, %v", read, err)
	}
	if got := differences(now.Tables[vip.IPv6], want.Tables[vip.IPv6]); !reflect.DeepEqual(got,
		[]entry{{50, 5000, true}, {51, 0, true}}) {
		t.Errorf("the entries that differ are %v", got)
	}
	ns.Shell(t, "nft flush chain inet vipgate-lb stream/web; nft delete map inet vipgate-lb maglev6/web")
	if read, err := f.ReadTables(written); err != nil || read.Tables[vip.IPv6] != nil || read.ChainIntact {
		t.Errorf("without a map the stream is %+v, %v", read, err)
	}
}

// Another process that changes its own table again and again does not prevent a complete read.
func TestReadDuringForeignTransactions(t *testing.T) {
	ns := lab.NewNetNS(t)
	f, writer := openConn(t, ns, Config{}), openConn(t, ns, Config{})
	change := exampleChange()
	desired := &change.Streams[0].Desired
	desired.Size = 65537
	for _, family := range vip.Families {
		desired.Tables[family] = filled(desired.Size, 5000, 5001, 5002)
	}
	must(t, writeBase(f, change))
	end, done := make(chan struct{}), make(chan error)
	go func() {
		for round := 0; ; round++ {
			// More reads than Read makes of the rules, and fewer than of the elements.
			for range 1000 {
				if _, err := writer.Generation(); err != nil {
					done <- err
					return
				}
			}
			transaction := nft.Transaction{Table: nft.Table{Family: unix.NFPROTO_IPV4, Name: "other"}}
			if transaction.AddTable(); round%2 == 1 {
				transaction.DeleteTable()
			}
			if err := writer.nft.Commit(&transaction, nil); err != nil {
				done <- err
				return
			}
			select {
			case <-end:
				done <- nil
				return
			default:
			}
		}
	}()
	stream, err := f.ReadStream("web")
	must(t, err)
	written := plan.StreamWrite{Desired: *desired, Observed: stream}
	written.Desired.Seed++ // the kernel did not report this change
	_, err = f.ReadTables(written)
	must(t, err)
	targets, err := f.ReadTargets([]uint32{5000, 5001, 5002})
	must(t, err)
	if base, _, problem, err := f.ReadBase(); !base || err != nil || len(targets) != 3 {
		t.Errorf("%q, %v, targets %v", problem, err, targets)
	}
	for range 3 {
		state, err := f.Read(nil)
		if err != nil || !state.Base || len(state.VIPs) == 0 || !slices.Equal(state.Streams["web"].Tables[vip.IPv4],
			desired.Tables[vip.IPv4]) {
			t.Errorf("%+v, %v", state, err)
			break
		}
	}
	close(end)
	must(t, <-done)
}

// A neighbor that failed on one link is reachable if packets reach it on another.
func TestNeighborOfTwoLinks(t *testing.T) {
	for state, failed := range map[string]bool{
		"reachable": false, "delay": false, "probe": false, "permanent": false, "stale": true, "failed": true,
	} {
		t.Run(state, func(t *testing.T) {
			ns := lab.NewNetNS(t)
			ns.Shell(t, "ip link add int0 type veth peer int1; ip link set int0 up; ip link set int1 up; "+
				"ip neigh add 172.16.0.9 dev int0 nud failed; "+
				"ip neigh add 172.16.0.9 dev int1 lladdr 02:00:00:00:00:09 nud "+state)
			network, err := openConn(t, ns, Config{}).ReadNetwork()
			must(t, err)
			if _, got := network.FailedNeighbors[netip.MustParseAddr("172.16.0.9")]; got != failed {
				t.Errorf("failed: %t, want %t", got, failed)
			}
		})
	}
}

// A change of any number of VIPs and targets fits the send buffer of a pod in a user namespace.
func TestLargeChangeInSmallBuffer(t *testing.T) {
	for _, mode := range []Conntrack{ConntrackOn, ConntrackOff} {
		t.Run(mode.String(), func(t *testing.T) {
			f := openConn(t, lab.NewNetNS(t), Config{Conntrack: mode})
			f.nft.SendLimit = 212_992
			change := exampleChange()
			other := change.Streams[0]
			other.Desired.Name = strings.Repeat("x", 60)
			change.Streams = append(change.Streams, other)
			var fwmarks []uint32
			for n := range uint32(800) {
				fwmarks = append(fwmarks, DefaultFirst+n)
			}
			change.Targets = exampleSlots("web", fwmarks...)
			for n := range 3000 {
				address := netip.AddrFrom4([4]byte{30, byte(n >> 8), byte(n)})
				change.VIPs[vip.Require(address.String()+[]string{"/32", "/24"}[min(1, n%3)])] = "web"
			}
			must(t, writeBase(f, change))
			for _, stream := range []string{"web", other.Desired.Name, ""} {
				for v := range change.VIPs {
					change.VIPs[v] = stream
				}
				must(t, f.Write(plan.Change{VIPs: change.VIPs}))
				want := change.VIPs
				if stream == "" {
					want = nil
				}
				if got, err := f.ReadVIPs(); err != nil || !maps.Equal(got, want) {
					t.Errorf("%q has %d VIPs of %d, %v", stream, len(got), len(want), err)
				}
			}
			if got, err := f.ReadTargets(fwmarks); err != nil || len(got) != len(fwmarks) {
				t.Errorf("%d targets of %d, %v", len(got), len(fwmarks), err)
			}
		})
	}
}

// The live map has no fixed size, so it does not limit the targets of a stream.
func TestManyTargetsInAStream(t *testing.T) {
	f := openConn(t, lab.NewNetNS(t), Config{})
	var fwmarks []uint32
	for n := range uint32(2100) {
		fwmarks = append(fwmarks, DefaultFirst+n)
	}
	must(t, writeBase(f, plan.Change{Base: true, Targets: exampleSlots("web", fwmarks...)}))
	got, err := f.nft.Set(inet, plan.LiveMap(vip.IPv4, "web"))
	must(t, err)
	if live, err := f.nft.readLive(vip.IPv4, "web"); err != nil || len(live) != len(fwmarks) || got.Size != 0 {
		t.Errorf("%d of %d targets live, %v; the size is %d", len(live), len(fwmarks), err, got.Size)
	}
}

func TestTableParametersChange(t *testing.T) {
	f := openConn(t, lab.NewNetNS(t), Config{})
	must(t, writeBase(f, exampleChange()))
	for _, step := range []struct {
		name       string
		size, seed uint32
		families   []vip.Family
		match      []plan.Port
	}{
		{"larger", 1009, 7, vip.Families[:], exampleMatch},
		{"another seed", 1009, 8, vip.Families[:], exampleMatch},
		{"IPv4 only, and all ports", 1009, 8, vip.Families[:1], nil},
		{"both again, larger than a transaction, and some ports", 10007, 8, vip.Families[:], exampleMatch},
		{"larger than a transaction, from one that is", 20011, 8, vip.Families[:], exampleMatch[1:]},
		{"the same with all ports", 30011, 8, vip.Families[:], nil},
		{"small", 101, 9, vip.Families[:], nil},
		{"with other ports", 101, 9, vip.Families[:], exampleMatch[:2]},
		{"with one port", 101, 9, vip.Families[:], exampleMatch[2:]},
	} {
		t.Run(step.name, func(t *testing.T) {
			now, err := f.ReadStream("web")
			must(t, err)
			want := plan.KernelStream{Name: "web", Size: step.size, Seed: step.seed, Match: step.match}
			for _, family := range step.families {
				want.Tables[family] = filled(step.size, 5000, 5002)
			}
			must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: want, Observed: now}}}))
			mustHave(t, f, want)
			slots, err := f.ReadTargets([]uint32{5000, 5001, 5002})
			must(t, err)
			for _, s := range slots {
				if s.Flows != [len(vip.Families)]bool{true, true} {
					t.Errorf("flows of %d no longer live: %v", s.FWMark, s.Flows)
				}
			}
			r, err := f.readRuleset(true)
			must(t, err)
			sets := r.Sets
			for name := range sets {
				if strings.HasPrefix(name, "spare") {
					t.Errorf("map %s is left", name)
				}
			}
		})
	}
}

// A write restores a stream from any observed state: an interrupted start may have left any part
// of it.
func TestPartialTransactionIsRepaired(t *testing.T) {
	for name, commands := range map[string]string{
		"maps without a chain": "nft flush chain inet vipgate-lb stream/web; nft delete element inet vipgate-lb vip4 " +
			"{ 20.0.0.1 }; nft delete element inet vipgate-lb vip6 { 2000::1 }; nft delete element inet vipgate-lb net4 { " +
			"20.0.1.0/24, 20.0.2.0/24 }; nft delete element inet vipgate-lb net6 { 2000:1::/64 }; nft delete chain inet " +
			"vipgate-lb stream/web",
		"an empty chain": "nft flush chain inet vipgate-lb stream/web",
		"a rule less": "nft delete rule inet vipgate-lb stream/web handle $(nft -a list chain inet " +
			"vipgate-lb stream/web | sed -n 's/.*no target.*handle //p')",
		"a chain without maps": "nft flush chain inet vipgate-lb stream/web; nft delete map inet vipgate-lb " +
			"maglev4/web; nft delete map inet vipgate-lb live6/web",
		"a map that is half full": "nft flush chain inet vipgate-lb stream/web; nft flush map inet vipgate-lb " +
			"maglev6/web; nft add element inet vipgate-lb maglev6/web { 5 : 5001 }",
		"a map of another size": "nft flush chain inet vipgate-lb stream/web; nft delete map inet vipgate-lb " +
			"maglev4/web; nft 'add map inet vipgate-lb maglev4/web { type mark : mark; size 7; }'",
		"dormant table":         "nft add table inet vipgate-lb '{ flags dormant; }'",
		"no elements in ported": "nft flush set inet vipgate-lb ported",
		"base rules in another order": "nft flush chain inet vipgate-lb prerouting; " +
			"nft add rule inet vipgate-lb prerouting ip daddr vmap @vip4",
		"no rules of checks": "nft flush chain inet vipgate-lb checks",
		"a rule of checks less": "nft delete rule inet vipgate-lb checks handle $(nft -a list chain inet " +
			"vipgate-lb checks | sed -n 's/.*checks-udp.*handle //p')",
		"no set of ports": "nft flush chain inet vipgate-lb stream/web; nft delete set inet vipgate-lb match/web",
		"a rule about ports less": "nft delete rule inet vipgate-lb stream/web handle $(nft -a list chain inet " +
			"vipgate-lb stream/web | sed -n 's/.*ports that do not match.*handle //p')",
		"a port less":     "nft delete element inet vipgate-lb match/web '{ tcp . 443 }'",
		"other ports":     "nft add element inet vipgate-lb match/web '{ tcp . 22, gre . 0 }'",
		"no ports":        "nft flush set inet vipgate-lb match/web",
		"no table at all": "nft delete table inet vipgate-lb",
		"no goto":         "ip rule del prio 90; ip -6 rule del prio 92",
	} {
		t.Run(name, func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openConn(t, ns, Config{})
			must(t, writeBase(f, exampleChange()))
			ns.Shell(t, commands)
			got := readAll(t, f)
			if s := got.Streams["web"]; got.Base && got.Checks && s != nil && s.ChainIntact && len(got.VIPs) == 5 &&
				plan.SameMatch(s.Match, exampleMatch) {
				t.Fatal("nothing seems wrong")
			}
			again := exampleChange()
			again.Streams[0].Observed = got.Streams["web"]
			must(t, writeBase(f, again))
			mustHave(t, f, again.Streams[0].Desired)
			got = readAll(t, f)
			if !got.Base || !got.Checks || !reflect.DeepEqual(got.VIPs, again.VIPs) {
				t.Errorf("base %v, VIPs %v", got.Base, got.VIPs)
			}
			for _, s := range again.Targets {
				if g := got.Targets[s.FWMark]; g == nil || !g.ChainIntact || g.Flows != s.Flows {
					t.Errorf("target %d is %+v", s.FWMark, g)
				}
			}
		})
	}
}

func TestForeignObjectsStay(t *testing.T) {
	for mode := range Conntrack(len(conntrackNames)) {
		ns := lab.NewNetNS(t)
		f := openConn(t, ns, Config{Conntrack: mode})
		must(t, writeBase(f, exampleChange()))
		ns.Shell(t, `nft 'add table inet other; add chain inet other prerouting { type filter hook prerouting priority 0; }
			add chain inet vipgate-lb theirs; add rule inet vipgate-lb theirs counter
			add set inet vipgate-lb theirset { type ipv4_addr; }; add element inet vipgate-lb theirset { 1.2.3.4 }
			add counter inet vipgate-lb theircounter
			add rule inet vipgate-lb prerouting counter
			insert rule inet vipgate-lb stream/web counter comment "debugging"
			add element inet vipgate-lb vip4 { 9.9.9.9 : goto theirs }'
			ip rule add prio 95 fwmark 7 lookup 77; ip route add blackhole default table 77
			ip route add blackhole 1.1.1.1/32 table 5000`)
		c := readAll(t, f)
		if !c.Base || !c.Streams["web"].ChainIntact || len(c.VIPs) != 5 {
			t.Errorf("foreign rules disturb: base %v, chain %v, VIPs %v", c.Base, c.Streams["web"].ChainIntact, c.VIPs)
		}
		// Change the whole data plane, then remove it.
		want := plan.KernelStream{Name: "web", Size: 103, Seed: 9, Tables: bothFamilies(filled(103, 5000))}
		must(t, f.Write(plan.Change{Streams: []plan.StreamWrite{{Desired: want, Observed: c.Streams["web"]}}}))
		must(t, f.RemoveRoutes([]uint32{5000, 5001, 5002}))
		gone := exampleChange().VIPs
		for v := range gone {
			gone[v] = ""
		}
		for range 2 { // deleting an absent object succeeds
			must(t, f.Write(plan.Change{VIPs: gone, RemoveStreams: []string{"web"}, RemoveTargets: []uint32{5000, 5001, 5002}}))
			must(t, f.RemoveAll())
		}
		out := ns.Shell(t, "nft list ruleset; ip rule; ip route show table 77; ip route show table 5000")
		for _, theirs := range []string{
			"table inet other", "chain theirs", "set theirset", "counter theircounter",
			"9.9.9.9 : goto theirs", "fwmark 0x7 lookup 77", "blackhole default", "blackhole 1.1.1.1", "chain prerouting " +
				"{\n\t\ttype filter hook prerouting priority mangle; policy accept;\n\t\tcounter packets",
		} {
			if !strings.Contains(out, theirs) {
				t.Errorf("conntrack %s: %q is gone:\n%s", mode, theirs, out)
			}
		}
		for _, ours := range []string{
			"vipgate:", "live4", "flows4", "ported", "match/", "goto 92", "nop", "stream/", "own4", "ct timeout",
		} {
			if strings.Contains(out, ours) {
				t.Errorf("conntrack %s: %q is left:\n%s", mode, ours, out)
			}
		}
		ns.Shell(t, "nft delete table inet vipgate-lb; ip rule del prio 95")
	}
}

func TestConntrackModeChange(t *testing.T) {
	ns := lab.NewNetNS(t)
	for _, mode := range []Conntrack{ConntrackOn, ConntrackLoose, ConntrackOff, ConntrackLoose, ConntrackOn} {
		f := openConn(t, ns, Config{Conntrack: mode})
		c := exampleChange()
		c.Streams[0].Observed = readAll(t, f).Streams["web"]
		must(t, writeBase(f, c))
		got := readAll(t, f)
		if !got.Base || !got.Streams["web"].ChainIntact || !got.Targets[5000].ChainIntact || len(got.VIPs) != 5 {
			t.Errorf("conntrack %s: base %v, chain %v, target %+v, VIPs %v", mode, got.Base, got.Streams["web"].ChainIntact,
				got.Targets[5000], got.VIPs)
		}
		out := ns.Shell(t, "nft list ruleset")
		untracked := strings.Contains(out, "notrack comment") || strings.Contains(out, "notrack accept")
		if untracked != (mode != ConntrackOn) || strings.Contains(out, ": new flows") != (mode == ConntrackLoose) {
			t.Errorf("conntrack %s:\n%s", mode, out)
		}
	}
}

func TestForeignObjectsAreReported(t *testing.T) {
	for object, setup := range map[string]string{
		"chain inet vipgate-lb prerouting": "add table inet vipgate-lb; add chain inet vipgate-lb prerouting { type filter " +
			"hook forward priority 0; }",
		"set inet vipgate-lb vip4": "add table inet vipgate-lb; add set inet vipgate-lb vip4 { type ipv4_addr; }",
	} {
		ns := lab.NewNetNS(t)
		ns.Shell(t, "nft '"+setup+"'")
		f := openConn(t, ns, Config{})
		var foreign *ConflictError
		if err := writeBase(f, exampleChange()); !errors.As(err, &foreign) || foreign.Object != object {
			t.Errorf("writing over %s: %v", object, err)
		}
	}
	for object, setup := range map[string]string{
		"map inet vipgate-lb maglev4/web": "add map inet vipgate-lb maglev4/web { type ipv4_addr : mark; }",
		"set inet vipgate-lb match/web":   "add set inet vipgate-lb match/web { type inet_service; }",
		"chain inet vipgate-lb stream/web": "add chain inet vipgate-lb stream/web { type filter hook forward " +
			"priority 0; }",
		"element 20.0.0.1/32 of map inet vipgate-lb vip4": "add chain inet vipgate-lb x; " +
			"add element inet vipgate-lb vip4 { 20.0.0.1 : goto x }",
	} {
		ns := lab.NewNetNS(t)
		f := openConn(t, ns, Config{})
		must(t, writeBase(f, plan.Change{Base: true}))
		ns.Shell(t, "nft '"+setup+"'")
		var foreign *ConflictError
		if err := writeBase(f, exampleChange()); !errors.As(err, &foreign) || foreign.Object != object {
			t.Errorf("writing over %s: %v", object, err)
		}
		if c := readAll(t, f); !c.Base {
			t.Errorf("%s disturbs the base", object)
		}
	}
}

func TestForeignRulesAndTablesAmongMany(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openConn(t, ns, Config{})
	ns.Shell(t, "ip route add blackhole default table 5003; ip -6 rule add prio 7 lookup 5004; ip rule add prio 8 fwmark "+
		"5005 lookup main; ip rule add prio 9 fwmark 1 lookup main")
	got, err := f.UsedByOthers([]uint32{5002, 5003, 5004, 5005})
	must(t, err)
	if len(got) != 3 || got[5003] == "" || got[5004] == "" || got[5005] == "" {
		t.Errorf("taken are %v", got)
	}
	// The rules of other processes are cached until another process changes a rule.
	must(t, f.AddCommonRules().Err())
	ns.Shell(t, "ip rule add prio 10 fwmark 5006 lookup main; ip -6 rule del prio 7")
	got, err = f.UsedByOthers([]uint32{5002, 5003, 5004, 5005, 5006})
	must(t, err)
	if len(got) != 3 || got[5004] != "" || got[5006] == "" {
		t.Errorf("taken after a change are %v", got)
	}
}

func TestTargetOffLinkIsNamed(t *testing.T) {
	pod, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", net, "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	f := openConn(t, pod, Config{})
	must(t, writeBase(f, plan.Change{Base: true}))
	slots := exampleSlots("web", 5000, 5001)
	slots[0].NextHops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.20.1.1"), netip.MustParseAddr("fd20::1")}
	slots[1].NextHops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.16.0.2"), netip.MustParseAddr("fd16::2")}
	failed := f.AddRoutes(slots, true)
	if len(failed) != 2 || !strings.Contains(fmt.Sprint(failed[RouteKey{5000, vip.IPv4}]), "172.20.1.1 is on no "+
		"connected network") || !strings.Contains(fmt.Sprint(failed[RouteKey{
		5000,
		vip.IPv6,
	}]), "fd20::1 is on no connected network") {
		t.Errorf("failed: %v", failed)
	}
	if hop, err := f.ResolveNextHop(5001, vip.IPv4); err != nil || hop != slots[1].NextHops[0] {
		t.Errorf("the next hop of the other target is %s, %v", hop, err)
	}
	// The old route of a target is removed when its address changes or disappears.
	slots[1].NextHops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.16.0.3")}
	if failed := f.AddRoutes(slots[1:], true); len(failed) > 0 {
		t.Error(failed)
	}
	got, err := f.ReadRoutes([]uint32{5001})
	must(t, err)
	if s := got[5001]; s.NextHops != slots[1].NextHops || s.Rules != [len(vip.Families)]bool{true, false} ||
		s.Blackhole != [len(vip.Families)]bool{true, false} {
		t.Errorf("after the move: %+v", s)
	}
}

func TestWatchReportsEvents(t *testing.T) {
	ns, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "int0", net, "pod"))
	must(t, ns.Addr("int0", "172.16.0.1/24"))
	f := openConn(t, ns, Config{})
	var w *Watch
	must(t, ns.Do(func() (err error) {
		w, err = Subscribe(Config{})
		return err
	}))
	defer func() { must(t, w.Close()) }()
	w.IgnoreOwn(f)
	wait := func(what string, ok func(Events) bool) {
		t.Helper()
		deadline := time.After(patience)
		for {
			select {
			case <-w.Changed:
				if ok(w.Take()) {
					return
				}
			case <-w.Failed():
				t.Fatalf("the watch failed: %v", w.Err())
			case <-deadline:
				t.Fatalf("no event for %s", what)
			}
		}
	}
	must(t, writeBase(f, plan.Change{Base: true}))
	wait("a transaction", func(n Events) bool {
		if n.Routes {
			t.Error("own rules are reported as route events")
		}
		return n.Ruleset
	})
	ns.Shell(t, "ip rule del prio 90")
	wait("a rule that another process deleted", func(n Events) bool { return n.Routes })
	ns.Shell(t, "ip route add blackhole default table 5007")
	wait("a route in a table of the data plane", func(n Events) bool { return n.Routes })
	ns.Shell(t, "ip route add blackhole 10.0.0.0/8 table 100; ip addr add 20.0.0.1/32 dev lo")
	wait("an address", func(n Events) bool {
		if n.Routes {
			t.Error("a route in a foreign table is an event")
		}
		return n.Links
	})
	ns.Shell(t, "ip route add local 30.0.0.0/24 dev lo proto 180; ip -6 route add local 3000::/64 dev lo")
	wait("local routes without an address", func(n Events) bool { return n.Routes })
	// No host has this address.
	must(t, ns.Sysctl("net.ipv4.neigh.int0.retrans_time_ms", "50"))
	must(t, ns.Do(func() error {
		c, err := gonet.Dial("udp", "172.16.0.9:9")
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("hello"))
		return errors.Join(err, c.Close())
	}))
	wait("a neighbour that failed", func(n Events) bool { return n.Neighbors })
	s, err := f.ReadNetwork()
	must(t, err)
	local := []plan.LocalRoute{
		{Prefix: netip.MustParsePrefix("30.0.0.0/24"), Target: true}, {Prefix: netip.MustParsePrefix("3000::/64")},
	}
	if !slices.Equal(s.LocalRoutes, local) {
		t.Errorf("local routes %v, want %v", s.LocalRoutes, local)
	}
	nine := netip.MustParseAddr("172.16.0.9")
	if _, failed := s.FailedNeighbors[nine]; !failed {
		t.Errorf("failed neighbours are %v", maps.Keys(s.FailedNeighbors))
	}
	if _, local := s.LocalAddrs[netip.MustParseAddr("20.0.0.1")]; !local {
		t.Errorf("local addresses are %v", s.LocalAddrs)
	}
	ns.Shell(t, "ip neigh replace 172.16.0.9 dev int0 lladdr 02:00:00:00:00:09 nud reachable")
	wait("a neighbour that came back", func(n Events) bool { return n.Neighbors })
	if s, err = f.ReadNetwork(); err != nil || len(s.FailedNeighbors) > 0 {
		t.Errorf("failed neighbours are %v, %v", s.FailedNeighbors, err)
	}
	k, ok := s.LinkTo(nine)
	if !ok || k.Name != "int0" || !k.Up {
		t.Errorf("to %s leads %+v", nine, k)
	}
	ns.Shell(t, "ip link set int0 down")
	wait("a link that went down", func(n Events) bool { return n.Links && len(n.LinksDown) > 0 })
	if s, err = f.ReadNetwork(); err != nil {
		t.Fatal(err)
	}
	if k, ok := s.LinkTo(nine); !ok || k.Up {
		t.Errorf("after the link went down %+v leads to %s", k, nine)
	}
}
