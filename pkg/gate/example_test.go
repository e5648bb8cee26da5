package gate_test

import (
	"fmt"
	"time"

	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A VIP is advertised while the load balancer reports it as ready under a valid lease; after the
// lease it stays for the grace period.
func Example() {
	v := vip.Require("20.0.0.1/32")
	now := time.Now()

	g := gate.New(gate.Options{DrainTime: 5 * time.Second})
	g.Configure([]vip.VIP{v})
	g.Route(vip.NewSet(v))
	g.Announcer(gate.Announcer{Up: true, Since: now})
	g.UpdateLB(now, gate.LBUpdate{
		Instance: "lb-1", Revision: 1, Live: true, Complete: true,
		LeaseEnd: now.Add(time.Second), Grace: 5 * time.Second,
		VIPs: []gate.VIPState{{VIP: v, State: vip.Ready}},
	})

	evaluate := func(at time.Time) {
		var up gate.Gateways
		up.At, up.Up[vip.IPv4] = at, true // polled just now
		g.Gateways(up)
		for _, c := range g.Evaluate(at) {
			fmt.Printf("%s: %s (%s)\n", c.VIP, c.To.Advertisement, c.To.Reason)
		}
	}
	evaluate(now)
	evaluate(now.Add(2 * time.Second)) // the lease expired, the grace period began
	evaluate(now.Add(7 * time.Second)) // the grace period expired
	// Output:
	// 20.0.0.1/32: announced (ready)
	// 20.0.0.1/32: announced (lb_stale)
	// 20.0.0.1/32: withdrawn (lb_lost)
}
