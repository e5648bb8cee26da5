package bird_test

import (
	"fmt"
	"testing"

	"github.com/vipgate/vipgate/pkg/announce"
	"github.com/vipgate/vipgate/pkg/bird"
	"github.com/vipgate/vipgate/pkg/gate"
	"github.com/vipgate/vipgate/pkg/policy"
	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/await"
	"github.com/vipgate/vipgate/test/harness"
)

// The export of one gateway changes without a reset of its session, and without an effect on the
// other gateway.
func TestExportOfOneGateway(t *testing.T) {
	for _, tt := range []struct {
		name            string
		as              uint32
		path, localPref string
	}{
		{"eBGP", remoteAS, "8103 8103 8103 8103", "100"},
		{"iBGP", localAS, "", "0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, gw, _ := bothUp(t, routerConfig{AS: tt.as}, withAS(tt.as))
			p.Announce(announce.Announced, vip4, vip6)
			await.True(t, "VIPs at the gateways", func() bool { return gw.Has(vip4) && gw.Has(vip6) })
			before := p.State().Load().Gateways

			p.Export(map[string]bird.Export{"gateway-ipv4": bird.ExportDepreferred})
			await.True(t, "de-preference", func() bool { return gw.Attribute(vip4, "community") == "(65535,0)" })
			path, preference := gw.Attribute(vip4, "as_path"), gw.Attribute(vip4, "local_pref")
			if path != tt.path || preference != tt.localPref {
				t.Errorf("path %q and local preference %q, want %q and %q", path, preference, tt.path, tt.localPref)
			}
			// A VIP that drains anyway gets the community once.
			p.Announce(announce.Depreferred, vip4)
			p.Export(map[string]bird.Export{"gateway-ipv4": bird.ExportNone})
			await.True(t, "withdrawal", func() bool { return !gw.Has(vip4) })
			p.await("expected exports", func(s bird.State) bool {
				return s.Gateways[0].Export == bird.ExportNone && s.Gateways[0].Exported == 0 && !s.Gateways[0].Short
			})
			p.Export(map[string]bird.Export{"gateway-ipv4": bird.ExportDepreferred})
			await.True(t, "de-preference", func() bool { return gw.Attribute(vip4, "community") == "(65535,0)" })
			p.Announce(announce.Announced, vip4)
			p.Export(nil)
			await.True(t, "announcement", func() bool { return gw.Has(vip4) && gw.Attribute(vip4, "community") == "" })

			if !gw.Has(vip6) || gw.Attribute(vip6, "community") != "" {
				t.Error("the other gateway was affected")
			}
			for i, g := range p.State().Load().Gateways {
				if !g.Up || !g.Since.Equal(before[i].Since) {
					t.Errorf("the session of %s restarted", g.Name)
				}
			}
		})
	}
}

// LOCAL_PREF of a policy does not undo the de-preference of a VIP or of a gateway.
func TestDepreferenceWithPolicy(t *testing.T) {
	p, gw, _ := bothUp(t, routerConfig{AS: localAS}, withAS(localAS))
	policies, err := policy.New([]trench.Policy{{Ready: trench.Attributes{LocalPreference: 300}}}, policy.Carried)
	harness.Must(t, err)
	wants := func(preference string, decision gate.Decision, export bird.Export) {
		t.Helper()
		p.revision++
		route := policies.Route(vip4, decision)
		p.Announcer.Post(announce.Batch{Changes: []announce.Change{{VIP: vip4, Route: route}}, Revision: p.revision})
		p.Export(map[string]bird.Export{"gateway-ipv4": export})
		await.True(t, fmt.Sprintf("%+v with export %s has LOCAL_PREF %s", decision, export, preference),
			func() bool { return gw.Has(vip4) && gw.Attribute(vip4, "local_pref") == preference })
	}
	ready := gate.Decision{Advertisement: gate.Announced, Reason: gate.Ready}
	wants("300", ready, bird.ExportFull)
	wants("0", gate.Decision{Advertisement: gate.Depreferred, Reason: gate.Stopping}, bird.ExportFull)
	wants("300", ready, bird.ExportFull)
	wants("0", gate.Decision{Advertisement: gate.Depreferred, Reason: gate.LastResort}, bird.ExportFull)
	wants("300", ready, bird.ExportFull)
	wants("0", ready, bird.ExportDepreferred)
}

// An export that is set before the first configuration, as after a restart, is in force from the
// first UPDATE.
func TestExportBeforeConfigure(t *testing.T) {
	run(t, "ip", "link", "set", "lo", "up")
	l := newLink(t, vip.IPv4, vip.IPv6)
	gw := l.Router(routerConfig{})
	p := newPod(t, l.Dev)
	p.Export(map[string]bird.Export{"gateway-ipv4": bird.ExportNone})
	p.Configure([]trench.Gateway{gatewayOf(vip.IPv4), gatewayOf(vip.IPv6)}, []vip.VIP{vip4, vip6})
	p.Start()
	p.await("both sessions up", up("gateway-ipv4", "gateway-ipv6"))
	p.Announce(announce.Announced, vip4, vip6)
	await.True(t, "VIP at the other gateway", func() bool { return gw.Has(vip6) })
	ctx := harness.Context(t, patience)
	harness.Must(t, p.Confirm(ctx))
	if gw.Has(vip4) {
		t.Error("the drained gateway received the VIP")
	}
}

func withAS(as uint32) func(*trench.Gateway) {
	return func(g *trench.Gateway) { g.RemoteASN = int64(as) }
}
