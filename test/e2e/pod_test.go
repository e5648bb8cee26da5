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

// After SIGTERM of both processes of a pod in the same millisecond the order is always the same:
// de-prefer, withdraw, and then the end of the LB.
func TestPodTermOrder(t *testing.T) {
	t.Parallel()
	const pods, rounds = 10, 5 // 50 stops, some concurrently
	for n := range pods {
		t.Run(fmt.Sprintf("pod %d", n), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t)
			f.up(f.target1, f.target2)
			for round := range rounds {
				f.podTermRound(round)
				if t.Failed() {
					t.Fatalf("in round %d", round)
				}
			}
		})
	}
}

// podTermRound starts a pod, sends SIGTERM to both processes in the same millisecond and checks
// the order of the following events.
func (f *fixture) podTermRound(round int) {
	f.t.Helper()
	vips := []string{vipA4, vipA6, vipB4, vipB6}
	mark := f.mark()
	f.must(f.pod.StartLB(longDrain))
	f.must(f.pod.StartFrontend(visibleDrain))
	f.wantRoutes(vips...)

	both := []*lab.Process{f.pod.LB, f.pod.Frontend}
	if round%2 == 1 { // either may receive it first
		slices.Reverse(both)
	}
	for _, p := range both {
		f.must(p.Signal(syscall.SIGTERM))
	}
	f.wantExit(f.pod.LB, 0)
	f.wantExit(f.pod.Frontend, 0)
	// The LB stopped because it was notified, not because of its timeout.
	if notified := strings.Count(f.pod.LB.Output(), "every VIP is withdrawn; stopping"); notified != round+1 {
		f.t.Errorf("the LB was notified in %d of %d rounds", notified, round+1)
	}
	for _, vip := range vips {
		f.wantUpdates(mark, vip, announced, depreferred, withdrawn)
		if last := f.waitUpdate(mark, vip, withdrawn); !last.At.Before(f.pod.LB.Ended()) {
			f.t.Errorf("the LB ended at %v, before %v", f.pod.LB.Ended(), last)
		}
	}
}

// 1 000 VIPs are advertised, withdrawn with the LB and advertised again; a change of one causes no
// updates of the remaining VIPs.
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

	f := newFixture(t)
	trench := usualTrench()
	a, b := fmt.Sprintf(`[%s, "%s"]`, vipA4, vipA6), fmt.Sprintf(`[%s, "%s"]`, vipB4, vipB6)
	trench = strings.Replace(trench, fmt.Sprintf(`[%s, "%s", %s, "%s"]`, vipA4, vipA6, vipB4, vipB6), quoted(all), 1)
	trench = strings.Replace(trench, a, quoted(first), 1)
	trench = strings.Replace(trench, b, quoted(last), 1)
	f.must(f.pod.WriteTrench(trench))
	f.up(f.target1)
	f.startPod("--settle=1s")
	f.wantRoutes(first...)
	mark := f.mark()
	f.up(f.target2)
	f.wantRoutes(all...)
	f.down(f.target2)
	f.wantRoutes(first...)
	if trace := f.trace()[mark:]; len(trace) != 2*len(last) {
		t.Errorf("the gateway received %d times of prefixes while %v came and went", len(trace), last)
	}

	mark = f.mark()
	f.must(f.pod.LB.Kill())
	f.wantRoutes()
	f.must(f.pod.StartLB(visibleDrain))
	f.wantRoutes(first...)
	for _, h := range [][]string{{first[0], last[0]}, {first[len(first)-1], last[1]}} {
		f.wantUpdates(mark, h[0], withdrawn, announced)
		f.wantNoUpdates(mark, h[1])
	}

	mark = f.mark()
	// BIRD before 2.14 reads a long UPDATE in pieces and sleeps in between: polling keeps the
	// gateway's BIRD awake, as the frontend does with the pod's BIRD.
	watcher, err := f.gateway.WatchRoutes(t.Context(), 20*time.Millisecond)
	f.must(err)
	f.stop(f.pod.LB)
	f.wantRoutes()
	f.must(watcher.Close())
	ended := f.pod.LB.Ended()
	for _, h := range f.trace()[mark:] {
		if !h.At.Before(ended) {
			t.Fatalf("the LB ended at %v, before %v", ended, h)
		}
	}
	f.wantUpdates(mark, first[0], depreferred, withdrawn)
	f.waitLog(f.pod.LB, "every VIP is withdrawn; stopping")
}
