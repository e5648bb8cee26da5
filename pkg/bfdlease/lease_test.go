package bfdlease

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	gateway4 = netip.MustParseAddr("169.254.100.150")
	gateway6 = netip.MustParseAddr("fd00:100::150")
	other4   = netip.MustParseAddr("169.254.100.15")
)

// fixture is a running Lease in a namespace and the source of its orders.
type fixture struct {
	*Lease
	t      *testing.T
	ns     *lab.NetNS
	orders atomic.Pointer[Families]
	stop   func()
}

func start(t *testing.T, ns *lab.NetNS) *fixture {
	t.Helper()
	f := &fixture{Lease: New(slog.New(slog.DiscardHandler)), t: t, ns: ns}
	stopRun := ns.Background(t, f.Run)
	stopBeats := harness.Run(t, func(ctx context.Context) error {
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			if o := f.orders.Load(); o != nil {
				f.Attract(time.Now(), *o)
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return nil
			}
		}
	})
	f.stop = func() { stopBeats(); stopRun() }
	return f
}

func namespace(t *testing.T) *lab.NetNS {
	t.Helper()
	ns := lab.NewNetNS(t, lab.WithoutDAD)
	ns.Shell(t, "ip link set lo up; ip link add d0 type veth peer name d1; ip link set d0 up; ip link set d1 up; "+
		"ip addr add 169.254.100.1/24 dev d0; ip addr add fd00:100::1/64 dev d0 nodad")
	return ns
}

func (f *fixture) gateways(addresses ...netip.Addr) {
	f.t.Helper()
	harness.Must(f.t, f.Gateways(f.t.Context(), addresses))
}

// passes reports whether a packet leaves.
func passes(t *testing.T, ns *lab.NetNS, to netip.Addr, port uint16) bool {
	t.Helper()
	err := ns.Do(func() error {
		conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, port)))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.Write([]byte("x"))
		return err
	})
	if err != nil && !errors.Is(err, unix.EPERM) {
		t.Fatal(err)
	}
	return err == nil
}

func (f *fixture) state(ipv4, ipv6 bool) func() bool {
	return func() bool {
		return passes(f.t, f.ns, gateway4, controlPort) == ipv4 && passes(f.t, f.ns, gateway6, controlPort) == ipv6
	}
}

func holds(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		if !ok() {
			t.Fatalf("did not hold: %s", what)
		}
		<-time.After(10 * time.Millisecond)
	}
}

func TestLease(t *testing.T) {
	ns := namespace(t)
	f := start(t, ns)
	f.gateways(gateway4, gateway6)
	if !f.state(false, false)() {
		t.Error("packets leave without an order")
	}
	if !passes(t, ns, other4, controlPort) || !passes(t, ns, gateway4, controlPort+1) {
		t.Error("other packets are dropped")
	}
	f.orders.Store(&Families{true, false})
	await.True(t, "IPv4 passes", f.state(true, false))

	generation := func() (g uint32) {
		harness.Must(t, ns.Do(func() (err error) { g, err = f.version(); return err }))
		return g
	}
	before := generation()
	holds(t, Timeout+Interval, "refreshed lease", f.state(true, false))
	if after := generation(); after != before {
		t.Errorf("refreshing changed the ruleset: generation %d, before %d", after, before)
	}

	f.orders.Store(&Families{false, true})
	await.True(t, "order of IPv6 only", f.state(false, true))
	await.True(t, "settled", f.Settled)
	begin := time.Now()
	f.orders.Store(nil)
	await.True(t, "expiry of the old order", f.state(false, false))
	t.Logf("expired after %v", time.Since(begin))
	await.True(t, "state of the expired order", func() bool { return f.State().Load().Attract == Families{} })
	f.orders.Store(&Families{false, true})
	await.True(t, "another order", f.state(false, true))
	f.stop()
	if !f.state(false, false)() {
		t.Error("packets leave after Run")
	}
	harness.Check(t, ns.Do(func() error { return errors.Join(Cleanup(t.Context()), Cleanup(t.Context())) }))
	if out := ns.Shell(t, "nft list ruleset"); out != "" {
		t.Errorf("left after Cleanup: %s", out)
	}
}

// The kernel ends a lease that no process refreshes.
func TestExpiryInKernel(t *testing.T) {
	ns := namespace(t)
	c := content{gateways: []netip.Addr{gateway4}, attract: Families{true, true}, rest: 200 * time.Millisecond}
	harness.Must(t, ns.Do(func() error { return writeTable(c) }))
	if !passes(t, ns, gateway4, controlPort) {
		t.Error("dropped before the end of the lease")
	}
	await.True(t, "the end", func() bool { return !passes(t, ns, gateway4, controlPort) })
	refresh := func(c content) error { return ns.Do(func() error { return refreshTable(c) }) }
	forged := c
	forged.token[0]++
	if err := refresh(forged); err == nil || passes(t, ns, gateway4, controlPort) {
		t.Errorf("a wrong token was taken: %v", err)
	}
	if err := refresh(c); err != nil || !passes(t, ns, gateway4, controlPort) {
		t.Errorf("the token was refused: %v", err)
	}
	ns.Shell(t, "nft flush chain inet vipgate-bfd output")
	c.attract = Families{true, false} // one packet, which no answer to an earlier one shows to be sent
	if err := refresh(c); !errors.Is(err, errPassed) {
		t.Errorf("refreshed without the rule: %v", err)
	}
}

func TestTableIsCompared(t *testing.T) {
	ns := namespace(t)
	c := content{gateways: []netip.Addr{gateway4, gateway6}, attract: Families{true, false}, rest: Timeout}
	for damage, intact := range map[string]bool{
		"true": true, "nft add table inet other": true, "nft flush ruleset": false,
		"nft flush chain inet vipgate-bfd output": false, "nft add element inet vipgate-bfd attract '{ ipv6 }'": false,
		"nft delete element inet vipgate-bfd gateways6 '{ " + gateway6.String() + " }'": false,
	} {
		var same bool
		harness.Must(t, ns.Do(func() error { return writeTable(c) }))
		ns.Shell(t, damage)
		harness.Must(t, ns.Do(func() (err error) { same, err = New(slog.Default()).intact(c); return err }))
		if same != intact {
			t.Errorf("intact after %s: %t", damage, same)
		}
	}
}

func TestDriftIsRepaired(t *testing.T) {
	ns := namespace(t)
	f := start(t, ns)
	f.gateways(gateway4)
	dropped := func() bool { return !passes(t, ns, gateway4, controlPort) }
	for _, damage := range []string{
		"nft flush ruleset", "nft flush chain inet vipgate-bfd output", "nft flush set inet vipgate-bfd gateways4",
		"nft add element inet vipgate-bfd attract '{ ipv4 }'",
	} {
		ns.Shell(t, damage)
		if dropped() {
			t.Fatalf("no effect: %s", damage)
		}
		await.True(t, "repair after "+damage, dropped)
	}
	f.orders.Store(&Families{true, true})
	await.True(t, "packets pass", func() bool { return !dropped() })
	ns.Shell(t, "nft flush ruleset")
	await.True(t, "the table while it attracts",
		func() bool { return strings.Contains(ns.Shell(t, "nft list ruleset"), gateway4.String()) })
	f.orders.Store(&Families{})
	await.True(t, "packets dropped", dropped)
}

func TestTableOfAnotherForm(t *testing.T) {
	ns := namespace(t)
	ns.Shell(t, "nft add table inet vipgate-bfd; nft add set inet vipgate-bfd attract '{ type ipv4_addr; }'; "+
		"nft add chain inet vipgate-bfd output '{ type filter hook input priority 0; }'")
	f := start(t, ns)
	f.gateways(gateway4)
	if passes(t, ns, gateway4, controlPort) {
		t.Error("packets leave")
	}
	f.gateways()
	if out := ns.Shell(t, "nft list ruleset"); out != "" {
		t.Errorf("left without gateways: %s", out)
	}
	if !passes(t, ns, gateway4, controlPort) {
		t.Error("dropped without a static gateway")
	}
}

func TestWriteFails(t *testing.T) {
	ns := namespace(t)
	f := start(t, ns)
	f.gateways(gateway4)
	f.stop()
	broken := errors.New("broken")
	f.written, f.write = false, func(content) error { return broken }
	if err := f.apply(time.Now(), Families{true, true}); !errors.Is(err, broken) {
		t.Fatal(err)
	}
	if s := f.State().Load(); !errors.Is(s.Err, broken) || s.Attract != (Families{}) {
		t.Errorf("state %+v", s)
	}
	f.write = writeTable
	now := time.Now()
	f.Attract(now, Families{true, false})
	harness.Must(t, ns.Do(func() error { return f.apply(now, Families{true, false}) }))
	if s := f.State().Load(); s.Err != nil || fmt.Sprint(s.Attract) != "[true false]" || s.Since[0] != now {
		t.Errorf("state %+v", s)
	}
}

// Without gateways an order does not change the state. The last order applies to the first
// gateway.
func TestOrdersWithoutGateways(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(slog.New(slog.DiscardHandler))
		nothing := func(content) error { return nil }
		l.refresh, l.write, l.remove = nothing, nothing, func() error { return nil }
		l.version = func() (uint32, error) { return 1, nil }
		l.intact = func(content) (bool, error) { return true, nil }
		stop := harness.Run(t, l.Run)
		synctest.Wait()
		_, changed := l.State().Get()
		for _, o := range []Families{{true, true}, {}, {true, false}} {
			l.Attract(time.Now(), o)
			synctest.Wait()
			select {
			case <-changed:
				t.Fatalf("%v without gateways changed the state", o)
			default:
			}
			if !l.Settled() {
				t.Fatalf("%v is not settled without gateways", o)
			}
		}
		for i, want := range []struct {
			gateways []netip.Addr
			attract  Families
		}{
			{[]netip.Addr{gateway4}, Families{true, false}},
			{nil, Families{}},
			{[]netip.Addr{gateway4}, Families{true, false}},
		} {
			harness.Must(t, l.Gateways(t.Context(), want.gateways))
			s := l.State().Load()
			if s.Attract != want.attract || s.Since[0].IsZero() != (len(want.gateways) > 0) {
				t.Errorf("change %d of the gateways: state %+v", i, s)
			}
		}
		l.Attract(time.Now(), Families{})
		synctest.Wait()
		if s := l.State().Load(); s.Attract != (Families{}) || s.Since[0] != time.Now() {
			t.Errorf("after an order: state %+v", s)
		}
		stop()
	})
}
