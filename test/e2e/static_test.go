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
	"github.com/vipgate/vipgate/test/lab"
)

// staticKinds are the kinds of static gateways that the product is tested with.
var staticKinds = []lab.Kind{lab.KindBIRD, lab.KindFRR}

const staticBFD = "bfd: {minTx: 100ms, minRx: 100ms}"

// Lines of static gateways in the trench file.
var (
	staticA4 = fmt.Sprintf("- {name: gateway-a4, protocol: static, address: %s, %s}", lab.GatewayA4, staticBFD)
	staticA6 = fmt.Sprintf("- {name: gateway-a6, protocol: static, address: %q, %s}", lab.GatewayA6, staticBFD)
	staticB4 = fmt.Sprintf("- {name: gateway-b4, protocol: static, address: %s, %s}", lab.GatewayB4, staticBFD)
)

// Bounds of a change of the BFD sessions as a gateway sees it. The detection time is 0.3 s; a
// killed or stopped frontend is noticed by the hold time of the announcer's session, 3 s.
const (
	staticDeadline     = 2 * time.Second
	staticHangDeadline = 5 * time.Second
)

// staticFixture is a fixture whose gateway is static.
type staticFixture struct {
	*fixture
	kind   lab.Kind
	router lab.StaticGateway
}

// newStaticFixture creates a fixture with a static gateway in the place of the usual one. The
// trench file has both families.
func newStaticFixture(t *testing.T, kind lab.Kind) *staticFixture {
	t.Helper()
	need(t, kind)
	f := newFixture(t)
	f.must(f.gateway.Process.Kill())
	f.must(f.pod.WriteTrench(edited(t, lineA4, staticA4, lineA6, staticA6)))
	c := lab.GatewayA()
	c.Name = "router-a"
	return &staticFixture{f, kind, f.startStatic(kind, f.Gateway, c)}
}

// startStatic starts a static gateway to the usual VIPs, and shows what it logged after a failure.
func (f *fixture) startStatic(kind lab.Kind, ns *lab.NetNS, c lab.GatewayConfig) lab.StaticGateway {
	f.t.Helper()
	for _, v := range []string{vipA4, vipA6, vipB4, vipB6} {
		c.VIPs = append(c.VIPs, netip.MustParsePrefix(v))
	}
	r, err := f.StartStatic(kind, ns, c)
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

// start starts lb and frontend with a short drain time.
func (s *staticFixture) start(extra ...string) {
	s.t.Helper()
	s.must(s.pod.StartLB())
	s.startFrontend(append([]string{"--drain-time=3s"}, extra...)...)
}

// startFrontend starts the frontend and waits until it serves its status.
func (f *fixture) startFrontend(extra ...string) {
	f.t.Helper()
	f.must(f.pod.StartFrontend(extra...))
	f.waitFor(func() error {
		_, err := frontendv1.NewFrontendServiceClient(f.dial(f.pod.FrontendAdmin())).GetStatus(
			f.t.Context(), &frontendv1.GetStatusRequest{},
		)
		return err
	})
}

// wantBFD waits until BFD sessions with exactly these pods' addresses are up at a gateway.
func (f *fixture) wantBFD(r lab.StaticGateway, peers ...netip.Addr) {
	f.t.Helper()
	f.waitFor(func() error { return f.bfd(r, peers) })
}

// wantBFDWithin is wantBFD with a bound.
func (f *fixture) wantBFDWithin(r lab.StaticGateway, bound time.Duration, peers ...netip.Addr) {
	f.t.Helper()
	begin := time.Now()
	f.wantBFD(r, peers...)
	took := time.Since(begin)
	f.t.Logf("BFD with %v after %v", peers, took.Round(time.Millisecond))
	if took > bound {
		f.t.Errorf("BFD with %v took %v, more than %v", peers, took, bound)
	}
}

func (f *fixture) bfd(r lab.StaticGateway, peers []netip.Addr) error {
	sessions, err := r.BFD(f.t.Context())
	if err != nil {
		return err
	}
	var up []netip.Addr
	for peer, isUp := range sessions {
		if isUp {
			up = append(up, peer)
		}
	}
	slices.SortFunc(up, netip.Addr.Compare)
	if !slices.Equal(up, peers) {
		return fmt.Errorf("BFD is up with %v, want %v", up, peers)
	}
	return nil
}

// ups returns how often BFD came up at the gateway.
func (s *staticFixture) ups() int {
	s.t.Helper()
	n, err := s.router.BFDUps(s.t.Context())
	s.must(err)
	return n
}

// wantUps checks how often BFD came up.
func (s *staticFixture) wantUps(want int) {
	s.t.Helper()
	if got := s.ups(); got != want {
		s.t.Errorf("BFD came up %d times, want %d", got, want)
	}
}

// wantSent waits until the gateway's kernel sends exactly these VIPs to the pod. FRR 8.4 does not
// monitor static routes.
func (s *staticFixture) wantSent(vips ...string) {
	s.t.Helper()
	if s.kind != lab.KindBIRD {
		return
	}
	s.waitFor(func() error {
		var sent []string
		for _, v := range []string{vipA4, vipB4, vipA6, vipB6} {
			out, _ := s.Gateway.Run(s.t.Context(), "ip", "route", "get", netip.MustParsePrefix(v).Addr().String())
			if strings.Contains(out, " via ") {
				sent = append(sent, v)
			}
		}
		if !slices.Equal(sent, vips) {
			return fmt.Errorf("the gateway sends %v to the pod, want %v", sent, vips)
		}
		return nil
	})
}

// waitVIPs waits until exactly these VIPs are advertised.
func (f *fixture) waitVIPs(vips ...string) map[string]*frontendv1.VipStatus {
	f.t.Helper()
	var all map[string]*frontendv1.VipStatus
	f.waitFor(func() error {
		all = map[string]*frontendv1.VipStatus{}
		for _, v := range f.frontendStatus().GetVips() {
			all[v.GetVip()] = v
		}
		advertised := slices.DeleteFunc(slices.Sorted(maps.Keys(all)), func(v string) bool {
			return all[v].GetAdvertisement().String() == "ADVERTISEMENT_WITHDRAWN"
		})
		if want := slices.Sorted(slices.Values(vips)); !slices.Equal(advertised, want) {
			return fmt.Errorf("advertised are %v, want %v", advertised, want)
		}
		return nil
	})
	return all
}

// isHeld: the frontend keeps the BFD session down.
func isHeld(g *frontendv1.GatewayStatus) bool { return g.GetHeld() && !g.GetUp() }

var (
	pod4  = []netip.Addr{lab.PodExternal4}
	pod6  = []netip.Addr{lab.PodExternal6}
	pod46 = []netip.Addr{lab.PodExternal4, lab.PodExternal6}
)

func (s *staticFixture) admin() string { return "--admin-socket=unix://" + s.pod.FrontendAdmin() }

// The BFD sessions are up while the load balancer forwards a VIP of their family.
func TestStaticFollowsReadiness(t *testing.T) {
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
			vips := s.waitVIPs(vipA4, vipA6)
			s.wantSent(vipA4, vipB4, vipA6, vipB6)
			// A VIP that is not ready shares the session: the status says so.
			if got := vips[vipB4].GetStaticGateways(); !slices.Equal(got, []string{"gateway-a4"}) {
				t.Errorf("static gateways that send %s: %v", vipB4, got)
			}
			if got := vips[vipA4].GetStaticGateways(); len(got) != 0 {
				t.Errorf("static gateways that send %s, which is announced: %v", vipA4, got)
			}
			text, _ := s.run("frontend", "status", s.admin())
			if !strings.Contains(text, "static gateway gateway-a4 sends traffic of VIPs that are not announced: 20.0.0.2/32") {
				t.Errorf("status does not tell of the shared session:\n%s", text)
			}

			s.must(s.pod.LB.Signal(syscall.SIGKILL))
			s.wantBFDWithin(s.router, 2*staticDeadline) // the grace period of the LB is part of it
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

// The session of a family is down once none of its VIPs is ready, and the other family is
// untouched.
func TestStaticSharedByFamily(t *testing.T) {
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
			s.must(s.bfd(s.router, pod46))
			s.down(s.target2[:1])
			s.wantBFDWithin(s.router, staticDeadline, pod6...)
			s.waitVIPs(vipA6, vipB6)
			s.waitGateway("gateway-a4", isHeld)
			s.wantSent(vipA6, vipB6)
			s.wantUps(2)
			s.up(s.target2[:1])
			s.wantBFDWithin(s.router, staticDeadline, pod46...)
			s.waitVIPs(vipA6, vipB4, vipB6)
			s.wantUps(3) // IPv6 stayed up
		})
	}
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
	s.wantBFDWithin(s.router, staticDeadline, pod6...)
}

// A drain takes BFD down at once, and the route of the replies stays for the drain time.
func TestStaticDrainKeepsReplies(t *testing.T) {
	t.Parallel()
	s := newStaticFixture(t, lab.KindBIRD)
	s.up(s.target1)
	s.start("--drain-time=6s")
	s.wantBFD(s.router, pod46...)
	s.waitVIPs(vipA4, vipA6)
	s.waitTable("-4", "default via "+lab.GatewayA4.String())
	s.waitTable("-6", "default via "+lab.GatewayA6.String())
	begin := time.Now()
	if out, status := s.run("frontend", "drain", s.admin()); status != 0 {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	s.wantBFDWithin(s.router, staticDeadline)
	for time.Since(begin) < 5*time.Second {
		s.wantReplyRoutes()
	}
	s.waitVIPs()
	if took := time.Since(begin); took < 6*time.Second {
		t.Errorf("the VIPs were withdrawn after %v, before the end of the drain time", took)
	}
	s.wantReplyRoutes()
	if out, status := s.run("frontend", "undrain", s.admin()); status != 0 {
		t.Fatalf("frontend undrain ended with %d: %s", status, out)
	}
	s.wantBFDWithin(s.router, staticDeadline, pod46...)
	s.waitVIPs(vipA4, vipA6)

	// SIGTERM is a drain, too, at whose end BIRD ends.
	s.must(s.pod.Frontend.Signal(syscall.SIGTERM))
	begin = time.Now()
	s.wantBFDWithin(s.router, staticDeadline)
	for time.Since(begin) < 5*time.Second {
		s.wantReplyRoutes()
	}
	s.wantExit(s.pod.Frontend, 0)
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

// A gateway that does not answer withdraws the VIPs once, and nothing flaps.
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

// A frontend that dies or hangs does not keep BIRD attracting traffic.
func TestStaticFrontendFaults(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "stopped": syscall.SIGSTOP} {
		for _, kind := range staticKinds {
			t.Run(fmt.Sprint(name, " ", kind), func(t *testing.T) {
				t.Parallel()
				s := newStaticFixture(t, kind)
				s.up(s.target1)
				s.start()
				s.wantBFD(s.router, pod46...)
				s.must(s.pod.Frontend.Signal(signal))
				s.wantBFDWithin(s.router, staticHangDeadline)
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

// A new BIRD begins with the sessions down, and raises them only if a VIP is ready.
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

// A change of the configuration neither raises a session nor breaks one.
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
	s.must(s.bfd(s.router, pod4))
	s.wantUps(1)
	s.must(s.pod.WriteTrench(edited(t, lineA4, staticA4, lineA6, staticA6)))
	s.waitFor(func() error {
		if n := len(s.frontendStatus().GetGateways()); n != 2 {
			return fmt.Errorf("%d gateways", n)
		}
		return nil
	})
	s.must(s.bfd(s.router, pod4))
	s.wantUps(1)
}

// A BGP gateway and a static one share a family.
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
	// A lost BGP session leaves the VIPs to the static gateway.
	f.must(f.gateway.Process.Kill())
	f.waitGateway("gateway-a4", isDown)
	f.waitVIPs(vipA4)
	f.waitTable("-4", "default via "+lab.GatewayB4.String())
	f.must(f.gateway.Start())
	f.wantRoutes(vipA4, vipA6)
	f.down(f.target1)
	f.wantRoutes()
	f.wantBFDWithin(router, staticDeadline)
}

// A static gateway without BFD is up, and status and log warn that it cannot be withdrawn.
func TestStaticWithoutBFD(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.must(f.gateway.Process.Kill())
	f.must(f.pod.WriteTrench(edited(t, lineA4, strings.Replace(staticA4, ", "+staticBFD, "", 1), lineA6, staticA6)))
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
