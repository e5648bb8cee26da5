package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	readinessv1 "github.com/vipgate/vipgate/pkg/api/readiness/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// The BFD sessions are up only while the load balancer forwards a VIP of their family.
func TestStaticFollowsReadiness(t *testing.T) {
	t.Parallel()
	for _, kind := range staticKinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := newStaticFixture(t, kind)
			s.start()
			s.waitGateway("gateway-a4", isHeld)
			s.waitGateway("gateway-a6", isHeld)
			s.waitHealthy("Egress")
			s.must(s.bfd(s.router, nil))
			s.wantUps(0)
			s.wantSent()

			s.up(s.target1)
			s.wantBFD(s.router, pod46...)
			s.wantSent(vipA4, vipB4, vipA6, vipB6)
			// A VIP that is not ready shares the session: the status reports it, once the frontend
			// has read the gateway's session.
			s.waitFor(func() error {
				vips := s.waitVIPs(vipA4, vipA6)
				if got := vips[vipB4].GetStaticGateways(); !slices.Equal(got, []string{"gateway-a4"}) {
					return fmt.Errorf("static gateways that send %s: %v", vipB4, got)
				}
				if got := vips[vipA4].GetStaticGateways(); len(got) != 0 {
					return fmt.Errorf("static gateways that send %s, which is announced: %v", vipA4, got)
				}
				return nil
			})
			text, _ := s.run("frontend", "status", s.admin())
			if !strings.Contains(text, "static gateway gateway-a4 sends traffic of VIPs that are not announced: 20.0.0.2/32") {
				t.Errorf("status does not tell of the shared session:\n%s", text)
			}

			s.must(s.pod.LB.Kill())
			s.wantBFD(s.router)
			s.wantUps(2)
			s.wantSent()
			s.waitVIPs()
			s.must(s.pod.StartLB())
			s.wantBFD(s.router, pod46...)
		})
	}
}

// waitHealthy waits for a health service of the frontend.
func (f *fixture) waitHealthy(service string) {
	f.t.Helper()
	f.wantHealth(lab.FrontendHealth, service, healthServing)
}

// The session of a family is down once none of its VIPs is ready; the second family is not
// affected.
func TestStaticSharedByFamily(t *testing.T) {
	t.Parallel()
	for _, kind := range staticKinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			s := newStaticFixture(t, kind)
			s.up(s.target1)
			s.up(s.target2)
			s.start()
			s.waitVIPs(vipA4, vipA6, vipB4, vipB6)
			s.wantBFD(s.router, pod46...)

			s.down(s.target1[:1])
			s.waitVIPs(vipA6, vipB4, vipB6)
			s.waitUnconfirmed(map[string]bool{vipA4: true})
			s.must(s.bfd(s.router, pod46))
			s.down(s.target2[:1])
			s.wantBFD(s.router, pod6...)
			s.waitVIPs(vipA6, vipB6)
			s.waitUnconfirmed(map[string]bool{vipA4: false, vipB4: false})
			s.waitGateway("gateway-a4", isHeld)
			s.wantSent(vipA6, vipB6)
			s.wantUps(2)
			s.up(s.target2[:1])
			s.wantBFD(s.router, pod46...)
			s.waitVIPs(vipA6, vipB4, vipB6)
			s.wantUps(3) // IPv6 stayed up
		})
	}
}

// waitUnconfirmed waits until exactly the withdrawals in want were reported to the lb; the value
// is whether the report is unconfirmed.
func (f *fixture) waitUnconfirmed(want map[string]bool) {
	f.t.Helper()
	f.waitFor(func() error {
		got := map[string]bool{}
		for _, v := range f.lbStatus().GetVips() {
			if r := v.GetReported(); r.GetAdvertisement() == readinessv1.Advertisement_ADVERTISEMENT_WITHDRAWN {
				got[v.GetVip()] = r.GetUnconfirmed()
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("the lb knows the withdrawals %v, want %v", got, want)
		}
		return nil
	})
}

// With --static-vips=all one VIP that is not ready takes the session down.
func TestStaticNeedsAllVIPs(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	s.up(s.target1)
	s.up(s.target2[:1])
	s.start("--static-vips=all")
	s.wantBFD(s.router, pod4...)
	s.waitGateway("gateway-a6", isHeld)
	s.wantUps(1)
	s.up(s.target2)
	s.wantBFD(s.router, pod46...)
	s.down(s.target1[:1])
	s.wantBFD(s.router, pod6...)
}

// A drain takes BFD down immediately, and the route of the replies remains for the drain time.
func TestStaticDrainKeepsReplies(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	s.up(s.target1)
	s.start(longDrain)
	s.wantBFD(s.router, pod46...)
	s.waitVIPs(vipA4, vipA6)
	s.waitTable("-4", "default via "+lab.GatewayA4.String())
	s.waitTable("-6", "default via "+lab.GatewayA6.String())
	if out, status := s.run("frontend", "drain", "--all", "--force", s.admin()); status != 0 {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	s.wantBFD(s.router)
	s.waitVIPs(vipA4, vipA6)
	s.wantReplyRoutes()
	if out, status := s.run("frontend", "undrain", s.admin()); status != 0 {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	s.wantBFD(s.router, pod46...)
	s.waitVIPs(vipA4, vipA6)

	// SIGTERM also drains, and then stops BIRD.
	s.must(s.pod.Frontend.Signal(syscall.SIGTERM))
	s.wantBFD(s.router)
	s.wantReplyRoutes()
	s.stop(s.pod.Frontend) // a second SIGTERM
	s.wantUps(4)
}

// wantReplyRoutes checks that replies leave through the gateway.
func (s *staticFixture) wantReplyRoutes() {
	s.t.Helper()
	for family, gateway := range map[string]netip.Addr{"-4": lab.GatewayA4, "-6": lab.GatewayA6} {
		if out := s.table(family); !strings.Contains(out, "default via "+gateway.String()) {
			s.t.Fatalf("no route for replies via %s:\n%s", gateway, out)
		}
	}
}

// A gateway that does not answer causes one withdrawal of the VIPs, without flaps.
func TestStaticWithoutAnswer(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	for _, p := range s.router.Processes() {
		s.must(p.Kill())
	}
	s.up(s.target1)
	s.start()
	s.waitFor(func() error {
		for _, v := range s.frontendStatus().GetVips() {
			if v.GetVip() == vipA4 && v.GetReason().String() != "ADVERTISEMENT_REASON_NO_GATEWAY" {
				return fmt.Errorf("%s: %s", vipA4, v.GetReason())
			}
		}
		return nil
	})
	s.waitGateway("gateway-a4", func(g *frontendv1.GatewayStatus) bool { return !g.GetUp() && !g.GetHeld() })
	s.wantHealth(lab.FrontendHealth, "Egress/ipv4", healthNotServing)
	s.waitPast(time.Now().Add(8 * time.Second)) // longer than the frontend waits for BFD
	for text, want := range map[string]int{
		`"VIP changed" vip=20.0.0.1/32`: 2, "static gateways released": 2, "static gateways held down": 0,
	} {
		text = strings.ReplaceAll(text, `"`, "")
		if got := strings.Count(strings.ReplaceAll(s.pod.Frontend.Output(), `"`, ""), text); got > want {
			t.Errorf("%q was logged %d times, want at most %d", text, got, want)
		}
	}
	s.must(s.router.Start())
	s.wantBFD(s.router, pod46...)
	s.waitVIPs(vipA4, vipA6)
	s.wantHealth(lab.FrontendHealth, "Egress/ipv4", healthServing)
}

// BIRD does not attract traffic after the frontend dies or hangs.
func TestStaticFrontendFaults(t *testing.T) {
	t.Parallel()
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		for _, kind := range staticKinds {
			t.Run(fmt.Sprint(name, " ", kind), func(t *testing.T) {
				t.Parallel()
				s := newStaticFixture(t, kind)
				s.pod.ProductTimers = true
				s.up(s.target1)
				s.start()
				s.wantBFD(s.router, pod46...)
				s.must(s.pod.Frontend.Signal(signal))
				s.wantBFD(s.router)
				if signal == syscall.SIGSTOP {
					s.must(s.pod.Frontend.Signal(syscall.SIGCONT))
				} else {
					s.wantExit(s.pod.Frontend, -1)
					s.startFrontend()
				}
				s.wantBFD(s.router, pod46...)
				s.waitVIPs(vipA4, vipA6)
			})
		}
	}
}

// A new BIRD starts with the sessions down, and raises them only if a VIP is ready.
func TestStaticBIRDRestart(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	s.up(s.target1[:1])
	s.start()
	s.wantBFD(s.router, pod4...)
	old := s.birdPID()
	s.must(syscall.Kill(old, syscall.SIGKILL))
	s.waitFor(func() error {
		if b := s.frontendStatus().GetBird(); int(b.GetPid()) == old || b.GetError() != "" {
			return fmt.Errorf("BIRD: %v", b)
		}
		return nil
	})
	s.wantBFD(s.router, pod4...)
	s.waitVIPs(vipA4)
	s.waitGateway("gateway-a6", isHeld)
	sessions, err := s.router.BFD(t.Context())
	s.must(err)
	if sessions[lab.PodExternal6] {
		t.Error("IPv6 is up")
	}
	if s.ups() > 2 {
		t.Errorf("BFD came up %d times", s.ups())
	}
}

// A configuration change neither raises nor breaks a session.
func TestStaticReconfigured(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	s.up(s.target1[:1])
	s.start()
	s.wantBFD(s.router, pod4...)
	s.waitGateway("gateway-a6", isHeld)
	s.wantUps(1)
	more := strings.Replace(edited(t, lineA4, staticA4+"\n    "+staticB4, lineA6, staticA6), vipB4+", ",
		vipB4+", 20.0.0.3/32, ", 1)
	s.must(s.pod.WriteTrench(more))
	s.waitGateway("gateway-b4", func(g *frontendv1.GatewayStatus) bool { return !g.GetUp() && !g.GetHeld() })
	s.waitFor(func() error {
		if n := len(s.frontendStatus().GetVips()); n != 5 {
			return fmt.Errorf("%d VIPs", n)
		}
		return nil
	})
	s.wantUndisturbed()
	s.must(s.pod.WriteTrench(edited(t, lineA4, staticA4, lineA6, staticA6)))
	s.waitFor(func() error {
		if n := len(s.frontendStatus().GetGateways()); n != 2 {
			return fmt.Errorf("%d gateways", n)
		}
		return nil
	})
	s.wantUndisturbed()
}

// wantUndisturbed checks that the only session has been up without interruption: an interruption
// is visible after the detection time of the gateway.
func (s *staticFixture) wantUndisturbed() {
	s.t.Helper()
	s.waitPast(time.Now().Add(lab.BFDDetection + time.Second))
	s.must(s.bfd(s.router, pod4))
	s.wantUps(1)
}

// A BGP gateway and a static gateway share a family.
func TestStaticBesideBGP(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	ns, err := f.SecondGateway()
	f.must(err)
	c := lab.GatewayB()
	c.Name = "router-b"
	router := f.startStatic(lab.KindBIRD, ns, c)
	f.must(f.pod.WriteTrench(edited(t, lineA4, lineA4+"\n    "+staticB4)))
	f.must(f.pod.StartLB())
	f.startFrontend()
	f.waitGateway("gateway-b4", isHeld)
	f.must(f.bfd(router, nil))
	f.up(f.target1)
	f.wantRoutes(vipA4, vipA6)
	f.wantBFD(router, pod4...)
	f.waitTable("-4", "default via 169.254.100.15")
	// After the loss of the BGP session the static gateway keeps the VIPs.
	f.must(f.gateway.Process.Kill())
	f.waitGateway("gateway-a4", isDown)
	f.waitVIPs(vipA4)
	f.waitTable("-4", "default via "+lab.GatewayB4.String())
	f.must(f.gateway.Start())
	f.wantRoutes(vipA4, vipA6)
	f.down(f.target1)
	f.wantRoutes()
	f.wantBFD(router)
}

// A static gateway without BFD is up, and status and log warn that its VIPs cannot be withdrawn.
func TestStaticWithoutBFD(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.gateway.Process.Kill())
	f.must(f.pod.WriteTrench(edited(t, lineA4, strings.Replace(staticA4, ", "+lab.BFD, "", 1), lineA6, staticA6)))
	f.up(f.target1)
	f.must(f.pod.StartLB())
	f.startFrontend()
	f.waitVIPs(vipA4)
	f.waitTable("-4", "default via "+lab.GatewayA4.String())
	f.waitGateway("gateway-a4", isUp)
	f.waitLog(f.pod.Frontend, "static gateway without BFD cannot be withdrawn")
	text, _ := f.run("frontend", "status", "--admin-socket=unix://"+f.pod.FrontendAdmin())
	if !strings.Contains(text, "static gateway gateway-a4: it cannot be withdrawn") {
		t.Errorf("status does not warn:\n%s", text)
	}
	f.down(f.target1)
	vips := f.waitVIPs()
	if got := vips[vipA4].GetStaticGateways(); !slices.Equal(got, []string{"gateway-a4"}) {
		t.Errorf("static gateways that send %s: %v", vipA4, got)
	}
}

// The kernel state that keeps BFD down remains after the end of the frontend, until it is cleaned
// up.
func TestStaticCleanup(t *testing.T) {
	t.Parallel()
	for name, flags := range map[string][]string{"cleanup": nil, "at exit": {"--remove-rules-on-exit"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStaticFixture(t, lab.KindBIRD)
			s.start(append(flags, noDrain, shortSettle)...)
			s.waitGateway("gateway-a4", isHeld)
			s.wantLease(true)
			s.stop(s.pod.Frontend)
			if flags == nil {
				s.wantLease(true)
				if out, status := s.run("frontend", "cleanup"); status != 0 {
					t.Fatalf("frontend cleanup ended with %d: %s", status, out)
				}
			}
			s.wantLease(false)
		})
	}
}

// wantLease checks whether the pod's kernel has the table that keeps BFD down.
func (s *staticFixture) wantLease(want bool) {
	s.t.Helper()
	out, err := s.Pod.Run(s.t.Context(), "nft", "list", "tables")
	s.must(err)
	if got := strings.Contains(out, "vipgate-bfd"); got != want {
		s.t.Errorf("the table of the BFD lease exists: %v, want %v:\n%s", got, want, out)
	}
}
