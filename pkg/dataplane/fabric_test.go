package dataplane

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// run runs a shell command in a namespace.
func run(t testing.TB, ns *lab.NetNS, command string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := ns.Run(ctx, "sh", "-c", command)
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return out
}

// openFabric opens a fabric in a namespace.
func openFabric(t testing.TB, ns *lab.NetNS, o Options) *fabric {
	t.Helper()
	var f *fabric
	must(t, ns.Do(func() (err error) {
		f, err = newFabric(o)
		return err
	}))
	t.Cleanup(func() { must(t, f.close()) })
	return f
}

// filled returns a table of so many entries that leads to the numbers in turn.
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

// exampleSlots are targets of a stream with flows in both families.
func exampleSlots(stream string, numbers ...uint32) []slotContent {
	var slots []slotContent
	for _, n := range numbers {
		slots = append(slots, slotContent{number: n, label: label{stream: stream, name: fmt.Sprintf("t%d", n)}, flows: [len(vip.Families)]bool{true, true}})
	}
	return slots
}

func exampleChange() change {
	return change{
		base:  true,
		slots: exampleSlots("web", 5000, 5001, 5002),
		streams: []streamWrite{{want: streamContent{
			name: "web", size: 101, seed: 7, tables: bothFamilies(filled(101, 5000, 5001, 5002)),
		}}},
		vips: map[vip.VIP]string{
			vip.Require("20.0.0.1/32"): "web", vip.Require("2000::1/128"): "web",
			vip.Require("20.0.1.0/24"): "web", vip.Require("20.0.2.0/24"): "web", vip.Require("2000:1::/64"): "web",
		},
	}
}

func readAll(t testing.TB, f *fabric) *content {
	t.Helper()
	c, err := f.read([]uint32{5000, 5001, 5002})
	must(t, err)
	return c
}

func TestWhatWasWrittenIsReadBack(t *testing.T) {
	for _, stateless := range []bool{false, true} {
		t.Run(fmt.Sprintf("stateless %v", stateless), func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openFabric(t, ns, Options{Stateless: stateless})
			if c := readAll(t, f); c.base || len(c.streams)+len(c.slots)+len(c.vips) > 0 {
				t.Fatalf("an empty namespace has %+v", c)
			}
			c := exampleChange()
			must(t, writeBase(f, c))
			got := readAll(t, f)
			if !got.base {
				r, err := f.readRuleset(true)
				must(t, err)
				problem, err := f.inspectBase(r)
				t.Errorf("base does not stand: %s, %v\n%s", problem, err, run(t, ns, "nft list table inet vipgate-lb; ip rule; ip -6 rule"))
			}
			want := c.streams[0].want
			want.ours, want.chain = true, true
			if !reflect.DeepEqual(got.streams, map[string]*streamContent{"web": &want}) {
				t.Errorf("streams are %+v\n%s", got.streams["web"], run(t, ns, "nft --debug=netlink list chain inet vipgate-lb stream/web"))
			}
			if !reflect.DeepEqual(got.vips, c.vips) {
				t.Errorf("VIPs are %v", got.vips)
			}
			for _, s := range c.slots {
				s.chain = true
				if g := got.slots[s.number]; g == nil || !reflect.DeepEqual(*g, s) {
					t.Errorf("target %d is %+v, want %+v", s.number, g, s)
				}
			}
			one, err := f.readStream("web")
			must(t, err)
			if !reflect.DeepEqual(one, &want) {
				t.Errorf("the stream alone is %+v", one)
			}
			slots, err := f.readSlots([]uint32{5001, 5999})
			must(t, err)
			if len(slots) != 1 || !slots[5001].chain {
				t.Errorf("targets alone are %+v", slots)
			}
		})
	}
}

func TestWritingWhatStandsChangesNothing(t *testing.T) {
	for _, stateless := range []bool{false, true} {
		f := openFabric(t, lab.NewNetNS(t), Options{Stateless: stateless})
		must(t, writeBase(f, exampleChange()))
		now := readAll(t, f)
		before, err := f.generation()
		must(t, err)
		again := exampleChange()
		again.streams[0].now = now.streams["web"]
		must(t, writeBase(f, again))
		after, err := f.generation()
		must(t, err)
		if before != after {
			t.Errorf("stateless %v: the ruleset changed from %d to %d", stateless, before, after)
		}
	}
}

func TestPeopleCanListTheTable(t *testing.T) {
	for _, stateless := range []bool{false, true} {
		ns := lab.NewNetNS(t)
		f := openFabric(t, ns, Options{Stateless: stateless})
		must(t, writeBase(f, exampleChange()))
		for command, shown := range map[string]string{
			"nft list table inet vipgate-lb":                      "mod 101 seed 0x7 vmap @live4/web",
			"nft -j list table inet vipgate-lb":                   `"vipgate: flows with ports, by @maglev4/web"`,
			"nft list map inet vipgate-lb maglev4/web":            "0x00000001 : 0x00001389",
			"nft list map inet vipgate-lb live6/web":              "0x00001389 : goto target/5001",
			"nft list map inet vipgate-lb net4":                   "20.0.1.0/24 : goto stream/web",
			"nft list chain inet vipgate-lb stream/web":           "by @maglev6/web",
			"nft list chain inet vipgate-lb target/5001":          `comment "web/t5001"`,
			"nft -a list ruleset":                                 "ip daddr vmap @vip4",
			"nft get element inet vipgate-lb vip4 '{ 20.0.0.1 }'": "goto stream/web",
		} {
			if out := run(t, ns, command); !strings.Contains(out, shown) {
				t.Errorf("%s does not show %q:\n%s", command, shown, out)
			}
		}
	}
}

func TestWays(t *testing.T) {
	pod, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", net, "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	f := openFabric(t, pod, Options{})
	must(t, writeBase(f, change{base: true}))
	slots := exampleSlots("web", 5000, 5001)
	for i := range slots {
		slots[i].hops = [len(vip.Families)]netip.Addr{netip.MustParseAddr(fmt.Sprintf("172.16.0.%d", 10+i)), netip.MustParseAddr(fmt.Sprintf("fd16::%d", 10+i))}
	}
	for n, err := range f.addWays(slots) {
		t.Errorf("%d: %v", n, err)
	}
	got := readAll(t, f)
	if !got.base {
		t.Errorf("the base does not stand: %s", run(t, pod, "ip rule; ip -6 rule"))
	}
	for _, s := range slots {
		g := got.slots[s.number]
		if g == nil || g.hops != s.hops || g.rules != [len(vip.Families)]bool{true, true} || g.blackhole != [len(vip.Families)]bool{true, true} {
			t.Errorf("%d is %+v\n%s", s.number, g, run(t, pod, "ip rule; ip -6 rule; ip route show table all; ip -6 route show table all"))
		}
		for _, family := range vip.Families {
			hop, err := f.way(s.number, family)
			must(t, err)
			if hop != s.hops[family] {
				t.Errorf("%s way of %d: %s\n", family, s.number, hop)
			}
			if hop, err := f.way(5999, family); err != nil || hop.IsValid() {
				t.Errorf("%s way of a number that is not there: %s, %v", family, hop, err)
			}
		}
	}
	must(t, f.removeWays([]uint32{5000}))
	for _, family := range vip.Families {
		if hop, err := f.way(5000, family); err != nil || hop.IsValid() {
			t.Errorf("%s way of a number that was removed: %s, %v", family, hop, err)
		}
	}
	numbers, err := f.owned()
	must(t, err)
	if !reflect.DeepEqual(numbers, []uint32{5001}) {
		t.Errorf("owned are %v", numbers)
	}
	must(t, pod.IP("link", "set", "int0", "down"))
	if hop, err := f.way(5001, vip.IPv4); err != nil || hop.IsValid() {
		t.Errorf("way over a link that is down: %s, %v", hop, err)
	}
	must(t, f.removeWays([]uint32{5001}))
	must(t, f.removeAll())
	if out := run(t, pod, "nft list ruleset; ip rule | grep -v -w 'local\\|main\\|default' || true; ip -6 rule | grep -v -w 'local\\|main' || true; ip route show table all proto 179; ip -6 route show table all proto 179"); out != "" {
		t.Errorf("left over:\n%s", out)
	}
}

// writeBase writes a change with the rules that no target owns.
func writeBase(f *fabric, c change) error {
	return errors.Join(f.addCommonRules().all(), f.write(c))
}
