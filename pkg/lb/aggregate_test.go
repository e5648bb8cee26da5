package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/target"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	vipA = vip.Require("20.0.0.1/32")
	vipB = vip.Require("20.0.0.2/32")
	vip6 = vip.Require("2000::1/128")
)

// rig is an aggregate with two streams that share vipA.
type rig struct {
	t *testing.T
	a *aggregate
}

func targets(n int) []trench.Target {
	var list []trench.Target
	for i := range n {
		list = append(list, trench.Target{Name: fmt.Sprintf("t%d", i), IPs: []netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("172.16.0.%d", i+1)), netip.MustParseAddr(fmt.Sprintf("fd00::%d", i+1)),
		}})
	}
	return list
}

func newRig(t *testing.T) *rig {
	r := &rig{t, newAggregate()}
	r.a.configure(time.Now(), &trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB, vip6}},
		Streams: []trench.Stream{
			{Name: "one", VIPs: []vip.VIP{vipA, vip6}, MinReady: 2, Targets: targets(3)},
			{Name: "two", VIPs: []vip.VIP{vipA}, MinReady: 1, Targets: targets(1)},
		},
	})
	return r
}

// set tells the health of one address and returns the VIPs that changed.
func (r *rig) set(stream string, n int, addr string, s target.State) []vip.VIP {
	changed := r.a.apply(time.Now(), []target.Health{{
		Key: target.Key{Stream: stream, Name: fmt.Sprintf("t%d", n), Addr: netip.MustParseAddr(addr)}, State: s, LastError: "connection refused",
	}}, nil)
	var vips []vip.VIP
	for _, c := range changed {
		vips = append(vips, c.VIP)
	}
	slices.SortFunc(vips, vip.Compare)
	return vips
}

func (r *rig) want(v vip.VIP, s readiness.State, reason readinessv1.VipReason, ready, total uint32) readiness.VIPReadiness {
	r.t.Helper()
	got := r.a.current[v]
	if got.State != s || got.Reason != reason || got.ReadyTargets != ready || got.TotalTargets != total {
		r.t.Fatalf("%s is %v (%v) with %d/%d, want %v (%v) with %d/%d", v, got.State, got.Reason, got.ReadyTargets, got.TotalTargets, s, reason, ready, total)
	}
	return got
}

func TestReasonOfAVIPThatIsNotReady(t *testing.T) {
	r := newRig(t)
	r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 4)
	if got := r.want(vipB, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NO_STREAM, 0, 0); got.Detail == "" {
		t.Error("no detail")
	}
	for i := range 3 {
		r.set("one", i, fmt.Sprintf("fd00::%d", i+1), target.NotReady)
	}
	got := r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, 0, 3)
	if !strings.Contains(got.Detail, "stream one: 0 of 3 targets ready, needs 2; t0 (fd00::1): connection refused") {
		t.Errorf("detail %q", got.Detail)
	}
	r.set("one", 0, "fd00::1", target.Overdue)
	r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE, 0, 3)
}

func TestVIPIsReadyWithOneStreamThatHasEnoughTargets(t *testing.T) {
	r := newRig(t)
	r.set("one", 0, "172.16.0.1", target.Ready)
	r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 1, 4)
	r.set("one", 1, "172.16.0.2", target.Ready)
	r.want(vipA, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 2, 4)
	r.set("two", 0, "172.16.0.1", target.Ready)
	r.set("one", 0, "172.16.0.1", target.NotReady)
	r.want(vipA, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 2, 4)
	r.set("two", 0, "172.16.0.1", target.NotReady)
	r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 1, 4)
}

func TestFamiliesOfATargetAreIndependent(t *testing.T) {
	r := newRig(t)
	if changed := r.set("one", 0, "172.16.0.1", target.Ready); !slices.Equal(changed, []vip.VIP{vipA}) {
		t.Fatalf("an IPv4 address changed %v", changed)
	}
	r.set("one", 1, "172.16.0.2", target.Ready)
	r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 3)
}

func TestReloadKeepsTheHealthOfTargetsThatStayed(t *testing.T) {
	r := newRig(t)
	r.set("two", 0, "172.16.0.1", target.Ready)
	changed, removed := r.a.configure(time.Now(), &trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vip6}},
		Streams:   []trench.Stream{{Name: "two", VIPs: []vip.VIP{vipA, vip6}, MinReady: 1, Targets: targets(1)}},
	})
	if !slices.Equal(removed, []vip.VIP{vipB}) {
		t.Errorf("removed %v", removed)
	}
	if len(changed) != 2 {
		t.Errorf("changed %v", changed)
	}
	r.want(vipA, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 1, 1)
	r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 1)
}

func TestSinceIsThatOfTheState(t *testing.T) {
	r := newRig(t)
	before := r.a.current[vipA].Since
	r.set("one", 0, "172.16.0.1", target.Ready)
	if r.a.current[vipA].Since != before {
		t.Error("a count changed since")
	}
	r.set("two", 0, "172.16.0.1", target.Ready)
	if !r.a.current[vipA].Since.After(before) {
		t.Error("a new state kept the old since")
	}
}

func TestDetailIsBounded(t *testing.T) {
	s := &stream{Stream: trench.Stream{Name: strings.Repeat("x", 300)}}
	if got := len(describe(s, tally{})); got > maxDetail {
		t.Errorf("%d bytes", got)
	}
}
