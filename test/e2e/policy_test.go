package e2e

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
)

// policies are the policies of TestPolicyOfEachKind.
const policies = `  policies:
  - vips: ["20.0.0.1/32", "2000::1/128"]
    ready: {communities: ["64512:100", "64512:1:100"], med: 50, prepend: 2, localPreference: 300,
      targetBandwidth: 10}
    draining: {communities: ["64512:666"], med: 500, localPreference: 7}
    unknown: {communities: ["64512:777"], prepend: 1}
    backup: {med: 600}
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

// wantOutput waits until a command of the frontend prints each part.
func (f *fixture) wantOutput(command []string, parts ...string) {
	f.t.Helper()
	f.must(lab.Eventually(harness.Context(f.t, waitTimeout), 50*time.Millisecond, func() error {
		out, _ := f.run("frontend", command...)
		for _, part := range parts {
			if !strings.Contains(out, part) {
				return fmt.Errorf("frontend %s lacks %q:\n%s", command[0], part, out)
			}
		}
		return nil
	}))
}

// Each kind of gateway receives from each BIRD the attributes of the policy and no other, by the
// state of the VIP. An edit and a change of the state are one UPDATE for each VIP, and reset no
// session.
func TestPolicyOfEachKind(t *testing.T) {
	t.Parallel()
	for _, kind := range kinds {
		for _, bird := range lab.BIRDs() {
			t.Run(string(kind)+" "+bird, func(t *testing.T) {
				t.Parallel()
				testPolicy(t, kind, bird, lab.GatewayAS)
			})
		}
	}
	// LOCAL_PREF is for iBGP only.
	for kind, newer := range map[lab.Kind]string{lab.KindBIRD: "2.0", lab.KindFRR: "2.17", lab.KindGoBGP: "3.4"} {
		bird := lab.NewerBIRD(newer)
		t.Run(string(kind)+" "+bird+" iBGP", func(t *testing.T) {
			t.Parallel()
			testPolicy(t, kind, bird, lab.PodAS)
		})
	}
}

func testPolicy(t *testing.T, kind lab.Kind, bird string, as uint32) {
	flag, us, internal := podBIRD(t, bird), strconv.Itoa(lab.PodAS), as == lab.PodAS
	w := newInterop(t, kind, func(c *lab.GatewayConfig) { c.LocalAS = as })
	usual := replaceAll(t, trenchWith(t, fmt.Sprintf(", remoteASN: %d", as)),
		"  - name: stream-a", "  - lastResort: depreferred\n    name: stream-a")
	w.must(w.pod.WriteTrench(withPolicies(usual, policies)))
	w.up(w.target1)
	w.must(w.pod.StartLB("--stale-grace=10m"))
	w.must(w.pod.StartFrontend("--drain-time=10m", flag))
	want := func(what string, path int, preference, med string, communities ...string) {
		t.Helper()
		isReady := med == "50" || med == "60"
		w.waitBest(what, func(r lab.Route) bool {
			isPath := internal && len(r.ASPath) == 0 || !internal && len(r.ASPath) == path &&
				!slices.ContainsFunc(r.ASPath, func(as string) bool { return as != us })
			slices.Sort(r.Communities)
			return isVIP(r) && isPath && (!internal || r.LocalPref == preference) && (r.MED == med || r.MED+med == "0") &&
				slices.Equal(r.Communities, communities) && (r.Bandwidth == bandwidth[kind]) == isReady
		})
	}
	ready := []string{"(64512,1,100)", "(64512,100)"}
	want("ready", 3, "300", "50", ready...)

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

	// What BIRD exports, the VIPs of a family together; and the text of the policy.
	path := strings.Repeat(" "+us, 3)
	if internal {
		path = " empty"
	}
	w.wantOutput([]string{"status", admin, "20.0.0.1", "2000::1"},
		"AS path"+path, ", MED 50, community 64512:100, community 64512:1:100", "link bandwidth 10 Mbit/s")
	w.wantOutput([]string{"status", admin, "--output=json"}, `"64512:1:100"`, `"vips": [`)
	const texts = "communities 64512:100 64512:1:100, MED %d, prepend 2, LOCAL_PREF 300, 10 Mbit/s per ready target"
	w.wantOutput([]string{"render", "--trench-file=" + w.pod.TrenchFile(), "--external-interface=" + lab.External},
		"# policy 0 of 2 VIPs (20.0.0.1/32, 2000::1/128)\n#   ready: "+fmt.Sprintf(texts, 50)+"\n#   draining: "+
			"communities 64512:666, MED 500, LOCAL_PREF 7\n")

	mark := w.routerMark(w.router)
	w.must(w.pod.WriteTrench(withPolicies(usual, replaceAll(t, policies, "med: 50,", "med: 60,"))))
	want("changed", 3, "300", "60", ready...)
	w.down(w.target1)
	want("a last resort", 4, "0", "600", "(65535,0)")
	w.up(w.target1)
	want("ready again", 3, "300", "60", ready...)
	w.must(w.pod.LB.Kill())
	want("unknown", 2, "100", "", "(64512,777)")
	w.must(w.pod.StartLB())
	want("known", 3, "300", "60", ready...)
	if out, status := w.run("frontend", "drain", "--all", "--force", admin); status != 0 {
		t.Fatalf("frontend drain ended with %d: %s", status, out)
	}
	want("draining", 4, "7", "500", "(64512,666)", "(65535,0)")
	w.wantOutput([]string{"events", admin}, "policy 0, "+fmt.Sprintf("ready: "+texts, 50),
		fmt.Sprintf("routing policy changed: 2 VIPs (20.0.0.1/32, 2000::1/128) from "+texts+" to "+texts, 50, 60),
		"policy 0, backup: MED 600", "policy 0, unknown: communities 64512:777, prepend 1",
		"policy 0, draining: communities 64512:666, MED 500, LOCAL_PREF 7")
	w.wantOutput([]string{"status", admin}, "community GRACEFUL_SHUTDOWN, community 64512:666")
	series := `vipgate_frontend_vip_policy{family="ipv6",policy="0",state="draining",vip="2000::1/128"}`
	if n := metric(t, w.get(lab.FrontendMetrics, "/metrics"), series); n != 1 {
		t.Errorf("%s is %v", series, n)
	}
	for _, vip := range []string{vipA4, vipA6} {
		trace, err := w.router.Trace()
		w.must(err)
		updates := []string{}
		for _, update := range trace[mark:] {
			if update.Prefix.String() == vip {
				updates = append(updates, fmt.Sprint(update.Withdrawn, update.GracefulShutdown()))
			}
		}
		const no, shutdown = "false false", "false true"
		if want := []string{no, shutdown, no, no, no, shutdown}; !slices.Equal(updates, want) {
			t.Errorf("%s: withdrawn and GRACEFUL_SHUTDOWN of the updates are %q, want %q", vip, updates, want)
		}
	}
}

// The attributes of more than 100 VIPs are a row for each gateway in the wide status, and not in
// the usual one; those of a named VIP always show.
func TestStatusOfManyPolicies(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var more []string
	for i := range 120 {
		more = append(more, fmt.Sprintf("20.0.9.%d/32", i))
	}
	usual := strings.ReplaceAll(usualTrench(), "["+vipA4, "["+strings.Join(append(more, vipA4), ", "))
	f.must(f.pod.WriteTrench(withPolicies(usual,
		"  policies: [{ready: {communities: ['64512:1']}}, {vips: [20.0.9.7/32], ready: {communities: ['64512:2']}}]\n")))
	f.up(f.target1, f.target2)
	f.startPod()
	f.wantRoutes(append(more, every()...)...)
	admin := "--admin-socket=unix://" + f.pod.FrontendAdmin()
	f.wantOutput([]string{"status", admin, "-o", "wide"},
		fmt.Sprintf("%d VIPs: 20.0.0.1/32,20.0.0.2/32,20.0.9.0/32 +118", len(more)+1), ", community 64512:1\n",
		"20.0.9.7/32  ", ", community 64512:2\n")
	f.wantOutput([]string{"status", admin, "20.0.9.7"}, "SENT TO", ", community 64512:2\n")
	if out, _ := f.run("frontend", "status", admin); strings.Contains(out, "SENT TO") {
		t.Errorf("the usual status of %d VIPs has attributes:\n%s", len(more)+2, out)
	}
}
