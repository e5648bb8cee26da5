package main

import (
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab/balancer"
)

// startScriptedLB starts a scripted load balancer that reports every VIP as ready, or none. It
// ends with the fixture.
func (fx *fixture) startScriptedLB(ready bool) (*balancer.Balancer, error) {
	lb, err := balancer.Start(fx.ctx, fx.pod)
	if err != nil {
		return nil, err
	}
	fx.ends = append(fx.ends, lb.Close)
	lb.Table.Commit(decision(ready, fx.vips...))
	return lb, nil
}

// decision returns the decision that VIPs are ready or not.
func decision(ready bool, vips ...vip.VIP) readiness.Decision {
	return readiness.Decision{Synced: true, Changed: balancer.Readiness(ready, vips...)}
}

// startScriptedPod starts a scripted load balancer and the frontend, and waits
// until every VIP is at the gateway.
func (fx *fixture) startScriptedPod() (*balancer.Balancer, error) {
	lb, err := fx.startScriptedLB(true)
	if err != nil {
		return nil, err
	}
	if err := fx.startFrontend(); err != nil {
		return nil, err
	}
	_, err = fx.waitCount(len(fx.vips))
	return lb, err
}

// scriptedSwitch returns a function that has a scripted load balancer decide that every VIP is
// ready, or none. The decisions are built beforehand: their cost is not measured.
func (fx *fixture) scriptedSwitch(lb *balancer.Balancer) (set func(up bool) error) {
	ready, not := decision(true, fx.vips...), decision(false, fx.vips...)
	return func(up bool) error {
		if up {
			lb.Table.Commit(ready)
		} else {
			lb.Table.Commit(not)
		}
		return nil
	}
}
