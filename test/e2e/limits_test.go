package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vipgate/vipgate/pkg/trench"
)

// crowdedTrench is the usual trench file with more IPv4 VIPs of target 1, total of all.
func crowdedTrench(total int) string {
	var more strings.Builder
	for i := range total - 4 {
		fmt.Fprintf(&more, ", 20.%d.%d.%d/32", 1+i/62500, i/250%250, i%250+1)
	}
	text := strings.Replace(usualTrench(), `"`+vipB6+`"]`, `"`+vipB6+`"`+more.String()+"]", 1)
	return strings.Replace(text, vipA4+`, "`+vipA6+`"]`+"\n    check", vipA4+`, "`+vipA6+`"`+more.String()+"]\n    check", 1)
}

// Issue 10, item 8: the most VIPs that a trench file may have load, and one more is refused with the limit's name. The
// VIPs from before stay advertised all the time, and so does the way back.
func TestMostVIPsAndOneMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.up(w.target1)
	w.up(w.target2)
	w.startPod()
	few := []string{vipA4, vipA6, vipB4, vipB6}
	w.wantRoutes(few...)
	mark := w.mark()

	w.must(w.pod.WriteTrench(crowdedTrench(trench.MaxVIPs + 1)))
	refusal := fmt.Sprintf("an attractor has %d at most", trench.MaxVIPs)
	w.waitLog(w.pod.Frontend, refusal)
	w.waitLog(w.pod.LB, refusal)

	begin := time.Now()
	w.must(w.pod.WriteTrench(crowdedTrench(trench.MaxVIPs)))
	w.waitFor(func() error {
		out, err := w.gateway.Command(t.Context(), "show route count")
		const defaults = 2
		if err == nil && !strings.Contains(out, fmt.Sprintf("Total: %d of", trench.MaxVIPs+defaults)) {
			err = fmt.Errorf("the gateway has %s", out)
		}
		return err
	})
	t.Logf("%d VIPs at the gateway after %v", trench.MaxVIPs, time.Since(begin))

	begin = time.Now()
	w.must(w.pod.WriteTrench(usualTrench()))
	w.wantRoutes(few...)
	t.Logf("four VIPs after %v", time.Since(begin))
	for _, vip := range few {
		// BIRD announces a route again, unchanged, after a reload of its filters.
		if got := story(w.heard(mark, vip)); slices.ContainsFunc(got, func(s string) bool { return s != announced }) {
			t.Errorf("the gateway heard of %s %v", vip, got)
		}
	}
	w.waitFor(func() error {
		if set, err := w.Pod.Run(t.Context(), "nft", "list", "set", "inet", "vipgate", "vip4"); err != nil || strings.Count(set, ",") != 1 {
			return fmt.Errorf("%w: set vip4 has more than two VIPs", err)
		}
		return nil
	})
}
