package gate

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/vip"
)

// benchGate returns a gate that announces n VIPs, and their states.
func benchGate(b testing.TB, n int) (*Gate, []VIPState, time.Time) {
	b.Helper()
	now := time.Unix(1000, 0)
	g := New(Options{NoFlapBackoff: true})
	states := make([]VIPState, 0, n)
	vips := make([]vip.VIP, 0, n)
	for i := range n {
		v, err := vip.FromPrefix(netip.PrefixFrom(netip.AddrFrom4([4]byte{20, byte(i >> 16), byte(i >> 8), byte(i)}), 32))
		if err != nil {
			b.Fatal(err)
		}
		vips, states = append(vips, v), append(states, VIPState{VIP: v, State: vip.Ready})
	}
	g.Configure(vips)
	g.Route(vip.NewSet(vips...))
	g.Announcer(Announcer{Up: true, Since: now})
	g.Gateways(Gateways{At: now, Up: [2]bool{true, true}})
	g.UpdateLB(now, update(now, true, states))
	if changed := len(g.Evaluate(now)); changed != n {
		b.Fatalf("%d of %d VIPs changed", changed, n)
	}
	return g, states, now
}

func update(now time.Time, complete bool, states []VIPState) LBUpdate {
	return LBUpdate{
		Instance: "lb-1", Live: true, LeaseEnd: now.Add(time.Second), Grace: time.Second, Complete: complete, VIPs: states,
	}
}

// BenchmarkEvaluate measures a change of one VIP and of all VIPs among n, and of a condition that
// concerns all of them.
func BenchmarkEvaluate(b *testing.B) {
	for _, n := range []int{1, 1000, 10_000, 50_000} {
		for _, changed := range []int{1, n} {
			b.Run(fmt.Sprintf("vips=%d/changed=%d", n, changed), func(b *testing.B) {
				g, states, now := benchGate(b, n)
				states = states[:changed]
				b.ReportAllocs()
				for k := 0; b.Loop(); k++ {
					to := vip.State(k % 2) // NotReady, Ready
					for i := range states {
						states[i].State = to
					}
					g.UpdateLB(now, update(now, false, states))
					if got := len(g.Evaluate(now)); got != changed {
						b.Fatalf("%d changes", got)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("vips=%d/gateways", n), func(b *testing.B) {
			g, _, now := benchGate(b, n)
			b.ReportAllocs()
			for k := 0; b.Loop(); k++ {
				g.Gateways(Gateways{At: now, Up: [2]bool{k%2 == 1, true}})
				if got := len(g.Evaluate(now)); got != n {
					b.Fatalf("%d changes", got)
				}
			}
		})
	}
}
