package e2e

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	adminv1 "github.com/vipgate/vipgate/pkg/api/admin/v1"
	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/test/lab"
)

// staticKinds are the kinds of static gateways that the product is tested with.
var staticKinds = []lab.Kind{lab.KindBIRD, lab.KindFRR}

// Lines of static gateways in the trench file.
var (
	staticA4 = fmt.Sprintf("- {name: gateway-a4, protocol: static, address: %s, %s}", lab.GatewayA4, lab.BFD)
	staticA6 = fmt.Sprintf("- {name: gateway-a6, protocol: static, address: %q, %s}", lab.GatewayA6, lab.BFD)
	staticB4 = fmt.Sprintf("- {name: gateway-b4, protocol: static, address: %s, %s}", lab.GatewayB4, lab.BFD)
)

// staticFixture is a fixture whose gateway is static.
type staticFixture struct {
	*fixture
	kind   lab.Kind
	router lab.StaticGateway
}

// newStaticFixture creates a fixture that has a static gateway instead of the usual one. The
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

// startStatic starts a static gateway to the usual VIPs, and prints its log after a failure.
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
	s.startFrontend(append([]string{"--drain-time=3s"}, extra...)...) // the last flag wins
}

// startFrontend starts the frontend and waits until it serves its status.
func (f *fixture) startFrontend(extra ...string) {
	f.t.Helper()
	f.must(f.pod.StartFrontend(extra...))
	f.waitFor(func() error {
		_, err := frontendv1.NewFrontendServiceClient(f.dial(f.pod.FrontendAdmin())).GetStatus(
			f.t.Context(), &adminv1.GetStatusRequest{},
		)
		return err
	})
}

// wantBFD waits until exactly the BFD sessions with peers are up at a gateway.
func (f *fixture) wantBFD(r lab.StaticGateway, peers ...netip.Addr) {
	f.t.Helper()
	begin := time.Now()
	f.waitFor(func() error { return f.bfd(r, peers) })
	f.t.Logf("BFD with %v after %v", peers, time.Since(begin).Round(time.Millisecond))
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

// wantSent waits until the gateway's kernel routes exactly these VIPs to the pod. FRR 8.4 does not
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

// isHeld reports whether the frontend keeps the BFD session down.
func isHeld(g *frontendv1.GatewayStatus) bool { return g.GetHeld() && !g.GetUp() }

var (
	pod4  = []netip.Addr{lab.PodExternal4}
	pod6  = []netip.Addr{lab.PodExternal6}
	pod46 = []netip.Addr{lab.PodExternal4, lab.PodExternal6}
)

func (s *staticFixture) admin() string { return "--admin-socket=unix://" + s.pod.FrontendAdmin() }
