package meridio2

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"

	frontendv1 "github.com/vipgate/vipgate/pkg/api/frontend/v1"
	"github.com/vipgate/vipgate/pkg/trench"
	trenchfile "github.com/vipgate/vipgate/pkg/trench/file"
	"github.com/vipgate/vipgate/pkg/vip"
	"github.com/vipgate/vipgate/test/harness"
)

// The GatewayRouters of Meridio 2's end-to-end suites and samples (July 2026). All BGP routers
// have AS 4200000000, port 10179 on both sides and a hold time of 24 s; all have BFD at 300 ms.
var suites = []struct {
	suite, gateway, router, device, address string
	localASN                                int64 // 0 for a static router
	multiplier                              int
}{
	{"dual-stack", "gw-ds", "gw-ds-router-v4", "vlan-100", "169.254.10.150", 64512, 3},
	{"dual-stack", "gw-ds", "gw-ds-router-v6", "vlan-100", "fd00:cafe:10::150", 64512, 3},
	{"ipv4-simple", "gw-m1", "gw-m1-router-v4", "vlan-700", "169.254.40.150", 64518, 3},
	{"pod-cache-label", "gw-pcl", "gw-router-pcl", "vlan-800", "169.254.50.150", 64519, 3},
	{"sctp-multihoming", "sctp-gw1", "sctp-gw1-router-vlan500", "vlan-500", "169.254.30.150", 64516, 5},
	{"sctp-multihoming", "sctp-gw2", "sctp-gw2-router-vlan600", "vlan-600", "169.254.31.150", 64517, 5},
	{"separate-appnetwork", "gw-a1", "gw-a1-router-v4", "vlan-100", "169.254.10.150", 64512, 3},
	{"separate-appnetwork", "gw-a2", "gw-a2-router-v4", "vlan-200", "169.254.11.150", 64513, 3},
	{"separate-static-appnetwork", "gw-a1", "gw-a1-router-v4-static", "vlan-1100", "169.254.110.150", 0, 3},
	{"separate-static-appnetwork", "gw-a2", "gw-a2-router-v4-static", "vlan-1200", "169.254.111.150", 0, 3},
	{"shared-appnetwork", "gw-b1", "gw-b1-router-v4", "vlan-300", "169.254.20.150", 64514, 3},
	{"shared-appnetwork", "gw-b2", "gw-b2-router-v4", "vlan-400", "169.254.21.150", 64515, 3},
	{"samples", "sllb-a", "gatewayrouter-sample", "vlan-100", "169.254.100.150", 64512, 3},
	{"samples, static", "sllb-a", "gatewayrouter-static-sample", "vlan-100", "169.254.100.150", 0, 3},
}

// Each GatewayRouter is a gateway of the trench file, also while its Gateway has no VIP.
func TestSuitesOfMeridio2(t *testing.T) {
	for _, s := range suites {
		t.Run(s.suite+"/"+s.router, func(t *testing.T) {
			guard := fmt.Sprintf("bfd: {minTx: 300ms, minRx: 300ms, multiplier: %d}", s.multiplier)
			protocol := "protocol: Static\n  static: {" + guard + "}\n"
			want := trench.Gateway{
				Name: s.router, Address: netip.MustParseAddr(s.address), Protocol: trench.Static,
				BFD: &trench.BFD{MinTx: 300 * time.Millisecond, MinRx: 300 * time.Millisecond, Multiplier: s.multiplier},
			}
			if s.localASN != 0 {
				protocol = fmt.Sprintf("protocol: BGP\n  bgp: {localASN: %d, remoteASN: 4200000000, localPort: 10179, "+
					"remotePort: 10179, holdTime: 24s, %s}\n", s.localASN, guard)
				want.Protocol, want.LocalASN, want.RemoteASN = trench.BGP, s.localASN, 4200000000
				want.LocalPort, want.RemotePort, want.HoldTime = 10179, 10179, 24*time.Second
			}
			for _, addresses := range []string{"", "{value: 20.0.0.1}, {value: \"2000::1\"}"} {
				var o Objects
				harness.Must(t, o.Read(strings.NewReader(fmt.Sprintf(`apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: %[1]s, namespace: e2e}
status: {addresses: [%[2]s]}
---
apiVersion: meridio-2.nordix.org/v1alpha1
kind: GatewayRouter
metadata: {name: %[3]s, namespace: e2e}
spec:
  gatewayRef: {name: %[1]s}
  interface: %[4]s
  address: "%[5]s"
  %[6]s`, s.gateway, addresses, s.router, s.device, s.address, protocol))))
				r := Translate(o)
				c, err := trenchfile.Parse("trench.yaml", r.File, trench.DefaultDefaults())
				if err != nil {
					t.Fatalf("%v\n%s", err, r.Table())
				}
				a := c.Attractor
				if len(a.Gateways) != 1 || a.Interface != s.device || len(a.VIPs) != strings.Count(addresses, "value") {
					t.Fatalf("%+v\n%s", a, r.Table())
				}
				got := a.Gateways[0]
				if *got.BFD != *want.BFD {
					t.Errorf("BFD %+v", *got.BFD)
				}
				if got.BFD = want.BFD; got != want {
					t.Errorf("gateway %+v\nwant    %+v", got, want)
				}
			}
		})
	}
}

// suiteGates returns the readiness gates of a suite's pods, one for each address family of the
// internal subnets of its GatewayConfigurations.
func suiteGates(suite string) []vip.Family {
	if suite == "dual-stack" {
		return []vip.Family{vip.IPv4, vip.IPv6}
	}
	return []vip.Family{vip.IPv4}
}

// suitePod is a pod of a Gateway of the suites, whose gates are set.
type suitePod struct {
	t       *testing.T
	api     *api
	gates   *Gates
	pod     *corev1.Pod
	now     time.Time
	gateway []*frontendv1.GatewayStatus
}

// set marks the gateways of a family as up or not.
func (p *suitePod) set(f vip.Family, up bool) {
	for _, g := range p.gateway {
		if vip.FamilyOf(netip.MustParseAddr(g.Address)) == f {
			g.Up, g.Since = up, timestamppb.New(p.now)
		}
	}
}

// after lets time pass, and checks that exactly the given gates are True.
func (p *suitePod) after(d time.Duration, step string, connected ...vip.Family) {
	p.t.Helper()
	p.now = p.now.Add(d)
	p.gates.apply(p.t.Context(), p.now, Input{Known: true, Pod: p.pod},
		state{status: &frontendv1.Status{Gateways: p.gateway}})
	for _, w := range p.api.writes {
		for _, c := range w["status"].(map[string]any)["conditions"].([]any) {
			c := c.(map[string]any)
			kind := corev1.PodConditionType(c["type"].(string))
			p.pod.Status.Conditions = append(slices.DeleteFunc(p.pod.Status.Conditions,
				func(is corev1.PodCondition) bool { return is.Type == kind }),
				corev1.PodCondition{Type: kind, Status: corev1.ConditionStatus(c["status"].(string))})
		}
		p.pod.ResourceVersion += "'"
	}
	p.api.writes = nil
	got := map[corev1.PodConditionType]corev1.ConditionStatus{}
	for _, c := range p.pod.Status.Conditions {
		got[c.Type] = c.Status
	}
	want := map[corev1.PodConditionType]corev1.ConditionStatus{}
	for _, g := range p.pod.Spec.ReadinessGates {
		want[g.ConditionType] = corev1.ConditionFalse
	}
	for _, f := range connected {
		want[GateOf(f)] = corev1.ConditionTrue
	}
	if !maps.Equal(got, want) {
		p.t.Errorf("%s: gates %v, want %v", step, got, want)
	}
}

// The steps of Meridio 2's end-to-end test of readiness gates, for each Gateway of its suites. A
// gate depends only on the gateways of its family: it becomes false immediately, and true after 3
// s.
func TestGatesOfSuites(t *testing.T) {
	pods := map[string]*suitePod{}
	for _, s := range suites {
		name := s.suite + "/" + s.gateway
		p := pods[name]
		if p == nil {
			p = &suitePod{api: newAPI(), pod: gatedPod("1", ""), now: time.Now()}
			p.pod.Spec.ReadinessGates, p.pod.Status.Conditions = nil, nil
			for _, f := range suiteGates(s.suite) {
				p.pod.Spec.ReadinessGates = append(p.pod.Spec.ReadinessGates, corev1.PodReadinessGate{ConditionType: GateOf(f)})
			}
			var reported error
			p.gates = newGates(p.api, &reported)
			pods[name] = p
		}
		p.gateway = append(p.gateway, &frontendv1.GatewayStatus{Name: s.router, Address: s.address})
	}
	for name, p := range pods {
		t.Run(name, func(t *testing.T) {
			p.t = t
			all := suiteGates(strings.Split(name, "/")[0])
			p.after(0, "start")
			for _, f := range all {
				p.set(f, true)
			}
			p.after(0, "sessions up")
			p.after(holdTime, "sessions up for the hold time", all...)
			for i, f := range all {
				p.set(f, false)
				p.after(0, f.String()+" down", all[i+1:]...)
				p.set(f, true)
				p.after(0, f.String()+" up", all[i+1:]...)
				p.after(time.Second, f.String()+" up for 1 s", all[i+1:]...)
				p.set(f, false)
				p.after(holdTime, f.String()+" flapped", all[i+1:]...)
			}
			for i, f := range all {
				p.set(f, true)
				p.after(0, f.String()+" up again", all[:i]...)
				p.after(holdTime, f.String()+" recovered", all[:i+1]...)
			}
		})
	}
}
