package lab

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vipgate/vipgate/test/harness"
)

// For every kind of gateway: Start starts each process once, and starts killed processes again.
func TestRouterRestartsProcesses(t *testing.T) {
	for _, kind := range []Kind{KindBIRD, KindFRR, KindGoBGP} {
		t.Run(string(kind), func(t *testing.T) {
			if lacks := kind.Missing(); lacks != "" {
				Skip(t, lacks)
			}
			l, err := New()
			harness.Must(t, err)
			t.Cleanup(func() { harness.Must(t, l.Close()) })
			ns, err := l.SecondGateway()
			harness.Must(t, err)
			c := GatewayB()
			c.BFD = kind != KindGoBGP
			c.Routes = []netip.Prefix{netip.MustParsePrefix("20.0.0.9/32")}
			g, err := l.StartRouter(kind, ns, c)
			harness.Must(t, err)
			harness.Must(t, g.WantRoutes(t.Context()))
			for i, p := range g.Processes() {
				before := g.Processes()
				harness.Must(t, p.Kill())
				harness.Must(t, g.Start())
				for j, now := range g.Processes() {
					if again := now != before[j]; again != (i == j) {
						t.Errorf("after %s was killed, %s was started again: %t", p.Name, now.Name, again)
					}
				}
			}
			harness.Must(t, g.WantRoutes(t.Context()))
		})
	}
}

func TestParseRoutes(t *testing.T) {
	routes := map[netip.Prefix]Route{}
	parseRoutes(`BIRD 2.0.12 ready.
Table master4:
20.0.0.1/32          unicast [trench0 07:33:20.132] * (100) [AS8103i]
	via 169.254.100.1 on trench0
	Type: BGP univ
	BGP.as_path: 8103
	BGP.next_hop: 169.254.100.1
	BGP.local_pref: 100
	BGP.med: 50
	BGP.community: (64512,7)
	BGP.ext_community: (unknown 0x4, 8103, 7)
	BGP.large_community: (64512, 1, 100) (64512, 1, 101)
                     unicast [trench2 07:33:20.438] (100) [AS8103i]
	via 169.254.100.2 on trench0
	Type: BGP univ
	BGP.as_path: 8103 8103
	BGP.community: (65535,0)
20.0.0.2/32          unicast [trench0 07:33:20.132] * (100) [AS8103i]
	via 169.254.100.1 on trench0
`, routes)
	want := "map[20.0.0.1/32:{20.0.0.1/32 169.254.100.1 [8103] [(64512,7) (64512,1,100) (64512,1,101)] " +
		"100 50 (unknown 0x4, 8103, 7)} " +
		"20.0.0.2/32:{20.0.0.2/32 169.254.100.1 [] []   }]"
	if got := fmt.Sprint(routes); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
