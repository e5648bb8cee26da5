package main

import (
	"github.com/vipgate/vipgate/pkg/readiness"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/lab/balancer"
)

// startScriptedLB starts a scripted load balancer to which every VIP is ready,
// or none. It ends with the stage.
func (st *stage) startScriptedLB(ready bool) (*balancer.Balancer, error) {
	lb, err := balancer.Start(st.ctx, st.pod)
	if err != nil {
		return nil, err
	}
	st.ends = append(st.ends, lb.Close)
	lb.Table.Commit(decision(ready, st.vips...))
	return lb, nil
}

// decision is that VIPs are ready or not.
func decision(ready bool, vips ...vip.VIP) readiness.Decision {
	return readiness.Decision{Synced: true, Changed: balancer.Words(ready, vips...)}
}

// startScriptedPod starts a scripted load balancer and the frontend, and waits
// until every VIP is at the gateway.
func (st *stage) startScriptedPod() (*balancer.Balancer, error) {
	lb, err := st.startScriptedLB(true)
	if err != nil {
		return nil, err
	}
	if err := st.startFrontend(); err != nil {
		return nil, err
	}
	_, err = st.waitCount(len(st.vips))
	return lb, err
}
