package serving_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/vipgate/vipgate/pkg/healthcheck"
	"github.com/vipgate/vipgate/pkg/serving"
	"github.com/vipgate/vipgate/pkg/targetset"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
)

// A VIP is ready while its stream has enough targets that pass their checks.
func Example() {
	v := vip.Require("20.0.0.1/32")
	addr := netip.MustParseAddr("172.16.0.1")
	config := &trench.Config{
		Attractor: trench.Attractor{VIPs: []vip.VIP{v}},
		Streams:   []trench.Stream{{Name: "web", VIPs: []vip.VIP{v}, MinReady: 1}},
	}
	now := time.Now()

	e := serving.New(serving.Options{})
	e.Configure(now, config, func(string) []targetset.Member {
		return []targetset.Member{{Name: "a", IPs: []netip.Addr{addr}, Draining: healthcheck.Ready}}
	})
	evaluate := func(changed ...healthcheck.Health) {
		for _, r := range e.Evaluate(now, healthcheck.Evaluation{Changed: changed}).Changed {
			fmt.Printf("%s: %s, %d of %d targets\n", r.VIP, r.State, r.ReadyTargets, r.TotalTargets)
		}
	}
	key := healthcheck.Key{Stream: "web", Name: "a", Addr: addr}
	evaluate()
	evaluate(healthcheck.Health{Key: key, State: healthcheck.Ready})
	evaluate(healthcheck.Health{Key: key, State: healthcheck.NotReady})
	// Output:
	// 20.0.0.1/32: not ready, 0 of 1 targets
	// 20.0.0.1/32: ready, 1 of 1 targets
	// 20.0.0.1/32: not ready, 0 of 1 targets
}
