package serving

import (
	"testing"
	"time"

	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A ready VIP has the error of the first target that fails, not of one without a verdict.
func TestReadyVIPNamesFailingTarget(t *testing.T) {
	r := twoStreams(t)
	r.set("one", "t1", "172.16.0.2", healthcheck.Ready)
	r.set("one", "t2", "172.16.0.3", healthcheck.Ready)
	if got := r.want(vipA, vip.Ready, reasonReady, 2, 4); got.Detail != "" {
		t.Errorf("detail %q although no target fails", got.Detail)
	}
	r.set("one", "t0", "172.16.0.1", healthcheck.NotReady)
	const want = "stream one: 2 of 3 targets ready, needs 2; t0 (172.16.0.1): connection refused"
	if got := r.want(vipA, vip.Ready, reasonReady, 2, 4); got.Detail != want {
		t.Errorf("detail %q, want %q", got.Detail, want)
	}
}

// A VIP that leaves is at most draining, until the end that it has, and not ready if its targets
// fail.
func TestLeavingVIP(t *testing.T) {
	r := twoStreams(t)
	c := trenchOf(streamOf("two", vipA))
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	end := r.now.Add(time.Minute)
	r.e.Leave(map[vip.VIP]time.Time{vipA: end})
	r.configure(c)
	const leaving = readinessv1.VipReason_VIP_REASON_LEAVING
	if got := r.want(vipA, vip.Draining, leaving, 1, 1); !got.DrainEnd.Equal(end) {
		t.Errorf("drains until %v, want %v", got.DrainEnd, end)
	}
	if !r.e.Attracts(vipA) || r.e.Attracts(vip6) {
		t.Error("a VIP that drains attracts traffic, one without targets does not")
	}
	r.set("two", "t0", "172.16.0.1", healthcheck.NotReady)
	r.want(vipA, vip.NotReady, reasonTooFew, 0, 1)
	r.set("two", "t0", "172.16.0.1", healthcheck.Ready)
	r.e.Leave(nil)
	r.configure(c)
	r.want(vipA, vip.Ready, reasonReady, 1, 1)
}
