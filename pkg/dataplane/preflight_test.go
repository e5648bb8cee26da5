package dataplane

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/test/lab"
)

// The plane's first rule makes packets without a mark skip to its third rule. Rules of
// another process in between, such as a frontend's, would be bypassed.
func TestPreflightRefusesForeignRulesBetween(t *testing.T) {
	ns := lab.NewNetNS(t)
	ns.Shell(t, "ip rule add fwmark 0x01000000/0xff000000 lookup 4096 priority 100; ip -6 rule add from all lookup 4097 "+
		"priority 101")
	for priority, want := range map[int]string{97: "", 98: "", 99: "ipv4", 100: "ipv4 ipv6", 101: "ipv6", 102: ""} {
		var found []string
		must(t, ns.Do(func() error {
			for _, p := range Preflight(Options{Config: Config{Priority: priority}}) {
				if family, _, ok := strings.Cut(p.Object, " policy rules of priority"); ok && p.Remedy != "" {
					found = append(found, family)
				}
			}
			return nil
		}))
		if got := strings.Join(found, " "); got != want {
			t.Errorf("priority %d: %q, want %q", priority, got, want)
		}
	}

	// The plane's own rules do not prevent the next start.
	o := Options{Config: Config{Priority: 200}}
	f := openConn(t, ns, o.Config)
	must(t, f.Write(plan.Change{Base: true}))
	must(t, ns.Do(func() error {
		for _, p := range Preflight(o) {
			if strings.Contains(p.Object, "priority") {
				t.Errorf("%+v", p)
			}
		}
		return nil
	}))
}

// Wrong kernel parameters are reported with their remedy. They do not prevent the start of lb.
func TestWrongSysctls(t *testing.T) {
	ns, net := lab.NewNetNS(t), lab.NewNetNS(t)
	must(t, lab.Veth(ns, "int0", net, "pod"))
	must(t, lab.Veth(ns, "eth0", net, "pod2"))
	must(t, ns.Addr("int0", "172.16.0.1/24"))
	must(t, ns.Addr("eth0", "10.0.0.1/24"))
	good := map[string]string{
		"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.rp_filter": "0",
		"net.ipv4.conf.int0.rp_filter": "0",
		"net.ipv4.conf.eth0.rp_filter": "0", "net.ipv4.fib_multipath_hash_policy": "1",
		"net.ipv6.fib_multipath_hash_policy": "1",
		"net.ipv4.fwmark_reflect":            "0", "net.ipv6.fwmark_reflect": "0",
		"net.netfilter.nf_conntrack_tcp_be_liberal": "1",
	}
	for key, value := range good {
		must(t, ns.Sysctl(key, value))
	}
	look := func() map[string]Problem {
		found := map[string]Problem{}
		must(t, ns.Do(func() error {
			conn, err := fwstate.Dial(Config{}.WithDefaults())
			if err != nil {
				return err
			}
			for _, p := range sysctlProblems(conn) {
				found[p.Object] = p.Problem
			}
			for _, p := range Advice(Options{}) {
				found[p.Object] = p
			}
			if problems := Preflight(Options{}); len(problems) > 0 {
				t.Errorf("refuses to start: %v", problems)
			}
			return conn.Close()
		}))
		return found
	}
	if found := look(); len(found) > 0 {
		t.Fatalf("with all set: %v", found)
	}
	if out := ns.Shell(t, "nft list ruleset"); out != "" {
		t.Errorf("the look left something:\n%s", out)
	}
	for key, bad := range map[string]string{
		"net.ipv4.ip_forward": "0", "net.ipv6.conf.all.forwarding": "0", "net.ipv4.conf.int0.rp_filter": "1",
		"net.ipv4.fib_multipath_hash_policy": "0",
		"net.ipv6.fib_multipath_hash_policy": "0", "net.ipv4.fwmark_reflect": "1", "net.ipv6.fwmark_reflect": "1",
		"net.netfilter.nf_conntrack_tcp_be_liberal": "0",
	} {
		must(t, ns.Sysctl(key, bad))
		found := look()
		p, ok := found[key]
		if !ok || !strings.Contains(p.Remedy, "sysctl -w ") || !strings.Contains(p.Remedy, key+"="+good[key]) {
			t.Errorf("%s = %s: %v", key, bad, found)
		}
		ns.Shell(t, p.Remedy)
		must(t, ns.Sysctl("net.ipv4.conf.int0.rp_filter", "0"))
		for key, value := range good {
			must(t, ns.Sysctl(key, value))
		}
	}
	// Loose filtering needs a route to the source; strict filtering is harmless on the interface
	// of the default route.
	must(t, ns.Sysctl("net.ipv4.conf.int0.rp_filter", "2"))
	if found := look(); len(found) != 1 {
		t.Errorf("loose filtering without a default route: %v", found)
	}
	ns.Shell(t, "ip route add default via 10.0.0.2")
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

// Only a sysctl that drops packets withholds the VIPs of its family.
func TestSysctlsThatDropWithhold(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p := s.start()
	p.configure(siteStream("a", bothVIPs, siteTarget(1, plan.Serving, plan.Serving)))
	for key, want := range map[string][2]bool{
		"net.ipv4.ip_forward": {true, false}, "net.ipv6.conf.all.forwarding": {false, true},
		"net.ipv4.fib_multipath_hash_policy": {}, "net.ipv6.fib_multipath_hash_policy": {},
	} {
		must(t, s.ns.Sysctl(key, "0"))
		p.wait(key+" = 0", func(s plan.State) bool {
			return len(s.Problems) > 0 && s.Problems[0].Object == key &&
				want == [2]bool{s.Withheld[0] != "", s.Withheld[1] != ""}
		})
		must(t, s.ns.Sysctl(key, "1"))
		p.wait(key+" = 1", func(s plan.State) bool { return len(s.Problems) == 0 && s.Withheld == [2]string{} })
	}
}
