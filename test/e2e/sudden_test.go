package e2e

import (
	"strings"
	"testing"

	"github.com/vipgate/vipgate/test/lab"
)

// cutTargets takes the wire to the targets away, and returns what brings it back.
func (w *world) cutTargets() (mend func()) {
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
		for _, a := range []string{lab.Target1v6.String(), lab.Target2v6.String()} { // they went with the link
			ip("addr", "replace", a+"/64", "dev", "pod0", "nodad")
		}
	}
}

// Issue 4, "Hold-down against mass events": all targets fall at once and nothing on
// their network answers. With hold the VIPs stay, and stay when the network returns.
func TestTargetsThatFellWithTheirNetworkAreHeld(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// The falls of one loss are told within an interval and a timeout: long enough
	// for a machine that is busy.
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 400ms, timeout: 400ms")))
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB("--sudden-loss=80%", "--on-sudden-loss=hold"))
	w.must(w.pod.StartFrontend())
	all := []string{vipA4, vipA6, vipB4, vipB6}
	w.wantRoutes(all...)
	mark := w.mark()

	mend := w.cutTargets()
	w.waitLog(w.pod.LB, "their network seems to be gone") // before, falls are only pending
	w.wantStatus("network suspected", "4 of 4 VIPs ready; the frontend advertises 4")
	mend()
	w.waitLog(w.pod.LB, "no longer suspected")
	w.wantStatus("enough targets ready", "4 of 4 VIPs ready; the frontend advertises 4")
	for _, vip := range all {
		w.wantNothing(mark, vip)
	}

	// One target that dies while the network is there is not held.
	w.down(w.target1)
	w.wantRoutes(vipB4, vipB6)
}

// Without hold the VIPs go as always, and say why.
func TestTargetsThatFellWithTheirNetworkAreWithdrawnWithTheReason(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	// The falls of one loss are told within an interval and a timeout: long enough
	// for a machine that is busy.
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 400ms, timeout: 400ms")))
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB("--sudden-loss=80%"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	mend := w.cutTargets()
	w.wantRoutes()
	w.wantStatus("network suspected", "0 of 4 VIPs ready")
	w.waitLog(w.pod.LB, "their network seems to be gone")
	mend()
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	w.waitLog(w.pod.LB, "no longer suspected")
}

// All targets fall at once without a word, and their hosts are there: hold does not
// keep what only looks like a dead network.
func TestTargetsThatFellWithoutTheirNetworkAreNotHeld(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.must(w.pod.WriteTrench(strings.ReplaceAll(usualTrench(), "interval: 100ms, timeout: 100ms", "interval: 400ms, timeout: 400ms")))
	w.up(w.target1)
	w.up(w.target2)
	w.must(w.pod.StartLB("--sudden-loss=80%", "--on-sudden-loss=hold"))
	w.must(w.pod.StartFrontend())
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	nft := func(command string) {
		t.Helper()
		_, err := w.Backend.Run(t.Context(), "nft", command)
		w.must(err)
	}
	nft("add table inet mute; add chain inet mute in { type filter hook input priority 0; }; add rule inet mute in meta l4proto tcp drop")
	w.wantRoutes()
	w.wantStatus("0 of 4 VIPs ready", "no answer")
	nft("delete table inet mute")
	w.wantRoutes(vipA4, vipA6, vipB4, vipB6)
	if strings.Contains(w.pod.LB.Output(), "their network seems to be gone") {
		t.Error("the network was suspected")
	}
}
