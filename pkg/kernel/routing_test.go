package kernel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/pkg/nft"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/task"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/lab"
)

var _ task.Task = (*Routing)(nil)

// state returns all kernel state that this package may change, as ip and nft print it.
func state(t testing.TB, ns *lab.NetNS) string {
	t.Helper()
	return ns.Shell(t, "ip rule; ip -6 rule; ip -4 route show table all; ip -6 route show table all; nft -a list ruleset")
}

func TestBaseBeforeConfigure(t *testing.T) {
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
			t.Errorf("%q occurs %d times, want %d", what, got, n)
		}
	}
	if t.Failed() {
		t.Log(s)
	}
	if c := r.Confirmed().Load(); len(c.VIPs) != 0 || c.Err != nil {
		t.Errorf("confirmed without a configuration: %+v", c)
	}
}

// onRecord is a handler of logs that calls a function with each message.
type onRecord struct {
	slog.Handler
	do func(message string)
}

func (h onRecord) Handle(ctx context.Context, r slog.Record) error {
	h.do(r.Message)
	return h.Handler.Handle(ctx, r)
}

func (h onRecord) WithAttrs(a []slog.Attr) slog.Handler {
	return onRecord{h.Handler.WithAttrs(a), h.do}
}

// A VIP is not confirmed any more when the kernel loses its source routing: it may be configured
// again while it is removed.
func TestConfirmationEndsBeforeRemoval(t *testing.T) {
	ns, o := lab.NewNetNS(t), testOptions(t)
	both := vips("20.0.0.1/32", "20.0.0.2/32")
	var r *Routing
	var checked, late atomic.Int32
	o.Log = slog.New(onRecord{o.Log.Handler(), func(message string) {
		if message == "VIP set updated" { // and its new content is not yet published
			checked.Add(1)
			if desired, _ := r.desired.Get(); len(*desired) == 1 && r.Confirmed().Load().VIPs.Has(both[1]) {
				late.Add(1)
			}
		}
	}})
	r = New(o)
	running := startRouting(t, ns, r)
	for range 2 {
		r.Configure(both)
		running.waitConfirmed(t, both...)
		before := checked.Load()
		r.Configure(both[:1])
		await.True(t, "the removal", func() bool { return checked.Load() > before })
		running.waitConfirmed(t, both[:1]...)
	}
	if n := late.Load(); n > 0 {
		t.Errorf("a VIP was still confirmed after its removal, %d times", n)
	}
}

func TestOverlappingAndAdjacentVIPs(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	for _, list := range [][]vip.VIP{
		vips("20.0.0.1/32", "20.0.0.0/24", "20.0.0.255/32", "20.0.1.0/32", "2000::/64", "2000::5/128", "216.0.0.0/5"),
		vips("20.0.0.1/32", "20.0.0.2/32", "20.0.0.3/32", "2000::1/128", "2000::2/128"),
		vips("20.0.0.2/32", "20.0.0.0/31", "2000::/126"),
		vips("20.0.0.0/8", "20.0.0.0/31", "2000::/16"),
		vips("20.0.0.1/32"),
		nil,
		vips("2000::1/128"),
	} {
		r.Configure(list)
		r.waitConfirmed(t, list...)
		got := ns.Shell(t, "nft -j list ruleset")
		for _, v := range list {
			want := fmt.Sprintf("%q", v.Prefix().Addr())
			if covered := slices.ContainsFunc(list,
				func(w vip.VIP) bool {
					return w != v && w.Overlaps(v) && w.Prefix().Bits() < v.Prefix().Bits()
				}); !covered && !strings.Contains(got, want) {
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
	await.True(t, "the removal", func() bool { return generationIn(t, ns) != before })
	if got := generationIn(t, ns); got != before+1 {
		t.Errorf("one VIP less wrote %d transactions", got-before)
	}
	for _, r := range []*running{first, second} {
		if c := r.Confirmed().Load(); c.Repairs != 0 || c.Failures != 0 {
			t.Errorf("own changes were taken for drift: %+v", c)
		}
	}
}

func generationIn(t *testing.T, ns *lab.NetNS) (n uint32) {
	t.Helper()
	must(t, ns.Do(func() (err error) {
		conn, err := nft.Dial()
		if err != nil {
			return err
		}
		n, err = conn.Generation()
		return errors.Join(err, conn.Close())
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
	// From many hosts to the prefix around them and back: one transaction each, larger than a
	// batch.
	wide := vips("20.0.0.0/16", "2000::/64")
	begin = time.Now()
	r.Configure(wide)
	r.waitConfirmed(t, wide...)
	r.Configure(many)
	r.waitConfirmed(t, many...)
	t.Logf("swapped for two prefixes and back after %v", time.Since(begin))
}

// startQuiet starts a Routing that finds the desired state installed, so that no notification of
// its changes wakes it.
func startQuiet(t *testing.T, ns *lab.NetNS, o Options, list []vip.VIP) *running {
	t.Helper()
	first := start(t, ns, o)
	first.Configure(list)
	first.waitConfirmed(t, list...)
	first.stop()
	r := start(t, ns, o)
	r.Configure(list)
	r.waitConfirmed(t, list...)
	return r
}

func TestDriftIsRepaired(t *testing.T) {
	list := vips("20.0.0.1/32", "20.0.0.2/32", "2000::1/128", "2000::2/128")
	for _, tt := range []struct{ name, damage string }{
		{"element", "nft delete element inet vipgate vip4 { 20.0.0.1 }"},
		{"all elements", "nft flush set inet vipgate vip6"},
		{"foreign element", "nft add element inet vipgate vip4 { 30.0.0.0/8 }"},
		{"foreign rule in chain", "nft insert rule inet vipgate output accept"},
		{"rules of a chain", "nft flush chain inet vipgate prerouting"},
		{"as many other rules", "nft 'flush chain inet vipgate output; " +
			"add rule inet vipgate output accept; add rule inet vipgate output accept'"},
		{"chain", "nft 'flush chain inet vipgate output; delete chain inet vipgate output'"},
		{
			"chain of another kind",
			"nft 'delete chain inet vipgate output; add chain inet vipgate output { type filter hook output priority 0; }'",
		},
		{"policy drop", "nft 'chain inet vipgate prerouting { policy drop; }'"},
		{
			"set of another kind",
			"nft 'delete table inet vipgate; add table inet vipgate; add set inet vipgate vip4 { type ipv4_addr; }'",
		},
		{"dormant table", "nft 'add table inet vipgate { flags dormant; }'"},
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
			o.checkInterval = time.Hour // the kernel's acknowledgment must suffice
			r := startQuiet(t, ns, o, list)
			// Handles and the order of lists change; the rest must not.
			before := normalized(t, ns)
			ns.Shell(t, tt.damage)
			r.waitFor(t, "a repair", func(c Confirmed) bool { return c.Repairs > 0 })
			var after string
			defer func() {
				if t.Failed() {
					t.Logf("before:\n%s\nafter:\n%s", before, after)
				}
			}()
			await.True(t, "everything as before", func() bool {
				after = normalized(t, ns)
				return after == before
			})
			r.waitConfirmed(t, list...)
		})
	}
}

func TestIrreparableSetIsReplaced(t *testing.T) {
	ns := lab.NewNetNS(t)
	r := start(t, ns, testOptions(t))
	list := vips("20.0.0.1/32", "20.0.0.2/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	// An element without an interval end. nft never adds one, but the kernel accepts it.
	must(t, ns.Do(func() error {
		conn, err := nft.Dial()
		if err != nil {
			return err
		}
		transaction := nft.Transaction{Table: inet}
		transaction.AddElements("vip4", []nft.Element{{Key: []byte{10, 0, 0, 1}}})
		return errors.Join(conn.Commit(&transaction, nil), conn.Close())
	}))
	await.True(t, "the foreign element gone",
		func() bool { return !strings.Contains(ns.Shell(t, "nft list set inet vipgate vip4"), "10.0.0.1") })
	r.waitConfirmed(t, list...)
}

func TestUnreportedDriftIsRepaired(t *testing.T) {
	ns := lab.NewNetNS(t)
	o := testOptions(t)
	o.checkInterval = 50 * time.Millisecond
	unsubscribed := New(o)
	unsubscribed.listen = func(Options) (*watch, error) { return &watch{Listener: rtnetlink.NewListener()}, nil }
	r := startRouting(t, ns, unsubscribed)
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	for i, damage := range []string{
		"nft delete table inet vipgate", "ip rule del priority 100",
		"ip -6 route flush table 4097",
	} {
		before := normalized(t, ns)
		ns.Shell(t, damage)
		r.waitFor(t, "a repair after "+damage, func(c Confirmed) bool { return c.Repairs > i })
		await.True(t, "everything as before", func() bool { return normalized(t, ns) == before })
		r.waitConfirmed(t, list...)
	}
}

func TestEndedListenerIsReplaced(t *testing.T) {
	ns := lab.NewNetNS(t)
	o := testOptions(t)
	o.checkInterval = time.Hour
	broken := New(o)
	var listens atomic.Int32
	broken.listen = func(o Options) (*watch, error) {
		if listens.Add(1) > 2 {
			return newWatch(o)
		}
		w := &watch{Listener: rtnetlink.NewListener()}
		// It cannot receive from a socket that is closed.
		return w, w.Listen("broken", rtnetlink.Subscription{Protocol: unix.NETLINK_ROUTE, Prepare: (*netlink.Conn).Close})
	}
	r := startRouting(t, ns, broken)
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	await.True(t, "the third listener", func() bool { return listens.Load() == 3 })
	// Changes before the new subscription may be missed.
	await.True(t, "a repair", func() bool {
		ns.Shell(t, "nft flush ruleset")
		return r.Confirmed().Load().Repairs > 0
	})
	r.waitConfirmed(t, list...)
}

func TestIPv6DisabledBySysctl(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, ns.Sysctl("net.ipv6.conf.all.disable_ipv6", "1"))
	r := start(t, ns, testOptions(t))
	r.waitReady(t)
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
}

func TestKernelWithoutIPv6ServesIPv4(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, ns.Do(func() error {
		o := testOptions(t).withDefaults()
		p := newReconciler(o)
		p.ensurePolicy = func(f vip.Family) (bool, error) {
			if f == vip.IPv6 {
				return false, fmt.Errorf("list rules: %w", unix.EAFNOSUPPORT)
			}
			return p.policy.ensure(f)
		}
		only4, both := vip.NewSet(vips("20.0.0.1/32")...), vip.NewSet(vips("20.0.0.1/32", "2000::1/128")...)
		if x := p.reconcile(&only4); x.err != nil || !x.base || !x.vips.Equal(only4) {
			t.Errorf("with IPv4 VIPs only: %+v", x)
		}
		if x := p.reconcile(&both); x.err == nil || !strings.Contains(x.err.Error(), "no ipv6") || !x.base ||
			!x.vips.Equal(only4) {
			t.Errorf("with an IPv6 VIP: %+v", x)
		}
		return nil
	}))
}

// normalized returns state without handles, in sorted order.
func normalized(t *testing.T, ns *lab.NetNS) string {
	t.Helper()
	lines := strings.Split(ns.Shell(t,
		"ip rule; ip -6 rule; ip route show table 4097; ip -6 route show table 4097; nft list ruleset"), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func TestFamiliesFailIndependently(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, lab.Veth(ns, "d0", lab.NewNetNS(t), "d1"))
	r := start(t, ns, testOptions(t))
	list := vips("20.0.0.1/32", "2000::1/128")
	r.Configure(list)
	r.waitConfirmed(t, list...)
	// A way out of the blackhole's table, which another process owns.
	ns.Shell(t, "ip -6 route add 2001:db8::/32 dev d0 table 4097")
	c := r.waitFor(t, "IPv6 unconfirmed", func(c Confirmed) bool { return c.VIPs.Equal(vip.NewSet(list[0])) })
	if c.Err == nil || !strings.Contains(c.Err.Error(), "2001:db8::/32") {
		t.Errorf("the error names no cause: %v", c.Err)
	}
	// The same for IPv4, and the way out ends with its interface.
	ns.Shell(t, "ip -6 route del 2001:db8::/32 dev d0 table 4097; ip route add 198.51.100.0/24 dev d0 table 4097")
	r.waitFor(t, "IPv4 unconfirmed", func(c Confirmed) bool { return c.VIPs.Equal(vip.NewSet(list[1])) })
	must(t, ns.IP("link", "set", "d0", "down"))
	r.waitConfirmed(t, list...)
}

func TestUnreadableKernelKeepsVIPs(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, ns.Do(func() error {
		o := testOptions(t).withDefaults()
		p := newReconciler(o)
		now := time.Now()
		p.now = func() time.Time { return now }
		list := vip.NewSet(vips("20.0.0.1/32", "2000::1/128")...)
		if x := p.reconcile(&list); x.err != nil || !x.vips.Equal(list) {
			t.Errorf("at first: %+v", x)
		}
		cause := errors.New("blind")
		p.table.generation = func(*nft.Conn) (uint32, error) { return 0, cause }
		now = now.Add(unreadableLimit - time.Millisecond)
		more := vip.NewSet(append(list.Sorted(), vips("20.0.0.2/32")...)...)
		if x := p.reconcile(&more); !errors.Is(x.err, cause) || !x.vips.Equal(list) {
			t.Errorf("blind for a while: %+v", x)
		}
		now = now.Add(time.Millisecond)
		if x := p.reconcile(&more); !errors.Is(x.err, cause) || len(x.vips) != 0 {
			t.Errorf("blind for long: %+v", x)
		}
		p.table.generation = (*nft.Conn).Generation
		if x := p.reconcile(&more); x.err != nil || !x.vips.Equal(more) {
			t.Errorf("seeing again: %+v", x)
		}
		return nil
	}))
}

// A set that cannot be read, such as a leftover with too many elements, does not prevent the
// installation of the desired content.
func TestUnreadableTableIsReplaced(t *testing.T) {
	ns := lab.NewNetNS(t)
	must(t, ns.Do(func() error {
		o := testOptions(t).withDefaults()
		p := newReconciler(o)
		many, few := vip.NewSet(manyVIPs(100)...), vip.NewSet(vips("30.0.0.1/32", "3000::1/128")...)
		p.reconcile(&many)
		cause := errors.New("i/o timeout")
		p.table.generation = func(*nft.Conn) (uint32, error) { return 0, cause }
		if x := p.reconcile(&few); !errors.Is(x.err, cause) {
			t.Errorf("unreadable: %v", x.err)
		}
		before := generationIn(t, ns)
		p.reconcile(&few)
		if after := generationIn(t, ns); after != before {
			t.Errorf("the same content was written again: %d transactions", after-before)
		}
		p.table.generation = (*nft.Conn).Generation
		if x := p.reconcile(&few); x.err != nil || !x.vips.Equal(few) {
			t.Errorf("readable again: %+v", x)
		}
		if after := generationIn(t, ns); after != before {
			t.Errorf("the table was not replaced while it could not be read")
		}
		return nil
	}))
}

func BenchmarkQuietPass(b *testing.B) {
	for _, n := range []int{1, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			ns := lab.NewNetNS(b)
			must(b, ns.Do(func() error {
				o := testOptions(b).withDefaults()
				p := newReconciler(o)
				list := vip.NewSet(manyVIPs(n)...)
				p.reconcile(&list)
				for b.Loop() {
					if x := p.reconcile(&list); x.err != nil {
						return x.err
					}
				}
				return nil
			}))
		})
	}
}

// Source routing is overdue while a call in its loop blocks, but not while the loop waits.
func TestHungRoutingIsOverdue(t *testing.T) {
	ns := lab.NewNetNS(t)
	hung := New(testOptions(t))
	hang := make(chan struct{})
	hung.listen = func(o Options) (*watch, error) {
		<-hang
		return newWatch(o)
	}
	r := startRouting(t, ns, hung)
	await.True(t, "an overdue loop", func() bool { return r.Overdue() > 100*time.Millisecond })
	close(hang)
	<-r.Ready()
	await.True(t, "a loop that waits", func() bool { return r.Overdue() == 0 })
}
