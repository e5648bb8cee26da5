package dataplane

import (
	"errors"
	"fmt"
	"maps"
	gonet "net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab"
)

// mustHave reads a stream and compares it.
func mustHave(t *testing.T, f *fabric, want streamContent) *streamContent {
	t.Helper()
	got, err := f.readStream(want.name)
	must(t, err)
	want.ours, want.chain = true, true
	if !reflect.DeepEqual(got, &want) {
		t.Fatalf("stream %s is not as it was written: chain %v, size %d, seed %d, %d and %d entries", want.name, got.chain, got.size, got.seed, len(got.tables[0]), len(got.tables[1]))
	}
	return got
}

func TestOnlyEntriesThatDifferAreWritten(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openFabric(t, ns, Options{})
	must(t, writeBase(f, exampleChange()))
	now, err := f.readStream("web")
	must(t, err)
	want := streamContent{name: "web", size: 101, seed: 7, tables: bothFamilies(filled(101, 5000, 5001, 5002))}
	want.tables[vip.IPv6] = filled(101, 5000, 5001, 5002)
	want.tables[vip.IPv6][50] = 5000 // was 5002
	want.tables[vip.IPv6][51] = 0    // none
	before, done := f.nft.written, f.transactions()
	must(t, f.write(change{streams: []streamWrite{{want: want, now: now}}}))
	// One message deletes two elements, one adds one of them again.
	if n := f.nft.written - before; n != 2 {
		t.Errorf("%d messages for two entries", n)
	}
	if n := f.transactions() - done; n != 1 {
		t.Errorf("%d transactions", n)
	}
	mustHave(t, f, want)
	if got := differences(now.tables[vip.IPv6], want.tables[vip.IPv6]); !reflect.DeepEqual(got, []entry{{50, 5000, true}, {51, 0, true}}) {
		t.Errorf("the entries that differ are %v", got)
	}
}

func TestTablesChangeTheirSizeSeedAndFamilies(t *testing.T) {
	f := openFabric(t, lab.NewNetNS(t), Options{})
	must(t, writeBase(f, exampleChange()))
	for _, step := range []struct {
		name       string
		size, seed uint32
		families   []vip.Family
	}{
		{"larger", 1009, 7, vip.Families[:]},
		{"another seed", 1009, 8, vip.Families[:]},
		{"IPv4 only", 1009, 8, vip.Families[:1]},
		{"both again, larger than a transaction", 10007, 8, vip.Families[:]},
		{"larger than a transaction, from one that is", 20011, 8, vip.Families[:]},
		{"small", 101, 9, vip.Families[:]},
	} {
		t.Run(step.name, func(t *testing.T) {
			now, err := f.readStream("web")
			must(t, err)
			want := streamContent{name: "web", size: step.size, seed: step.seed}
			for _, family := range step.families {
				want.tables[family] = filled(step.size, 5000, 5002)
			}
			must(t, f.write(change{streams: []streamWrite{{want: want, now: now}}}))
			mustHave(t, f, want)
			slots, err := f.readSlots([]uint32{5000, 5001, 5002})
			must(t, err)
			for _, s := range slots {
				if s.flows != [len(vip.Families)]bool{true, true} {
					t.Errorf("flows of %d no longer live: %v", s.number, s.flows)
				}
			}
			sets, err := f.readSets()
			must(t, err)
			for name := range sets {
				if strings.HasPrefix(name, "spare") {
					t.Errorf("map %s is left", name)
				}
			}
		})
	}
}

// Whatever the kernel has of a stream, write makes it what it is to be: a start that was
// cut short may have left anything.
func TestLeftoversOfATransactionThatWasCutShortAreMended(t *testing.T) {
	for name, commands := range map[string]string{
		"maps without a chain":        "nft flush chain inet vipgate-lb stream/web; nft delete element inet vipgate-lb vip4 { 20.0.0.1 }; nft delete element inet vipgate-lb vip6 { 2000::1 }; nft delete element inet vipgate-lb net4 { 20.0.1.0/24, 20.0.2.0/24 }; nft delete element inet vipgate-lb net6 { 2000:1::/64 }; nft delete chain inet vipgate-lb stream/web",
		"an empty chain":              "nft flush chain inet vipgate-lb stream/web",
		"a rule less":                 "nft delete rule inet vipgate-lb stream/web handle $(nft -a list chain inet vipgate-lb stream/web | sed -n 's/.*no target.*handle //p')",
		"a chain without maps":        "nft flush chain inet vipgate-lb stream/web; nft delete map inet vipgate-lb maglev4/web; nft delete map inet vipgate-lb live6/web",
		"a map that is half full":     "nft flush chain inet vipgate-lb stream/web; nft flush map inet vipgate-lb maglev6/web; nft add element inet vipgate-lb maglev6/web { 5 : 5001 }",
		"a map of another size":       "nft flush chain inet vipgate-lb stream/web; nft delete map inet vipgate-lb maglev4/web; nft 'add map inet vipgate-lb maglev4/web { type mark : mark; size 7; }'",
		"a table that sleeps":         "nft add table inet vipgate-lb '{ flags dormant; }'",
		"no elements in ported":       "nft flush set inet vipgate-lb ported",
		"base rules in another order": "nft flush chain inet vipgate-lb prerouting; nft add rule inet vipgate-lb prerouting ip daddr vmap @vip4",
		"no table at all":             "nft delete table inet vipgate-lb",
		"no goto":                     "ip rule del prio 90; ip -6 rule del prio 92",
	} {
		t.Run(name, func(t *testing.T) {
			ns := lab.NewNetNS(t)
			f := openFabric(t, ns, Options{})
			must(t, writeBase(f, exampleChange()))
			run(t, ns, commands)
			got := readAll(t, f)
			if s := got.streams["web"]; got.base && s != nil && s.chain && len(got.vips) == 5 {
				t.Fatal("nothing seems wrong")
			}
			again := exampleChange()
			again.streams[0].now = got.streams["web"]
			must(t, writeBase(f, again))
			mustHave(t, f, again.streams[0].want)
			got = readAll(t, f)
			if !got.base || !reflect.DeepEqual(got.vips, again.vips) {
				t.Errorf("base %v, VIPs %v", got.base, got.vips)
			}
			for _, s := range again.slots {
				if g := got.slots[s.number]; g == nil || !g.chain || g.flows != s.flows {
					t.Errorf("target %d is %+v", s.number, g)
				}
			}
		})
	}
}

func TestWhatIsSomebodyElsesStays(t *testing.T) {
	for _, stateless := range []bool{false, true} {
		ns := lab.NewNetNS(t)
		f := openFabric(t, ns, Options{Stateless: stateless})
		must(t, writeBase(f, exampleChange()))
		run(t, ns, `nft 'add table inet other; add chain inet other prerouting { type filter hook prerouting priority 0; }
			add chain inet vipgate-lb theirs; add rule inet vipgate-lb theirs counter
			add set inet vipgate-lb theirset { type ipv4_addr; }; add element inet vipgate-lb theirset { 1.2.3.4 }
			add counter inet vipgate-lb theircounter
			add rule inet vipgate-lb prerouting counter
			insert rule inet vipgate-lb stream/web counter comment "debugging"
			add element inet vipgate-lb vip4 { 9.9.9.9 : goto theirs }'
			ip rule add prio 95 fwmark 7 lookup 77; ip route add blackhole default table 77; ip route add blackhole 1.1.1.1/32 table 5000`)
		c := readAll(t, f)
		if !c.base || !c.streams["web"].chain || len(c.vips) != 5 {
			t.Errorf("somebody else's rules disturb: base %v, chain %v, VIPs %v", c.base, c.streams["web"].chain, c.vips)
		}
		// All of ours changes, and goes.
		want := streamContent{name: "web", size: 103, seed: 9, tables: bothFamilies(filled(103, 5000))}
		must(t, f.write(change{streams: []streamWrite{{want: want, now: c.streams["web"]}}}))
		must(t, f.removeWays([]uint32{5000, 5001, 5002}))
		gone := exampleChange().vips
		for v := range gone {
			gone[v] = ""
		}
		must(t, f.write(change{vips: gone, removeStreams: []string{"web"}, removeSlots: []uint32{5000, 5001, 5002}}))
		must(t, f.removeAll())
		out := run(t, ns, "nft list ruleset; ip rule; ip route show table 77; ip route show table 5000")
		for _, theirs := range []string{"table inet other", "chain theirs", "set theirset", "counter theircounter", "9.9.9.9 : goto theirs", "fwmark 0x7 lookup 77", "blackhole default", "blackhole 1.1.1.1", "chain prerouting {\n\t\ttype filter hook prerouting priority mangle; policy accept;\n\t\tcounter packets"} {
			if !strings.Contains(out, theirs) {
				t.Errorf("stateless %v: %q is gone:\n%s", stateless, theirs, out)
			}
		}
		for _, ours := range []string{"vipgate:", "live4", "ported", "goto 92", "nop", "stream/", "target/", "own4"} {
			if strings.Contains(out, ours) {
				t.Errorf("stateless %v: %q is left:\n%s", stateless, ours, out)
			}
		}
		run(t, ns, "nft delete table inet vipgate-lb; ip rule del prio 95")
	}
}

func TestAllOfOursGoes(t *testing.T) {
	for _, stateless := range []bool{false, true} {
		ns := lab.NewNetNS(t)
		f := openFabric(t, ns, Options{Stateless: stateless})
		must(t, writeBase(f, exampleChange()))
		gone := exampleChange().vips
		for v := range gone {
			gone[v] = ""
		}
		for range 2 { // what is gone already is no error
			must(t, f.write(change{vips: gone, removeStreams: []string{"web"}, removeSlots: []uint32{5000, 5001, 5002}}))
			must(t, f.removeAll())
		}
		if out := run(t, ns, "nft list ruleset; ip rule; ip -6 rule"); strings.Contains(out, "vipgate") || strings.Contains(out, "proto 179") {
			t.Errorf("left over:\n%s", out)
		}
	}
}

func TestTheModeOfConnectionTrackingChanges(t *testing.T) {
	ns := lab.NewNetNS(t)
	for _, stateless := range []bool{false, true, false} {
		f := openFabric(t, ns, Options{Stateless: stateless})
		c := exampleChange()
		c.streams[0].now = readAll(t, f).streams["web"]
		must(t, writeBase(f, c))
		got := readAll(t, f)
		if !got.base || !got.streams["web"].chain || !got.slots[5000].chain || len(got.vips) != 5 {
			t.Errorf("stateless %v: base %v, chain %v, target %+v, VIPs %v", stateless, got.base, got.streams["web"].chain, got.slots[5000], got.vips)
		}
		if out := run(t, ns, "nft list ruleset"); strings.Contains(out, "notrack comment") != stateless && strings.Contains(out, "notrack accept") != stateless {
			t.Errorf("stateless %v:\n%s", stateless, out)
		}
	}
}

func TestNamesOfOursThatAreSomebodyElsesAreTold(t *testing.T) {
	for object, setup := range map[string]string{
		"chain inet vipgate-lb prerouting": "add table inet vipgate-lb; add chain inet vipgate-lb prerouting { type filter hook forward priority 0; }",
		"set inet vipgate-lb vip4":         "add table inet vipgate-lb; add set inet vipgate-lb vip4 { type ipv4_addr; }",
	} {
		ns := lab.NewNetNS(t)
		run(t, ns, "nft '"+setup+"'")
		f := openFabric(t, ns, Options{})
		var foreign *foreignError
		if err := writeBase(f, exampleChange()); !errors.As(err, &foreign) || foreign.object != object {
			t.Errorf("writing over %s: %v", object, err)
		}
	}
	for object, setup := range map[string]string{
		"map inet vipgate-lb maglev4/web":                 "add map inet vipgate-lb maglev4/web { type ipv4_addr : mark; }",
		"chain inet vipgate-lb stream/web":                "add chain inet vipgate-lb stream/web { type filter hook forward priority 0; }",
		"element 20.0.0.1/32 of map inet vipgate-lb vip4": "add chain inet vipgate-lb x; add element inet vipgate-lb vip4 { 20.0.0.1 : goto x }",
	} {
		ns := lab.NewNetNS(t)
		f := openFabric(t, ns, Options{})
		must(t, writeBase(f, change{base: true}))
		run(t, ns, "nft '"+setup+"'")
		var foreign *foreignError
		if err := writeBase(f, exampleChange()); !errors.As(err, &foreign) || foreign.object != object {
			t.Errorf("writing over %s: %v", object, err)
		}
		if c := readAll(t, f); !c.base {
			t.Errorf("%s disturbs the base", object)
		}
	}
}

func TestOfManyRulesAndTablesThoseOfOthersAreTaken(t *testing.T) {
	ns := lab.NewNetNS(t)
	f := openFabric(t, ns, Options{})
	run(t, ns, "ip route add blackhole default table 5003; ip -6 rule add prio 7 lookup 5004; ip rule add prio 8 fwmark 5005 lookup main; ip rule add prio 9 fwmark 1 lookup main")
	got, err := f.takenAmong([]uint32{5002, 5003, 5004, 5005})
	must(t, err)
	if len(got) != 3 || got[5003] == "" || got[5004] == "" || got[5005] == "" {
		t.Errorf("taken are %v", got)
	}
}

func TestATargetBeyondTheNetworkIsNamed(t *testing.T) {
	pod, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(pod, "int0", net, "pod"))
	must(t, pod.Addr("int0", "172.16.0.1/24", "fd16::1/64"))
	f := openFabric(t, pod, Options{})
	must(t, writeBase(f, change{base: true}))
	slots := exampleSlots("web", 5000, 5001)
	slots[0].hops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.20.1.1"), netip.MustParseAddr("fd20::1")}
	slots[1].hops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.16.0.2"), netip.MustParseAddr("fd16::2")}
	failed := f.addWays(slots)
	if len(failed) != 2 || !strings.Contains(fmt.Sprint(failed[wayKey{5000, vip.IPv4}]), "172.20.1.1 is on no connected network") || !strings.Contains(fmt.Sprint(failed[wayKey{5000, vip.IPv6}]), "fd20::1 is on no connected network") {
		t.Errorf("failed: %v", failed)
	}
	if hop, err := f.way(5001, vip.IPv4); err != nil || hop != slots[1].hops[0] {
		t.Errorf("the other one's way leads to %s, %v", hop, err)
	}
	// A target that moves leaves nothing behind, and one that loses an address neither.
	slots[1].hops = [len(vip.Families)]netip.Addr{netip.MustParseAddr("172.16.0.3")}
	if failed := f.addWays(slots[1:]); len(failed) > 0 {
		t.Error(failed)
	}
	got, err := f.readWays([]uint32{5001})
	must(t, err)
	if s := got[5001]; s.hops != slots[1].hops || s.rules != [len(vip.Families)]bool{true, false} || s.blackhole != [len(vip.Families)]bool{true, false} {
		t.Errorf("after the move: %+v", s)
	}
}

func TestWatchTellsWhatHappens(t *testing.T) {
	ns, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "int0", net, "pod"))
	must(t, ns.Addr("int0", "172.16.0.1/24"))
	f := openFabric(t, ns, Options{})
	var w *watch
	must(t, ns.Do(func() (err error) {
		w, err = newWatch(Options{})
		return err
	}))
	defer func() { must(t, w.close()) }()
	w.ignore(f)
	wait := func(what string, ok func(news) bool) {
		t.Helper()
		deadline := time.After(patience)
		for {
			select {
			case <-w.changed:
				if ok(w.take()) {
					return
				}
			case <-w.failed:
				t.Fatalf("the watch failed: %v", w.err)
			case <-deadline:
				t.Fatalf("nothing was heard of: %s", what)
			}
		}
	}
	must(t, writeBase(f, change{base: true}))
	wait("a transaction", func(n news) bool {
		if n.ways {
			t.Error("our own rules are news")
		}
		return n.ruleset
	})
	run(t, ns, "ip rule del prio 90")
	wait("a rule that somebody deleted", func(n news) bool { return n.ways })
	run(t, ns, "ip route add blackhole default table 5007")
	wait("a route in a table that may be ours", func(n news) bool { return n.ways })
	run(t, ns, "ip route add blackhole 10.0.0.0/8 table 100; ip addr add 20.0.0.1/32 dev lo")
	wait("an address", func(n news) bool {
		if n.ways {
			t.Error("a route in somebody else's table is news")
		}
		return n.links
	})
	// Nobody answers there.
	must(t, ns.Sysctl("net.ipv4.neigh.int0.retrans_time_ms", "50"))
	must(t, ns.Do(func() error {
		c, err := gonet.Dial("udp", "172.16.0.9:9")
		if err != nil {
			return err
		}
		_, err = c.Write([]byte("hello"))
		return errors.Join(err, c.Close())
	}))
	wait("a neighbour that failed", func(n news) bool { return n.neighbours })
	s, err := f.surroundings()
	must(t, err)
	nine := netip.MustParseAddr("172.16.0.9")
	if _, failed := s.failed[nine]; !failed {
		t.Errorf("failed neighbours are %v", maps.Keys(s.failed))
	}
	if _, local := s.local[netip.MustParseAddr("20.0.0.1")]; !local {
		t.Errorf("local addresses are %v", s.local)
	}
	run(t, ns, "ip neigh replace 172.16.0.9 dev int0 lladdr 02:00:00:00:00:09 nud reachable")
	wait("a neighbour that came back", func(n news) bool { return n.neighbours })
	if s, err = f.surroundings(); err != nil || len(s.failed) > 0 {
		t.Errorf("failed neighbours are %v, %v", s.failed, err)
	}
	k, ok := s.leadsTo(nine)
	if !ok || k.name != "int0" || !k.up {
		t.Errorf("to %s leads %+v", nine, k)
	}
	run(t, ns, "ip link set int0 down")
	wait("a link that went down", func(n news) bool { return n.links && len(n.downed) > 0 })
	if s, err = f.surroundings(); err != nil {
		t.Fatal(err)
	}
	if k, ok := s.leadsTo(nine); !ok || k.up {
		t.Errorf("after the link went down %+v leads to %s", k, nine)
	}
}

func TestPreflightNamesWhatIsMissing(t *testing.T) {
	ns, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "int0", net, "pod"))
	must(t, lab.Veth(ns, "eth0", net, "pod2"))
	must(t, ns.Addr("int0", "172.16.0.1/24"))
	must(t, ns.Addr("eth0", "10.0.0.1/24"))
	good := map[string]string{
		"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.rp_filter": "0", "net.ipv4.conf.int0.rp_filter": "0",
		"net.ipv4.conf.eth0.rp_filter": "0", "net.ipv4.fib_multipath_hash_policy": "1", "net.ipv6.fib_multipath_hash_policy": "1",
		"net.ipv4.fwmark_reflect": "0", "net.ipv6.fwmark_reflect": "0",
	}
	for key, value := range good {
		must(t, ns.Sysctl(key, value))
	}
	look := func() map[string]Problem {
		found := map[string]Problem{}
		must(t, ns.Do(func() error {
			for _, p := range Preflight(Options{}) {
				found[p.Object] = p
			}
			return nil
		}))
		return found
	}
	if found := look(); len(found) > 0 {
		t.Fatalf("with all set: %v", found)
	}
	if out := run(t, ns, "nft list ruleset"); out != "" {
		t.Errorf("the look left something:\n%s", out)
	}
	for key, bad := range map[string]string{
		"net.ipv4.ip_forward": "0", "net.ipv6.conf.all.forwarding": "0", "net.ipv4.conf.int0.rp_filter": "1", "net.ipv4.fib_multipath_hash_policy": "0",
		"net.ipv6.fib_multipath_hash_policy": "0", "net.ipv4.fwmark_reflect": "1", "net.ipv6.fwmark_reflect": "1",
	} {
		must(t, ns.Sysctl(key, bad))
		found := look()
		p, ok := found[key]
		if !ok || !strings.Contains(p.Remedy, "sysctl -w ") || !strings.Contains(p.Remedy, key+"="+good[key]) {
			t.Errorf("%s = %s: %v", key, bad, found)
		}
		run(t, ns, p.Remedy)
		must(t, ns.Sysctl("net.ipv4.conf.int0.rp_filter", "0"))
		for key, value := range good {
			must(t, ns.Sysctl(key, value))
		}
	}
	// Loose filtering needs a route to the source; strict filtering is harmless where the
	// default route leads.
	must(t, ns.Sysctl("net.ipv4.conf.int0.rp_filter", "2"))
	if found := look(); len(found) != 1 {
		t.Errorf("loose filtering without a default route: %v", found)
	}
	run(t, ns, "ip route add default via 10.0.0.2")
	if found := look(); len(found) > 0 {
		t.Errorf("loose filtering with a default route: %v", found)
	}
	must(t, ns.Sysctl("net.ipv4.conf.eth0.rp_filter", "1"))
	if found := look(); len(found) > 0 {
		t.Errorf("strict filtering where the default route leads: %v", found)
	}
	must(t, ns.Sysctl("net.ipv4.conf.all.rp_filter", "1"))
	must(t, ns.Sysctl("net.ipv4.conf.int0.rp_filter", "0"))
	if found := look(); len(found) != 1 || found["net.ipv4.conf.int0.rp_filter"].Object == "" {
		t.Errorf("strict filtering everywhere: %v", found)
	}
}
