package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// newOutageWorld is a trench with 12 addresses of targets, as many as an outage needs
// and some more. The failures of one outage fall into one interval and timeout: long
// enough for a busy machine.
func newOutageWorld(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	trench := strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 400ms, timeout: 400ms")
	for i := 3; i <= 10; i++ {
		a := netip.AddrFrom4([4]byte{172, 16, 1, byte(i)})
		w.must(w.Backend.Addr("pod0", a.String()+"/16"))
		w.target2 = append(w.target2, lab.NewTarget(w.Backend, netip.AddrPortFrom(a, checkPort)))
		trench += fmt.Sprintf("      - {name: target-%d, ips: [%s]}\n", i, a)
	}
	w.must(w.pod.WriteTrench(trench))
	w.up(w.target1)
	w.up(w.target2)
	return w
}

// cutTargets disconnects the targets' network, and returns what restores it.
func (w *world) cutTargets() (restore func()) {
	w.t.Helper()
	ip := func(args ...string) {
		w.t.Helper()
		if out, err := w.Backend.Run(w.t.Context(), "ip", args...); err != nil {
			w.t.Fatalf("ip %v: %v: %s", args, err, out)
		}
	}
	ip("link", "set", "pod0", "down")
	return func() {
		w.t.Helper()
		ip("link", "set", "pod0", "up")
		for _, a := range []string{lab.Target1v6.String(), lab.Target2v6.String()} { // the kernel removed them with the link
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
	w := newOutageWorld(t)
	w.must(w.pod.StartLB("--sudden-loss=80%", "--on-sudden-loss=hold"))
	w.must(w.pod.StartFrontend())
	all := []string{vipA4, vipA6, vipB4, vipB6}
	w.wantRoutes(all...)
	mark := w.mark()

	restore := w.cutTargets()
	w.waitLog(w.pod.LB, outageBegins)
	w.wantStatus("network suspected", "4 of 4 VIPs ready; the frontend advertises 4")
	restore()
	w.waitLog(w.pod.LB, outageEnds)
	w.wantStatus("enough targets ready", "4 of 4 VIPs ready; the frontend advertises 4")
	for _, vip := range all {
		w.wantNothing(mark, vip)
	}

	// A single target that dies is not held.
	w.down(w.target1)
	w.wantRoutes(vipB4, vipB6)
}

func TestOutageWithdrawsVIPsWithReason(t *testing.T) {
	t.Parallel()
	w := newOutageWorld(t)
	w.must(w.pod.StartLB("--sudden-loss=80%"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	restore := w.cutTargets()
	w.wantRoutes()
	w.wantStatus("network suspected", "0 of 4 VIPs ready")
	w.waitLog(w.pod.LB, outageBegins)
	restore()
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.waitLog(w.pod.LB, outageEnds)
}

// Targets that refuse connections are reachable: hold does not keep their VIPs.
func TestRefusingTargetsAreNoOutage(t *testing.T) {
	t.Parallel()
	w := newOutageWorld(t)
	w.must(w.pod.StartLB("--sudden-loss=80%", "--on-sudden-loss=hold"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.down(w.target1)
	w.down(w.target2)
	w.wantRoutes()
	w.wantStatus("0 of 4 VIPs ready", "refused")
	if strings.Contains(w.pod.LB.Output(), outageBegins) {
		t.Error("the lb suspects an outage")
	}
}
