package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// newOutageFixture creates a trench with 12 target addresses, a few more than the detection of an
// outage needs. The failures of one outage fall into one interval and timeout, which are long
// enough for a busy machine.
func newOutageFixture(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t)
	trench := strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 400ms, timeout: 400ms")
	for i := 3; i <= 10; i++ {
		a := netip.AddrFrom4([4]byte{172, 16, 1, byte(i)})
		f.must(f.Backend.Addr("pod0", a.String()+"/16"))
		f.target2 = append(f.target2, lab.NewTarget(f.Backend, netip.AddrPortFrom(a, checkPort)))
		trench += fmt.Sprintf("      - {name: target-%d, ips: [%s]}\n", i, a)
	}
	f.must(f.pod.WriteTrench(trench))
	f.up(f.target1)
	f.up(f.target2)
	return f
}

// cutTargets disconnects the targets' network, and returns the function that restores it.
func (f *fixture) cutTargets() (restore func()) {
	f.t.Helper()
	ip := func(args ...string) {
		f.t.Helper()
		if out, err := f.Backend.Run(f.t.Context(), "ip", args...); err != nil {
			f.t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("link", "set", "pod0", "down")
	return func() {
		f.t.Helper()
		ip("link", "set", "pod0", "up")
		for _, a := range []string{lab.Target1v6.String(), lab.Target2v6.String()} { // removed with the link
			ip("addr", "replace", a+"/64", "dev", "pod0", "nodad")
		}
	}
}

const (
	outageBegins = "the target network appears to be down"
	outageEnds   = "mass target failure is over"
)

func TestOutageHoldsVIPs(t *testing.T) {
	t.Parallel()
	f := newOutageFixture(t)
	f.must(f.pod.StartLB("--outage-threshold=80%", "--on-outage=hold"))
	f.must(f.pod.StartFrontend())
	all := []string{vipA4, vipA6, vipB4, vipB6}
	f.wantRoutes(all...)
	mark := f.mark()

	restore := f.cutTargets()
	f.waitLog(f.pod.LB, outageBegins)
	f.wantStatus("network suspected", "4 of 4 VIPs ready; the frontend advertises 4")
	restore()
	f.waitLog(f.pod.LB, outageEnds)
	f.wantStatus("enough targets ready", "4 of 4 VIPs ready; the frontend advertises 4")
	for _, vip := range all {
		f.wantNoUpdates(mark, vip)
	}

	// The VIPs of a single dead target are not held.
	f.down(f.target1)
	f.wantRoutes(vipB4, vipB6)
}

func TestOutageWithdrawsVIPsWithReason(t *testing.T) {
	t.Parallel()
	f := newOutageFixture(t)
	f.must(f.pod.StartLB("--outage-threshold=80%"))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	restore := f.cutTargets()
	f.wantRoutes()
	f.wantStatus("network suspected", "0 of 4 VIPs ready")
	f.waitLog(f.pod.LB, outageBegins)
	restore()
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.waitLog(f.pod.LB, outageEnds)
}

// Targets that refuse connections are reachable: hold does not keep their VIPs.
func TestRefusedChecksAreNoOutage(t *testing.T) {
	t.Parallel()
	f := newOutageFixture(t)
	f.must(f.pod.StartLB("--outage-threshold=80%", "--on-outage=hold"))
	f.must(f.pod.StartFrontend())
	f.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	f.down(f.target1)
	f.down(f.target2)
	f.wantRoutes()
	f.wantStatus("0 of 4 VIPs ready", "refused")
	if strings.Contains(f.pod.LB.Output(), outageBegins) {
		t.Error("the lb suspects an outage")
	}
}
