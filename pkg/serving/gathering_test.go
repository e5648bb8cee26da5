package serving

import (
	"strings"
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/dataplane/plan"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/vip"
)

const reasonRegistering = readinessv1.VipReason_VIP_REASON_REGISTERING

// quiet is RegistrySettle of the tests.
const quiet = 6 * time.Second

// newRegistryRig returns a rig of a new load balancer whose stream s has no targets yet.
func newRegistryRig(t *testing.T, restored bool) *rig {
	r := newRig(t, Options{
		RegistrySettle: quiet, Restored: func(string) bool { return restored },
	}, map[string][]targetset.Member{})
	r.configure(trenchOf(streamOf("s", vipA, vip6)))
	return r
}

// register advances the clock and adds targets of an origin, which pass their checks immediately.
func (r *rig) register(after time.Duration, o targetset.Origin, list ...targetset.Member) {
	r.now = r.now.Add(after)
	for _, m := range list {
		m.Origins = m.Origins.With(o)
		r.members["s"] = append(r.members["s"], m)
	}
	r.retarget("s")
	for _, m := range list {
		r.health("s", m.Name, healthcheck.Ready)
	}
}

// pass lets time pass and evaluates.
func (r *rig) pass(after time.Duration) Result {
	r.now = r.now.Add(after)
	return r.evaluate()
}

// The first rise waits until no new target has registered for a while.
func TestRegistrySettle(t *testing.T) {
	r := newRegistryRig(t, false)
	ten := numbered(10)
	for i, m := range ten {
		r.register(time.Second, targetset.OriginRegistry, m)
		got := r.want(vipA, vip.NotReady, reasonRegistering, uint32(i+1), uint32(i+1))
		if !strings.Contains(got.Detail, "no new target has registered for 6s") {
			t.Fatalf("detail %q", got.Detail)
		}
		if streams, vips := r.e.Ready(); len(streams)+len(vips) > 0 {
			t.Fatalf("streams %v and VIPs %v are ready", streams, vips)
		}
	}
	r.retarget("s") // a caller that reconnects does not count as a new target
	if result := r.pass(quiet - 1); result.Settling || !result.Next.Equal(r.now.Add(1)) {
		t.Fatalf("settling %v, next %v from now", result.Settling, result.Next.Sub(r.now))
	}
	r.want(vipA, vip.NotReady, reasonRegistering, 10, 10)
	if result := r.pass(1); !result.StreamsChanged || !result.Next.IsZero() {
		t.Fatalf("streams changed %v, next %v", result.StreamsChanged, result.Next)
	}
	r.want(vipA, vip.Ready, reasonReady, 10, 10)
	r.want(vip6, vip.Ready, reasonReady, 10, 10)
	r.register(time.Second, targetset.OriginRegistry, member("new", "172.16.1.1"))
	r.want(vipA, vip.Ready, reasonReady, 11, 11)
	for _, m := range append(ten, member("new")) {
		r.health("s", m.Name, healthcheck.NotReady)
	}
	r.want(vipA, vip.NotReady, reasonTooFew, 0, 11)
	r.health("s", "new", healthcheck.Ready) // the second rise waits for nothing
	r.want(vipA, vip.Ready, reasonReady, 1, 11)
}

// Targets that register all the time delay the first rise for a bounded time.
func TestRegistrySettleBound(t *testing.T) {
	r := newRegistryRig(t, false)
	most := maxRegistrySettles * quiet
	for i, m := range numbered(int(most / (2 * time.Second))) {
		r.register(min(time.Duration(i), 1)*2*time.Second, targetset.OriginRegistry, m)
		r.want(vipA, vip.NotReady, reasonRegistering, uint32(i+1), uint32(i+1))
	}
	r.pass(2*time.Second - 1)
	r.want(vipA, vip.NotReady, reasonRegistering, 15, 15)
	r.pass(1)
	r.want(vipA, vip.Ready, reasonReady, 15, 15)
}

// The first rise waits only where a target may be missing.
func TestRegistrySettleNotNeeded(t *testing.T) {
	a, b := member("a", "172.16.0.1"), member("b", "172.16.0.2")
	t.Run("targets of the trench file", func(t *testing.T) {
		r := newRegistryRig(t, false)
		r.register(0, targetset.OriginFile, a, b)
		r.want(vipA, vip.Ready, reasonReady, 2, 2)
	})
	t.Run("registered targets beside one of the trench file", func(t *testing.T) {
		r := newRegistryRig(t, false)
		for i, m := range numbered(3) {
			m.Origins = m.Origins.With([]targetset.Origin{
				targetset.OriginRegistry, targetset.OriginFile, targetset.OriginRegistry,
			}[i])
			r.members["s"] = append(r.members["s"], m)
		}
		r.retarget("s")
		r.health("s", "t2", healthcheck.Ready)
		r.want(vipA, vip.Ready, reasonReady, 1, 3)
	})
	t.Run("the trench file lists a registered target", func(t *testing.T) {
		r := newRegistryRig(t, false)
		r.register(0, targetset.OriginRegistry, a)
		r.want(vipA, vip.NotReady, reasonRegistering, 1, 1)
		r.members["s"][0].Origins = r.members["s"][0].Origins.With(targetset.OriginFile)
		r.retarget("s")
		r.want(vipA, vip.Ready, reasonReady, 1, 1)
	})
	t.Run("restored registrations", func(t *testing.T) {
		r := newRegistryRig(t, true)
		r.register(0, targetset.OriginRegistry, a, b)
		r.want(vipA, vip.Ready, reasonReady, 2, 2)
	})
	t.Run("another configuration", func(t *testing.T) {
		r := newRegistryRig(t, true)
		r.register(0, targetset.OriginRegistry, a)
		r.e.options.Restored = nil
		r.configure(trenchOf(streamOf("s", vipA, vipB)))
		r.want(vipA, vip.Ready, reasonReady, 1, 1)
		r.want(vipB, vip.Ready, reasonReady, 1, 1)
	})
	t.Run("no wait configured", func(t *testing.T) {
		r := newRig(t, Options{}, map[string][]targetset.Member{})
		r.configure(trenchOf(streamOf("s", vipA)))
		r.register(0, targetset.OriginRegistry, a)
		r.want(vipA, vip.Ready, reasonReady, 1, 1)
	})
}

// A VIP that is ready in one stream does not wait for the targets of another.
func TestRegistrySettleSecondStream(t *testing.T) {
	r := newRegistryRig(t, false)
	r.members["file"] = []targetset.Member{member("f", "172.16.9.9")}
	r.members["file"][0].Origins = r.members["file"][0].Origins.With(targetset.OriginFile)
	r.configure(trenchOf(streamOf("file", vipA), streamOf("s", vipA)))
	r.register(0, targetset.OriginRegistry, member("a", "172.16.0.1"))
	r.want(vipA, vip.NotReady, reasonRegistering, 1, 2)
	r.health("file", "f", healthcheck.Ready)
	r.want(vipA, vip.Ready, reasonReady, 2, 2)
}

// A VIP stays ready when the trench file adds it to a stream that sorts first and still waits for
// registrations.
func TestRegistrySettleOfReadyVIP(t *testing.T) {
	const file, registered = "b", "a"
	members := map[string][]targetset.Member{file: {member("x", "172.16.0.1")}}
	members[file][0].Origins = members[file][0].Origins.With(targetset.OriginFile)
	p := newPlaneRig(t, plan.State{}, members)
	p.rig = newRig(t, Options{
		DataPlane: true, WithdrawTime: testWithdrawTime, RegistrySettle: quiet, Restored: func(string) bool { return false },
	}, members)
	p.evaluated = p.follow
	p.configure(trenchOf(streamOf(file, vipA), streamOf(registered, vipB)))
	p.health(file, "x", healthcheck.Ready)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	y := member("y", "172.16.0.2")
	y.Origins = y.Origins.With(targetset.OriginRegistry)
	p.members[registered] = []targetset.Member{y}
	p.retarget(registered)
	p.health(registered, "y", healthcheck.Ready)
	p.confirm()
	p.want(vipB, vip.NotReady, reasonRegistering, 1, 1)

	p.configure(trenchOf(streamOf(file, vipA), streamOf(registered, vipA, vipB)))
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.want(vipB, vip.NotReady, reasonRegistering, 1, 1)
	p.confirm()
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.later(quiet)
	p.want(vipA, vip.Ready, reasonReady, 1, 1)
	p.want(vipB, vip.Ready, reasonReady, 1, 1)
}

// A draining target does not make a VIP rise before the remaining targets have registered.
func TestRegistrySettleDraining(t *testing.T) {
	r := newRegistryRig(t, false)
	m := member("a", "172.16.0.1")
	m.Draining, m.DrainEnd = healthcheck.Draining, r.now.Add(time.Minute)
	r.register(0, targetset.OriginRegistry, m)
	r.want(vipA, vip.NotReady, reasonTooFew, 0, 1)
	r.pass(quiet)
	r.want(vipA, vip.Draining, reasonDraining, 0, 1)
}
