package kernel

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

var _ task.Task = (*Routing)(nil)

// state is everything that this package might change, as the tools show it.
func state(t testing.TB, ns *lab.NetNS) string {
	t.Helper()
	return run(t, ns, "ip rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all; nft -a list ruleset")
}

func TestBaseStandsBeforeAnyVIPIsKnown(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	s := state(t, ns)
	for what, n := range map[string]int{
		"100:\tfrom all fwmark 0x1000000/0xff000000 lookup 4096": 2,
		"101:\tfrom all fwmark 0x1000000/0xff000000 lookup 4097": 2,
		"102:\tfrom all fwmark 0x1000000/0xff000000 blackhole":   1,
		"blackhole default table 4097":                           1,
		"blackhole default dev lo table 4097":                    1,
		"ip saddr @vip4 meta mark set":                           2,
		"ip6 saddr @vip6 meta mark set":                          2,
		"type filter hook prerouting priority mangle":            1,
		"type route hook output priority mangle":                 1,
	} {
		if got := strings.Count(s, what); got != n {
			t.Errorf("%q stands %d times, want %d", what, got, n)
		}
	}
	if t.Failed() {
		t.Log(s)
	}
	if c := r.Confirmed().Load(); len(c.VIPs) != 0 || c.Err != nil {
		t.Errorf("confirmed without a configuration: %+v", c)
	}
}

func TestOverlappingAndAdjacentVIPsAreConfirmedEach(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	for _, list := range [][]vip.VIP{
		vips("20.0.0.1/32", "20.0.0.0/24", "20.0.0.255/32", "20.0.1.0/32", "2000::/64", "2000::5/128", "248.0.0.0/5"),
		vips("20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "2000::1/128", "2000::2/128"),
		vips("20.0.0.2/32", "20.0.0.0/31", "2000::/126"),
		vips("20.0.0.0/8", "20.0.0.0/31", "2000::/16"),
		vips("20.0.0.1/32"),
		nil,
		vips("2000::1/128"),
	} {
		r.Configure(list)
		r.waitConfirmed(t, list...)
		got := run(t, ns, "nft -j list ruleset")
		for _, v := range list {
			want := fmt.Sprintf("%q", v.Prefix().Addr())
			if covered := slices.ContainsFunc(list, func(w vip.VIP) bool { return w != v && w.Overlaps(v) && w.Prefix().Bits() < v.Prefix().Bits() }); !covered && !strings.Contains(got, want) {
				t.Errorf("%s is not in the set:\n%s", v, got)
			}
		}
	}
}

func TestOnlyDeltasAreWritten(t *testing.T) {
	ns := lab.NewNetNS(t)
	many := manyVIPs(2000)
	first := start(t, ns, testOptions(t))
	first.Configure(many)
	first.waitConfirmed(t, many...)
	first.stop()
	before := generationIn(t, ns)
	second := start(t, ns, testOptions(t))
	second.Configure(many)
	second.waitConfirmed(t, many...)
	if got := generationIn(t, ns); got != before {
		t.Errorf("a restart with the same VIPs wrote %d transactions", got-before)
	}
	second.Configure(many[1:])
	second.waitConfirmed(t, many[1:]...)
	if got := generationIn(t, ns); got != before+1 {
		t.Errorf("one VIP less wrote %d transactions", got-before)
	}
}

func generationIn(t *testing.T, ns *lab.NetNS) (n uint32) {
	t.Helper()
	must(t, ns.Do(func() (err error) {
		n, err = generation()
		return err
	}))
	return n
}

func TestTenThousandVIPsLoad(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	many := manyVIPs(10_000)
	begin := time.Now()
	r.Configure(many)
	r.waitConfirmed(t, many...)
	t.Logf("10 000 VIPs confirmed after %v", time.Since(begin))
	// From many hosts to the prefix around them and back: one transaction each,
	// larger than a batch.
	wide := vips("20.0.0.0/16", "2000::/64")
	begin = time.Now()
	r.Configure(wide)
	r.waitConfirmed(t, wide...)
	r.Configure(many)
	r.waitConfirmed(t, many...)
	t.Logf("swapped for two prefixes and back after %v", time.Since(begin))
}

func TestWhatIsRemovedComesBack(t *testing.T) {
	list := vips("20.0.0.1/32", "20.0.0.2/32", "2000::1/128", "2000::2/128")
	for _, tt := range []struct{ name, damage string }{
		{"element", "nft delete element inet vipgate vip4 { 20.0.0.1 }"},
		{"all elements", "nft flush set inet vipgate vip6"},
		{"foreign element", "nft add element inet vipgate vip4 { 30.0.0.0/8 }"},
		{"foreign rule in chain", "nft insert rule inet vipgate output accept"},
		{"rules of a chain", "nft flush chain inet vipgate prerouting"},
		{"chain", "nft 'flush chain inet vipgate output; delete chain inet vipgate output'"},
		{"chain of another kind", "nft 'delete chain inet vipgate output; add chain inet vipgate output { type filter hook output priority 0; }'"},
		{"policy drop", "nft 'chain inet vipgate prerouting { policy drop; }'"},
		{"set of another kind", "nft 'delete table inet vipgate; add table inet vipgate; add set inet vipgate vip4 { type ipv4_addr; }'"},
		{"table", "nft delete table inet vipgate"},
		{"ruleset", "nft flush ruleset"},
		{"IPv4 rule", "ip rule del priority 100"},
		{"IPv6 rules", "ip -6 rule del priority 101; ip -6 rule del priority 102"},
		{"IPv4 blackhole", "ip route flush table 4097"},
		{"IPv6 blackhole", "ip -6 route del blackhole default table 4097"},
		{"IPv6 blackhole with lo", "ip link set lo down"},
		{"foreign blackhole in its place", "ip route replace blackhole default table 4097"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ns := lab.NewNetNS(t)
			o := testOptions(t)
			r := start(t, ns, o)
			r.Configure(list)
			r.waitConfirmed(t, list...)
			// Handles and the order of lists change; what stands must not.
			before := stands(t, ns)
			run(t, ns, tt.damage)
			r.waitFor(t, "a repair", func(c Confirmed) bool { return c.Repairs > 0 })
			r.waitConfirmed(t, list...)
			if after := stands(t, ns); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// stands is state without what may differ between two equal ones.
func stands(t *testing.T, ns *lab.NetNS) string {
	t.Helper()
	lines := strings.Split(run(t, ns, "ip rule; ip -6 rule; ip route show table 4097; ip -6 route show table 4097; nft list ruleset"), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func TestUnrepairableFamilyIsUnconfirmedAndTheOtherIsNot(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "d0", lab.NewNetNS(t), "d1"))
	r := start(t, ns, testOptions(t))
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	// A way out of the blackhole's table, which is not ours to remove.
	run(t, ns, "ip -6 route add 2001:db8::/32 dev d0 table 4097")
	c := r.waitFor(t, "IPv6 unconfirmed", func(c Confirmed) bool { return c.VIPs.Equal(vip.NewSet(list[0])) })
	if c.Err == nil || !strings.Contains(c.Err.Error(), "2001:db8::/32") {
		t.Errorf("the error names no cause: %v", c.Err)
	}
	run(t, ns, "ip -6 route del 2001:db8::/32 dev d0 table 4097")
	r.waitConfirmed(t, list...)
}

func TestMeridioRulesGoOnceOursStandAndNothingElseDoes(t *testing.T) {
	ns := lab.NewNetNS(t)
	run(t, ns, `
		nft 'add table inet other; add chain inet other c { type filter hook output priority 0; }; add set inet other vip4 { type ipv4_addr; }'
		ip route add blackhole 10.9.0.0/16 table 4098
		ip -6 route add blackhole default table 4099
		ip rule add from 20.0.0.9 lookup 4096 priority 99
		ip rule add from 20.0.0.9 lookup 4096 priority 101
		ip rule add from 20.0.0.9 lookup 4098 priority 100
		ip rule add from 20.0.0.9 to 30.0.0.1 lookup 4096 priority 100
		ip rule add from 20.0.0.9 fwmark 5 lookup 4096 priority 100
		ip rule add from 20.0.0.9 iif lo lookup 4096 priority 100
		ip rule add not from 20.0.0.9 lookup 4096 priority 100
		ip rule add from 20.0.0.9 ipproto tcp lookup 4096 priority 100
		ip rule add to 20.0.0.9 lookup 4096 priority 100
		ip rule add from all lookup 4097 priority 101
		ip -6 rule add from 2000::9 lookup 4097 priority 100
		ip -6 rule add from 2000::9 blackhole priority 101`)
	before := state(t, ns)
	run(t, ns, `
		ip route add blackhole default table 4097 metric 32
		ip rule add from 20.0.0.1 lookup 4096 priority 100
		ip rule add from 20.0.0.1 lookup 4097 priority 101
		ip rule add from 20.0.7.0/24 lookup 4096 priority 100
		ip -6 rule add from 2000::1 lookup 4096 priority 100
		ip -6 rule add from 2000::1 lookup 4097 priority 101`)
	meridio := stands(t, ns)
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	if got := run(t, ns, "ip rule; ip -6 rule"); strings.Count(got, "from 20.0.0.1 lookup")+strings.Count(got, "from 2000::1 lookup") != 4 {
		t.Errorf("removed before ours stands:\n%s\nbefore:\n%s", got, meridio)
	}
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	eventually(t, "removal of Meridio's rules", func() bool {
		rules := run(t, ns, "ip rule; ip -6 rule")
		return !strings.Contains(rules, "from 20.0.0.1 lookup") && !strings.Contains(rules, "from 20.0.7.0/24") && !strings.Contains(rules, "from 2000::1 lookup")
	})
	r.stop()
	run(t, ns, "ip route del blackhole default table 4097 metric 32")
	must(t, ns.Do(func() error { return Cleanup(context.Background(), testOptions(t)) }))
	if after := state(t, ns); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func TestOptionsOfAnEarlierRunLeaveNothingBehind(t *testing.T) {
	ns := lab.NewNetNS(t)
	before := state(t, ns)
	list := vips("20.0.0.1/32", "2000::1/128")
	o := testOptions(t)
	o.TableID, o.Priority, o.Mark, o.Mask = 5000, 200, 0x10, 0xf0
	r := start(t, ns, o)
	r.Configure(list)
	r.waitConfirmed(t, list...)
	r.stop()
	if s := state(t, ns); !strings.Contains(s, "200:\tfrom all fwmark 0x10/0xf0 lookup 5000") || !strings.Contains(s, "blackhole default table 5001") {
		t.Errorf("options have no effect:\n%s", s)
	}
	r = start(t, ns, testOptions(t))
	r.Configure(list)
	r.waitConfirmed(t, list...)
	eventually(t, "removal of leftovers", func() bool {
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

func TestUnreadableKernelKeepsVIPsConfirmedForAWhile(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, ns.Do(func() error {
		o := testOptions(t).withDefaults()
		p, err := newPass(o, o.Log)
		if err != nil {
			return err
		}
		now := time.Now()
		p.now = func() time.Time { return now }
		list := vip.NewSet(vips("20.0.0.1/32", "2000::1/128")...)
		if x := p.run(&list); x.err != nil || !x.vips.Equal(list) {
			t.Errorf("at first: %+v", x)
		}
		cause := errors.New("blind")
		p.table.generation = func() (uint32, error) { return 0, cause }
		now = now.Add(blindness - time.Millisecond)
		more := vip.NewSet(append(list.Sorted(), vips("20.0.0.2/32")...)...)
		if x := p.run(&more); !errors.Is(x.err, cause) || !x.vips.Equal(list) {
			t.Errorf("blind for a while: %+v", x)
		}
		now = now.Add(time.Millisecond)
		if x := p.run(&more); !errors.Is(x.err, cause) || len(x.vips) != 0 {
			t.Errorf("blind for long: %+v", x)
		}
		p.table.generation = generation
		if x := p.run(&more); x.err != nil || !x.vips.Equal(more) {
			t.Errorf("seeing again: %+v", x)
		}
		return nil
	}))
}

func TestOptionsAreValidated(t *testing.T) {
	for _, tt := range []struct {
		name    string
		o       Options
		problem string
	}{
		{"defaults", Options{}, ""},
		{"main table", Options{TableID: 254}, "routing table 254"},
		{"blackholes in the default table", Options{TableID: 252}, "routing table 252"},
		{"last table", Options{TableID: 1<<32 - 1}, "routing table"},
		{"priority of main", Options{Priority: 32766}, "rule priority 32766"},
		{"negative priority", Options{Priority: -1}, "rule priority -1"},
		{"mark without mask", Options{Mark: 1}, "outside its mask"},
		{"mask without mark", Options{Mask: 0xff}, "mark 0"},
		{"mark outside mask", Options{Mark: 0x100, Mask: 0xff}, "outside its mask"},
		{"mark in mask", Options{Mark: 0x10, Mask: 0xf0}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.o.Validate()
			if (err == nil) != (tt.problem == "") || (err != nil && !strings.Contains(err.Error(), tt.problem)) {
				t.Errorf("got %v, want %q", err, tt.problem)
			}
			if err != nil {
				if runErr := New(tt.o).Run(t.Context()); runErr == nil {
					t.Error("Run took invalid options")
				}
			}
		})
	}
}

func TestStrictReversePathIsReported(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "ext", lab.NewNetNS(t), "peer"))
	problems := func() (list []string) {
		must(t, ns.Do(func() error {
			list = reversePathProblems()
			return nil
		}))
		return list
	}
	for _, tt := range []struct {
		all, ext string
		want     int
	}{{"0", "0", 0}, {"0", "1", 1}, {"1", "0", 1}, {"1", "2", 0}, {"2", "1", 0}, {"0", "2", 0}} {
		must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", tt.all))
		must(t, ns.Sysctl("net.ipv4.conf.ext.rp_filter", tt.ext))
		got := slices.DeleteFunc(problems(), func(s string) bool { return !strings.Contains(s, "interface ext ") })
		if len(got) != tt.want {
			t.Errorf("all %s, ext %s: %q", tt.all, tt.ext, got)
		}
	}
}

func TestDumpShowsWhatStands(t *testing.T) {
	x := newTopology(t)
	x.openGateway(t)
	r := start(t, x.pod, testOptions(t))
	r.Configure(allVIPs())
	r.waitConfirmed(t, allVIPs()...)
	var s Snapshot
	must(t, x.pod.Do(func() (err error) {
		s, err = Dump(context.Background(), testOptions(t))
		return err
	}))
	text, err := json.MarshalIndent(s, "", " ")
	must(t, err)
	for _, want := range []string{
		"ipv4 100: fwmark 0x1000000/0xff000000 lookup 4096", "ipv6 102: fwmark 0x1000000/0xff000000 blackhole",
		"20.0.0.1", "2000::2", "look up in vip6", "169.254.100.1", "fd64::1", `"name": "ext"`, "169.254.100.2/24", `"net.ipv4.conf.ext.rp_filter": "0"`,
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("no %q in the dump", want)
		}
	}
	if len(s.Problems) > 0 || len(s.Routes["4097"]) != 2 || len(s.Chains["output"]) != 2 {
		t.Errorf("problems %q, routes %q, chains %q", s.Problems, s.Routes, s.Chains)
	}
	if t.Failed() {
		t.Logf("%s", text)
	}
}

func BenchmarkQuietPass(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			ns := lab.NewNetNS(b)
			must(b, ns.Do(func() error {
				o := testOptions(b).withDefaults()
				p, err := newPass(o, o.Log)
				if err != nil {
					return err
				}
				list := vip.NewSet(manyVIPs(n)...)
				p.run(&list)
				for b.Loop() {
					if x := p.run(&list); x.err != nil {
						return x.err
					}
				}
				return nil
			}))
		})
	}
}
