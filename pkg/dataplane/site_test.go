package dataplane

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/fwstate"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

// site is a namespace for a plane, with a network of targets at eth1.
type site struct {
	t    testing.TB
	ns   *lab.NetNS
	dir  string
	peer *lab.NetNS
}

func newSite(t testing.TB) *site {
	t.Helper()
	s := &site{t: t, ns: lab.NewNetNS(t, lab.WithoutDAD), peer: lab.NewNetNS(t, lab.WithoutDAD), dir: t.TempDir()}
	for key, value := range map[string]string{
		"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.rp_filter": "0",
		"net.ipv4.conf.default.rp_filter":    "0",
		"net.ipv4.fib_multipath_hash_policy": "1", "net.ipv6.fib_multipath_hash_policy": "1",
	} {
		must(t, s.ns.Sysctl(key, value))
	}
	s.must(lab.Veth(s.ns, "eth1", s.peer, "peer"))
	for _, a := range []string{"10.1.0.1/24", "fd01::1/64"} {
		s.must(s.ns.IP("address", "add", a, "dev", "eth1", "nodad"))
	}
	for _, x := range []struct {
		ns  *lab.NetNS
		dev string
	}{{s.ns, "eth1"}, {s.peer, "peer"}} {
		s.must(x.ns.IP("link", "set", x.dev, "up"))
	}
	s.eventually("the link to be up", func() bool {
		return strings.Contains(s.sh("ip -br link show dev eth1"), " UP ") &&
			!strings.Contains(s.sh("ip -6 address show dev eth1"), "tentative")
	})
	return s
}

func (s *site) must(err error) {
	s.t.Helper()
	must(s.t, err)
}

// sh runs a command line in the plane's namespace.
func (s *site) sh(line string) string {
	s.t.Helper()
	return s.ns.Shell(s.t, line)
}

// number returns the fwmark of a target, from the kernel.
func (s *site) number(stream, target string) string {
	s.t.Helper()
	ruleset := s.sh("nft -s list table inet " + plan.TableName)
	m := regexp.MustCompile(`chain target/(\d+) \{\s+.*comment "` + regexp.QuoteMeta(stream+"/"+target) +
		`[ "]`).FindStringSubmatch(ruleset)
	if m == nil {
		s.t.Fatalf("no chain of %s/%s in\n%s", stream, target, ruleset)
	}
	return m[1]
}

// snapshot returns all objects of a plane in the kernel, without counters.
func (s *site) snapshot() string {
	s.t.Helper()
	return s.sh("nft -s list ruleset; ip rule; ip -6 rule; ip route show table all proto 179; " +
		"ip -6 route show table all proto 179")
}

// handles returns the handles of a target's chain and rules. They change when the objects are
// rebuilt.
func (s *site) handles(number string) string {
	return s.sh("nft -a -s list chain inet " + plan.TableName + " target/" + number)
}

func (s *site) options() Options {
	return Options{StateDir: s.dir, Log: slog.New(slog.NewTextHandler(s.t.Output(), nil))}
}

// running is a running Plane.
type running struct {
	*Plane
	site *site
	stop func()
}

// start runs a plane until the test ends or stop is called.
func (s *site) start(change ...func(*Options)) *running {
	s.t.Helper()
	o := s.options()
	for _, c := range change {
		c(&o)
	}
	p, err := New(o)
	s.must(err)
	return &running{Plane: p, site: s, stop: s.ns.Background(s.t, p.Run)}
}

func (r *running) wait(what string, ok func(plan.State) bool) plan.State {
	r.site.t.Helper()
	deadline := time.After(4 * patience) // a full map alone takes a busy machine half a minute
	for {
		s, changed := r.State().Get()
		if ok(s) {
			return s
		}
		select {
		case <-changed:
		case <-deadline:
			r.site.t.Fatalf("waited in vain for: %s; last state: %s\n%s", what, describeState(s), r.site.snapshot())
		}
	}
}

func describeState(s plan.State) string {
	var b strings.Builder
	fmt.Fprintf(&b, "revision %d, err %v, failures %d, VIPs %v, unreachable %v\n", s.Revision, s.Err, s.Failures, s.VIPs,
		s.Unreachable)
	for name, x := range s.Streams {
		fmt.Fprintf(&b, "stream %s: serving %v, problems %q\n", name, x.Serving, x.Problem)
	}
	fmt.Fprintf(&b, "drift %+v\nproblems %+v", s.Drift, s.Problems)
	return b.String()
}

// serves reports whether exactly these targets of a stream serve a family.
func serves(s plan.State, stream string, f vip.Family, names ...string) bool {
	x := s.Streams[stream]
	return x != nil && slices.Equal(slices.Sorted(maps.Keys(x.Serving[f])), names)
}

// configure sets the desired state and waits until it is applied.
func (r *running) configure(streams ...*plan.Stream) plan.State {
	r.site.t.Helper()
	w := desiredOf(streams...)
	r.Configure(w)
	return r.wait("a revision to be applied",
		func(s plan.State) bool { return s.Revision >= w.Revision && len(s.Problems) == 0 })
}

// eventually polls a condition of the kernel state.
func (s *site) eventually(what string, ok func() bool) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err := lab.Eventually(ctx, 10*time.Millisecond, func() error {
		if !ok() {
			return fmt.Errorf("not yet: %s", what)
		}
		return nil
	})
	s.must(err)
}

// siteTarget returns a target in the site's network; i is from 1 to 200.
func siteTarget(i int, roles ...plan.Role) plan.Target {
	t := plan.Target{Name: fmt.Sprintf("t%d", i), IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 10)})}}
	t.Roles[vip.IPv4] = roles[0]
	if len(roles) > 1 {
		t.IPs = append(t.IPs, netip.MustParseAddr(fmt.Sprintf("fd01::%x", i+10)))
		t.Roles[vip.IPv6] = roles[1]
	}
	return t
}

var siteMatch = []plan.Port{
	{Protocol: plan.TCP, Number: 80}, {Protocol: plan.TCP, Number: 443}, {Protocol: plan.UDP, Number: 53},
}

func siteStream(name string, vips []string, targets ...plan.Target) *plan.Stream {
	s := testStream(name, vips, targets...)
	s.Size, s.DrainTime, s.Match = 103, 0, siteMatch
	return s
}

var bothVIPs = []string{"20.0.0.1/32", "2000::1/128"}

func (s *site) has(t testing.TB, want ...string) {
	t.Helper()
	got := s.snapshot()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("no %q in\n%s", w, got)
		}
	}
}

func (s *site) lacks(t testing.TB, what ...string) {
	t.Helper()
	got := s.snapshot()
	for _, w := range what {
		if strings.Contains(got, w) {
			t.Errorf("%q in\n%s", w, got)
		}
	}
}

// tamperings lists changes by another process.
var tamperings = []struct {
	name, command, object string
	// gone is missing in a snapshot after the change.
	gone   string
	serves []string
}{
	{
		"rule", "ip rule del fwmark 5001/0xffffff lookup 5001", "rule fwmark 5001 lookup 5001 (IPv4)",
		"fwmark 0x1389/0xffffff lookup 5001\n",
		[]string{"t1"},
	},
	{
		"routes", "ip route flush table 5001", "route default via 10.1.0.12 table 5001 (IPv4)", "10.1.0.12 dev",
		[]string{"t1"},
	},
	{
		"route", "ip route del default via 10.1.0.12 table 5001", "route default via 10.1.0.12 table 5001 (IPv4)",
		"10.1.0.12 dev",
		[]string{"t1"},
	},
	{"blackhole", "ip route del blackhole default table 5001 metric 4294967295", "route blackhole default table 5001 " +
		"(IPv4)", "blackhole default table 5001 proto 179 metric 4294967295\n", []string{"t1", "t2"}},
	{
		"live element", "nft delete element inet vipgate-lb live4/a { 5001 }", "element 5001 of map live4/a", "\x00",
		[]string{"t1"},
	},
	{"target's rule", "nft flush chain inet vipgate-lb target/5001", "chain target/5001", `comment "a/t2`, []string{"t1"}},
	{
		"VIP", "nft delete element inet vipgate-lb vip4 { 20.0.0.1 }", "element 20.0.0.1/32 of map vip4", "20.0.0.1",
		[]string{"t1", "t2"},
	},
	{"entry", "nft delete element inet vipgate-lb maglev4/a { 7 }", "map maglev4/a", "\x00", []string{"t1", "t2"}},
	{"port", "nft delete element inet vipgate-lb match/a { tcp . 80 }", "set match/a", "tcp . 80", []string{"t1", "t2"}},
	{"all ports", "nft flush set inet vipgate-lb match/a", "set match/a", "tcp . 443", []string{"t1", "t2"}},
	{
		"rule and set of ports", "nft 'flush chain inet vipgate-lb stream/a; delete set inet vipgate-lb match/a'",
		"set match/a", "set match/a",
		[]string{"t1", "t2"},
	},
	{"stream's rules", "nft flush chain inet vipgate-lb stream/a", "chain stream/a", "jhash", []string{"t1", "t2"}},
	{"table", "nft delete table inet vipgate-lb", "table inet vipgate-lb", "table inet vipgate-lb", nil},
	{"ruleset", "nft flush ruleset", "table inet vipgate-lb", "table inet vipgate-lb", nil},
	{
		"goto", "ip rule del prio 90; ip -6 rule del prio 90", "policy rules of priority 90 and 92", "\n90:",
		[]string{"t1", "t2"},
	},
	{"no-op", "ip rule del prio 92", "policy rules of priority 90 and 92", "\x00", []string{"t1", "t2"}},
}

// sortedLines makes snapshots comparable: the kernel lists objects in the order of creation.
func sortedLines(s string) string {
	lines := strings.Split(s, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

var must = harness.Must

// openConn opens a kernel connection in a namespace.
func openConn(t testing.TB, ns *lab.NetNS, c fwstate.Config) *fwstate.Conn {
	t.Helper()
	var conn *fwstate.Conn
	must(t, ns.Do(func() (err error) {
		conn, err = fwstate.Dial(c)
		return err
	}))
	t.Cleanup(func() { must(t, conn.Close()) })
	return conn
}
