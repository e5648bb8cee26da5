package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// kinds are the kinds of gateways that the product is tested with.
var kinds = []lab.Kind{lab.KindBIRD, lab.KindFRR, lab.KindGoBGP}

// interop is a fixture whose gateway is of any kind.
type interop struct {
	*fixture
	router lab.Router
}

// newInterop creates a fixture that has a gateway of a kind instead of the usual one.
func newInterop(t *testing.T, kind lab.Kind, change func(*lab.GatewayConfig)) *interop {
	t.Helper()
	need(t, kind)
	f := newFixture(t)
	f.must(f.gateway.Process.Kill())
	c := lab.GatewayA()
	c.Name = "router-a"
	change(&c)
	return &interop{f, f.startRouter(kind, f.Gateway, c)}
}

// need skips a test on a machine without a kind of gateway.
func need(t *testing.T, kind lab.Kind) {
	t.Helper()
	if lacks := kind.Missing(); lacks != "" {
		lab.Skip(t, lacks)
	}
}

// startRouter starts a gateway, and prints its log after a failure.
func (f *fixture) startRouter(kind lab.Kind, ns *lab.NetNS, c lab.GatewayConfig) lab.Router {
	f.t.Helper()
	r, err := f.StartRouter(kind, ns, c)
	f.must(err)
	f.t.Cleanup(func() {
		if !f.t.Failed() {
			return
		}
		for _, p := range r.Processes() {
			f.t.Logf("== last lines of %s of %s\n%s", p.Name, c.Name, p.Tail(40))
		}
	})
	return r
}

// waitRouter waits until exactly these VIPs are in a gateway's table.
func (f *fixture) waitRouter(r lab.Router, prefixes ...string) {
	f.t.Helper()
	ctx := harness.Context(f.t, waitTimeout)
	f.must(r.WantRoutes(ctx, prefixes...))
}

// waitBest waits until the gateway's best routes to the VIPs of target 1 satisfy a condition.
func (i *interop) waitBest(what string, wanted func(lab.Route) bool) {
	i.t.Helper()
	i.waitFor(func() error {
		routes, err := i.router.Routes(i.t.Context())
		if err != nil {
			return err
		}
		for _, v := range []string{vipA4, vipA6} {
			if r, ok := routes[netip.MustParsePrefix(v)]; !ok || !wanted(r) {
				return fmt.Errorf("%s is not %s: %+v", v, what, r)
			}
		}
		return nil
	})
}

// routerUpdates returns the updates of a prefix that a gateway received after mark.
func (f *fixture) routerUpdates(r lab.Router, mark int, prefix string) []string {
	f.t.Helper()
	trace, err := r.Trace()
	f.must(err)
	p := netip.MustParsePrefix(prefix)
	return changes(slices.DeleteFunc(trace[mark:], func(h lab.RouteUpdate) bool { return h.Prefix != p }))
}

// routerMark returns the current position in a gateway's trace.
func (f *fixture) routerMark(r lab.Router) int {
	f.t.Helper()
	trace, err := r.Trace()
	f.must(err)
	return len(trace)
}

// wantRouterUpdates is wantUpdates for another gateway.
func (f *fixture) wantRouterUpdates(r lab.Router, mark int, prefix string, want ...string) {
	f.t.Helper()
	f.waitFor(func() error {
		got := f.routerUpdates(r, mark, prefix)
		switch {
		case slices.Equal(got, want):
			return nil
		case len(got) >= len(want):
			f.t.Fatalf("%s received for %s %v, want %v", r.Config().Name, prefix, got, want)
		}
		return fmt.Errorf("%s received for %s %v, want %v", r.Config().Name, prefix, got, want)
	})
}

// trenchWith is the usual trench file with further settings of both gateways.
func trenchWith(t *testing.T, settings string) string {
	t.Helper()
	lines := with(strings.TrimPrefix(settings, ", "), lineA4, lineA6)
	return edited(t, lineA4, lines[0], lineA6, lines[1])
}

// isVIP reports whether a route has the pod as its next hop.
func isVIP(r lab.Route) bool {
	return r.NextHop == lab.PodExternal4 || r.NextHop == lab.PodExternal6
}

// Passive peering, 4-octet AS numbers.
func TestPassiveGatewayOfEachKind(t *testing.T) {
	t.Parallel()
	const as = 4200000001 // needs four octets
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			w := newInterop(t, kind, func(c *lab.GatewayConfig) { c.Passive, c.RemoteAS = true, as })
			w.must(w.pod.WriteTrench(trenchWith(t, fmt.Sprintf(", localASN: %d", as))))
			// A gateway that connects actively and started after the pod has tried more than once.
			wire := lab.NewCapture(t, w.Pod, lab.External)
			ns, err := w.SecondGateway()
			w.must(err)
			w.startRouter(kind, ns, lab.GatewayB())
			w.waitFor(func() error {
				if calls := callsFrom(wire, lab.GatewayB4); calls < 2 {
					return fmt.Errorf("the gateway that calls did so %d times", calls)
				}
				return nil
			})
			w.up(w.target1)
			w.startPod()
			w.waitBest("from the pod's AS", func(r lab.Route) bool {
				return isVIP(r) && slices.Equal(r.ASPath, []string{strconv.Itoa(as)}) && len(r.Communities) == 0
			})
			w.waitTable("-4", "default via "+lab.GatewayA4.String())
			w.waitTable("-6", "default via "+lab.GatewayA6.String())
			// Each route of a VIP is withdrawn separately, and no other update is sent.
			mark := w.routerMark(w.router)
			w.up(w.target2)
			w.waitRouter(w.router, every()...)
			w.down(w.target2)
			w.waitRouter(w.router, vipA4, vipA6)
			for _, v := range []string{vipB4, vipB6} {
				w.wantRouterUpdates(w.router, mark, v, announced, withdrawn)
			}
			for _, v := range []string{vipA4, vipA6} {
				w.wantRouterUpdates(w.router, mark, v)
			}
			for _, a := range []netip.Addr{lab.GatewayA4, lab.GatewayA6} {
				if calls := callsFrom(wire, a); calls > 0 {
					t.Errorf("%s called %d times", a, calls)
				}
			}
		})
	}
}

// callsFrom counts the connections from an address to a BGP port.
func callsFrom(wire *lab.Capture, a netip.Addr) int {
	ports := map[uint16]bool{}
	for _, p := range wire.Packets() {
		if !p.Outgoing && p.Src == a && p.DstPort == lab.BGPPort && p.SrcPort != lab.BGPPort {
			ports[p.SrcPort] = true
		}
	}
	return len(ports)
}

// Dual stack, TCP-MD5, eBGP and iBGP.
func TestGatewayPasswordOfEachKind(t *testing.T) {
	t.Parallel()
	const password = "correct-horse#;'{}" // FRR accepts no spaces
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			w := newInterop(t, kind, func(c *lab.GatewayConfig) { c.LocalAS, c.Password = lab.PodAS, password })
			key := filepath.Join(w.Dir, "a.key")
			write := func(text string) {
				t.Helper()
				w.must(os.WriteFile(key+".new", []byte(text), 0o600))
				w.must(os.Rename(key+".new", key))
			}
			write("wrong\n")
			w.must(w.pod.WriteTrench(trenchWith(t, fmt.Sprintf(", remoteASN: %d, passwordFile: %s", lab.PodAS, key))))
			w.up(w.target1)
			w.startPod()
			// Each kernel rejects the packets of its peer.
			w.waitFor(func() error {
				if w.md5Failures() == 0 {
					return fmt.Errorf("no packet with a wrong signature came")
				}
				return nil
			})
			for _, name := range []string{"gateway-a4", "gateway-a6"} {
				w.waitGateway(name, func(g *frontendv1.GatewayStatus) bool {
					return strings.Contains(g.GetLastError(), "TCP-MD5: the passwords of both sides differ")
				})
			}
			w.waitRouter(w.router)
			write(password + "\n")
			w.waitBest("of the own AS", func(r lab.Route) bool {
				return isVIP(r) && len(r.ASPath) == 0 && r.LocalPref == "100" && len(r.Communities) == 0
			})
		})
	}
}

// Within an AS gateways honor local preference 0; TestTwoSites has the longer path of eBGP.
func TestGatewayOfEachKindAvoidsDrainedPod(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			w := newInterop(t, kind, func(c *lab.GatewayConfig) {
				c.LocalAS = lab.PodAS
				c.Local, c.Peers = append(c.Local, c.Local...), append(c.Peers, rival4, rival6)
			})
			w.must(w.pod.WriteTrench(trenchWith(t, fmt.Sprintf(", remoteASN: %d", lab.PodAS))))
			w.up(w.target1)
			w.startPod("--drain-time=10m")

			usual := func(r lab.Route) bool { return isVIP(r) && len(r.ASPath) == 0 && !r.GracefulShutdown() }
			w.waitBest("as usual", usual)
			admin := "--admin-socket=unix://" + w.pod.FrontendAdmin()
			if out, status := w.run("frontend", "drain", "--all", "--force", admin); status != 0 {
				t.Fatalf("frontend drain ended with %d: %s", status, out)
			}
			w.waitBest("de-preferred", func(r lab.Route) bool {
				return isVIP(r) && len(r.ASPath) == 0 && r.LocalPref == "0" && r.GracefulShutdown()
			})
			w.startRival()
			w.waitBest("turned away from the drained pod", func(r lab.Route) bool {
				return r.NextHop == rival4 || r.NextHop == rival6
			})
			if out, status := w.run("frontend", "undrain", admin); status != 0 {
				t.Fatalf("frontend undrain ended with %d: %s", status, out)
			}
			w.waitBest("back at the pod", usual)
		})
	}
}

// The addresses of another pod on the external network.
var (
	rival4 = netip.MustParseAddr("169.254.100.2")
	rival6 = netip.MustParseAddr("fd00:100::2")
)

// startRival starts a replacement for another pod of the trench. Its route to the VIPs of target 1
// is slightly less preferred than the route through the usual pod: with local preference 50.
func (f *fixture) startRival() {
	f.t.Helper()
	ns := lab.NewNetNS(f.t)
	f.must(f.Pod.IP("link", "add", "link", lab.External, "name", "ext0", "netns", ns.Name(), "type", "macvlan", "mode",
		"bridge"))
	f.must(ns.IP("link", "set", "ext0", "up"))
	f.must(ns.Addr("ext0", rival4.String()+"/24", rival6.String()+"/64"))
	conf := fmt.Sprintf("router id %s;\nlog stderr all;\nprotocol device {}\n", rival4)
	for _, s := range []struct {
		family, vip     string
		local, neighbor netip.Addr
	}{{"ipv4", vipA4, rival4, lab.GatewayA4}, {"ipv6", vipA6, rival6, lab.GatewayA6}} {
		conf += fmt.Sprintf(`protocol static { %[1]s; route %[2]s blackhole; }
protocol bgp rival_%[1]s {
	local %[3]s port %[5]d as %[6]d;
	neighbor %[4]s port %[5]d as %[6]d;
	direct;
	strict bind;
	connect delay time 1;
	connect retry time 2;
	%[1]s { import none; export filter { bgp_local_pref = 50; accept; }; };
}
`, s.family, s.vip, s.local, s.neighbor, lab.BGPPort, lab.PodAS)
	}
	f.must(os.WriteFile(f.path("rival.conf"), []byte(conf), 0o600))
	_, err := f.Start(ns, "rival", lab.BIRD(), "-f", "-c", f.path("rival.conf"), "-s", f.path("rival.ctl"))
	f.must(err)
}

// Gateways without configured pod addresses, with TCP-MD5 and without.
func TestGatewayOfEachKindWithDynamicNeighbors(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		for _, password := range []string{"", "secret"} {
			if password != "" && kind == lab.KindGoBGP {
				continue // gobgpd 3.10.0 takes no session with the password of a peer group
			}
			t.Run(fmt.Sprintf("%s/password=%t", kind, password != ""), func(t *testing.T) {
				t.Parallel()
				bfd := kind != lab.KindGoBGP
				w := newInterop(t, kind, func(c *lab.GatewayConfig) {
					c.Ranges, c.BFD, c.Password = lab.ExternalSubnets(), bfd, password
				})
				settings := ""
				if bfd {
					settings = ", " + lab.BFD
				}
				if password != "" {
					key := filepath.Join(w.Dir, "a.key")
					w.must(os.WriteFile(key, []byte(password+"\n"), 0o600))
					settings += ", passwordFile: " + key
				}
				w.must(w.pod.WriteTrench(trenchWith(t, settings)))
				w.up(w.target1)
				w.startPod()
				w.waitBest("from the pod", isVIP)
				w.waitTable("-4", "default via "+lab.GatewayA4.String())
				w.up(w.target2)
				w.waitRouter(w.router, every()...)
				w.down(w.target2)
				w.waitRouter(w.router, vipA4, vipA6)
				// The gateway removes a pod that ends, and accepts the next one.
				w.wantStop(w.pod.Frontend)
				w.waitRouter(w.router)
				w.must(w.pod.StartFrontend())
				w.waitRouter(w.router, vipA4, vipA6)
			})
		}
	}
}

// BFD with gateways that support it.
func TestBFDWithFRR(t *testing.T) {
	t.Parallel()
	for session, as := range map[string]uint32{"eBGP": lab.GatewayAS, "iBGP": lab.PodAS} {
		t.Run(session, func(t *testing.T) {
			t.Parallel()
			// The hold time is long, so that only BFD can detect the loss.
			w := newInterop(t, lab.KindFRR,
				func(c *lab.GatewayConfig) { c.LocalAS, c.BFD, c.BFDMultiplier = as, true, 8 })
			w.must(w.pod.WriteTrench(trenchWith(t,
				fmt.Sprintf(", remoteASN: %d, bfd: {minTx: 500ms, minRx: 500ms, multiplier: 8}", as))))
			w.up(w.target1)
			w.startPod()
			w.waitRouter(w.router, vipA4, vipA6)
			guarded := func(g *frontendv1.GatewayStatus) bool { return g.GetUp() && g.GetBfd() == "Up" }
			w.waitGateway("gateway-a4", guarded)
			w.waitGateway("gateway-a6", guarded)
			mark := w.routerMark(w.router)

			// Drop all IPv4 packets, in both directions, without an error.
			w.removeIPv4(w.Gateway)
			lost := time.Now()
			if down := w.waitGateway("gateway-a4", isDown); !strings.Contains(down.GetLastError(), "BFD") {
				t.Errorf("status: %v", down)
			}
			t.Logf("noticed by the pod after %v", time.Since(lost).Round(time.Millisecond))
			w.waitRouter(w.router, vipA6)
			t.Logf("noticed by both after %v", time.Since(lost).Round(time.Millisecond))
			w.restoreIPv4(w.Gateway)
			back := time.Now()
			w.waitRouter(w.router, vipA4, vipA6)
			t.Logf("back after %v", time.Since(back).Round(time.Millisecond))
			w.waitGateway("gateway-a4", guarded)
			w.wantRouterUpdates(w.router, mark, vipA4, withdrawn, announced)
			w.wantRouterUpdates(w.router, mark, vipA6)
		})
	}
}

// A gateway without BFD, such as gobgpd, stays up when the trench file enables BFD.
func TestBFDWithGatewayWithoutBFD(t *testing.T) {
	t.Parallel()
	w := newInterop(t, lab.KindGoBGP, func(*lab.GatewayConfig) {})
	w.must(w.pod.WriteTrench(trenchWith(t, ", bfd: {}")))
	w.up(w.target1)
	w.startPod()
	w.waitRouter(w.router, vipA4, vipA6)
	for _, name := range []string{"gateway-a4", "gateway-a6"} {
		w.waitGateway(name, func(g *frontendv1.GatewayStatus) bool { return g.GetUp() && g.GetBfd() == "Down" })
	}
}

// removeIPv4 drops all IPv4 packets at a gateway, in both directions.
func (f *fixture) removeIPv4(ns *lab.NetNS) {
	f.t.Helper()
	_, err := ns.Run(f.t.Context(), "nft", "add table inet lost; add chain inet lost in { type filter hook input "+
		"priority 0; }; add rule inet lost in meta nfproto ipv4 drop; "+
		"add chain inet lost out { type filter hook output priority 0; }; add rule inet lost out meta nfproto ipv4 drop")
	f.must(err)
}

// restoreIPv4 ends removeIPv4.
func (f *fixture) restoreIPv4(ns *lab.NetNS) {
	f.t.Helper()
	_, err := ns.Run(f.t.Context(), "nft", "delete table inet lost")
	f.must(err)
}

// One of two gateways of different kinds is lost; families are independent
// (docs/architecture.md#the-gate).
func TestLossOfOneGatewayOfTwoKinds(t *testing.T) {
	t.Parallel()
	for i, kindA := range kinds {
		kindB := kinds[(i+1)%len(kinds)]
		t.Run(string(kindA)+" lost, "+string(kindB)+" left", func(t *testing.T) {
			t.Parallel()
			need(t, kindB)
			w := newInterop(t, kindA, func(*lab.GatewayConfig) {})
			ns, err := w.SecondGateway()
			w.must(err)
			config := lab.GatewayB()
			config.HoldSeconds = 9 // the loss of a family is detected by it
			b := w.startRouter(kindB, ns, config)
			w.must(w.pod.WriteTrench(edited(t, lineA6, lineA6+"\n    "+lineB4+"\n    "+lineB6)))
			w.up(w.target1)
			w.startPod()
			w.waitRouter(w.router, vipA4, vipA6)
			w.waitRouter(b, vipA4, vipA6)
			for _, name := range []string{"gateway-a4", "gateway-a6", "gateway-b4", "gateway-b6"} {
				w.waitGateway(name, isUp)
			}
			egress4, egress6 := w.recordHealth("Egress/ipv4"), w.recordHealth("Egress/ipv6")
			egress4.wait(healthServing)
			egress6.wait(healthServing)
			mark := w.routerMark(b)

			// One gateway is lost: the remaining one keeps the VIPs and receives no update.
			for _, p := range w.router.Processes() {
				w.must(p.Kill())
			}
			for _, name := range []string{"gateway-a4", "gateway-a6"} {
				w.waitGateway(name, isDown)
			}
			w.waitRouter(b, vipA4, vipA6)
			egress4.wantOnly(healthServing)
			for _, v := range []string{vipA4, vipA6} {
				w.wantRouterUpdates(b, mark, v)
			}

			// The remaining gateway loses IPv4: IPv6 is not affected.
			w.removeIPv4(ns)
			egress4.wait(healthNotServing)
			w.waitRouter(b, vipA6)
			w.restoreIPv4(ns)
			back := time.Now()
			w.waitRouter(b, vipA4, vipA6)
			t.Logf("%s has the VIPs back %v after the link", kindB, time.Since(back).Round(time.Millisecond))
			egress4.wait(healthServing)
			w.wantRouterUpdates(b, mark, vipA4, withdrawn, announced)
			w.wantRouterUpdates(b, mark, vipA6)
			egress6.wantOnly(healthServing)

			w.must(w.router.Start())
			back = time.Now()
			w.waitRouter(w.router, vipA4, vipA6)
			t.Logf("%s has the VIPs back %v after its start", kindA, time.Since(back).Round(time.Millisecond))
			w.wantRouterUpdates(b, mark, vipA6)
		})
	}
}
