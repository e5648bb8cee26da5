package e2e

import (
	"context"
	"testing"
)

func TestLBCrashWithdrawsEveryVIP(t *testing.T) {
	w := newWorld(t)
	w.startPod()
	w.up(w.target1)
	w.wantRoutes(vipA4, vipA6)
	w.must(w.pod.LB.Kill())
	w.wantRoutes()
	w.must(w.pod.StartLB())
	w.wantRoutes(vipA4, vipA6)
}

func TestVIPsAreGatedOneByOne(t *testing.T) {
	w := newWorld(t)
	w.startPod()
	w.up(w.target1)
	w.wantRoutes(vipA4, vipA6)
	w.up(w.target2)
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	before := w.gateway.Updates(vipA4)
	w.down(w.target2)
	w.wantRoutes(vipA4, vipA6)
	if after := w.gateway.Updates(vipA4); after != before {
		t.Fatalf("the gateway heard of %s %d times while only %s changed", vipA4, after-before, vipB4)
	}
	routes, err := w.gateway.Routes(context.Background())
	w.must(err)
	for _, r := range routes {
		if r.GracefulShutdown() {
			t.Fatalf("%v is de-preferred", r)
		}
	}
}
