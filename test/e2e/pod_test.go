package e2e

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vipgate/vipgate/test/lab"
)

// Design section 9: "whole pod SIGTERM (both in the same ms) | the same order, 50 times out of 50": de-prefer,
// withdraw, and only then the LB goes.
func TestPodTermKeepsTheOrderEveryTime(t *testing.T) {
	const worlds, rounds = 5, 10 // 50 times, some of them side by side
	for n := range worlds {
		t.Run(fmt.Sprintf("world %d", n), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.up(w.target1)
			w.up(w.target2)
			for round := range rounds {
				w.podTermRound(round)
				if t.Failed() {
					t.Fatalf("in round %d", round)
				}
			}
		})
	}
}

// podTermRound starts a pod, ends both processes in the same millisecond and
// judges the order of what followed.
func (w *world) podTermRound(round int) {
	w.t.Helper()
	vips := []string{vipA4, vipA6, vipB4, vipB6}
	mark := w.mark()
	w.must(w.pod.StartLB(quick))
	w.must(w.pod.StartFrontend(quick, "--settle=500ms"))
	w.wantRoutes(vips...)

	both := []*lab.Process{w.pod.LB, w.pod.Frontend}
	if round%2 == 1 { // either may be the first by a hair
		slices.Reverse(both)
	}
	for _, p := range both {
		w.must(p.Signal(syscall.SIGTERM))
	}
	w.wantExit(w.pod.LB, 0)
	w.wantExit(w.pod.Frontend, 0)
	// The LB went because it was told, not because it lost its patience.
	if told := strings.Count(w.pod.LB.Output(), "every VIP is withdrawn; stopping"); told != round+1 {
		w.t.Errorf("the LB was told in %d of %d rounds", told, round+1)
	}
	for _, vip := range vips {
		w.wantStory(mark, vip, announced, depreferred, withdrawn)
		if last := w.waitHeard(mark, vip, withdrawn); !last.At.Before(w.pod.LB.Ended()) {
			w.t.Errorf("the LB ended at %v, before %v", w.pod.LB.Ended(), last)
		}
	}
}

// Issue 2: "1 000 VIPs". They come, go with the LB and return; one that changes among them costs the others nothing.
func TestThousandVIPs(t *testing.T) {
	t.Parallel()
	const each = 500 // of a family; the last of each family is served by target 2
	var many4, many6 []string
	for i := range each {
		many4 = append(many4, fmt.Sprintf("20.0.%d.%d/32", i/250, i%250+1))
		many6 = append(many6, fmt.Sprintf("2000::%x/128", i+1))
	}
	first := append(slices.Clone(many4[:each-1]), many6[:each-1]...)
	last := []string{many4[each-1], many6[each-1]}
	all := append(slices.Clone(first), last...)
	quoted := func(vips []string) string { return `["` + strings.Join(vips, `", "`) + `"]` }

	w := newWorld(t)
	trench := usualTrench()
	a, b := fmt.Sprintf(`[%s, "%s"]`, vipA4, vipA6), fmt.Sprintf(`[%s, "%s"]`, vipB4, vipB6)
	trench = strings.Replace(trench, fmt.Sprintf(`[%s, "%s", %s, "%s"]`, vipA4, vipA6, vipB4, vipB6), quoted(all), 1)
	trench = strings.Replace(trench, a, quoted(first), 1)
	trench = strings.Replace(trench, b, quoted(last), 1)
	w.must(w.pod.WriteTrench(trench))
	w.up(w.target1)
	w.must(w.pod.StartLB())
	w.must(w.pod.StartFrontend("--settle=1s"))
	w.wantRoutes(first...)
	mark := w.mark()
	w.up(w.target2)
	w.wantRoutes(all...)
	w.down(w.target2)
	w.wantRoutes(first...)
	if trace := w.trace()[mark:]; len(trace) != 2*len(last) {
		t.Errorf("the gateway heard %d times of prefixes while %v came and went", len(trace), last)
	}

	mark = w.mark()
	w.must(w.pod.LB.Kill())
	w.wantRoutes()
	w.must(w.pod.StartLB(quick))
	w.wantRoutes(first...)
	for _, h := range [][]string{{first[0], last[0]}, {first[len(first)-1], last[1]}} {
		w.wantStory(mark, h[0], withdrawn, announced)
		w.wantNothing(mark, h[1])
	}

	mark = w.mark()
	// A BIRD before 2.14 reads a long UPDATE in pieces and sleeps in between:
	// the gateway's is kept awake, as the product does with its own.
	witness, err := w.gateway.WatchRoutes(t.Context(), 20*time.Millisecond)
	w.must(err)
	w.must(w.pod.LB.Signal(syscall.SIGTERM))
	w.wantExit(w.pod.LB, 0)
	w.wantRoutes()
	w.must(witness.Close())
	ended := w.pod.LB.Ended()
	for _, h := range w.trace()[mark:] {
		if !h.At.Before(ended) {
			t.Fatalf("the LB ended at %v, before %v", ended, h)
		}
	}
	w.wantStory(mark, first[0], depreferred, withdrawn)
	w.waitLog(w.pod.LB, "every VIP is withdrawn; stopping")
}
