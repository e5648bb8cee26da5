package e2e

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
	"github.com/vipgate/vipgate/test/lab"
	"github.com/vipgate/vipgate/test/load"
)

// crowdedTrench is the usual trench file with more IPv4 VIPs of target 1, up to total VIPs.
func crowdedTrench(total int) string {
	var more strings.Builder
	for i := range total - 4 {
		fmt.Fprintf(&more, ", 20.%d.%d.%d/32", 1+i/62500, i/250%250, i%250+1)
	}
	text := strings.Replace(usualTrench(), `"`+vipB6+`"]`, `"`+vipB6+`"`+more.String()+"]", 1)
	return strings.Replace(text, vipA4+`, "`+vipA6+`"]`+"\n    check", vipA4+`, "`+vipA6+`"`+more.String()+"]\n    check",
		1)
}

// A trench file with the maximum number of VIPs is applied, and one more VIP is refused with the
// limit's name. The initial VIPs stay advertised while VIPs are added and removed.
//
// The test runs alone, with a long lease: it tests whether the VIPs are installed and removed, and
// not whether a starved machine decides about 50 000 VIPs within a lease.
func TestVIPLimit(t *testing.T) {
	f := newFixture(t)
	f.up(f.target1, f.target2)
	f.must(f.pod.StartLB("--lease=30s"))
	f.must(f.pod.StartFrontend())
	few := []string{vipA4, vipA6, vipB4, vipB6}
	f.wantRoutes(few...)
	mark := f.mark()

	f.must(f.pod.WriteTrench(crowdedTrench(trench.MaxVIPs + 1)))
	refusal := fmt.Sprintf("attractor.vips: has %d items: write %d at most", trench.MaxVIPs+1, trench.MaxVIPs)
	f.waitLog(f.pod.Frontend, refusal)
	f.waitLog(f.pod.LB, refusal)

	begin := time.Now()
	f.must(f.pod.WriteTrench(crowdedTrench(trench.MaxVIPs)))
	f.waitFor(func() error {
		out, err := f.gateway.Command(t.Context(), "show route count")
		const defaults = 2
		if err == nil && !strings.Contains(out, fmt.Sprintf("Total: %d of", trench.MaxVIPs+defaults)) {
			err = fmt.Errorf("the gateway has %s", out)
		}
		return err
	})
	t.Logf("%d VIPs at the gateway after %v", trench.MaxVIPs, time.Since(begin))

	begin = time.Now()
	f.must(f.pod.WriteTrench("maxRemoval: 100\n" + usualTrench()))
	f.wantRoutes(few...)
	t.Logf("four VIPs after %v", time.Since(begin))
	for _, vip := range few {
		// BIRD announces a route again, unchanged, after a reload of its filters.
		if got := changes(f.updates(mark, vip)); slices.ContainsFunc(got,
			func(s string) bool { return s != announced }) {
			t.Errorf("the gateway received updates of %s %v", vip, got)
		}
	}
	f.waitFor(func() error {
		if set, err := f.Pod.Run(t.Context(), "nft", "list", "set", "inet", "vipgate", "vip4"); err != nil ||
			strings.Count(set, ",") != 1 {
			return fmt.Errorf("set vip4 has more than two VIPs (%v)", err)
		}
		return nil
	})
}

// VIPs beyond the capacity of a data plane map are refused by name. The initial VIPs are served
// throughout, also after a restart.
func TestVIPsBeyondTheDataPlane(t *testing.T) {
	t.Parallel()
	const holds, surplus = 16384, 3
	f := newDataPlaneFixture(t)
	f.start()
	var more strings.Builder
	for i := range holds + surplus - 1 { // they sort before the initial VIP
		fmt.Fprintf(&more, ", 19.%d.%d.%d/32", i/62500, i/250%250, i%250+1)
	}
	few := viaAddress(dataPlaneTrench(1, 2)) // targets do not have so many VIPs
	f.must(f.pod.WriteTrench(strings.ReplaceAll(few, `::1/128"]`, `::1/128"`+more.String()+"]")))
	counted := func() {
		t.Helper()
		f.must(lab.Eventually(f.ctx, 100*time.Millisecond, func() error {
			out, err := f.lb("status")
			if want := fmt.Sprintf("%d of %d VIPs ready; the frontend advertises %[1]d", holds+1,
				holds+surplus+1); err == nil && !strings.Contains(out, want) {
				out, _, _ = strings.Cut(out, "VIP ")
				err = fmt.Errorf("want %q:\n%s", want, out)
			}
			return err
		}))
		out, err := f.lb("status")
		f.must(err)
		if want := fmt.Sprintf("vip4 holds %d VIPs of one address, and streams have %d", holds,
			holds+surplus); strings.Count(out, want) < surplus {
			t.Errorf("%q is not the reason of %d VIPs", want, surplus)
		}
		if kept := regexp.MustCompile(`(?m)^20\.0\.0\.1/32 +ready`); !kept.MatchString(out) {
			t.Error("20.0.0.1/32 is not ready")
		}
	}
	counted()
	f.must(f.pod.LB.Kill())
	f.must(f.pod.StartLB("--dataplane=nftables"))
	counted()
	f.must(f.pod.WriteTrench("maxRemoval: 100\n" + few))
	f.waitOutput("2 of 2 VIPs ready; the frontend advertises 2", "status")
	g, err := f.Load(f.ctx, 50, 4, load.Config{})
	f.must(err)
	defer g.Stop(f.ctx)
	f.must(errors.Join(g.WaitFlows(f.ctx), g.WaitTargets(f.ctx, "target-1", "target-2")))
}
