package e2e

import (
	"context"
	"testing"
)

func TestLBCrashWithdrawsEveryVIP(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.startPod()
	f.up(f.target1)
	f.wantRoutes(vipA4, vipA6)
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	f.must(f.pod.StartLB())
	f.wantRoutes(vipA4, vipA6)
}

func TestVIPsAreGatedIndependently(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.startPod()
	f.up(f.target1)
	f.wantRoutes(vipA4, vipA6)
	f.up(f.target2)
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	before := f.gateway.Updates(vipA4)
	f.down(f.target2)
	f.wantRoutes(vipA4, vipA6)
	if after := f.gateway.Updates(vipA4); after != before {
		t.Fatalf("the gateway received updates of %s %d times while only %s changed", vipA4, after-before, vipB4)
	}
	routes, err := f.gateway.Routes(context.Background())
	f.must(err)
	for _, r := range routes {
		if r.GracefulShutdown() {
			t.Fatalf("%v is de-preferred", r)
		}
	}
}
