package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// policies are the policies of TestPolicyOfEachKind.
const policies = `  policies:
  - vips: ["20.0.0.1/32", "2000::1/128"]
    ready: {communities: ["64512:100", "64512:1:100"], med: 50, prepend: 2, localPreference: 300,
      targetBandwidth: 10}
    draining: {communities: ["64512:666"], med: 500, localPreference: 7}
`

// bandwidth is the link bandwidth of one ready target, as gateways show it.
var bandwidth = map[lab.Kind]string{
	lab.KindBIRD: "(unknown 0x4, 8103, 1234736768)", lab.KindFRR: "LB:8103:1250000 (10.000 Mbps)",
	lab.KindGoBGP: `[{"type":64,"subtype":4,"asn":8103,"bandwidth":1250000}]`,
}

// withPolicies adds policies to a trench file.
func withPolicies(trench, policies string) string {
	return strings.Replace(trench, "streams:", policies+"streams:", 1)
}

// Each kind of gateway receives the attributes of the policy and no other, by the state of the VIP.
// An edit is one UPDATE for each VIP that it changes, and resets no session.
func TestPolicyOfEachKind(t *testing.T) {
	t.Parallel()
	us := strconv.Itoa(lab.PodAS)
	for _, kind := range kinds {
		for session, as := range map[string]uint32{"eBGP": lab.GatewayAS, "iBGP": lab.PodAS} {
			if session == "iBGP" && kind == lab.KindGoBGP {
				continue // one speaker is enough to see LOCAL_PREF; two are compared
			}
			t.Run(string(kind)+"/"+session, func(t *testing.T) {
				t.Parallel()
				internal := session == "iBGP"
				w := newInterop(t, kind, func(c *lab.GatewayConfig) { c.LocalAS = as })
				usual := trenchWith(t, fmt.Sprintf(", remoteASN: %d", as))
				w.must(w.pod.WriteTrench(withPolicies(usual, policies)))
				w.up(w.target1)
				w.startPod("--drain-time=10m")
				want := func(what string, path int, preference, med string, communities ...string) {
					t.Helper()
					if !internal {
						preference = ""
					}
					w.waitBest(what, func(r lab.Route) bool {
						isPath := internal && len(r.ASPath) == 0 || !internal && len(r.ASPath) == path &&
							!slices.ContainsFunc(r.ASPath, func(as string) bool { return as != us })
						isPreferred := preference == "" || r.LocalPref == preference
						slices.Sort(r.Communities)
						return isVIP(r) && isPath && isPreferred && r.MED == med && slices.Equal(r.Communities, communities) &&
							(r.Bandwidth == bandwidth[kind]) == (what != "draining")
					})
				}
				want("ready", 3, "300", "50", "(64512,1,100)", "(64512,100)")

				admin := "--admin-socket=unix://" + w.pod.FrontendAdmin()
				// The communities and MED 50, as BIRD exports them.
				out, _ := w.run("frontend", "explain", admin, "20.0.0.1")
				for _, attribute := range []string{
					"community 64512:100", "community 64512:1:100", "MED 50", "link bandwidth 10 Mbit/s",
				} {
					if !strings.Contains(out, attribute) {
						t.Errorf("explain lacks %s:\n%s", attribute, out)
					}
				}

				mark := w.routerMark(w.router)
				w.must(w.pod.WriteTrench(withPolicies(usual, strings.Replace(policies, "med: 50,", "med: 60,", 1))))
				want("changed", 3, "300", "60", "(64512,1,100)", "(64512,100)")
				w.wantRouterUpdates(w.router, mark, vipA4, "announced")
				w.wantRouterUpdates(w.router, mark, vipA6, "announced")

				if out, status := w.run("frontend", "drain", "--all", "--force", admin); status != 0 {
					t.Fatalf("frontend drain ended with %d: %s", status, out)
				}
				want("draining", 4, "7", "500", "(64512,666)", "(65535,0)")
			})
		}
	}
}

// Two sites advertise the same VIPs, B with a worse policy: A gets the traffic while it has a ready
// target, B otherwise, and the last resort of A if neither has one. An edit loses no request, and a
// move only those under way.
func TestPolicyOfTwoSites(t *testing.T) {
	t.Parallel()
	f := newDataPlaneFixtureOf(t, 2, 2)
	site := func(target int, policy string) string {
		text := strings.Replace(dataPlaneTrench(target), "drainTime:", "lastResort: depreferred\n    drainTime:", 1)
		return withPolicies(text, "  policies: ["+policy+"]\n")
	}
	f.must(f.Pods[0].WriteTrench(site(1, "")))
	f.must(f.Pods[1].WriteTrench(site(2, "{ready: {prepend: 1}}")))
	for _, pod := range f.Pods {
		f.must(pod.StartLB("--dataplane=nftables"))
		f.must(pod.StartFrontend("--ecmp"))
	}
	f.must(f.WantVia(f.ctx, 1))
	g, err := f.Load(f.ctx, 200, 0, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	take := func() load.Result {
		t.Helper()
		result, err := g.Take(f.ctx)
		f.must(err)
		return result
	}
	want := func(what string, pod int, target string) {
		t.Helper()
		f.must(f.WantVia(f.ctx, pod))
		f.must(g.WaitTargets(f.ctx, target))
		take() // the other site does not know the targets of requests that were under way
		f.must(g.WaitAnswered(f.ctx, 100))
		if err := g.Now().Lost(); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	want("at A", 1, "target-1")
	take()
	f.must(f.Pods[0].WriteTrench(site(1, "{ready: {med: 10}}")))
	f.must(lab.Eventually(f.ctx, 10*time.Millisecond, func() error {
		routes, err := f.gateway.Routes(f.ctx)
		if route := routes[netip.MustParsePrefix("20.0.0.1/32")]; err == nil && route.MED != "10" {
			err = fmt.Errorf("the best route is %+v", route)
		}
		return err
	}))
	f.must(g.WaitAnswered(f.ctx, 100))
	if err := g.Now().Lost(); err != nil {
		t.Errorf("an edit: %v", err)
	}
	f.must(f.Targets[0].Unhealthy())
	want("after the targets of A failed", 2, "target-2")
	f.must(f.Targets[1].Unhealthy())
	want("both sites dark", 1, "target-1")
	f.must(f.Targets[1].Start())
	want("B is back", 2, "target-2")
}
