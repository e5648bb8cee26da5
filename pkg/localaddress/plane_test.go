package localaddress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/rtnetlink"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

const vip4, vip6 = "20.0.0.1/32", "2000::1/128"

// running is a plane that runs in a namespace, until stop.
type running struct {
	*Plane
	t    *testing.T
	ns   *lab.NetNS
	stop func()
}

func run(t *testing.T, ns *lab.NetNS, link string) *running {
	t.Helper()
	r := &running{Plane: New(link, slog.New(slog.DiscardHandler)), t: t, ns: ns}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- ns.Do(func() error { return r.Run(ctx) }) }()
	r.stop = func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		done <- context.Canceled
	}
	t.Cleanup(func() { r.stop() })
	<-r.Ready()
	return r
}

// desire sets a stream with both VIPs and one target for both families.
func (r *running) desire(revision uint64, role plan.Role, vips ...string) {
	stream := &plan.Stream{Name: "api", Targets: []plan.Target{{
		Name: "self", IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()},
		Roles: [...]plan.Role{role, role},
	}}}
	for _, text := range vips {
		stream.VIPs = append(stream.VIPs, vip.Require(text))
	}
	r.Configure(&plan.Desired{Revision: revision, Streams: map[string]*plan.Stream{"api": stream}})
}

// wait waits until the confirmed state has exactly the VIPs, at the revision.
func (r *running) wait(revision uint64, vips ...string) plan.State {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	err := r.State().Wait(ctx, func(s plan.State) bool {
		return s.Revision == revision && len(s.VIPs) == len(vips) &&
			!slices.ContainsFunc(vips, func(v string) bool { return s.VIPs[vip.Require(v)] != "api" })
	})
	state := r.State().Load()
	if err != nil {
		r.t.Fatalf("got %+v, want revision %d with %v", state, revision, vips)
	}
	return state
}

// kernelHas fails unless the addresses exist, and no other of the test's.
func kernelHas(t *testing.T, ns *lab.NetNS, link string, want ...string) {
	t.Helper()
	out := ns.Shell(t, "ip -o address show dev "+link)
	for _, a := range []string{vip4, vip6} {
		if got := strings.Contains(out, " "+a+" "); got != slices.Contains(want, a) {
			t.Errorf("address %s: %v, want %v in\n%s", a, got, want, out)
		}
	}
}

func TestAddressesFollowTarget(t *testing.T) {
	t.Parallel()
	ns := lab.NewNetNS(t)
	r := run(t, ns, "lo")
	r.Configure(&plan.Desired{RoutesOnly: true})
	r.desire(1, plan.Unknown, vip4, vip6)
	r.wait(1)
	kernelHas(t, ns, "lo")
	r.desire(2, plan.Serving, vip4, vip6)
	state := r.wait(2, vip4, vip6)
	if !state.Serves("api", vip.IPv6, "self") {
		t.Errorf("got %+v", state)
	}
	kernelHas(t, ns, "lo", vip4, vip6)
	// No packet but a reply has a VIP as its source, and the main table has no route to one.
	if out := ns.Shell(t, "ip -o address show dev lo"); !strings.Contains(out, "scope host noprefixroute lo") ||
		!strings.Contains(out, "nodad deprecated noprefixroute") || strings.Contains(out, "tentative") {
		t.Errorf("got %s", out)
	}
	out := ns.Shell(t, "ip route show; ip -6 route show")
	if strings.Contains(out, "20.0.0.1") || strings.Contains(out, "2000::1") {
		t.Errorf("got %s", out)
	}
	r.desire(3, plan.Unknown, vip4, vip6) // a target without a verdict keeps its state
	r.wait(3, vip4, vip6)
	r.desire(4, plan.Serving, vip6)
	r.wait(4, vip6)
	kernelHas(t, ns, "lo", vip6)
	r.desire(5, plan.Down, vip4, vip6)
	r.wait(5)
	kernelHas(t, ns, "lo")
}

// A comparison of many VIPs with the addresses costs little more than reading these.
func TestComparisonOfManyVIPs(t *testing.T) {
	ns := lab.NewNetNS(t)
	plane := New("lo", slog.New(slog.DiscardHandler))
	target := plan.Target{Name: "self", Roles: [...]plan.Role{plan.Serving, plan.Serving}}
	stream := &plan.Stream{Name: "api", Targets: []plan.Target{target}}
	address := netip.MustParseAddr("20.0.0.1")
	for range 12_000 {
		stream.VIPs = append(stream.VIPs, vip.Require(address.String()+"/32"))
		address = address.Next()
	}
	desired := &plan.Desired{Revision: 1, Streams: map[string]*plan.Stream{"api": stream}}
	fastest := func(do func() error) (fastest time.Duration) {
		for range 3 {
			began := time.Now()
			harness.Must(t, do())
			if taken := time.Since(began); fastest == 0 || taken < fastest {
				fastest = taken
			}
		}
		return fastest
	}
	harness.Must(t, ns.Do(func() error {
		defer func() { harness.Must(t, plane.conn.Close()) }()
		apply := func() error {
			next := plan.State{VIPs: map[vip.VIP]string{}, Streams: map[string]*plan.StreamState{}}
			if err := plane.apply(desired, &plan.State{}, &next); err != nil || len(next.VIPs) == len(stream.VIPs) {
				return err
			}
			return fmt.Errorf("%d of %d VIPs are confirmed", len(next.VIPs), len(stream.VIPs))
		}
		harness.Must(t, apply()) // adds the addresses
		read := fastest(func() error { _, err := plane.read(); return err })
		if compared := fastest(apply); compared > 6*read {
			t.Errorf("a read takes %v, with the comparison %v", read, compared)
		}
		return nil
	}))
}

func TestRemovedAddressReturns(t *testing.T) {
	t.Parallel()
	ns := lab.NewNetNS(t)
	r := run(t, ns, "lo")
	r.desire(1, plan.Serving, vip4, vip6)
	r.wait(1, vip4, vip6)
	ns.Shell(t, "ip address del 20.0.0.1/32 dev lo; ip -6 address del 2000::1/128 dev lo")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := r.State().Wait(ctx, func(s plan.State) bool { return s.Repairs == 2 }); err != nil {
		t.Fatalf("got %+v", r.State().Load())
	}
	r.wait(1, vip4, vip6)
	kernelHas(t, ns, "lo", vip4, vip6)
}

func TestForeignAddressStays(t *testing.T) {
	t.Parallel()
	ns := lab.NewNetNS(t)
	ns.Shell(t, "ip address add 20.0.0.1/32 dev lo")
	r := run(t, ns, "lo")
	r.desire(1, plan.Serving, vip4, vip6)
	r.wait(1, vip4, vip6)
	r.desire(2, plan.Down, vip4, vip6)
	r.wait(2)
	kernelHas(t, ns, "lo", vip4)
	r.desire(3, plan.Serving, vip4, vip6)
	r.wait(3, vip4, vip6)
	r.stop()
	kernelHas(t, ns, "lo", vip4)
}

// A killed process leaves its addresses. The next one adopts those that it wants, and removes
// the rest, also from an interface that its flag no longer names; a stop removes all.
func TestNextProcessAdoptsAddresses(t *testing.T) {
	t.Parallel()
	ns := lab.NewNetNS(t)
	ns.Shell(t, "ip link add vips type veth peer name other; ip link set vips up")
	add := func(link, address string) {
		t.Helper()
		harness.Must(t, ns.Do(func() error {
			conn, err := rtnetlink.Dial()
			if err != nil {
				return err
			}
			defer conn.Close()
			links, err := conn.Links()
			i := slices.IndexFunc(links, func(l rtnetlink.Link) bool { return l.Name == link })
			own := rtnetlink.HostAddress(links[i].Index, netip.MustParsePrefix(address).Addr())
			return errors.Join(err, conn.Apply(own.Add()))
		}))
	}
	add("lo", vip4)
	add("lo", vip6)
	add("vips", vip4)
	r := run(t, ns, "vips")
	kernelHas(t, ns, "lo", vip4, vip6) // nothing is removed before the first desired state
	r.desire(1, plan.Serving, vip4)
	r.wait(1, vip4)
	kernelHas(t, ns, "lo")
	kernelHas(t, ns, "vips", vip4)
	r.stop()
	kernelHas(t, ns, "vips")
}

func TestUnusableInterface(t *testing.T) {
	t.Parallel()
	ns := lab.NewNetNS(t)
	r := run(t, ns, "vips")
	problem := func(detail string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := r.State().Wait(ctx, func(s plan.State) bool {
			return len(s.VIPs) == 0 && len(s.Problems) == 1 && s.Problems[0].Detail == detail && len(s.Problems[0].VIPs) == 2
		}); err != nil {
			t.Fatalf("got %+v, want %s", r.State().Load(), detail)
		}
	}
	r.desire(1, plan.Serving, vip4, vip6)
	problem("does not exist")
	ns.Shell(t, "ip link add vips type veth peer name other")
	problem("is down")
	ns.Shell(t, "ip link set vips up")
	if state := r.wait(1, vip4, vip6); len(state.Problems) > 0 {
		t.Errorf("got %+v", state.Problems)
	}
	ns.Shell(t, "ip link set vips down")
	problem("is down")
	ns.Shell(t, "ip link del vips")
	problem("does not exist")
}

func TestPrefixIsRefused(t *testing.T) {
	t.Parallel()
	r := run(t, lab.NewNetNS(t), "lo")
	r.desire(1, plan.Serving, vip4, "30.0.0.0/24")
	state := r.wait(1, vip4)
	if len(state.Problems) != 1 || !strings.Contains(state.Problems[0].Detail, "is a prefix") {
		t.Errorf("got %+v", state.Problems)
	}
}
