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
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/outage"
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/targetset"
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
	t       *testing.T
	a       *aggregate
	now     time.Time
	members map[string][]targetset.Member
}

func members(n int) []targetset.Member {
	var list []targetset.Member
	for i := range n {
		list = append(list, targetset.Member{Name: fmt.Sprintf("t%d", i), Draining: healthcheck.Ready, IPs: []netip.Addr{
			netip.MustParseAddr(fmt.Sprintf("172.16.0.%d", i+1)), netip.MustParseAddr(fmt.Sprintf("fd00::%d", i+1)),
		}})
	}
	return list
}

func newRig(t *testing.T) *rig {
	r := &rig{t, newAggregate(outage.New(outage.Options{})), time.Now(), map[string][]targetset.Member{"one": members(3), "two": members(1)}}
	r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vipB, vip6}},
		Streams: []trench.Stream{
			{Name: "one", VIPs: []vip.VIP{vipA, vip6}, MinReady: 2},
			{Name: "two", VIPs: []vip.VIP{vipA}, MinReady: 1},
		},
	})
	return r
}

func (r *rig) of(stream string) []targetset.Member { return slices.Clone(r.members[stream]) }

func (r *rig) configure(c *trench.Config) (changed []readiness.VIPReadiness, removed []vip.VIP) {
	touched, removed := r.a.configure(time.Now(), c, r.of)
	return r.a.judge(time.Now(), touched), removed
}

// set tells the health of one address and returns the VIPs that changed.
func (r *rig) set(stream string, n int, addr string, s healthcheck.State) []vip.VIP {
	touched := vip.Set{}
	r.a.apply(healthcheck.Evaluation{Changed: []healthcheck.Health{{
		Key: healthcheck.Key{Stream: stream, Name: fmt.Sprintf("t%d", n), Addr: netip.MustParseAddr(addr)}, State: s, LastError: "connection refused",
	}}}, touched)
	return r.judge(touched)
}

func (r *rig) judge(touched vip.Set) []vip.VIP {
	var vips []vip.VIP
	for _, c := range r.a.judge(time.Now(), touched) {
		vips = append(vips, c.VIP)
	}
	slices.SortFunc(vips, vip.Compare)
	return vips
}

// drain has a target of a stream drain for some time; a negative one: drained by an operator.
func (r *rig) drain(stream string, n int, in time.Duration) {
	m := &r.members[stream][n]
	m.Draining, m.DrainEnd, m.Cause = healthcheck.Draining, r.now.Add(in), "test"
	if in < 0 {
		m.Draining = healthcheck.Drained
	}
	touched := vip.Set{}
	r.a.retarget([]trench.Stream{{Name: stream}}, r.of, touched)
	r.judge(touched)
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
		r.set("one", i, fmt.Sprintf("fd00::%d", i+1), healthcheck.NotReady)
	}
	got := r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, 0, 3)
	if !strings.Contains(got.Detail, "stream one: 0 of 3 targets ready, needs 2; t0 (fd00::1): connection refused") {
		t.Errorf("detail %q", got.Detail)
	}
	r.set("one", 0, "fd00::1", healthcheck.Overdue)
	r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_CHECK_OVERDUE, 0, 3)
}

func TestVIPIsReadyWithOneStreamThatHasEnoughTargets(t *testing.T) {
	r := newRig(t)
	r.set("one", 0, "172.16.0.1", healthcheck.Ready)
	r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 1, 4)
	r.set("one", 1, "172.16.0.2", healthcheck.Ready)
	r.want(vipA, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 2, 4)
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	r.set("one", 0, "172.16.0.1", healthcheck.NotReady)
	r.want(vipA, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 2, 4)
	r.set("two", 0, "172.16.0.1", healthcheck.NotReady)
	r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 1, 4)
}

func TestFamiliesOfATargetAreIndependent(t *testing.T) {
	r := newRig(t)
	if changed := r.set("one", 0, "172.16.0.1", healthcheck.Ready); !slices.Equal(changed, []vip.VIP{vipA}) {
		t.Fatalf("an IPv4 address changed %v", changed)
	}
	r.set("one", 1, "172.16.0.2", healthcheck.Ready)
	r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 3)
}

func TestReloadKeepsTheHealthOfTargetsThatStayed(t *testing.T) {
	r := newRig(t)
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	changed, removed := r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vip6}},
		Streams:   []trench.Stream{{Name: "two", VIPs: []vip.VIP{vipA, vip6}, MinReady: 1}},
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
	r.set("one", 0, "172.16.0.1", healthcheck.Ready)
	if r.a.current[vipA].Since != before {
		t.Error("a count changed since")
	}
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	if !r.a.current[vipA].Since.After(before) {
		t.Error("a new state kept the old since")
	}
}

func TestVIPWhoseOnlyTargetsDrainIsDraining(t *testing.T) {
	r := newRig(t)
	for i := range 3 {
		r.set("one", i, fmt.Sprintf("fd00::%d", i+1), healthcheck.Ready)
	}
	r.want(vip6, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 3, 3)
	r.drain("one", 0, time.Second)
	r.want(vip6, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 2, 3)
	// Two are needed and one is left: the one that drains longest makes up for it.
	r.drain("one", 1, 9*time.Second)
	got := r.want(vip6, readiness.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING, 1, 3)
	if !got.DrainEnd.Equal(r.now.Add(9*time.Second)) || !strings.Contains(got.Detail, "1 of 3 targets ready, 2 draining, needs 2") {
		t.Errorf("drains until %v: %s", got.DrainEnd.Sub(r.now), got.Detail)
	}
	r.drain("one", 2, 5*time.Second)
	if got := r.want(vip6, readiness.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING, 0, 3); !got.DrainEnd.Equal(r.now.Add(5 * time.Second)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(r.now))
	}
	// One that drains and fails its checks serves no flow.
	r.set("one", 1, "fd00::2", healthcheck.NotReady)
	if got := r.want(vip6, readiness.Draining, readinessv1.VipReason_VIP_REASON_TARGETS_DRAINING, 0, 3); !got.DrainEnd.Equal(r.now.Add(time.Second)) {
		t.Errorf("drains until %v", got.DrainEnd.Sub(r.now))
	}
	r.set("one", 2, "fd00::3", healthcheck.NotReady)
	if got := r.want(vip6, readiness.NotReady, readinessv1.VipReason_VIP_REASON_TOO_FEW_READY, 0, 3); !got.DrainEnd.IsZero() {
		t.Error("a VIP that does not drain has the end of a drain")
	}
}

func TestManuallyDrainedTargetsDoNotServe(t *testing.T) {
	r := newRig(t)
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	r.drain("two", 0, -1)
	if got := r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 4); !strings.Contains(got.Detail, "stream one") {
		t.Errorf("detail %q", got.Detail)
	}
	r.drain("one", 0, -1)
	if got := r.want(vipA, readiness.NotReady, readinessv1.VipReason_VIP_REASON_NOT_CHECKED, 0, 4); !strings.Contains(got.Detail, "1 drained by an operator") {
		t.Errorf("detail %q", got.Detail)
	}
}

func TestAddressWhoseFamilyIsNotCheckedIsAsTheOther(t *testing.T) {
	r := newRig(t)
	r.configure(&trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{vipA, vip6}},
		Streams:   []trench.Stream{{Name: "two", VIPs: []vip.VIP{vipA, vip6}, MinReady: 1, Check: trench.Check{Families: trench.OnlyIPv4}}},
	})
	if changed := r.set("two", 0, "172.16.0.1", healthcheck.Ready); !slices.Equal(changed, []vip.VIP{vipA, vip6}) {
		t.Errorf("changed %v", changed)
	}
	r.want(vip6, readiness.Ready, readinessv1.VipReason_VIP_REASON_TARGETS_READY, 1, 1)
	for _, v := range r.a.views("two") {
		if v.State != healthcheck.Ready {
			t.Errorf("%v is %v", v.Key, v.State)
		}
	}
}

func TestViewShowsDrainsAndTheChecksBehindThem(t *testing.T) {
	r := newRig(t)
	r.set("two", 0, "172.16.0.1", healthcheck.Ready)
	r.drain("two", 0, time.Minute)
	v := r.a.views("two")[0]
	if v.State != healthcheck.Draining || v.Checks != healthcheck.Ready || v.DrainCause != "test" || !v.DrainEnd.Equal(r.now.Add(time.Minute)) {
		t.Errorf("view %+v", v)
	}
	if v := r.a.views("two")[1]; v.Checks != healthcheck.Starting || v.Addr != netip.MustParseAddr("fd00::1") {
		t.Errorf("view of an address that was not checked: %+v", v)
	}
}

func TestDetailIsBounded(t *testing.T) {
	s := &stream{Stream: trench.Stream{Name: strings.Repeat("x", 300)}}
	if got := len(describe(s, tally{})); got > maxDetail {
		t.Errorf("%d bytes", got)
	}
}

func TestDrainedTargetsAreNoOutage(t *testing.T) {
	r := newRig(t)
	key := healthcheck.Key{Stream: "two", Name: "t0", Addr: netip.MustParseAddr("172.16.0.1")}
	other := key
	other.Stream = "one"
	changes := targetset.Changes{Streams: []trench.Stream{{Name: "two"}}}
	look := func(c targetset.Changes, s healthcheck.State) (changed []healthcheck.Health, removed []healthcheck.Key) {
		before := r.a.keys(c)
		e := healthcheck.Evaluation{Changed: []healthcheck.Health{{Key: key, State: s}, {Key: other, State: s}}}
		r.a.apply(e, vip.Set{})
		return r.a.inService(e, c, before)
	}
	if changed, removed := look(changes, healthcheck.Ready); len(changed) != 2 || len(removed) != 0 {
		t.Errorf("in service: %v, %v", changed, removed)
	}
	r.drain("two", 0, -1)
	if changed, removed := look(changes, healthcheck.Ready); len(changed) != 1 || !slices.Contains(removed, key) {
		t.Errorf("drained: %v, %v", changed, removed)
	}
	if changed, removed := look(targetset.Changes{}, healthcheck.NotReady); len(changed) != 1 || changed[0].Key != other || len(removed) != 0 {
		t.Errorf("switched off: %v, %v", changed, removed)
	}
	r.members["two"][0].Draining = healthcheck.Ready
	r.a.retarget(changes.Streams, r.of, vip.Set{})
	before := r.a.keys(changes)
	changed, removed := r.a.inService(healthcheck.Evaluation{}, changes, before)
	if len(changed) != 1 || changed[0].Key != key || changed[0].State != healthcheck.NotReady || len(removed) != 0 || len(r.a.drained) != 0 {
		t.Errorf("back: %v, %v", changed, removed)
	}
}
