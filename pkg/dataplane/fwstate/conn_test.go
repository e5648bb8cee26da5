package fwstate

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

var must = harness.Must

// openConn opens a connection in a namespace.
func openConn(t testing.TB, ns *lab.NetNS, o Config) *Conn {
	t.Helper()
	var f *Conn
	must(t, ns.Do(func() (err error) {
		f, err = Dial(o)
		return err
	}))
	_ = f.UseTimeouts() // see needTimeouts
	t.Cleanup(func() { must(t, f.Close()) })
	return f
}

// filled returns a table of size entries that repeats the fwmarks in turn.
func filled(size uint32, numbers ...uint32) []uint32 {
	table := make([]uint32, size)
	for i := range table {
		table[i] = numbers[i%len(numbers)]
	}
	return table
}

func bothFamilies(table []uint32) [len(vip.Families)][]uint32 {
	return [len(vip.Families)][]uint32{table, table}
}

// exampleSlots returns targets of a stream with flows in both families.
func exampleSlots(stream string, numbers ...uint32) []plan.KernelTarget {
	var slots []plan.KernelTarget
	for _, n := range numbers {
		slots = append(slots,
			plan.KernelTarget{
				FWMark: n, Label: plan.Label{Stream: stream, Name: fmt.Sprintf("t%d", n)},
				Flows: [len(vip.Families)]bool{true, true},
			})
	}
	return slots
}

// exampleMatch is a match of a stream, which also forwards ICMP.
var exampleMatch = []plan.Port{
	{Protocol: unix.IPPROTO_TCP, Number: 80},
	{Protocol: unix.IPPROTO_TCP, Number: 443},
	{Protocol: unix.IPPROTO_UDP, Number: 53},
}

func exampleChange() plan.Change {
	return plan.Change{
		Base:    true,
		Targets: exampleSlots("web", 5000, 5001, 5002),
		Streams: []plan.StreamWrite{{Desired: plan.KernelStream{
			Name: "web", Size: 101, Seed: 7, Tables: bothFamilies(filled(101, 5000, 5001, 5002)), Match: exampleMatch,
		}}},
		VIPs: map[vip.VIP]string{
			vip.Require("20.0.0.1/32"): "web", vip.Require("2000::1/128"): "web",
			vip.Require("20.0.1.0/24"): "web", vip.Require("20.0.2.0/24"): "web", vip.Require("2000:1::/64"): "web",
		},
	}
}

func readAll(t testing.TB, f *Conn) *plan.KernelState {
	t.Helper()
	c, err := f.Read([]uint32{5000, 5001, 5002})
	must(t, err)
	return c
}

func TestWriteReadBack(t *testing.T) {
	for mode := range Conntrack(len(conntrackNames)) {
		t.Run(mode.String(), func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openConn(t, ns, Config{Conntrack: mode})
			if c := readAll(t, f); c.Base || len(c.Streams)+len(c.Targets)+len(c.VIPs) > 0 {
				t.Fatalf("an empty namespace has %+v", c)
			}
			c := exampleChange()
			must(t, writeBase(f, c))
			got := readAll(t, f)
			if !got.Base {
				r, err := f.readRuleset(true)
				must(t, err)
				problem, err := f.inspectBase(r)
				t.Errorf("base does not stand: %s, %v\n%s", problem, err,
					ns.Shell(t, "nft list table inet vipgate-lb; ip rule; ip -6 rule"))
			}
			want := c.Streams[0].Desired
			want.Owned, want.ChainIntact = true, true
			if !reflect.DeepEqual(got.Streams, map[string]*plan.KernelStream{"web": &want}) {
				t.Errorf("streams are %+v\n%s", got.Streams["web"],
					ns.Shell(t, "nft --debug=netlink list chain inet vipgate-lb stream/web"))
			}
			if !reflect.DeepEqual(got.VIPs, c.VIPs) {
				t.Errorf("VIPs are %v", got.VIPs)
			}
			for _, s := range c.Targets {
				s.ChainIntact = true
				if g := got.Targets[s.FWMark]; g == nil || !reflect.DeepEqual(*g, s) {
					t.Errorf("target %d is %+v, want %+v", s.FWMark, g, s)
				}
			}
			one, err := f.ReadStream("web")
			must(t, err)
			if !reflect.DeepEqual(one, &want) {
				t.Errorf("the stream alone is %+v", one)
			}
			slots, err := f.ReadTargets([]uint32{5001, 5999})
			must(t, err)
			if len(slots) != 1 || !slots[5001].ChainIntact {
				t.Errorf("targets alone are %+v", slots)
			}
		})
	}
}

func TestIdenticalWriteChangesNothing(t *testing.T) {
	for mode := range Conntrack(len(conntrackNames)) {
		f := openConn(t, lab.NewNetNS(t), Config{Conntrack: mode})
		must(t, writeBase(f, exampleChange()))
		now := readAll(t, f)
		before, err := f.Generation()
		must(t, err)
		again := exampleChange()
		again.Streams[0].Observed = now.Streams["web"]
		must(t, writeBase(f, again))
		after, err := f.Generation()
		must(t, err)
		if before != after {
			t.Errorf("conntrack %s: the ruleset changed from %d to %d", mode, before, after)
		}
	}
}

func TestNFTListsTable(t *testing.T) {
	for mode := range Conntrack(len(conntrackNames)) {
		ns := lab.NewNetNS(t)
		f := openConn(t, ns, Config{Conntrack: mode})
		must(t, writeBase(f, exampleChange()))
		for command, shown := range map[string]string{
			"nft list table inet vipgate-lb":                      "mod 101 seed 0x7 vmap @live4/web",
			"nft -j list table inet vipgate-lb":                   `"vipgate: flows with ports, by @maglev4/web"`,
			"nft list map inet vipgate-lb maglev4/web":            "0x00000001 : 0x00001389",
			"nft list map inet vipgate-lb live6/web":              "0x00001389 : goto target/5001",
			"nft list map inet vipgate-lb net4":                   "20.0.1.0/24 : goto stream/web",
			"nft list chain inet vipgate-lb stream/web":           "by @maglev6/web",
			"nft list chain inet vipgate-lb target/5001":          `comment "web/t5001"`,
			"nft list set inet vipgate-lb match/web":              "tcp . 443",
			"nft -j list set inet vipgate-lb match/web":           `["inet_proto", "inet_service"]`,
			"nft -y list chain inet vipgate-lb stream/web":        "meta l4proto . th dport != @match/web meta l4proto != icmp",
			"nft -a list ruleset":                                 "ip daddr vmap @vip4",
			"nft get element inet vipgate-lb vip4 '{ 20.0.0.1 }'": "goto stream/web",
		} {
			if out := ns.Shell(t, command); !strings.Contains(out, shown) {
				t.Errorf("%s does not show %q:\n%s", command, shown, out)
			}
		}
	}
}

func TestRoutes(t *testing.T) {
	pod, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", net, "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	f := openConn(t, pod, Config{})
	must(t, writeBase(f, plan.Change{Base: true}))
	slots := exampleSlots("web", 5000, 5001)
	for i := range slots {
		slots[i].NextHops = [len(vip.Families)]netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("172.16.0.%d", 10+i)),
			netip.MustParseAddr(fmt.Sprintf("fd16::%d", 10+i)),
		}
	}
	for n, err := range f.AddRoutes(slots, true) {
		t.Errorf("%d: %v", n, err)
	}
	got := readAll(t, f)
	if !got.Base {
		t.Errorf("the base does not stand: %s", pod.Shell(t, "ip rule; ip -6 rule"))
	}
	for _, s := range slots {
		g := got.Targets[s.FWMark]
		if g == nil || g.NextHops != s.NextHops || g.Rules != [len(vip.Families)]bool{true, true} ||
			g.Blackhole != [len(vip.Families)]bool{true, true} {
			t.Errorf("%d is %+v\n%s", s.FWMark, g,
				pod.Shell(t, "ip rule; ip -6 rule; ip route show table all; ip -6 route show table all"))
		}
		for _, family := range vip.Families {
			hop, err := f.ResolveNextHop(s.FWMark, family)
			must(t, err)
			if hop != s.NextHops[family] {
				t.Errorf("%s way of %d: %s\n", family, s.FWMark, hop)
			}
			if hop, err := f.ResolveNextHop(5999, family); err != nil || hop.IsValid() {
				t.Errorf("%s way of a number that is not there: %s, %v", family, hop, err)
			}
		}
	}
	must(t, f.RemoveRoutes([]uint32{5000}))
	for _, family := range vip.Families {
		if hop, err := f.ResolveNextHop(5000, family); err != nil || hop.IsValid() {
			t.Errorf("%s way of a number that was removed: %s, %v", family, hop, err)
		}
	}
	numbers, err := f.OwnedTables()
	must(t, err)
	if !reflect.DeepEqual(numbers, []uint32{5001}) {
		t.Errorf("owned are %v", numbers)
	}
	must(t, pod.IP("link", "set", "int0", "down"))
	if hop, err := f.ResolveNextHop(5001, vip.IPv4); err != nil || hop.IsValid() {
		t.Errorf("way over a link that is down: %s, %v", hop, err)
	}
	must(t, f.RemoveRoutes([]uint32{5001}))
	must(t, f.RemoveAll())
	if out := pod.Shell(t, `nft list ruleset
		ip rule | grep -v -w 'local\|main\|default' || true
		ip -6 rule | grep -v -w 'local\|main' || true
		ip route show table all proto 179
		ip -6 route show table all proto 179`); out != "" {
		t.Errorf("left over:\n%s", out)
	}
}

// writeBase writes a change with the common objects and rules.
func writeBase(f *Conn, c plan.Change) error {
	return errors.Join(f.AddCommonRules().Err(), f.Write(c))
}
