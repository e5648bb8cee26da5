package bird_test

import (
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/turns"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
)

// A static gateway that leaves gets no new traffic, because its BFD session ends, and replies
// still leave by it until the end of the drain.
func TestStaticGatewayLeaves(t *testing.T) {
	p, gw, _ := staticPod(t, func(o *bird.Options) { o.DrainTime = time.Hour })
	p.Start()
	p.Attract(true, true)
	p.await("both up", up("gateway-ipv4", "gateway-ipv6"))
	await.True(t, "VIPs at the gateway", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
	// BIRD 3.4 may write its first routes later than the BFD session comes up.
	await.True(t, "route for replies", func() bool { return strings.Contains(table("-4"), "default via") })
	p.Configure([]trench.Gateway{staticGateway(vip.IPv6)}, []vip.VIP{vip4, vip6})
	p.await("draining", func(s bird.State) bool {
		return len(s.Gateways) == 2 && s.Gateways[1].State == bird.StateDraining && s.Gateways[1].Usable &&
			s.Gateways[1].Change.Phase == turns.Leaving
	})
	await.True(t, "VIP gone at the gateway", func() bool { return !gw.Has(vip4) && gw.Has(vip6) })
	if routes := table("-4"); !strings.Contains(routes, "default via 169.254.100.150") {
		t.Errorf("replies have no route:\n%s", routes)
	}
	p.ApplyNow()
	p.await("removed", func(s bird.State) bool { return len(s.Gateways) == 1 })
	await.True(t, "no route to the gateway", func() bool { return !strings.Contains(table("-4"), "default via") })
}
