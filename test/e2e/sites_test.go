package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/harness"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// podBIRD returns the flag of the frontend for a version of BIRD.
func podBIRD(t *testing.T, version string) string {
	t.Helper()
	executable, err := lab.BIRDOf(version)
	harness.Must(t, err)
	if executable == "" {
		lab.Skip(t, "BIRD "+version+" (test/setup/birds.sh)")
	}
	return "--bird-executable=" + executable
}

// gatewaysBlock returns the block of docs/gateways.md with an info string.
func gatewaysBlock(t *testing.T, info string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/gateways.md")
	harness.Must(t, err)
	block := regexp.MustCompile("(?m)^```" + info + "\n((?s:.*?))^```$").FindSubmatch(text)
	if block == nil {
		t.Fatalf("docs/gateways.md has no block %s", info)
	}
	return string(block[1])
}

// replaceAll replaces each old text of pairs, which must exist.
func replaceAll(t *testing.T, text string, pairs ...string) string {
	t.Helper()
	for pair := range slices.Chunk(pairs, 2) {
		if !strings.Contains(text, pair[0]) {
			t.Fatalf("%q is not in\n%s", pair[0], text)
		}
		text = strings.ReplaceAll(text, pair[0], pair[1])
	}
	return text
}

// sitesFixture is a router of any kind between clients and two sites, each of which has a pod and a
// target. Without policies the first pod is the best.
type sitesFixture struct {
	*dataPlaneFixture
	router *interop
	load   *load.Generator

	mu       sync.Mutex
	lastLost time.Time // when the last request that failed was sent
}

// file returns the trench file of a site: a file of docs/gateways.md with gateways and a target.
func (f *sitesFixture) file(text string, target int) string {
	f.t.Helper()
	_, gateways, _ := strings.Cut(dataPlaneTrench(target), "  gateways:")
	gateways, streams, _ := strings.Cut(gateways, "streams:")
	streams = replaceAll(f.t, streams, "    drainTime:", "    lastResort: depreferred\n    drainTime:")
	return replaceAll(f.t, text, "  policies:", "  gateways:"+gateways+"  policies:") + "streams:" + streams
}

// routerText returns what gateway-config prints for the file, with the drain community of
// docs/gateways.md.
func (f *sitesFixture) routerText(kind lab.Kind) string {
	f.t.Helper()
	name := strings.ToLower(string(kind))
	args := []string{"gateway-config", name, "gateway-a4", "gateway-a6"}
	for n := range f.Pods {
		for _, address := range lab.PodExternal(n + 1) {
			args = append(args, address.String())
		}
	}
	text, err := f.pod.Run(f.ctx, "frontend", append(args, "--trench-file="+f.pod.TrenchFile())...)
	f.must(err)
	drain := gatewaysBlock(f.t, "text drain="+name)
	switch kind {
	case lab.KindBIRD:
		return replaceAll(f.t, text, "\t\timport where net ~ VIPS4;\n", drain,
			"\t\timport where net ~ VIPS6;\n", replaceAll(f.t, drain, "VIPS4", "VIPS6"))
	case lab.KindFRR:
		text += drain
		for _, neighbor := range []string{"169.254.100.2", "fd00:100::1", "fd00:100::2"} {
			family, address := "ipv4 unicast", lab.PodExternal4.String()
			if strings.Contains(neighbor, ":") {
				family = "ipv6 unicast"
			}
			text += replaceAll(f.t, drain[strings.Index(drain, " address-family"):], "ipv4 unicast", family, address, neighbor)
		}
		return text
	default:
		return replaceAll(f.t, text, `["vips"]`, `["drain", "vips"]`) + drain
	}
}

// newSitesFixture creates two sites with versions of BIRD; the second one is A.
func newSitesFixture(t *testing.T, kind lab.Kind, siteA, siteB string) *sitesFixture {
	t.Helper()
	need(t, kind)
	birds := []string{podBIRD(t, siteB), podBIRD(t, siteA)}
	f := &sitesFixture{dataPlaneFixture: newDataPlaneFixtureOf(t, 2, 2)}
	f.must(f.gateway.Process.Kill())
	c := f.GatewayConfig()
	c.Name, c.Text = "router-a", f.routerText(kind)
	inner := &fixture{t: t, Lab: f.Lab, pod: f.pod, gateway: f.gateway}
	f.router = &interop{inner, inner.startRouter(kind, f.Gateway, c)}
	if gobgp, ok := f.router.router.(*lab.GoBGP); ok {
		ctx, cancel := context.WithCancel(f.ctx)
		wait, err := gobgp.InstallRoutes(ctx)
		f.must(err)
		t.Cleanup(func() { cancel(); harness.Check(t, wait()) })
	}
	example := gatewaysBlock(t, "yaml sites")
	ready := regexp.MustCompile(`ready: .*\n +`).FindString(example)
	f.must(f.Pods[0].WriteTrench(f.file(example, 1)))
	f.must(f.Pods[1].WriteTrench(f.file(replaceAll(t, example, ready, ""), 2)))
	for i, pod := range f.Pods {
		f.must(pod.StartLB("--dataplane=nftables"))
		f.must(pod.StartFrontend("--ecmp", "--drain-time=10m", "--require-route", birds[i]))
		f.must(f.WantVia(f.ctx, i+1)) // the second pod, which is A, is better
	}
	return f
}

// want waits until the router sends to a pod, whose target answers. No request may be lost after
// the move.
func (f *sitesFixture) want(what string, pod int) {
	f.t.Helper()
	f.must(f.WantVia(f.ctx, pod))
	f.must(f.load.WaitTargets(f.ctx, fmt.Sprintf("target-%d", pod)))
	f.take() // requests that were under way
	f.wantNoLoss(what)
}

// take ends a phase of the load.
func (f *sitesFixture) take() load.Result {
	f.t.Helper()
	result, err := f.load.Take(f.ctx)
	f.must(err)
	return result
}

// wantNoLoss sends requests, of which none may be lost.
func (f *sitesFixture) wantNoLoss(what string) {
	f.t.Helper()
	f.must(f.load.WaitAnswered(f.ctx, 60))
	if err := f.take().Lost(); err != nil {
		f.t.Errorf("%s: %v", what, err)
	}
}

// edit writes the trench file of a pod. Each VIP gets one UPDATE, and no request is lost.
func (f *sitesFixture) edit(what string, pod int, text string) {
	f.t.Helper()
	mark := f.router.routerMark(f.router.router)
	f.must(f.Pods[pod-1].WriteTrench(text))
	for _, vip := range []string{vipA4, vipA6} {
		f.router.wantRouterUpdates(f.router.router, mark, vip, announced)
	}
	f.wantNoLoss(what)
	for _, vip := range []string{vipA4, vipA6} {
		f.router.wantRouterUpdates(f.router.router, mark, vip, announced)
	}
}

// Two sites advertise the same VIPs, B with a worse policy: A gets the traffic while it has a ready
// target, B within a second otherwise, and the last resort of A if neither has one. An edit is one
// UPDATE for each VIP and loses no request. The router honors the drain community.
func TestTwoSites(t *testing.T) {
	t.Parallel()
	const siteA, siteB = 2, 1 // without policies the router prefers the first pod
	for _, test := range []struct {
		kind         lab.Kind
		birdA, birdB string
	}{
		{lab.KindBIRD, "2.0", lab.NewerBIRD("3.4")},
		{lab.KindFRR, lab.NewerBIRD("3.4"), lab.NewerBIRD("2.17")},
		{lab.KindGoBGP, lab.NewerBIRD("2.17"), "2.0"},
	} {
		t.Run(string(test.kind)+" "+test.birdA+" "+test.birdB, func(t *testing.T) {
			t.Parallel()
			f := newSitesFixture(t, test.kind, test.birdA, test.birdB)
			var err error
			f.load, err = f.Load(f.ctx, 200, 0, load.Config{Observe: func(o load.Outcome) {
				f.mu.Lock()
				defer f.mu.Unlock()
				if o.Err != nil && o.Sent.After(f.lastLost) {
					f.lastLost = o.Sent
				}
			}})
			f.must(err)
			defer f.load.Stop(f.ctx)
			f.want("at A", siteA)
			mark := f.router.routerMark(f.router.router)
			backup := gatewaysBlock(t, "yaml backup")
			f.edit("an edit of B", siteB, f.file(backup, 1))
			f.edit("an edit of A", siteA, f.file(replaceAll(t, gatewaysBlock(t, "yaml sites"), "prepend: 1, ", ""), 2))

			lost := time.Now()
			f.must(f.Targets[siteA-1].Abort())
			f.must(f.load.WaitTargets(f.ctx, "target-1"))
			f.must(f.WantVia(f.ctx, siteB))
			f.must(f.load.WaitAnswered(f.ctx, 60))
			result := f.take()
			f.mu.Lock()
			outage := f.lastLost.Sub(lost)
			f.mu.Unlock()
			t.Logf("the targets of A end: %d of %d requests lost, the last one after %v; answers %v", result.Failed,
				result.Sent, outage.Round(time.Millisecond), result.ByTarget)
			f.wantNoLoss("at B")

			f.must(f.Targets[siteA-1].Start())
			f.want("A is back", siteA)
			f.must(f.Targets[siteA-1].Unhealthy())
			f.want("A is dark", siteB)
			f.must(f.Targets[siteB-1].Unhealthy())
			f.want("both sites are dark", siteA)
			f.must(f.Targets[siteB-1].Start())
			f.want("B is back", siteB)
			f.must(f.Targets[siteA-1].Start())
			f.want("both are back", siteA)

			f.edit("a longer path", siteB, f.file(replaceAll(t, backup, "prepend: 2", "prepend: 9"), 1))
			admin := "--admin-socket=unix://" + f.Pods[siteA-1].FrontendAdmin()
			_, err = f.Pods[siteA-1].Run(f.ctx, "frontend", "drain", "--all", "--force", admin)
			f.must(err)
			f.want("A is drained", siteB)
			if frr, ok := f.router.router.(*lab.FRR); ok { // over eBGP it honors GRACEFUL_SHUTDOWN as well
				out, err := frr.Command(f.ctx, "show route-map PODS")
				f.must(err)
				if !regexp.MustCompile("sequence 10 Invoked [1-9]").MatchString(out) {
					t.Errorf("the VIPs have no drain community:\n%s", out)
				}
			}
			_, err = f.Pods[siteA-1].Run(f.ctx, "frontend", "undrain", admin)
			f.must(err)
			f.want("A is not drained", siteA)
			for _, vip := range []string{vipA4, vipA6} {
				if got := f.router.routerUpdates(f.router.router, mark, vip); slices.Contains(got, withdrawn) {
					t.Errorf("%s was withdrawn: %v", vip, got)
				}
			}
		})
	}
}
